"""The source's own batches beside those of the quantized model, for recipes that ask what a unit's inputs would have been.

Both go through one set of modules, whose weights become the quantized ones unit by unit. So the source's batches either keep one stop ahead, where
the weights in place are still their own, or stand at the layer's entrance and run anew with a copy of its weights. The first costs one forward
and everything that a batch holds within a layer; the second one run of the layer for each of its units, and next to no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from gemq.quantize.replay import Replays
from gemq.quantize.streams import Done, Stream


class Ahead:
    """Batches that keep one stop ahead: each reaches a unit before any weight up to there is replaced."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def start(self) -> None:
        """Bring every batch to its first stop."""
        self._stream.start()

    def enter(self, layer: nn.Module) -> None:
        """Go into `layer`, which has the source's weights now."""
        self._stream.resume()

    def lead(self) -> None:
        """Go to the next stop: what stands before it is about to be replaced."""
        self._stream.resume()

    def at(self, position: int) -> Any:
        """The event at which batch `position` stands: the unit that the quantized model's batches stand at, or the end."""
        return self._stream.events[position]

    def leave(self) -> None:
        """Leave the layer, before its weights go: it is left already."""

    def close(self) -> None:
        """End every forward."""
        self._stream.close()


class Anew:
    """Batches at layers' entrances, which run a layer anew, with the source's weights, up to the unit whose inputs are asked for."""

    def __init__(self, replays: Replays) -> None:
        self._replays = replays
        self._layer: nn.Module | None = None
        self._own: dict[str, torch.Tensor] = {}

    def start(self) -> None:
        """Bring every batch to the entrance of the first layer."""
        self._replays.start()

    def enter(self, layer: nn.Module) -> None:
        """Keep a copy of the weights of `layer`, which are the source's now."""
        self._layer, self._own = layer, {name: weight.data.clone() for name, weight in layer.named_parameters()}

    def lead(self) -> None:
        """Nothing that is about to be replaced is needed: there is a copy."""

    def at(self, position: int) -> Any:
        """The event at the first unit of the layer that is not solved, or at the end. Nobody else keeps its inputs."""
        event = self._replays.events[position]
        if isinstance(event, Done):
            return event
        with self._own_weights():
            return self._replays.visit(position)

    def leave(self) -> None:
        """Bring every batch through the layer, to the entrance of the next one or to the end."""
        with self._own_weights():
            self._replays.go_on()
        self._layer, self._own = None, {}

    def close(self) -> None:
        """End every forward."""
        self._replays.close()

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        assert self._layer is not None
        weights = dict(self._layer.named_parameters())
        quantized = {name: weight.data for name, weight in weights.items()}
        for name, own in self._own.items():
            weights[name].data = own
        try:
            yield
        finally:
            for name, weight in quantized.items():
                weights[name].data = weight
