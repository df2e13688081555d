"""vLLM's door: the kernel class that vLLM asks first for compressed-tensors' weight-only linears, and the operator that its graphs hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.logger import init_logger
from vllm.model_executor.kernels.linear import MPLinearKernel, MPLinearLayerConfig, choose_mp_linear_kernel
from vllm.platforms import current_platform
from vllm.scalar_type import scalar_types

from gemq_int4 import layout as layouts
from gemq_int4 import settings
from gemq_int4.cuts import Chooser
from gemq_int4.launch import ROWS, matvec, product
from gemq_int4.layout import Layout

logger = init_logger("vllm.gemq_int4")  # under vLLM's own logger, whose lines are shown
BITS = {scalar_types.uint4b8: 4, scalar_types.uint8b128: 8}
CAPABILITIES = (80, 103)  # Ampere to data-centre Blackwell

# What multiplies larger batches, by the address of the layer's words: an operator in a compiled graph then takes tensors and shapes only, so
# that all layers of a shape share one compiled graph.
_LARGE: dict[int, Callable[[torch.Tensor, bool], torch.Tensor]] = {}
_chooser: Chooser | None = None
_early = False
_said: set[str] = set()


def chooser() -> Chooser:
    """This process's cuts."""
    global _chooser, _early
    if _chooser is None:
        capability = current_platform.get_device_capability()
        _early = settings.read().early and capability is not None and capability.to_int() >= 90
        _chooser = Chooser(torch.cuda.get_device_name(), settings.read().tune)
    return _chooser


def _once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.info("gemq_int4: %s", line)


def _linear(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int, k: int, group: int) -> torch.Tensor:
    flat, shape = x.reshape(-1, k), (*x.shape[:-1], words.shape[0])
    if flat.shape[0] == 0:
        return x.new_empty(shape)
    if flat.shape[0] <= ROWS:
        layout = Layout(bits, k, group)
        y = matvec(flat, words, scales, bias, layout, chooser().cut(layout, words.shape[0], flat.shape[0]), early=_early)
    else:
        y = _LARGE[words.data_ptr()](flat, bias is not None)
    return y.reshape(shape)


def _fake(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int, k: int, group: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], words.shape[0]))


_library = torch.library.Library("gemq_int4", "FRAGMENT")
_library.define("linear(Tensor x, Tensor words, Tensor scales, Tensor? bias, int bits, int k, int group) -> Tensor")
_library.impl("linear", _linear, "CompositeExplicitAutograd")
torch.library.register_fake("gemq_int4::linear", _fake, lib=_library)


class GemqInt4LinearKernel(MPLinearKernel):
    """Batches of 1 to 8 rows by gemq's matrix-vector kernel, larger ones by the kernel that vLLM would have taken (or, if asked, without one)."""

    _asking_for_stock = False

    @classmethod
    def get_min_capability(cls) -> int:
        return CAPABILITIES[0]

    @classmethod
    def can_implement(cls, c: MPLinearLayerConfig) -> tuple[bool, str | None]:
        if cls._asking_for_stock:
            return False, "the stock kernel is asked for"
        why = cls._why_not(c)
        if why is not None:
            _once(f"left to vLLM's own kernels: {why}")
            return False, why
        return True, None

    @classmethod
    def _why_not(cls, c: MPLinearLayerConfig) -> str | None:
        if not current_platform.is_cuda():
            return "no CUDA device"
        capability = current_platform.get_device_capability()
        number = capability.to_int() if capability is not None else 0
        if not CAPABILITIES[0] <= number <= CAPABILITIES[1]:
            return f"the card has compute capability {number}, and {CAPABILITIES[0]} to {CAPABILITIES[1]} were built for"
        if c.weight_type not in BITS or c.zero_points:
            return f"weights of type {c.weight_type}, and symmetric int4 and int8 are taken"
        if c.act_type != torch.bfloat16:
            return f"activations of type {c.act_type}, and bfloat16 is taken"
        if getattr(c, "has_g_idx", False):
            return "groups in the order of activations"
        k = c.partition_weight_shape[0]
        if c.group_size == -1 and k != c.full_weight_shape[0]:
            return None  # a row's one scale holds for every part of the row
        return layouts.why_not(BITS[c.weight_type], k, c.group_size)

    def __init__(self, c: MPLinearLayerConfig, *names: Any, **more: Any) -> None:
        super().__init__(c, *names, **more)
        self.layout = Layout(BITS[c.weight_type], c.partition_weight_shape[0], c.group_size)
        self.stock: MPLinearKernel | None = None
        if settings.read().large == "stock":
            GemqInt4LinearKernel._asking_for_stock = True
            try:
                chosen = choose_mp_linear_kernel(c)
            finally:
                GemqInt4LinearKernel._asking_for_stock = False
            self.stock = chosen(c, *names, **more)
            _once(f"batches of up to {ROWS} rows are ours, larger ones {chosen.__name__}'s")
        else:
            _once("all batches are ours, without a second copy of the weights")

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        packed, stored_scales = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        words, scales = layouts.arrange(packed.data, stored_scales.data, self.layout)
        bias = getattr(layer, "bias", None)
        # the stock kernel may permute the bias where it lies
        plain_bias = bias.data.clone() if isinstance(bias, torch.Tensor) else None
        if self.stock is not None:
            self.stock.process_weights_after_loading(layer)
        else:  # the packed words are not needed any more
            for name in (self.w_q_name, self.w_s_name):
                setattr(layer, name, torch.nn.Parameter(torch.empty(0, dtype=getattr(layer, name).dtype, device=words.device), requires_grad=False))
        layer.gemq_words = torch.nn.Parameter(words, requires_grad=False)
        layer.gemq_scales = torch.nn.Parameter(scales, requires_grad=False)
        layer.gemq_bias = None if plain_bias is None else torch.nn.Parameter(plain_bias, requires_grad=False)
        chooser().search(words, scales, self.layout)
        _LARGE[words.data_ptr()] = self._larger(layer)

    def _larger(self, layer: torch.nn.Module) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        stock = self.stock
        if stock is not None:
            return lambda x, biased: stock.apply_weights(layer, x, layer.bias if biased else None)
        layout = self.layout

        def own(x: torch.Tensor, biased: bool) -> torch.Tensor:
            words = layer.gemq_words
            cut = chooser().cut(layout, words.shape[0], ROWS)
            return product(x, words, layer.gemq_scales, layer.gemq_bias if biased else None, layout, cut)

        return own

    def apply_weights(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ours = None if bias is None else layer.gemq_bias
        return torch.ops.gemq_int4.linear(x, layer.gemq_words, layer.gemq_scales, ours, self.layout.bits, self.layout.k, self.layout.group)


def put_first() -> None:
    """Let vLLM ask this class before its own; a second call changes nothing."""
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    kernels = linear._POSSIBLE_KERNELS.get(PlatformEnum.CUDA)
    if kernels is None:
        linear.register_linear_kernel(GemqInt4LinearKernel, PlatformEnum.CUDA, "mp")
    elif GemqInt4LinearKernel not in kernels:
        kernels.insert(0, GemqInt4LinearKernel)
