r"""Accuracy of a served model on tasks of lm-eval, with confidence intervals, and its drop against a reference, paired question by question.

lm-eval asks and grades; here stands what follows from its grades. For k right of n the interval is Wilson's (1927), two-sided 95%. The drop is
the mean over questions of (reference right) - (target right), in points. Its one-sided upper 95% bound is the score bound for matched pairs
(Tango, Statistics in Medicine 17, 1998): with b questions that only the reference got right, c that only the target did, it is the \delta at
which

    (b - c - n \delta) / \sqrt{n (2 q + \delta (1 - \delta))} = -1.645

q being the likeliest share of the latter given \delta: the positive root of 2 n q^2 + B q + C, B = -(b + c) + (2 n - b + c) \delta,
C = -c \delta (1 - \delta). It covers 95% also where few questions differ, where Wald's covers 90% (as simulated in tests/eval/test_accuracy.py),
and none differing still leaves z^2 / (n + z^2). Grades between 0 and 1 (tasks that aren't right or wrong) take Student's t instead.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gemq.errors import UsageError
from gemq.eval.statistics import t_quantile

Z_TWO_SIDED, Z_ONE_SIDED = 1.959964, 1.644854


@dataclass(frozen=True)
class Graded:
    """One question as lm-eval graded it: its digest, its grade from 0 to 1, and the answer's length in characters."""

    id: int
    sha256: str
    grade: float
    characters: int


@dataclass(frozen=True)
class Drop:
    """How much worse than the reference, in points of 100: the mean over paired questions and its one-sided upper 95% bound."""

    points: float
    upper_95_points: float | None
    reference_accuracy: float
    lost: int
    won: int


@dataclass(frozen=True)
class Domain:
    """A task's accuracy in [0, 1] with its two-sided 95% interval, and the paired drop where there is a reference."""

    name: str
    metric: str
    questions: tuple[Graded, ...]
    accuracy: float
    low: float
    high: float
    drop: Drop | None = None

    @property
    def mean_characters(self) -> float:
        return statistics.fmean(question.characters for question in self.questions)


@dataclass(frozen=True)
class AccuracyResult:
    """Every task's accuracy; `data` says which questions were asked."""

    target: str
    reference: str | None
    data: dict[str, Any]
    domains: tuple[Domain, ...]
    length_drift: float | None = field(default=None)
    target_digest: str | None = None  # content digests (quantize.content), None where a server at a URL was asked
    reference_digest: str | None = None

    @property
    def mean_drop_points(self) -> float | None:
        """The mean drop over tasks, each weighing the same; None without a reference."""
        drops = [domain.drop.points for domain in self.domains if domain.drop is not None]
        return statistics.fmean(drops) if drops else None

    def to_json(self) -> dict[str, Any]:
        """The result as JSON types, with every question."""
        return {"kind": "accuracy", **json.loads(json.dumps(asdict(self), allow_nan=False)), "mean_drop_points": self.mean_drop_points}


def wilson(right: float, n: int) -> tuple[float, float]:
    """The two-sided 95% interval of a share of `n` (Wilson's score interval)."""
    if n < 1:
        raise UsageError("no question was asked", "choose a larger --limit, or a file with more questions")
    share, z = right / n, Z_TWO_SIDED
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    reach = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return 0.0 if right <= 0 else max(0.0, centre - reach), 1.0 if right >= n else min(1.0, centre + reach)


def domain_of(name: str, metric: str, questions: Sequence[Graded]) -> Domain:
    """The accuracy of a task's graded questions."""
    total = math.fsum(question.grade for question in questions)
    low, high = wilson(total, len(questions))
    return Domain(name, metric, tuple(questions), total / len(questions), low, high)


def paired_drop(target: Sequence[Graded], reference: Sequence[Graded]) -> Drop:
    """The drop of `target` against `reference` on the same questions; raises UsageError where they aren't the same."""
    theirs = {question.id: question for question in reference}
    other = next((q for q in target if q.id not in theirs or theirs[q.id].sha256 != q.sha256), None)
    if other is not None or len(theirs) != len(target):
        which = "" if other is None else f", first question {other.id}"
        raise UsageError(f"target and reference answered different questions ({len(target)} and {len(theirs)}{which})",
                         "measure both on the same file, with the same --shots and --limit")  # fmt: skip
    differences = [theirs[q.id].grade - q.grade for q in target]
    n, mean = len(differences), statistics.fmean(differences)
    lost, won = sum(d > 0 for d in differences), sum(d < 0 for d in differences)
    accuracy = statistics.fmean(question.grade for question in reference)
    if all(d in (-1.0, 0.0, 1.0) for d in differences):
        upper: float | None = upper_difference(lost, won, n)
    else:
        upper = mean + t_quantile(n - 1) * statistics.stdev(differences) / math.sqrt(n) if n > 1 else None
    return Drop(100 * mean, None if upper is None else 100 * max(upper, mean), accuracy, lost, won)


def upper_difference(lost: int, won: int, n: int) -> float:
    """Tango's one-sided upper 95% bound on the difference of two paired shares: `lost` and `won` of `n` pairs differ."""
    def score(delta: float) -> float:
        b = -(lost + won) + (2 * n - lost + won) * delta
        c = -won * delta * (1 - delta)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        variance = n * (2 * q + delta * (1 - delta))
        return (lost - won - n * delta) / math.sqrt(variance) if variance > 0 else math.inf

    low, high = (lost - won) / n, 1.0
    for _ in range(60):  # the score falls from 0 at the difference itself
        middle = (low + high) / 2
        low, high = (middle, high) if score(middle) > -Z_ONE_SIDED else (low, middle)
    return high


def compared(target: str, reference: str, data: dict[str, Any], ours: Sequence[Domain], theirs: Sequence[Domain]) -> AccuracyResult:
    """Two sides' domains as one result with paired drops, and the relative difference in the answers' length over all questions."""
    by_name = {domain.name: domain for domain in theirs}
    missing = [domain.name for domain in ours if domain.name not in by_name]
    if missing or len(by_name) != len(ours):
        raise UsageError(f"the reference was measured on {', '.join(sorted(by_name))}, the target on {', '.join(d.name for d in ours)}",
                         "measure both on the same tasks")  # fmt: skip
    joined = tuple(Domain(d.name, d.metric, d.questions, d.accuracy, d.low, d.high, paired_drop(d.questions, by_name[d.name].questions))
                   for d in ours)  # fmt: skip
    mine, other = (sum(question.characters for domain in side for question in domain.questions) for side in (ours, theirs))
    return AccuracyResult(target, reference, data, joined, mine / other - 1 if other else None)


def read_result(path: Path) -> tuple[dict[str, Any], list[Domain], str | None]:
    """On which data an earlier run measured, what, and the digest of whose weights; raises UsageError where it is not eval-accuracy's result."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["kind"] != "accuracy":
            raise ValueError(f"it is a result of kind {document['kind']!r}")
        domains = [domain_of(str(entry["name"]), str(entry["metric"]),
                             [Graded(int(q["id"]), str(q["sha256"]), float(q["grade"]), int(q["characters"])) for q in entry["questions"]])
                   for entry in document["domains"]]  # fmt: skip
        digest = document.get("target_digest")
        return dict(document["data"]), domains, digest if isinstance(digest, str) else None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no result of gemq eval-accuracy ({error})", "give what its --output wrote, or a model as --reference") from None
