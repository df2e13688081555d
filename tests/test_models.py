"""The small models are what they claim: real structure, whole files, the same bytes each time; every kind of input goes through them."""

from __future__ import annotations

import copy
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import gemma3, gemma4, inputs, real_configs, train_gemma4
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
TINY = ROOT / "tests" / "models" / "gemma4-tiny"
BUILDERS: dict[str, Callable[..., Path]] = {
    "gemma3-text": gemma3.build_gemma3_text,
    "gemma3": gemma3.build_gemma3_multimodal,
    "e4b": gemma4.build_gemma4,
    "e2b": gemma4.build_gemma4_e2b_like,
    "31b": gemma4.build_gemma4_31b_like,
    "moe": gemma4.build_gemma4_moe,
    "unified": gemma4.build_gemma4_unified,
}
LAYER = "model.language_model.layers."


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folder = tmp_path_factory.mktemp("models")

    def build(name: str) -> Path:
        return folder / name if (folder / name).exists() else BUILDERS[name](folder / name)

    return build


def load(folder: Path) -> tuple[torch.nn.Module, dict[str, set[str]]]:
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    text_only = json.loads((folder / "config.json").read_text())["model_type"] == "gemma3_text"
    kind = AutoModelForCausalLM if text_only else AutoModelForImageTextToText
    model, info = kind.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    return model.eval(), info


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@torch.no_grad()
def logits(model: torch.nn.Module, given: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**given, use_cache=False).logits[0]


@pytest.mark.parametrize("name", BUILDERS)
def test_every_tensor_of_a_built_model_loads(built: Callable[[str], Path], name: str) -> None:
    folder = built(name)
    model, info = load(folder)
    assert {key: found for key, found in info.items() if found} == {}
    loaded = {gemma4.hub_name(key): tensor for key, tensor in model.state_dict().items() if key != "lm_head.weight"}
    saved = weights(folder)
    config = json.loads((folder / "config.json").read_text())
    redundant = set(gemma4.redundant_kv(config, 0)) if config["model_type"] == "gemma4" else set()
    assert set(saved) == set(loaded) | redundant
    assert all(saved[key].dtype == torch.bfloat16 and torch.equal(saved[key].float(), tensor) for key, tensor in loaded.items())


@pytest.mark.parametrize("name", BUILDERS)
def test_linears_fit_the_kernels(built: Callable[[str], Path], name: str) -> None:
    model, _ = load(built(name))
    decoder = {
        key: module for key, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ("language_model" in key or name == "gemma3-text") and "router" not in key
    }  # fmt: skip
    assert len(decoder) >= 4 * 7
    assert all(module.in_features % 32 == 0 and module.out_features % 32 == 0 for module in decoder.values())


@pytest.mark.parametrize("name", BUILDERS)
def test_same_seed_same_bytes(built: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    first = contents(built(name))
    assert contents(BUILDERS[name](tmp_path / "again")) == first
    other = contents(BUILDERS[name](tmp_path / "other", seed=1))
    assert {file for file in first if other[file] != first[file]} == {"model.safetensors"}


@pytest.mark.slow
def test_the_command_builds_the_same_folder(built: Callable[[str], Path], tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "tests.models.gemma4", "e4b", str(tmp_path / "e4b")], cwd=ROOT, check=True, timeout=300)
    assert contents(tmp_path / "e4b") == contents(built("e4b"))


def test_gemma3_under_the_hubs_old_names_is_the_same_model(built: Callable[[str], Path], tmp_path: Path) -> None:
    old = gemma3.build_gemma3_multimodal(tmp_path / "old", legacy_names=True)
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in weights(old)
    assert not any(name.startswith("model.") for name in weights(old))
    (ours, _), (theirs, info) = load(built("gemma3")), load(old)
    assert {key: found for key, found in info.items() if found} == {}
    assert all(torch.equal(tensor, theirs.state_dict()[key]) for key, tensor in ours.state_dict().items())


@pytest.mark.parametrize("name", ["gemma3", "e4b"])
def test_shards_hold_the_same_tensors(built: Callable[[str], Path], name: str, tmp_path: Path) -> None:
    sharded = BUILDERS[name](tmp_path / name, max_shard_bytes=300_000)
    files = sorted(path.name for path in sharded.glob("*.safetensors"))
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    whole, parts = weights(built(name)), weights(sharded)
    assert set(parts) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert load(sharded)[1]["missing_keys"] == set()


def test_e4b_like_has_what_makes_gemma4_hard(built: Callable[[str], Path]) -> None:
    saved = weights(built("e4b"))
    for layer in range(4, 8):  # the shared layers' redundant tensors are in the file, of the right shape, and not in the model
        width = 2 * (64 if layer == 7 else 32)
        assert all(saved[f"{LAYER}{layer}.self_attn.{leaf}.weight"].shape == (width, 128) for leaf in ("k_proj", "v_proj"))
    model, _ = load(built("e4b"))
    assert not any(f"layers.{layer}.self_attn.k_proj" in key for key in model.state_dict() for layer in range(4, 8))
    assert saved[f"{LAYER}3.self_attn.q_proj.weight"].shape == (256, 128)  # full: 4 heads of 64
    assert saved[f"{LAYER}0.self_attn.q_proj.weight"].shape == (128, 128)  # sliding: 4 heads of 32
    scalars = torch.stack([saved[f"{LAYER}{layer}.layer_scalar"] for layer in range(8)])
    assert scalars.unique().numel() > 4
    assert not (scalars == 1).any()
    bounds = [tensor for key, tensor in saved.items() if key.endswith(("input_min", "input_max", "output_min", "output_max"))]
    assert len(bounds) > 80
    assert all(0 < abs(bound.item()) < 4 for bound in bounds)
    assert "lm_head.weight" not in saved
    assert saved["model.language_model.embed_tokens_per_layer.weight"].shape == (512, 8 * 32)


def test_clip_bounds_and_layer_scalars_take_part(built: Callable[[str], Path]) -> None:
    folder = built("e4b")
    model, _ = load(folder)
    given = inputs.gemma4_inputs(folder, "A picture: <|image|> a sound: <|audio|>", [inputs.random_image()], [inputs.chirp()])
    before = logits(model, given)
    for part in ("vision_tower", "audio_tower", "layer_scalar"):
        changed, _ = load(folder)
        for key, buffer in changed.named_buffers():
            if part in key and key.endswith("_max"):
                buffer.fill_(math.inf)
            elif part in key and key.endswith("layer_scalar"):
                buffer.fill_(1.0)
        assert (logits(changed, given) - before).abs().max() > 1e-3


def test_other_structures(built: Callable[[str], Path]) -> None:
    e2b, dense, moe, unified = (weights(built(name)) for name in ("e2b", "31b", "moe", "unified"))
    widths = [e2b[f"{LAYER}{layer}.mlp.down_proj.weight"].shape[1] for layer in range(8)]
    assert widths == [256] * 4 + [512] * 4
    for saved in (dense, moe, unified):
        assert [f"{LAYER}{layer}.self_attn.v_proj.weight" in saved for layer in range(8)] == [True, True, True, False] * 2
        assert saved[f"{LAYER}3.self_attn.k_proj.weight"].shape == (64, 128)  # one KV head of 64 where sliding layers have two of 32
        assert not any("per_layer" in key or "audio_tower" in key for key in saved)
    assert "model.vision_tower.std_bias" in dense
    assert not any(key.endswith("input_max") for key in dense)
    assert moe[f"{LAYER}0.experts.gate_up_proj"].shape == (4, 2 * 192, 128)
    assert moe[f"{LAYER}0.experts.down_proj"].shape == (4, 128, 192)
    assert moe[f"{LAYER}0.router.proj.weight"].shape == (4, 128)
    assert moe[f"{LAYER}0.mlp.down_proj.weight"].shape == (128, 576)
    assert {key.split(".")[1] for key in unified} == {"language_model", "vision_embedder", "embed_vision", "embed_audio"}


@pytest.mark.parametrize("name", ["e4b", "e2b", "unified", "31b", "moe", "tiny"])
def test_text_images_and_audio_go_through_gemma4(built: Callable[[str], Path], name: str) -> None:
    folder = TINY if name == "tiny" else built(name)
    model, _ = load(folder)
    patch = 4 if name == "unified" else 16
    text = inputs.gemma4_inputs(folder, "The river froze, and the wheel stood still.")
    assert logits(model, text).isfinite().all()
    pictures = [inputs.random_image(patch, seed) for seed in (0, 1)]
    seen = [logits(model, inputs.gemma4_inputs(folder, "Look: <|image|> What is it?", [picture])) for picture in pictures]
    assert all(out.isfinite().all() for out in seen)
    assert (seen[0][-1] - seen[1][-1]).abs().max() > 1e-4
    if name not in ("31b", "moe"):  # which have no audio tower
        sounds = [inputs.chirp(end_hz=hz) for hz in (880, 3520)]
        heard = [logits(model, inputs.gemma4_inputs(folder, "Hear: <|audio|> What is it?", [], [sound])) for sound in sounds]
        assert all(out.isfinite().all() for out in heard)
        assert (heard[0][-1] - heard[1][-1]).abs().max() > 1e-4


def test_text_and_images_go_through_gemma3(built: Callable[[str], Path]) -> None:
    from transformers import AutoProcessor

    model, _ = load(built("gemma3"))
    processor = AutoProcessor.from_pretrained(built("gemma3"))
    prompt = processor.apply_chat_template([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}])
    seen = [logits(model, processor(text=prompt, images=[inputs.random_image(seed=seed)], return_tensors="pt")) for seed in (0, 1)]
    assert all(out.isfinite().all() for out in seen)
    assert (seen[0][-1] - seen[1][-1]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["gemma3-text", "e4b"])
def test_any_text_encodes_behind_bos_and_comes_back(built: Callable[[str], Path], name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(built(name))
    for text in ("", "Nine days, forty-two sacks.", "  two  spaces\n\tand a tab ", "naïve Ωμέγα 漢字 🙂 \u0000\u200b"):
        ids = tokenizer(text).input_ids
        assert ids[0] == 2
        assert 3 not in ids
        assert tokenizer.decode(ids[1:]) == text


def test_loud_channels_change_the_weights_and_not_the_model(built: Callable[[str], Path]) -> None:
    folder = built("e2b")
    (model, _), (loud, _) = load(folder), load(folder)
    train_gemma4.add_loud_channels(loud.model.language_model, seed=1)
    changed = {name for name, tensor in loud.state_dict().items() if not torch.equal(tensor, model.state_dict()[name])}
    assert len(changed) == 4 * 8 + 4 * 6  # two norms, q, k, v, gate, up and down of a layer, less k and v of the shared ones
    given = inputs.gemma4_inputs(folder, "The river froze, and the wheel stood still.")
    torch.testing.assert_close(logits(loud, given), logits(model, given), atol=1e-3, rtol=1e-3)


def test_real_configs_have_the_published_sizes() -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    billions = {}
    for name in real_configs.NAMES:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(**real_configs.real_config(name)))
        billions[name] = sum(parameter.numel() for parameter in model.parameters()) / 1e9
        if name == "e4b":
            linears = [key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "language_model" in key]
            assert len(linears) == 343
        assert set(real_configs.SOURCES) == set(real_configs.NAMES)
    assert billions == pytest.approx({"e2b": 5.1, "e4b": 7.94, "12b": 12.0, "31b": 31.3, "26b-a4b": 25.8}, rel=0.02)


@pytest.mark.slow
def test_the_trained_model_knows_text_and_feels_quantization(shared_data: Path) -> None:
    report = json.loads((TINY / "training.json").read_text())
    assert sum(path.stat().st_size for path in TINY.iterdir()) < 8_000_000
    model, info = load(TINY)
    assert {key: found for key, found in info.items() if found} == {}
    text = (shared_data / "wikitext2-test.txt").read_text(encoding="utf-8")
    rows = train_gemma4.windows(train_gemma4.token_stream(TINY, text[:40_000]))[:24]
    assert math.exp(train_gemma4.nats_per_token(model, rows)) < report["unigram_perplexity"] / 4
    quantized = copy.deepcopy(model)
    assert train_gemma4.round_to_nearest(quantized) == report["decoder_linears"] == 65
    assert train_gemma4.kl_nats_per_token(model, quantized, rows) > 0.01
