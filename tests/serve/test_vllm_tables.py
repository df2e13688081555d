"""Quantized embedding tables in the real vLLM: its own classes find the scheme by name, load the tensors and look the rows up.

Not a server: the two layers alone, which takes seconds where a start takes minutes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gemq.quantize.packing import from_tensors
from gemq.recipes.model import Scheme
from gemq.serve import vllm_cpu_mends
from gemq.shards import ShardReader

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
RECIPE = """
version: 1
name: tables
summary: int8 embedding and int4 PLE table
method: rtn
rules:
  - match: [embedding]
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [ple_embedding]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
  - match: [lm_head, decoder, ple]
    scheme: {weights: {num_bits: 8, strategy: channel}}
"""
LOOK_UP = """
import json, sys
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

folder, out = sys.argv[1:3]
config = json.load(open(folder + "/config.json"))
quantization = CompressedTensorsConfig.from_config(config["quantization_config"])
stored, text, found = load_file(folder + "/model.safetensors"), config["text_config"], {}
widths = {"embed_tokens": text["hidden_size"], "embed_tokens_per_layer": text["hidden_size_per_layer_input"] * text["num_hidden_layers"]}
ids = torch.tensor([[0, 1, 2, 77], [300, 300, 510, 511]])
with set_current_vllm_config(VllmConfig()):
    init_distributed_environment(1, 0, f"file://{out}.group", 0, "gloo")
    initialize_model_parallel(1, 1)
    for name, width in widths.items():
        layer = VocabParallelEmbedding(text["vocab_size"], width, params_dtype=torch.bfloat16, quant_config=quantization,
                                       prefix="language_model.model." + name)
        for parameter_name, parameter in layer.named_parameters():
            parameter.weight_loader(parameter, stored["model.language_model." + name + "." + parameter_name])
        found[name] = layer(ids).contiguous()
        print(type(layer.quant_method).__name__)
save_file(found, out)
"""


@pytest.fixture(scope="module")
def checkpoint(small_gemma4: Path, gemq: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "recipe.yaml").write_text(RECIPE)
    gemq("quantize", small_gemma4, "--recipe", folder / "recipe.yaml", "--eval-data", "none", "--output", folder / "out")
    return folder / "out"


def test_vllms_own_layers_look_up_what_the_tables_stand_for(checkpoint: Path, vllm_python: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    # the mends as they are here, whenever the environment was made
    shutil.copy(vllm_cpu_mends.__file__, tmp_path / "_gemq_mends.py")
    done = subprocess.run(
        [str(vllm_python), "-c", LOOK_UP, str(checkpoint), str(tmp_path / "rows.safetensors")],
        env={**os.environ, "PYTHONPATH": str(tmp_path), "VLLM_LOGGING_LEVEL": "ERROR"}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["CompressedTensorsEmbeddingWNA16Int"] * 2
    ids = torch.tensor([[0, 1, 2, 77], [300, 300, 510, 511]])
    written = ShardReader(checkpoint)
    groups = json.loads((checkpoint / "config.json").read_text())["quantization_config"]["config_groups"].values()
    for name, rows in load_file(tmp_path / "rows.safetensors").items():
        (weights,) = (group["weights"] for group in groups if f"re:.*{name}$" in group["targets"])
        scheme = Scheme.model_validate({"weights": {key: weights[key] for key in ("num_bits", "strategy", "group_size")}})
        tensors = {part: written.read(f"model.language_model.{name}.{part}") for part in ("weight_packed", "weight_scale", "weight_shape")}
        assert torch.equal(rows, from_tensors(tensors, scheme).bfloat16()[ids])
