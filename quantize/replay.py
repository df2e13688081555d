"""A stream of batches that stand at layers only, for a GPU: what lies within a layer is computed again for each unit, instead of kept.

A batch paused within a layer holds everything that the rest of the layer reads, on E4B up to 60 kB a token in float32. Paused at the layer's
entrance it holds 5 kB in bfloat16. So each unit that needs its inputs gets a run of the layer of its own, from the entrance to the unit; once
all are solved the layer runs through. That is about twice the products, on a device that has them to spare, for a tenth of the memory.

Where there is memory for it, batches also pause where they hold little more: at the MLP's first products and at the linears after it. Then
attention runs twice instead of four times, and only the MLP is run anew for its down projection. Which of the two it is changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet
from torch import nn

from gemq.quantize.activations import Activations
from gemq.quantize.plan import Unit
from gemq.quantize.scratch import ByLayer, Scratch


@dataclass(frozen=True)
class LayerCall:
    """A decoder layer, and what the decoder's forward calls it with."""

    index: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Reached(BaseException):
    """Ends a run of a layer at a unit that is not solved yet. No Exception, so that no forward catches it."""

    def __init__(self, event: Any) -> None:
        super().__init__()
        self.event = event


# a batch that pauses there would hold queries, keys and values, or the MLP's products
_HELD_DEARLY = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.down_proj")


class Replays:
    """The forwards of all batches, each at the entrance of one layer, or within it if `pausing`.

    `seen(position, event)` hears of each arrival at a unit. `pending(layer)` gives the layer's first unit that still waits for its inputs.
    `module_of` finds a module by name. `with_end`: whether the decoder's output is kept.
    """

    def __init__(
        self, forward: Callable[[Any], Any], batches: Sequence[Any], seen: Callable[[int, Any], None], pending: Callable[[int], Unit | None],
        module_of: Callable[[str], Any], activations: Activations, scratch: Scratch, *, pausing: bool, with_end: bool,
    ) -> None:  # fmt: skip
        self._forward, self._batches, self._seen, self._pending = forward, batches, seen, pending
        self._module_of, self._activations, self._pausing, self._with_end = module_of, activations, pausing, with_end
        self._scratch = scratch
        self._paused_at: Unit | None = None  # within a layer, and with what inputs
        self._inputs: list[Any] = [None] * len(batches)
        self._runs: list[Any] = [None] * len(batches)
        self._calls: list[Any] = [None] * len(batches)
        self.events: list[Any] = [None] * len(batches)
        self.starting = self.replaying = False

    def start(self) -> None:
        """Bring every batch to its first stop. At a unit before the layers it is stopped for good, and starts again for the next."""
        self.starting = True
        for position, batch in enumerate(self._batches):
            run = self._runs[position] = greenlet(self._forward)
            self._arrive(position, run.switch(batch))
        self.starting = False

    def resume(self, again: bool = False) -> None:
        """Bring every batch to its next stop; `again` is for streams that stop where they leave a layer."""
        assert not again
        if self._runs[0] is None:
            self.start()
            return
        unit = self._pending(self._calls[0].index)
        if unit is None or (self._pausing and _kind(unit) not in _HELD_DEARLY):
            self.go_on()
        elif self._paused_at is None:
            if not self._replay([(call.module, call.args, call.kwargs) for call in self._calls]):
                self.go_on()
        else:
            mlp = self._module_of(self._paused_at.matrices[0].module.rpartition(".")[0])
            inside = (_kind(self._paused_at), _kind(unit)) == ("mlp.gate_up_proj", "mlp.down_proj")
            if not (inside and self._replay([(mlp, (inputs,), {}) for inputs in self._inputs])):
                self.go_on()

    def close(self) -> None:
        """End every forward, and let go of what was kept for it."""
        for run in self._runs:
            if run and not run.dead:
                run.throw()
        self._activations.close()
        self._scratch.close()

    def keep_by_layer(self, inputs: torch.Tensor) -> ByLayer:
        """`inputs` [batch, length, layers, dim] as something that gives one layer's at a time."""
        return ByLayer(inputs, self._activations, self._scratch)

    def visit(self, position: int) -> Any:
        """The event at the first unit of its layer where batch `position` stops; it stays at the entrance, and nothing here keeps the inputs."""
        call = self._calls[position]
        event = self._run_anew(position, call.module, call.args, call.kwargs)
        if event is None:
            raise AssertionError(f"a batch went through layer {call.index} without stopping at a unit")
        return event

    def _replay(self, runs: list[tuple[Any, tuple[Any, ...], dict[str, Any]]]) -> bool:
        """Run each batch's (module, args, kwargs) to the next unit; whether there was one."""
        for position, (module, args, kwargs) in enumerate(runs):
            event = self._run_anew(position, module, args, kwargs)
            if event is None:
                if position:
                    raise AssertionError(f"a batch went through {type(module).__name__} without stopping where others did")
                return False
            self._arrive(position, event, replayed=True)
        return True

    def _run_anew(self, position: int, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The event at the first unit that batch `position` reaches in `module`, None if it reaches none."""
        self._activations.fetch(position)
        shared = _shared(kwargs)
        before = dict(shared)
        self.replaying = True
        try:
            module.forward(*args, **kwargs)
        except Reached as reached:
            return reached.event
        finally:
            self.replaying = False
            # keys and values that the run left for later layers are made again when the layer runs through; until then nobody would count them
            shared.clear()
            shared.update(before)
            self._activations.release(position)
        return None

    def go_on(self) -> None:
        """Bring every batch from where it is paused to its next stop."""
        for position, run in enumerate(self._runs):
            self._activations.fetch(position)
            call = self._calls[position]
            self.events[position] = self._inputs[position] = None
            event = run.switch()
            if not (hasattr(event, "inputs") and _kind(event.unit) in _HELD_DEARLY):
                # past attention nothing reads it, though frames may name it
                call.args[0].untyped_storage().resize_(0)
            self._arrive(position, event)
        self._paused_at = getattr(self.events[0], "unit", None)

    def _arrive(self, position: int, event: Any, *, replayed: bool = False) -> None:
        self._seen(position, event)
        call = getattr(event, "call", None)
        if call is not None:
            self._calls[position] = call
            self._activations.hold(position, _tensors(call))
        elif hasattr(event, "inputs"):
            if event.unit.layer is None:
                self._runs[position].throw()
                self._runs[position] = None
            elif not replayed:
                self._inputs[position] = event.inputs
                self._activations.hold(position, [event.inputs, *_tensors(self._calls[position])])
            event = event.without_inputs()
        elif self._runs[position].dead:
            self._activations.hold(position, ())
            if not self._with_end:
                event = event.without_hidden()
        self.events[position] = event


def _kind(unit: Unit) -> str:
    return unit.matrices[0].kind.unit


def _tensors(call: LayerCall) -> list[torch.Tensor]:
    """What a batch holds at a layer's entrance: the hidden states, and keys and values of layers that are shared with later ones."""
    return [call.args[0], *(tensor for pair in _shared(call.kwargs).values() for tensor in pair)]


def _shared(kwargs: dict[str, Any]) -> dict[Any, tuple[torch.Tensor, ...]]:
    """Keys and values that layers leave for later ones, by kind of layer: the decoder's own dictionary, if it has one."""
    found: dict[Any, tuple[torch.Tensor, ...]] | None = kwargs.get("shared_kv_states")
    return {} if found is None else found
