"""A GPU's memory, as the walk divides it: what it is held to, what solving needs of it, and what is left for activations."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import torch

from gemq.errors import UsageError
from gemq.quantize.plan import Plan
from gemq.quantize.products import DEPTH

DEFAULT_MEMORY = "8GiB"
_UNITS = {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "kb": 10**3, "mb": 10**6, "gb": 10**9}
_CONTEXT_BYTES = 768 << 20  # of CUDA itself with its kernels and workspaces, outside torch's allocator; up to 681 MiB were measured on an H200
_SLACK_BYTES = 320 << 20  # of torch's allocator (pages that are in use in part) and of the libraries' own workspaces
_SMALLEST = 5 << 28
# Both decide the order of sums, and so the bytes of a checkpoint: they don't depend on the memory that is given.
_BATCH_TOKENS = 8192
_PIECE_ROWS = 8192


@dataclass(frozen=True)
class Budget:
    """What the walk may take of a GPU, and what it computes in there."""

    memory_bytes: int
    dtype: torch.dtype
    batch_tokens: int = _BATCH_TOKENS
    beside_bytes: int = 0  # of it that others than torch and CUDA itself take: NCCL

    def activation_bytes(self, plan: Plan) -> int:
        """How much of it is left for what batches hold; raises UsageError naming the memory that `plan` needs where it is not enough."""
        working = _CONTEXT_BYTES + self.beside_bytes + _working_bytes(plan, self.batch_tokens)
        if working > self.memory_bytes:
            raise UsageError(
                f"--gpu-memory {self.memory_bytes / 2**30:.1f}GiB is too little for this model, whose largest unit takes "
                f"{working / 2**30:.1f} GiB to solve", f"give at least {working / 2**30 + 0.1:.1f}GiB, or --device cpu",
            )  # fmt: skip
        return self.memory_bytes - working

    def beside(self, taken_bytes: int, device: str) -> Budget:
        """The same where something beside torch has taken so much of the GPU; torch is held to what that leaves, if it was held."""
        if taken_bytes:
            total = torch.cuda.get_device_properties(device).total_memory
            if self.memory_bytes < total:
                left = self.memory_bytes - _CONTEXT_BYTES - taken_bytes
                torch.cuda.set_per_process_memory_fraction(max(0.0, left / total), device)
        return replace(self, beside_bytes=taken_bytes)


def too_little(error: torch.OutOfMemoryError, memory_bytes: int | None) -> UsageError:
    """gemq's error for torch's, on a device that was held to `memory_bytes`, or to nothing."""
    held = "the device" if memory_bytes is None else f"--gpu-memory {memory_bytes / 2**30:.1f}GiB"
    return UsageError(f"{held} is too little for this: {str(error).splitlines()[0][:200]}", "give more, or fewer samples")


def parse_memory(text: str) -> int:
    """Bytes that `text` (20GiB, 512MiB, 8GB) means; raises UsageError for anything else, and for less than a GPU's runtime takes itself."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?b)", text.strip(), re.IGNORECASE | re.ASCII)
    if found is None:
        raise UsageError(f"--gpu-memory is {text!r}", "give a number and a unit, such as 8GiB or 20GB")
    memory = int(float(found.group(1)) * _UNITS[found.group(2).lower()])
    if memory < _SMALLEST:
        raise UsageError(f"--gpu-memory {text} is too little", "give at least 1.25GiB; CUDA alone takes half of it")
    return memory


def budget_of(plan: Plan, device: str, memory_bytes: int | None) -> Budget | None:
    """The budget on `device`, None on a CPU. torch is held to it: what goes beyond raises its error instead of taking more.

    A recipe that walks the source beside within layers keeps both walks' activations on the device: it is held to `memory_bytes` only where they
    are given. Raises UsageError where the device hasn't that much.
    """
    if torch.device(device).type != "cuda":
        return None
    index = torch.device(device).index
    if index is None:
        index = torch.cuda.current_device()
    torch.cuda.set_device(index)  # Triton launches on the current one
    dtype = dtype_on_gpu(plan)
    memory = parse_memory(DEFAULT_MEMORY) if memory_bytes is None else memory_bytes
    total = torch.cuda.get_device_properties(index).total_memory
    if memory_bytes is None and walks_source_within_layers(plan):
        return Budget(total, dtype)
    if memory > total:
        if memory_bytes is not None:
            raise UsageError(
                f"--gpu-memory {memory / 2**30:.1f}GiB is more than {device} has, {total / 2**30:.1f} GiB", "give less, or leave it out"
            )
        memory = total
    torch.cuda.set_per_process_memory_fraction(min(1.0, (memory - _CONTEXT_BYTES) / total), index)
    return Budget(memory, dtype)


def dtype_on_gpu(plan: Plan) -> torch.dtype:
    """What a walk computes in there: the source's own bfloat16, as it will be served, and float32 for any other source."""
    kept = {plan.skeleton.inventory[matrix.tensor].dtype for matrix in plan.skeleton.matrices}
    return torch.bfloat16 if kept == {"BF16"} else torch.float32


@dataclass(frozen=True)
class Division:
    """What each model's batches may hold on the device where they stand at layers, whether they pause within them, and what waits elsewhere."""

    quota_bytes: int
    reserved_bytes: int
    pausing: bool
    spilled_bytes: int  # of all models, to host memory; per-layer inputs, which wait in a file, not counted


def divide(plan: Plan, budget: Budget, tokens: int) -> Division:
    """The division of `budget` among the models that are walked, for batches of `tokens` tokens. Raises UsageError for too small a budget."""
    models, values = models_walked(plan), tokens * budget.dtype.itemsize
    hidden, shared = values * plan.skeleton.text.hidden_size, values * shared_kv_values(plan)
    # masks, rotary tables and a layer's share of the per-layer inputs come to about half of the hidden states
    quota = max(0, budget.activation_bytes(plan) // models - hidden // 2)
    # within a layer a batch holds the residual too, which nobody else counts; and what a smoothed norm made before it was smoothed
    # an eighth of all that may lie in host memory meanwhile: fetching it costs less than running attention again
    pausing = 8 * quota >= 7 * (2 * hidden + shared) and not plan.pairs
    quota -= pausing * hidden
    return Division(quota, hidden + shared, pausing, models * max(0, (1 + pausing) * hidden + shared - quota))


def models_walked(plan: Plan) -> int:
    """Two where the recipe looks at the source's own activations, else one."""
    return 2 if plan.recipe.gptq.asymmetric or plan.recipe.tuning else 1


def bytes_within_layers(plan: Plan, budget: Budget, tokens: int, longest: int) -> int:
    """The memory that lets batches of `tokens` tokens, `longest` in a window, pause within layers with all that they hold.

    Raises UsageError for a budget that is too small to solve in.
    """
    return budget.memory_bytes - budget.activation_bytes(plan) + models_walked(plan) * paused_bytes(plan, tokens, longest, budget.dtype)


def walks_source_within_layers(plan: Plan) -> bool:
    """Whether the source's own activations must be kept within layers: for tuning, or for targets of units that stand before the layers."""
    if plan.recipe.tuning:
        return True
    before = [unit for unit in plan.units if unit.layer is None and not unit.is_table and unit.name != "lm_head"]
    return bool(plan.recipe.gptq.asymmetric) and any(plan.reads_inputs(unit) for unit in before)


def paused_bytes(plan: Plan, tokens: int, longest: int, dtype: torch.dtype) -> int:
    """The most that batches of `tokens` tokens hold while they are paused within a layer, masks of `longest` tokens included.

    They stop where the MLP's widest tensor, or attention's, lies beside hidden states, masks, per-layer inputs and shared keys and values. Half
    as much again is for what a layer of transformers' keeps beside that; on E4B's shape this is 1.7 times of what was measured.
    """
    text = plan.skeleton.text
    widths: dict[str, int] = {}
    for matrix in plan.skeleton.matrices:
        widths[matrix.kind.path] = max(widths.get(matrix.kind.path, 0), matrix.out_features)
    attention = sum(widths.get(f"self_attn.{name}_proj", 0) for name in "qkv")
    per_layer = len(plan.skeleton.decoder.layers) * getattr(text, "hidden_size_per_layer_input", 0)
    widest = max(widths.get("mlp.gate_proj", 0), attention)
    values = 4 * text.hidden_size + widest + per_layer + shared_kv_values(plan) + 2 * longest
    return tokens * values * dtype.itemsize * 3 // 2


def shared_kv_values(plan: Plan) -> int:
    """How many numbers a token has in the keys and values that later layers share: those of a sliding and of a full layer."""
    if not getattr(plan.skeleton.text, "num_kv_shared_layers", 0):
        return 0
    widths = [matrix.out_features for matrix in plan.skeleton.matrices if matrix.kind.path == "self_attn.k_proj"]
    return 2 * (min(widths) + max(widths))


def _working_bytes(plan: Plan, batch_tokens: int) -> int:
    """Bytes of one layer, of the one after it that is read ahead, and of the largest unit's solving or a batch's forward beside them.

    Where targets are asymmetric the source's own layer comes to that, and moments between both models' inputs.
    """
    crossed = int(plan.recipe.gptq.asymmetric > 0)
    layers: dict[int | None, int] = {}
    solving = 0
    for unit in plan.units:
        layers[unit.layer] = layers.get(unit.layer, 0) + 2 * unit.numel
        if unit.is_table or unit.name == "lm_head":
            continue
        size, rows = unit.in_features, unit.numel // unit.in_features
        # the weights in float32, as they are and as they are stored, and ten times the rows of a piece
        weights = 4 * size * (3 * rows + 10 * min(rows, _PIECE_ROWS))
        if unit.method == "gptq":
            # the Hessian, and one of its size in float64 with the halves of another beside the unit's weights, or its factor and the weights
            solved = (1 + crossed) * 4 * size * size + max(8 * size * size * 3 // 2 + 4 * size * rows, 4 * size * size + weights)
            solving = max(solving, solved)
        else:
            solving = max(solving, weights)
    widest = max((matrix.in_features for matrix in plan.skeleton.matrices), default=0)
    forward = 2 * batch_tokens * 5 * max(widest, plan.skeleton.text.hidden_size) + 4 * widest * widest
    forward += crossed * (2 * 4 * widest * widest + 4 * 8 * DEPTH * widest)  # the moments, and what a piece of them adds
    largest = max((size for layer, size in layers.items() if layer is not None), default=0)
    return int((2 + crossed) * largest + max(solving, forward) + _SLACK_BYTES)
