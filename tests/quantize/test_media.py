"""Calibration with images and recordings: the walk sees what transformers' whole model makes of them."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from tests.models import gemma3, gemma4
from tests.models.inputs import chirp, gemma4_inputs, random_image
from tests.quantize.small_jobs import make_job, run_job

from gemq.calibration.media import MediaReader, media_inputs
from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.plan import make_plan
from gemq.quantize.seal import check_seal
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import load_recipe

WITH_AUDIO = ("e4b", "e2b", "unified")


def save_wav(path: Path, samples: numpy.ndarray, rate: int = 16_000, channels: int = 1, width: int = 2) -> Path:
    scaled = (samples.astype(numpy.float64) * (2 ** (8 * width - 1) - 1)).astype("<i8")
    raw = scaled.view(numpy.uint8).reshape(-1, 8)[:, :width].tobytes() if width > 1 else (scaled + 128).astype(numpy.uint8).tobytes()
    with wave.open(str(path), "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", "not compressed"))
        file.writeframes(raw)
    return path


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def user(*parts: dict[str, str], answer: str | None = None) -> dict[str, Any]:
    said: list[dict[str, Any]] = [{"role": "user", "content": list(parts)}]
    return {"messages": said if answer is None else [*said, {"role": "assistant", "content": answer}]}


IMAGE, AUDIO = {"type": "image", "path": "a.png"}, {"type": "audio", "path": "media/a.wav"}
PLAIN = {"messages": [{"role": "user", "content": "only text, of the miller and nine days in the village, and the wheel, and the water came back"}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images and a recording, one of the images of a size that must be resized."""
    made = tmp_path_factory.mktemp("media")
    (made / "media").mkdir()
    Image.fromarray(random_image()).save(made / "a.png")
    Image.fromarray(random_image(4)).save(made / "small.png")
    Image.fromarray(random_image(seed=1)[:200, :301]).save(made / "b.jpg")
    save_wav(made / "media" / "a.wav", chirp())
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            out = tmp_path_factory.mktemp("built") / kind
            made[kind] = gemma3.build_gemma3_multimodal(out, legacy_names=True) if kind == "gemma3" else gemma4.build(kind, out)
        return made[kind]

    return get


def rows_for(kind: str) -> list[dict[str, Any]]:
    rows = [
        user(text("the river "), IMAGE, text(" below the mill"), answer="the wheel"),
        PLAIN,
        user({"type": "image", "path": "b.jpg"}, IMAGE, text("two of them")),
    ]
    return [*rows, user(AUDIO, text("the tone")), user(AUDIO, IMAGE, text("both"))] if kind in WITH_AUDIO else rows


def load_rows(folder: Path, rows: list[Any], model: Path, **options: Any) -> CalibrationSet:
    path = folder / "rows.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return load_calibration(str(path), model_dir=model, **({"samples": len(rows), "length": 256, "seed": 0} | options))


@pytest.mark.parametrize("kind", ["e4b", "e2b", "31b", "moe", "unified", "gemma3"])
def test_the_walks_hidden_states_are_those_of_transformers_whole_forward_bit_for_bit(built, folder, kind):
    from transformers import AutoModelForImageTextToText

    source = built(kind)
    calibration = load_rows(folder, rows_for(kind), source)
    skeleton, reader = load_skeleton(source)
    plan = make_plan(skeleton, load_recipe("w4a16-g32"))
    walk = Walk(plan, reader, calibration.windows, media=media_inputs(calibration.records, source))
    seen: list[torch.Tensor] = []
    walk._solve_head = lambda events, walker: seen.extend(event.hidden for event in events)  # type: ignore[method-assign]
    walk.run(Walker(lambda unit: None, lambda unit, weights, hessian: weights, lambda index: None, lambda units, module, rows_of: None))
    model = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32, experts_implementation="eager").eval().model
    assert len(seen) == len(walk.batches) == len(rows_for(kind))
    for batch, hidden in zip(walk.batches, seen, strict=True):
        with torch.no_grad():
            given = {"input_ids": batch} if isinstance(batch, torch.Tensor) else batch()
            assert torch.equal(model(**given).last_hidden_state, hidden)


def test_towers_are_let_go_when_the_decoders_first_layer_is_reached(built, folder):
    source = built("e4b")
    calibration = load_rows(folder, rows_for("e4b"), source)
    job = make_job(source, folder / "unused", calibration=calibration)
    walk = Walk(job.plan, job.reader, calibration.windows, media=media_inputs(calibration.records, source))
    held: list[set[str]] = []

    def solve(unit, weights, hessian):
        held.append({name for name, tensor in walk._before_decoder._model.named_parameters() if "language_model" not in name and not tensor.is_meta})
        return weights

    walk._solve_head = lambda events, walker: None  # type: ignore[method-assign]
    walk.run(Walker(lambda unit: None, solve, lambda index: None))
    assert held[-1] == set()
    assert held[1] == set()


@pytest.mark.parametrize("kind", ["e4b", "unified"])
def test_a_record_is_what_the_models_processor_makes_of_it(built, folder, kind):
    source = built(kind)
    words = "<|image|> In the picture<|audio|>"
    pixels = random_image(4 if kind == "unified" else 16)
    image = {"type": "image", "path": "small.png" if kind == "unified" else "a.png"}
    (record,) = load_rows(folder, [user(image, text(" In the picture"), AUDIO)], source).records
    made = MediaReader(source).inputs(record)
    # the recording as 16 bits hold it
    heard = ((chirp().astype(numpy.float64) * 32767).astype("<i2") / 32768).astype(numpy.float32)
    expected = gemma4_inputs(source, f"<bos><|turn>user\n{words}<turn|>\n", images=[pixels], audio=[heard])
    expected["input_ids"] = expected["input_ids"][:, 1:]  # the tokenizer's own BOS beside the template's
    expected["mm_token_type_ids"] = expected["mm_token_type_ids"][:, 1:]
    assert set(expected) - {"num_soft_tokens_per_image"} == set(made)
    for name, value in made.items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture(scope="module")
def mixed(built: Callable[[str], Path], folder: Path) -> CalibrationSet:
    return load_rows(folder, rows_for("e4b"), built("e4b"))


def test_a_quantization_with_a_mixed_set_works_and_says_so(built, mixed, folder, tmp_path):
    source = built("e4b")
    outcome = run_job(source, tmp_path / "out", calibration=mixed)
    assert check_seal(outcome.directory) == []
    assert verify_against_source(outcome.directory, source).differences == []
    stated = outcome.manifest["calibration"]
    assert stated["media"] == {"image": 4, "audio": 2}
    assert stated["samples"] == 5
    assert stated["sha256"] == mixed.sha256
    texts = run_job(source, tmp_path / "texts", calibration=CalibrationSet.of(mixed.windows, {"kind": "test"}))
    assert texts.seal != outcome.seal


def test_a_mixed_quantization_that_stopped_goes_on_to_the_same_checkpoint(built, mixed, tmp_path):
    from gemq import atomic

    source = built("e4b")
    whole = run_job(source, tmp_path / "whole", calibration=mixed)

    def stop(name: str) -> None:
        if name == "written:layers.5.self_attn.o_proj":
            raise KeyboardInterrupt

    before, atomic.on_write_point = atomic.on_write_point, stop
    try:
        with pytest.raises(KeyboardInterrupt):
            run_job(source, tmp_path / "out", calibration=mixed)
    finally:
        atomic.on_write_point = before
    assert run_job(source, tmp_path / "out", calibration=mixed, resume="required").seal == whole.seal


def test_a_file_that_changes_between_reading_and_the_walk_is_found(built, folder, tmp_path):
    Image.fromarray(random_image()).save(tmp_path / "a.png")
    calibration = load_rows(tmp_path, [user(IMAGE, text("the river"))], built("e4b"))
    Image.fromarray(random_image(seed=2)).save(tmp_path / "a.png")
    with pytest.raises(IntegrityError, match=r"rows\.jsonl line 1: .*a\.png changed while it was used"):
        run_job(built("e4b"), tmp_path / "out", calibration=calibration)


def test_the_digest_covers_the_medias_bytes(built, tmp_path):
    digests = set()
    for seed in (0, 1):
        Image.fromarray(random_image(seed=seed)).save(tmp_path / "a.png")
        digests.add(load_rows(tmp_path, [user(IMAGE, text("the river"))], built("e4b")).sha256)
    assert len(digests) == 2


def test_text_alone_keeps_its_digest(built, folder):
    calibration = load_rows(folder, [PLAIN], built("e4b"))
    assert calibration.records == ()
    assert "media" not in calibration.description
    assert CalibrationSet.of(calibration.windows, {}).sha256 == calibration.sha256


def test_the_length_counts_soft_tokens_and_cuts_only_text(built, folder):
    row = user(IMAGE, text("the river below the mill froze in the first week of December"))
    whole = load_rows(folder, [row], built("e4b")).records[0].token_ids
    with pytest.raises(UsageError, match=r"line 1: its images and recordings end at token \d+, --length is 60") as raised:
        load_rows(folder, [row], built("e4b"), length=60)
    needed = int(raised.value.next_step.split()[2])
    assert load_rows(folder, [row], built("e4b"), length=needed).records[0].token_ids == whole[:needed]
    assert whole[needed - 1] == 8, "the token that closes the image"


def test_every_width_of_pcm_is_read(built, folder, tmp_path):
    from gemq.calibration.media import read_wav

    for width, off in ((1, 1 / 64), (2, 1e-4), (3, 1e-6), (4, 1e-6)):
        found = read_wav(save_wav(tmp_path / f"{width}.wav", chirp(), width=width).read_bytes(), "here", 16_000)
        assert found.dtype == numpy.float32
        assert numpy.abs(found - chirp()).max() < off


def test_bad_records_are_refused_by_line_with_a_way_out(built, folder, tmp_path):
    def refused(kind: str, row: Any, says: str, advice: str, **options: Any) -> None:
        with pytest.raises(UsageError) as raised:
            load_rows(tmp_path, [PLAIN, row], built(kind), **options)
        assert "rows.jsonl line 2" in raised.value.message
        assert says in raised.value.message
        assert advice in raised.value.next_step

    Image.fromarray(random_image()).save(tmp_path / "a.png")
    whole = (tmp_path / "a.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no image")
    Image.fromarray(numpy.zeros((1, 400, 3), numpy.uint8)).save(tmp_path / "thin.png")
    save_wav(tmp_path / "a.wav", chirp())
    save_wav(tmp_path / "fast.wav", chirp(), rate=44_100)
    save_wav(tmp_path / "stereo.wav", numpy.repeat(chirp(), 2), channels=2)
    save_wav(tmp_path / "long.wav", chirp(31))
    save_wav(tmp_path / "empty.wav", chirp()[:0])
    (tmp_path / "cut.wav").write_bytes((tmp_path / "a.wav").read_bytes()[:-100])
    (tmp_path / "text.wav").write_text("no recording")
    (tmp_path / "folder.png").mkdir()

    def image(path: str) -> dict[str, Any]:
        return user({"type": "image", "path": path}, text("what"))

    def audio(path: str) -> dict[str, Any]:
        return user({"type": "audio", "path": path}, text("what"))

    refused("e4b", image("none.png"), "there is no file", "relative to the calibration file")
    refused("e4b", image("folder.png"), "can't be read", "permissions")
    refused("e4b", image("cut.png"), "cut.png is no image that can be read", "whole PNG or JPEG")
    refused("e4b", image("text.png"), "text.png is no image that can be read", "whole PNG or JPEG")
    refused("e4b", audio("fast.wav"), "fast.wav has 44100 Hz, the model takes 16000", "-ar 16000")
    refused("e4b", audio("stereo.wav"), "stereo.wav has 2 channels", "-ac 1")
    refused("e4b", audio("long.wav"), "long.wav lasts 31.0 s, the model takes up to 30 s", "cut it")
    refused("e4b", audio("empty.wav"), "lasts 0.0 s", "cut it")
    refused("e4b", audio("cut.wav"), "cut.wav ends after", "whole file")
    refused("e4b", audio("text.wav"), "text.wav is no PCM .wav", "pcm_s16le")
    refused("31b", audio("a.wav"), "holds audio, and this Gemma4ForConditionalGeneration takes no audio", "leave that record out")
    refused("gemma3", audio("a.wav"), "takes no audio", "leave that record out")
    refused("e4b", user({"type": "image", "url": "https://example.org/a.png"}), "must have a path", "fetches nothing")
    refused("e4b", user({"type": "video", "path": "a.mp4"}), "content must be", "'image' or 'audio'")
    refused("e4b", user(IMAGE, text("a <|image|> of mine")), "the text holds <|image|>, the placeholder of an image", "remove it from the text")
    refused("e4b", user(IMAGE, text("what")), "--pack joins texts", "--pack", pack=True, samples=1)


def test_an_image_for_a_text_only_model_is_refused(tmp_path):
    source = gemma3.build_gemma3_text(tmp_path / "text")
    Image.fromarray(random_image()).save(tmp_path / "a.png")
    with pytest.raises(UsageError, match=r"line 1 holds images, and this Gemma3ForCausalLM takes no images") as raised:
        load_rows(tmp_path, [user(IMAGE, text("what"))], source)
    assert "calibrate with text" in raised.value.next_step


def test_a_saved_set_can_not_hold_media(mixed, tmp_path):
    with pytest.raises(UsageError, match="can't hold a calibration set with images"):
        mixed.save(tmp_path / "saved.jsonl")
