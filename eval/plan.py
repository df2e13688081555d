"""What an evaluation will score, opened and checked before the first model is loaded."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemq import atomic, output
from gemq.devices import choose
from gemq.errors import GemqError, Interrupted, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint, is_url
from gemq.eval.finished import FinishedRecords
from gemq.eval.local import LocalCheckpoint, LocalModel, require_dtype
from gemq.eval.recorded import Recorded
from gemq.eval.records import Record, file_sha256, read_records
from gemq.output_paths import require_separate
from gemq.quantize.content import directory_digest, require_unchanged

Judged = LocalCheckpoint | Endpoint | Recorded


def open_target(target: str) -> LocalCheckpoint | Endpoint:
    """The checkpoint directory or the endpoint that `target` names; nothing is loaded yet. Raises UsageError."""
    return Endpoint.open(target) if is_url(target) else LocalCheckpoint.open(target)


def open_reference(reference: str) -> Judged:
    """As `open_target`, or the file of recorded distributions that `reference` names."""
    return Recorded.open(reference) if not is_url(reference) and Path(reference).is_file() else open_target(reference)


def digest_of(side: Judged | None) -> str | None:
    """The content digest of a checkpoint directory, or of the model whose distributions a file holds; None for an endpoint, which can't prove one."""
    if isinstance(side, LocalCheckpoint):
        return directory_digest(side.directory)
    return side.model_digest if isinstance(side, Recorded) else None


def device_name(device: str) -> str:
    """The device that `device` means here, as results name it: cpu, or cuda and the card's name."""
    chosen = torch.device(choose(device))
    return chosen.type if chosen.type == "cpu" else f"{chosen.type} {torch.cuda.get_device_name(chosen)}"


def records_sha256(records: Sequence[Record]) -> str:
    """The SHA-256 of what is scored: every record's token ids and the position of its first target."""
    told = [[record.first_target, record.tokens] for record in records]
    return hashlib.sha256(json.dumps(told, separators=(",", ":")).encode()).hexdigest()


@dataclass
class Plan:
    """What an evaluation will score: both sides opened and named by their digests, the records read and checked, what an earlier run finished.

    `device` is None where both sides are served.
    """

    target: LocalCheckpoint | Endpoint
    reference: Judged | None
    records: list[Record]
    finished: FinishedRecords
    data_sha256: str
    target_digest: str | None
    reference_digest: str | None
    device: str | None

    @classmethod
    def make(
        cls, target: str, data: Path, *, reference: str | None, records: int | None, skip: int, length: int | None, device: str, dtype: str,
        kind: str, output_path: Path | None, tokenizer: Path | None = None, top: int | None = None,
    ) -> Plan:  # fmt: skip
        """Open and check everything that can be wrong before the first model is loaded. Raises UsageError."""
        if output_path is not None:
            atomic.require_absent(output_path)
            if not output_path.parent.is_dir():
                raise UsageError(f"the directory of --output {output_path} does not exist", "create it, or choose another --output")
        require_dtype(dtype, torch.device(choose(device)))
        opened = open_target(target)
        other = None if reference is None else open_reference(reference) if kind == "kl" else open_target(reference)
        sides: list[Judged] = [opened] if other is None else [opened, other]
        if other is not None:
            _require_same_tokens(opened, other)
        if output_path is not None:
            require_separate(output_path, *(side.directory for side in sides if isinstance(side, LocalCheckpoint)), tokenizer)
        if tokenizer is None:
            tokenizer = next((side.directory for side in sides if isinstance(side, LocalCheckpoint)), None)
        vocab_size = next((side.vocab_size for side in sides if side.vocab_size is not None), None)
        found = read_records(data, tokenizer=tokenizer, vocab_size=vocab_size, length=length, records=records, skip=skip)
        for side in sides:
            _require_fit(side, found)
        _warn_of_bos(sides, found)
        digests, data_sha256 = (digest_of(opened), digest_of(other)), file_sha256(data)
        used = device_name(device) if any(isinstance(side, LocalCheckpoint) for side in sides) else None
        key = {
            "kind": kind, "target": _identity(opened, device, dtype), "reference": other and _identity(other, device, dtype),
            "data_sha256": data_sha256, "records_sha256": records_sha256(found), "device": used, "top": top,
        }  # fmt: skip
        return cls(opened, other, found, FinishedRecords(output_path, key), data_sha256, *digests, used)

    def origin(self) -> dict[str, Any]:
        """What a result says of the weights that were measured and of where: target_digest, reference_digest, device."""
        return {"target_digest": self.target_digest, "reference_digest": self.reference_digest, "device": self.device}

    @contextlib.contextmanager
    def loaded(self, side: LocalCheckpoint, device: str, dtype: str) -> Iterator[LocalModel]:
        """Yield the model of `side` in memory; raises IntegrityError where its files are not those of the plan's digest any more."""
        digest = self.target_digest if side is self.target else self.reference_digest
        assert digest is not None
        with side.loaded(device, dtype) as model:
            require_unchanged(side.directory, digest)
            yield model

    @contextlib.contextmanager
    def partial_results(self) -> Iterator[None]:
        """Keep what is finished when the block stops early; a stop says what was kept, Ctrl-C becomes Interrupted."""
        try:
            yield
        except KeyboardInterrupt:
            raise Interrupted(f"interrupted; {self.finished.save()}", "run the same command again to go on") from None
        except StoppedSafely as error:
            raise type(error)(f"{error.message}; {self.finished.save()}", error.next_step) from error
        except (GemqError, OSError):
            self.finished.save()
            raise


def _identity(side: Judged, device: str, dtype: str) -> list[str | None]:
    """What tells a side from every other, wherever its files are: content and dtype, or a server's address and its model's name."""
    if isinstance(side, Endpoint):
        return ["endpoint", side.base_url, side.model]
    if isinstance(side, Recorded):
        return ["recorded", file_sha256(side.path)]
    return ["checkpoint", digest_of(side), str(require_dtype(dtype, torch.device(choose(device)), side.stored_dtype))]


def _require_same_tokens(target: Judged, reference: Judged) -> None:
    """Refuse two models that don't share their vocabulary: their perplexities are over different things."""
    sizes = target.vocab_size, reference.vocab_size
    if None not in sizes and sizes[0] != sizes[1]:
        raise UsageError(f"the vocabularies differ: {target.name} has {sizes[0]} tokens, {reference.name} {sizes[1]}",
                         "compare a checkpoint with the source it was made from")  # fmt: skip
    if not (isinstance(target, LocalCheckpoint) and isinstance(reference, LocalCheckpoint)):
        return
    files = [side.directory / "tokenizer.json" for side in (target, reference)]
    if all(file.is_file() for file in files) and file_sha256(files[0]) != file_sha256(files[1]):
        from tokenizers import Tokenizer

        try:
            ours, theirs = (Tokenizer.from_file(str(file)).get_vocab() for file in files)
        except Exception as error:  # tokenizers raises nothing more specific
            raise UsageError(
                f"the tokenizers of {target.name} and {reference.name} can't be compared: {error}", "copy the tokenizer again"
            ) from error
        if ours != theirs:
            token = min(set(ours.items()) ^ set(theirs.items()), key=lambda pair: (pair[1], pair[0]))
            raise UsageError(f"the tokenizers of {target.name} and {reference.name} differ, first at id {token[1]} ({token[0]!r})",
                             "compare a checkpoint with the source it was made from")  # fmt: skip


def _require_fit(side: Judged, records: list[Record]) -> None:
    # a server also generates one token, since vLLM refuses max_tokens 0
    extra = 1 if isinstance(side, Endpoint) else 0
    for record in records:
        if side.max_length is not None and len(record.tokens) + extra > side.max_length:
            raise UsageError(f"{record.where} has {len(record.tokens)} tokens, and {side.name} takes {side.max_length - extra}",
                             f"give --length {side.max_length - extra}, or serve with a longer window")  # fmt: skip


def _warn_of_bos(sides: list[Judged], records: list[Record]) -> None:
    for side in sides:
        bos = side.bos_token_id if isinstance(side, LocalCheckpoint) else None
        inner = [record for record in records if bos is not None and bos in record.tokens[1:]]
        if inner:
            output.warn(f"{len(inner)} of {len(records)} records hold BOS ({bos}) after their first token, first {inner[0].where}: what follows it "
                        f"is scored as the start of another document")  # fmt: skip
        without = [record for record in records if record.tokens[0] != bos]
        if bos is not None and without:
            output.warn(f"{len(without)} of {len(records)} records do not start with BOS ({bos}), first {without[0].where}: "
                        f"perplexity without it means little")  # fmt: skip
            return
