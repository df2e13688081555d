"""Kinds of sources: each gives a checkpoint that verifies, agrees with its source and is near it in KL, or a refusal that leaves nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.blackbox import sources
from tests.blackbox.command import DONE, INTEGRITY, USAGE, Done, Gemq
from tests.blackbox.files import edit_json, left_beside, names, read_json, seal_of, tensors_of, tree, unquantized_differences
from tests.models.gemma3 import build_gemma3_multimodal
from tests.models.gemma4 import build_gemma4, build_gemma4_moe

LARGEST_KL = 0.2  # nats a token; int4 in groups of 32 costs these models 0.02 to 0.06, a wrong head or layer costs more than 1

Make = Callable[[Path, Path], Path]


def check_checkpoint(gemq: Gemq, source: Path, out: Path, records: Path, *, expected: dict[str, torch.Tensor] | None = None) -> float:
    """Verify `out`, alone and against `source`, and measure it: its KL in nats a token."""
    verified = gemq("verify", out, "--json").exited(DONE).json
    assert verified["ok"]
    assert verified["differences"] == []
    assert verified["seal_digest"] == seal_of(out)
    compared = gemq("verify", out, "--source", source, "--json").exited(DONE).json
    assert compared["differences"] == []
    assert compared["source"]["kinds"]["quantized"]["count"] > 0
    assert unquantized_differences(out, tensors_of(source) if expected is None else expected) == []
    measured = gemq("eval-kl", out, "--reference", source, "--data", records, "--json").exited(DONE).json
    kl = measured["kl_nats"]["value"]
    assert 1e-5 < kl < LARGEST_KL
    return kl


def quantize_and_check(gemq: Gemq, source: Path, options: list[str], records: Path, *more: str) -> Path:
    """The checkpoint of `source`, checked; the source itself must stay as it was."""
    before, out = tree(source), gemq.cwd / "out"
    done = gemq("quantize", source, *options, *more, "--output", out, "--json").exited(DONE)
    assert done.json["seal"] == seal_of(out)
    assert left_beside(out) == {"out"}
    check_checkpoint(gemq, source, out, records)
    assert tree(source) == before
    return out


def refused(gemq: Gemq, source: str | Path, options: list[str], *codes: int, cwd: Path | None = None) -> Done:
    """A source that must not be quantized: the exit code, a next step, and nothing left of the output."""
    out = gemq.cwd / "refused"
    done = gemq("quantize", source, *options, "--output", out, cwd=cwd).exited(*codes)
    assert left_beside(out) == set()
    assert done.stderr.strip()
    return done


GOOD: dict[str, Make] = {
    "bf16": lambda base, out: sources.changed(base, out),
    "fp16": lambda base, out: sources.retyped(base, out, torch.float16, "float16"),
    "fp32": lambda base, out: sources.retyped(base, out, torch.float32, "float32"),
    "fp32-sharded": lambda base, out: sources.retyped(base, out, torch.float32, "float32", sharded=True),
    "norms-fp32": sources.mixed_types,
    "bf16-sharded": sources.sharded,
    "index-total-size-wrong": lambda base, out: sources.sharded(base, out, {"total_size": 12345}),
    "index-without-metadata": lambda base, out: sources.sharded(base, out, {}),
    "untied": sources.untied,
    "tied-and-equal-head-in-file": sources.equal_head,
    "quantization-config-null": lambda base, out: sources.changed(base, out, quantization_config=None),
    "prefix-language-model-model": lambda base, out: sources.renamed(base, out, "language_model.model."),
    "prefix-model-language-model": lambda base, out: sources.renamed(base, out, "model.language_model."),
    "multimodal-config-tower-null-legacy": lambda base, out: sources.multimodal_config_of_text(base, out, "language_model.model."),
    "multimodal-config-tower-null": lambda base, out: sources.multimodal_config_of_text(base, out, "model.language_model."),
    "hub-cache-links": sources.hub_cache,
    "training-state-beside": sources.with_training_state,
    "unicode-and-spaces": lambda base, out: sources.changed(base, out.with_name("модель 模型 ü [a] #1 100%")),
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_source_of_this_kind_is_quantized_verified_and_near_its_source(gemq, source, options, records, tmp_path, kind):
    made = GOOD[kind](source, tmp_path / "source")
    shutil.copyfile(records, strange := tmp_path / "ein Prüf satz.jsonl")
    quantize_and_check(gemq, made, options, strange if "unicode" in kind else records)


def test_a_path_with_unicode_and_spaces_is_fine_for_the_output_too(gemq, source, options, records, tmp_path):
    made = sources.changed(source, tmp_path / "quelle")
    out = tmp_path / "ergebnis – 結果 [x]{y} & 'z'" / "w4 a16"
    gemq("quantize", made, *options, "--output", out).exited(DONE)
    assert left_beside(out) == {out.name}
    check_checkpoint(gemq, made, out, records)


@pytest.mark.parametrize("kind", ["legacy-names", "names-of-today"])
def test_a_multimodal_gemma3_is_quantized_under_both_layouts_of_names(gemq, options, records, tmp_path, kind):
    made = build_gemma3_multimodal(tmp_path / "source", legacy_names=kind == "legacy-names", max_shard_bytes=400_000, num_hidden_layers=2,
                                   layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    quantize_and_check(gemq, made, options, records)


@pytest.mark.parametrize("build", [build_gemma4, build_gemma4_moe])
def test_a_gemma4_is_quantized(gemq, options, records, tmp_path, build):
    """The mixture is measured by `eval-kl`, so its experts must be found there under the names that were written."""
    made = build(tmp_path / "source", num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], num_kv_shared_layers=0)
    before, out = tree(made), gemq.cwd / "out"
    gemq("quantize", made, *options, "--output", out).exited(DONE)
    gemq("verify", out).exited(DONE)
    gemq("verify", out, "--source", made).exited(DONE)
    measured = gemq("eval-kl", out, "--reference", made, "--data", records, "--json").exited(DONE).json
    assert 1e-5 < measured["kl_nats"]["value"] < LARGEST_KL
    assert tree(made) == before


@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
def test_a_config_that_leaves_out_the_class_defaults_is_read_through_the_class(gemq, options, records, tmp_path, multimodal):
    made = sources.defaults_left_out(tmp_path / "source", multimodal=multimodal)
    out = quantize_and_check(gemq, made, options, records)
    assert "vocab_size" not in read_json(made / "config.json").get("text_config", read_json(made / "config.json"))
    text = tmp_path / "text.txt"
    text.write_text("The river below the mill froze in the first week of December. " * 20)
    gemq("eval-ppl", out, "--data", text, "--length", "64", "--json").exited(DONE)
    calibrated = [str(text) if part.endswith("calibration.jsonl") else part for part in options]
    gemq("quantize", made, *calibrated, "--output", gemq.cwd / "by-text").exited(DONE)


def test_a_stale_head_beside_a_tied_config_is_not_left_to_the_reader(gemq, source, options, records, tmp_path):
    """transformers scores the stored head, one vLLM serves it and another serves the embedding: untie, or refuse."""
    made = sources.stale_head(source, tmp_path / "source")
    out = gemq.cwd / "out"
    done = gemq("quantize", made, *options, "--output", out).exited(DONE, USAGE, INTEGRITY)
    if done.code != DONE:
        assert left_beside(out) == set()
        assert "lm_head" in done.told
        return
    assert read_json(out / "config.json")["tie_word_embeddings"] is False
    check_checkpoint(gemq, made, out, records)


@pytest.mark.parametrize("head", ["int4", "int8", "keep"])
def test_the_head_of_a_tied_source_becomes_what_was_asked(gemq, source, options, records, head):
    out = gemq.cwd / "out"
    gemq("quantize", source, *options, "--lm-head", head, "--output", out).exited(DONE)
    made = tensors_of(out)
    assert ("lm_head.weight_packed" in made) == (head != "keep")
    assert read_json(out / "config.json")["tie_word_embeddings"] is (head == "keep")
    assert gemq("verify", out, "--source", source, "--json").exited(DONE).json["differences"] == []
    measured = gemq("eval-kl", out, "--reference", source, "--data", records, "--json").exited(DONE).json
    assert 1e-5 < measured["kl_nats"]["value"] < LARGEST_KL


def test_the_checkpoint_of_an_untied_source_has_that_head_and_transformers_computes_the_kl_that_gemq_states(
    gemq, source, options, records, tmp_path
):
    """A second opinion on the number: the logits of both models by transformers alone."""
    from transformers import AutoModelForCausalLM

    made = sources.untied(source, tmp_path / "source")
    out = gemq.cwd / "out"
    gemq("quantize", made, *options, "--lm-head", "int8", "--output", out).exited(DONE)
    stated = check_head(gemq, made, out, records)
    ours, theirs = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (out, made))
    total, count = 0.0, 0
    for line in records.read_text().splitlines():
        record = json.loads(line)
        ids = torch.tensor([record["context_token_ids"] + record["target_token_ids"]])
        first = len(record["context_token_ids"]) - 1
        with torch.no_grad():
            p, q = (model(ids).logits[0, first:-1].float().log_softmax(-1) for model in (theirs, ours))
        total += (p.exp() * (p - q)).sum().item()
        count += len(record["target_token_ids"])
    assert stated == pytest.approx(total / count, rel=0.1)


def check_head(gemq: Gemq, source: Path, out: Path, records: Path) -> float:
    """The KL of a checkpoint whose head is quantized."""
    assert "lm_head.weight_packed" in tensors_of(out)
    assert gemq("verify", out, "--source", source, "--json").exited(DONE).json["differences"] == []
    kl: float = gemq("eval-kl", out, "--reference", source, "--data", records, "--json").exited(DONE).json["kl_nats"]["value"]
    return kl


def test_what_lies_beside_the_model_is_left_out_and_listed(gemq, source, options, tmp_path):
    made = sources.with_training_state(source, tmp_path / "source")
    out = gemq.cwd / "out"
    done = gemq("quantize", made, *options, "--output", out).exited(DONE)
    assert not names(out) & {Path(name).parts[0] for name in sources.TRAINING_FILES}
    listed = done.told + (out / "gemq.json").read_text()
    assert [name for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "runs") if name not in listed] == []
    gemq("verify", out, "--source", made).exited(DONE)


def test_a_source_that_must_not_be_written_to_is_enough(gemq, source, options, records, tmp_path):
    made = sources.changed(source, tmp_path / "source")
    before = tree(made)
    for path in (*made.iterdir(), made):
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        out = gemq.cwd / "out"
        gemq("quantize", made, *options, "--output", out, obey_permissions=True).exited(DONE)
        gemq("verify", out, "--source", made, obey_permissions=True).exited(DONE)
        gemq("eval-kl", out, "--reference", made, "--data", records, obey_permissions=True).exited(DONE)
        assert tree(made) == before
    finally:
        made.chmod(0o755)


def test_a_file_of_the_source_that_may_not_be_read_is_named(gemq, source, options, tmp_path):
    made = sources.changed(source, tmp_path / "source")
    (made / "model.safetensors").chmod(0)
    out = gemq.cwd / "out"
    done = gemq("quantize", made, *options, "--output", out, obey_permissions=True).exited(USAGE, INTEGRITY)
    assert "model.safetensors" in done.told
    assert left_beside(out) == set()


def test_a_link_to_a_source_is_that_source(gemq, source, options, tmp_path):
    (tmp_path / "link").symlink_to(source)
    (tmp_path / "relative").symlink_to(Path("link"))
    out = gemq.cwd / "out"
    gemq("quantize", tmp_path / "relative", *options, "--output", out).exited(DONE)
    gemq("verify", out, "--source", tmp_path / "link").exited(DONE)


def test_the_same_values_in_one_file_or_several_give_the_same_weights(gemq, source, options, tmp_path):
    made = sources.sharded(source, tmp_path / "sharded")
    for folder in (source, made):
        gemq("quantize", folder, *options, "--output", gemq.cwd / folder.name).exited(DONE)
    one, several = (tensors_of(gemq.cwd / folder.name) for folder in (source, made))
    assert {name: tensor.tolist() for name, tensor in one.items()} == {name: tensor.tolist() for name, tensor in several.items()}


def test_lora_tensors_inside_the_model_are_refused_with_the_advice_to_merge(gemq, source, options, tmp_path):
    done = refused(gemq, sources.with_lora_tensors(source, tmp_path / "source"), options, USAGE, INTEGRITY)
    assert "lora" in done.told.lower()
    assert "merge" in done.told.lower()


def _dangling_weights(base: Path, out: Path) -> Path:
    sources.without_weights(base, out)
    (out / "model.safetensors").symlink_to("../blobs/gone")
    return out


def _truncated(base: Path, out: Path) -> Path:
    sources.changed(base, out)
    path = out / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    return out


def _shard_missing(base: Path, out: Path) -> Path:
    sources.sharded(base, out)
    (out / "model-00002-of-00003.safetensors").unlink()
    return out


def _shard_is_an_lfs_pointer(base: Path, out: Path) -> Path:
    sources.changed(base, out)
    (out / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 726680\n")
    return out


def _only_pickles(base: Path, out: Path) -> Path:
    sources.without_weights(base, out)
    (out / "pytorch_model.bin").write_bytes(b"\x80\x02")
    return out


def _config_written(text: str) -> Make:
    def make(base: Path, out: Path) -> Path:
        sources.changed(base, out)
        (out / "config.json").write_text(text)
        return out

    return make


def _nan(base: Path, out: Path) -> Path:
    def change(tensors: sources.Tensors) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")

    return sources.changed(base, out, change)


def _index_escapes(base: Path, out: Path) -> Path:
    sources.sharded(base, out)
    shutil.move(out / "model-00002-of-00003.safetensors", out.parent / "outside.safetensors")

    def escape(index: dict) -> None:  # type: ignore[type-arg]
        index["weight_map"] = {name: file.replace("model-00002-of-00003", "../outside") for name, file in index["weight_map"].items()}

    edit_json(out / "model.safetensors.index.json", escape)
    return out


BAD: dict[str, Make] = {
    "weights-are-a-dangling-link": _dangling_weights,
    "weights-truncated": _truncated,
    "shard-missing": _shard_missing,
    "git-lfs-pointer": _shard_is_an_lfs_pointer,
    "pickles-only": _only_pickles,
    "config-empty": _config_written(""),
    "config-is-a-list": _config_written("[]"),
    "config-not-json": _config_written("{'architectures': "),
    "config-of-another-architecture": _config_written('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'),
    "layer-count-too-large": lambda base, out: sources.changed(base, out, num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "layer-count-a-string": lambda base, out: sources.changed(base, out, num_hidden_layers="two"),
    "tensor-missing": lambda base, out: sources.changed(base, out, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight")),
    "weight-not-finite": _nan,
    "quantized-already": lambda base, out: sources.changed(base, out, quantization_config={"quant_method": "gptq", "bits": 4}),
    "index-names-a-file-outside": _index_escapes,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_source_that_is_broken_is_refused_and_leaves_nothing(gemq, source, options, tmp_path, kind):
    refused(gemq, BAD[kind](source, tmp_path / "source"), options, USAGE, INTEGRITY)


def test_what_is_no_directory_with_a_model_is_refused(gemq, source, options, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("x")
    for wrong in (tmp_path / "empty", tmp_path / "file.txt", tmp_path / "nowhere", source / "config.json", ""):
        refused(gemq, wrong, options, USAGE)
