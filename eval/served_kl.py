r"""KL(reference || target) through prompt_logprobs, as LowBArena measures it: a lower bound that is close where k is large.

An endpoint tells its k likeliest tokens and the target at each position. Over the tokens S that both told and one class for all others,

    KL = \sum_{v in S} p_v \ln(p_v / q_v) + p_rest \ln(p_rest / q_rest)

which by the data-processing inequality is at most the KL over the whole vocabulary (what gemq eval-kl computes from two directories).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch

from gemq import output
from gemq.devices import choose
from gemq.errors import IntegrityError, Interrupted, StoppedSafely, UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.local import LocalCheckpoint, require_dtype
from gemq.eval.plan import Judged, Plan, records_sha256
from gemq.eval.recorded import Recorded, Recording
from gemq.eval.records import Record
from gemq.eval.statistics import Estimate, cluster_mean
from gemq.output_paths import require_separate

TOP = 20  # vLLM's own limit unless --max-logprobs raises it
_LEAST = 1e-9  # what rounding may leave of the rest's probability


class Teller(Protocol):
    """Whoever tells distributions: an endpoint's connection, a model in memory, a file."""

    def distributions(self, record: Record, top: int) -> list[dict[int, float]]:
        """The log-probabilities of at least the `top` likeliest tokens and the target, by token, for each target."""
        ...


def position_kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """The KL of one position in nats, from log-probabilities by token."""
    both = p.keys() & q.keys()
    inside = math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
    p_rest, q_rest = (max(_LEAST, 1.0 - math.fsum(math.exp(side[token]) for token in both)) for side in (p, q))
    return inside + p_rest * math.log(p_rest / q_rest)


def covered(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """The reference's probability on tokens that both told: what the bound sees token by token."""
    return math.fsum(math.exp(p[token]) for token in p.keys() & q.keys())


def top_distributions(endpoint: Endpoint, records: Sequence[Record], label: str) -> list[list[dict[int, float]]]:
    """Each record's distributions over its likeliest tokens; raises as Connection.score does."""
    found = []
    with endpoint.connected() as connection, output.progress(label, len(records), "records") as advance:
        for record in records:
            found.append(connection.distributions(record, TOP))
            advance()
    return found


def served_kl(reference: Sequence[Sequence[Mapping[int, float]]], target: Sequence[Sequence[Mapping[int, float]]]) -> Estimate:
    """The mean KL a token over records, with its standard error and upper bound; raises UsageError where the records differ."""
    if len(reference) != len(target) or not target or any(len(a) != len(b) or not a for a, b in zip(reference, target, strict=True)):
        raise UsageError("reference and target were scored on different records", "score both on the same file")
    sums = [math.fsum(position_kl(p, q) for p, q in zip(a, b, strict=True)) for a, b in zip(reference, target, strict=True)]
    return cluster_mean(sums, [len(a) for a in target], positive=True)


def choose_top(asked: int | None, reference: Judged | None) -> int:
    """How many likeliest tokens to ask for: `asked`, or a recorded reference's, or 20; raises UsageError where they are not to be had."""
    if asked is not None and asked < 1:
        raise UsageError(f"--top {asked}: at least 1 is needed", f"choose 1 or more; {TOP} is vLLM's own limit")
    if isinstance(reference, Recorded):
        if asked is not None and asked > reference.top:
            raise UsageError(f"--top {asked}: {reference.name} holds {reference.top} tokens a position", f"choose --top {reference.top} or less")
        return asked or reference.top
    return asked or TOP


@contextlib.contextmanager
def teller(plan: Plan, side: Judged, device: str, dtype: str) -> Iterator[Teller]:
    """Open whoever tells of `side`: a connection, a loaded model, a file."""
    if isinstance(side, Recorded):
        yield side
    elif isinstance(side, Endpoint):
        with side.connected() as connection:
            yield connection
    else:
        output.note(f"loading {side.name}")
        with plan.loaded(side, device, dtype) as model:
            yield model


def score_told(plan: Plan, top: int, device: str, dtype: str) -> None:
    """Score the missing records under role "both" as [KL, target's NLL, reference's NLL, covered probability] sums, both sides in turn."""
    assert plan.reference is not None
    todo = list(plan.finished.missing("both", len(plan.records)))
    with (teller(plan, plan.reference, device, dtype) as theirs, teller(plan, plan.target, device, dtype) as ours,
          output.progress("records", len(todo), "records") as advance):  # fmt: skip
        for index in todo:
            record = plan.records[index]
            p, q = theirs.distributions(record, top), ours.distributions(record, top)
            sums = [math.fsum(position_kl(a, b) for a, b in zip(p, q, strict=True)),
                    *(-math.fsum(told[token] for told, token in zip(side, record.targets, strict=True)) for side in (q, p)),
                    math.fsum(covered(a, b) for a, b in zip(p, q, strict=True))]  # fmt: skip
            plan.finished.add("both", index, sums, record.target_count, record.where)
            advance()


def record_distributions(plan: Plan, file: Path, top: int, device: str, dtype: str) -> int:
    """Write what the target tells of every record to `file`, going on where an earlier run stopped; returns how many records there are.

    Raises StoppedSafely or Interrupted with what is kept, and as Connection.distributions does.
    """
    side = plan.target
    require_separate(file, side.directory if isinstance(side, LocalCheckpoint) else None, option="--record")
    used = "served" if isinstance(side, Endpoint) else str(require_dtype(dtype, torch.device(choose(device)), side.stored_dtype))
    recording = Recording(file, {
        "model": side.model if isinstance(side, Endpoint) else side.name, "model_digest": plan.target_digest, "data_sha256": plan.data_sha256,
        "records_sha256": records_sha256(plan.records), "top": top, "records": len(plan.records), "dtype": used.removeprefix("torch."),
        "device": plan.device,
    })  # fmt: skip
    todo = plan.records[recording.done :]
    try:
        with teller(plan, side, device, dtype) as told, output.progress("records", len(todo), "records") as advance:
            for record in todo:
                recording.add(record, told.distributions(record, top))
                advance()
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {recording.close()}", "run the same command again to go on") from None
    except StoppedSafely as error:
        raise type(error)(f"{error.message}; {recording.close()}", error.next_step) from error
    except (IntegrityError, UsageError):
        recording.close()
        raise
    recording.publish()
    return len(plan.records)
