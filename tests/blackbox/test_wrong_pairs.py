"""`gemq verify` against wrong pairs: every change to a checkpoint, and every source that it was not made from, ends with exit code 4."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.blackbox import sources
from tests.blackbox.command import DONE, INTEGRITY, USAGE, Gemq
from tests.blackbox.files import SEAL, edit_json, names, read_json, reseal, tensors_of, tree
from tests.models.gemma3 import build_gemma3_multimodal, build_gemma3_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A source with softcaps, so that a reader of one which ignores them is another model."""
    return build_gemma3_text(
        tmp_path_factory.mktemp("sources") / "softcapped", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
        final_logit_softcapping=30.0,
    )  # fmt: skip


def quantized(source: Path, options: list[str], folder: Path, *more: str) -> Path:
    """A checkpoint of `source`."""
    (folder / "home").mkdir(exist_ok=True)
    Gemq(folder / "home", folder)("quantize", source, *options, *more, "--output", folder / "checkpoint").exited(DONE)
    return folder / "checkpoint"


@pytest.fixture(scope="module")
def sealed(source: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the source."""
    return quantized(source, options, tmp_path_factory.mktemp("sealed"))


@pytest.fixture
def checkpoint(sealed: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint that a test may damage."""
    shutil.copytree(sealed, tmp_path / "checkpoint")
    for path in (tmp_path / "checkpoint").iterdir():
        path.chmod(0o644)
    return tmp_path / "checkpoint"


def refuse(gemq: Gemq, *arguments: str | Path, code: int = INTEGRITY) -> dict[str, Any]:
    """What `verify --json` says of a pair that is wrong: differences by name, and never ok."""
    told: dict[str, Any] = gemq("verify", *arguments, "--json").exited(code).json
    assert told["ok"] is False
    assert told["differences"]
    return told


def replace_text(name: str, old: str, new: str) -> Callable[[Path], None]:
    """An edit of a text file that must have `old` in it."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text(encoding="utf-8")
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1), encoding="utf-8")

    return edit


def config(**changes: Any) -> Callable[[Path], None]:
    """An edit of config.json."""
    return lambda folder: edit_json(folder / "config.json", lambda document: document.update(changes))


def without(key: str) -> Callable[[Path], None]:
    """An edit of config.json: a key less."""
    return lambda folder: edit_json(folder / "config.json", lambda document: document.pop(key))


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    """An edit of a tensor."""

    def edit(folder: Path) -> None:
        tensors = tensors_of(folder)
        tensors[name] = change(tensors[name]).contiguous()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return edit


def swap_vocabulary(folder: Path) -> None:
    """Two tokens of the tokenizer change their ids."""

    def swap(document: dict[str, Any]) -> None:
        vocabulary = document["model"]["vocab"]
        one, other = list(vocabulary)[-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]

    edit_json(folder / "tokenizer.json", swap)


# what makes another model of the same tensors, or other tensors of the same model; each is tried on one side, some on both
CONFIG_EDITS: dict[str, Callable[[Path], None]] = {
    "sliding-window": config(sliding_window=8),
    "final-softcap": config(final_logit_softcapping=None),
    "attention-softcap": config(attn_logit_softcapping=50.0),
    "rope-theta": config(rope_theta=10_000.0),
    "rope-local": config(rope_local_base_freq=20_000.0),
    "rope-scaling": config(rope_scaling={"rope_type": "linear", "factor": 8.0}),
    "query-scale": config(query_pre_attn_scalar=128),
    "norm-epsilon": config(rms_norm_eps=1e-5),
    "layer-types": config(layer_types=["full_attention", "sliding_attention"]),
    "activation": config(hidden_activation="silu"),
    "eos": config(eos_token_id=106),
    "window-left-out": without("sliding_window"),
    "tokenizer-ids": swap_vocabulary,
    "tokenizer-settings": replace_text("tokenizer_config.json", '"bos_token": "<bos>"', '"bos_token": "<eos>"'),
    "chat-template": replace_text("chat_template.jinja", "start_of_turn", "start_of_image"),
    "chat-template-missing": lambda folder: (folder / "chat_template.jinja").unlink(),
    "generation-config": replace_text("generation_config.json", "false", "true"),
}
TENSOR_EDITS: dict[str, Callable[[Path], None]] = {
    "norm": tensor("model.layers.1.input_layernorm.weight", lambda value: value * 1.5),
    "norm-one-value": tensor("model.norm.weight", lambda value: torch.cat([value[:-1], value[-1:] + 0.25])),
    "q-norm": tensor("model.layers.0.self_attn.q_norm.weight", lambda value: value + 0.5),
    "embedding-rows": tensor("model.embed_tokens.weight", lambda value: value.flip(0)),
    "norm-type": tensor("model.norm.weight", lambda value: value.float()),
}


BOTH_SIDES = ["sliding-window", "final-softcap", "tokenizer-ids", "chat-template", "norm"]
CHECKPOINT_SIDE = [kind for kind in [*CONFIG_EDITS, *TENSOR_EDITS] if kind not in BOTH_SIDES][::2]
SOURCE_SIDE = [kind for kind in [*CONFIG_EDITS, *TENSOR_EDITS] if kind not in BOTH_SIDES][1::2]


@pytest.mark.parametrize("kind", BOTH_SIDES + SOURCE_SIDE)
def test_a_source_that_differs_is_not_the_checkpoints_source(gemq, source, sealed, tmp_path, kind):
    shutil.copytree(source, tmp_path / "other")
    (CONFIG_EDITS | TENSOR_EDITS)[kind](tmp_path / "other")
    refuse(gemq, sealed, "--source", tmp_path / "other")


@pytest.mark.parametrize("kind", BOTH_SIDES + CHECKPOINT_SIDE)
def test_a_checkpoint_that_differs_is_not_made_from_the_source_however_well_it_is_sealed(gemq, source, checkpoint, kind):
    (CONFIG_EDITS | TENSOR_EDITS)[kind](checkpoint)
    reseal(checkpoint)
    refuse(gemq, checkpoint, "--source", source)


def test_a_linear_that_is_another_one_is_found_on_either_side(gemq, source, sealed, tmp_path):
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"):
        other = tmp_path / name
        shutil.copytree(source, other)
        tensor(name, lambda value: value.roll(1, 0))(other)
        assert any(name.removesuffix(".weight") in difference["path"] for difference in refuse(gemq, sealed, "--source", other)["differences"])
    scaled = tmp_path / "scaled"
    shutil.copytree(source, scaled)
    tensor("model.layers.1.mlp.down_proj.weight", lambda value: value * 1.3)(scaled)
    refuse(gemq, sealed, "--source", scaled)


def test_sources_with_a_tensor_more_or_less_and_another_seeds_source_are_refused(gemq, source, sealed, tmp_path):
    more = sources.changed(source, tmp_path / "more", lambda tensors: tensors.update({"model.extra.weight": torch.ones(4)}))
    less = sources.changed(source, tmp_path / "less", lambda tensors: tensors.pop("model.layers.0.self_attn.k_norm.weight"))
    other = build_gemma3_text(tmp_path / "seed", seed=3, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"],
                              final_logit_softcapping=30.0)  # fmt: skip
    for wrong in (more, less, other):
        gemq("verify", sealed, "--source", wrong).exited(INTEGRITY)


def test_copied_moved_or_linked_a_checkpoint_and_its_source_are_the_same_ones(gemq, source, sealed, checkpoint, tmp_path):
    shutil.move(checkpoint, tmp_path / "kopie – 副本")
    (tmp_path / "link").symlink_to("kopie – 副本")
    digests = {gemq("verify", path, "--json").exited(DONE).json["seal_digest"] for path in (sealed, tmp_path / "link")}
    assert len(digests) == 1
    shutil.copytree(source, tmp_path / "copy")
    gemq("verify", sealed, "--source", tmp_path / "copy").exited(DONE)
    gemq("verify", sealed, "--source", sources.hub_cache(source, tmp_path / "cache")).exited(DONE)


def test_a_checkpoint_may_not_declare_its_own_additional_tensors(gemq, source, checkpoint):
    tensors = tensors_of(checkpoint) | {"model.layers.0.self_attn.q_proj.bias": torch.ones(128, dtype=torch.bfloat16)}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    edit_json(checkpoint / "gemq.json", lambda manifest: manifest.update({"added_tensors": ["model.layers.0.self_attn.q_proj.bias"]}))
    reseal(checkpoint)
    refuse(gemq, checkpoint, "--source", source)


def test_a_checkpoint_may_not_declare_that_tensors_were_dropped_or_smoothed(gemq, source, checkpoint, sealed, tmp_path):
    tensors = tensors_of(checkpoint)
    del tensors["model.layers.0.self_attn.q_norm.weight"]
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    edit_json(checkpoint / "gemq.json", lambda manifest: manifest.update({"dropped_tensors": ["model.layers.0.self_attn.q_norm.weight"]}))
    reseal(checkpoint)
    refuse(gemq, checkpoint, "--source", source)
    smoothed = tmp_path / "smoothed"
    shutil.copytree(sealed, smoothed)
    name = "model.layers.1.input_layernorm.weight"
    TENSOR_EDITS["norm"](smoothed)
    edit_json(smoothed / "gemq.json", lambda manifest: manifest.update({"smoothed_tensors": [name]}))
    reseal(smoothed)
    refuse(gemq, smoothed, "--source", source)


@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_bit_anywhere_is_found(gemq, checkpoint, seed):
    draw = random.Random(seed)
    path = checkpoint / draw.choice(sorted(names(checkpoint))) if seed else checkpoint / "model.safetensors"
    data = bytearray(path.read_bytes())
    position = draw.randrange(len(data))
    print(f"seed {seed}: {path.name}, byte {position}")
    data[position] ^= 1 << draw.randrange(8)
    path.write_bytes(data)
    gemq("verify", checkpoint).exited(INTEGRITY)


def test_files_missing_added_replaced_and_swapped_are_found(gemq, checkpoint, sealed, source, options, tmp_path):
    whole = tree(checkpoint)

    def tried(change: Callable[[], object]) -> None:
        change()
        gemq("verify", checkpoint).exited(INTEGRITY)
        shutil.rmtree(checkpoint)
        shutil.copytree(sealed, checkpoint)
        for path in checkpoint.iterdir():
            path.chmod(0o644)
        assert tree(checkpoint) == whole

    for name in sorted(names(checkpoint)):
        tried((checkpoint / name).unlink)
    tried(lambda: (checkpoint / "extra.txt").write_text(""))
    tried(lambda: (checkpoint / "model-00002-of-00002.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes()))
    tried(lambda: (checkpoint / "folder").mkdir() or (checkpoint / "folder" / "x").write_text("x"))
    tried(lambda: ((checkpoint / "config.json").rename(tmp_path / "config.json"), (checkpoint / "config.json").symlink_to(tmp_path / "config.json")))
    tried(lambda: ((checkpoint / "recipe.yaml").unlink(), (checkpoint / "recipe.yaml").mkdir()))
    tried(lambda: (checkpoint / SEAL).write_text("{}"))
    tried(lambda: (checkpoint / SEAL).write_bytes((checkpoint / SEAL).read_bytes() + b"\n"))
    tried(lambda: edit_json(checkpoint / SEAL, lambda seal: seal["files"].append({**seal["files"][0], "path": "../outside.txt"})))
    (tmp_path / "other").mkdir()
    other = quantized(source, options, tmp_path / "other", "--lm-head", "int8")
    tried(lambda: shutil.copyfile(other / SEAL, checkpoint / SEAL))
    tried(lambda: shutil.copyfile(other / "config.json", checkpoint / "config.json"))


def test_fast_finds_what_needs_no_weights(gemq, checkpoint):
    gemq("verify", checkpoint, "--fast").exited(DONE)
    path = checkpoint / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    gemq("verify", checkpoint, "--fast").exited(INTEGRITY)


def test_what_is_no_checkpoint_is_refused(gemq, source, sealed, tmp_path):
    (tmp_path / "empty").mkdir()
    for wrong in (tmp_path / "empty", tmp_path / "nowhere", source, source / "config.json"):
        gemq("verify", wrong).exited(USAGE, INTEGRITY)
    for wrong in (tmp_path / "empty", tmp_path / "nowhere", sealed):
        gemq("verify", sealed, "--source", wrong).exited(USAGE, INTEGRITY)


def test_another_tower_is_another_source(gemq, options, tmp_path):
    model = build_gemma3_multimodal(tmp_path / "model", legacy_names=True, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    made = quantized(model, options, tmp_path)
    gemq("verify", made, "--source", model).exited(DONE)
    shutil.copytree(model, tmp_path / "tower")
    tensor("vision_tower.vision_model.embeddings.patch_embedding.weight", lambda value: value + 0.125)(tmp_path / "tower")
    shutil.copytree(model, tmp_path / "image")
    replace_text("preprocessor_config.json", "0.5", "0.25")(tmp_path / "image")
    shutil.copytree(model, tmp_path / "soft")
    config(mm_tokens_per_image=16)(tmp_path / "soft")
    shutil.copytree(model, tmp_path / "window")
    edit_json(tmp_path / "window" / "config.json", lambda document: document["text_config"].update(sliding_window=8))
    for name in ("tower", "image", "soft", "window"):
        refuse(gemq, made, "--source", tmp_path / name)


def test_the_arenas_rules_refuse_another_model_too(gemq, source, checkpoint):
    """A checkpoint whose window was narrowed is not the source's, whichever arena's rules are asked for."""
    config(sliding_window=8)(checkpoint)
    reseal(checkpoint)
    for arena in ("efficient-gemma", "lowbarena"):
        gemq("verify", checkpoint, "--source", source, "--arena", arena).exited(INTEGRITY)


def test_verify_names_the_seal_that_quantize_printed(gemq, sealed):
    told = gemq("verify", sealed, "--json").exited(DONE).json
    assert json.dumps(read_json(sealed / SEAL), sort_keys=True, separators=(",", ":"), ensure_ascii=False) == (sealed / SEAL).read_text()
    assert len(told["seal_digest"]) == len(told["content_digest"]) == 64
