"""The streams of a walk: each batch's forward in a greenlet of its own, and the places where they stand together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import greenlet

from gemq.quantize.plan import Unit
from gemq.quantize.replay import LayerCall


@dataclass(frozen=True)
class AtLayer:
    """A batch at the entrance of layer `index`, and what the layer is called with."""

    index: int
    embeddings: torch.Tensor | None  # what the first layer reads
    call: LayerCall


@dataclass(frozen=True)
class AtUnit:
    """A batch at a unit that is not solved: the tensor [..., in] that its linears read."""

    unit: Unit
    inputs: torch.Tensor
    before: torch.Tensor | None = None  # what the norm read that made them, where smoothing may change it

    def without_inputs(self) -> AtUnit:
        return AtUnit(self.unit, self.inputs.new_empty(0))


@dataclass(frozen=True)
class AtExperts:
    """A batch at a mixture's experts: what they read, and which of them each token goes to."""

    layer: int
    hidden: torch.Tensor  # [tokens, in]
    chosen: torch.Tensor  # [tokens, k] expert numbers


@dataclass(frozen=True)
class LeavingLayer:
    """A batch at the end of layer `index`: what the layer was called with, and gave."""

    index: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


@dataclass(frozen=True)
class Done:
    """A batch at the end of the decoder: its last hidden states."""

    hidden: torch.Tensor

    def without_hidden(self) -> Done:
        return Done(self.hidden.new_empty(0))


class Stream:
    """The forwards of all batches, which stand at one place of the decoder together."""

    def __init__(self, forward: Callable[[Any], Done], batches: Sequence[Any], seen: Callable[[int, Any], None]) -> None:
        self._runs, self._batches, self._seen = [greenlet(forward) for _ in batches], batches, seen
        self.events: list[Any] = [None] * len(batches)
        self._embeddings: list[torch.Tensor | None] = [None] * len(batches)

    def start(self) -> None:
        """Bring every batch to its first stop; `seen` hears of each arrival."""
        for position, (run, batch) in enumerate(zip(self._runs, self._batches, strict=True)):
            self._arrive(position, run.switch(batch))

    def resume(self, again: bool = False) -> None:
        """Bring every batch from where it stands to its next stop. What nothing reads any more is freed on the way.

        `again`: the layer that the batches are leaving has changed, and is computed once more.
        """
        stand = _place(self.events[0])
        for position, run in enumerate(self._runs):
            if _place(self.events[position]) != stand:
                raise AssertionError(f"batches stand at {stand} and at {_place(self.events[position])}")
            spent = _spent_by(self.events[position])
            # the event is dropped before its batch goes on: the input it holds may be the batch's largest tensor
            self.events[position] = None
            event = run.switch(again)
            if isinstance(event, AtLayer) and event.index == 1 and (embeddings := self._embeddings[position]) is not None:
                spent.append(embeddings)
                self._embeddings[position] = None
            for tensor in spent:
                tensor.untyped_storage().resize_(0)  # a paused frame still names it
            self._arrive(position, event)

    def _arrive(self, position: int, event: Any) -> None:
        if isinstance(event, AtLayer) and event.embeddings is not None:
            self._embeddings[position] = event.embeddings
        self.events[position] = event
        self._seen(position, event)

    def close(self) -> None:
        """End every forward that has not come to its end."""
        for run in self._runs:
            if run and not run.dead:
                run.throw()


def _place(event: Any) -> object:
    if isinstance(event, AtUnit):
        return event.unit.name
    if isinstance(event, AtExperts):
        return f"the experts of layer {event.layer}"
    if isinstance(event, LeavingLayer):
        return f"the end of layer {event.index}"
    return event.index if isinstance(event, AtLayer) else "the end"


def _spent_by(event: Any) -> list[torch.Tensor]:
    """What nothing reads any more when the batch of `event` has come to its next stop."""
    if isinstance(event, AtUnit) and event.unit.matrices[0].kind.input_is_spent:
        return [event.inputs]
    return []
