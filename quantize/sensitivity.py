"""What each scheme would do to each decision, measured once: the error of its own output, and the KL of the whole model with it alone quantized.

The walk goes through the source as it is. At each unit the coarsest candidate is solved as a build would, put into the whole model, and
KL(source || model) is measured on held-out windows. The others' KL is that, scaled by their errors, for KL is quadratic in a small error as
the output's error is; and their errors are the coarsest's, scaled by what rounding to nearest makes of each, for what the solver gains is a
factor that hardly depends on the grid. The head is measured at each of its schemes. What was measured is written down one decision at a time,
and never measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.atomic import write_file
from gemq.errors import IntegrityError, UsageError
from gemq.eval.local import LocalCheckpoint
from gemq.quantize import gptq
from gemq.quantize.decisions import KEEP, Decision, decisions_of, options_of
from gemq.quantize.experts import solve_experts
from gemq.quantize.held_out import HeldOut, cut
from gemq.quantize.journal import canonical
from gemq.quantize.plan import Plan, Unit
from gemq.quantize.rtn import round_to_nearest
from gemq.quantize.scales import restore
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Scheme
from gemq.shards import ShardReader
from gemq.source import Source

VERSION = 2  # of the method: what an earlier one measured is measured again
_HELD_OUT_SHARE = 8  # of the calibration windows one in so many is kept for measuring KL
_SOLVED_ON = 16  # windows that the candidates are solved on: a ranking needs fewer than a checkpoint
_ROWS_AT_ONCE = 1 << 24  # weights of the head in float32 at a time
# an E4M3 number keeps three bits after the point: step 1/8 on [1, 2), whose mean square is 7/3
_FP8_INPUT_ERROR = (1 / 8) ** 2 / 12 / (7 / 3)


@dataclass(frozen=True)
class Split:
    """The calibration windows as the search uses them: `solved_on` for solving, `scored_on` for KL. No window is in both."""

    solved_on: tuple[tuple[int, ...], ...]
    scored_on: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, windows: Sequence[Sequence[int]]) -> Split:
        """The last eighth of `windows` (two at least) is held out; raises UsageError for fewer than four."""
        if len(windows) < 4:
            raise UsageError(f"the search has {len(windows)} calibration windows", "give at least 4: some are held out to measure on")
        held_out = max(2, len(windows) // _HELD_OUT_SHARE)
        solved = [tuple(window) for window in windows[: len(windows) - held_out]]
        # a window that stands there twice would be judged on what it was fitted to
        scored = [window for window in map(tuple, windows[-held_out:]) if window not in set(solved)]
        if not scored:
            raise UsageError("every calibration window held out to measure on stands among the others too", "calibrate on distinct windows")
        return cls(tuple(solved[:_SOLVED_ON]), tuple(map(tuple, cut(scored))))

    @property
    def digest(self) -> str:
        """SHA-256 of both."""
        return hashlib.sha256(canonical([[list(window) for window in part] for part in (self.solved_on, self.scored_on)])).hexdigest()


@dataclass
class Sensitivities:
    """Decision -> candidate -> harm (KL, nats a token) and output error (relative), as far as they are measured; kept in a JSON file.

    `tokens` counts the tokens that went through the whole model for it, walk and KL, over all runs.
    """

    path: Path
    identity: dict[str, Any]
    harm: dict[str, dict[str, float]] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: float = 0.0

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> Sensitivities:
        """What the file holds of the same identity; an unreadable or foreign one is measured anew, and said so."""
        made = cls(path, json.loads(canonical(identity)))
        if not path.exists():
            return made
        try:
            held = json.loads(path.read_bytes())
            if held["identity"] == made.identity:
                made.harm, made.error, made.tokens = dict(held["harm"]), dict(held["error"]), float(held["tokens"])
                return made
            reason = "are of another source, calibration, candidate list or version"
        except (ValueError, KeyError, TypeError, OSError):
            reason = "can't be read"
        output.warn(f"the sensitivities in {path} {reason}: measuring again")
        return made

    @property
    def digest(self) -> str:
        """The identity in short."""
        return hashlib.sha256(canonical(self.identity)).hexdigest()

    def add(self, unit: str, harm: dict[str, float], error: dict[str, float]) -> None:
        """Record a decision and write the file, whole or not at all."""
        self.harm[unit], self.error[unit] = harm, error
        self.save()

    def save(self) -> None:
        """Write the file."""
        document = {"identity": self.identity, "harm": self.harm, "error": self.error, "tokens": self.tokens}
        write_file(self.path, canonical(document))


def identity_of(plan: Plan, split: Split, candidates: Sequence[str], more: Mapping[str, Any]) -> dict[str, Any]:
    """What sensitivities depend on: `more` (source, calibration, versions, device), the windows, candidates, decisions and solver."""
    return {**more, "method": VERSION, "candidates": list(candidates), "windows": split.digest,
            "decisions": [decision.name for decision in decisions_of(plan)], "gptq": plan.recipe.gptq.model_dump()}  # fmt: skip


def measure(
    source: Source, reader: ShardReader, plan: Plan, windows: Sequence[Sequence[int]], candidates: Sequence[str], *, path: Path, device: str,
    identity: Mapping[str, Any],
) -> Sensitivities:  # fmt: skip
    """The sensitivities of `plan`'s decisions to `candidates`, measured where the file at `path` has none.

    `windows` are the calibration set's, split as `Split.of` says. Raises UsageError for fewer than four, IntegrityError for a source that
    makes no finite predictions.
    """
    split, decisions = Split.of(windows), decisions_of(plan)
    found = Sensitivities.open(path, identity_of(plan, split, candidates, identity))
    missing = [decision for decision in decisions if decision.name not in found.harm]
    if not missing:
        return found
    with (
        LocalCheckpoint.open(str(source.directory)).loaded(device, "float32") as loaded,
        output.progress("sensitivities", len(decisions), "units") as advance,
    ):
        if len(missing) < len(decisions):
            advance(len(decisions) - len(missing))
        model = HeldOut(loaded, split.scored_on)

        def add(decision: Decision, harm: dict[str, float], error: dict[str, float]) -> None:
            found.tokens, model.tokens = found.tokens + model.tokens, 0.0
            found.add(decision.name, harm, error)
            advance(1, f"{decision.name} " + " ".join(f"{name} {value:.1e}" for name, value in harm.items() if name != KEEP))

        if any(not decision.is_head for decision in missing):
            _Through(plan, reader, decisions, candidates, model, found, add).walk(split.solved_on, device)
        for decision in missing:
            if decision.is_head:
                add(decision, *_try_head(plan, reader, decision, candidates, model, torch.device(device)))
    return found


class _Through:
    """The walk through the source that stops at every decision that is not measured yet."""

    def __init__(
        self, plan: Plan, reader: ShardReader, decisions: Sequence[Decision], candidates: Sequence[str], model: HeldOut, found: Sensitivities,
        add: Callable[[Decision, dict[str, float], dict[str, float]], None],
    ) -> None:  # fmt: skip
        self._plan, self._reader, self._candidates, self._model, self._found, self._add = plan, reader, candidates, model, found, add
        self._of = {unit.name: decision for decision in decisions for unit in decision.units}

    def walk(self, windows: Sequence[Sequence[int]], device: str) -> None:
        Walk(self._plan, self._reader, windows, device).run(Walker(self._restored, self._solve, lambda index: None, self._solve_experts))
        self._found.tokens += sum(map(len, windows))
        self._found.save()

    def _restored(self, unit: Unit) -> list[torch.Tensor] | None:
        if self._of[unit.name].is_head:
            return []
        # a layer is replayed when all of it is measured: the walk goes through the source's own weights in any case
        layer = [decision.name for decision in self._of.values() if decision.layer == unit.layer and not decision.is_head]
        if not all(name in self._found.harm for name in layer):
            return None
        return [self._reader.read(matrix.tensor).to(torch.float32) for matrix in unit.matrices]

    def _solve(self, unit: Unit, weights: list[torch.Tensor], hessian: gptq.Hessian | None) -> list[torch.Tensor]:
        assert hessian is not None
        decision = self._of[unit.name]
        if decision.name not in self._found.harm:
            moments = hessian.mean(unit.name)
            self._add(decision, *_try_linears(self._plan, decision, weights, moments, self._candidates, self._model))
        return weights

    def _solve_experts(self, units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor]) -> None:
        decision = self._of[units[0].name]
        if decision.name not in self._found.harm:
            self._add(decision, *_try_experts(self._plan, decision, module, rows_of, self._candidates, self._model))


def _try_linears(
    plan: Plan, decision: Decision, weights: Sequence[torch.Tensor], moments: torch.Tensor, candidates: Sequence[str], model: HeldOut
) -> tuple[dict[str, float], dict[str, float]]:
    probe, others = _probe(plan, decision, candidates)
    if probe is None:
        return {KEEP: 0.0}, {KEEP: 0.0}
    stacked, sizes = torch.cat(list(weights)), [weight.shape[0] for weight in weights]

    def nearest(label: str) -> float:
        scheme = _scheme(decision, label).weights
        rounded, spacing = round_to_nearest(stacked, scheme, moments.diagonal())
        return gptq.output_error(stacked, rounded, spacing, scheme, moments)

    scheme = _scheme(decision, probe).weights
    stored, scales = gptq.solve(stacked, gptq.factorize(moments, plan.recipe.gptq, decision.name), scheme)
    error = {probe: gptq.output_error(stacked, stored, scales, scheme, moments)}
    gained = error[probe] / max(nearest(probe), 1e-30) if others else 1.0
    error |= {label: gained * nearest(label) for label in others}
    return _harms(decision, probe, error, model.kl(decision, restore(stored, scales, scheme).split(sizes)))


def _try_experts(
    plan: Plan, decision: Decision, module: Any, rows_of: Callable[[int], torch.Tensor], candidates: Sequence[str], model: HeldOut
) -> tuple[dict[str, float], dict[str, float]]:
    """Every candidate is solved, expert by expert; the coarsest's weights go into the model, all of the layer's experts at once."""
    probe, others = _probe(plan, decision, candidates)
    if probe is None:
        return {KEEP: 0.0}, {KEEP: 0.0}
    leaves = [matrix.kind.path.rpartition(".")[2] for matrix in decision.matrices]
    own = [getattr(module, leaf).data.clone() for leaf in leaves]
    error, coarsest = {}, []
    for label in (probe, *others):
        units = [dataclasses.replace(unit, scheme=_scheme(decision, label)) for unit in decision.units]
        solutions = solve_experts(units, module, rows_of, plan.recipe.gptq)
        for _ in solutions:  # each expert's weights are replaced as it goes
            pass
        reports = solutions.reports.values()
        error[label] = sum(float(report.get("output_error", report.get("weight_error", 0.0))) for report in reports) / len(units)
        if label == probe:
            coarsest = [getattr(module, leaf).data.clone() for leaf in leaves]
        for leaf, weight in zip(leaves, own, strict=True):
            getattr(module, leaf).data.copy_(weight)
    return _harms(decision, probe, error, model.kl(decision, coarsest))


def _try_head(
    plan: Plan, reader: ShardReader, decision: Decision, candidates: Sequence[str], model: HeldOut, device: torch.device
) -> tuple[dict[str, float], dict[str, float]]:
    """Every candidate in the model: no layer is computed for it."""
    (matrix,) = decision.matrices
    harm, error = {}, {}
    for label in options_of(plan, decision, candidates):
        if label == KEEP:
            continue
        scheme, sums = _scheme(decision, label).weights, [0.0, 0.0]

        def pieces(scheme: Any = scheme, sums: list[float] = sums) -> Iterator[tuple[int, torch.Tensor]]:
            count = max(1, _ROWS_AT_ONCE // matrix.in_features)
            for first in range(0, matrix.out_features, count):
                rows = reader.read_slice(matrix.tensor, first, min(count, matrix.out_features - first)).to(device).to(torch.float32)
                restored = restore(*round_to_nearest(rows, scheme), scheme)
                sums[0] += (rows - restored).square().sum().item()
                sums[1] += rows.square().sum().item()
                yield first, restored

        harm[label] = _finite(decision, label, model.kl_of_head(pieces(), matrix.out_features))
        error[label] = sums[0] / max(sums[1], 1e-30)
    return {**harm, KEEP: 0.0}, {**error, KEEP: 0.0}


def _scheme(decision: Decision, label: str) -> Scheme:
    scheme = decision.scheme(label)
    assert scheme is not None
    return scheme


def _probe(plan: Plan, decision: Decision, candidates: Sequence[str]) -> tuple[str | None, list[str]]:
    """The coarsest candidate that `decision` can take, and the others."""
    options = [option for option in options_of(plan, decision, candidates).values() if option.label != KEEP]
    probe = min(options, key=lambda option: (option.disk_bytes, option.label), default=None)
    return (None, []) if probe is None else (probe.label, [option.label for option in options if option is not probe])


def _harms(decision: Decision, probe: str, error: dict[str, float], measured: float) -> tuple[dict[str, float], dict[str, float]]:
    """Harm and error by label, from the errors of weights alone and the KL with the probe's; rounded inputs add their own error."""
    scale = _finite(decision, probe, measured) / max(error[probe], 1e-30)
    whole = {label: value + (_FP8_INPUT_ERROR if _scheme(decision, label).input_activations else 0.0) for label, value in error.items()}
    return {**{label: scale * value for label, value in whole.items()}, KEEP: 0.0}, {**whole, KEEP: 0.0}


def _finite(decision: Decision, label: str, measured: float) -> float:
    if not measured >= 0:
        raise IntegrityError(
            f"{decision.name} as {label} makes the model's output {measured}", "check the source: `gemq eval-ppl` on it should be finite"
        )
    return measured
