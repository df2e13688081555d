"""Where a batch's forward is stopped: hooks at layers' entrances, at units, at a mixture's experts, and at the ends of layers that are tuned."""

from __future__ import annotations

from collections.abc import Callable, Set
from typing import Any

import torch
from greenlet import getcurrent
from torch import nn

from gemq.quantize.plan import Plan, Unit
from gemq.quantize.replay import LayerCall, Reached, Replays
from gemq.quantize.streams import AtExperts, AtLayer, AtUnit, LeavingLayer


class Stops:
    """The hooks of a walk of `plan`. Units in `solved` and the ends of `restored` layers are passed by; `replays` are those whose layers run anew.

    All three are the walk's own, and read whenever a hook is reached.
    """

    def __init__(self, plan: Plan, solved: Set[str], restored: Set[int | None], replays: list[Replays]) -> None:
        self._plan, self._solved, self._restored, self._replays = plan, solved, restored, replays
        self._before_norm: dict[Any, torch.Tensor] = {}  # by greenlet
        self._hooks: list[Any] = []

    def place(self) -> None:
        """Put the hooks in."""
        model, layers = self._plan.skeleton.model, list(enumerate(self._plan.skeleton.decoder.layers))
        for index, layer in layers:
            self._hooks.append(layer.register_forward_pre_hook(self._at_layer(index), with_kwargs=True))
        for index, layer in layers if self._plan.recipe.tuning else []:
            self._hooks.append(layer.register_forward_hook(self._at_exit(index), with_kwargs=True))
        for index, layer in layers:
            if self._plan.expert_units(index):
                self._hooks.append(layer.experts.register_forward_pre_hook(self._at_experts(index)))
        for pair in self._plan.pairs.values():
            if pair.is_norm:
                self._hooks.append(model.get_submodule(pair.module).register_forward_pre_hook(self._at_norm(pair.unit)))
        for module, unit in self._plan.quantized_matrices.items():
            if module != "lm_head" and not unit.is_table and unit.matrices[0].experts is None:
                self._hooks.append(model.get_submodule(module).register_forward_pre_hook(self._at_unit(unit)))

    def remove(self) -> None:
        """Take them out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _at_layer(self, index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, Any]) -> None:
            if (parent := getcurrent().parent) is not None:  # None: a layer that is being tuned
                parent.switch(AtLayer(index, args[0] if index == 0 else None, LayerCall(index, module, args, kwargs)))

        return hook

    def _at_unit(self, unit: Unit) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            # where layers run anew, what is rounded to nearest is solved without its inputs
            if unit.name not in self._solved and not (self._replays and not self._plan.reads_inputs(unit)):
                self._stop(AtUnit(unit, args[0], self._before_norm.pop(getcurrent(), None)))

        return hook

    def _at_norm(self, unit: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if not self._replays and unit not in self._solved:
                self._before_norm[getcurrent()] = args[0]

        return hook

    def _at_experts(self, layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
            if any(unit.name not in self._solved for unit in self._plan.expert_units(layer)):
                self._stop(AtExperts(layer, args[0], args[1]))

        return hook

    def _at_exit(self, index: int) -> Callable[..., torch.Tensor | None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor | None:
            parent = getcurrent().parent
            if parent is None or index in self._restored:
                return None
            again = parent.switch(LeavingLayer(index, args, kwargs, output))
            return module.forward(*args, **kwargs) if again else None  # the layer has become another since

        return hook

    def _stop(self, event: Any) -> None:
        if any(batches.replaying for batches in self._replays):
            raise Reached(event)
        getcurrent().parent.switch(event)
