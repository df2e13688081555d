"""The model's own samples: drawn as softmax says, the same for a seed, whole after an interruption, and never without end."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models.gemma4 import build_gemma4

from gemq.calibration import selfgen
from gemq.calibration.selfgen import Prompt, batch_seed, draw_tokens, generate_self_set, read_prompt, rows_at_once, sample_batch
from gemq.calibration.sets import CalibrationSet, load_calibration
from gemq.calibration.tokenize import load_tokenizer
from gemq.errors import IntegrityError, Interrupted, UsageError

BOS, EOS, END_OF_TURN = 2, 1, 5
NOTHING = torch.tensor([], dtype=torch.long)
LARGEST = 1 - 2**-53


@pytest.fixture(autouse=True)
def _short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfgen, "BATCH", 4)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def generate(model: Path, cache: Path, **options: Any) -> CalibrationSet:
    return generate_self_set(model, **{"samples": 10, "length": 24, "seed": 3, "cache_dir": cache, **options})


def with_stops(model: Path, to: Path, stops: list[int]) -> Path:
    """A copy of `model` whose generation config ends a text at any of `stops`."""
    copied = shutil.copytree(model, to)
    (copied / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return copied


class Scripted:
    """In place of a model: at step n, row r gets token script[r][n] for certain."""

    def __init__(self, model_dir: Path, script: list[list[int]]) -> None:
        from transformers import AutoConfig

        self.config = AutoConfig.from_pretrained(model_dir)
        self.script = {row: list(tokens) for row, tokens in enumerate(script)}
        self.seen: list[list[list[int]]] = []

    def __call__(self, *, input_ids: torch.Tensor, past_key_values: Any, **_: object) -> SimpleNamespace:
        self.seen.append(input_ids.tolist())
        step = len(self.seen) - 1
        running = [row for row, tokens in self.script.items() if step < len(tokens)]
        logits = torch.full((len(input_ids), 1, 512), -100.0)
        for position, row in enumerate(running):
            logits[position, 0, self.script[row][step]] = 100.0
        return SimpleNamespace(logits=logits)


# ---- drawing a token


@pytest.mark.parametrize("size", [512, 2048, 262, 1021])
def test_tokens_are_drawn_with_the_probabilities_of_softmax(size: int) -> None:
    draws = 200_000
    logits = torch.randn(size, generator=torch.Generator().manual_seed(0)) * 2
    logits[7] = -torch.inf
    masked = torch.tensor([3, size - 1])
    allowed = logits.clone()
    allowed[masked] = -torch.inf
    expected = torch.softmax(allowed.double(), -1) * draws
    uniforms = torch.rand(draws, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    counts = torch.zeros(size, dtype=torch.float64)
    for part in uniforms.split(20_000):
        counts += torch.bincount(draw_tokens(logits.repeat(len(part), 1), masked, part), minlength=size)
    assert counts[[3, 7, size - 1]].sum() == 0
    common = expected >= 5
    chi2 = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum())
    assert abs(chi2 - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("uniform", [0.0, 0.5, LARGEST])
def test_a_token_of_no_probability_is_never_drawn(uniform: float) -> None:
    logits = torch.full((1, 2048), -torch.inf)
    logits[0, 1000] = 0.0
    assert draw_tokens(logits, NOTHING, torch.full((1, 2), uniform, dtype=torch.float64)).tolist() == [1000]


def test_rows_are_drawn_independently() -> None:
    logits = torch.full((3, 1024), -100.0)
    for row, token in enumerate((0, 1023, 512)):
        logits[row, token] = 100.0
    assert draw_tokens(logits, NOTHING, torch.rand(3, 2, dtype=torch.float64)).tolist() == [0, 1023, 512]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_an_integrity_error(bad: float) -> None:
    logits = torch.zeros(2, 512)
    logits[1, 9] = bad
    with pytest.raises(IntegrityError, match="aren't finite"):
        draw_tokens(logits, NOTHING, torch.rand(2, 2, dtype=torch.float64))


# ---- a batch of texts


def test_the_cache_of_keys_and_values_changes_no_token(base_model: Path, tmp_path: Path) -> None:
    """Against sampling that runs the whole text through the model at each step; many stops, so that rows leave the batch one by one."""
    prompt = read_prompt(with_stops(base_model, tmp_path / "model", list(range(480, 512))))
    model = selfgen._load_model(base_model, "cpu", "float32", 0)
    texts = sample_batch(model, prompt, rows=5, length=40, seed=11)
    generator = torch.Generator().manual_seed(11)
    expected: list[list[int]] = [[BOS] for _ in range(5)]
    alive = list(range(5))
    while alive:
        uniforms = torch.rand(len(alive), 2, dtype=torch.float64, generator=generator)
        with torch.inference_mode():
            logits = torch.stack([model(input_ids=torch.tensor([expected[row]])).logits[0, -1] for row in alive])
            drawn = draw_tokens(logits, torch.tensor(prompt.masked), uniforms).tolist()
        for row, token in zip(list(alive), drawn, strict=True):
            expected[row].append(token)
            if token in prompt.stops or len(expected[row]) == 40:
                alive.remove(row)
    assert texts == expected
    assert len({len(text) for text in texts}) > 1, "no row left the batch early: the test shows nothing"


def test_a_text_ends_with_its_stop_id_or_at_the_length(base_model: Path) -> None:
    model = Scripted(base_model, [[9, 10, EOS], [EOS], [11, 12, 13, 14, 15]])
    prompt = Prompt(prefix=(BOS,), transition=(), stops=(EOS,), masked=())
    assert sample_batch(model, prompt, rows=3, length=6, seed=0) == [[BOS, 9, 10, EOS], [BOS, EOS], [BOS, 11, 12, 13, 14, 15]]
    assert [len(inputs) for inputs in model.seen] == [3, 2, 2, 1, 1]


def test_a_chat_goes_from_the_user_s_message_through_the_transition_to_the_answer(base_model: Path) -> None:
    transition = (END_OF_TURN, 20, 21)
    prompt = Prompt(prefix=(BOS, 30), transition=transition, stops=(EOS, END_OF_TURN), masked=())
    model = Scripted(base_model, [
        [9, END_OF_TURN, 400, 400, 10, END_OF_TURN],  # what the model wants while the transition is written (400) doesn't count
        [9, 9, EOS, 400, 400, 11, 12],  # EOS ends the message too
        [END_OF_TURN],  # no message: ends at once
        [8, 8, 8, 8, 8, 8, 8],  # the message fills the window
    ])  # fmt: skip
    assert sample_batch(model, prompt, rows=4, length=9, seed=0) == [
        [BOS, 30, 9, *transition, 10, END_OF_TURN],
        [BOS, 30, 9, 9, *transition, 11, 12],
        [BOS, 30, END_OF_TURN],
        [BOS, 30, 8, 8, 8, 8, 8, 8, 8],
    ]


def test_neighbouring_batches_and_seeds_have_unrelated_generators() -> None:
    seeds = {batch_seed(seed, number) for seed in range(-5, 50) for number in range(50)}
    assert len(seeds) == 55 * 50
    assert all(0 <= seed < 2**63 for seed in seeds)


# ---- how a text starts and ends


def test_a_base_model_starts_from_bos_alone(base_model: Path) -> None:
    assert read_prompt(base_model) == Prompt(prefix=(BOS,), transition=(), stops=(EOS, END_OF_TURN), masked=(0, BOS))


def test_a_chat_model_starts_with_the_opened_user_turn_and_one_bos(chat_model: Path) -> None:
    prompt, tokenizer = read_prompt(chat_model), load_tokenizer(chat_model)
    assert prompt.prefix.count(BOS) == 1
    assert tokenizer.decode(prompt.prefix) == "<bos><start_of_turn>user\n"
    assert tokenizer.decode(prompt.transition) == "<end_of_turn>\n<start_of_turn>model\n"
    assert set(prompt.stops) == {EOS, END_OF_TURN}


def test_placeholders_of_images_are_never_sampled(multimodal_model: Path) -> None:
    assert read_prompt(multimodal_model).masked == (0, BOS, 6, 7, 8)


def test_placeholders_beyond_the_vocabulary_are_no_matter(multimodal_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(multimodal_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"image_token_index": 262144}))
    assert read_prompt(model).masked == (0, BOS, 6, 7)


def test_a_padding_id_that_is_also_a_stop_can_be_sampled(base_model: Path, tmp_path: Path) -> None:
    assert read_prompt(with_stops(base_model, tmp_path / "model", [0])).masked == (BOS,)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ raise_exception('system message needed') }}", "can't be rendered .*system message needed"),
    ("hello", "writes a user's message 0 times"),
    ("{{ messages[0].content }}{{ messages[0].content }}", "writes a user's message 2 times"),
])  # fmt: skip
def test_a_template_that_can_not_be_taken_apart_is_refused(chat_model: Path, tmp_path: Path, template: str, message: str) -> None:
    model = shutil.copytree(chat_model, tmp_path / "model")
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(UsageError, match=message):
        read_prompt(model)


# ---- whole sets


@pytest.mark.parametrize("kind", ["base", "chat", "multimodal", "gemma 4"])
def test_a_set_has_the_windows_asked_for(kind: str, cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = build_gemma4(tmp_path / "gemma4") if kind == "gemma 4" else request.getfixturevalue(f"{kind}_model")
    prompt = read_prompt(model)
    made = load_calibration("self", model_dir=model, samples=10, length=40, seed=3, cache_dir=cache)
    assert len(made.windows) == 10
    for window in made.windows:
        assert 10 <= len(window) <= 40
        assert window[: len(prompt.prefix)] == prompt.prefix
        assert not set(window[1:]) & set(prompt.masked)
        if len(window) < 40:
            assert window[-1] in prompt.stops
    assert len(set(made.windows)) == 10
    described = {key: made.description[key] for key in ("kind", "chat", "samples", "length", "seed", "packed", "device")}
    assert described == {"kind": "self", "chat": kind != "base", "samples": 10, "length": 40, "seed": 3, "packed": False, "device": "cpu"}
    json.dumps(made.description)


def test_the_same_seed_gives_the_same_windows_and_another_gives_others(base_model: Path, tmp_path: Path) -> None:
    one, again = generate(base_model, tmp_path / "1"), generate(base_model, tmp_path / "2")
    assert one == again
    assert one.windows != generate(base_model, tmp_path / "1", seed=4).windows


def test_texts_that_end_before_a_quarter_of_the_length_are_drawn_again(base_model: Path, tmp_path: Path, cache: Path,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    model = with_stops(base_model, tmp_path / "model", list(range(400, 460)))
    real, drawn = selfgen.sample_batch, []

    def sampled(*args: Any, **options: Any) -> list[list[int]]:
        texts = real(*args, **options)
        drawn.extend(map(tuple, texts))
        return texts

    monkeypatch.setattr(selfgen, "sample_batch", sampled)
    made = generate(model, cache, length=40)
    assert any(len(text) < 10 for text in drawn), "no text ended early: the test shows nothing"
    assert made.windows == tuple(text for text in drawn if len(text) >= 10)
    assert len(made.windows) == 10


def test_a_model_that_always_ends_at_once_is_an_error_and_no_loop(base_model: Path, tmp_path: Path, cache: Path) -> None:
    model = with_stops(base_model, tmp_path / "model", list(range(3, 512)))
    with pytest.raises(UsageError, match=r"wrote 44 texts and ended most of them early: 0 of the 10 windows asked for have at least 6"):
        generate(model, cache)


def test_a_length_that_the_prompt_fills_is_refused(chat_model: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match="--length 4 leaves no room after this model's prompt"):
        generate(chat_model, cache, length=4)


def test_long_windows_make_smaller_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfgen, "BATCH", 64)
    config = {"text_config": {"num_hidden_layers": 18, "num_key_value_heads": 1, "head_dim": 256}}  # 36,864 bytes a token in float32
    assert rows_at_once(config, 512, "float32", "cpu") == 64
    assert rows_at_once(config, 2048, "float32", "cpu") == 26
    assert rows_at_once(config["text_config"], 2048, "bfloat16", "cpu") == 52
    assert rows_at_once(config, 1_000_000, "float32", "cpu") == 1


def test_a_model_larger_than_the_memory_is_refused(base_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfgen, "available_bytes", lambda: 1000)
    with pytest.raises(UsageError, match=r"needs .* of memory to write its own calibration data, 1 kB are free"):
        generate(base_model, cache)


# ---- the cache


def never_load(*_: object) -> None:
    raise AssertionError("the model was loaded again")


def test_a_set_is_generated_once(base_model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(base_model, cache)
    assert [path.name for path in cache.iterdir()] == [f"self-{made.description['key'][:24]}.jsonl"]
    monkeypatch.setattr(selfgen, "_load_model", never_load)
    assert generate(base_model, cache) == made


def test_the_cache_is_gemq_s_unless_another_is_named(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMQ_CACHE", str(tmp_path / "gemq"))
    generate_self_set(base_model, samples=1, length=8, seed=0)
    assert len(list((tmp_path / "gemq" / "calibration").glob("self-*.jsonl"))) == 1


def flip_weight(model: Path) -> None:
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("change", [
    lambda model: flip_weight(model),
    lambda model: (model / "generation_config.json").write_text('{"eos_token_id": [1, 6]}'),
    lambda model: (model / "chat_template.jinja").write_text("{{ bos_token }}U:{{ messages[0].content }}\nA:"),
], ids=["a weight", "a stop id", "the template"])  # fmt: skip
def test_a_changed_model_is_another_model(base_model: Path, cache: Path, tmp_path: Path, change: Callable[[Path], object]) -> None:
    model = shutil.copytree(base_model, tmp_path / "model")
    before = generate(model, cache).description["key"]
    change(model)
    assert generate(model, cache).description["key"] != before


def test_a_moved_model_is_the_same_model(base_model: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = generate(base_model, cache)
    monkeypatch.setattr(selfgen, "_load_model", never_load)
    assert generate(shutil.copytree(base_model, tmp_path / "moved"), cache) == made


def test_a_damaged_set_in_the_cache_is_made_anew_with_a_warning(base_model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = generate(base_model, cache)
    (path,) = cache.iterdir()
    path.write_text(path.read_text().replace("[2, ", "[2, 9, ", 1))
    assert generate(base_model, cache) == made
    assert "made anew" in capsys.readouterr().err
    assert CalibrationSet.load(path) == made


def test_a_set_of_other_settings_under_this_name_is_not_taken(base_model: Path, cache: Path) -> None:
    made = generate(base_model, cache)
    (path,) = cache.iterdir()
    CalibrationSet.of([(2, 9)], {"kind": "self", "key": "0" * 64}).save(path)
    assert generate(base_model, cache) == made


# ---- interruption


def interrupt_in_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> list[int]:
    """Ctrl-C in the middle of the `number`-th batch from now; the returned list gets each batch's seed."""
    real, calls = selfgen.sample_batch, []

    def sampled(*args: Any, seed: int, **options: Any) -> list[list[int]]:
        calls.append(seed)
        if len(calls) == number:
            raise KeyboardInterrupt
        return real(*args, seed=seed, **options)

    monkeypatch.setattr(selfgen, "sample_batch", sampled)
    return calls


@pytest.mark.parametrize("number", [1, 2, 3])
def test_after_ctrl_c_the_next_run_goes_on_and_gives_the_same_set(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                 number: int) -> None:
    whole = generate(base_model, tmp_path / "whole")
    with monkeypatch.context() as context:
        interrupt_in_batch(context, number)
        with pytest.raises(Interrupted, match=rf"; {4 * (number - 1)} of 10 windows are kept"):
            generate(base_model, tmp_path / "cut")
    calls = interrupt_in_batch(monkeypatch, 99)
    assert generate(base_model, tmp_path / "cut") == whole
    assert calls == [batch_seed(3, batch) for batch in range(number - 1, 3)]
    assert [path.suffixes for path in (tmp_path / "cut").iterdir()] == [[".jsonl"]]


@pytest.mark.parametrize("damage", [
    lambda text: text[: len(text) // 2], lambda text: "", lambda text: "[]", lambda text: text.replace("[[[2, ", "[[[2, 9, ", 1),
    lambda text: text.replace('"key": "', '"key": "0', 1),
], ids=["cut", "empty", "list", "token", "key"])  # fmt: skip
def test_damaged_leftovers_of_an_interrupted_run_are_not_used(base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                             capsys: pytest.CaptureFixture[str], damage: Callable[[str], str]) -> None:
    whole = generate(base_model, tmp_path / "whole")
    with monkeypatch.context() as context:
        interrupt_in_batch(context, 2)
        with pytest.raises(Interrupted):
            generate(base_model, tmp_path / "cut")
    (partial,) = (tmp_path / "cut").iterdir()
    partial.write_text(damage(partial.read_text()))
    assert generate(base_model, tmp_path / "cut") == whole
    assert "made anew" in capsys.readouterr().err


# ---- real weights


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """On a shared machine, threads that wait for each other at every product make a second core a loss."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.usefixtures("_one_thread")
def test_the_demo_model_s_own_text_is_likely_to_it(demo_model: Path, cache: Path) -> None:
    """Its mean negative log-likelihood is an entropy of a language, some 3 to 4 nats a token; uniform tokens would have over 12."""
    made = generate(demo_model, cache, samples=2, length=32)
    model = selfgen._load_model(demo_model, "cpu", "float32", 0)
    total = count = 0.0
    with torch.inference_mode():
        for window in made.windows:
            ids = torch.tensor([window])
            losses = torch.nn.functional.cross_entropy(model(input_ids=ids).logits[0, :-1].float(), ids[0, 1:], reduction="sum")
            total, count = total + float(losses), count + len(window) - 1
    assert 1.0 < total / count < 6.5
