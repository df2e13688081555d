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
from gemq_int4.launch import ROWS, TensorCut, expanded, matvec, product, tensor_expanded, tensor_matvec
from gemq_int4.layout import Layout

logger = init_logger("vllm.gemq_int4")  # under vLLM's own logger, whose lines are shown
BITS = {scalar_types.uint4b8: 4, scalar_types.uint8b128: 8}
CAPABILITIES = (80, 103)  # Ampere to data-centre Blackwell

# What multiplies larger batches, by the address of the layer's words: an operator in a compiled graph then takes tensors and shapes only, so
# that all layers of a shape share one compiled graph.
_LARGE: dict[int, Callable[[torch.Tensor, bool], torch.Tensor]] = {}
_chooser: Chooser | None = None
_tensor: bool | None = None
_said: set[str] = set()


def chooser() -> Chooser:
    """This process's cuts."""
    global _chooser
    if _chooser is None:
        _chooser = Chooser(torch.cuda.get_device_name(), settings.read().tune)
    return _chooser


def _once(line: str) -> None:
    if line not in _said:
        _said.add(line)
        logger.info("gemq_int4: %s", line)


def tensor_holds(device: torch.device) -> bool:
    """Whether the tensor cores' kernel gives what it must on this card with this Triton, told once by a small product.

    Triton doesn't promise the layout that the kernel is written for (see tensor.py).
    """
    global _tensor
    if _tensor is None:
        why = "GEMQ_INT4_TENSOR is 0" if not settings.read().tensor else why_tensor_fails(device)
        _tensor = why is None
        if why is not None:
            _once(f"int4 without the tensor cores' kernel: {why}")
    return _tensor


def why_tensor_fails(device: torch.device) -> str | None:
    """What is wrong with the tensor cores' kernel here; None if nothing is."""
    draw, here = torch.Generator("cpu").manual_seed(0), {"device": "cpu"}  # a model being loaded may have made the card the default
    packed = torch.randint(-(2**31), 2**31 - 1, (32, 64), dtype=torch.int32, generator=draw, **here)
    scales = torch.rand((32, 4), generator=draw, **here).to(torch.bfloat16)
    x = torch.randn((8, 512), generator=draw, **here).to(torch.bfloat16)
    plain = Layout(4, 512, 128)
    expected = x.double() @ layouts.restore(*layouts.arrange(packed, scales.double(), plain), plain).T
    words = layouts.tile(packed).to(device)
    for cut in (TensorCut(1, 2, 1), TensorCut(4, 4, 1), TensorCut(2, 2, 2, 128, True)):
        for rows in (1, 8):
            try:
                found = tensor_matvec(x[:rows].to(device), words, scales.to(device), None, 512, 128, cut, torch.float32)
            except Exception as error:  # a Triton that can't compile it
                return f"{type(error).__name__}: {str(error)[:200]}"
            apart = float((found.cpu().double() - expected[:rows]).norm() / expected[:rows].norm())
            if not apart < 1e-4:
                return f"its product is {apart:.2g} off"
    return None


def _few(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, layout: Layout) -> torch.Tensor:
    """Up to eight rows."""
    if words.dim() == 5:
        cut = chooser().tensor_cut(words.shape[0] * 8, layout.k, layout.group)
        return tensor_matvec(x, words, scales, bias, layout.k, layout.group, cut)
    return matvec(x, words, scales, bias, layout, chooser().cut(layout, words.shape[0], x.shape[0]))


def _outputs(words: torch.Tensor) -> int:
    return words.shape[0] * 8 if words.dim() == 5 else words.shape[0]


def _linear(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int, k: int, group: int) -> torch.Tensor:
    flat, shape = x.reshape(-1, k), (*x.shape[:-1], _outputs(words))
    if flat.shape[0] == 0:
        return x.new_empty(shape)
    if flat.shape[0] <= ROWS:
        return _few(flat, words, scales, bias, Layout(bits, k, group)).reshape(shape)
    return _LARGE[words.data_ptr()](flat, bias is not None).reshape(shape)


def _fake(x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, bits: int, k: int, group: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _outputs(words)))


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
        how = self.layout
        tiled = layouts.can_tile(how.bits, packed.shape[0], how.k, how.group) and chooser().by_tensor(how, packed.shape[0])
        if tiled and tensor_holds(packed.device):
            words, scales = layouts.tile(packed.data), stored_scales.data.clone()
            scales = scales.reshape(-1) if how.group == -1 else scales
            chooser().search(words, scales, how.k, how.group)
        else:
            words, scales = layouts.arrange(packed.data, stored_scales.data, how)
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
        _LARGE[words.data_ptr()] = self._larger(layer)
        # compiled now, once a shape, and not when the first request comes
        _few(torch.zeros((1, how.k), dtype=torch.bfloat16, device=words.device), words, scales, plain_bias, how)

    def _larger(self, layer: torch.nn.Module) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        stock = self.stock
        if stock is not None:
            return lambda x, biased: stock.apply_weights(layer, x, layer.bias if biased else None)
        layout, words, scales = self.layout, layer.gemq_words, layer.gemq_scales

        def written_out(part: slice) -> torch.Tensor:
            if words.dim() == 5:
                own_scales = scales[part]
                return tensor_expanded(words[part.start // 8 : part.stop // 8], own_scales, layout.k, layout.group)
            return expanded(words[part], scales[part], layout)

        def own(x: torch.Tensor, biased: bool) -> torch.Tensor:
            bias = layer.gemq_bias if biased else None
            return product(x, bias, _outputs(words), lambda part: _few(part, words, scales, bias, layout), written_out)

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
