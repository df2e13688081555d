r"""KL(reference || target) of two endpoints through prompt_logprobs, as LowBArena measures it: a lower bound that is close where k is large.

An endpoint tells its k likeliest tokens and the target at each position. Over the tokens S that both told and one class for all others,

    KL = \sum_{v in S} p_v \ln(p_v / q_v) + p_rest \ln(p_rest / q_rest)

which by the data-processing inequality is at most the KL over the whole vocabulary (gemq eval-kl computes that from checkpoints).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from gemq import output
from gemq.errors import UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.records import Record
from gemq.eval.statistics import Estimate, cluster_mean

TOP = 20  # vLLM's own limit unless --max-logprobs raises it
_LEAST = 1e-9  # what rounding may leave of the rest's probability


def position_kl(p: Mapping[int, float], q: Mapping[int, float]) -> float:
    """The KL of one position in nats, from log-probabilities by token."""
    both = p.keys() & q.keys()
    inside = math.fsum(math.exp(p[token]) * (p[token] - q[token]) for token in both)
    p_rest, q_rest = (max(_LEAST, 1.0 - math.fsum(math.exp(side[token]) for token in both)) for side in (p, q))
    return inside + p_rest * math.log(p_rest / q_rest)


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
