"""`gemq verify --source` on wrong pairs: a checkpoint and a source that differ in a config key, a tokenizer, a template or a file."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from safetensors.torch import load_file, save_file
from tests.models import gemma3, gemma4
from tests.quantize.small_jobs import run_job
from typer.testing import CliRunner

from gemq.commands import verify as command
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.plan import with_format, with_head
from gemq.quantize.provenance import PROVENANCE_FILE
from gemq.quantize.seal import SEAL_FILE, write_seal
from gemq.recipes.model import load_recipe

Change = Callable[[dict[str, Any]], object]
BUILDERS: dict[str, Callable[[Path], Path]] = {
    "gemma3": gemma3.build_gemma3_text,
    "gemma3-multimodal": lambda out: gemma3.build_gemma3_multimodal(out, legacy_names=True, max_shard_bytes=200_000),
    **{f"gemma4-{kind}": (lambda out, kind=kind: gemma4.build(kind, out)) for kind in gemma4.KINDS},
}
FORMATS = ("compressed-tensors", "gptq")


def verify(checkpoint: Path, source: Path) -> tuple[Any, dict[str, list[str]], dict[str, Any]]:
    """What the command ends with, its differences by path, and its whole JSON."""
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    ended = CliRunner().invoke(app, ["verify", str(checkpoint), "--source", str(source), "--json"])
    command.output.mode.json = False
    document = json.loads(ended.stdout or "{}")
    found: dict[str, list[str]] = {}
    for difference in document.get("differences", []):
        found.setdefault(difference["path"], []).append(difference["what"])
    return ended.exception, found, document


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def source(kind: str) -> Path:
        if kind not in made:
            made[kind] = BUILDERS[kind](tmp_path_factory.mktemp("sources") / kind)
        return made[kind]

    return source


@pytest.fixture(scope="module")
def made(sources: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A checkpoint of gemq's, by kind of source, format and head; each is made once."""
    kept: dict[tuple[str, str, str], Path] = {}

    def checkpoint(kind: str = "gemma4-e4b", form: str = "compressed-tensors", head: str = "int4") -> Path:
        key = (kind, form, head)
        if key not in kept:
            recipe = with_format(with_head(load_recipe("w4a16-g32").model_copy(update={"method": "rtn"}), head), form)
            kept[key] = run_job(sources(kind), tmp_path_factory.mktemp("made") / "checkpoint", recipe).directory
        return kept[key]

    return checkpoint


def copied(directory: Path, to: Path) -> Path:
    shutil.copytree(directory, to)
    for path in to.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return to


def resealed(checkpoint: Path, to: Path, change: Callable[[Path], object]) -> Path:
    """A copy that was changed and sealed again, as by somebody who hides the change: without the provenance that lists the old files."""
    copy = copied(checkpoint, to)
    change(copy)
    for name in (SEAL_FILE, PROVENANCE_FILE):
        (copy / name).unlink(missing_ok=True)
    write_seal(copy)
    return copy


def edit_json(path: Path, change: Change) -> None:
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def in_config(change: Change) -> Callable[[Path], None]:
    return lambda directory: edit_json(directory / "config.json", change)


def text(**values: Any) -> Change:
    return lambda config: config["text_config"].update(values)


# --- what gemq makes is accepted


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("head", ["int4", "int8", "keep"])
@pytest.mark.parametrize("kind", BUILDERS)
def test_what_gemq_makes_of_every_architecture_is_accepted(made, sources, kind, form, head):
    if kind == "gemma4-moe" and form == "gptq":
        with pytest.raises(UsageError, match="experts"):
            made(kind, form, head)
        return
    error, found, document = verify(made(kind, form, head), sources(kind))
    assert (error, found) == (None, {})
    assert document["ok"]


def test_a_source_with_more_files_than_when_it_was_quantized_is_accepted(made, sources, tmp_path):
    source = copied(sources("gemma4-e4b"), tmp_path / "source")
    for name in ("pytorch_model.bin", "gguf/model.gguf", "onnx/model.onnx", ".cache/lock", ".gitattributes", "README.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_bytes(b"x")
    assert verify(made(), source)[:2] == (None, {})


# --- another source


CONFIG_CHANGES: dict[str, tuple[Change, str]] = {
    "sliding window": (text(sliding_window=32), "text_config.sliding_window"),
    "softcap": (text(final_logit_softcapping=20.0), "text_config.final_logit_softcapping"),
    "no softcap": (lambda config: config["text_config"].pop("final_logit_softcapping"), "text_config.final_logit_softcapping"),
    "rope theta": (lambda config: config["text_config"]["rope_parameters"]["full_attention"].update(rope_theta=1.5e6),
                   "text_config.rope_parameters.full_attention.rope_theta"),
    "layer types": (lambda config: config["text_config"]["layer_types"].reverse(), "text_config.layer_types"),
    "eos ids": (lambda config: config.update(eos_token_id=[1]), "eos_token_id"),
    "norm epsilon": (text(rms_norm_eps=1e-5), "text_config.rms_norm_eps"),
    "a float for an integer": (text(sliding_window=16.0), "text_config.sliding_window"),
    "a truth value for a number": (text(pad_token_id=False), "text_config.pad_token_id"),
    "an additional key": (lambda config: config.update(is_encoder_decoder=True), "is_encoder_decoder"),
    "the vision tower": (lambda config: config["vision_config"].update(rms_norm_eps=1e-5), "vision_config.rms_norm_eps"),
    "the audio tower": (lambda config: config["audio_config"].update(attention_context_left=12), "audio_config.attention_context_left"),
    "soft tokens": (lambda config: config.update(vision_soft_tokens_per_image=280), "vision_soft_tokens_per_image"),
    "architectures": (lambda config: config.update(architectures=["Gemma4ForConditionalGeneration", "Other"]), "architectures"),
    "code of its own": (lambda config: config.update(auto_map={"AutoModel": "evil.Model"}), "auto_map"),
    "dtype": (lambda config: config.update(dtype="float16"), "dtype"),
    "shared layers": (text(use_bidirectional_attention="all"), "text_config.use_bidirectional_attention"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("change", CONFIG_CHANGES)
def test_another_config_is_named_by_its_key_on_either_side(made, sources, tmp_path, change, form):
    edit, key = CONFIG_CHANGES[change]
    checkpoint, source = made(form=form), sources("gemma4-e4b")
    other = copied(source, tmp_path / "source")
    in_config(edit)(other)
    for pair in ((checkpoint, other), (resealed(checkpoint, tmp_path / "checkpoint", in_config(edit)), source)):
        error, found, _ = verify(*pair)
        assert isinstance(error, IntegrityError)
        assert error.exit_code == 4
        assert any(what.startswith(f"{key} ") for what in found["config.json"]), found


@pytest.mark.parametrize("key", ["sliding_window", "rope_theta", "attn_logit_softcapping", "layer_types", "tie_word_embeddings"])
def test_another_config_of_a_text_model_is_named(made, sources, tmp_path, key):
    changed = {"sliding_window": 17, "rope_theta": 5e5, "attn_logit_softcapping": 50.0, "layer_types": ["full_attention"] * 4,
               "tie_word_embeddings": False}[key]  # fmt: skip
    forged = resealed(made("gemma3", head="keep"), tmp_path / "forged", in_config(lambda config: config.update({key: changed})))
    assert any(what.startswith(f"{key} ") for what in verify(forged, sources("gemma3"))[1]["config.json"])


def test_a_quantized_head_that_the_config_ties_to_the_embedding_is_named(made, sources, tmp_path):
    for part in ("top", "text"):
        forged = resealed(made(), tmp_path / part, in_config(
            lambda config: (config if part == "top" else config["text_config"]).update(tie_word_embeddings=True)))  # noqa: B023
        assert "tie_word_embeddings" in str(verify(forged, sources("gemma4-e4b"))[1]["config.json"])


def test_the_checkpoint_is_no_source_of_itself(made, sources):
    error, _, _ = verify(made(), made())
    assert isinstance(error, UsageError)
    assert error.exit_code == 2


def swap_tokens(directory: Path) -> None:
    def swap(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        if isinstance(vocabulary, list):
            vocabulary[30], vocabulary[31] = vocabulary[31], vocabulary[30]
        else:
            one, other = list(vocabulary)[30:32]
            vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    edit_json(directory / "tokenizer.json", swap)


FILE_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "two swapped tokens": ("tokenizer.json", swap_tokens),
    "a template in the tokenizer's config": (
        "tokenizer_config.json",
        lambda out: edit_json(out / "tokenizer_config.json", lambda document: document.update(chat_template="{{ messages }}"))),
    "another chat template": ("chat_template.jinja", lambda out: (out / "chat_template.jinja").write_text("{{ messages[0].content }}")),
    "another processor": (
        "processor_config.json",
        lambda out: edit_json(out / "processor_config.json", lambda document: document["image_processor"].update(max_soft_tokens=280))),
    "other eos ids": (
        "generation_config.json",
        lambda out: edit_json(out / "generation_config.json", lambda document: document.update(eos_token_id=[1]))),
    "the same JSON in other bytes": ("generation_config.json", lambda out: edit_json(out / "generation_config.json", lambda document: None)),
    "no generation config": ("generation_config.json", lambda out: (out / "generation_config.json").unlink()),
    "no chat template": ("chat_template.jinja", lambda out: (out / "chat_template.jinja").unlink()),
    "no tokenizer": ("tokenizer.json", lambda out: (out / "tokenizer.json").unlink()),
    "an additional preprocessor": ("preprocessor_config.json", lambda out: (out / "preprocessor_config.json").write_text("{}")),
    "an empty file": ("added_tokens.json", lambda out: (out / "added_tokens.json").write_text("")),
    "code": ("modeling_gemma4.py", lambda out: (out / "modeling_gemma4.py").write_text("")),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("change", FILE_CHANGES)
def test_another_file_is_named_on_either_side(made, sources, tmp_path, change, form):
    name, edit = FILE_CHANGES[change]
    checkpoint, source = made(form=form), sources("gemma4-e4b")
    other = copied(source, tmp_path / "source")
    edit(other)
    for pair in ((checkpoint, other), (resealed(checkpoint, tmp_path / "checkpoint", edit), source)):
        error, found, _ = verify(*pair)
        assert isinstance(error, IntegrityError)
        assert name in found, found


def test_the_older_preprocessor_config_is_compared_too(made, sources, tmp_path):
    def edit(out: Path) -> None:
        edit_json(out / "preprocessor_config.json", lambda document: document.update(image_mean=[0.4] * 3))

    forged = resealed(made("gemma3-multimodal"), tmp_path / "forged", edit)
    assert set(verify(forged, sources("gemma3-multimodal"))[1]) == {"preprocessor_config.json"}


@pytest.mark.parametrize("name", ["adapter_config.json", "notes.txt", "runs/events.out", "pytorch_model.bin", "drafter/config.json",
                                  "quantize_config.json", "tokenizer.model"])  # fmt: skip
def test_a_file_that_neither_gemq_writes_nor_the_source_has_is_named(made, sources, tmp_path, name):
    def add(out: Path) -> None:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("{}")

    assert set(verify(resealed(made(), tmp_path / "forged", add), sources("gemma4-e4b"))[1]) == {name}


def test_autogptqs_own_config_must_say_what_config_json_says(made, sources, tmp_path):
    forged = resealed(made(form="gptq"), tmp_path / "forged",
                      lambda out: edit_json(out / "quantize_config.json", lambda document: document.update(group_size=64)))  # fmt: skip
    assert set(verify(forged, sources("gemma4-e4b"))[1]) == {"quantize_config.json"}


# --- another revision, a sibling


def test_a_source_of_another_revision_is_named_by_the_tensor_and_by_the_file(made, sources, tmp_path):
    source = copied(sources("gemma4-e4b"), tmp_path / "source")
    tensors, name = load_file(source / "model.safetensors"), "model.language_model.layers.3.post_attention_layernorm.weight"
    tensors[name][5] += 0.5
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    error, found, _ = verify(made(), source)
    assert isinstance(error, IntegrityError)
    assert set(found) == {name, "model.safetensors"}
    assert "gemq.json" in found["model.safetensors"][0]


def test_a_revision_that_moved_a_quantized_weight_less_than_a_rounding_step_is_named_by_the_file(made, sources, tmp_path):
    source = copied(sources("gemma4-e4b"), tmp_path / "source")
    tensors, name = load_file(source / "model.safetensors"), "model.language_model.layers.3.mlp.down_proj.weight"
    tensors[name][5, 5] *= 1.01
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    assert set(verify(made(), source)[1]) == {"model.safetensors"}


def test_a_sibling_of_the_source_is_refused(made, tmp_path):
    sibling = gemma4.build("e4b", tmp_path / "sibling", seed=1)
    error, found, _ = verify(made(), sibling)
    assert isinstance(error, IntegrityError)
    assert "lm_head" in found
    assert "model.safetensors" in found


def test_a_checkpoint_whose_manifest_records_another_source_is_named(made, sources, tmp_path):
    def forge(key: str, value: Any) -> Change:
        return lambda document: document["source"]["files"].update({key: value})

    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        forged = resealed(made(), tmp_path / name, lambda out: edit_json(out / "gemq.json", forge(name, "0" * 64)))  # noqa: B023
        assert set(verify(forged, sources("gemma4-e4b"))[1]) == {name}


@pytest.mark.parametrize("change", [
    lambda document: document.pop("source"), lambda document: document.update(source=None), lambda document: document["source"].pop("files"),
    lambda document: document["source"].update(files=["config.json"]), lambda document: document["source"].update(files={}),
    lambda document: document["source"]["files"].update({"config.json": 1})])  # fmt: skip
def test_a_manifest_without_digests_of_the_source_is_no_proof(made, sources, tmp_path, change):
    forged = resealed(made(), tmp_path / "forged", lambda out: edit_json(out / "gemq.json", change))
    error, found, _ = verify(forged, sources("gemma4-e4b"))
    assert isinstance(error, IntegrityError)
    assert set(found) <= {"gemq.json", "config.json", "model.safetensors"}


def test_no_manifest_is_no_proof(made, sources, tmp_path):
    forged = resealed(made(), tmp_path / "forged", lambda out: (out / "gemq.json").unlink())
    assert "gemq.json" in verify(forged, sources("gemma4-e4b"))[1]


# --- sources as users have them


def test_shards_that_the_sources_index_does_not_name_are_not_the_source(made, sources, tmp_path):
    """An adapter, a consolidated copy: gemq does not read them, so neither does the comparison."""
    for kind in ("gemma4-e4b", "gemma3-multimodal"):
        source = copied(sources(kind), tmp_path / kind)
        tensors = {"base_model.model.layers.0.lora_A.weight": next(iter(load_file(next(source.glob("*.safetensors"))).values()))}
        save_file(tensors, source / "adapter_model.safetensors")
        (source / "original").mkdir()
        save_file(tensors, source / "original" / "consolidated.safetensors")
        error, found, _ = verify(made(kind), source)
        assert (error, found) == (None, {})


def test_a_wrong_total_size_in_the_sources_index_is_no_damage(sources, tmp_path):
    source = copied(sources("gemma3-multimodal"), tmp_path / "source")
    edit_json(source / "model.safetensors.index.json", lambda document: document["metadata"].update(total_size=7))
    directory = run_job(source, tmp_path / "out", load_recipe("w4a16-g32").model_copy(update={"method": "rtn"})).directory
    assert verify(directory, source)[:2] == (None, {})


def test_a_source_of_links_as_the_hubs_cache_has_it_is_accepted(made, sources, tmp_path):
    blobs, snapshot = copied(sources("gemma4-e4b"), tmp_path / "blobs"), tmp_path / "größe" / "snapshot"
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    assert verify(made(), snapshot)[:2] == (None, {})


def test_a_damaged_source_is_an_integrity_error(made, sources, tmp_path):
    source = copied(sources("gemma4-e4b"), tmp_path / "source")
    (source / "config.json").write_text('{"a": 1, "a": 2}')
    assert isinstance(verify(made(), source)[0], IntegrityError)
    (source / "config.json").unlink()
    assert isinstance(verify(made(), source)[0], IntegrityError)
