"""KL(reference || target) in nats a target token: over the whole vocabulary where both are checkpoint directories, else through prompt_logprobs.

KL_t = \\sum_v p_ref(v | x_<t) (log p_ref(v | x_<t) - log p_target(v | x_<t)). One model is in memory at a time: the reference
leaves its hidden states at the target positions (a hundredth of the log-probabilities' size or less) and its output projection,
from which its log-probabilities come back. An endpoint tells of its likeliest tokens only: see served_kl.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.devices import choose
from gemq.errors import UsageError
from gemq.eval.finished import FinishedRecords
from gemq.eval.histogram import kl_histogram
from gemq.eval.local import Head, LocalCheckpoint, LocalModel, chunks, require_dtype, require_finite
from gemq.eval.plan import Plan
from gemq.eval.records import Record
from gemq.eval.statistics import Estimate, cluster_mean
from gemq.output_paths import require_separate

HISTOGRAM = "histogram"


@dataclass(frozen=True)
class RecordKl:
    """One record: KL and both NLLs, each summed over its `tokens` targets, in nats; and so `covered`, as in KlResult, where it was measured."""

    id: str
    tokens: int
    kl_nats: float
    nll_nats: float
    reference_nll_nats: float
    covered: float | None = None


@dataclass(frozen=True)
class KlResult:
    """KL(reference || target) with its standard error and one-sided upper 95% bound (None for a single record), in nats a token.

    Through prompt_logprobs, `top` is how many likeliest tokens were asked for, `covered` the reference's probability on those that both told,
    and the KL a lower bound; over the whole vocabulary both are None.
    """

    target: str
    reference: str
    data: str
    data_sha256: str
    dtype: str
    kl_nats: Estimate
    tokens: int
    records: int
    per_record: tuple[RecordKl, ...]
    top: int | None = None
    covered: float | None = None
    kl_histogram: tuple[int, ...] | None = None  # positions a bin of histogram.EDGES
    target_digest: str | None = None  # content digests (quantize.content), None where an endpoint was asked
    reference_digest: str | None = None
    device: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types, with every record."""
        return {"kind": "kl", **json.loads(json.dumps(asdict(self), allow_nan=False))}

    def rows(self) -> list[tuple[str, ...]]:
        """The table: quantity, value, standard error, upper 95% bound, tokens, records."""
        return [estimate_row("KL, nats/token", self.kl_nats, self.tokens, self.records)]


def estimate_row(name: str, estimate: Estimate, tokens: int, records: int) -> tuple[str, ...]:
    """A table's row of an estimate: name, value, standard error, upper 95% bound, tokens, records."""
    error, upper = ("–" if value is None else f"{value:.4g}" for value in (estimate.standard_error, estimate.upper_95))
    return (name, f"{estimate.value:.5g}", error, upper, str(tokens), str(records))


def evaluate_kl(
    target: str,
    data: Path,
    *,
    reference: str,
    records: int | None = None,
    skip: int = 0,
    length: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    tokenizer: Path | None = None,
    top: int | None = None,
    output_path: Path | None = None,
) -> KlResult:
    """The KL divergence of `target` from `reference` on the targets of `data`.

    Each is a checkpoint directory or an endpoint's URL, the reference also a file that `record_reference` wrote. Of two directories it is
    computed over the whole vocabulary, else over the `top` (20) likeliest tokens that both tell. Raises UsageError, IntegrityError and
    StoppedSafely, as reading the data, loading the checkpoints and asking the endpoints do.
    """
    plan = Plan.make(target, data, reference=reference, records=records, skip=skip, length=length, device=device, dtype=dtype, kind="kl",
                     output_path=output_path, tokenizer=tokenizer, top=top)  # fmt: skip
    whole = isinstance(plan.target, LocalCheckpoint) and isinstance(plan.reference, LocalCheckpoint)
    if whole and top is not None:
        raise UsageError("--top is given, and both are directories: their KL is over the whole vocabulary", "leave --top out")
    with plan.partial_results():
        if isinstance(plan.target, LocalCheckpoint) and isinstance(plan.reference, LocalCheckpoint):
            used = score_pair(plan, device, dtype)
        else:
            from gemq.eval.served_kl import choose_top, score_told

            top, used = choose_top(top, plan.reference), "served"
            score_told(plan, top, device, dtype)
    done = plan.finished.scores("both", len(plan.records))
    per_record = tuple(RecordKl(r.id, r.target_count, *scores) for r, scores in zip(plan.records, done, strict=True))
    counts = [record.tokens for record in per_record]
    estimate = cluster_mean([record.kl_nats for record in per_record], counts, positive=True)
    share = None if whole else math.fsum(record.covered or 0.0 for record in per_record) / sum(counts)
    return KlResult(target, reference, str(data), plan.data_sha256, used, estimate, sum(counts), len(counts), per_record, top, share,
                    kl_counts(plan.finished, len(plan.records)), **plan.origin())  # fmt: skip


def record_reference(
    target: str, data: Path, file: Path, *, records: int | None = None, skip: int = 0, length: int | None = None, device: str = "auto",
    dtype: str = "auto", tokenizer: Path | None = None, top: int | None = None,
) -> int:  # fmt: skip
    """Write what `target` tells of its likeliest tokens on the targets of `data` to `file`, a reference for later; returns its records.

    Raises as evaluate_kl does.
    """
    from gemq.eval.served_kl import choose_top, record_distributions

    require_separate(file, tokenizer, option="--record")
    plan = Plan.make(target, data, reference=None, records=records, skip=skip, length=length, device=device, dtype=dtype, kind="kl",
                     output_path=None, tokenizer=tokenizer)  # fmt: skip
    return record_distributions(plan, file, choose_top(top, None), device, dtype)


def score_pair(plan: Plan, device: str, dtype: str, kept: Path | None = None) -> str:
    """Score the missing records of a plan with two checkpoints; returns the dtype that was computed in.

    They are kept under role "both" as [KL, target's NLL, reference's NLL] sums, and each record's histogram of KL under HISTOGRAM. In `kept` the
    reference's hidden states wait for another target.
    """
    target, reference, records, finished = plan.target, plan.reference, plan.records, plan.finished
    assert isinstance(target, LocalCheckpoint)
    assert isinstance(reference, LocalCheckpoint)
    todo = list(finished.missing("both", len(records)))
    head, states, used = _reference_states(plan, reference, todo, device, dtype, kept)
    output.note(f"loading {target.name}")
    with plan.loaded(target, device, dtype) as model, output.progress("target", len(todo), "records") as advance:
        for index in todo:
            record = records[index]
            sums, counts = _pair_sums(model, head, states.pop(index), record, reference.name)
            finished.attach(HISTOGRAM, index, list(map(float, counts)))
            finished.add("both", index, sums, record.target_count, record.where)
            advance()
    return used


def _reference_states(
    plan: Plan, reference: LocalCheckpoint, todo: list[int], device: str, dtype: str, kept: Path | None
) -> tuple[Head, dict[int, Any], str]:
    """The reference's head, its hidden states at the records in `todo`, and the dtype."""
    records = plan.records
    if kept is not None:
        from gemq.eval.kept import head_of, key_of, read_states, write_states

        where = torch.device(choose(device))
        computed = require_dtype(dtype, where, reference.stored_dtype)
        key = key_of(plan, str(computed))
        found = read_states(kept, key, len(records))
        if found is not None:
            output.note(f"{reference.name}: its scores are kept from an earlier build")
            return head_of(reference, where, computed), found, str(computed).removeprefix("torch.")
        todo = list(range(len(records)))
    output.note(f"loading {reference.name}")
    with plan.loaded(reference, device, dtype) as model, output.progress("reference", len(todo), "records") as advance:
        states = _hidden_states(model, records, todo, advance)
        if kept is not None:
            write_states(kept, key, states)
        return model.head, states, str(model.dtype).removeprefix("torch.")


def kl_counts(finished: FinishedRecords, count: int) -> tuple[int, ...] | None:
    """The histogram of KL over all positions, None where some record has none (of an older partial result)."""
    attached = finished.attached(HISTOGRAM, count)
    return None if attached is None else tuple(int(sum(column)) for column in zip(*attached, strict=True))


def _hidden_states(model: LocalModel, records: list[Record], todo: list[int], advance: Callable[..., None]) -> dict[int, Any]:
    states = {}
    for index in todo:
        states[index] = model.hidden(records[index]).to("cpu", copy=True)  # a copy: a slice would keep the whole record's states
        advance()
    return states


@torch.inference_mode()
def _pair_sums(model: LocalModel, head: Head, reference_hidden: Any, record: Record, reference_name: str) -> tuple[list[float], list[int]]:
    """[KL, target's NLL, reference's NLL] of a record, and how many of its positions have which KL."""
    hidden = model.hidden(record)
    targets = torch.tensor(record.targets, device=model.device)
    divergence: list[float] = []
    ours: list[float] = []
    theirs: list[float] = []
    for part in chunks(len(targets), model.vocab_size):
        chosen = targets[part].unsqueeze(1)
        p = head.log_probabilities(reference_hidden[part].to(model.device))
        q = model.head.log_probabilities(hidden[part]).to(p.device)
        theirs += p.gather(1, chosen).squeeze(1).tolist()
        ours += q.gather(1, chosen).squeeze(1).tolist()
        q.neg_().add_(p).mul_(p.exp_())
        divergence += q.sum(-1, dtype=torch.float64).tolist()
    require_finite(theirs, reference_name, record)
    require_finite(ours, model.name, record)
    require_finite(divergence, f"KL of {model.name}", record)
    return [math.fsum(divergence), -math.fsum(ours), -math.fsum(theirs)], kl_histogram(divergence)
