"""What smoothing did to a checkpoint, worked out from its tensors and the source's: the scale of each channel, and which weights must bear it.

The manifest only names the producers (`smoothed_tensors`). A smoothed norm tells its scale itself: what the source's norm multiplies by over
what the checkpoint's does; no other norm than a layer's input_layernorm and pre_feedforward_layernorm may differ, and only where all that
read it are quantized. Of up_proj the scale of a row is the power of two nearest to the ratio of the source's row to the stored one. The
weights that read a producer's output are then compared with the source's times the scale: group by group as any others (verify.py), and
column by column here, since a group is nearly blind to one column of it.

A column's gain is <w, d> / <w, w>, w the source's column times its scale, d the stored one: near 1, whatever the solver, since the errors
of a column's weights have no reason to follow them. Columns that are small beside the steps of their groups say nothing and are not asked.
On three layers of Gemma 3 270M in int4 g128, smoothed and solved by GPTQ: 0.76 (a column that is clipped) to 1.08; rows of up_proj, 0.89
to 1.04. So a norm's channel that was changed alone is found from about a factor of 1.7 up or down; the seal finds the rest.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gemq.errors import UsageError
from gemq.quantize.architectures import architecture_of
from gemq.quantize.audit import Tensor, Unit
from gemq.quantize.pairs import Pairs
from gemq.quantize.seal import Difference
from gemq.quantize.stored import Floats, decode, integers_of, read, scales_of, zero_points_of

LARGEST_SCALE = 32.0  # of a norm's channel: twice what is searched, for what rounding its weight may add
LARGEST_POWER = 4
LARGEST_DEVIATION = {4: 0.4, 8: 0.1}  # of a column's gain from 1, by bits
_LEAST_ENERGY = 6.0  # of a column, in squares of its steps over 12: below, gains are those of rounding to nothing
_PRODUCER = re.compile(r"(?P<layer>(?:.*\.)?layers\.\d+)\.(?P<path>input_layernorm|pre_feedforward_layernorm|mlp\.up_proj)\.weight$")
_CONSUMERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "pre_feedforward_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.up_proj": ("mlp.down_proj",),
}
_CHUNK_WEIGHTS = 1 << 20


@dataclass
class Smoothing:
    """By module: what its source weights are multiplied by along their columns [in] and rows [out]; the norms that may differ, by name."""

    columns: dict[str, Floats] = field(default_factory=dict)
    rows: dict[str, Floats] = field(default_factory=dict)
    norms: dict[str, Tensor] = field(default_factory=dict)  # the source's
    differences: list[Difference] = field(default_factory=list)


def smoothing_of(pairs: Pairs) -> Smoothing:
    """What the manifest declares as smoothed, checked as far as producers go; scales of what is refused are left at 1."""
    found = Smoothing()
    linears = []
    for name in sorted(pairs.manifest_names("smoothed_tensors")):
        match = _PRODUCER.match(name)
        problem = "nothing is smoothed through such a tensor" if match is None else _consumers_problem(pairs, match["layer"], match["path"])
        if not problem and match is not None:
            if match["path"] == "mlp.up_proj":
                linears.append(match["layer"])
            else:
                problem = _add_norm(found, pairs, name, _readers(pairs, match["layer"], match["path"]))
        if problem:
            found.differences.append(Difference(name, f"is declared as smoothed in the manifest, and {problem}"))
    for layer in linears:
        up, down = f"{layer}.mlp.up_proj", f"{layer}.mlp.down_proj"
        powers = _row_powers(pairs, up, found.columns.get(up))
        if np.abs(powers).max(initial=0) > LARGEST_POWER:
            row = int(np.abs(powers).argmax())
            why = f"has row {row} divided by 2^{powers[row]:.0f}, smoothing stays within 2^{LARGEST_POWER}"
            found.differences.append(Difference(f"{up}.weight", why))
            continue
        found.rows[up], found.columns[down] = np.exp2(-powers), np.exp2(powers)
    return found


def _readers(pairs: Pairs, layer: str, path: str) -> list[str]:
    """The modules whose weights a forward multiplies by the producer's output."""
    names = [f"{layer}.{consumer}" for consumer in _CONSUMERS[path]]
    return [name for name in names if f"{name}.weight" in pairs.originals and not pairs.is_redundant(f"{name}.weight")]


def _consumers_problem(pairs: Pairs, layer: str, path: str) -> str:
    readers = _readers(pairs, layer, path)
    if not readers:
        return "the source has nothing that reads its output"
    if path == "pre_feedforward_layernorm" and any(name.startswith(f"{layer}.experts.") for name in pairs.originals):
        return "stands beside a mixture of experts, whose norms are not smoothed"
    if path == "mlp.up_proj":  # its rows are scaled in their scales, whatever the numbers are that these multiply
        producer = pairs.structure.units.get(f"{layer}.{path}")
        if producer is None:
            return f"{layer}.{path} is not quantized"
        if producer.scheme.strategy == "tensor":
            return f"{layer}.{path} is {producer.scheme.label()}, and one scale for all rows can't take those of single rows"
    for name in readers:
        unit = pairs.structure.units.get(name)
        if unit is None:
            return f"{name} is not quantized"
        if unit.scheme.type != "int" or unit.scheme.format not in ("pack-quantized", "gptq"):
            return f"{name} is {unit.scheme.label()}, and only integers that meet inputs as they are are smoothed"
    return ""


def _add_norm(found: Smoothing, pairs: Pairs, name: str, readers: list[str]) -> str:
    tensor, original = pairs.structure.tensors.get(name), pairs.originals.get(name)
    if tensor is None or original is None:
        return f"the {'checkpoint' if tensor is None else 'source'} has no such tensor"
    if (tensor.dtype, tensor.shape) != (original.dtype, original.shape) or len(tensor.shape) != 1:
        return f"is {tensor.dtype} {list(tensor.shape)}, the source has {original.dtype} {list(original.shape)}"
    try:
        one_plus_w = architecture_of(pairs.source_config).norm_is_one_plus_w
    except UsageError as error:
        return error.message
    if one_plus_w is None:
        return "how this architecture's norms multiply is not known"
    ours, theirs = (decode(read(each, 0, each.nbytes), each.dtype).astype(np.float64) + float(one_plus_w) for each in (tensor, original))
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = np.where(ours == theirs, 1.0, theirs / ours)
        outside = ~((scale >= 1 / LARGEST_SCALE) & (scale <= LARGEST_SCALE))
    if outside.any():
        channel = int(outside.argmax())
        return f"divides channel {channel} by {scale[channel]:.4g}, which smoothing never does (1/{LARGEST_SCALE:g} to {LARGEST_SCALE:g})"
    if any(pairs.structure.units[reader].shape[1] != len(scale) for reader in readers):
        return f"has {len(scale)} channels, and what reads it has not"
    found.norms[name] = original
    for reader in readers:
        found.columns[reader] = scale.astype(np.float32)
    return ""


def stored_rows(unit: Unit, first: int, rows: int) -> Floats:
    """The weights [rows, in] that a unit's stored integers and scales stand for, from row `first` on."""
    groups = unit.scheme.groups(unit.shape[1])
    scales, zeros = scales_of(unit)[first : first + rows, :, None], zero_points_of(unit)
    zero = zeros[first : first + rows, :, None] if isinstance(zeros, np.ndarray) else 0.0
    return ((integers_of(unit, first, rows).reshape(rows, groups, -1) - zero) * scales).reshape(rows, -1).astype(np.float32)


def _row_powers(pairs: Pairs, module: str, columns: Floats | None) -> NDArray[np.float32]:
    unit, original = pairs.structure.units[module], pairs.originals[f"{module}.weight"]
    powers = np.zeros(unit.shape[0], np.float32)
    if original.shape != unit.shape:  # told of where the unit is compared
        return powers
    for first, w in source_rows(original, columns):
        d = stored_rows(unit, first, len(w))
        with np.errstate(divide="ignore", invalid="ignore"):
            gain = np.einsum("ri,ri->r", w, d) / np.einsum("ri,ri->r", d, d)
            powers[first : first + len(w)] = np.where(np.isfinite(gain) & (gain > 0), np.rint(np.log2(gain)), 0)
    return powers


def source_rows(original: Tensor, columns: Floats | None, rows: Floats | None = None):  # type: ignore[no-untyped-def]
    """(first row, weights) of a source's matrix in pieces, columns and rows multiplied."""
    out, inputs = original.shape
    step = max(1, _CHUNK_WEIGHTS // max(inputs, 1))
    for first in range(0, out, step):
        count = min(step, out - first)
        raw = read(original, first * original.nbytes // out, count * original.nbytes // out)
        w = decode(raw, original.dtype).reshape(count, inputs)
        w = w if columns is None else w * columns
        yield first, w if rows is None else w * rows[first : first + count, None]


def column_gains(unit: Unit, original: Tensor, columns: Floats, rows: Floats | None) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """(gain, energy) of each column: <w, d> / <w, w>, and <w, w> in squares of its steps over 12."""
    ww, wd, steps = (np.zeros(unit.shape[1]) for _ in range(3))
    width = unit.shape[1] // unit.scheme.groups(unit.shape[1])
    for first, w in source_rows(original, columns, rows):
        d = stored_rows(unit, first, len(w))
        ww += np.einsum("ri,ri->i", w, w)
        wd += np.einsum("ri,ri->i", w, d)
        steps += np.repeat((scales_of(unit)[first : first + len(w)].astype(np.float64) ** 2).sum(0), width)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(ww > 0, wd / ww, 1.0), np.where(steps > 0, 12 * ww / steps, 0.0)


def column_problem(unit: Unit, original: Tensor, columns: Floats, rows: Floats | None) -> str:
    """Which column of a smoothed unit does not bear its scale, or nothing."""
    gains, energy = column_gains(unit, original, columns, rows)
    off = (energy >= _LEAST_ENERGY) & (np.abs(gains - 1) > LARGEST_DEVIATION.get(unit.scheme.num_bits, 0.4))
    if not off.any():
        return ""
    column = int(off.argmax())
    return (f"does not bear what smoothing took from its inputs: column {column} is {gains[column]:.3g} times the source's times its scale "
            f"{columns[column]:.4g}")  # fmt: skip
