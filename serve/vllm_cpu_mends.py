"""What vLLM's build for CPUs needs to serve what gemq makes; environment.py puts it into vLLM's environment, where each process loads it.

Each mend is applied when the module in question is imported:

- torchvision's wheel is built for CUDA: its C library doesn't load beside a CPU torch, and without the operators that it would declare
  `import torchvision` fails, and with it every model of vLLM that takes images. Its transforms are plain torch and work; a call of the
  operators themselves still ends in torchvision's own error.
- vLLM makes Gemma 4's audio tower in the dtype that audio_config names, and the linears in it in the dtype that it serves in. Where the two
  differ (--dtype float32, say), its oneDNN linear takes the activations for what they are not and reads behind their end: the worker dies of
  a signal at its first recording, often while it warms up. And the convolution there hands transposed activations to the last linear, where
  the CPU kernels take only rows that lie in one piece ("Expected a.stride(-1) == 1"). With bfloat16 on a CPU without AVX-512 vLLM falls back
  to torch's linear, and nothing of this shows.
- That fallback is eight times slower in bfloat16 than in float32 where the CPU has no AVX-512: there the weights are widened once. What comes
  out is rounded to bfloat16 as before.
- The kernel for packed 4-bit weights is only in the AVX-512 build: elsewhere the model loads, and the worker dies at the first token
  ("'_C' object has no attribute 'cpu_gemm_wna16'"). For packed 8-bit weights there is none at all. Here both are unpacked once, to the
  float32 values that the integers and scales stand for, and multiplied by torch: the same weights, more memory.
- For the same reason its reader of the gptq format refuses 8 bits on CPUs ("Marlin does not support weight_bits = uint8b128"), before any
  kernel is asked; it may take them, since what was unpacked needs no kernel.
- Rows of a packed embedding table are dequantized by a Triton kernel, and there is no Triton for CPUs in this build: here by torch.
"""
# mypy: ignore-errors

import importlib.machinery
import sys

IMAGES = "torchvision"
LINEARS = "vllm.model_executor.layers.utils"
GPTQ_TYPES = "vllm.model_executor.layers.quantization.utils.marlin_utils"
PACKED = "vllm.model_executor.kernels.linear.mixed_precision.cpu"
TABLES = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_embedding"


def declare_image_operators():
    """Declare torchvision's compiled operators; returns what keeps the declaration alive."""
    import torch

    if torch.version.cuda is not None or hasattr(torch.ops.torchvision, "nms"):
        return None
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


def take_any_activations(module):
    """Bring the activations of unquantized linears into the weight's dtype and into one piece, and widen bfloat16 where that is faster."""
    import torch

    linear, dispatch = module.cpu_unquantized_gemm, module.dispatch_cpu_unquantized_gemm

    def dispatch_cpu_unquantized_gemm(layer, remove_weight):
        weight = layer.weight
        if weight.is_meta or weight.dtype != torch.bfloat16 or weight.dim() != 2 or torch.cpu._is_avx512_supported():
            return dispatch(layer, remove_weight)
        wide = weight.data.float()

        def cpu_linear(x, weight, bias):
            return torch.nn.functional.linear(x.float(), wide, None if bias is None else bias.float()).to(x.dtype)

        layer.cpu_linear = cpu_linear
        if remove_weight:
            layer.weight = torch.nn.Parameter(torch.empty(0, dtype=torch.bfloat16), requires_grad=False)

    def cpu_unquantized_gemm(layer, x, weight, bias=None):
        return linear(layer, x.to(weight.dtype).contiguous(), weight, bias).to(x.dtype)

    module.cpu_unquantized_gemm = cpu_unquantized_gemm
    module.dispatch_cpu_unquantized_gemm = dispatch_cpu_unquantized_gemm


def take_eight_bits(module):
    """Let the gptq format's reader have the 8-bit weights that `unpack_without_kernel` serves."""
    from vllm.scalar_type import scalar_types

    supported = module._query_cpu_marlin_supported_quant_types

    def _query_cpu_marlin_supported_quant_types(has_zp=None, include_fp_type=True):
        return supported(has_zp, include_fp_type) + ([] if has_zp else [scalar_types.uint8b128])

    module._query_cpu_marlin_supported_quant_types = _query_cpu_marlin_supported_quant_types


def unpack_without_kernel(module):
    """Serve packed symmetric weights that this build has no kernel for."""
    import torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
    from vllm.scalar_type import scalar_types

    kernel = module.CPUWNA16LinearKernel
    unpacked = [scalar_types.uint8b128] + ([] if hasattr(torch.ops._C, "cpu_gemm_wna16") else [scalar_types.uint4b8])
    can_implement, process, apply = kernel.can_implement.__func__, kernel.process_weights_after_loading, kernel.apply_weights

    def can_implement_too(cls, config):
        return (True, None) if config.weight_type in unpacked and not config.zero_points else can_implement(cls, config)

    def process_weights_after_loading(self, layer):
        if self.config.weight_type not in unpacked:
            return process(self, layer)
        packed, scale = getattr(layer, self.w_q_name), getattr(layer, self.w_s_name)
        integers = unpack_quantized_values_into_int32(packed.data, self.config.weight_type, packed.packed_dim) - self.config.weight_type.bias
        integers = integers if packed.output_dim == 0 else integers.t()
        scales = scale.data if scale.output_dim == 0 else scale.data.t()
        rows, groups = integers.shape[0], scales.shape[1]
        layer.gemq_weight = (integers.reshape(rows, groups, -1).float() * scales.float().unsqueeze(-1)).reshape(rows, -1)
        packed.data = torch.empty(0, dtype=torch.int32)

    def apply_weights(self, layer, x, bias=None):
        if self.config.weight_type not in unpacked:
            return apply(self, layer, x, bias)
        return torch.nn.functional.linear(x.float(), layer.gemq_weight, None if bias is None else bias.float()).to(x.dtype)

    kernel.can_implement = classmethod(can_implement_too)
    kernel.process_weights_after_loading = process_weights_after_loading
    kernel.apply_weights = apply_weights


def look_up_without_triton(module):
    """Dequantize the rows of a packed embedding table that are looked up, where there is no Triton to do it."""
    import torch

    with_triton = module._dequant_gather_triton

    def dequant_gather(ids, weight_packed, weight_scale, hidden, num_bits):
        if weight_packed.is_cuda:
            return with_triton(ids, weight_packed, weight_scale, hidden, num_bits)
        shifts = torch.arange(0, 32, num_bits, dtype=torch.int32)
        levels = ((weight_packed[ids].unsqueeze(-1) >> shifts) & ((1 << num_bits) - 1)).flatten(1)[:, :hidden] - (1 << (num_bits - 1))
        scales = weight_scale[ids].float()
        rows = levels.reshape(ids.shape[0], scales.shape[1], -1).float() * scales.unsqueeze(-1)
        return rows.reshape(ids.shape[0], hidden).to(weight_scale.dtype)

    module._dequant_gather_triton = dequant_gather


class Mends:
    """A finder that finds nothing itself, and mends what is about to be imported."""

    after = {  # noqa: RUF012
        LINEARS: take_any_activations,
        GPTQ_TYPES: take_eight_bits,
        PACKED: unpack_without_kernel,
        TABLES: look_up_without_triton,
    }
    images = None

    def find_spec(self, name, path=None, target=None):
        if name == IMAGES and self.images is None:
            self.images = declare_image_operators()
        mend = self.after.get(name)
        if mend is None:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            mend(module)

        spec.loader.exec_module = exec_module
        return spec


def install():
    """Mend whatever this process imports from now on."""
    sys.meta_path.insert(0, Mends())
