"""Experts of a mixture: each solved on the tokens that the router sends it, one Hessian in memory at a time.

All experts of a layer read at one pause of the walk: what goes into an expert's down projection follows from the tokens routed to it and its
gate and up projections as they are then, quantized already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gemq.output import warn
from gemq.quantize import gptq
from gemq.quantize.plan import Unit
from gemq.quantize.rtn import round_to_nearest
from gemq.quantize.scales import restore
from gemq.quantize.squared_errors import row_errors
from gemq.recipes.model import Gptq


class ExpertSolutions:
    """Iterates over (unit, expert, stored [out, in], scales [out, groups]) and replaces the module's weights as it goes; then has `reports`."""

    def __init__(self, units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor], options: Gptq) -> None:
        self._units = {unit.matrices[0].kind.path.rpartition(".")[2]: unit for unit in units}
        self._module, self._rows_of, self._options = module, rows_of, options
        # per unit: squared errors and signals of the outputs, then of the weights
        self._errors: dict[str, list[float]] = {unit.name: [0.0, 0.0, 0.0, 0.0] for unit in units}
        self._notes: dict[str, list[str]] = {unit.name: [] for unit in units}
        self._nearest_rows = {unit.name: 0 for unit in units}
        self._idle: set[int] = set()

    def __iter__(self) -> Iterator[tuple[Unit, int, torch.Tensor, torch.Tensor]]:
        gate_up, down = self._module.gate_up_proj.data, self._module.down_proj.data
        for expert in range(gate_up.shape[0]):
            rows = self._rows_of(expert)
            if not rows.shape[0]:
                self._idle.add(expert)
            yield from self._solve("gate_up_proj", expert, gate_up[expert], rows)
            gate, up = (rows @ gate_up[expert].T).chunk(2, dim=-1)
            yield from self._solve("down_proj", expert, down[expert], self._module.act_fn(gate) * up)
        if self._idle:
            some = ", ".join(map(str, sorted(self._idle)[:5]))
            warn(f"{len(self._idle)} experts ({some}...) saw no calibration token and were rounded to nearest: calibrate with more samples")

    def _solve(
        self, leaf: str, expert: int, weight: torch.Tensor, rows: torch.Tensor
    ) -> Iterator[tuple[Unit, int, torch.Tensor, torch.Tensor]]:
        unit = self._units.get(leaf)
        if unit is None:
            return
        scheme, name, held = unit.scheme.weights, f"{unit.name}[{expert}]", weight
        weight = weight.to(torch.float32)
        if unit.method == "gptq" and rows.shape[0]:
            hessian = gptq.Hessian(weight.shape[1], weight.device)
            hessian.add(rows)
            factorization = gptq.factorize(hessian.mean(name), self._options, name)
            found = gptq.solution(weight, factorization, scheme)
            stored, scales = found.stored, found.scales
            self._nearest_rows[unit.name] += found.nearest_rows
            if note := gptq.note_on_rows(factorization, found.overflowed_rows):
                self._notes[unit.name].append(f"expert {expert}: {note}")
            moments = None if factorization.degenerate else factorization.moments
        else:
            moments = None
            stored, scales = round_to_nearest(weight, scheme)
        restored = restore(stored, scales, scheme)
        difference = weight - restored
        sums = self._errors[unit.name]
        for place, value in enumerate((difference, weight)):
            if moments is not None:
                sums[place] += row_errors(value, moments).sum().item() * rows.shape[0]
            sums[2 + place] += row_errors(value, None).sum().item()
        held.copy_(restored)
        yield unit, expert, stored, scales

    @property
    def reports(self) -> dict[str, dict[str, Any]]:
        """Per unit: the relative output error over the experts that saw tokens, or the weights' over all; the experts that saw none; notes."""
        found: dict[str, dict[str, Any]] = {}
        for unit in self._units.values():
            error, signal, weight_error, weight_signal = self._errors[unit.name]
            measured = {"output_error": error / signal} if signal > 0 else {"weight_error": weight_error / weight_signal if weight_signal else 0.0}
            found[unit.name] = {**measured, "experts_without_tokens": len(self._idle)}
            if self._nearest_rows[unit.name]:
                found[unit.name]["rows_rounded_to_nearest"] = self._nearest_rows[unit.name]
            if self._notes[unit.name]:
                found[unit.name]["notes"] = self._notes[unit.name]
        return found


def solve_experts(units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor], options: Gptq) -> ExpertSolutions:
    """The solutions of `units` (gate_up_proj and down_proj of one layer, or one of them) for the experts in `module`."""
    return ExpertSolutions(units, module, rows_of, options)
