"""What a multimodal model hands to its decoder: transformers' own forward of the whole model, stopped where the decoder begins.

Towers are given their weights, in float32, when a record needs them, and lose them when the next one doesn't. The embeddings of image and audio
tokens, the per-layer inputs and the masks are whatever the model's class makes of them; the decoder's walk then starts from there.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.loading import require_finite
from gemq.quantize.skeleton import Skeleton
from gemq.quantize.whole_model import build_whole_model, source_names
from gemq.shards import ShardReader

# the parts of a model that each kind of input runs through, in every architecture
_NEEDED = {
    "pixel_values": ("vision_tower", "embed_vision", "multi_modal_projector", "vision_embedder"),
    "input_features": ("audio_tower", "embed_audio", "audio_embedder"),
}


class _AtDecoder(Exception):
    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = arguments


class DecoderInputs:
    """Gives the decoder's arguments for a multimodal forward's; the skeleton's decoder must have its embeddings already."""

    def __init__(self, skeleton: Skeleton, reader: ShardReader, device: torch.device) -> None:
        if skeleton.architecture.text_config is None:
            raise UsageError(f"{skeleton.architecture.name} takes no images and no audio", "calibrate it with text")
        self._reader, self._device, self._inventory = reader, device, skeleton.inventory
        whole = build_whole_model(skeleton.config, skeleton.architecture)
        self._names = source_names(whole, skeleton.inventory)
        self._model = whole.model
        self._model.language_model = skeleton.decoder
        self._empty = {name: part for name, part in self._model.named_children() if name != "language_model"}
        self._held: set[str] = set()

    @torch.no_grad()
    def __call__(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The keyword arguments that the model's forward of `inputs` calls its decoder with."""
        self._hold({name for key in inputs for name in _NEEDED.get(key, ()) if name in self._empty})
        stop = self._model.language_model.register_forward_pre_hook(_stop, with_kwargs=True)
        try:
            self._model(**{key: value.to(self._device) for key, value in inputs.items()}, use_cache=False)
        except _AtDecoder as reached:
            return reached.arguments
        finally:
            stop.remove()
        raise IntegrityError(f"{type(self._model).__name__} never called its decoder", "report this architecture as an issue of gemq")

    def release(self) -> None:
        """Let go of every tower's weights."""
        self._hold(set())

    def _hold(self, needed: set[str]) -> None:
        for name in self._held - needed:
            setattr(self._model, name, self._empty[name])
        self._held &= needed
        for name in sorted(needed - self._held):
            setattr(self._model, name, self._filled(name))
            self._held.add(name)

    def _filled(self, name: str) -> Any:
        from transformers import PreTrainedModel

        empty = self._empty[name]
        if isinstance(empty, PreTrainedModel):
            # built where its buffers can be computed; what is drawn at random for its weights is overwritten
            part = type(empty)._from_config(empty.config, dtype=torch.float32).to(self._device).eval()
        else:
            part = copy.deepcopy(empty).to_empty(device=self._device)
        parameters = {key for key, _ in part.named_parameters()}
        for key, tensor in part.state_dict().items():
            source = self._names.get(f"model.{name}.{key}")
            if source is None:  # a clip bound that the source leaves at its default
                continue
            value = self._reader.read(source).to(torch.float32)
            if key in parameters:
                require_finite(value, source)
            tensor.copy_(value)
        return part


def _stop(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if args:
        raise AssertionError(f"{type(module).__name__} was called with {len(args)} unnamed arguments")
    raise _AtDecoder(kwargs)
