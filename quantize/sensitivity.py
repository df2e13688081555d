"""What each scheme would do to each unit, measured once: the error of the unit's own output, and the KL of the whole model with that unit alone
quantized.

The walk goes through the source as it is. At each unit every candidate is solved on the same inputs. The coarsest is put into the whole model
and KL(source || model) is measured on held-out windows; the others' KL is that, scaled by their own output errors, for KL is quadratic in a
small error as the output error is. What was measured is written down unit by unit, and never measured again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.atomic import write_file
from gemq.errors import IntegrityError, UsageError
from gemq.eval.local import LocalCheckpoint, LocalModel
from gemq.quantize import gptq
from gemq.quantize.journal import canonical
from gemq.quantize.plan import Plan, Unit, make_plan, unit_bytes, why_not
from gemq.quantize.scales import restore
from gemq.quantize.skeleton import Skeleton
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Recipe, Rule, Scheme
from gemq.shards import ShardReader
from gemq.source import Source

KEEP = "keep"
SCHEMES: dict[str, Scheme] = {
    **{
        f"int4-g{size}": Scheme.model_validate({"weights": {"num_bits": 4, "strategy": "group", "group_size": size, "observer": "mse"}})
        for size in (128, 64, 32)
    },
    "int8": Scheme.model_validate({"weights": {"num_bits": 8, "strategy": "channel"}}),
    "fp8": Scheme.model_validate(
        {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}, "input_activations": {"type": "float"}}
    ),
}
DEFAULT_CANDIDATES = ("int4-g128", "int4-g64", "int4-g32", "int8", KEEP)
_SCORED_POSITIONS = 256
_HELD_OUT_SHARE = 8  # of the calibration windows one in so many is kept for measuring KL
_SOLVED_ON = 16  # windows that the candidates are solved on: a ranking needs fewer than a checkpoint


def parse_candidates(text: str) -> tuple[str, ...]:
    """The candidates named in `text`, comma-separated, the kept weight always among them; raises UsageError for one that has no kernel."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SCHEMES and name != KEEP:
            raise UsageError(f"candidate {name!r} is not known", f"choose among {', '.join([*SCHEMES, KEEP])}")
    if not set(names) - {KEEP}:
        raise UsageError("there is no candidate to choose", f"name some of {', '.join(SCHEMES)}")
    return tuple(dict.fromkeys([*names, KEEP]))


@dataclass
class Sensitivities:
    """Unit -> candidate -> harm (KL, nats a token) and output_error (relative), as far as they are measured; kept in a JSON file."""

    path: Path
    identity: dict[str, Any]
    harm: dict[str, dict[str, float]] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, identity: dict[str, Any]) -> Sensitivities:
        """What the file holds of the same identity; an unreadable or foreign one is measured anew, and said so."""
        made = cls(path, json.loads(canonical(identity)))
        if not path.exists():
            return made
        try:
            held = json.loads(path.read_bytes())
            if held["identity"] == made.identity:
                made.harm, made.error = dict(held["harm"]), dict(held["error"])
                return made
            reason = "are of another source, calibration, candidate list or version"
        except (ValueError, KeyError, TypeError, OSError):
            reason = "can't be read"
        output.warn(f"the sensitivities in {path} {reason}: measuring again")
        return made

    def add(self, unit: str, harm: dict[str, float], error: dict[str, float]) -> None:
        """Record a unit and write the file, whole or not at all."""
        self.harm[unit], self.error[unit] = harm, error
        write_file(self.path, canonical({"identity": self.identity, "harm": self.harm, "error": self.error}))


def search_plan(skeleton: Skeleton, recipe: Recipe) -> Plan:
    """The plan whose units the search decides on: all that `recipe` quantizes by its rules, tables and head left out."""
    keeps = tuple(rule for rule in recipe.rules if rule.scheme == KEEP)
    int8 = SCHEMES["int8"]
    rules = (*keeps, Rule(match=("ple",), scheme=int8, optional=True, method="gptq"), Rule(match=("decoder",), scheme=int8, method="gptq"))
    plan = make_plan(skeleton, recipe.model_copy(update={"rules": rules, "gptq": recipe.gptq.model_copy(update={"asymmetric": 0.0})}))
    if any(matrix.experts for unit in plan.units for matrix in unit.matrices):
        raise UsageError(
            "the budget search doesn't take mixtures of experts yet", "choose a recipe by hand and measure it with `gemq eval-ppl`"
        )
    return plan


def options_of(plan: Plan, unit: Unit, candidates: Sequence[str]) -> dict[str, int]:
    """Candidate -> bytes of `unit` under it, for those that its shapes and the kernels allow."""
    return {
        name: unit_bytes(plan, unit.matrices, SCHEMES.get(name))
        for name in candidates
        if name == KEEP or not any(why_not(plan.recipe, matrix, SCHEMES[name]) for matrix in unit.matrices)
    }


class _Model:
    """The whole source in memory, and KL(source || itself with one unit's weights replaced) on held-out windows."""

    def __init__(self, loaded: LocalModel, windows: Sequence[Sequence[int]]) -> None:
        self._loaded = loaded
        model = loaded.causal_model
        self._text = getattr(model.base_model, "language_model", model.base_model)
        self._ids = [torch.tensor([window]) for window in windows]
        positions = sum(map(len, windows)) - len(windows)
        self._stride = max(1, positions // _SCORED_POSITIONS)
        self._probabilities: list[torch.Tensor] = []
        self._negentropy: list[float] = []
        with torch.inference_mode():
            for hidden in self._hidden():
                logs = loaded.head.log_probabilities(hidden)
                probabilities = logs.exp()
                self._negentropy.append((probabilities * logs).sum().item())
                self._probabilities.append(probabilities)
        self._count = sum(part.shape[0] for part in self._probabilities)

    def _hidden(self) -> list[torch.Tensor]:
        found = []
        for ids in self._ids:
            states = self._text(input_ids=ids.to(self._loaded.device), use_cache=False).last_hidden_state[0]
            found += list(states[1 :: self._stride].split(64))
        return found

    @torch.inference_mode()
    def kl(self, unit: Unit, weights: Sequence[torch.Tensor]) -> float:
        """Nats a token with `unit`'s matrices replaced by `weights`; they are put back afterwards."""
        modules = [self._text.get_submodule(matrix.module.removeprefix("model.")) for matrix in unit.matrices]
        own = [module.weight.data for module in modules]
        try:
            for module, weight in zip(modules, weights, strict=True):
                module.weight.data = weight.to(module.weight)
            total = 0.0
            for hidden, probabilities, negentropy in zip(self._hidden(), self._probabilities, self._negentropy, strict=True):
                total += negentropy - (probabilities * self._loaded.head.log_probabilities(hidden)).sum().item()
        finally:
            for module, weight in zip(modules, own, strict=True):
                module.weight.data = weight
        return max(total / self._count, 0.0)


def measure(
    source: Source, reader: ShardReader, plan: Plan, windows: Sequence[Sequence[int]], candidates: Sequence[str], *, path: Path, device: str,
    identity: Mapping[str, Any],
) -> Sensitivities:  # fmt: skip
    """The sensitivities of `plan`'s units to `candidates`, measured where the file at `path` has none.

    `windows` are the calibration set's; the last eighth of them (two at least) is held out for KL. Raises UsageError for fewer than four.
    """
    if len(windows) < 4:
        raise UsageError(f"the search has {len(windows)} calibration windows", "give at least 4: some are held out to measure on")
    held_out = max(2, len(windows) // _HELD_OUT_SHARE)
    solved_on, scored_on = windows[: len(windows) - held_out][:_SOLVED_ON], windows[-held_out:][:4]
    whole = {**identity, "candidates": list(candidates), "windows": _digest(solved_on, scored_on), "gptq": plan.recipe.gptq.model_dump()}
    found = Sensitivities.open(path, whole)
    if all(unit.name in found.harm for unit in plan.units):
        return found
    with (
        LocalCheckpoint.open(str(source.directory)).loaded(device, "float32") as loaded,
        output.progress("sensitivities", len(plan.units), "units") as advance,
    ):
        if done := sum(unit.name in found.harm for unit in plan.units):
            advance(done)
        model = _Model(loaded, scored_on)

        def restored(unit: Unit) -> list[torch.Tensor] | None:
            # a layer is replayed when all of it is measured: the walk goes through the source's own weights in any case
            layer = [other.name for other in plan.units if other.layer == unit.layer]
            if not all(name in found.harm for name in layer):
                return None
            return [reader.read(matrix.tensor).to(torch.float32) for matrix in unit.matrices]

        def solve(unit: Unit, weights: list[torch.Tensor], hessian: gptq.Hessian | None) -> list[torch.Tensor]:
            assert hessian is not None
            if unit.name not in found.harm:
                harm, error = _try_all(plan, unit, weights, hessian, candidates, model)
                found.add(unit.name, harm, error)
                advance(1, f"{unit.name} " + " ".join(f"{name} {value:.1e}" for name, value in harm.items() if name != KEEP))
            return weights

        Walk(plan, reader, solved_on, device).run(Walker(restored, solve, lambda index: None))
    return found


def _try_all(
    plan: Plan, unit: Unit, weights: list[torch.Tensor], hessian: gptq.Hessian, candidates: Sequence[str], model: _Model
) -> tuple[dict[str, float], dict[str, float]]:
    stacked, sizes = torch.cat(weights), [weight.shape[0] for weight in weights]
    moments = hessian.mean(unit.name)
    factorization = gptq.factorize(moments, plan.recipe.gptq, unit.name)
    options = options_of(plan, unit, candidates)
    error: dict[str, float] = {}
    coarsest: torch.Tensor | None = None
    probe = min((name for name in options if name != KEEP), key=lambda name: (options[name], name), default=None)
    for name in options:
        if name == KEEP:
            continue
        scheme = SCHEMES[name].weights
        stored, scales = gptq.solve(stacked, factorization, scheme)
        error[name] = gptq.output_error(stacked, stored, scales, scheme, moments)
        if name == probe:
            coarsest = restore(stored, scales, scheme)
    if probe is None or coarsest is None:
        return {KEEP: 0.0}, {KEEP: 0.0}
    measured = model.kl(unit, coarsest.split(sizes))
    if not measured >= 0:
        raise IntegrityError(
            f"{unit.name} as {probe} makes the model's output {measured}", "check the source: `gemq eval-ppl` on it should be finite"
        )
    scale = measured / max(error[probe], 1e-30)
    return {**{name: scale * value for name, value in error.items()}, KEEP: 0.0}, {**error, KEEP: 0.0}


def _digest(*sets: Sequence[Sequence[int]]) -> str:
    return hashlib.sha256(canonical([[list(window) for window in windows] for windows in sets])).hexdigest()
