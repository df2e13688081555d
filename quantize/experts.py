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
from gemq.recipes.model import Gptq


class ExpertSolutions:
    """Iterates over (unit, expert, stored [out, in], scales [out, groups]) and replaces the module's weights as it goes; then has `reports`."""

    def __init__(self, units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor], options: Gptq) -> None:
        self._units = {unit.matrices[0].kind.path.rpartition(".")[2]: unit for unit in units}
        self._module, self._rows_of, self._options = module, rows_of, options
        self._errors: dict[str, list[float]] = {unit.name: [0.0, 0.0] for unit in units}
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
            moments = hessian.mean(name)
            stored, scales = gptq.solve(weight, gptq.factorize(moments, self._options, name), scheme)
        else:
            moments = None
            stored, scales = round_to_nearest(weight, scheme)
        restored = restore(stored, scales, scheme)
        difference = weight - restored
        sums = self._errors[unit.name]
        sums[0] += (difference.square() if moments is None else (difference @ moments) * difference * rows.shape[0]).sum().item()
        sums[1] += (weight.square() if moments is None else (weight @ moments) * weight * rows.shape[0]).sum().item()
        held.copy_(restored)
        yield unit, expert, stored, scales

    @property
    def reports(self) -> dict[str, dict[str, Any]]:
        """Per unit: the relative error over all its experts, and how many of them saw no token."""
        return {
            unit.name: {
                "output_error" if unit.method == "gptq" else "weight_error": self._errors[unit.name][0]
                / max(self._errors[unit.name][1], 1e-30),
                "experts_without_tokens": len(self._idle),
            }
            for unit in self._units.values()
        }


def solve_experts(units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor], options: Gptq) -> ExpertSolutions:
    """The solutions of `units` (gate_up_proj and down_proj of one layer, or one of them) for the experts in `module`."""
    return ExpertSolutions(units, module, rows_of, options)
