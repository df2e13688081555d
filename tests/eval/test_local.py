"""A checkpoint directory is scored as a plain transformers forward on its dequantized weights says."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small import fp8_parts, int4_weight, plain_model, plain_scores, random_records

from gemq.errors import IntegrityError, UsageError
from gemq.eval import local
from gemq.eval.local import LocalCheckpoint
from gemq.eval.ppl import evaluate_ppl
from gemq.eval.records import read_records


def scores(directory: Path, records_file: Path) -> list[list[float]]:
    checkpoint = LocalCheckpoint.open(str(directory))
    records = read_records(records_file, tokenizer=None, vocab_size=checkpoint.vocab_size)
    with checkpoint.loaded("cpu", "float32") as model:
        return [model.score(record) for record in records]


def plain(model: torch.nn.Module) -> list[list[float]]:
    return [plain_scores(model, record["context_token_ids"], record["target_token_ids"]) for record in random_records(12)]


def assert_agree(found: list[list[float]], expected: list[list[float]], tolerance: float = 2e-6) -> None:
    assert [len(row) for row in found] == [len(row) for row in expected]
    assert max(abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)) < tolerance


def test_unquantized(source: Path, records_file: Path) -> None:
    assert_agree(scores(source, records_file), plain(plain_model(source)))


def test_multimodal_takes_text(multimodal: Path, records_file: Path) -> None:
    assert LocalCheckpoint.open(str(multimodal)).architecture == "Gemma3ForConditionalGeneration"
    assert_agree(scores(multimodal, records_file), plain(plain_model(multimodal)))


def test_positions_in_pieces_give_the_same(source: Path, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = scores(source, records_file)
    monkeypatch.setattr(local, "_CHUNK_ELEMENTS", 7 * 320)
    assert_agree(scores(source, records_file), whole)


def test_log_probabilities_keep_the_tail_of_a_large_vocabulary() -> None:
    logits = 2.5 * torch.randn(16, 262144, generator=torch.Generator().manual_seed(0))
    logits[:, 0] = 24
    found = local.Head(torch.nn.Identity(), None).log_probabilities(logits.clone())
    assert abs((found.double() - logits.double().log_softmax(-1)).mean().item()) < 1e-6


def test_compressed_tensors_int4(source: Path, int4: Path, records_file: Path) -> None:
    found = scores(int4, records_file)
    assert_agree(found, plain(plain_model(source, int4_weight)))
    assert abs(found[0][0] - scores(source, records_file)[0][0]) > 1e-4  # it is the quantized model


def test_gptq_format(source: Path, gptq: Path, records_file: Path) -> None:
    assert_agree(scores(gptq, records_file), plain(plain_model(source, int4_weight)))


def test_gptq_v2_stores_zero_points_as_they_are(gptq: Path, records_file: Path, tmp_path: Path) -> None:
    shutil.copytree(gptq, tmp_path / "v2")
    tensors = load_file(gptq / "model.safetensors")
    for name in tensors:
        if name.endswith("qzeros"):
            tensors[name] = torch.full_like(tensors[name], -0x77777778)  # 0x88888888: eight in each nibble
    save_file(tensors, tmp_path / "v2" / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((gptq / "config.json").read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    (tmp_path / "v2" / "config.json").write_text(json.dumps(config))
    assert scores(tmp_path / "v2", records_file) == scores(gptq, records_file)


def test_fp8_quantizes_the_activations_as_served(source: Path, fp8: Path, records_file: Path) -> None:
    def dequantized(weight: torch.Tensor) -> torch.Tensor:
        values, scale = fp8_parts(weight)
        return values.float() * scale.float()

    def per_token(module: torch.nn.Module, arguments: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        scale = arguments[0].abs().amax(-1, keepdim=True) / 448
        return ((arguments[0] / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale,)

    model = plain_model(source, dequantized)
    weights_only = plain(model)
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(per_token)
    expected, found = plain(model), scores(fp8, records_file)
    # a value that lies between two float8 levels may fall to either side, and moves a log-probability by its step
    gap = [abs(a - b) for x, y in zip(found, expected, strict=True) for a, b in zip(x, y, strict=True)]
    apart = [abs(a - b) for x, y in zip(found, weights_only, strict=True) for a, b in zip(x, y, strict=True)]
    assert sum(gap) / len(gap) < 0.2 * sum(apart) / len(apart)


def test_result_agrees_with_an_independent_sum(source: Path, records_file: Path) -> None:
    rows = plain(plain_model(source))
    expected = math.exp(-math.fsum(map(math.fsum, rows)) / sum(map(len, rows)))
    result = evaluate_ppl(str(source), records_file, device="cpu", dtype="float32")
    assert result.ppl.value == pytest.approx(expected, rel=1e-6)
    assert (result.tokens, result.records, result.dtype) == (sum(map(len, rows)), 12, "float32")
    assert json.loads(json.dumps(result.to_json()))["per_record"][0]["id"] == "record-0"


def test_text_windows_start_with_bos(source: Path, text_file: Path) -> None:
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(source)(text_file.read_text(), add_special_tokens=False)["input_ids"]
    model, nll = plain_model(source), []
    for start in range(0, len(ids), 63):
        nll += [-value for value in plain_scores(model, [2], ids[start : start + 63])]
    result = evaluate_ppl(str(source), text_file, length=64, device="cpu", dtype="float32")
    assert result.tokens == len(ids) == len(nll)
    assert result.records == math.ceil(len(ids) / 63) > 5
    assert result.ppl.value == pytest.approx(math.exp(math.fsum(nll) / len(nll)), rel=1e-6)


def broken_copy(source: Path, tmp_path: Path, **changes: object) -> Path:
    directory = tmp_path / "copy"
    shutil.copytree(source, directory)
    config = json.loads((source / "config.json").read_text())
    config.update(changes)
    (directory / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return directory


def test_not_a_checkpoint(tmp_path: Path, records_file: Path) -> None:
    with pytest.raises(UsageError, match="neither a directory nor"):
        evaluate_ppl(str(tmp_path / "nowhere"), records_file)
    with pytest.raises(UsageError, match=r"no config\.json"):
        evaluate_ppl(str(tmp_path), records_file)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(IntegrityError, match=r"config.json"):
        evaluate_ppl(str(tmp_path), records_file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["BertModel"]}, "no next-token probabilities"),
        ({"architectures": ["NobodysForCausalLM"]}, "does not know"),
        ({"architectures": None}, "architectures None"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
    ],
)
def test_wrong_kind_of_checkpoint(source: Path, records_file: Path, tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        evaluate_ppl(str(broken_copy(source, tmp_path, **changes)), records_file, device="cpu")


def test_a_config_without_vocab_size_means_its_classs_default_and_these_weights_are_not_of_that_size(source, records_file, tmp_path) -> None:
    with pytest.raises(IntegrityError):
        evaluate_ppl(str(broken_copy(source, tmp_path, vocab_size=None)), records_file, device="cpu")


@pytest.mark.parametrize("kind", ["source", "int4", "gptq"])
def test_a_missing_tensor_is_named(kind: str, records_file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    directory = broken_copy(request.getfixturevalue(kind), tmp_path)
    tensors = load_file(directory / "model.safetensors")
    gone = next(name for name in tensors if "layers.1.mlp.up_proj" in name and name.endswith(("weight", "weight_packed", "scales")))
    del tensors[gone]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"layers\.1\.mlp\.up_proj"):
        evaluate_ppl(str(directory), records_file, device="cpu", dtype="float32")


def test_a_truncated_shard_is_named(source: Path, records_file: Path, tmp_path: Path) -> None:
    directory = broken_copy(source, tmp_path)
    raw = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(raw[:-100])
    with pytest.raises(IntegrityError, match=r"model\.safetensors"):
        evaluate_ppl(str(directory), records_file, device="cpu")


def test_shapes_that_do_not_fit(source: Path, records_file: Path, tmp_path: Path) -> None:
    with pytest.raises(IntegrityError, match="Gemma3ForCausalLM"):
        evaluate_ppl(str(broken_copy(source, tmp_path, intermediate_size=96)), records_file, device="cpu")


def test_a_nan_weight_names_the_record(source: Path, records_file: Path, tmp_path: Path) -> None:
    directory = broken_copy(source, tmp_path)
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"records\.jsonl line 1.* nan"):
        evaluate_ppl(str(directory), records_file, device="cpu", dtype="float32")


def test_head_of_an_unknown_kind_is_refused(source: Path, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local.Head, "logits", lambda self, hidden: self.projection(hidden) * 1.5)
    with pytest.raises(UsageError, match="output head"):
        evaluate_ppl(str(source), records_file, device="cpu", dtype="float32")


def test_devices_and_dtypes(source: Path, records_file: Path) -> None:
    with pytest.raises(UsageError, match="--device is 'warp'"):
        evaluate_ppl(str(source), records_file, device="warp")
    with pytest.raises(UsageError, match="--device cuda:99"):
        evaluate_ppl(str(source), records_file, device="cuda:99")
    with pytest.raises(UsageError, match="dtype 'int3'"):
        evaluate_ppl(str(source), records_file, device="cpu", dtype="int3")
    exact = evaluate_ppl(str(source), records_file, device="cpu", dtype="float32").ppl.value
    rounded = evaluate_ppl(str(source), records_file, device="cpu", dtype="bfloat16")
    assert rounded.dtype == "bfloat16"
    assert rounded.ppl.value == pytest.approx(exact, rel=0.02)


def test_records_longer_than_the_window(source: Path, text_file: Path) -> None:
    with pytest.raises(UsageError, match=r"takes 256"):
        evaluate_ppl(str(source), text_file, length=300, device="cpu")
