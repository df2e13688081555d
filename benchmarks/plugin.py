"""The int4 plugin's kernels on a card: E4B's linears checked, timed, and the tuned cuts written. The engine's part: plugin_engine.py.

    PYTHONPATH=serve/plugin[:A_SITE_WITH_VLLM] python benchmarks/plugin.py plain|tensor --seconds 120 --out "$OUT"

It needs torch and triton; `tensor` (plugin_tensor.py) times Marlin too where vLLM can be imported. Every shape runs in a CUDA graph over weights
that don't fit the cache; the whole step is one graph of every decoder linear and the head in their order, each with weights of its own, as in a
decoding step.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gemq_int4.launch import Cut, TensorCut, matvec
from gemq_int4.layout import Layout, arrange, restore

SIZES = (1, 2, 4, 8)
POOL_WORDS = 100_000_000  # 400 MB, several times the cache
LAYERS = 42


def step_shapes() -> list[tuple[str, int, int]]:
    """(name, N, K) of a decoding step's linears, in order: E4B's 42 layers, every sixth full, the last 18 without keys and values."""
    found = [("per_layer_model_projection", 10752, 2560)]
    for layer in range(LAYERS):
        head = 512 if layer % 6 == 5 else 256
        found += [("qkv", 8 * head + (0 if layer >= 24 else 4 * head), 2560), ("o", 2560, 8 * head), ("gate_up", 20480, 2560),
                  ("down", 2560, 10240), ("ple_gate", 256, 2560), ("ple_projection", 2560, 256)]  # fmt: skip
    return [*found, ("head", 262144, 2560)]


def group_of(name: str) -> int:
    """The body's groups are 128, the head has one scale a row, as in the recipes."""
    return -1 if name == "head" else 128


def shapes_of_a_step() -> dict[tuple[int, int, int], int]:
    """(N, K, group) of a step's linears -> how many there are."""
    return Counter((n, k, group_of(name)) for name, n, k in step_shapes())


def cuts(layout: Layout, n: int, blocks: tuple[int, ...] = (1, 2, 4, 8)) -> Iterator[Cut]:
    """Cuts worth trying: enough programs to fill the card, no more of K at once than there is."""
    for rows, wide, warps, (round_, registers) in itertools.product((1, 2, 4, 8), blocks, (1, 2, 4, 8), ((False, 0), (True, 0), (True, 128))):
        rounds = -(-layout.blocks // wide)
        if round_ and (rounds == 1 or rounds > 10 or registers * warps * 32 > 65536):
            continue
        cut = Cut(rows, wide, warps, 1, rounds if round_ else 1, registers)
        if not cut.fits(layout) or wide >= 2 * layout.blocks:
            continue
        programs = n / cut.program_rows(layout)
        if programs < min(100, n / 4) or programs > 20_000:
            continue
        yield cut


class Weights:
    """Random words and scales, cut for any shape from one pool, each time from another place of it."""

    def __init__(self, words: int = POOL_WORDS) -> None:
        self.words = torch.randint(-(2**31), 2**31 - 1, (words,), dtype=torch.int32, device="cuda")
        self.scales = (torch.rand(words // 8, device="cuda") * 0.01 + 0.001).to(torch.bfloat16)
        self.at = self.at_scales = 0

    def take(self, n: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        words, scales = self.raw(n * layout.blocks * layout.lanes * 4, n * layout.blocks * 4 * layout.groups if layout.groups else n)
        return words.view(n, layout.blocks, layout.lanes, 4), scales.view((n, layout.blocks, layout.groups, 4) if layout.groups else (n,))

    def raw(self, size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """That many words and scales, from where the last ones ended."""
        if self.at + size > self.words.numel():
            self.at = 0
        if self.at_scales + count > self.scales.numel():
            self.at_scales = 0
        words, scales = self.words[self.at : self.at + size], self.scales[self.at_scales : self.at_scales + count]
        self.at, self.at_scales = self.at + -(-size // 64) * 64, self.at_scales + -(-count // 64) * 64
        return words, scales


def graph_us(calls: list[Callable[[], Any]], repeats: int = 3) -> float:
    """Microseconds of one replay of a graph of `calls`: the best of `repeats`."""
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    best = float("inf")
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(end) * 1e3)
    return best


def time_cut(weights: Weights, n: int, layout: Layout, cut: Cut, m: int) -> float:
    """Microseconds a launch."""
    bytes_ = n * layout.blocks * layout.lanes * 16
    count = max(8, min(300, int(2e8 / bytes_)))
    x = torch.randn(m, layout.k, device="cuda", dtype=torch.bfloat16)
    takes = [weights.take(n, layout) for _ in range(count)]
    return graph_us([lambda t=t: matvec(x, *t, None, layout, cut) for t in takes]) / count


def _compile(job: tuple[int, int, int, int, tuple[int, ...]]) -> None:
    """Compile one cut into Triton's cache (in a process of its own), for `cuts` to be timed without waiting."""
    bits, k, group, m, cut = job
    layout = Layout(bits, k, group)
    words = torch.zeros((1, layout.blocks, layout.lanes, 4), dtype=torch.int32, device="cuda")
    scales = torch.zeros((1, layout.blocks, layout.groups, 4) if layout.groups else (1,), dtype=torch.bfloat16, device="cuda")
    n = 16  # N's divisibility by 16 is part of what is compiled
    x, many = torch.zeros((m, k), dtype=torch.bfloat16, device="cuda"), words.expand(n, -1, -1, -1).contiguous()
    matvec(x, many, scales.expand(n, *scales.shape[1:]).contiguous(), None, layout, Cut(*cut))
    torch.cuda.synchronize()


def compile_all(jobs: list[Any], processes: int, until: float, compile_one: Callable[[Any], None] = _compile) -> None:
    """Compile all `jobs` side by side, until `until` at the latest."""
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(compile_one, job) for job in jobs]
        try:
            for done in concurrent.futures.as_completed(waiting, timeout=max(1.0, until - time.monotonic())):
                if done.exception():
                    print("compile:", str(done.exception())[:200], flush=True)
        except TimeoutError:
            print("compile: out of time", flush=True)
            pool.shutdown(wait=False, cancel_futures=True)


def numbers(cut: Cut | TensorCut) -> list[int]:
    """A cut as tuned/*.json has it."""
    return list(dataclasses.astuple(cut))


def job_of(layout: Layout, m: int, cut: Cut) -> tuple[Any, ...]:
    return (layout.bits, layout.k, layout.group, m, tuple(numbers(cut)))


def tune(shapes: dict[tuple[int, int, int], int], weights: Weights, seconds: float, processes: int) -> dict[str, Any]:
    """The best cut of every (N, K, group), by batch size; the time is spent by what a shape weighs in a step."""
    began, table = time.monotonic(), {}
    jobs: dict[Any, None] = {}
    for n, k, group in shapes:
        jobs.update({job_of(Layout(4, k, group), 1, cut): None for cut in cuts(Layout(4, k, group), n)})
    print(f"{len(jobs)} kernels to compile", flush=True)
    compile_all(list(jobs), processes, began + seconds * 0.55)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for (n, k, group), count in shapes.items():
        layout, found = Layout(4, k, group), []
        for cut in cuts(layout, n):
            if time.monotonic() - began > seconds and found:
                break
            try:
                found.append((time_cut(weights, n, layout, cut, 1), cut))
            except Exception as error:
                print(f"{n}x{k} {cut}: {str(error)[:150]}", flush=True)
        found.sort(key=lambda pair: pair[0])
        size = n * k / 2 + (n * k / 64 if group > 0 else 2 * n)
        best = found[0]
        table[f"{n},{k},{group}"] = {"us": best[0], "cut": best[1], "count": count, "tb_s": size / best[0] / 1e6,
                                     "all": [(round(us, 2), numbers(cut)) for us, cut in found]}  # fmt: skip
        ranked = "  ".join(f"{us:.2f} {numbers(cut)}" for us, cut in found[:4])
        print(f"{n:7d} x {k:5d} g{group:4d} x{count:3d}: {best[0]:7.2f} us {size / best[0] / 1e6:5.2f} TB/s   {ranked}  ({len(found)} tried)",
              flush=True)  # fmt: skip
    return table


def batches(table: dict[str, Any], weights: Weights, seconds: float, processes: int) -> None:
    """Add the cuts of batches 2, 4 and 8 to `table`: as many blocks of K at once as for one row, so that a row's bits stay the same."""
    began, jobs = time.monotonic(), {}
    options: dict[str, list[Cut]] = {}
    for key, entry in table.items():
        n, k, group = map(int, key.split(","))
        layout, one = Layout(4, k, group), entry["cut"]
        options[key] = [cut for cut in cuts(layout, n, (one.blocks,))
                        if cut.rows <= 4 and cut.unroll in (1, one.unroll) and cut.warps in (one.warps, 4)]  # fmt: skip
        if one not in options[key]:
            options[key].append(one)
        for m in SIZES[1:]:
            jobs.update({job_of(layout, m, cut): None for cut in options[key] if cut.rows * m <= 16})
    print(f"{len(jobs)} kernels to compile for batches", flush=True)
    compile_all(list(jobs), processes, began + seconds * 0.6)
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    for key, entry in table.items():
        n, k, group = map(int, key.split(","))
        layout = Layout(4, k, group)
        entry["by_m"] = {1: (entry["us"], entry["cut"])}
        for m in SIZES[1:]:
            found = []
            for cut in options[key]:
                if cut.rows * m > 16 or (time.monotonic() - began > seconds and found):
                    continue
                try:
                    found.append((time_cut(weights, n, layout, cut, m), cut))
                except Exception as error:
                    print(f"{key} m{m} {cut}: {str(error)[:150]}", flush=True)
            entry["by_m"][m] = min(found, key=lambda pair: pair[0])
        print(f"{key:18s} " + "  ".join(f"m{m} {us:7.2f} {numbers(cut)}" for m, (us, cut) in entry["by_m"].items()), flush=True)


def check(table: dict[str, Any]) -> dict[str, Any]:
    """Every shape (N cut to 4096) against float64, the same bits in ten runs, and the same bits of a row in every batch."""
    from random import Random

    draw, result = Random(0), {}
    for key, entry in table.items():
        n, k, group = map(int, key.split(","))
        n, layout = min(n, 4096), Layout(4, k, group)
        packed = torch.randint(-(2**31), 2**31 - 1, (n, k // 8), dtype=torch.int32, device="cuda")
        scales = (torch.rand(n, k // group if group > 0 else 1, device="cuda") * 0.02 + 1e-4).to(torch.bfloat16)
        words, arranged = arrange(packed, scales, layout)
        dense = restore(words, arranged.double(), layout)
        x = torch.randn(8, k, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ dense.T
        single = torch.cat([matvec(x[i : i + 1], words, arranged, None, layout, entry["by_m"][1][1]) for i in range(8)])
        error = ((single.double() - expected).norm() / expected.norm()).item()
        floor = ((expected.bfloat16().double() - expected).norm() / expected.norm()).item()
        again = all(torch.equal(matvec(x[:1], words, arranged, None, layout, entry["by_m"][1][1]), single[:1]) for _ in range(10))
        same = {}
        for m in range(2, 9):
            first = draw.randrange(0, 9 - m)
            cut = entry["by_m"][1 << (m - 1).bit_length()][1]
            same[m] = torch.equal(matvec(x[first : first + m], words, arranged, None, layout, cut), single[first : first + m])
        result[key] = {"error": error, "rounding": floor, "repeatable": again, "rows_alike": all(same.values()), "by_m": same}
        print(f"{key:18s} error {error:.3e} (rounding alone {floor:.3e}) repeatable {again} rows alike {same}", flush=True)
    return result


def whole_step(table: dict[str, Any], m: int) -> dict[str, float]:
    """Milliseconds of all of a step's linears for m rows, each with weights of its own, and of the same graph without the head."""
    total = sum(n * k // 8 for _, n, k in step_shapes())
    weights, calls = Weights(total + (1 << 20)), []
    for name, n, k in step_shapes():
        layout = Layout(4, k, group_of(name))
        cut = table[f"{n},{k},{group_of(name)}"]["by_m"][m][1]
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        taken = weights.take(n, layout)
        calls.append(lambda x=x, taken=taken, layout=layout, cut=cut: matvec(x, *taken, None, layout, cut))
    return {"ms": graph_us(calls, 10) / 1e3, "ms_without_head": graph_us(calls[:-1], 10) / 1e3, "launches": len(calls), "gb": total * 4 / 1e9}


def empty_launches() -> float:
    """Microseconds of a launch that does next to nothing, in a graph: what a launch costs."""
    layout, cut = Layout(4, 256, -1), Cut(1, 1, 1, 1)
    words = torch.zeros((4, 1, 8, 4), dtype=torch.int32, device="cuda")
    x, scales = torch.zeros((1, 256), dtype=torch.bfloat16, device="cuda"), torch.zeros(4, dtype=torch.bfloat16, device="cuda")
    return graph_us([lambda: matvec(x, words, scales, None, layout, cut)] * 200) / 200


def copy_tb_s() -> float:
    """The card's copy bandwidth, bytes read and written."""
    a = torch.empty(1 << 30, dtype=torch.int32, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() * 4 / graph_us([lambda: b.copy_(a)], 5) / 1e6


def kernels(args: argparse.Namespace) -> None:
    shapes = {shape: count for shape, count in shapes_of_a_step().items() if not args.only or f"{shape[0]}x{shape[1]}" in args.only}
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "copy_tb_s": copy_tb_s()}
    torch.cuda.empty_cache()
    result["launch_us"] = empty_launches()
    print(result, flush=True)
    weights = Weights()
    table = tune(shapes, weights, args.seconds, args.processes)
    batches(table, weights, args.seconds / 2, args.processes)
    result["check"] = check(table)
    del weights
    if not args.only:
        result["step"] = {m: whole_step(table, m) for m in SIZES}
        print(json.dumps(result["step"], indent=1), flush=True)
    tuned = {key: {str(m): numbers(cut) for m, (_, cut) in entry["by_m"].items()} for key, entry in table.items()}
    result["shapes"] = {key: {"us": {m: us for m, (us, _) in entry["by_m"].items()}, "count": entry["count"], "tb_s": entry["tb_s"],
                              "all": entry["all"][:12]} for key, entry in table.items()}  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "kernels.json").write_text(json.dumps(result, indent=1))
    (args.out / "tuned.json").write_text(json.dumps({"card": result["card"], "bits": 4, "cuts": tuned}, indent=1))
    print(f"sum of shapes: {sum(e['us'] * e['count'] for e in table.values()) / 1e3:.3f} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kernel", choices=("plain", "tensor"), help="which kernel to check, tune and time")
    parser.add_argument("--seconds", type=float, default=120, help="for tuning")
    parser.add_argument("--only", nargs="*", help="shapes as 2560x10240, of the plain kernel")
    parser.add_argument("--processes", type=int, default=min(14, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if args.kernel == "tensor":
        from plugin_tensor import tensor

        tensor(args)
    else:
        kernels(args)


if __name__ == "__main__":
    main()
