"""Greedy identity: the ids that an endpoint decodes against plain greedy decoding of the same checkpoint, prompt by prompt.

Against a checkpoint, transformers reads the served ids once: greedy decoding would have made exactly them if and only if each is the
reference's likeliest token after those before it, so the first that isn't is the divergence, and no reference has to decode. Against a
server or captured records, ids are compared with ids.

Two engines round differently. A served id that lies within `tolerance` nats of the reference's best is a near-tie: it is told, and is no
divergence. Between captures of one engine the tolerance is 0: the arena takes no near-ties.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemq import output
from gemq.errors import IntegrityError, UsageError
from gemq.eval.decoded import DecodeRecord, require_same_prompts
from gemq.eval.endpoint import Connection
from gemq.eval.records import Record
from gemq.eval.workloads import Prompt

Judge = Callable[[DecodeRecord], "Comparison"]


@dataclass(frozen=True)
class Comparison:
    """One prompt: whether its ids are the reference's, and if not, where they part first, with which tokens, and by how much.

    `margin_nats` is how far the served token lies behind the reference's there, None where nothing could tell; `near_ties` counts ids that
    are not the reference's best but within the tolerance.
    """

    id: str
    tokens: int
    divergence: int | None = None
    served_token: int | None = None
    reference_token: int | None = None
    margin_nats: float | None = None
    near_ties: int = 0

    @property
    def verdict(self) -> str:
        return "divergent" if self.divergence is not None else "near-ties" if self.near_ties else "identical"


@dataclass(frozen=True)
class GreedyResult:
    """Every prompt's comparison; the shares are of prompts."""

    target: str
    reference: str
    tolerance_nats: float
    per_prompt: tuple[Comparison, ...]
    target_digest: str | None = None  # content digests (quantize.content), None where captured records or a server at a URL were compared
    reference_digest: str | None = None
    data_sha256: str | None = None  # of the prompts' token ids
    dtype: str | None = None  # of the reference, where transformers reads it
    device: str | None = None

    @property
    def divergent(self) -> list[Comparison]:
        return [one for one in self.per_prompt if one.divergence is not None]

    @property
    def identical_share(self) -> float:
        """The share of prompts whose ids are all the reference's best, near-ties not counted."""
        return sum(one.verdict == "identical" for one in self.per_prompt) / len(self.per_prompt)

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types."""
        return {"kind": "greedy", "target": self.target, "reference": self.reference, "tolerance_nats": self.tolerance_nats,
                "prompts": len(self.per_prompt), "divergent": len(self.divergent), "identical_share": self.identical_share,
                "target_digest": self.target_digest, "reference_digest": self.reference_digest, "data_sha256": self.data_sha256,
                "dtype": self.dtype, "device": self.device,
                "tokens": sum(one.tokens for one in self.per_prompt), "near_ties": sum(one.near_ties for one in self.per_prompt),
                "per_prompt": [{**asdict(one), "verdict": one.verdict} for one in self.per_prompt]}  # fmt: skip


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first position at which two id sequences differ, one's end included; None where they are the same."""
    for position, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        if a != b:
            return position
    return None if len(ours) == len(theirs) else min(len(ours), len(theirs))


def require_window(prompts: Sequence[Prompt], tokens: int, limit: int | None, name: str) -> None:
    """Refuse prompts that leave no room for `tokens` more; raises UsageError."""
    for prompt in prompts:
        if limit is not None and len(prompt.tokens or ()) + tokens > limit:
            raise UsageError(f"prompt {prompt.id} has {len(prompt.tokens or ())} tokens, {tokens} more are to be decoded, and {name} takes {limit}",
                             "give fewer --tokens or shorter prompts, or serve with a longer window")  # fmt: skip


def capture(connection: Connection, prompts: Sequence[Prompt], counts: Sequence[int], done: Callable[[DecodeRecord], None]) -> None:
    """Decode each prompt greedily, one at a time, `counts` tokens; `done` is called with each record. Raises as Connection.decode does."""
    with output.progress("decoding", len(prompts), "prompts") as advance:
        for prompt, count in zip(prompts, counts, strict=True):
            done(DecodeRecord.of(prompt, connection.decode(prompt.tokens or (), count, f"prompt {prompt.id}")))
            advance()


def judge_by_records(theirs: Sequence[DecodeRecord], margin: Callable[[DecodeRecord, int, int], float | None], tolerance: float) -> Judge:
    """A judge that compares with captured records; `margin(record, position, reference token)` tells how far apart the two tokens are there."""
    by_id = {record.id: record for record in theirs}

    def judge(ours: DecodeRecord) -> Comparison:
        reference = by_id.get(ours.id)
        if reference is None:
            raise UsageError(f"the reference has no record {ours.id!r}", "compare captures of the same prompts")
        require_same_prompts(ours, reference)
        mine, other = ours.completion_token_ids, reference.completion_token_ids
        count = len(mine)
        if len(other) != count:
            raise UsageError(f"record {ours.id} has {count} tokens here and {len(other)} in the reference", "compare the first ones: --tokens N")
        at = first_difference(mine, other)
        if at is None:
            return Comparison(ours.id, count)
        apart = margin(ours, at, other[at])
        if apart is not None and apart <= tolerance:
            return Comparison(ours.id, at + 1, near_ties=1)  # what follows a tie has another past, and can't be compared
        return Comparison(ours.id, count, at, mine[at], other[at], apart)

    return judge


def margin_by_target(connection: Connection | None) -> Callable[[DecodeRecord, int, int], float | None]:
    """The margin at a divergence by the endpoint's own scores: how far the reference's token lies behind its best one."""
    def margin(record: DecodeRecord, position: int, reference_token: int) -> float | None:
        if connection is None:
            return None
        before = (*record.prompt_token_ids, *record.completion_token_ids[:position])
        return connection.gaps(Record(record.id, (*before, reference_token), len(before), f"prompt {record.id}"))[0]

    return margin


def margin_by_reference(connection: Connection) -> Callable[[DecodeRecord, int, int], float | None]:
    """The margin at a divergence by a served reference: how far the target's token lies behind its best one."""
    def margin(record: DecodeRecord, position: int, reference_token: int) -> float | None:
        tokens = (*record.prompt_token_ids, *record.completion_token_ids[: position + 1])
        return connection.gaps(Record(record.id, tokens, len(tokens) - 1, f"prompt {record.id}"))[0]

    return margin


@contextlib.contextmanager
def judge_by_checkpoint(directory: str, device: str, dtype: str, tolerance: float) -> Iterator[tuple[Judge, dict[str, str | None]]]:
    """A judge that reads served ids with a checkpoint's own weights in transformers, one forward a prompt.

    And what a result says of it: reference_digest, dtype, device.
    """
    from gemq.eval.local import LocalCheckpoint
    from gemq.eval.plan import device_name
    from gemq.quantize.content import directory_digest, require_unchanged

    opened = LocalCheckpoint.open(directory)
    digest = directory_digest(opened.directory)
    output.note(f"loading {directory}")
    with opened.loaded(device, dtype) as model:
        require_unchanged(opened.directory, digest)
        origin: dict[str, str | None] = {
            "reference_digest": digest, "dtype": str(model.dtype).removeprefix("torch."), "device": device_name(device)
        }  # fmt: skip
        yield (lambda ours: _read_by(model, opened.vocab_size, ours, tolerance)), origin


def _read_by(model: Any, vocab_size: int, ours: DecodeRecord, tolerance: float) -> Comparison:
    import torch

    from gemq.eval.local import chunks

    highest = max(*ours.prompt_token_ids, *ours.completion_token_ids)
    if highest >= vocab_size:
        raise UsageError(f"record {ours.id} has token {highest}, and the reference {vocab_size} tokens", "give the checkpoint that is served")
    record = Record(ours.id, (*ours.prompt_token_ids, *ours.completion_token_ids), len(ours.prompt_token_ids), f"record {ours.id}")
    hidden = model.hidden(record)
    near = 0
    for part in chunks(len(hidden), vocab_size):
        with torch.inference_mode():
            logits = model.head.logits(hidden[part]).float()
        served = torch.tensor(record.targets[part], device=logits.device)
        best, token = logits.max(-1)
        behind = best - logits.gather(1, served.unsqueeze(1)).squeeze(1)
        if not torch.isfinite(behind).all():
            raise IntegrityError(f"record {ours.id}: the reference gives logits that are no numbers", "verify the checkpoint, or fetch it again")
        for offset in behind.gt(0).nonzero().flatten().tolist():
            apart = float(behind[offset])
            if apart > tolerance:
                at = (part.start or 0) + offset
                return Comparison(ours.id, record.target_count, at, int(served[offset]), int(token[offset]), apart, near)
            near += 1
    return Comparison(ours.id, record.target_count, near_ties=near)
