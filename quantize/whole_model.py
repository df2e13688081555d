"""The whole multimodal model as transformers builds it: which tensors its config implies, and what they are called in a source.

A source may spell names as transformers saves them or as the Hub's older files do; transformers' own table of renamings, which it loads
checkpoints by, says which tensor of a source is which of the model's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.architectures import Architecture
from gemq.quantize.source_tensors import refuse_text_only, require_one_name_each, require_only_known
from gemq.shard_headers import TensorSpec
from gemq.shards import DTYPE_NAMES

if TYPE_CHECKING:
    from gemq.quantize.skeleton import Skeleton

_CLIP_BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def build_whole_model(config: dict[str, Any], architecture: Architecture, dtype: torch.dtype = torch.float32) -> Any:
    """The model of `config` on the meta device, towers and head included; raises UsageError if transformers can't build it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config))
        with torch.device("meta"):
            return getattr(transformers, architecture.name)._from_config(whole, dtype=dtype).eval()
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UsageError(f"transformers can't build the model from this config.json: {error!r}", "fetch config.json again") from None


def tied_names(model: Any) -> set[str]:
    """Names that share another tensor's weights and are not stored."""
    return set(getattr(model, "all_tied_weights_keys", {}) or {})


def full_inventory(config: dict[str, Any], architecture: Architecture) -> dict[str, TensorSpec]:
    """Every tensor that a model of this config has, by the names that transformers saves, for a plan without weights."""
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch."))
    model = build_whole_model(config, architecture, dtype)
    tied = tied_names(model)
    return {
        name: TensorSpec(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
        if name not in tied
    }


def source_names(model: Any, inventory: Mapping[str, TensorSpec]) -> dict[str, str]:
    """The model's name of each tensor of a source -> the source's name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [entry for entry in get_model_conversion_mapping(model) if isinstance(entry, WeightRenaming)]
    known = model.state_dict()
    return {rename_source_key(name, renamings, [], model.base_model_prefix, known)[0]: name for name in inventory}


def require_every_tensor(skeleton: Skeleton, directory: Path) -> None:
    """Raise IntegrityError naming the first tensor that the config implies and the source lacks, or has in another shape.

    Raises UsageError for one that the model has no part for, or has two names for, and for a language model under a multimodal config.
    Clip bounds are asked for only where the source has their like: without any of them nothing is clipped. Names are those that
    transformers saves, which a source in an older layout spells with other prefixes.
    """
    model = build_whole_model(skeleton.config, skeleton.architecture)
    names, tied = source_names(model, skeleton.inventory), tied_names(model)
    require_one_name_each(names, skeleton.inventory)
    refuse_text_only(skeleton, names, directory)
    stored_leaves = {name.rpartition(".")[2] for name in names}
    missing = []
    for name, tensor in model.state_dict().items():
        if name in names:
            found = skeleton.inventory[names[name]].shape
            if found != tuple(tensor.shape):
                raise IntegrityError(
                    f"{names[name]} has the shape {list(found)}, its config implies {list(tensor.shape)}",
                    "fetch config.json and weights of one revision",
                )
        elif name not in tied and ((leaf := name.rpartition(".")[2]) not in _CLIP_BOUNDS or leaf in stored_leaves):
            missing.append(name)
    if missing:
        more = f", nor {len(missing) - 1} others" if len(missing) > 1 else ""
        raise IntegrityError(f"the source has no tensor {missing[0]}, which its config implies{more}", "fetch or copy the source again")
    require_only_known(skeleton, names, model.state_dict())
