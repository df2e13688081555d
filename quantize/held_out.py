"""The whole source in memory, and what replacing some of its weights does to its predictions on held-out windows.

Replacing weights of layer i changes nothing before it. So the inputs of layer i are kept, a forward begins there, and a sensitivity costs half
a forward on the mean. Layers that read the keys and values of an earlier one (`shared_kv_states`) find those that the source made. Whether a
model can be entered in its middle is tried on its last layers, where everything before is left out; if not, every forward is a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gemq import output
from gemq.eval.local import LocalModel
from gemq.quantize.decisions import Decision
from gemq.quantize.walk import batches_of

SCORED_TOKENS = 768  # that go through the model for one KL: few, since there is a KL for every unit
SCORED_POSITIONS = 256  # at most, whose distributions are compared
_TRIED = 8  # layers at whose inputs a forward is begun to see whether that gives the source's own outputs
_CHUNK = 64


def cut(windows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Eight of `windows` at most, cut to SCORED_TOKENS in all."""
    chosen = list(windows)[:8]
    length = max(2, SCORED_TOKENS // max(1, len(chosen)))
    return [list(window[:length]) for window in chosen]


class HeldOut:
    """KL(source || the source with a decision's weights replaced) on `windows`, in nats a token. `tokens` counts what went through the model."""

    def __init__(self, loaded: LocalModel, windows: Sequence[Sequence[int]]) -> None:
        self._loaded = loaded
        model = loaded.causal_model
        self._text: Any = getattr(model.base_model, "language_model", model.base_model)
        self._layers: list[Any] = list(self._text.layers)
        self._batches = [batch.to(loaded.device) for batch in batches_of(windows)]
        positions = sum(batch.numel() - batch.shape[0] for batch in self._batches)
        self._stride = max(1, -(-positions // SCORED_POSITIONS))
        self._at = 0
        self._entered: list[torch.Tensor] = []  # the inputs of layer `_at`, a batch each
        self._shared: list[dict[Any, Any]] = [{} for _ in self._batches]
        self.tokens = 0.0
        with torch.inference_mode():
            own, inputs = self._watched(len(self._layers) - _TRIED)
            self.partial = self._can_be_entered(own, inputs)
            self._states = self._scored(own)
            self._probabilities: list[torch.Tensor] = []
            self._negentropy: list[float] = []
            for states in self._states:
                logs = loaded.head.log_probabilities(states)
                probabilities = logs.exp()
                self._negentropy.append((probabilities * logs).sum().item())
                self._probabilities.append(probabilities)
        self._count = sum(states.shape[0] for states in self._states)
        if not self.partial:
            output.note("this model can't be entered in its middle: each measurement goes through all of it")

    def _forward(self, number: int) -> torch.Tensor:
        """The last hidden states of a batch, from layer `_at` on."""
        batch = self._batches[number]
        hooks = []
        if self._at:
            def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
                if (shared := kwargs.get("shared_kv_states")) is not None:
                    shared.update(self._shared[number])
                return (self._entered[number], *args[1:]), kwargs

            hooks.append(self._layers[self._at].register_forward_pre_hook(enter, with_kwargs=True))
            for layer in self._layers[: self._at]:
                layer.forward = _pass_on
        try:
            states: torch.Tensor = self._text(input_ids=batch, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
            for layer in self._layers[: self._at]:
                del layer.forward
        self.tokens += batch.numel() * (1 - self._at / len(self._layers))
        return states

    def _watched(self, first: int) -> tuple[list[torch.Tensor], dict[int, list[torch.Tensor]]]:
        """The source's own last hidden states, and the inputs of its layers from `first` on, a batch each; shared keys and values are kept."""
        inputs: dict[int, list[torch.Tensor]] = {}
        found = []
        for number in range(len(self._batches)):
            def watch(index: int, args: tuple[Any, ...], kwargs: dict[str, Any], number: int = number) -> None:
                if index >= first:
                    inputs.setdefault(index, []).append(args[0].clone())
                if index == len(self._layers) - 1 and "shared_kv_states" in kwargs:
                    self._shared[number] = dict(kwargs["shared_kv_states"])

            hooks = [layer.register_forward_pre_hook(lambda module, args, kwargs, index=index, watch=watch: watch(index, args, kwargs),
                                                     with_kwargs=True) for index, layer in enumerate(self._layers)]  # fmt: skip
            try:
                found.append(self._forward(number))
            finally:
                for hook in hooks:
                    hook.remove()
        return found, inputs

    def _can_be_entered(self, own: Sequence[torch.Tensor], inputs: dict[int, list[torch.Tensor]]) -> bool:
        for index in sorted(inputs):
            if index:
                self._at, self._entered = index, inputs[index]
                for number, expected in enumerate(own):
                    if (self._forward(number) - expected).abs().max() > 1e-4 * expected.abs().max():
                        self._at, self._entered = 0, []
                        return False
        self._at, self._entered = 0, []
        return True

    def _scored(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        flat = torch.cat([part[:, 1:].reshape(-1, part.shape[-1]) for part in states])
        return list(flat[:: self._stride].split(_CHUNK))

    def _enter(self, layer: int | None) -> None:
        """Begin at `layer` from now on; the weights must be the source's own."""
        wanted = layer if self.partial and layer is not None else 0
        if wanted == self._at:
            return
        if wanted < self._at:
            self._at, self._entered = 0, []
        if wanted:
            inputs: list[torch.Tensor] = []
            hook = self._layers[wanted].register_forward_pre_hook(lambda module, args: inputs.append(args[0].clone()))
            try:
                for number in range(len(self._batches)):
                    self._forward(number)
            finally:
                hook.remove()
            self._entered = inputs
        self._at = wanted

    @torch.inference_mode()
    def kl(self, decision: Decision, weights: Sequence[torch.Tensor]) -> float:
        """Nats a token with `decision`'s matrices replaced by `weights`; they are put back afterwards."""
        self._enter(decision.layer)
        parameters = [self._parameter(matrix.module, matrix.experts is not None) for matrix in decision.matrices]
        own = [parameter.data for parameter in parameters]
        try:
            for parameter, weight in zip(parameters, weights, strict=True):
                parameter.data = weight.to(parameter)
            states = self._scored([self._forward(number) for number in range(len(self._batches))])
        finally:
            for parameter, weight in zip(parameters, own, strict=True):
                parameter.data = weight
        return self._mean(self._loaded.head.log_probabilities(part) for part in states)

    @torch.inference_mode()
    def kl_of_head(self, pieces: Iterator[tuple[int, torch.Tensor]], vocabulary: int) -> float:
        """Nats a token with the head's rows replaced; `pieces` gives (first row, rows) of all of it."""
        logits = [states.new_empty(states.shape[0], vocabulary) for states in self._states]
        for first, rows in pieces:
            for states, made in zip(self._states, logits, strict=True):
                made[:, first : first + rows.shape[0]] = states @ rows.to(states).T
        head = self._loaded.head
        return self._mean(head.normalized(head.capped(made)) for made in logits)

    def _mean(self, logs: Iterator[torch.Tensor]) -> float:
        total = 0.0
        for part, probabilities, negentropy in zip(logs, self._probabilities, self._negentropy, strict=True):
            total += negentropy - (probabilities * part).sum().item()
        return max(total / self._count, 0.0)

    def _parameter(self, module: str, is_experts: bool) -> torch.nn.Parameter:
        path = module.removeprefix("model.") + ("" if is_experts else ".weight")
        found = self._text.get_parameter(path)
        assert isinstance(found, torch.nn.Parameter)
        return found


def _pass_on(hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return hidden
