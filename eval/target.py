"""An endpoint to measure: the one at a URL, or one that is started for a checkpoint or a submission and ended with the block."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemq import output
from gemq.config_file import read_complete_config, text_config
from gemq.errors import GemqError, Interrupted, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint, is_url
from gemq.quantize.content import directory_digest, require_unchanged

DYING_SECONDS = 3.0  # a server that stopped answering may need as long to be gone
VOCABULARY, BOS = 32_000, 2  # where nothing tells: few models know fewer tokens; Gemma's BOS


@dataclass(frozen=True)
class Target:
    """What TARGET names: a URL, or a directory with the checkpoint that it serves (None where that is on a hub)."""

    name: str
    directory: Path | None
    checkpoint: Path | None
    dependencies: tuple[str, ...] = ()

    @classmethod
    def parse(cls, name: str, checkpoint: Path | None = None) -> Target:
        """Look at TARGET; raises UsageError where it is neither a URL nor a checkpoint's or submission's directory."""
        if is_url(name):
            return cls(name, None, checkpoint)
        directory = Path(name)
        if not directory.is_dir():
            raise UsageError(f"{name} is neither a directory nor an http(s) URL",
                             "give a checkpoint's or a submission's directory, or http://HOST:PORT of an endpoint")  # fmt: skip
        manifest = _json(directory / "manifest.json")
        found = checkpoint
        if found is None and (directory / "config.json").is_file():
            found = directory
        if found is None and manifest:
            inside = directory / str(manifest.get("model_id", ""))
            found = inside if (inside / "config.json").is_file() else None
        if found is None:
            uri = (_json(directory / "submission.json").get("artifact") or {}).get("uri")
            found = Path(uri) if isinstance(uri, str) and (Path(uri) / "config.json").is_file() else None
        dependencies = manifest.get("dependencies", [])
        return cls(name, directory, found, tuple(map(str, dependencies)) if isinstance(dependencies, list) else ())

    @property
    def directories(self) -> tuple[Path | None, Path | None]:
        """The directories that are read: TARGET itself and the checkpoint, each None where there is none on this machine."""
        return self.directory, self.checkpoint

    @property
    def digest(self) -> str | None:
        """The content digest of the checkpoint that gemq itself serves from here.

        None for a URL, whose server nobody can ask what it serves, and where the checkpoint is on a hub. Raises IntegrityError where its files are
        not what was sealed.
        """
        return None if self.checkpoint is None or self.directory is None else directory_digest(self.checkpoint)

    @property
    def vocabulary(self) -> int:
        """The checkpoint's vocabulary, or a size that few models fall below."""
        found = self._text_config("vocab_size")
        return found if isinstance(found, int) and found > 1 else VOCABULARY

    @property
    def bos(self) -> int:
        """The checkpoint's BOS, or Gemma's."""
        found = self._text_config("bos_token_id")
        return found if type(found) is int else BOS

    def _text_config(self, key: str) -> Any:
        if self.checkpoint is None:
            return None
        config = read_complete_config(self.checkpoint)
        found = text_config(config).get(key)
        return config.get(key) if found is None else found

    @contextlib.contextmanager
    def opened(self, *, python: Path | None = None, log: Path | None = None, environment: dict[str, str] | None = None,
               verify: bool = True) -> Iterator[tuple[Endpoint, int | None]]:  # fmt: skip
        """Yield the endpoint and the server's process id (None where gemq didn't start it)."""
        if self.directory is None:
            yield Endpoint.open(self.name), None
            return
        from gemq.serve.server import serving

        digest = self.digest
        output.note(f"starting {self.name}")
        named = self.checkpoint if self.checkpoint not in (None, self.directory) else None
        with serving(self.directory, checkpoint=named, python=python, log=log, environment=environment, verify=verify) as server:
            try:
                if digest is not None and self.checkpoint is not None:
                    require_unchanged(self.checkpoint, digest)
                yield Endpoint.open(f"{server.url}#{server.model}"), server.pid
            except Interrupted:
                raise
            except StoppedSafely as stopped:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.process.wait(DYING_SECONDS)
                try:
                    server.require_alive()
                except GemqError as ended:  # its log may know why: memory that ran out, say
                    raise StoppedSafely(f"{stopped.message}; {ended.message}", ended.next_step) from stopped
                raise


def _json(path: Path) -> dict[str, Any]:
    """A JSON object, or an empty one where there is none; serve.server names what is wrong with it."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
