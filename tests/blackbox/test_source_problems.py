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

LARGEST_KL = 0.2  # nats a token; int4 in groups of 32 costs a small Gemma 3 0.02 to 0.06, a wrong head or layer costs more than 1
LARGEST_KL_GEMMA4 = 0.7  # its small random decoder loses 0.3

Make = Callable[[Path, Path], Path]


def check_checkpoint(gemq: Gemq, source: Path, out: Path) -> None:
    """Verify `out`, alone and against `source`, and compare what is not quantized byte for byte."""
    verified = gemq("verify", out, "--json").exited(DONE).json
    assert verified["ok"]
    assert verified["differences"] == []
    assert verified["seal_digest"] == seal_of(out)
    compared = gemq("verify", out, "--source", source, "--json").exited(DONE).json
    assert compared["differences"] == []
    assert compared["source"]["kinds"]["quantized"]["count"] > 0
    assert unquantized_differences(out, tensors_of(source)) == []


def quantize_and_check(
    gemq: Gemq, source: Path, options: list[str], records: Path, *more: str, out: Path | None = None, largest_kl: float = LARGEST_KL
) -> tuple[Path, Done]:
    """The checkpoint of `source`, measured and checked; the source itself must stay as it was."""
    before, out = tree(source), out or gemq.cwd / "out"
    measured = [*options[: options.index("--eval-data") + 1], str(records)]
    done = gemq("quantize", source, *measured, *more, "--output", out, "--json", obey_permissions=True).exited(DONE)
    assert done.json["seal"] == seal_of(out)
    assert 1e-5 < done.json["perplexity"]["kl_nats"]["value"] < largest_kl
    assert left_beside(out) == {out.name}
    check_checkpoint(gemq, source, out)
    assert tree(source) == before
    return out, done


def refused(gemq: Gemq, source: str | Path, options: list[str], *codes: int, cwd: Path | None = None) -> Done:
    """A source that must not be quantized: the exit code, a next step, and nothing left of the output."""
    out = gemq.cwd / "refused"
    done = gemq("quantize", source, *options, "--output", out, cwd=cwd).exited(*codes)
    assert left_beside(out) == set()
    assert done.stderr.strip()
    return done


def _fp16_shards_whose_index_is_off(base: Path, out: Path) -> Path:
    sources.retyped(base, out, torch.float16, "float16", sharded=True)
    edit_json(out / "model.safetensors.index.json", lambda index: index.update(metadata={"total_size": 12345}))
    return out


def _fp32_shards_in_a_strange_place(base: Path, out: Path) -> Path:
    sources.retyped(base, out.with_name("модель 模型 ü [a] #1 100%"), torch.float32, "float32", sharded=True)
    edit_json(out.with_name("модель 模型 ü [a] #1 100%") / "model.safetensors.index.json", lambda index: index.update(metadata={}))
    return out.with_name("модель 模型 ü [a] #1 100%")


def _untied_with_norms_in_fp32(base: Path, out: Path) -> Path:
    sources.untied(base, out.with_name("untied"))
    sources.mixed_types(out.with_name("untied"), out)
    edit_json(out / "config.json", lambda document: document.update(quantization_config=None))
    return out


def _link_to_a_hub_cache_with_an_equal_head(base: Path, out: Path) -> Path:
    sources.equal_head(base, out.with_name("equal"))
    snapshot = sources.hub_cache(out.with_name("equal"), out.with_name("cache"))
    out.symlink_to(snapshot)
    return out


GOOD: dict[str, Make] = {
    "fp16-sharded-total-size-wrong": _fp16_shards_whose_index_is_off,
    "fp32-sharded-index-without-total-size-unicode-path": _fp32_shards_in_a_strange_place,
    "untied-norms-fp32-quantization-config-null": _untied_with_norms_in_fp32,
    "link-to-hub-cache-equal-head-in-file": _link_to_a_hub_cache_with_an_equal_head,
}


@pytest.mark.parametrize("kind", GOOD)
def test_a_source_of_this_kind_is_quantized_verified_and_near_its_source(gemq, source, options, records, tmp_path, kind):
    out = tmp_path / "ergebnis – 結果 [x]{y} & 'z'" / "w4 a16"
    quantize_and_check(gemq, GOOD[kind](source, tmp_path / "source"), options, records, out=out if "unicode" in kind else None)


def test_a_multimodal_gemma3_under_the_hubs_names_is_quantized(gemq, options, records, tmp_path):
    made = build_gemma3_multimodal(tmp_path / "source", legacy_names=True, max_shard_bytes=400_000, num_hidden_layers=2,
                                   layer_types=["sliding_attention", "full_attention"])  # fmt: skip
    quantize_and_check(gemq, made, options, records)


@pytest.mark.parametrize("build", [build_gemma4, build_gemma4_moe])
def test_a_gemma4_is_quantized_and_measured(gemq, options, records, tmp_path, build):
    """A mixture is measured too: its experts must be found under the names that were written."""
    made = build(tmp_path / "source", num_hidden_layers=4, layer_types=["sliding_attention"] * 3 + ["full_attention"], num_kv_shared_layers=0)
    out = gemq.cwd / "out"
    measured = [*options[: options.index("--eval-data") + 1], str(records)]
    done = gemq("quantize", made, *measured, "--output", out, "--json").exited(DONE).json
    assert 1e-5 < done["perplexity"]["kl_nats"]["value"] < LARGEST_KL_GEMMA4
    gemq("verify", out).exited(DONE)
    gemq("verify", out, "--source", made).exited(DONE)


@pytest.mark.parametrize("multimodal", [False, True], ids=["text", "multimodal"])
def test_a_config_that_leaves_out_the_class_defaults_is_read_through_the_class(gemq, options, records, tmp_path, multimodal):
    made = sources.defaults_left_out(tmp_path / "source", multimodal=multimodal)
    assert "vocab_size" not in read_json(made / "config.json").get("text_config", read_json(made / "config.json"))
    text = tmp_path / "text.txt"
    text.write_text("The river below the mill froze in the first week of December. " * 20)
    quantize_and_check(gemq, made, options, records, "--calibration", str(text))


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
    check_checkpoint(gemq, made, out)
    measured = gemq("eval-kl", out, "--reference", made, "--data", records, "--json").exited(DONE).json
    assert 1e-5 < measured["kl_nats"]["value"] < LARGEST_KL


@pytest.mark.parametrize("head", ["int4", "keep"])
def test_the_head_of_a_tied_source_becomes_what_was_asked(gemq, source, options, records, head):
    out = gemq.cwd / "out"
    measured = [*options[: options.index("--eval-data") + 1], str(records)]
    done = gemq("quantize", source, *measured, "--lm-head", head, "--output", out, "--json").exited(DONE).json
    assert ("lm_head.weight_packed" in tensors_of(out)) == (head != "keep")
    assert read_json(out / "config.json")["tie_word_embeddings"] is (head == "keep")
    assert gemq("verify", out, "--source", source, "--json").exited(DONE).json["differences"] == []
    assert 1e-5 < done["perplexity"]["kl_nats"]["value"] < LARGEST_KL


def test_keep_keeps_the_head_where_the_recipe_names_it(gemq, source, options, work):
    """A rule that matches everything matches the head too; the option decides."""
    recipe = work / "recipe.yaml"
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    rules = [{"match": ["re:.*lm_head", "decoder"], "scheme": {"weights": weights}}]
    recipe.write_text(json.dumps({"version": 1, "name": "mine", "summary": "a test", "method": "rtn", "rules": rules}))
    gemq("quantize", source, *options, "--recipe", recipe, "--lm-head", "keep", "--output", work / "out").exited(DONE)
    assert "lm_head.weight_packed" not in tensors_of(work / "out")
    gemq("verify", work / "out", "--source", source).exited(DONE)


def test_the_kl_that_gemq_states_of_an_untied_quantized_head_is_what_transformers_computes(gemq, source, options, records, tmp_path):
    """A second opinion on the number: the logits of both models by transformers alone."""
    from transformers import AutoModelForCausalLM

    made = sources.untied(source, tmp_path / "source")
    out, done = quantize_and_check(gemq, made, options, records, "--lm-head", "int8")
    assert "lm_head.weight_packed" in tensors_of(out)
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
    assert done.json["perplexity"]["kl_nats"]["value"] == pytest.approx(total / count, rel=0.1)


def test_what_lies_beside_a_read_only_model_is_left_out_and_listed(gemq, source, options, records, tmp_path):
    made = sources.with_training_state(source, tmp_path / "source")
    for folder in (".git", ".cache"):
        (made / folder).mkdir()
        (made / folder / "state").write_text("x")
    paths = sorted(made.rglob("*"), reverse=True)
    try:
        for path in (*paths, made):
            path.chmod(0o555 if path.is_dir() else 0o444)
        out, done = quantize_and_check(gemq, made, options, records)
        assert not names(out) & {Path(name).parts[0] for name in sources.TRAINING_FILES} | {".git", ".cache"} & names(out)
        listed = done.told + (out / "gemq.json").read_text()
        assert [name for name in ("adapter_config.json", "adapter_model.safetensors", "optimizer.pt", "runs") if name not in listed] == []
    finally:
        for path in (made, *paths):
            path.chmod(0o755)


def test_a_file_of_the_source_that_may_not_be_read_is_named(gemq, source, options, tmp_path):
    made = sources.changed(source, tmp_path / "source")
    (made / "model.safetensors").chmod(0)
    out = gemq.cwd / "out"
    done = gemq("quantize", made, *options, "--output", out, obey_permissions=True).exited(USAGE, INTEGRITY)
    assert "model.safetensors" in done.told
    assert left_beside(out) == set()


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
    "prefix-language-model-model": lambda base, out: sources.renamed(base, out, "language_model.model."),
    "prefix-model-language-model": lambda base, out: sources.renamed(base, out, "model.language_model."),
    "multimodal-config-tower-null-legacy": lambda base, out: sources.multimodal_config_of_text(base, out, "language_model.model."),
    "multimodal-config-tower-null": lambda base, out: sources.multimodal_config_of_text(base, out, "model.language_model."),
    "weights-are-a-dangling-link": _dangling_weights,
    "weights-truncated": _truncated,
    "shard-missing": _shard_missing,
    "git-lfs-pointer": _shard_is_an_lfs_pointer,
    "pickles-only": _only_pickles,
    "config-is-a-list": _config_written("[]"),
    "config-of-another-architecture": _config_written('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}'),
    "layer-count-too-large": lambda base, out: sources.changed(base, out, num_hidden_layers=3, layer_types=["full_attention"] * 3),
    "layer-count-a-string": lambda base, out: sources.changed(base, out, num_hidden_layers="two"),
    "tensor-missing": lambda base, out: sources.changed(base, out, lambda tensors: tensors.pop("model.layers.1.input_layernorm.weight")),
    "quantized-already": lambda base, out: sources.changed(base, out, quantization_config={"quant_method": "gptq", "bits": 4}),
    "index-names-a-file-outside": _index_escapes,
}


@pytest.mark.parametrize("kind", BAD)
def test_a_source_that_is_broken_is_refused_and_leaves_nothing(gemq, source, options, tmp_path, kind):
    refused(gemq, BAD[kind](source, tmp_path / "source"), options, USAGE, INTEGRITY)


def test_a_weight_that_is_not_finite_is_named(gemq, source, options, tmp_path):
    """Found where it is used: what was done before may be kept, a checkpoint is not made."""
    out = gemq.cwd / "out"
    done = gemq("quantize", _nan(source, tmp_path / "source"), *options, "--output", out).exited(INTEGRITY)
    assert "model.layers.1.mlp.down_proj.weight" in done.told
    assert left_beside(out) <= {"out.partial"}


def test_what_is_no_directory_with_a_model_is_refused(gemq, source, options, tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", source / "config.json", ""):
        refused(gemq, wrong, options, USAGE)
