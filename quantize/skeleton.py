"""The decoder's modules as transformers builds them, without weights, and the names that its tensors have in the source."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemq.config_file import complete_config, read_config
from gemq.errors import IntegrityError, UsageError
from gemq.quantize import architectures
from gemq.quantize.architectures import EXPERT_TENSORS, KEPT_LINEARS, LAYER_LINEARS, MODEL_LINEARS, TABLES, Architecture, LinearKind
from gemq.quantize.output_head import OutputHead, find_head
from gemq.quantize.source_tensors import (
    explain_no_embedding,
    refuse_adapters,
    refuse_two_layouts,
    require_known_dtype,
    require_one_model,
)
from gemq.quantize.whole_model import full_inventory, require_every_tensor
from gemq.shard_headers import INDEX_FILE, SINGLE_FILE, TensorSpec
from gemq.shards import ShardReader


@dataclass(frozen=True)
class Matrix:
    """A weight that can be quantized: its module in the text model, its tensor in the source, its shape [out, in] (experts: a count before).

    Of a table of rows that are looked up, `out_features` counts the rows.
    """

    module: str
    tensor: str
    kind: LinearKind
    layer: int | None
    out_features: int
    in_features: int
    experts: int | None = None

    @property
    def numel(self) -> int:
        return (self.experts or 1) * self.out_features * self.in_features

    @property
    def is_table(self) -> bool:
        return self.kind in TABLES


@dataclass
class Skeleton:
    """The text model on the meta device (`model`, a ...ForCausalLM), and the source's inventory of tensors."""

    architecture: Architecture
    config: dict[str, Any]  # config.json
    complete: dict[str, Any]  # with its class's defaults
    text: Any  # the transformers config of the decoder
    model: Any  # nn.Module; torch types its attributes as Tensor | Module
    prefix: str
    output_head: OutputHead
    inventory: dict[str, TensorSpec]
    matrices: list[Matrix]  # that are multiplied
    tables: list[Matrix]

    @property
    def head(self) -> str:
        """The head's module, as the source spells it."""
        return self.output_head.name

    @property
    def tied(self) -> bool:
        """Whether the files hold no weight of the head's: it is the embedding."""
        return not self.output_head.stored

    @property
    def decoder(self) -> Any:
        """The text model inside the ...ForCausalLM: embeddings, layers, norm."""
        return self.model.model

    @property
    def layer_count(self) -> int:
        return len(self.decoder.layers)

    def source_name(self, text_name: str) -> str:
        """A text model's parameter name (`model.layers.0...`, `lm_head...`) as the source spells it."""
        if text_name.startswith("model."):
            return self.prefix + text_name.removeprefix("model.")
        if text_name.startswith("lm_head"):
            return self.head + text_name.removeprefix("lm_head")
        raise KeyError(text_name)

    def layer_tensors(self, index: int) -> dict[str, str]:
        """Parameter and buffer names within layer `index` -> tensors of the source. Raises IntegrityError for one that is missing."""
        names = {name: self.source_name(f"model.layers.{index}.{name}") for name in self.decoder.layers[index].state_dict()}
        for name, source in names.items():
            if source not in self.inventory:
                raise IntegrityError(f"the source has no tensor {source}, which its config implies", "fetch or copy the source again")
            expected, found = tuple(self.decoder.layers[index].state_dict()[name].shape), self.inventory[source].shape
            if expected != found:
                raise IntegrityError(
                    f"{source} has the shape {list(found)}, its config implies {list(expected)}",
                    "fetch config.json and weights of one revision",
                )
        return names

    def redundant_kv(self) -> list[str]:
        """Tensors of KV-shared layers that the source holds and no forward reads."""
        found = []
        for index, layer in enumerate(self.decoder.layers):
            if getattr(layer.self_attn, "is_kv_shared_layer", False):
                base = self.source_name(f"model.layers.{index}.self_attn.")
                found += [name for name in self.inventory if name.startswith((base + "k_", base + "v_"))]
        return found


def build_text_model(config: dict[str, Any]) -> tuple[Any, Any]:
    """The decoder as a ...ForCausalLM on the meta device, with its transformers config; raises UsageError if the config can't be built."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = architectures.architecture_of(config)
    config = copy.deepcopy(config)
    try:
        whole = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        text = getattr(whole, row.text_config) if row.text_config else whole
        text._attn_implementation = "sdpa"
        text._experts_implementation = "eager"
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(text, dtype=torch.float32)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, ZeroDivisionError) as error:
        raise UsageError(f"transformers can't build the decoder from this config.json: {error!r}", "fetch config.json again") from None
    return model.eval(), text


def load_skeleton(directory: Path) -> tuple[Skeleton, ShardReader | None]:
    """The skeleton of the source in `directory`, and its reader (None where there is only a config.json, for a plan)."""
    config = read_config(directory)
    row = architectures.architecture_of(config)
    architectures.refuse_quantized(config)
    architectures.check_text_config(architectures.text_config_of(config))
    require_known_dtype(config)
    complete = complete_config(config)
    require_one_model(directory, config, complete, row)
    model, text = build_text_model(config)
    reader = None
    if (directory / SINGLE_FILE).exists() or (directory / INDEX_FILE).exists():
        reader = ShardReader(directory)
        refuse_two_layouts(directory, reader)
        refuse_adapters(reader.tensors)
        inventory = {name: TensorSpec(name, info.dtype, info.shape) for name, info in reader.tensors.items()}
    else:
        inventory = full_inventory(config, row)
    prefix = next((prefix for prefix in row.prefixes if f"{prefix}embed_tokens.weight" in inventory), "")
    if not prefix:
        explain_no_embedding(directory, row, inventory)
    head = find_head(directory, row, complete, inventory, reader, prefix)
    skeleton = Skeleton(row, config, complete, text, model, prefix, head, inventory, [], [])
    skeleton.matrices = _matrices(skeleton)
    skeleton.tables = _tables(skeleton)
    if reader is not None:
        require_every_tensor(skeleton, directory)
    return skeleton, reader


def _matrices(skeleton: Skeleton) -> list[Matrix]:
    found = []
    for kind in MODEL_LINEARS:
        module = getattr(skeleton.decoder, kind.path, None)
        if module is not None:
            found.append(_linear(skeleton, f"model.{kind.path}", kind, None, module))
    kinds = {kind.path: kind for kind in LAYER_LINEARS}
    for index, layer in enumerate(skeleton.decoder.layers):
        for path, module in layer.named_modules():
            if not isinstance(module, nn.Linear):
                continue
            if path in kinds:
                found.append(_linear(skeleton, f"model.layers.{index}.{path}", kinds[path], index, module))
            elif path not in KEPT_LINEARS:
                raise UsageError(
                    f"layer {index} has a linear {path} that gemq's tables don't name", "report this architecture as an issue of gemq"
                )
        for kind in EXPERT_TENSORS:
            parent, _, leaf = kind.path.rpartition(".")
            stack = getattr(getattr(layer, parent, None), leaf, None)
            if stack is not None:
                name = f"model.layers.{index}.{kind.path}"
                found.append(Matrix(name, skeleton.source_name(name), kind, index, stack.shape[1], stack.shape[2], stack.shape[0]))
    vocabulary, hidden = skeleton.decoder.embed_tokens.weight.shape
    tensor = f"{skeleton.prefix}embed_tokens.weight" if skeleton.tied else f"{skeleton.head}.weight"
    found.append(Matrix("lm_head", tensor, LinearKind("lm_head", "lm_head", "lm_head"), None, vocabulary, hidden))
    return found


def _tables(skeleton: Skeleton) -> list[Matrix]:
    found = []
    for kind in TABLES:
        table = getattr(skeleton.decoder, kind.path, None)
        if table is not None:
            name = f"model.{kind.path}"
            found.append(Matrix(name, f"{skeleton.source_name(name)}.weight", kind, None, table.num_embeddings, table.embedding_dim))
    return found


def _linear(skeleton: Skeleton, module: str, kind: LinearKind, layer: int | None, linear: nn.Linear) -> Matrix:
    return Matrix(module, skeleton.source_name(module) + ".weight", kind, layer, linear.out_features, linear.in_features)
