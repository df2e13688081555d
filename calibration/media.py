"""Chats with images and recordings as calibration records: what a model's processor makes of them, without torchvision.

A message's content may hold {"type": "image", "path": …} and {"type": "audio", "path": …} beside text. The chat template writes a placeholder
for each; a placeholder becomes as many soft tokens as the image or the recording has, between the tokens that open and close it, as the model's
own processor does it (Gemma3Processor, Gemma4Processor, Gemma4UnifiedProcessor). Images are resized by Pillow (those classes can't be imported
without torchvision), recordings are mono PCM .wav files at the model's own rate.
"""

from __future__ import annotations

import hashlib
import io
import json
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from gemq.calibration.tokenize import encode_text, short
from gemq.config_file import read_complete_config
from gemq.errors import IntegrityError, UsageError

KINDS = ("image", "audio")
_TOWERS = {"image": "vision_config", "audio": "audio_config"}
_TYPE_IDS = {"image": 1, "audio": 3}  # of mm_token_type_ids
_LONGEST_SECONDS = 30  # the processors' audio_seq_length of 750 tokens of 40 ms; the extractor would cut what is longer without a word


@dataclass(frozen=True)
class MediaFile:
    """An image or a recording as it was when the record was read; `sha256` is that of the file's bytes."""

    kind: str
    path: Path
    sha256: str


@dataclass(frozen=True)
class MediaRecord:
    """A chat with media: its token ids, soft tokens' placeholders among them, and its files in the order of the placeholders."""

    token_ids: tuple[int, ...]
    files: tuple[MediaFile, ...]
    where: str


def has_media(messages: object) -> bool:
    """Whether any message's content has an image or an audio part."""
    contents = [message.get("content") for message in messages if isinstance(message, dict)] if isinstance(messages, list) else []
    return any(isinstance(part, dict) and part.get("type") in KINDS for content in contents if isinstance(content, list) for part in content)


class MediaReader:
    """Makes records of chats, and the forward's inputs of records, for the checkpoint in `model_dir`."""

    def __init__(self, model_dir: Path) -> None:
        self.model_dir = model_dir
        self.config = read_complete_config(model_dir)
        self.family = str(self.config.get("model_type"))
        self._processors: dict[str, Any] = {}

    def record(self, tokenizer: Any, messages: object, text: str, folder: Path | None, where: str, *, bos: int | None, length: int) -> MediaRecord:
        """The record of a chat that is `text` in the model's template.

        Raises UsageError naming `where` for a file that is missing, broken or not for this model.

        folder: what the paths are relative to; None where there is no such folder (rows of a data set). A record longer than `length` loses
        its tail of text; one whose media don't fit is refused.
        """
        assert isinstance(messages, list)
        files, counts = [], []
        for message in messages:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] not in KINDS:
                    continue
                self._require_tower(part["type"], where)
                file, data = _read_file(part, folder, where)
                files.append(file)
                counts.append(self._soft_tokens(part["type"], data, f"{where}: {file.path.name}"))
        text = self._with_soft_tokens(tokenizer, text, files, counts, where)
        ids = [token for token in encode_text(tokenizer, text, where) if token != bos]
        ids = ids if bos is None else [bos, *ids]
        soft = {self._soft_id(tokenizer, kind) for kind in KINDS if any(file.kind == kind for file in files)}
        needed = max(position for position, token in enumerate(ids) if token in soft) + 2  # and the token that closes it
        if needed > length:
            raise UsageError(f"{where}: its images and recordings end at token {needed}, --length is {length}",
                             f"use --length {needed} or more, or fewer or shorter media")
        return MediaRecord(tuple(ids[:length]), tuple(files), where)

    def inputs(self, record: MediaRecord) -> dict[str, Any]:
        """Keyword arguments of the multimodal model's forward, batch 1: ids, token types, pixels, features. Reads the files again.

        Raises IntegrityError if a file is not what it was when the record was made.
        """
        import torch

        made: dict[str, Any] = {}
        for kind in KINDS:
            loaded = []
            for file in record.files:
                if file.kind == kind:
                    data = _bytes_of(file.path, record.where)
                    if hashlib.sha256(data).hexdigest() != file.sha256:
                        raise IntegrityError(f"{record.where}: {file.path} changed while it was used", "leave it alone and start again")
                    loaded.append(self._decoded(kind, data, f"{record.where}: {file.path.name}"))
            if loaded:
                made |= self._processed(kind, loaded)
        made.pop("num_soft_tokens_per_image", None)
        made.pop("num_crops", None)
        ids = torch.tensor([record.token_ids])
        types = torch.zeros_like(ids)
        for kind, number in _TYPE_IDS.items():
            token = self.config.get(f"{kind}_token_id", self.config.get(f"{kind}_token_index"))
            if token is not None:
                types[ids == token] = number
        return {"input_ids": ids, "token_type_ids" if self.family == "gemma3" else "mm_token_type_ids": types, **made}

    def _require_tower(self, kind: str, where: str) -> None:
        tower = self.config.get(_TOWERS[kind])
        if self.family not in ("gemma3", "gemma4", "gemma4_unified") or not isinstance(tower, dict):
            what = "images" if kind == "image" else "audio"
            raise UsageError(f"{where} holds {what}, and this {(self.config.get('architectures') or [self.family])[0]} takes no {what}",
                             "leave that record out, or calibrate with text: its language model is the same")

    def _settings(self, kind: str) -> dict[str, Any]:
        key = "image_processor" if kind == "image" else "feature_extractor"
        for name in ("processor_config.json", "preprocessor_config.json"):
            path = self.model_dir / name
            if not path.exists():
                continue
            try:
                settings = json.loads(path.read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise UsageError(f"{path} can't be read: {short(error)}", "fetch that file again") from None
            found = settings.get(key, settings if f"{key}_type" in settings else None) if isinstance(settings, dict) else None
            if isinstance(found, dict):
                return {name: value for name, value in found.items() if not name.endswith("_type")}
        raise UsageError(f"{self.model_dir} has no settings of an {key.replace('_', ' ')} (processor_config.json)",
                         "fetch the model's processor files, or calibrate with text")

    def _processor(self, kind: str) -> Any:
        if kind not in self._processors:
            from transformers import Gemma4AudioFeatureExtractor, Gemma4UnifiedAudioFeatureExtractor

            settings = self._settings(kind)
            if kind == "audio":
                made = (Gemma4UnifiedAudioFeatureExtractor if self.family == "gemma4_unified" else Gemma4AudioFeatureExtractor)(**settings)
            elif self.family == "gemma3":
                from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

                made = Gemma3ImageProcessorPil(**{**settings, "do_pan_and_scan": False})  # as Gemma3Processor has it unless asked
            else:
                from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

                made = Gemma4ImageProcessorPil(**settings)
            self._processors[kind] = made
        return self._processors[kind]

    def _decoded(self, kind: str, data: bytes, where: str) -> numpy.ndarray:
        if kind == "image":
            return read_image(data, where)
        return read_wav(data, where, int(self._processor("audio").sampling_rate))

    def _processed(self, kind: str, loaded: Sequence[numpy.ndarray]) -> dict[str, Any]:
        if kind == "audio":
            extractor = self._processor("audio")
            return dict(extractor(list(loaded), return_tensors="pt", sampling_rate=extractor.sampling_rate))
        made = dict(self._processor("image")(list(loaded), return_tensors="pt"))
        return merged_patches(made, self._processor("image")) if self.family == "gemma4_unified" else made

    def _soft_tokens(self, kind: str, data: bytes, where: str) -> int:
        decoded = self._decoded(kind, data, where)
        try:
            made = self._processed(kind, [decoded])
        except ValueError as error:
            raise UsageError(f"{where}: the model's processor refuses it ({short(error)})", "use another file") from error
        if kind == "audio":
            mask = made["input_features_mask"][0]
            # the tower's two convolutions of stride 2 keep every fourth frame; the 12B has no tower and keeps all
            return int((mask if self.family == "gemma4_unified" else mask[::2][::2]).sum())
        if self.family == "gemma3":
            return int(self.config.get("mm_tokens_per_image", 256))
        return int(made["num_soft_tokens_per_image"][0])

    def _soft_id(self, tokenizer: Any, kind: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(getattr(tokenizer, f"{kind}_token")))

    def _with_soft_tokens(self, tokenizer: Any, text: str, files: list[MediaFile], counts: list[int], where: str) -> str:
        opening = {"image": "boi_token", "audio": "boa_token"}
        closing = {"image": "eoi_token", "audio": "eoa_token"}
        for kind in KINDS:
            wanted = [count for file, count in zip(files, counts, strict=True) if file.kind == kind]
            if not wanted:
                continue
            try:
                soft, opens, closes = (str(getattr(tokenizer, name)) for name in (f"{kind}_token", opening[kind], closing[kind]))
            except AttributeError as error:
                raise UsageError(f"{where}: the model's tokenizer has no token for {kind} ({short(error)})",
                                 "fetch the model's tokenizer files again") from None
            gemma3 = self.family == "gemma3"
            placeholder = opens if gemma3 else soft
            if text.count(placeholder) != len(wanted):
                raise UsageError(
                    f"{where}: the chat template writes {text.count(placeholder)} placeholders {placeholder} for {len(wanted)} {kind} parts",
                    "write no placeholder into the text yourself; does the model's chat template know this kind?",
                )
            first, *rest = text.split(placeholder)
            pieces = [opens + soft * count + closes for count in wanted]
            text = first + "".join((f"\n\n{piece}\n\n" if gemma3 else piece) + tail for piece, tail in zip(pieces, rest, strict=True))
        return text


def media_inputs(records: Sequence[MediaRecord], model_dir: Path) -> list[Callable[[], dict[str, Any]]]:
    """For each record, what makes the inputs of the model's whole forward when it is called; those with the same kinds follow each other."""
    reader = MediaReader(model_dir) if records else None
    ordered = sorted(records, key=lambda record: sorted({file.kind for file in record.files}))
    return [partial(reader.inputs, record) for record in ordered if reader is not None]


def _bytes_of(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{where}: there is no file {path}", "paths are relative to the calibration file: check it, or bring the file") from None
    except OSError as error:
        raise UsageError(f"{where}: {path} can't be read: {error.strerror}", "check the file and its permissions") from None


def _read_file(part: dict[str, Any], folder: Path | None, where: str) -> tuple[MediaFile, bytes]:
    path = part.get("path")
    if not isinstance(path, str) or not path:
        raise UsageError(f"{where}: an {part['type']} part must have a path, got {short(part)}",
                         f"write {{\"type\": \"{part['type']}\", \"path\": \"file\"}}: gemq fetches nothing from addresses")
    if folder is None:
        raise UsageError(f"{where} names the file {path}, and rows of a data set have no folder of files",
                         "put the rows into a .jsonl beside their images and recordings")
    found = folder / path
    data = _bytes_of(found, where)
    return MediaFile(part["type"], found, hashlib.sha256(data).hexdigest()), data


def read_image(data: bytes, where: str) -> numpy.ndarray:
    """The pixels of an encoded image, [height, width, 3] uint8; raises UsageError for what is no whole image."""
    try:
        from PIL import Image
    except ImportError:
        raise UsageError(f"{where} is an image, and Pillow is not installed", "pip install pillow, or calibrate with text") from None
    try:
        with Image.open(io.BytesIO(data)) as image:
            return numpy.asarray(image.convert("RGB"))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise UsageError(f"{where} is no image that can be read ({short(error)})", "bring a whole PNG or JPEG") from None


def read_wav(data: bytes, where: str, rate: int) -> numpy.ndarray:
    """The samples of a mono PCM .wav at `rate` Hz, [samples] float32 in -1 to 1; raises UsageError for any other."""
    convert = f"ffmpeg -i FILE -ac 1 -ar {rate} -c:a pcm_s16le OUT.wav makes one"
    try:
        with wave.open(io.BytesIO(data)) as file:
            channels, width, found, count = file.getnchannels(), file.getsampwidth(), file.getframerate(), file.getnframes()
            raw = file.readframes(count)
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:
        raise UsageError(f"{where} is no PCM .wav ({short(error) if str(error) else 'it ends too early'})", convert) from None
    if found != rate:
        raise UsageError(f"{where} has {found} Hz, the model takes {rate}", convert)
    if channels != 1:
        raise UsageError(f"{where} has {channels} channels, one is needed", convert)
    if len(raw) != count * width:
        raise UsageError(f"{where} ends after {len(raw) // width} of {count} samples", "bring the whole file")
    if not 0 < count <= rate * _LONGEST_SECONDS:
        raise UsageError(f"{where} lasts {count / rate:.1f} s, the model takes up to {_LONGEST_SECONDS} s", "cut it")
    if width == 1:
        return (numpy.frombuffer(raw, numpy.uint8).astype(numpy.float32) - 128) / 128
    # little-endian integers of 2, 3 or 4 bytes, moved to the upper end of 4
    wide = numpy.zeros((count, 4), numpy.uint8)
    wide[:, 4 - width :] = numpy.frombuffer(raw, numpy.uint8).reshape(count, width)
    return (wide.view("<i4")[:, 0] / numpy.float32(2**31)).astype(numpy.float32)


def merged_patches(made: dict[str, Any], processor: Any) -> dict[str, Any]:
    """The 12B's patches: each square of `pooling_kernel_size` of the image processor's patches made one, [images, patches, pixels]."""
    import torch
    from torch.nn import functional

    side, merge, longest = processor.patch_size, processor.pooling_kernel_size, processor.max_soft_tokens
    merged, places = [], []
    for patches, positions in zip(made["pixel_values"], made["image_position_ids"], strict=True):
        real = (positions >= 0).all(-1)
        columns, rows = (positions[real].amax(0) + 1).tolist()
        grid = patches[real].reshape(rows // merge, merge, columns // merge, merge, side, side, 3)
        count = rows * columns // merge**2
        padding = (0, 0, 0, longest - count)
        merged.append(functional.pad(grid.permute(0, 2, 1, 4, 3, 5, 6).reshape(count, -1), padding))
        y, x = torch.meshgrid(torch.arange(rows // merge), torch.arange(columns // merge), indexing="ij")
        places.append(functional.pad(torch.stack([x, y], -1).reshape(-1, 2), padding, value=-1))
    return {**made, "pixel_values": torch.stack(merged), "image_position_ids": torch.stack(places)}
