"""`gemq serve` and `gemq check`: a checkpoint or a submission behind its endpoint, and the endpoint held to the contract."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from gemq import output
from gemq.errors import IntegrityError, Interrupted, UsageError
from gemq.output_paths import require_separate
from gemq.serve.serve import PROFILES


def serve(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_SUBMISSION", help="What quantize or package wrote.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    profile: Annotated[
        str | None, typer.Option(help=f"What vLLM is set for: {', '.join(PROFILES)}, or a tuned profile.json (else single-stream).")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The model's name at the endpoint; else the manifest's, else the directory's.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory in place of what a submission names.")] = None,
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    log: Annotated[Path | None, typer.Option(help="Where the engine's log goes; gemq-serve-PORT.log here if not given.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a start may take.")] = 900.0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't check the checkpoint's seal.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the address as JSON on stdout.")] = False,
) -> None:
    """Start the packaged server on a real vLLM, wait until it answers, and stop it on Ctrl-C."""
    from gemq.serve import server as room

    output.mode.json = output.mode.json or json_
    if profile is not None:
        from gemq.serve.profile import require_profile

        profile = require_profile(profile)
    port = port or room.free_port(host)
    log = log or Path(f"gemq-serve-{port}.log")
    require_separate(log, path, checkpoint, option="--log")
    up = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with room.serving(path, port=port, host=host, profile=profile, name=name, checkpoint=checkpoint, python=python, log=log,
                          timeout=timeout, verify=not no_verify) as server:
            up = True
            data = {"url": f"{server.url}/v1", "model": server.model, "pid": server.pid, "log": str(log)}
            output.result(data, f"{server.url}/v1 serves {server.model}")
            output.note(f"log: {log}; Ctrl-C stops it")
            while True:
                server.require_alive()
                time.sleep(room.HEALTH_SECONDS)
    except KeyboardInterrupt:
        if not up:
            raise Interrupted("stopped before the server was ready", f"the engine's log is {log}") from None
        output.note("stopped; no process is left")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def check(
    url: Annotated[str, typer.Argument(help="Where it listens, such as http://127.0.0.1:8000.")],
    model: Annotated[str | None, typer.Option(help="The served model's name; the first that is listed if not given.")] = None,
    modality: Annotated[list[str] | None, typer.Option(help="text, image or audio; say it again for more. All three if not given.")] = None,
    vocabulary: Annotated[int | None, typer.Option(min=16, help="Tokens that the model knows, if fewer than Gemma.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the table as JSON on stdout.")] = False,
) -> None:
    """Ask an endpoint for everything that a judge will ask of it. Exits 4 if a point of the contract is not kept."""
    from gemq.serve import contract

    output.mode.json = output.mode.json or json_
    asked = tuple(modality or contract.MODALITIES)
    unknown = [name for name in asked if name not in contract.MODALITIES]
    if unknown:
        raise UsageError(f"--modality {unknown[0]!r} is unknown", f"valid are {', '.join(contract.MODALITIES)}")
    endpoint = contract.Endpoint(url, model, vocabulary=vocabulary)
    with output.progress("asking", len(contract.points(asked)), "points") as advance:
        table = contract.check(endpoint, asked, lambda point: advance(1, point.name))
    broken = [point for point in table if not point.kept]
    output.table(f"{endpoint.model} at {endpoint.url}", ("point", "kept", "seen", "s"),
                 [(point.name, "yes" if point.kept else "NO", point.seen, f"{point.seconds:.1f}") for point in table])
    output.result({"url": endpoint.url, "model": endpoint.model, "ok": not broken, "points": [asdict(point) for point in table]}, "")
    if broken:
        raise IntegrityError(f"{len(broken)} of {len(table)} points are not kept; the first: {broken[0].name} ({broken[0].seen})",
                             "serve it with gemq serve, or see the engine's log")


def register(app: typer.Typer) -> None:
    """Add this room's commands to gemq's."""
    app.command("serve")(serve)
    app.command("check")(check)
