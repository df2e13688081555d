"""`plugin.py tensor`: the kernel on tensor cores checked against float64, tuned, and a step of it timed beside the plain kernel and Marlin."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gemq_int4.launch import TensorCut, matvec, tensor_expanded, tensor_matvec
from gemq_int4.layout import Layout, tile
from plugin import SIZES, Weights, compile_all, copy_tb_s, graph_us, group_of, numbers, shapes_of_a_step, step_shapes, time_cut, whole_step

MOST_MS = 3.0  # for eight rows, by the sum of single launches: a little less than Marlin's step on an H200, 3.23


def tensor_cuts(n: int, k: int) -> Iterator[TensorCut]:
    """Cuts of the tensor cores' kernel worth trying: the fewer rows, the more warps share K; the more is on its way, the more registers."""
    chunks = math.ceil(k / 128)
    fewest, most = (1, 2) if n > 100_000 else (1, 4) if n > 8192 else (min(4, chunks), 16)
    for warps, eights, parts in itertools.product((1, 2, 4, 8, 16), (2, 4), (1, 2, 4)):
        each = math.ceil(chunks / warps)
        if not fewest <= warps <= most or (eights == 4 and n <= 8192) or each % parts or each // parts > 10 or each * warps > 1.25 * chunks:
            continue
        at_once = eights * each // parts
        for registers, spread in itertools.product((0, 96, 128, 168), (False, True)):
            fewest_at_once = 0 if registers == 0 else 2 if registers <= 128 else 8
            if registers * warps * 32 <= 65536 and at_once > fewest_at_once and (registers or not spread):
                yield TensorCut(warps, eights, each // parts, registers, spread)


def choose(table: dict[str, Any], most_ms: float) -> set[str]:
    """The shapes that the tensor cores' kernel takes: where it is no slower for one row, and then, until eight rows of a step take at most
    `most_ms`, where one row loses least for what eight save."""
    taken = {key for key, entry in table.items() if entry["plain_by_m"] is None or entry["us"] <= 1.01 * entry["plain_by_m"][1]}

    def cost(key: str, m: int) -> float:
        entry = table[key]
        return float(entry["count"] * (entry["by_m"] if key in taken else entry["plain_by_m"])[m] / 1e3)

    def price(key: str) -> float:
        entry = table[key]
        return float((entry["us"] - entry["plain_by_m"][1]) / max(1e-9, entry["plain_by_m"][8] - entry["by_m"][8]))

    while sum(cost(key, 8) for key in table) > most_ms and len(taken) < len(table):
        taken.add(min(set(table) - taken, key=price))
    return taken


def take_tiles(weights: Weights, n: int, k: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    chunks = math.ceil(k / 128)
    words, scales = weights.raw(n * chunks * 16, n if group == -1 else n * k // group)
    return words.view(n // 8, chunks, 8, 4, 4), scales.view(n) if group == -1 else scales.view(n, -1)


def _compile_tensor(job: tuple[int, int, tuple[Any, ...]]) -> None:
    k, group, cut = job
    chunks = math.ceil(k / 128)
    words = torch.zeros((4, chunks, 8, 4, 4), dtype=torch.int32, device="cuda")
    scales = torch.zeros((32,) if group == -1 else (32, k // group), dtype=torch.bfloat16, device="cuda")
    tensor_matvec(torch.zeros((1, k), dtype=torch.bfloat16, device="cuda"), words, scales, None, k, group, TensorCut(*cut))
    torch.cuda.synchronize()


def check_tensor(shapes: list[tuple[int, int, int]], cut_of: Callable[[int, int, int], list[TensorCut]]) -> dict[str, Any]:
    """Every shape (N cut to 2048) and cut against float64, ten runs, and a row's bits in every batch size."""
    result: dict[str, Any] = {}
    for n, k, group in shapes:
        n = min(n, 2048)
        packed = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
        scales = (torch.rand(n, k // group if group > 0 else 1, device="cuda") * 0.02 + 1e-4).to(torch.bfloat16)
        stored = ((packed[:, :, None] >> (torch.arange(8, device="cuda", dtype=torch.int32) * 4)) & 15).reshape(n, k).double() - 8
        dense = stored * scales.double().repeat_interleave(group if group > 0 else k, 1)
        words, own = tile(packed), scales.reshape(n) if group == -1 else scales
        x = torch.randn(8, k, device="cuda", dtype=torch.bfloat16)
        expected, bias = x.double() @ dense.T, torch.randn(n, device="cuda", dtype=torch.bfloat16)
        floor = ((expected.bfloat16().double() - expected).norm() / expected.norm()).item()
        again, alike, errors = True, True, []
        for cut in cut_of(n, k, group):
            whole = tensor_matvec(x, words, own, None, k, group, cut)
            errors.append(((whole.double() - expected).norm() / expected.norm()).item())
            again &= all(torch.equal(tensor_matvec(x, words, own, None, k, group, cut), whole) for _ in range(10))
            alike &= all(torch.equal(tensor_matvec(x[first : first + m], words, own, None, k, group, cut), whole[first : first + m])
                         for m in range(1, 8) for first in (0, 8 - m))  # fmt: skip
            biased = tensor_matvec(x, words, own, bias, k, group, cut, torch.float32)
            errors.append(10 * ((biased.double() - expected - bias.double()).norm() / expected.norm()).item())
        weights = tensor_expanded(words, own, k, group)
        result[f"{n},{k},{group}"] = {"error": max(errors[::2]), "error_fp32": max(errors[1::2]) / 10, "rounding": floor, "repeatable": again,
                                      "rows_alike": alike, "expanded": torch.equal(weights, dense.bfloat16())}  # fmt: skip
        print(f"{n:6d} x {k:5d} g{group:4d}: {result[f'{n},{k},{group}']}", flush=True)
    return result


def tune_tensor(shapes: dict[tuple[int, int, int], int], weights: Weights, seconds: float, processes: int) -> dict[str, Any]:
    """The best cut of every shape for one row, and what it takes for 2, 4 and 8."""
    began, table = time.monotonic(), {}
    jobs = {(k, group, dataclasses.astuple(cut)): None for n, k, group in shapes for cut in tensor_cuts(n, k)}
    print(f"{len(jobs)} tensor kernels to compile", flush=True)
    compile_all(list(jobs), processes, began + seconds * 0.6, _compile_tensor)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)

    def timed(n: int, k: int, group: int, cut: TensorCut, m: int) -> float:
        count = max(8, min(300, int(2e8 / (n * k / 2))))
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        takes = [take_tiles(weights, n, k, group) for _ in range(count)]
        return graph_us([lambda t=t: tensor_matvec(x, *t, None, k, group, cut) for t in takes]) / count

    plain = shipped(torch.cuda.get_device_name())
    for (n, k, group), count in sorted(shapes.items(), key=lambda pair: -pair[1] * pair[0][0] * pair[0][1]):  # what weighs most first
        found = []
        for cut in tensor_cuts(n, k):
            if time.monotonic() - began > seconds and found:
                break
            found.append((timed(n, k, group, cut, 1), cut))
        found.sort(key=lambda pair: pair[0])
        us, best = found[0]
        size = n * k / 2 + (n * k / 64 if group > 0 else 2 * n)
        by_m = {1: us, **{m: timed(n, k, group, best, m) for m in SIZES[1:]}}
        other = plain.get(f"{n},{k},{group}")
        plain_by_m = {m: time_cut(weights, n, Layout(4, k, group), other["by_m"][m][1], m) for m in SIZES} if other else None
        table[f"{n},{k},{group}"] = {"plain_by_m": plain_by_m, "us": us, "cut": best, "count": count, "by_m": by_m,
                                     "all": [(round(each, 2), numbers(cut)) for each, cut in found[:12]]}  # fmt: skip
        ranked = "  ".join(f"{each:.2f} {'/'.join(str(int(each)) for each in numbers(cut))}" for each, cut in found[:5])
        others = [round(each, 2) for each in plain_by_m.values()] if plain_by_m else None
        rate = f"{us:7.2f} us {size / us / 1e6:5.2f} TB/s  m8 {by_m[8]:.2f}  plain {others}"
        print(f"{n:7d} x {k:5d} g{group:4d} x{count:3d}: {rate}  {ranked}  ({len(found)} tried)", flush=True)
    return table


def tensor_step(table: dict[str, Any], m: int, plain: dict[str, Any] | None = None, taken: set[str] | None = None) -> dict[str, float]:
    """As `whole_step`, by the tensor cores' kernel; if `plain` cuts are given, by the plain one for all shapes but `taken`."""
    weights, calls = Weights(sum(n * k // 8 for _, n, k in step_shapes()) + (1 << 20)), []
    for name, n, k in step_shapes():
        group = group_of(name)
        if plain and taken is not None and f"{n},{k},{group}" not in taken:
            layout, other = Layout(4, k, group), plain[f"{n},{k},{group}"]["by_m"][m][1]
            x, own = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), weights.take(n, layout)
            calls.append(lambda x=x, own=own, layout=layout, other=other: matvec(x, *own, None, layout, other))
            continue
        cut, x, tiles = table[f"{n},{k},{group}"]["cut"], torch.randn(m, k, device="cuda", dtype=torch.bfloat16), take_tiles(weights, n, k, group)
        calls.append(lambda x=x, tiles=tiles, k=k, group=group, cut=cut: tensor_matvec(x, *tiles, None, k, group, cut))
    return {"ms": graph_us(calls, 10) / 1e3, "ms_without_head": graph_us(calls[:-1], 10) / 1e3}


def marlin_step(m: int) -> dict[str, float]:
    """As `whole_step`, by vLLM's Marlin (what a step takes there doesn't depend on the words, so that they are random)."""
    from vllm import _custom_ops as ops
    from vllm.model_executor.layers.quantization.utils.marlin_utils import marlin_make_workspace_new
    from vllm.scalar_type import scalar_types

    device = torch.device("cuda:0")
    empty, workspace, calls = torch.empty(0, dtype=torch.int32, device=device), marlin_make_workspace_new(device), []
    weights = Weights(sum(n * k // 8 for _, n, k in step_shapes()) + (1 << 20))
    for name, n, k in step_shapes():
        words = weights.raw(n * k // 8, 1)[0].view(k // 16, n * 2)
        groups = 1 if group_of(name) == -1 else k // 128
        scales = torch.rand(groups, n, device=device).to(torch.bfloat16)
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        calls.append(lambda x=x, w=words, s=scales, n=n, k=k: ops.marlin_gemm(
            x, None, w, None, s, None, None, empty, empty, empty, workspace, scalar_types.uint4b8, size_m=m, size_n=n, size_k=k, is_k_full=True,
            use_atomic_add=False, use_fp32_reduce=True, is_zp_float=False))  # fmt: skip
    return {"ms": graph_us(calls, 10) / 1e3, "ms_without_head": graph_us(calls[:-1], 10) / 1e3}


def shipped(card: str) -> dict[str, Any]:
    """The plain kernel's tuned cuts for `card`, as `whole_step` takes them; empty without any."""
    from gemq_int4.cuts import tuned

    return {f"{n},{k},{group}": {"by_m": {m: (0.0, cut) for m, cut in by_m.items()}} for (_, n, k, group), by_m in tuned(card)[0].items()}


def tensor(args: argparse.Namespace) -> None:
    """Check, tune and time the tensor cores' kernel; then a step by the plain kernel and by Marlin, side by side."""
    shapes = shapes_of_a_step()
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy_tb_s": copy_tb_s()}
    torch.cuda.empty_cache()
    args.out.mkdir(parents=True, exist_ok=True)
    some = [(256, 512, 128), (264, 2560, 64), (2048, 2560, 32), (72, 544, -1)]
    result["first_check"] = check_tensor(some, lambda n, k, group: [TensorCut(1, 2, 1), TensorCut(2, 4, 1, 128, True), TensorCut(4, 2, 1)])
    weights = Weights()
    table = tune_tensor(shapes, weights, args.seconds, args.processes)
    del weights
    result["shapes"] = {key: {**entry, "cut": numbers(entry["cut"])} for key, entry in table.items()}
    taken = choose(table, MOST_MS)
    tuned = {key: entry["cut"] for key, entry in result["shapes"].items() if key in taken}
    (args.out / "tuned_tensor.json").write_text(json.dumps({"card": result["card"], "tensor": tuned}, indent=1))
    result["check"] = check_tensor(list(shapes), lambda n, k, group: [table[key]["cut"] for key in table if key.endswith(f",{k},{group}")])
    result["step"] = {"tensor": {m: tensor_step(table, m) for m in SIZES}}
    plain = shipped(result["card"])
    for name, step in (("both", lambda m: tensor_step(table, m, plain, taken)), ("plain", lambda m: whole_step(plain, m)), ("marlin", marlin_step)):
        try:
            result["step"][name] = {m: step(m) for m in SIZES}
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    (args.out / "tensor.json").write_text(json.dumps(result, indent=1))
    for name, by_m in result["step"].items():
        print(name, *(f"m{m} {one['ms']:.3f} ms ({one['ms_without_head']:.3f} without the head)" for m, one in by_m.items()))
    print("sum of shapes:", {m: round(sum(e["by_m"][m] * e["count"] for e in table.values()) / 1e3, 3) for m in SIZES}, flush=True)
