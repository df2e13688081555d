"""A mixture's experts, which a checkpoint stores one by one as vLLM reads them, as the stacks that transformers' classes hold.

transformers builds `experts.gate_up_proj` [experts, 2 * width, hidden] and `experts.down_proj` [experts, hidden, width] as parameters, not as
linears, so that compressed-tensors neither loads experts that are stored apart nor quantizes their inputs. Both are done here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from gemq.errors import IntegrityError, UsageError
from gemq.eval.tables import unpack_table
from gemq.quantize.matching import CompressedTensors, asked_modules
from gemq.shards import ShardReader

_STORED = re.compile(r"(?P<experts>(?:.*\.)?experts)\.(?P<number>\d+)\.(?P<leaf>gate_proj|up_proj|down_proj)\.(?P<part>[a-z_]+)$")
_STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def experts_stored_apart(directory: Path, count: object) -> dict[str, int]:
    """The mixtures of a checkpoint whose experts are stored one by one: name of the module -> number of experts.

    Raises IntegrityError where these are not the `count` experts of config.json.
    """
    numbers: dict[str, set[int]] = defaultdict(set)
    reader = ShardReader(directory)
    reader.close()
    for name in reader.tensors:
        if found := _STORED.match(name):
            numbers[found["experts"]].add(int(found["number"]))
    for experts, held in numbers.items():
        if held != set(range(count if isinstance(count, int) else len(held))):
            raise IntegrityError(f"{experts} has the experts {', '.join(map(str, sorted(held)[:9]))}..., config.json says num_experts {count}",
                                 "fetch or quantize the checkpoint again")  # fmt: skip
    return {experts: len(held) for experts, held in numbers.items()}


def is_of_experts(name: str) -> bool:
    """Whether a tensor belongs to one expert of a mixture."""
    return _STORED.match(name) is not None


def read_stacks(directory: Path, mixtures: Mapping[str, int], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The stacks of `mixtures`, dequantized: name -> [experts, out, in] in `dtype`. Raises IntegrityError where a part is missing or misshapen."""
    reader = ShardReader(directory)
    try:
        return {name: stack for experts, count in mixtures.items() for name, stack in _stacks(reader, experts, count, dtype).items()}
    finally:
        reader.close()


def _stacks(reader: ShardReader, experts: str, count: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    stacks = {}
    for stack, leaves in _STACKS.items():
        whole: torch.Tensor | None = None
        for number in range(count):
            matrix = torch.cat([_matrix(reader, f"{experts}.{number}.{leaf}") for leaf in leaves])
            if whole is None:
                whole = torch.empty(count, *matrix.shape, dtype=dtype)
            if matrix.shape != whole.shape[1:]:
                raise IntegrityError(f"{experts}.{number} has a {stack} of {list(matrix.shape)}, expert 0 has {list(whole.shape[1:])}",
                                     "quantize the source again")  # fmt: skip
            whole[number] = matrix
        assert whole is not None
        stacks[f"{experts}.{stack}"] = whole
    return stacks


def _matrix(reader: ShardReader, module: str) -> torch.Tensor:
    """The dequantized weight [out, in] float32 of a module of compressed-tensors, or its weight as it is."""
    if f"{module}.weight_zero_point" in reader:
        raise UsageError(f"{module} has zero points, and only symmetric experts can be dequantized here", "evaluate it through an endpoint's URL")
    stored = f"{module}.weight_packed" if f"{module}.weight_packed" in reader else f"{module}.weight"
    if stored not in reader:
        raise IntegrityError(f"the checkpoint has no {module}.weight", "fetch or quantize the checkpoint again")
    weight = reader.read(stored)
    if f"{module}.weight_scale" not in reader:
        return weight.float()
    scale = reader.read(f"{module}.weight_scale").float()
    try:
        if stored.endswith("packed"):
            rows, columns = reader.read(f"{module}.weight_shape").tolist()
            return unpack_table(weight, scale, (rows, columns))
        return (weight.float().reshape(len(weight), -1, weight.shape[1] // scale[0].numel()) * scale.reshape(scale.shape[0], -1, 1)).flatten(1)
    except (KeyError, ValueError, RuntimeError, IndexError, ZeroDivisionError) as error:
        raise IntegrityError(f"{module} does not fit together ({error})", "quantize the source again") from error


class _RoundedInputs(TorchFunctionMode):
    """Rounds the inputs of every linear that is computed inside, as a scheme with quantized activations does while it is served."""

    def __init__(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._rounded = rounded

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.linear:
            args = (self._rounded(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def round_inputs(model: Any, config: dict[str, Any], mixtures: Iterable[str]) -> None:
    """Make the experts in `model` round their inputs where the checkpoint's scheme for them does. The model must compute experts by linears."""
    from compressed_tensors.quantization import QuantizationArgs

    reader = CompressedTensors(config)
    for experts in mixtures:
        (asked,) = asked_modules(config, [f"{experts}.0.gate_proj"])
        group = reader.group_of(asked)
        inputs = config["quantization_config"]["config_groups"][group].get("input_activations") if group else None
        if inputs:
            module = model.get_submodule(experts)
            module.forward = _inside(_RoundedInputs(_rounding(QuantizationArgs.model_validate(inputs))), module.forward)


def _rounding(arguments: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Quantizes and dequantizes inputs [tokens, in] as compressed-tensors does in a linear."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    def rounded(value: torch.Tensor) -> torch.Tensor:
        if not value.numel():
            return value
        batch = value.unsqueeze(0)  # a scale a token is one for each index of the first two dimensions
        scale, zero_point = compute_dynamic_scales_and_zp(batch, arguments, torch.nn.Module())
        return fake_quantize(batch, scale, zero_point, arguments).squeeze(0)

    return rounded


def _inside(mode: TorchFunctionMode, forward: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return forward(*args, **kwargs)

    return wrapped
