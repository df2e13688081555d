"""A checkpoint against its source, tensor by tensor: what was quantized, copied, added, dropped, and what is not what it claims to be.

What may a quantized unit differ by? Rounding to nearest stays within half a step of every weight; GPTQ moves weights further, since each
takes over the errors of those before it, so a bound for single weights would be broken by good checkpoints. What no solver changes is
how large a group is: let x be the group's source weights in steps of the stored scale, q the stored integers and r the integers that
rounding x to nearest gives. With a = <x, q> / <q, q> and a' = <x, r> / <r, r>, the group's shift is |ln(a' / a)|: 0 for rounding to
nearest, however coarse or clipped the grid, and ln f where a scale was made f times too large. A unit is named when
- its groups' shifts, as a root mean square weighted by their energy, exceed `bounds`;
- a group shifts by more than `bounds`, or is 1.9 times larger than what is stored for it (no scheme clips that far), and its error is
  over 12 times what a rounding step costs the other groups of its row: GPTQ shifts small groups as far as their neighbours' errors push
  them, and no further;
- its error is over four times that of rounding to nearest at its own scales.
Measured on GPTQ with strongly correlated inputs (power-law spectra with outliers; Gaussian and t4 weights, also clipped at 0.7 of their
range), rms and largest shift: int3 0.085 and 0.38, int4 0.055 and 0.33, int8 0.001 and 0.005; error 2.3 times that of rounding. On
Gemma 3 270M in int4 g128: rms 0.038; groups that shift by more than 0.2 have at most 5 times their neighbours' step. On a mixture's
experts, each solved on 4 to 256 tokens, in int4 g32: 0.054 and 0.33. Asymmetric targets move a row by at most 0.2 of its norm and
0.03 along itself (gptq.py): w4a16-best shifts the groups of a small untrained mixture by 0.080 and 0.34, those of a dense model by 0.083 and
0.28 at most, also where targets go all of the way. In a usual group half or double of a 4-bit scale is found, and an
eighth more of an 8-bit one. In the last groups of int4 g32 rows, which GPTQ moves most, a doubled scale is found 99 times in 100 and a
halved one 71 to 98 times, in dense matrices as in experts; the seal finds the rest.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from gemq import output
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.quantize.audit import Structure, Tensor, Unit, audit_structure, read_source_tensors
from gemq.quantize.pairs import ExpertMatrix, Pairs
from gemq.quantize.schemes import SCALE_DTYPES
from gemq.quantize.seal import Difference
from gemq.quantize.stored import Floats, decode, first_difference, integers_of, read, scales_of, zero_points_of
from gemq.quantize.verify_files import file_differences
from gemq.quantize.verify_manifest import manifest_differences
from gemq.quantize.verify_smoothing import Smoothing, column_problem, smoothing_of, source_rows

_LARGEST_CLIP = 1.9
_LARGEST_ERROR_RATIO = 4.0
_NEIGHBOURS_STEPS = 12.0
_ERROR_FLOOR = 0.004  # of the weights' norm: half a bfloat16 step, below which a ratio of errors means nothing
KINDS = ("quantized", "copied", "smoothed", "added", "dropped", "missing", "changed")


@dataclass
class Tally:
    """How many tensors of a kind (units, for the quantized), and their bytes on both sides."""

    count: int = 0
    source_bytes: int = 0
    checkpoint_bytes: int = 0

    def add(self, source_bytes: int, checkpoint_bytes: int) -> None:
        """Count one more."""
        self.count += 1
        self.source_bytes += source_bytes
        self.checkpoint_bytes += checkpoint_bytes


@dataclass(frozen=True)
class Fit:
    """How a unit lies against its source; `error` and `rounding_error` are relative Frobenius norms, shifts are in nats."""

    module: str
    scheme: str
    error: float
    rounding_error: float
    shift_rms: float
    shift_largest: float
    problem: str


@dataclass
class Comparison:
    """The table of a checkpoint against its source, every unit's fit, and what is wrong."""

    kinds: dict[str, Tally] = field(default_factory=lambda: {kind: Tally() for kind in KINDS})
    fits: list[Fit] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)


def bounds(unit: Unit) -> tuple[float, float]:
    """The largest shift allowed to the rms of a unit's groups, and to a single group; they halve with every bit.

    The extreme of many groups lies further out than that of the ten thousand measured: as the square root of their number's logarithm.
    """
    bits = 5 if unit.scheme.type == "float" else unit.scheme.num_bits
    rms = max(0.02, 0.8 / 2 ** (bits - 1))
    groups = unit.shape[0] * unit.scheme.groups(unit.shape[1])
    return rms, 5 * rms * math.sqrt(max(1.0, math.log(max(groups, 1)) / math.log(10_000)))


def verify_against_source(directory: Path, source: Path, structure: Structure | None = None) -> Comparison:
    """Compare every tensor, the config and every other file of a checkpoint with the source that it was made from.

    Raises UsageError for a source that is quantized, IntegrityError for one that is damaged.
    """
    structure = structure or audit_structure(directory)
    if not source.is_dir():
        raise UsageError(f"the source {source} is no directory", "give the directory of the unquantized model")
    originals, broken = read_source_tensors(source)
    if broken:
        raise IntegrityError(f"the source {source} is not whole: {broken[0]}", "fetch the source again")
    comparison, pairs = Comparison(), Pairs(directory, source, structure, originals)
    comparison.differences += [*file_differences(pairs, originals), *manifest_differences(pairs), *_missing_kv_scales(pairs)]
    smoothing = smoothing_of(pairs)
    comparison.differences += smoothing.differences
    jobs: list[tuple[int, Callable[[], object]]] = []
    for unit, original in pairs.units():
        jobs.append((original.nbytes, lambda unit=unit, original=original: fit_unit(unit, original, smoothing)))  # type: ignore[misc]
    copies = [(tensor, original) for tensor, original in pairs.copies() if tensor.name not in smoothing.norms]
    for name, original in smoothing.norms.items():
        comparison.kinds["smoothed"].add(original.nbytes, pairs.structure.tensors[name].nbytes)
    for tensor, original in copies:
        jobs.append((original.nbytes, lambda tensor=tensor, original=original: first_difference(tensor, original)))  # type: ignore[misc]
    results = _run(jobs)
    for (unit, original), fit in zip(pairs.units(), results, strict=False):
        assert isinstance(fit, Fit)
        comparison.fits.append(fit)
        comparison.kinds["quantized"].add(original.nbytes, sum(tensor.nbytes for tensor in unit.tensors.values()))
        if fit.problem:
            comparison.differences.append(Difference(unit.module, fit.problem))
    for (tensor, original), problem in zip(copies, results[len(comparison.fits):], strict=True):
        comparison.kinds["changed" if problem else "copied"].add(original.nbytes, tensor.nbytes)
        if problem:
            comparison.differences.append(Difference(tensor.name, str(problem)))
    _account_for_the_rest(comparison, pairs)
    comparison.differences.sort(key=lambda difference: difference.path)
    return comparison


def _account_for_the_rest(comparison: Comparison, pairs: Pairs) -> None:
    structure, kinds, wrong = pairs.structure, comparison.kinds, comparison.differences
    declared_dropped = pairs.manifest_names("dropped_tensors")
    used = {original.name for _, original in [*pairs.units(), *pairs.copies()]}
    for name, tensor in sorted(structure.tensors.items()):
        module, _, suffix = name.rpartition(".")
        paired = module in structure.units and name in pairs.in_units and pairs.original_of(f"{module}.weight") is not None
        if paired or pairs.original_of(name) is not None:
            continue
        kinds["added"].add(0, tensor.nbytes)
        comparison.added.append(name)
        if not (structure.quantization.kv_scales and suffix in ("k_scale", "v_scale")):
            wrong.append(Difference(name, "is added: the source has no such tensor"))
        elif problem := _kv_scale_problem(tensor, pairs):
            wrong.append(Difference(name, problem))
    for name, original in sorted(pairs.originals.items()):
        if name in used:
            if name in declared_dropped:
                wrong.append(Difference(name, "is declared as dropped in the manifest, and is there"))
        elif name in declared_dropped and pairs.is_redundant(name):
            kinds["dropped"].add(original.nbytes, 0)
        else:
            kinds["missing"].add(original.nbytes, 0)
            unfounded = "the manifest drops it, but the source's config does not make it redundant"
            whole = f"the source has it in {original.fused}" if isinstance(original, ExpertMatrix) else "the source has it"
            why = unfounded if name in declared_dropped else whole
            wrong.append(Difference(name, f"is missing: {why}"))
    for name in sorted(declared_dropped - set(pairs.originals)):
        why = "is there, expert by expert" if name in pairs.apart else "the source has no such tensor"
        wrong.append(Difference(name, f"is declared as dropped in the manifest, and {why}"))


def _missing_kv_scales(pairs: Pairs) -> list[Difference]:
    """The scales that a config with a kv_cache_scheme needs and the files lack: of keys and of values, for each attention that makes them."""
    if not pairs.structure.quantization.kv_scales:
        return []
    keys = [name for name in pairs.originals if name.endswith(".self_attn.k_proj.weight") and not pairs.is_redundant(name)]
    scales = sorted(f"{name.removesuffix('k_proj.weight')}{part}_scale" for name in keys for part in "kv")
    missing = [name for name in scales if name not in pairs.structure.tensors]
    if scales and missing == scales:
        return [Difference("config.json", "quantization_config has a kv_cache_scheme, and the files have no scale of keys and values")]
    return [Difference(name, "is missing: the config has a kv_cache_scheme, which needs it") for name in missing]


def _kv_scale_problem(tensor: Tensor, pairs: Pairs) -> str:
    """Why an added tensor can't be the scale of an attention's keys or values ("" if it can)."""
    attention = tensor.name.rpartition(".")[0]
    if not attention.endswith(".self_attn") or f"{attention}.q_proj.weight" not in pairs.originals:
        return "is added: the source has no attention of that name, whose keys or values it could scale"
    if tensor.dtype not in SCALE_DTYPES or tensor.shape not in ((), (1,)):
        return f"is {tensor.dtype} {list(tensor.shape)}, a scale of a KV cache is one number, {'/'.join(SCALE_DTYPES)}"
    value = float(decode(read(tensor, 0, tensor.nbytes), tensor.dtype)[0])
    return "" if 0 < value < math.inf else f"is {value}, a scale is a positive number"


def _run(jobs: list[tuple[int, Callable[[], object]]]) -> list[object]:
    """The jobs' results in their order; the largest first, on all cores, with a bar over their bytes."""
    results: list[object] = [None] * len(jobs)
    lock, rest = Lock(), [0]
    with output.progress("comparing with the source", sum(size for size, _ in jobs) // 1_000_000, "MB") as advance:

        def one(position: int) -> None:
            size, job = jobs[position]
            results[position] = job()
            with lock:
                whole, rest[0] = divmod(rest[0] + size, 1_000_000)
                if whole:
                    advance(whole)

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            list(pool.map(one, sorted(range(len(jobs)), key=lambda position: -jobs[position][0])))
    return results


def nearest_e4m3(values: Floats) -> Floats:
    """`values` rounded to the nearest finite E4M3 number."""
    _, exponent = np.frexp(values)
    step = np.ldexp(np.float32(1), np.maximum(exponent - 1, -6) - 3)
    return np.clip(np.rint(values / step) * step, -448, 448).astype(np.float32)


def fit_unit(unit: Unit, original: Tensor, smoothing: Smoothing | None = None) -> Fit:
    """How far a unit's stored weights are from the source's, and whether that is further than its scheme allows.

    With `smoothing`, from what it made of the source's.
    """
    smoothing = smoothing or Smoothing()
    columns, rows = smoothing.columns.get(unit.module), smoothing.rows.get(unit.module)
    label = unit.scheme.label()
    if original.shape != unit.shape:
        return Fit(unit.module, label, math.inf, 0, 0, 0, f"is {list(unit.shape)}, the source has {original.name} {list(original.shape)}")
    try:
        fit = _judge(unit, label, *_group_sums(unit, original, columns, rows))
        if columns is not None and not fit.problem:
            fit = replace(fit, problem=column_problem(unit, original, columns, rows))
    except GemqError as error:
        return Fit(unit.module, label, math.inf, 0, 0, 0, error.message)
    return fit


def _group_sums(
    unit: Unit, original: Tensor, columns: Floats | None = None, row_scales: Floats | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[float, float, float]]:
    """<x,x> <x,q> <q,q> <x,r> <r,r> in steps [5, groups]; squared steps [out, groups of a row]; square norms: error, rounding, weights."""
    scheme = unit.scheme
    groups = scheme.groups(unit.shape[1])
    scales = scales_of(unit)
    if not np.isfinite(scales).all() or (scales == 0).any():
        raise IntegrityError("has a scale that is zero or no finite number")
    zeros = zero_points_of(unit)
    sums, norms = [], np.zeros(3)
    for first, weights in source_rows(original, columns, row_scales):
        rows = len(weights)
        w = weights.reshape(rows, groups, -1)
        s = scales[first : first + rows, :, None]
        zero = zeros[first : first + rows, :, None] if isinstance(zeros, np.ndarray) else 0.0
        q = integers_of(unit, first, rows).reshape(w.shape) - zero
        x = w / s
        r = _rounded(unit, x, zero)
        if not np.isfinite(q).all() or not np.isfinite(w).all():
            raise IntegrityError("holds what is no finite number, or its source does")
        sums.append(np.stack([np.einsum("rgk,rgk->rg", a, b) for a, b in ((x, x), (x, q), (q, q), (x, r), (r, r))]).astype(np.float64))
        squares = s[:, :, 0].astype(np.float64) ** 2
        for number, off in enumerate((x - q, x - r, x)):
            norms[number] += float((np.einsum("rgk,rgk->rg", off, off) * squares).sum())
    joined = np.concatenate(sums, axis=1).reshape(5, -1)
    if scheme.strategy == "tensor":  # one scale for all: quiet rows may round to nothing, together they may not
        joined, scales = joined.sum(axis=1, keepdims=True), scales[:1]
    return joined, scales.astype(np.float64) ** 2, (float(norms[0]), float(norms[1]), float(norms[2]))


def _rounded(unit: Unit, x: Floats, zero: NDArray[np.float32] | float) -> Floats:
    if unit.scheme.type == "float":
        return nearest_e4m3(x)
    half = 1 << (unit.scheme.num_bits - 1)
    return (np.clip(np.rint(x + zero), -half, half - 1) - zero).astype(np.float32)


def _judge(unit: Unit, label: str, sums: NDArray[np.float64], steps: NDArray[np.float64], norms: tuple[float, float, float]) -> Fit:
    xx, xq, qq, xr, rr = (each.reshape(steps.shape) for each in sums)
    empty = (xx == 0) & (qq == 0)
    with np.errstate(divide="ignore", invalid="ignore"):
        grown = np.nan_to_num(np.where(empty, 1.0, xq / qq))
        shift = np.where(empty, 0.0, np.abs(np.log(np.where((xq > 0) & (rr > 0), xr / rr / grown, np.inf))))
    shift = np.where(np.isfinite(shift), shift, 10.0)  # nothing stored where there are weights, the reverse, or the opposite sign
    energy = (xx + qq) * steps  # of both sides, so that weights put where there were none count
    rms = math.sqrt(float((energy * shift**2).sum() / energy.sum())) if energy.any() else 0.0
    columns = unit.shape[1] // steps.shape[1]
    others = (steps.sum(axis=1, keepdims=True) - steps) / max(steps.shape[1] - 1, 1) * columns / 12
    pushed_by_neighbours = (xx - 2 * xq + qq) * steps <= _NEIGHBOURS_STEPS * others
    error, rounding, norm = norms
    relative, relative_rounding = (math.sqrt(square / norm) if norm else math.sqrt(square) for square in (error, rounding))
    allowed_rms, allowed = bounds(unit)
    allowed_error = max(_LARGEST_ERROR_RATIO * relative_rounding, _ERROR_FLOOR)
    excess = np.where(pushed_by_neighbours, 0.0, np.maximum(shift / allowed, grown / _LARGEST_CLIP))
    row, group = np.unravel_index(int(np.argmax(excess)), excess.shape)
    problem = ""
    if rms > allowed_rms:
        problem = f"its groups are shifted by {rms:.3g} (rms), {label} allows {allowed_rms:.3g}"
    elif excess[row, group] > 1:
        problem = (f"group {group} of row {row} is shifted by {shift[row, group]:.3g} and {grown[row, group]:.3g} times larger than "
                   f"stored, {label} allows {allowed:.3g} and {_LARGEST_CLIP}")
    elif relative > allowed_error:
        problem = (f"its error is {relative:.3g} of its weights, rounding to nearest gives {relative_rounding:.3g}; "
                   f"{label} allows {allowed_error:.3g}")
    problem = f"is further from the source than its scheme allows: {problem}" if problem else ""
    return Fit(unit.module, label, relative, relative_rounding, rms, float(shift.max()), problem)
