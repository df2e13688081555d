"""The plugin's door to vLLM, walked through with a stand-in for the few names of vLLM that it uses; prints what happened as JSON.

In a process of its own, with Triton's interpreter: there is no vLLM with Triton for a machine without a card.
"""

from __future__ import annotations

import json
import logging
import sys
import types
from dataclasses import dataclass
from typing import Any

import torch

CAPABILITY = [90]


class Platform:
    """A CUDA platform whose capability the test sets."""

    @staticmethod
    def is_cuda() -> bool:
        return CAPABILITY[0] > 0

    @staticmethod
    def get_device_capability() -> Any:
        return types.SimpleNamespace(to_int=lambda: CAPABILITY[0])


@dataclass
class Config:
    full_weight_shape: tuple[int, int]
    partition_weight_shape: tuple[int, int]
    weight_type: str = "uint4b8"
    act_type: torch.dtype = torch.bfloat16
    group_size: int = 128
    zero_points: bool = False
    has_g_idx: bool = False


class Kernel:
    """vLLM's MPLinearKernel, as far as it goes."""

    def __init__(self, config: Config, w_q_param_name: str, w_s_param_name: str, w_zp_param_name: str | None = None) -> None:
        self.config, self.w_q_name, self.w_s_name, self.w_zp_name = config, w_q_param_name, w_s_param_name, w_zp_param_name


class Stock(Kernel):
    """A stock kernel that moves the weights and the bias where they lie, as Marlin does."""

    @classmethod
    def can_implement(cls, config: Config) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        q = getattr(layer, self.w_q_name).data
        stored = torch.stack([(q >> (4 * j)) & 15 for j in range(8)], 2).reshape(q.shape[0], -1) - 8
        layer.dense = stored.float() * layer.weight_scale.data.float().repeat_interleave(128, 1)
        q.zero_()
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.data.flip(0)

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        assert x.shape[0] > 8, "small batches are not the stock kernel's"
        y = x.float() @ layer.dense.T
        return (y if bias is None else y + bias.flip(0).float()).to(torch.bfloat16)


def choose(config: Config) -> type:
    for kernel in linear._POSSIBLE_KERNELS["cuda"]:
        if kernel.can_implement(config)[0]:
            return kernel
    raise ValueError("none")


def module(name: str, **names: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    made.__dict__.update(names)
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, made)
    return made


for package in ("vllm", "vllm.model_executor", "vllm.model_executor.kernels"):
    module(package)
module("vllm.logger", init_logger=logging.getLogger)
module("vllm.scalar_type", scalar_types=types.SimpleNamespace(uint4b8="uint4b8", uint8b128="uint8b128"))
module("vllm.platforms", current_platform=Platform, PlatformEnum=types.SimpleNamespace(CUDA="cuda"))
linear = module("vllm.model_executor.kernels.linear", MPLinearKernel=Kernel, MPLinearLayerConfig=Config, choose_mp_linear_kernel=choose,
                _POSSIBLE_KERNELS={"cuda": [Stock]})  # fmt: skip
torch.cuda.get_device_name = lambda *_: "a card of no table"  # type: ignore[assignment]


def layer_of(biased: bool) -> tuple[Any, torch.nn.Module, torch.Tensor]:
    """A processed linear 256 -> 16, what vLLM made of its kernel, and its weights in float64."""
    torch.manual_seed(0)
    stored, scales = torch.randint(0, 16, (16, 256), dtype=torch.int32), (torch.rand(16, 2) * 0.01).bfloat16()
    packed = sum((stored[:, j::8] << (4 * j) for j in range(8)), torch.zeros(16, 32, dtype=torch.int32))
    layer = torch.nn.Module()
    layer.weight_packed = torch.nn.Parameter(packed, requires_grad=False)
    layer.weight_scale = torch.nn.Parameter(scales, requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.randn(16).bfloat16(), requires_grad=False) if biased else None
    plain = 0.0 if layer.bias is None else layer.bias.double().clone()
    config = Config((256, 16), (256, 16))
    kernel = choose(config)(config, w_q_param_name="weight_packed", w_s_param_name="weight_scale", w_zp_param_name="weight_zero_point")
    kernel.process_weights_after_loading(layer)
    layer.plain = plain
    return kernel, layer, (stored.double() - 8) * scales.double().repeat_interleave(128, 1)


def main() -> None:
    import os

    import gemq_int4

    told: dict[str, Any] = {}
    gemq_int4.register()
    gemq_int4.register()
    from gemq_int4 import linear as ours

    kernels = linear._POSSIBLE_KERNELS["cuda"]
    told["first"] = kernels[0].__name__
    told["times"] = kernels.count(ours.GemqInt4LinearKernel)
    good = Config((256, 16), (256, 16))
    for capability in (0, 75, 80, 86, 90, 100, 120):
        CAPABILITY[0] = capability
        told[f"capability {capability}"] = choose(good).__name__
    CAPABILITY[0] = 90
    others = {"zero points": {"zero_points": True}, "half": {"act_type": torch.float16}, "order": {"has_g_idx": True},
              "groups of 48": {"group_size": 48}, "three bits": {"weight_type": "uint3b4"}}  # fmt: skip
    for name, change in others.items():
        told[name] = choose(Config((256, 16), (256, 16), **change)).__name__
    for large, batches in (("own", (0, 3, 9, 33)), ("stock", (0, 1, 9, 33))):
        os.environ["GEMQ_INT4_LARGE"] = large
        kernel, layer, dense = layer_of(biased=True)
        told[f"{large} kernel"] = type(kernel.stock).__name__
        told[f"{large} packed"] = layer.weight_packed.numel()
        errors = {}
        for rows in batches:
            x = torch.randn(rows, 256).bfloat16()
            y, expected = kernel.apply_weights(layer, x, layer.bias), x.double() @ dense.T + layer.plain
            errors[rows] = float((y.double() - expected).norm() / max(1e-9, float(expected.norm()))) if rows else float(y.numel())
        told[f"{large} errors"] = errors
    bare, layer, _ = layer_of(biased=False)
    graph = torch.compile(lambda x: bare.apply_weights(layer, x) * 2, fullgraph=True, dynamic=True, backend="eager")
    told["compiled"] = [list(graph(torch.randn(*shape, 256).bfloat16()).shape) for shape in ((2,), (9,), (2, 1))]
    arguments = (torch.randn(2, 256).bfloat16(), layer.gemq_words.data, layer.gemq_scales.data, None, 4, 256, 128)
    torch.library.opcheck(torch.ops.gemq_int4.linear, arguments)
    told["tensor cores"] = ours.why_tensor_fails(torch.device("cpu"))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
