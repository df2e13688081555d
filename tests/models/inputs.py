"""Text, images and audio as a model's inputs, through the folder's own image processor, feature extractor and tokenizer.

Gemma4Processor does the same but can't be imported without torchvision, which these tests do without: it differs in the library that
resizes images, so an image here should have a size that needs no resizing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch.nn import functional

SAMPLE_RATE = 16_000


def random_image(patch_size: int = 16, seed: int = 0) -> numpy.ndarray:
    """Random pixels, [21, 30] patches of uint8 RGB: exactly 70 soft tokens of 3 x 3 patches, so that no processor resizes it."""
    return numpy.random.default_rng(seed).integers(0, 256, (21 * patch_size, 30 * patch_size, 3), dtype=numpy.uint8)


def chirp(seconds: float = 0.7, start_hz: float = 220.0, end_hz: float = 1760.0) -> numpy.ndarray:
    """A tone that rises from `start_hz` to `end_hz`, [samples] float32 at 16 kHz."""
    time = numpy.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    phase = 2 * numpy.pi * (start_hz * time + (end_hz - start_hz) * time**2 / (2 * seconds))
    return (0.5 * numpy.sin(phase)).astype(numpy.float32)


def gemma4_inputs(
    folder: Path, text: str, images: Sequence[numpy.ndarray] = (), audio: Sequence[numpy.ndarray] = ()
) -> dict[str, torch.Tensor]:
    """Keyword arguments for a Gemma 4's forward, batch 1. `text` holds one <|image|> or <|audio|> for each image and waveform, in order."""
    from transformers import AutoTokenizer, Gemma4AudioFeatureExtractor, Gemma4UnifiedAudioFeatureExtractor
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    settings = json.loads((folder / "processor_config.json").read_text())
    unified = settings["processor_class"] == "Gemma4UnifiedProcessor"
    made: dict[str, torch.Tensor] = {}
    if len(images):
        processor = Gemma4ImageProcessorPil(**settings["image_processor"])
        pixels = processor(list(images), return_tensors="pt")
        for count in pixels.pop("num_soft_tokens_per_image"):
            text = text.replace("<|image|>", "<|image>" + "\0" * int(count) + "<image|>", 1)
        text = text.replace("\0", "<|image|>")
        made |= pixels
        if unified:
            made = _merge_patches(made, settings["image_processor"])
    if len(audio):
        extractor = (Gemma4UnifiedAudioFeatureExtractor if unified else Gemma4AudioFeatureExtractor)(**settings["feature_extractor"])
        features = extractor(list(audio), return_tensors="pt", sampling_rate=SAMPLE_RATE)
        mask = features["input_features_mask"]
        # the tower's two convolutions of stride 2 keep every fourth frame; the 12B has no tower and keeps all
        kept = mask if unified else mask[:, ::2][:, ::2]
        for count in kept.sum(-1):
            text = text.replace("<|audio|>", "<|audio>" + "\0" * int(count) + "<audio|>", 1)
        text = text.replace("\0", "<|audio|>")
        made |= {"input_features": features["input_features"], "input_features_mask": mask}
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    kinds = torch.zeros_like(ids)
    kinds[ids == 4], kinds[ids == 5] = 1, 3
    return {"input_ids": ids, "mm_token_type_ids": kinds, **made}


def _merge_patches(pixels: dict[str, torch.Tensor], settings: dict[str, int]) -> dict[str, torch.Tensor]:
    """Patches of the 12B: each `pooling_kernel_size` squared of the image processor's patches are one, [images, patches, pixels]."""
    side, merge = settings["patch_size"], settings["pooling_kernel_size"]
    merged, places = [], []
    for patches, positions in zip(pixels["pixel_values"], pixels["image_position_ids"], strict=True):
        real = (positions >= 0).all(-1)
        columns, rows = (positions[real].amax(0) + 1).tolist()
        grid = patches[real].reshape(rows // merge, merge, columns // merge, merge, side, side, 3)
        count = rows * columns // merge**2
        y, x = torch.meshgrid(torch.arange(rows // merge), torch.arange(columns // merge), indexing="ij")
        padding = (0, 0, 0, settings["max_soft_tokens"] - count)
        merged.append(functional.pad(grid.permute(0, 2, 1, 4, 3, 5, 6).reshape(count, -1), padding))
        places.append(functional.pad(torch.stack([x, y], -1).reshape(-1, 2), padding, value=-1))
    return {"pixel_values": torch.stack(merged), "image_position_ids": torch.stack(places)}
