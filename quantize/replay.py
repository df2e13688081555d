"""A stream of batches that stand at layers only, for a GPU: what lies within a layer is computed again for each unit, instead of kept.

A batch paused within a layer holds everything that the rest of the layer reads, on E4B up to 60 kB a token in float32. Paused at the layer's
entrance it holds 5 kB in bfloat16. So each unit that needs its inputs gets a run of the layer of its own, from the entrance to the unit; once
all are solved the layer runs through. That is about twice the products, on a device that has them to spare, for a tenth of the memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet
from torch import nn

from gemq.quantize.activations import Activations, ByLayer


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


class Replays:
    """The forwards of all batches, each at the entrance of one layer.

    `seen(position, event)` hears of each arrival at a unit. `pending(layer)` says whether a unit of the layer still waits for its inputs.
    `with_end`: whether the decoder's output is kept.
    """

    def __init__(
        self, forward: Callable[[Any], Any], batches: Sequence[Any], seen: Callable[[int, Any], None], pending: Callable[[int], bool],
        activations: Activations, *, with_end: bool,
    ) -> None:  # fmt: skip
        self._forward, self._batches, self._seen, self._pending = forward, batches, seen, pending
        self._activations, self._with_end = activations, with_end
        self._runs: list[Any] = [None] * len(batches)
        self._calls: list[Any] = [None] * len(batches)
        self.events: list[Any] = [None] * len(batches)
        self.by_layer: list[ByLayer] = []
        self.replaying = False

    def start(self) -> None:
        """Bring every batch to its first stop. At a unit before the layers it is stopped for good, and starts again for the next."""
        for position, batch in enumerate(self._batches):
            run = self._runs[position] = greenlet(self._forward)
            self._arrive(position, run.switch(batch))

    def resume(self, again: bool = False) -> None:
        """Bring every batch to its next stop; `again` is for streams that stop where they leave a layer."""
        assert not again
        if self._runs[0] is None:
            self.start()
        elif not (self._pending(self._calls[0].index) and self._replay()):
            self._go_on()

    def close(self) -> None:
        """End every forward, and let go of what was kept for it."""
        for run in self._runs:
            if run and not run.dead:
                run.throw()
        self._activations.close()
        for kept in self.by_layer:
            kept.close()

    def keep_by_layer(self, inputs: torch.Tensor) -> ByLayer:
        """`inputs` [batch, length, layers, dim] as something that gives one layer's at a time."""
        self.by_layer.append(ByLayer(inputs, self._activations))
        return self.by_layer[-1]

    def _replay(self) -> bool:
        """Run every batch from the layer's entrance to its next unit; whether there was one."""
        for position, call in enumerate(self._calls):
            self._activations.fetch(position)
            self.replaying = True
            try:
                call.module.forward(*call.args, **call.kwargs)
            except Reached as reached:
                event = reached.event
            else:
                if position:
                    raise AssertionError(f"a batch went through layer {call.index} without stopping where others did")
                return False
            finally:
                self.replaying = False
                self._activations.release(position)
            self._arrive(position, event)
        return True

    def _go_on(self) -> None:
        for position, run in enumerate(self._runs):
            self._activations.fetch(position)
            call = self._calls[position]
            self._calls[position] = self.events[position] = None
            event = run.switch()
            call.args[0].untyped_storage().resize_(0)  # the decoder's frame may still name it, and nothing reads it
            self._arrive(position, event)

    def _arrive(self, position: int, event: Any) -> None:
        self._seen(position, event)
        call = getattr(event, "call", None)
        if call is not None:
            self._calls[position] = call
            self._activations.hold(position, _tensors(call))
        elif hasattr(event, "inputs"):
            event = event.without_inputs()
            if self._calls[position] is None:
                self._runs[position].throw()
                self._runs[position] = None
        elif self._runs[position].dead:
            self._activations.hold(position, ())
            if not self._with_end:
                event = event.without_hidden()
        self.events[position] = event


def _tensors(call: LayerCall) -> list[torch.Tensor]:
    """What a batch holds at a layer's entrance: the hidden states, and keys and values of layers that are shared with later ones."""
    shared = call.kwargs.get("shared_kv_states") or {}
    return [call.args[0], *(tensor for pair in shared.values() for tensor in pair)]
