"""Smoothing in a run: the scale that each unit takes, and what became of its producer.

A norm is written when its unit has been solved, as it was or divided. Rows of up_proj wait for down_proj to be solved, and are written with
their scales divided by powers of two: the integers, found before, stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch

from gemq.errors import IntegrityError
from gemq.quantize import smoothing
from gemq.quantize.gptq import Factorization
from gemq.quantize.plan import Pair, Plan, Unit
from gemq.quantize.writing import Writing
from gemq.shards import ShardReader


class Folds:
    """The producers of `plan`'s pairs. Norms are read from `reader` and written through `writing`."""

    def __init__(self, plan: Plan, reader: ShardReader, writing: Writing) -> None:
        self._plan, self._reader, self._writing = plan, reader, writing
        self._norms: dict[str, torch.Tensor | None] = {}  # unit -> its norm's new weight
        self._rows: dict[str, torch.Tensor | None] = {}  # unit -> what its producer's rows are divided by
        self.awaiting = {pair.module for pair in plan.pairs.values() if not pair.is_norm}  # modules whose rows may yet be divided

    def search(
        self, unit: Unit, weight: torch.Tensor, moments: torch.Tensor, factorization: Factorization | None
    ) -> tuple[torch.Tensor | None, dict[str, Any]]:
        """(the scale [in] for `weight` [out, in], None for none; the report) of a unit that has a pair; settles what becomes of its producer.

        `factorization` is GPTQ's, if it is to follow.
        """
        pair, options = self._plan.pairs[unit.name], self._plan.recipe.smoothing
        assert options is not None
        variances = None if factorization is None else smoothing.conditional_variances(factorization)
        norm = self._norm(pair) if pair.is_norm else None
        one_plus_w = bool(self._plan.skeleton.architecture.norm_is_one_plus_w)

        def possible(wanted: torch.Tensor) -> torch.Tensor:
            if norm is None:
                return smoothing.powers_of_two(wanted)
            return smoothing.fold_into_norm(norm, wanted.cpu(), one_plus_w=one_plus_w)[1].to(wanted)

        found = smoothing.search(weight, moments, unit.scheme.weights, options.alphas, possible, variances)
        if norm is not None:
            stored = norm
            if found.scale is not None:
                wanted = smoothing.wanted_scale(moments, found.alpha).cpu()
                stored, _ = smoothing.fold_into_norm(norm, wanted, one_plus_w=one_plus_w)
            self._writing.write(pair.tensor, stored)
            self._norms[unit.name] = None if found.scale is None else stored.to(torch.float32)
        else:
            self._rows[unit.name] = found.scale
        return found.scale, found.report(pair.tensor)

    def divisor(self, pair: Pair) -> torch.Tensor | None:
        """What the rows of a linear producer are divided by, once its unit has been searched; None for nothing."""
        return self._rows[pair.unit]

    def of_producer(self, pair: Pair) -> torch.Tensor | None:
        """For the walk: a norm's new weight, or the divisor of a linear's rows; None where nothing changed."""
        return self._norms.pop(pair.unit) if pair.is_norm else self._rows.pop(pair.unit)

    def _norm(self, pair: Pair) -> torch.Tensor:
        weight = self._reader.read(pair.tensor)
        if not weight.is_floating_point() or not torch.isfinite(weight).all():
            raise IntegrityError(f"{pair.tensor} is not all finite numbers", "the source is damaged: fetch it again")
        return weight
