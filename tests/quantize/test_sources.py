"""Sources as they come: what is taken, what it becomes, and what is refused with its reason before anything is written."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import gemma3 as gemma3_models
from tests.models.gemma3 import build_gemma3_multimodal, build_gemma3_text
from tests.models.gemma4 import build
from tests.models.vocabulary import save_gemma3_tokenizer
from tests.models.weights import save_weights
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner, Result

from gemq.cli import app
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.eval.local import LocalCheckpoint
from gemq.quantize.arena_rules import check_arena
from gemq.quantize.audit import audit_structure
from gemq.quantize.plan import with_head
from gemq.quantize.seal import check_seal
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import Recipe, parse_recipe
from gemq.shards import ShardReader

Tensors = dict[str, torch.Tensor]
ROUNDED = (
    "version: 1\nname: rounded\nsummary: for tests\nmethod: rtn\nrules:\n{}"
    "  - {{match: [decoder], scheme: {{weights: {{num_bits: 8, strategy: channel}}}}}}\n"
)
LEGACY, SAVED = "language_model.model.", "model.language_model."


@pytest.fixture(scope="module")
def saved_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """transformers' names of today for the language model, and for the tower those by which vLLM loads it."""
    folder = tmp_path_factory.mktemp("models")
    return edited(build_gemma3_multimodal(folder / "built"), folder / "saved", None, lambda tensors: {
        name.replace("model.vision_tower.", "vision_tower.vision_model."): tensor for name, tensor in tensors.items()
    })  # fmt: skip


@pytest.fixture(scope="module")
def legacy_names(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_multimodal(tmp_path_factory.mktemp("models") / "legacy", legacy_names=True)


def edited(
    source: Path, copy: Path, config: Callable[[dict[str, Any]], object] | None = None, tensors: Callable[[Tensors], Tensors] | None = None
) -> Path:
    """A copy of `source` whose config and tensors went through the functions."""
    shutil.copytree(source, copy)
    if config is not None:
        document = json.loads((copy / "config.json").read_text())
        config(document)
        (copy / "config.json").write_text(json.dumps(document))
    if tensors is not None:
        save_file(tensors(load_file(copy / "model.safetensors")), copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def rounded() -> Recipe:
    """A recipe without calibration: int8, a scale a row."""
    return parse_recipe(ROUNDED.format(""), "rounded.yaml")


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def code_of(result: Result) -> int:
    return result.exception.exit_code if isinstance(result.exception, GemqError) else result.exit_code


def require_sound(checkpoint: Path, source: Path) -> None:
    assert check_seal(checkpoint) == []
    assert audit_structure(checkpoint).differences == []
    assert verify_against_source(checkpoint, source).differences == []


# --- the output head ---


def loaded_head(directory: Path) -> torch.Tensor:
    """The head's weight as transformers loads it (dequantized), which compares the stored one with the embedding."""
    with LocalCheckpoint.open(str(directory)).loaded("cpu", "bfloat16") as model:
        return model.causal_model.get_output_embeddings().weight.data.clone()


def head_by_config(directory: Path) -> torch.Tensor:
    """The head of a reader that believes config.json, as vLLM 0.26 does; both levels must say the same."""
    config = json.loads((directory / "config.json").read_text())
    stated = {level.get("tie_word_embeddings", True) for level in (config, config.get("text_config", config))}
    assert len(stated) == 1
    reader = ShardReader(directory)
    wanted = "embed_tokens.weight" if stated == {True} else "lm_head.weight"
    return reader.read(next(name for name in reader.tensors if name.endswith(wanted)))


HEADS = [("gemma3", "lm_head", "model."), ("saved_names", "lm_head", SAVED), ("legacy_names", "language_model.lm_head", LEGACY),
         ("legacy_names", "lm_head", LEGACY)]  # fmt: skip


def with_stored_head(source: Path, copy: Path, head: str, prefix: str, kind: str, config: Callable[[dict[str, Any]], object] | None) -> Path:
    def add(tensors: Tensors) -> Tensors:
        embedding = tensors[f"{prefix}embed_tokens.weight"]
        other = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(3)).to(embedding.dtype) * 0.1
        return {**tensors, f"{head}.weight": embedding.clone() if kind == "copy" else other}

    return edited(source, copy, config, add)


@pytest.mark.parametrize("quantized", ["keep", "int4"])
@pytest.mark.parametrize("kind", ["copy", "other"])
@pytest.mark.parametrize(("model", "head", "prefix"), HEADS)
def test_the_head_in_the_files_is_the_one_that_every_reader_of_the_checkpoint_uses(request, tmp_path, model, head, prefix, kind, quantized):
    source = with_stored_head(request.getfixturevalue(model), tmp_path / "source", head, prefix, kind, None)
    outcome = run_job(source, tmp_path / "out", with_head(rounded(), quantized))
    require_sound(outcome.directory, source)
    wanted = loaded_head(source)
    if quantized == "keep":
        assert torch.equal(loaded_head(outcome.directory), wanted)
        assert torch.equal(head_by_config(outcome.directory), wanted)
    else:
        found = loaded_head(outcome.directory).float()
        assert (found - wanted.float()).norm() < 0.2 * wanted.float().norm()
        config = json.loads((outcome.directory / "config.json").read_text())
        assert {level.get("tie_word_embeddings") for level in (config, config.get("text_config", config))} == {False}


def test_a_tied_config_over_another_head_is_told_of(gemma3, tmp_path):
    source = with_stored_head(gemma3, tmp_path / "source", "lm_head", "model.", "other", lambda config: config.pop("tie_word_embeddings"))
    assert "tie_word_embeddings false" in load_skeleton(source)[0].output_head.note
    same = with_stored_head(gemma3, tmp_path / "same", "lm_head", "model.", "copy", None)
    assert load_skeleton(same)[0].output_head.note == ""


def test_an_untied_source_keeps_its_head_whichever_level_of_its_config_says_so(saved_names, tmp_path):
    source = with_stored_head(saved_names, tmp_path / "a", "lm_head", SAVED, "other", lambda config: config.update(tie_word_embeddings=False))
    outcome = run_job(source, tmp_path / "a-out", rounded())
    assert torch.equal(head_by_config(outcome.directory), loaded_head(source))
    source = with_stored_head(
        saved_names, tmp_path / "b", "lm_head", SAVED, "other", lambda config: config["text_config"].update(tie_word_embeddings=False)
    )
    outcome = run_job(source, tmp_path / "b-out", rounded())
    assert torch.equal(head_by_config(outcome.directory), loaded_head(source))


def test_a_text_config_that_unties_what_the_class_above_ties_is_made_consistent(saved_names, tmp_path):
    source = edited(saved_names, tmp_path / "source", lambda config: config["text_config"].update(tie_word_embeddings=False))
    for head in ("keep", "int4"):
        outcome = run_job(source, tmp_path / head, with_head(rounded(), head))
        require_sound(outcome.directory, source)
    assert torch.equal(head_by_config(tmp_path / "keep"), loaded_head(source))


@pytest.mark.parametrize("head", ["keep", "int4"])
def test_an_untied_source_without_a_head_is_refused(gemma3, saved_names, tmp_path, head):
    for number, model in enumerate((gemma3, saved_names)):
        source = edited(model, tmp_path / f"source{number}", lambda config: config.update(tie_word_embeddings=False))
        with pytest.raises(IntegrityError, match="tie_word_embeddings"):
            run_job(source, tmp_path / "out", with_head(rounded(), head))


@pytest.mark.parametrize("head", ["model.language_model.lm_head", "language_model.model.lm_head", "model.lm_head"])
def test_a_head_under_a_name_that_no_reader_knows_is_refused(saved_names, tmp_path, head):
    source = with_stored_head(saved_names, tmp_path / "source", head, SAVED, "other", None)
    with pytest.raises(UsageError, match=re.escape(f"{head}.weight")):
        run_job(source, tmp_path / "out", rounded())


def test_two_heads_and_a_head_without_an_embedding_are_refused(legacy_names, gemma3, tmp_path):
    one = with_stored_head(legacy_names, tmp_path / "one", "lm_head", LEGACY, "other", None)
    two = with_stored_head(one, tmp_path / "two", "language_model.lm_head", LEGACY, "copy", None)
    with pytest.raises(UsageError, match="two heads"):
        load_skeleton(two)

    def rename(tensors: Tensors) -> Tensors:
        return {("lm_head.weight" if name == "model.embed_tokens.weight" else name): tensor for name, tensor in tensors.items()}

    with pytest.raises(IntegrityError, match=r"has lm_head\.weight and no model\.embed_tokens\.weight"):
        load_skeleton(edited(gemma3, tmp_path / "alone", None, rename))


def test_a_copied_head_has_a_life_of_its_own_once_the_embedding_is_quantized(gemma3, tmp_path):
    source = with_stored_head(gemma3, tmp_path / "source", "lm_head", "model.", "copy", None)
    rule = "  - {match: [embedding], method: rtn, scheme: {weights: {num_bits: 8, strategy: channel}}}\n"
    recipe = parse_recipe(ROUNDED.format(rule), "tables.yaml")
    outcome = run_job(source, tmp_path / "out", recipe)
    require_sound(outcome.directory, source)
    assert torch.equal(head_by_config(outcome.directory), loaded_head(source))


# --- adapters, and what else lies in a model's folder ---

ADAPTERS = ["model.layers.0.self_attn.q_proj.lora_A.default.weight", "model.layers.0.self_attn.q_proj.lora_B.weight",
            "model.layers.1.self_attn.q_proj.base_layer.weight", "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight",
            "model.layers.0.mlp.up_proj.lora_magnitude_vector", "model.layers.0.mlp.down_proj.ia3_l.default", "model.layers.0.mlp.up_proj.hada_w1_a",
            "model.embed_tokens.lora_embedding_A.default", "model.layers.0.mlp.up_proj.lokr_w1", "model.embed_tokens.modules_to_save.default.weight",
            "prompt_embeddings"]  # fmt: skip


@pytest.mark.parametrize("name", ADAPTERS)
def test_weights_with_an_adapter_are_refused_with_how_to_merge_it(gemma3, tmp_path, name):
    source = edited(gemma3, tmp_path / "source", None, lambda tensors: {**tensors, name: torch.ones(8, 8)})
    with pytest.raises(UsageError, match=re.escape(name)) as raised:
        run_job(source, tmp_path / "out", rounded())
    assert "merge_and_unload" in raised.value.next_step


def test_wrapped_layers_are_an_adapter_and_not_missing_tensors(gemma3, tmp_path):
    def wrap(tensors: Tensors) -> Tensors:
        return {name.replace("q_proj.weight", "q_proj.base_layer.weight"): tensor for name, tensor in tensors.items()}

    with pytest.raises(UsageError, match="base_layer"):
        load_skeleton(edited(gemma3, tmp_path / "source", None, wrap))


NOT_SERVED = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "optimizer.pt", "trainer_state.json", "training_args.bin",
              "scheduler.pt", "rng_state_0.pth", "pytorch_model.bin", "tf_model.h5", "flax_model.msgpack", "model-q4.gguf",
              "consolidated.00.safetensors", "events.out.tfevents.1", "train.py", "params.json", ".DS_Store", "model-00001-of-00009.safetensors",
              "pytorch_model.bin.index.json", "runs/a/events.1", "checkpoint-500/config.json", "checkpoint-500/model.safetensors",
              "onnx/model.onnx", "original/consolidated.00.pth", ".git/HEAD", "global_step500/zero_pp_rank_0.pt")  # fmt: skip
SERVED = ("LICENSE", "NOTICE.txt", "Gemma_Terms_of_Use.md", "chat_template.jinja", "additional_chat_templates/tools.jinja", "tokenizer.model",
          "tokenization_mine.py")  # fmt: skip


def test_only_what_a_server_reads_is_copied_and_the_rest_is_listed(gemma3, tmp_path):
    source = shutil.copytree(gemma3, tmp_path / "source")
    for name in (*NOT_SERVED, *SERVED):
        (source / name).parent.mkdir(exist_ok=True, parents=True)
        if not (source / name).exists():
            (source / name).write_bytes(b"x" * 20)
    shutil.copy(gemma3 / "model.safetensors", source / "adapter_model.safetensors")
    shutil.copy(gemma3 / "model.safetensors", source / "checkpoint-500" / "model.safetensors")
    made = command("quantize", source, "--recipe", "w8a16", "-o", tmp_path / "out", "--eval-data", "none")
    assert made.exit_code == 0, (made.output, made.exception)
    assert "adapter_model.safetensors" in made.output
    checkpoint = tmp_path / "out"
    found = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert not found & set(NOT_SERVED)
    assert found >= set(SERVED)
    for name in SERVED:
        assert (checkpoint / name).read_bytes() == (source / name).read_bytes()
    manifest = json.loads((checkpoint / "gemq.json").read_text())
    assert set(manifest["left_out"]) == {name.split("/")[0] + ("/" if "/" in name else "") for name in NOT_SERVED}
    assert not set(manifest["source"]["files"]) & set(NOT_SERVED)
    assert set(manifest["source"]["files"]) >= {*SERVED, "config.json", "model.safetensors"}
    require_sound(checkpoint, source)
    assert command("verify", checkpoint, "--source", source).exit_code == 0
    structure = audit_structure(checkpoint)
    assert check_arena(checkpoint, source, "lowbarena", structure, verify_against_source(checkpoint, source, structure)) == []


def test_an_adapter_in_the_folder_is_not_added_to_the_weights_where_peft_is_installed(gemma3, tmp_path, monkeypatch):
    from transformers.integrations import peft
    from transformers.models.auto import auto_factory

    from gemq.calibration.selfgen import generate_self_set

    def found(*arguments: object, **named: object) -> None:
        raise AssertionError("the adapter was looked for")

    source = shutil.copytree(gemma3, tmp_path / "source")
    (source / "adapter_config.json").write_text("{}")
    for module in (peft, auto_factory):
        monkeypatch.setattr(module, "is_peft_available", lambda: True)
        monkeypatch.setattr(module, "find_adapter_config_file", found)
    assert torch.equal(loaded_head(source), loaded_head(source))
    made = generate_self_set(source, samples=1, length=16, seed=0, device="cpu", cache_dir=tmp_path / "cache")
    assert len(made.windows) == 1


def test_what_is_left_out_does_not_stop_a_run_from_going_on(gemma3, tmp_path, monkeypatch):
    from tests.quantize.small_jobs import stop_job

    source = shutil.copytree(gemma3, tmp_path / "source")
    stop_job(monkeypatch, "solved:layer 1", source, tmp_path / "out", rounded())
    (source / "runs").mkdir()
    (source / "runs" / "log").write_text("a line")
    outcome = run_job(source, tmp_path / "out", rounded(), resume="required")
    assert outcome.manifest["left_out"] == ["runs/"]


def test_a_tokenizer_file_that_is_broken_or_a_link_to_nothing_is_found_before_the_work(gemma3, tmp_path):
    broken = shutil.copytree(gemma3, tmp_path / "broken")
    (broken / "generation_config.json").write_bytes(b"\xef\xbb\xbf{}")
    with pytest.raises(IntegrityError, match=r"generation_config\.json"):
        run_job(broken, tmp_path / "out", rounded())
    dangling = shutil.copytree(gemma3, tmp_path / "dangling")
    (dangling / "chat_template.json").symlink_to(tmp_path / "gone")
    with pytest.raises(IntegrityError, match=r"chat_template\.json"):
        run_job(dangling, tmp_path / "out", rounded())
    assert not (tmp_path / "out.partial").exists()


def test_a_tensor_that_the_model_has_no_part_for_is_refused(gemma3, saved_names, tmp_path):
    for number, (model, name) in enumerate([
        (gemma3, "model.layers.1.self_attn.q_proj.bias"), (gemma3, "model.layers.9.mlp.up_proj.weight"), (gemma3, "score.weight"),
        (saved_names, "model.vision_tower.encoder.layers.7.mlp.fc1.weight"), (saved_names, "value_head.weight"),
    ]):  # fmt: skip
        source = edited(model, tmp_path / f"{number}", None, lambda tensors, name=name: {**tensors, name: torch.ones(8, 8)})  # type: ignore[misc]
        with pytest.raises(UsageError, match=re.escape(name)):
            run_job(source, tmp_path / "out", rounded())


def test_what_vllm_leaves_out_by_name_is_copied(tmp_path):
    names = ["model.embed_vision.embedding.weight", "model.embed_audio.embedding.weight", "model.language_model.rotary_emb.inv_freq"]
    source = build("e4b", tmp_path / "model")
    source = edited(source, tmp_path / "source", None, lambda tensors: {**tensors, **{name: torch.ones(8, 8) for name in names}})
    outcome = run_job(source, tmp_path / "out", rounded())
    require_sound(outcome.directory, source)
    assert set(names) <= set(ShardReader(outcome.directory).tensors)


def test_audio_that_the_config_turns_off_is_copied(tmp_path):
    source = edited(build("e4b", tmp_path / "model"), tmp_path / "source", lambda config: config.update(audio_config=None))
    outcome = run_job(source, tmp_path / "out", rounded())
    require_sound(outcome.directory, source)


# --- configs that leave out what equals their class's defaults ---


def strip_defaults(directory: Path) -> None:
    """Take out of config.json whatever its transformers class would put there."""
    from transformers import AutoConfig

    path = directory / "config.json"
    config = json.loads(path.read_text())
    whole = AutoConfig.for_model(config["model_type"])
    parts = [(config, whole)] + [(config[key], getattr(whole, key)) for key in ("text_config", "vision_config") if key in config]
    for part, default in parts:
        values = default.to_dict()
        for key in [key for key, value in part.items() if key != "model_type" and key in values and values[key] == value]:
            del part[key]
    path.write_text(json.dumps(config))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "multimodal"])
def test_a_config_as_google_writes_it_goes_through_every_step(tmp_path, monkeypatch, kind):
    text = {"vocab_size": 262208, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention"] * 2, "query_pre_attn_scalar": 256,
            "max_position_embeddings": 131072, "sliding_window": 4096}  # fmt: skip
    make = build_gemma3_text if kind == "text" else functools.partial(build_gemma3_multimodal, legacy_names=True)
    monkeypatch.setattr(gemma3_models, "save_gemma3_tokenizer", lambda out, size: save_gemma3_tokenizer(out, 512))
    source = make(tmp_path / "source", **text)
    strip_defaults(source)
    config = json.loads((source / "config.json").read_text())
    stated = config if kind == "text" else config["text_config"]
    usual = {"vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings", "max_position_embeddings"}
    assert not usual & set(stated)
    out = tmp_path / "out"
    made = command("quantize", source, "--recipe", "w4a16-g32", "-o", out, "--samples", 2, "--length", 32, "--eval-records", 2, "--device", "cpu",
                   "--lm-head", "int8", "--json")  # fmt: skip
    assert made.exit_code == 0, (made.output, made.exception)
    assert command("verify", out, "--source", source).exit_code == 0
    written = json.loads((out / "config.json").read_text())
    assert {level.get("tie_word_embeddings") for level in (written, written.get("text_config", written))} == {False}
    (tmp_path / "text.txt").write_text("the the the of of and and to to in in a a is is " * 20)
    judged = command("eval-ppl", out, "--data", tmp_path / "text.txt", "--reference", source, "--records", 2, "--length", 32, "--device", "cpu")
    assert judged.exit_code == 0, (judged.output, judged.exception)


def test_a_benchmark_reads_vocabulary_and_bos_of_such_a_config(tmp_path):
    from gemq.eval.target import Target

    source = build_gemma3_multimodal(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    del config["text_config"]["vocab_size"], config["text_config"]["bos_token_id"]
    (source / "config.json").write_text(json.dumps(config))
    assert (Target.parse(str(source)).vocabulary, Target.parse(str(source)).bos) == (262208, 2)


def test_shared_layers_are_counted_from_a_default_number_of_layers():
    from gemq.quantize.audit import is_redundant

    config = {"model_type": "gemma4_text", "num_kv_shared_layers": 2}  # 30 layers by default
    assert is_redundant(config, "model.layers.29.self_attn.k_proj.weight")
    assert not is_redundant(config, "model.layers.27.self_attn.k_proj.weight")


# --- text-only weights under multimodal names and configs ---


def renamed(prefix: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {prefix + name.removeprefix("model."): tensor for name, tensor in tensors.items()}


def as_multimodal(vision: object) -> Callable[[dict[str, Any]], object]:
    def change(config: dict[str, Any]) -> None:
        text = dict(config)
        config.clear()
        config.update(architectures=["Gemma3ForConditionalGeneration"], model_type="gemma3", text_config=text, vision_config=vision, dtype="bfloat16")

    return change


def half_text(config: dict[str, Any]) -> None:
    as_multimodal(None)(config)
    config["architectures"] = ["Gemma3ForCausalLM"]


VISION = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "num_hidden_layers": 2, "image_size": 56, "patch_size": 14}
TEXT_ONLY = {
    "legacy names in a text model": (None, renamed(LEGACY)),
    "saved names in a text model": (None, renamed(SAVED)),
    "a language model under a multimodal config": (as_multimodal(VISION), renamed(LEGACY)),
    "and its vision_config null": (as_multimodal(None), renamed(SAVED)),
    "a text model under a multimodal config": (as_multimodal(VISION), None),
    "the text class with the multimodal model_type": (half_text, None),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] if place else []) for place, case in enumerate(TEXT_ONLY)])
def test_a_language_model_under_multimodal_names_is_refused_with_a_command_that_makes_it_one(gemma3, tmp_path, case):
    config, tensors = TEXT_ONLY[case]
    source = edited(gemma3, tmp_path / "so'urce", config, tensors)  # type: ignore[arg-type]
    refused = command("quantize", source, "--recipe", "w8a16", "-o", tmp_path / "out")
    assert isinstance(refused.exception, UsageError)
    assert "shard" not in refused.exception.message + refused.exception.next_step
    _, told = refused.exception.next_step.split(" give it instead: ")
    subprocess.run([sys.executable, *shlex.split(told)[1:]], cwd=tmp_path, check=True, capture_output=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(gemma3 / name, tmp_path / "text-model")
    outcome = run_job(tmp_path / "text-model", tmp_path / "out", rounded())
    require_sound(outcome.directory, tmp_path / "text-model")
    assert torch.equal(load_file(outcome.directory / "model.safetensors")["model.norm.weight"],
                       load_file(gemma3 / "model.safetensors")["model.norm.weight"])  # fmt: skip


def test_a_gemma4_without_a_vision_config_is_refused(tmp_path):
    source = build("e4b", tmp_path / "model")
    with pytest.raises(UsageError, match="vision_config None"):
        load_skeleton(edited(source, tmp_path / "source", lambda config: config.update(vision_config=None)))


def test_a_multimodal_models_files_under_a_text_config_are_of_another_revision(saved_names, gemma3, tmp_path):
    source = edited(saved_names, tmp_path / "source")
    shutil.copy(gemma3 / "config.json", source)
    with pytest.raises(UsageError) as raised:
        load_skeleton(source)
    assert "one revision" in raised.value.next_step


# --- harmless oddities ---


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return build_gemma3_text(tmp_path / "sharded", max_shard_bytes=200_000)


def rewrite_index(source: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = source / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index["metadata"].update(total_size=7),
        lambda index: index["metadata"].update(total_size="many"),
        lambda index: index["metadata"].clear(),
        lambda index: index.update(weight_map=dict(reversed(index["weight_map"].items()))),
        lambda index: index["weight_map"].pop("model.norm.weight"),
    ],
)
def test_an_index_that_no_reader_minds_is_taken_before_and_after(sharded, tmp_path, change):
    rewrite_index(sharded, change)
    made = command("quantize", sharded, "--recipe", "w8a16", "-o", tmp_path / "out", "--eval-data", "none")
    assert made.exit_code == 0, (made.output, made.exception)
    checked = command("verify", tmp_path / "out", "--source", sharded)
    assert checked.exit_code == 0, (checked.output, checked.exception)
    size_is_off = json.loads((sharded / "model.safetensors.index.json").read_text())["metadata"] != {"total_size": sum(
        tensor.nbytes for tensor in ShardReader(sharded).tensors.values())}  # fmt: skip
    assert ("total_size" in made.output) == ("total_size" in checked.output) == size_is_off


def test_the_checkpoints_own_index_stays_exact(sharded, tmp_path, monkeypatch):
    import gemq.quantize.run as run
    from gemq.shards import ShardWriter

    monkeypatch.setattr(run, "ShardWriter", lambda directory, specs: ShardWriter(directory, specs, max_shard_bytes=150_000))
    outcome = run_job(sharded, tmp_path / "out", rounded())
    index = outcome.directory / "model.safetensors.index.json"
    index.chmod(0o644)
    rewrite_index(outcome.directory, lambda document: document["metadata"].update(total_size=7))
    assert index.name in {difference.path for difference in audit_structure(outcome.directory).differences}


@pytest.mark.parametrize("change", [lambda index: index.pop("metadata"), lambda index: index.update(metadata=None)])
def test_an_index_that_transformers_can_not_read_is_refused(sharded, tmp_path, change):
    rewrite_index(sharded, change)
    refused = command("quantize", sharded, "--recipe", "w8a16", "-o", tmp_path / "out", "--eval-data", "none")
    assert isinstance(refused.exception, UsageError)
    assert "metadata" in refused.exception.message


def test_shards_that_no_index_names_are_left_out(sharded, tmp_path):
    save_weights(tmp_path, {"model.norm.weight": torch.zeros(128)})
    (tmp_path / "model.safetensors").rename(sharded / "model-00009-of-00009.safetensors")
    outcome = run_job(sharded, tmp_path / "out", rounded())
    assert outcome.manifest["left_out"] == ["model-00009-of-00009.safetensors"]
    require_sound(outcome.directory, sharded)


def test_a_single_file_beside_an_index_of_others_is_refused(sharded, tmp_path):
    save_weights(sharded, {"model.norm.weight": torch.zeros(128)})
    with pytest.raises(UsageError, match="transformers reads the one, vLLM the others"):
        run_job(sharded, tmp_path / "out", rounded())


@pytest.mark.parametrize("where", ["top", "text_config"])
def test_a_null_quantization_config_is_none_and_an_empty_one_is_refused(saved_names, tmp_path, where):
    def put(value: object) -> Callable[[dict[str, Any]], object]:
        return lambda config: (config if where == "top" else config["text_config"]).update(quantization_config=value)

    source = edited(saved_names, tmp_path / "null", put(None))
    outcome = run_job(source, tmp_path / "out", rounded())
    config = json.loads((outcome.directory / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert "quantization_config" not in config["text_config"]
    require_sound(outcome.directory, source)
    for number, (value, said) in enumerate([({}, "empty"), ({"quant_method": "bitsandbytes"}, "bitsandbytes"), ("odd", "quantized already")]):
        with pytest.raises(UsageError, match=said):
            load_skeleton(edited(saved_names, tmp_path / f"{number}", put(value)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sources_in_other_float_types(gemma3, tmp_path, dtype):
    name = str(dtype).removeprefix("torch.")
    source = edited(gemma3, tmp_path / "source", lambda config: config.update(dtype=name),
                    lambda tensors: {key: tensor.to(dtype) for key, tensor in tensors.items()})  # fmt: skip
    outcome = run_job(source, tmp_path / "out")
    require_sound(outcome.directory, source)
    assert load_file(outcome.directory / "model.safetensors")["model.norm.weight"].dtype == dtype


@pytest.mark.parametrize("dtype", ["BF16", "torch.bfloat16", "BFLOAT16", "fp8", 16, ["float32"]])
def test_a_dtype_that_transformers_can_not_read_is_named(gemma3, tmp_path, dtype):
    for number, key in enumerate(("dtype", "torch_dtype")):
        with pytest.raises(UsageError, match=key) as raised:
            load_skeleton(edited(gemma3, tmp_path / f"{number}", lambda config, key=key: config.update({key: dtype})))  # type: ignore[misc]
        assert "bfloat16" in raised.value.next_step


@pytest.mark.parametrize("raw", [lambda raw: b"\xef\xbb\xbf" + raw, lambda raw: raw + b"\xef\xbb\xbf\n"])
def test_a_byte_order_mark_in_the_config_is_named(gemma3, tmp_path, raw):
    source = edited(gemma3, tmp_path / "source")
    (source / "config.json").write_bytes(raw((source / "config.json").read_bytes()))
    with pytest.raises(UsageError, match="byte order mark"):
        load_skeleton(source)


def test_links_as_in_the_hubs_cache_a_read_only_folder_and_names_in_unicode(gemma3, tmp_path):
    blobs, source = tmp_path / "blobs", tmp_path / "模型 Größe"
    blobs.mkdir()
    source.mkdir()
    for number, path in enumerate(sorted(gemma3.iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (source / path.name).symlink_to(Path("..") / "blobs" / f"{number:064x}")
    (source / "LICENSE-日本語").write_text("terms")
    source.chmod(0o555)
    try:
        outcome = run_job(source, tmp_path / "出力", rounded())
    finally:
        source.chmod(0o755)
    require_sound(outcome.directory, source)
    assert not any(path.is_symlink() for path in outcome.directory.iterdir())
    assert (outcome.directory / "LICENSE-日本語").read_text() == "terms"
    assert os.access(outcome.directory / "config.json", os.R_OK)
