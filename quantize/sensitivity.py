"""What each scheme would do to each decision, measured once: the error of its own output, and the KL of the whole model with it alone quantized.

The walk goes through the source as it is. At each unit the coarsest candidate is solved as a build would, put into the whole model, and
KL(source || model) is measured on held-out windows. The others' KL is that, scaled by their errors, for KL is quadratic in a small error as
the output's error is; and their errors are the coarsest's, scaled by what rounding to nearest makes of each, for what the solver gains is a
factor that hardly depends on the grid. The head is measured at each of its schemes. What was measured is kept by decision and scheme
(`measurements`), so that other candidates only add what is missing; harms are worked out from it.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.errors import IntegrityError, UsageError
from gemq.eval.local import LocalCheckpoint
from gemq.quantize import gptq
from gemq.quantize.decisions import HEAD, HEAD_SCHEMES, KEEP, SCHEMES, Decision, decisions_of, options_of
from gemq.quantize.experts import solve_experts
from gemq.quantize.held_out import HeldOut, cut
from gemq.quantize.journal import canonical
from gemq.quantize.measurements import Measured, Measurements
from gemq.quantize.plan import Plan, Unit
from gemq.quantize.rtn import round_to_nearest
from gemq.quantize.scales import restore
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Scheme
from gemq.shards import ShardReader
from gemq.source import Source

VERSION = 3  # of the method: what an earlier one measured is measured again
FEWEST_WINDOWS = 4
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
        if len(windows) < FEWEST_WINDOWS:
            raise UsageError(f"the search has {len(windows)} calibration windows",
                             f"give at least {FEWEST_WINDOWS}: some are held out to measure on")  # fmt: skip
        held_out = max(2, len(windows) // _HELD_OUT_SHARE)
        solved = [tuple(window) for window in windows[: len(windows) - held_out]]
        # a window that is in both parts would be judged on what it was fitted to
        scored = [window for window in map(tuple, windows[-held_out:]) if window not in set(solved)]
        if not scored:
            raise UsageError("every calibration window held out to measure on is among the others too", "calibrate on distinct windows")
        return cls(tuple(solved[:_SOLVED_ON]), tuple(map(tuple, cut(scored))))

    @property
    def digest(self) -> str:
        """SHA-256 of both."""
        return hashlib.sha256(canonical([[list(window) for window in part] for part in (self.solved_on, self.scored_on)])).hexdigest()


@dataclass(frozen=True)
class Sensitivities:
    """Decision -> candidate -> harm (KL, nats a token) and output error (relative), worked out from what was measured.

    `identity` is what the measurements depend on; `tokens` counts the tokens that went through the whole model for them, over all runs.
    """

    identity: dict[str, Any]
    harm: dict[str, dict[str, float]] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)
    tokens: float = 0.0


def method_of(plan: Plan) -> dict[str, Any]:
    """What a measurement depends on that is gemq's: the method's version, the schemes' definitions, the solver's options."""
    schemes = {label: scheme.model_dump(mode="json") for label, scheme in SCHEMES.items()}
    head = {label: scheme.model_dump(mode="json") for label, scheme in HEAD_SCHEMES.items()}
    return {"method": VERSION, "schemes": schemes, "head schemes": head, "gptq": plan.recipe.gptq.model_dump(mode="json")}


def identity_of(plan: Plan, split: Split, more: Mapping[str, Any]) -> dict[str, Any]:
    """All that a measurement of a decision under a scheme depends on: `more` (source, calibration, versions, device), windows and method."""
    return {**more, "windows": split.digest, **method_of(plan)}


def worked_out(plan: Plan, candidates: Sequence[str], measured: Measurements) -> Sensitivities:
    """Harm and error of every decision of `plan` under each candidate that it can take; raises KeyError where a measurement is missing."""
    made = Sensitivities(measured.identity, tokens=measured.tokens)
    for decision in decisions_of(plan):
        made.harm[decision.name], made.error[decision.name] = _harms(plan, decision, candidates, measured.of(decision.name))
    return made


def measured_candidates(plan: Plan, measured: Measurements) -> tuple[str, ...]:
    """The candidates that every unit that can take them was measured under, the kept weight last; empty where there is none."""
    units = [(decision, measured.of(decision.name)) for decision in decisions_of(plan) if not decision.is_head]

    def is_known(label: str) -> bool:
        able = [found for decision, found in units if label in options_of(plan, decision, (label,))]
        return bool(able) and all(label in found.nearest or label in found.error for found in able)

    known = tuple(label for label in SCHEMES if is_known(label))
    return (*known, KEEP) if known else ()


def measure(
    source: Source, reader: ShardReader, plan: Plan, windows: Sequence[Sequence[int]], candidates: Sequence[str], *, path: Path, device: str,
    identity: Mapping[str, Any],
) -> Sensitivities:  # fmt: skip
    """The sensitivities of `plan`'s decisions to `candidates`; only what the file at `path` does not hold is measured.

    `windows` are the calibration set's, split as `Split.of` says. Raises UsageError for fewer than four, IntegrityError for a source that
    makes no finite predictions.
    """
    split, decisions = Split.of(windows), decisions_of(plan)
    measured = Measurements.open(path, identity_of(plan, split, identity))
    missing = [decision for decision in decisions if _missing(plan, decision, candidates, measured.of(decision.name))]
    if not missing:
        return worked_out(plan, candidates, measured)
    with (
        LocalCheckpoint.open(str(source.directory)).loaded(device, "float32") as loaded,
        output.progress("sensitivities", len(decisions), "units") as advance,
    ):
        if len(missing) < len(decisions):
            advance(len(decisions) - len(missing))
        model = HeldOut(loaded, split.scored_on)

        def add(decision: Decision, found: Measured) -> None:
            measured.tokens, model.tokens = measured.tokens + model.tokens, 0.0
            measured.add(decision.name, found)
            harm, _ = _harms(plan, decision, candidates, found)
            advance(1, f"{decision.name} " + " ".join(f"{name} {value:.1e}" for name, value in harm.items() if name != KEEP))

        if any(not decision.is_head for decision in missing):
            _Through(plan, reader, missing, candidates, model, measured, add).walk(split.solved_on, device)
        for decision in missing:
            if decision.is_head:
                add(decision, _try_head(plan, reader, decision, candidates, model, torch.device(device), measured.of(decision.name)))
    return worked_out(plan, candidates, measured)


class _Through:
    """The walk through the source that stops at every decision of which something is missing."""

    def __init__(
        self, plan: Plan, reader: ShardReader, missing: Sequence[Decision], candidates: Sequence[str], model: HeldOut, measured: Measurements,
        add: Callable[[Decision, Measured], None],
    ) -> None:  # fmt: skip
        self._plan, self._reader, self._candidates, self._model, self._measured, self._add = plan, reader, candidates, model, measured, add
        self._missing = {unit.name: decision for decision in missing for unit in decision.units}
        self._layers = {decision.layer for decision in missing if not decision.is_head}

    def walk(self, windows: Sequence[Sequence[int]], device: str) -> None:
        Walk(self._plan, self._reader, windows, device).run(Walker(self._restored, self._solve, lambda index: None, self._solve_experts))
        self._measured.tokens += sum(map(len, windows))
        self._measured.save()

    def _restored(self, unit: Unit) -> list[torch.Tensor] | None:
        if unit.name == HEAD:
            return []
        # a layer of which nothing is missing is replayed: the walk goes through the source's own weights in any case
        if unit.layer in self._layers:
            return None
        return [self._reader.read(matrix.tensor).to(torch.float32) for matrix in unit.matrices]

    def _solve(self, unit: Unit, weights: list[torch.Tensor], hessian: gptq.Hessian | None) -> list[torch.Tensor]:
        assert hessian is not None
        decision = self._missing.pop(unit.name, None)
        if decision is not None:
            moments = hessian.mean(unit.name)
            known = self._measured.of(decision.name)
            self._add(decision, _try_linears(self._plan, decision, weights, moments, self._candidates, self._model, known))
        return weights

    def _solve_experts(self, units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor]) -> None:
        decision = self._missing.pop(units[0].name, None)
        if decision is not None:
            known = self._measured.of(decision.name)
            self._add(decision, _try_experts(self._plan, decision, module, rows_of, self._candidates, self._model, known))


def _missing(plan: Plan, decision: Decision, candidates: Sequence[str], known: Measured) -> bool:
    """Whether `known` lacks something that the harms of `candidates` are worked out from."""
    try:
        _harms(plan, decision, candidates, known)
    except KeyError:
        return True
    return False


def _try_linears(
    plan: Plan, decision: Decision, weights: Sequence[torch.Tensor], moments: torch.Tensor, candidates: Sequence[str], model: HeldOut, known: Measured
) -> Measured:
    """`known` and what is missing: the coarsest candidate is solved and put into the model, all are rounded to nearest."""
    probe, others = _probe(plan, decision, candidates)
    if probe is None:
        return known
    stacked, sizes = torch.cat(list(weights)), [weight.shape[0] for weight in weights]

    def nearest(label: str) -> float:
        scheme = _scheme(decision, label).weights
        rounded, spacing = round_to_nearest(stacked, scheme, moments.diagonal())
        return gptq.output_error(stacked, rounded, spacing, scheme, moments)

    found = known.with_nearest({label: nearest(label) for label in (probe, *others) if label not in known.nearest})
    if probe in found.kl:
        return found
    scheme = _scheme(decision, probe).weights
    stored, scales = gptq.solve(stacked, gptq.factorize(moments, plan.recipe.gptq, decision.name), scheme)
    error = gptq.output_error(stacked, stored, scales, scheme, moments)
    kl = model.kl(decision, restore(stored, scales, scheme).split(sizes))
    return found.with_kl(probe, _finite(decision, probe, kl)).with_error(probe, error)


def _try_experts(
    plan: Plan, decision: Decision, module: Any, rows_of: Callable[[int], torch.Tensor], candidates: Sequence[str], model: HeldOut, known: Measured
) -> Measured:
    """`known` and what is missing: each candidate is solved, expert by expert; the coarsest's weights go into the model, all experts at once."""
    probe, others = _probe(plan, decision, candidates)
    if probe is None:
        return known
    leaves = [matrix.kind.path.rpartition(".")[2] for matrix in decision.matrices]
    own = [getattr(module, leaf).data.clone() for leaf in leaves]
    found, coarsest = known, None
    for label in (probe, *others):
        if label in known.error and (label != probe or probe in known.kl):
            continue
        units = [dataclasses.replace(unit, scheme=_scheme(decision, label)) for unit in decision.units]
        solutions = solve_experts(units, module, rows_of, plan.recipe.gptq)
        for _ in solutions:  # each expert's weights are replaced as it goes
            pass
        reports = solutions.reports.values()
        found = found.with_error(label, sum(float(report.get("output_error", report.get("weight_error", 0.0))) for report in reports) / len(units))
        if label == probe:
            coarsest = [getattr(module, leaf).data.clone() for leaf in leaves]
        for leaf, weight in zip(leaves, own, strict=True):
            getattr(module, leaf).data.copy_(weight)
    return found if coarsest is None else found.with_kl(probe, _finite(decision, probe, model.kl(decision, coarsest)))


def _try_head(
    plan: Plan, reader: ShardReader, decision: Decision, candidates: Sequence[str], model: HeldOut, device: torch.device, known: Measured
) -> Measured:
    """`known` and what is missing; every candidate is put into the model, for which no layer is computed."""
    (matrix,) = decision.matrices
    found = known
    for label in options_of(plan, decision, candidates):
        if label == KEEP or label in known.kl:
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

        kl = _finite(decision, label, model.kl_of_head(pieces(), matrix.out_features))
        found = found.with_kl(label, kl).with_error(label, sums[0] / max(sums[1], 1e-30))
    return found


def _scheme(decision: Decision, label: str) -> Scheme:
    scheme = decision.scheme(label)
    assert scheme is not None
    return scheme


def _probe(plan: Plan, decision: Decision, candidates: Sequence[str]) -> tuple[str | None, list[str]]:
    """The coarsest candidate that `decision` can take, and the others."""
    options = [option for option in options_of(plan, decision, candidates).values() if option.label != KEEP]
    probe = min(options, key=lambda option: (option.disk_bytes, option.label), default=None)
    return (None, []) if probe is None else (probe.label, [option.label for option in options if option is not probe])


def _harms(plan: Plan, decision: Decision, candidates: Sequence[str], known: Measured) -> tuple[dict[str, float], dict[str, float]]:
    """(harm, error) by label, worked out from what is known; raises KeyError where something is missing.

    What the solver gains over rounding to nearest is taken as the probe's for every scheme; rounded inputs add their own error.
    """
    probe, others = _probe(plan, decision, candidates)
    if probe is None:
        return {KEEP: 0.0}, {KEEP: 0.0}
    labels = (probe, *others)
    if decision.is_head:
        return {**{label: known.kl[label] for label in labels}, KEEP: 0.0}, {**{label: known.error[label] for label in labels}, KEEP: 0.0}
    if decision.is_experts:
        error = {label: known.error[label] for label in labels}
    else:
        gained = known.error[probe] / max(known.nearest[probe], 1e-30)
        error = {probe: known.error[probe], **{label: gained * known.nearest[label] for label in others}}
    whole = {label: value + (_FP8_INPUT_ERROR if _scheme(decision, label).input_activations else 0.0) for label, value in error.items()}
    kl, of_probe = known.kl[probe], error[probe]
    # without an error on the windows that were solved on there is no ratio: every scheme counts with the probe's KL
    harm = {label: kl * value / of_probe if of_probe > 0 else kl for label, value in whole.items()}
    return {**harm, KEEP: 0.0}, {**whole, KEEP: 0.0}


def _finite(decision: Decision, label: str, measured: float) -> float:
    if not measured >= 0:
        raise IntegrityError(
            f"{decision.name} as {label} makes the model's output {measured}", "check the source: `gemq eval-ppl` on it should be finite"
        )
    return measured
