"""What gemq.json and recipe.yaml say of the quantized modules, compared with what a checkpoint stores.

`units` of gemq.json has the scheme of every unit (matrices that are fused for serving are one), recipe.yaml the rules that chose them. Both must
give each stored matrix the scheme that config.json gives it and that its tensors have; a matrix that a rule quantizes must be quantized.
Of a source whose architecture gemq does not know nothing is compared: gemq quantizes no such source.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from gemq.errors import IntegrityError, UsageError
from gemq.quantize.architectures import EXPERT_TENSORS, LAYER_LINEARS, MODEL_LINEARS, TABLES, Architecture, architecture_of
from gemq.quantize.audit import strict_json
from gemq.quantize.pairs import Pairs
from gemq.quantize.provenance import MANIFEST_FILE, RECIPE_FILE
from gemq.quantize.schemes import GptqQuantization, Scheme
from gemq.quantize.seal import Difference
from gemq.recipes.model import Recipe, Rule, parse_recipe

_IN_LAYER = re.compile(r"(layers\.\d+\.)(.+)$")
_EXPERT = re.compile(r"experts\.\d+\.(gate|up|down)_proj$")
_FUSED = {"gate": "experts.gate_up_proj", "up": "experts.gate_up_proj", "down": "experts.down_proj"}
_OF_LAYER = {kind.path: kind for kind in (*LAYER_LINEARS, *EXPERT_TENSORS)}
_OF_MODEL = {kind.path: kind for kind in (*MODEL_LINEARS, *TABLES)}


@dataclass(frozen=True)
class _Place:
    """Where a matrix belongs: its unit as gemq.json names it, its part and its name as a recipe's rules match them."""

    unit: str
    part: str
    name: str

    def rule_in(self, recipe: Recipe) -> Rule | None:
        """The first rule that names the matrix."""
        return next((rule for rule in recipe.rules if rule.names(self.part, self.name)), None)


def manifest_differences(pairs: Pairs) -> list[Difference]:
    """Where gemq.json's units and recipe.yaml are not what the checkpoint stores, sorted by path."""
    try:
        row = architecture_of(pairs.source_config)
    except UsageError:
        return []
    try:
        manifest = _manifest(pairs)
    except IntegrityError as error:
        return [Difference(MANIFEST_FILE, error.message)]
    stored, differences = {}, []
    for module, unit in pairs.structure.units.items():
        place = _place(module, row)
        if place is None:
            differences.append(Difference(module, "is quantized, and gemq quantizes no module of that name"))
        else:
            stored[place] = _label(unit.scheme)
    differences += _unit_differences(manifest, stored)
    try:
        recipe = _recipe(pairs)
    except (IntegrityError, UsageError) as error:
        return [*differences, Difference(RECIPE_FILE, error.message)]
    return [*differences, *(Difference(RECIPE_FILE, what) for what in _recipe_problems(recipe, manifest, stored, pairs, row))]


def _manifest(pairs: Pairs) -> dict[str, Any]:
    path = pairs.directory / MANIFEST_FILE
    manifest = strict_json(path.read_bytes(), MANIFEST_FILE) if path.is_file() else None
    units = manifest.get("units") if isinstance(manifest, dict) else None
    if not isinstance(units, dict) or not all(isinstance(told, dict) and isinstance(told.get("scheme"), str) for told in units.values()):
        raise IntegrityError("has no mapping of units to their schemes, so nothing says what was quantized")
    assert isinstance(manifest, dict)
    return manifest


def _recipe(pairs: Pairs) -> Recipe:
    path = pairs.directory / RECIPE_FILE
    if not path.is_file():
        raise IntegrityError("is missing: nothing says how the checkpoint was made")
    try:
        return parse_recipe(path.read_text(encoding="utf-8"), RECIPE_FILE)
    except UnicodeDecodeError as error:
        raise IntegrityError(f"is not UTF-8 text: {error}") from None


def _place(module: str, row: Architecture) -> _Place | None:
    if module in row.head_names:
        return _Place("lm_head", "lm_head", "lm_head")
    prefix = next((prefix for prefix in row.prefixes if module.startswith(prefix)), None)
    if prefix is None:
        return None
    rest = module.removeprefix(prefix)
    found = _IN_LAYER.match(rest)
    layer, path = (found[1], found[2]) if found else ("", rest)
    expert = _EXPERT.match(path)
    path = _FUSED[expert[1]] if expert else path
    kind = (_OF_LAYER if layer else _OF_MODEL).get(path)
    return None if kind is None else _Place(layer + kind.unit, kind.part, prefix + layer + path)


def _label(scheme: Scheme) -> str:
    """A stored scheme as gemq.json and recipes name it: int4 g128; fp8 channel, fp8 inputs."""
    kind = "fp8" if scheme.type == "float" else f"int{scheme.num_bits}"
    size = f"g{scheme.group_size}" if scheme.strategy == "group" else scheme.strategy
    return f"{kind} {size}" + ("" if scheme.format in ("pack-quantized", "gptq") else f", {kind} inputs")


def _unit_differences(manifest: dict[str, Any], stored: dict[_Place, str]) -> list[Difference]:
    told = {name: entry["scheme"] for name, entry in manifest["units"].items()}
    labels: dict[str, set[str]] = {}
    for place, label in stored.items():
        labels.setdefault(place.unit, set()).add(label)
    found = []
    for unit in sorted({*told, *labels}):
        ours = " and ".join(sorted(labels.get(unit, {"nothing quantized"})))
        if told.get(unit) != ours:
            found.append(Difference(MANIFEST_FILE, f"units has {told.get(unit, 'nothing')!r:.80} for {unit:.200}, the checkpoint stores {ours}"))
    return found


def _recipe_problems(recipe: Recipe, manifest: dict[str, Any], stored: dict[_Place, str], pairs: Pairs, row: Architecture) -> list[str]:
    found = []
    if manifest.get("recipe") != recipe.name:
        found.append(f"has the name {recipe.name!r}, {MANIFEST_FILE} has {str(manifest.get('recipe'))[:80]!r}")
    form = "gptq" if isinstance(pairs.structure.quantization, GptqQuantization) else "compressed-tensors"
    if recipe.format != form:
        found.append(f"has the format {recipe.format}, the checkpoint is stored as {form}")
    if recipe.smoothing is None and pairs.manifest_names("smoothed_tensors"):
        found.append(f"has no smoothing, {MANIFEST_FILE} lists smoothed tensors")
    modules = [name.removesuffix(".weight") for name in pairs.originals if not pairs.is_redundant(name)]
    places = [*stored, *(place for module in ["lm_head", *modules] if (place := _place(module, row)) is not None)]
    for place in sorted(set(places), key=lambda place: place.name):
        rule, label = place.rule_in(recipe), stored.get(place, "as it is")
        meant = "as it is" if rule is None or rule.scheme == "keep" else rule.scheme.label()
        if meant != label:
            found.append(f"stores {place.name} {meant}, the checkpoint has it {label}")
    return found
