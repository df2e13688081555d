"""Perplexity of a checkpoint or an endpoint over the target tokens of a data file, alone or against a reference on the same records.

PPL = exp(total NLL / total target tokens), as the arenas compute it; the statistics beside it are those of `statistics`.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gemq import output
from gemq.errors import UsageError
from gemq.eval.endpoint import Connection, Endpoint, is_url
from gemq.eval.kl import estimate_row, kl_counts, score_pair
from gemq.eval.local import LocalCheckpoint, LocalModel
from gemq.eval.plan import Judged, Plan
from gemq.eval.records import Record, file_sha256
from gemq.eval.statistics import Estimate, cluster_mean, perplexity


@dataclass(frozen=True)
class RecordScore:
    """One record: its NLL, the reference's and the KL, each summed over its `tokens` targets, in nats; None where not measured."""

    id: str
    tokens: int
    nll_nats: float
    reference_nll_nats: float | None = None
    kl_nats: float | None = None


@dataclass(frozen=True)
class PplResult:
    """Perplexities with standard errors and one-sided upper 95% bounds (None for a single record); reference, ratio and KL where asked.

    `ratio` is PPL(target) / PPL(reference), paired by record; `kl_nats` is KL(reference || target) a token. `dtype` is "served" for
    an endpoint.
    """

    target: str
    data: str
    data_sha256: str
    dtype: str
    tokens: int
    records: int
    ppl: Estimate
    reference: str | None
    reference_ppl: Estimate | None
    ratio: Estimate | None
    kl_nats: Estimate | None
    per_record: tuple[RecordScore, ...]
    kl_histogram: tuple[int, ...] | None = None  # positions a bin of histogram.EDGES, where KL was measured
    target_digest: str | None = None  # content digests (quantize.content), None where an endpoint was asked
    reference_digest: str | None = None
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types, with every record."""
        return {"kind": "ppl", **json.loads(json.dumps(asdict(self), allow_nan=False))}

    def rows(self) -> list[tuple[str, ...]]:
        """The table: quantity, value, standard error, upper 95% bound, tokens, records."""
        named = [("PPL", self.ppl), ("reference PPL", self.reference_ppl), ("ratio", self.ratio), ("KL, nats/token", self.kl_nats)]
        return [estimate_row(name, estimate, self.tokens, self.records) for name, estimate in named if estimate is not None]


@contextlib.contextmanager
def _scorer(plan: Plan, side: Judged, device: str, dtype: str) -> Iterator[LocalModel | Connection]:
    if isinstance(side, Endpoint):
        with side.connected() as connection:
            yield connection
    else:
        assert isinstance(side, LocalCheckpoint)
        output.note(f"loading {side.name}")
        with plan.loaded(side, device, dtype) as model:
            yield model


def _score_side(side: Judged, role: str, plan: Plan, device: str, dtype: str) -> str:
    todo = list(plan.finished.missing(role, len(plan.records)))
    with _scorer(plan, side, device, dtype) as scorer, output.progress(role, len(todo), "records") as advance:
        for index in todo:
            record = plan.records[index]
            nll = -math.fsum(scorer.score(record))
            plan.finished.add(role, index, [nll], record.target_count, record.where)
            advance()
        return "served" if isinstance(scorer, Connection) else str(scorer.dtype).removeprefix("torch.")


def evaluate_ppl(
    target: str,
    data: Path,
    *,
    reference: str | None = None,
    records: int | None = None,
    skip: int = 0,
    length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    with_kl: bool = False,
    tokenizer: Path | None = None,
    output_path: Path | None = None,
    kept: Path | None = None,
) -> PplResult:
    """The perplexity of `target` (a checkpoint directory or an endpoint's URL) on `data`, with the reference's beside it if one is given.

    `records`, `skip`: how many records, after how many; `length`: tokens a window of text (1024), or the cut of token records
    (none); `with_kl` needs two directories; `tokenizer` is the directory for text against a URL. With `output_path`, finished
    records survive a stop in a file beside it, and the same call goes on; writing the result there is the caller's. `kept` names a file in
    which the reference's hidden states wait for the next target (with KL, an unquantized reference). Raises UsageError, IntegrityError,
    StoppedSafely.
    """
    if with_kl and (reference is None or is_url(target) or is_url(reference)):
        raise UsageError("KL needs a target and a reference that are both checkpoint directories", "leave KL out, or give directories")
    plan = Plan.make(target, data, reference=reference, records=records, skip=skip, length=length, device=device, dtype=dtype,
                     kind="ppl+kl" if with_kl else "ppl", output_path=output_path, tokenizer=tokenizer)  # fmt: skip
    count = len(plan.records)
    ours: list[float]
    theirs: list[float] | None = None
    divergence: list[float] | None = None
    with plan.partial_results():
        if with_kl:
            assert isinstance(plan.target, LocalCheckpoint)
            assert isinstance(plan.reference, LocalCheckpoint)
            used = score_pair(plan, device, dtype, kept)
            divergence, ours, theirs = (list(column) for column in zip(*plan.finished.scores("both", count), strict=True))
        else:
            used = _score_side(plan.target, "target", plan, device, dtype)
            ours = [scores[0] for scores in plan.finished.scores("target", count)]
            if plan.reference is not None:
                _score_side(plan.reference, "reference", plan, device, dtype)
                theirs = [scores[0] for scores in plan.finished.scores("reference", count)]
    made = _result(target, reference, data, used, plan.records, ours, theirs, divergence, kl_counts(plan.finished, count) if with_kl else None)
    return replace(made, data_sha256=plan.data_sha256, **plan.origin())


def _exp(mean: Estimate) -> Estimate:
    value = perplexity(mean.value)
    error = None if mean.standard_error is None else value * mean.standard_error
    return Estimate(value, error, None if mean.upper_95 is None else perplexity(mean.upper_95))


def _result(
    target: str, reference: str | None, data: Path, dtype: str, records: list[Record], ours: list[float], theirs: list[float] | None,
    divergence: list[float] | None, histogram: tuple[int, ...] | None,
) -> PplResult:  # fmt: skip
    counts = [record.target_count for record in records]
    nothing: list[None] = [None] * len(records)
    columns = zip(records, ours, theirs or nothing, divergence or nothing, strict=True)
    per_record = tuple(RecordScore(record.id, record.target_count, nll, other, kl) for record, nll, other, kl in columns)
    reference_ppl = ratio = None
    if theirs is not None:
        reference_ppl = _exp(cluster_mean(theirs, counts))
        ratio = _exp(cluster_mean([a - b for a, b in zip(ours, theirs, strict=True)], counts))
    return PplResult(
        target=target, data=str(data), data_sha256=file_sha256(data), dtype=dtype, tokens=sum(counts), records=len(counts),
        ppl=_exp(cluster_mean(ours, counts)), reference=reference, reference_ppl=reference_ppl, ratio=ratio,
        kl_nats=None if divergence is None else cluster_mean(divergence, counts, positive=True), per_record=per_record,
        kl_histogram=histogram,
    )  # fmt: skip
