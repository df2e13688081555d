"""Load checkpoints with vLLM's own classes, on a CPU and without a server, and report what it made of them. Runs in vLLM's environment.

`python vllm_loader.py CASES OUT`: CASES is a JSON object of names and checkpoint folders; OUT becomes a JSON object of the names and, each
- `error`: what vLLM raised, or ""
- `modules`: every module that asks for a scheme, by vLLM's name: `class`, and `scheme` as vLLM's quantization config gives it, null if unquantized
- `unloaded`: parameters that kept a value from before the load, in part or as a whole
- `dropped`: tensors that vLLM left out by name

vLLM builds the model, parses the config, maps the names and loads the tensors. Only the choice of kernels for mixtures, which needs a GPU, is
replaced.
"""
# mypy: ignore-errors

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe import RoutedExperts, UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator
from vllm.model_executor.models.utils import WeightsMapper

FILL = 90  # what integers have before the load: no row of a matrix consists of it
UNQUANTIZED = (UnquantizedLinearMethod, UnquantizedFusedMoEMethod, UnquantizedEmbeddingMethod)
dropped: set[str] = set()


def note_dropped_names() -> None:
    mapped = WeightsMapper._map_name_with_shard

    def noting(self, key):
        result = mapped(self, key)
        if result is None:
            dropped.add(key)
        return result

    WeightsMapper._map_name_with_shard = noting


def choose_any_mixture_kernel() -> None:
    """Kernels for mixtures need a GPU; which one runs changes neither the scheme nor the tensors that are loaded."""
    from vllm.model_executor.layers.fused_moe.oracle.int_wna16 import WNA16MoEBackend
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w8a8_fp8 as fp8,
    )
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_w8a8_int8 as int8
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import compressed_tensors_moe_wna16 as wna16

    wna16.select_wna16_moe_backend = lambda **_: (WNA16MoEBackend.MARLIN, None)
    for module in (fp8, int8):
        for name in [name for name in vars(module) if name.startswith("select_")]:
            setattr(module, name, lambda *_, **__: (None, None))


def args_label(weights, form: str) -> str:
    size = f"g{weights.group_size}" if weights.strategy == "group" else str(getattr(weights.strategy, "value", weights.strategy))
    return f"{getattr(weights.type, 'value', weights.type)}{weights.num_bits} {size} {form}"


def scheme_of(config, module, name: str) -> str | None:
    method = module.quant_method
    if isinstance(method, UNQUANTIZED):
        return None
    if config.get_name() == "auto_gptq":
        own = method.quant_config
        return f"int{own.weight_bits} {'channel' if own.group_size == -1 else f'g{own.group_size}'} gptq"
    asked = f"{name.removesuffix('.routed_experts')}.0.gate_proj" if isinstance(module, RoutedExperts) else name
    found = config.get_scheme_dict(module, asked)
    return args_label(found["weights"], found["format"])


def report(folder: Path) -> dict:
    dropped.clear()
    arguments = EngineArgs(model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=256)
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{Path(sys.argv[2]).absolute()}.group", 0, "gloo")
            initialize_model_parallel(1, 1)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = initialize_model(config)
    finally:
        torch.set_default_dtype(default)
    scales = {f"{name}.{key}" for name, module in model.named_modules() if isinstance(module, Attention) for key, _ in module.named_parameters()}
    parameters = {name: parameter for name, parameter in model.named_parameters() if name not in scales}
    for parameter in parameters.values():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else FILL)
    model.load_weights(safetensors_weights_iterator(sorted(map(str, folder.glob("*.safetensors"))), False))
    unloaded = [
        name for name, parameter in parameters.items()
        if (parameter.isnan().any() if parameter.is_floating_point() else (parameter == FILL).all(-1).any())
    ]  # fmt: skip
    modules = {
        name: {"class": type(module).__name__, "scheme": scheme_of(config.quant_config, module, name)}
        for name, module in model.named_modules()
        if isinstance(module, (LinearBase, ParallelLMHead, VocabParallelEmbedding, RoutedExperts))
    }
    return {"modules": modules, "unloaded": unloaded}


def main() -> None:
    note_dropped_names()
    choose_any_mixture_kernel()
    found = {}
    for name, folder in json.loads(Path(sys.argv[1]).read_text()).items():
        try:
            found[name] = {"error": "", "modules": {}, "unloaded": [], **report(Path(folder)), "dropped": sorted(dropped)}
        except Exception as error:  # whatever vLLM raises is the finding
            found[name] = {"error": f"{type(error).__name__}: {error}", "modules": {}, "unloaded": [], "dropped": sorted(dropped)}
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
