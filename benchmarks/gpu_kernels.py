"""The walk's GPU kernels beside what they stand for: the solver's loops on the CPU, Hessians in float64; and how long each step of a solve takes.

Sums of another order make another tie here and there, and GPTQ carries each on through the rest of its row: so rows that differ are counted, and
the objective is compared. Ends with 1 where one in ten rows differs or the objective by a thousandth, or where sums of products are further from
float64's than 1e-4 (2e-5 is what tensor cores drop as they add up), those of float32 in parts than 1e-5.
`--profile LAYERS` quantizes a slice in this process and prints where the device's and the host's time goes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.quantize import gptq, refine, sweep_triton
from gemq.quantize.phases import Phases
from gemq.quantize.products import add_crossed, add_product, product
from gemq.quantize.scales import find_scales
from gemq.recipes.model import Gptq, WeightScheme

_SCHEME = WeightScheme(num_bits=4, strategy="group", group_size=128, observer="mse")


def timed(call: Callable[[], Any]) -> float:
    """Milliseconds of `call`, the median of three after one."""
    taken = []
    for _ in range(4):
        torch.cuda.synchronize()
        started = time.perf_counter()
        call()
        torch.cuda.synchronize()
        taken.append((time.perf_counter() - started) * 1000)
    return sorted(taken[1:])[1]


def inputs(tokens: int, size: int, seed: int = 0) -> torch.Tensor:
    """Correlated inputs with a few large channels, bfloat16, on the card."""
    draw = torch.Generator("cuda").manual_seed(size + seed)
    mixed = torch.randn(tokens, 64, generator=draw, device="cuda") @ torch.randn(64, size, generator=draw, device="cuda") / 8
    spread = torch.exp(torch.randn(size, generator=draw, device="cuda"))
    return ((mixed + torch.randn(tokens, size, generator=draw, device="cuda")) * spread).to(torch.bfloat16)


def check_solver(size: int, out: int) -> dict[str, tuple[float, float]]:
    """Share of `out` rows that kernels and CPU loops round differently, and the relative difference of the objective, of each loop."""
    x = inputs(8192, size)
    hessian = gptq.Hessian(size, "cuda")
    hessian.add(x)
    moments = hessian.mean("check")
    weight = torch.randn(out, size, device="cuda", generator=torch.Generator("cuda").manual_seed(1)) / size**0.5
    made = gptq.factorize(moments, Gptq(), "check")
    scales = find_scales(weight, _SCHEME, moments.diagonal())
    columns = scales.repeat_interleave(_SCHEME.group_size, 1).index_select(1, made.order)
    ordered = weight.index_select(1, made.order)
    ours = gptq._sweep(ordered, made.factor, columns, _SCHEME, 128)
    theirs = gptq._sweep(ordered.cpu(), made.factor.cpu(), columns.cpu(), _SCHEME, 128)
    plain = scales.repeat_interleave(_SCHEME.group_size, 1)

    def compared(first: torch.Tensor, second: torch.Tensor) -> tuple[float, float]:
        costs = [(((weight - made) @ moments) * (weight - made)).sum().item() for made in (first, second)]
        rows = ((first - second).abs() > plain.abs() / 2).any(1).float().mean().item()
        return rows, abs(costs[0] - costs[1]) / costs[1]

    back = torch.argsort(made.order)
    found = {"sweep": compared(ours.index_select(1, back), theirs.cuda().index_select(1, back))}
    integers = (weight.div(scales.repeat_interleave(_SCHEME.group_size, 1))).round().clamp(-8, 7)
    damping = 0.01 * moments.diagonal().mean()
    mine = refine._descend(weight, integers.clone(), scales, moments, damping, _SCHEME, 128)
    other = refine._descend(weight.cpu(), integers.cpu(), scales.cpu(), moments.cpu(), damping.cpu(), _SCHEME, 128)
    found["descent"] = compared(mine * plain, other.cuda() * plain)
    return found


def check_hessian(size: int, tokens: int) -> dict[str, tuple[float, float]]:
    """Relative distance to float64 and milliseconds of X^T X by the kernel and by torch's products."""
    x = inputs(tokens, size)
    exact = torch.zeros(size, size, dtype=torch.float64, device="cuda")
    for piece in x.split(2048):
        exact += piece.double().T @ piece.double()
    exact.triu_()
    made: dict[str, tuple[float, float]] = {}

    def far(total: torch.Tensor) -> float:
        return ((total.triu().double() - exact).norm() / exact.norm()).item()

    total = torch.zeros(size, size, device="cuda")
    sweep_triton.add_outer_products(total, x, 512)
    made["kernel, bfloat16"] = far(total), timed(lambda: sweep_triton.add_outer_products(total, x, 512))
    wide = x.float()
    for name, tf32 in (("float32 product", False), ("TF32 product", True)):
        torch.backends.cuda.matmul.allow_tf32 = tf32
        made[name] = far(wide.T @ wide), timed(lambda: wide.T @ wide)
    torch.backends.cuda.matmul.allow_tf32 = False

    def mixed() -> torch.Tensor:
        return torch.mm(x.T, x, out_dtype=torch.float32)

    made["bfloat16 product, float32 out"] = far(mixed()), timed(mixed)
    moments, weight = total / tokens, torch.randn(2048, size, device="cuda")
    reference = weight.double() @ moments.double()
    integers = weight.mul(4).round()
    short = integers.double() @ moments.double()

    def off(found: torch.Tensor, expected: torch.Tensor) -> float:
        return ((found.double() - expected).norm() / expected.norm()).item()

    made["2048 rows @ H, torch"] = off(weight @ moments, reference), timed(lambda: weight @ moments)
    made["2048 rows @ H, three TF32 products"] = off(product(weight, moments), reference), timed(lambda: product(weight, moments))
    found = product(integers, moments, left_is_short=True)
    made["2048 rows of integers @ H, two"] = off(found, short), timed(lambda: product(integers, moments, left_is_short=True))
    # as the source's inputs differ from those of the quantized model
    y = (wide + 0.05 * inputs(tokens, size, seed=1).float()).to(torch.bfloat16)
    apart = y.float().sub(wide).T
    crossed = sum(left.double() @ right.double() for left, right in zip(apart.split(2048, 1), wide.split(2048), strict=True))

    def cross(short: bool) -> torch.Tensor:
        found = torch.zeros(size, size, device="cuda")
        add_product(found, apart, wide, right_is_short=short)
        return found

    made["(Y - X)^T X, torch"] = off(apart @ wide, crossed), timed(lambda: apart @ wide)
    made["(Y - X)^T X, two TF32 products"] = off(cross(True), crossed), timed(lambda: cross(True))
    made["(Y - X)^T X, three"] = off(cross(False), crossed), timed(lambda: cross(False))

    def halved() -> torch.Tensor:
        found = torch.zeros(size, size, device="cuda")
        add_crossed(found, x, y)
        return found

    made["(Y - X)^T X, bfloat16 halves"] = off(halved(), crossed), timed(halved)
    phases = Phases("cuda")
    with phases("whole"):
        for _ in range(10):
            with phases.on_device("kernel"):
                sweep_triton.add_outer_products(total, x, 512)
    made["kernel by gemq's own phases, 10 times"] = 0.0, phases.seconds["kernel"] * 100
    return made


def solver_steps(size: int, out: int) -> list[tuple[str, str]]:
    """Milliseconds of each step of solving a unit of `size` inputs and `out` outputs."""
    x = inputs(8192, size)
    hessian = gptq.Hessian(size, "cuda")
    hessian.add(x)
    moments = hessian.mean("steps")
    weight = torch.randn(out, size, device="cuda") / size**0.5
    made = gptq.factorize(moments, Gptq(), "steps")
    scales = find_scales(weight, _SCHEME, moments.diagonal())
    columns = scales.repeat_interleave(_SCHEME.group_size, 1)
    integers = weight.div(columns).round().clamp(-8, 7)
    damping = 0.01 * moments.diagonal().mean()
    goal = weight @ moments
    steps: dict[str, Callable[[], Any]] = {
        "factorize": lambda: gptq.factorize(moments, Gptq(), "steps"),
        "scales": lambda: find_scales(weight, _SCHEME, moments.diagonal()),
        "sweep": lambda: gptq._sweep(weight, made.factor, columns, _SCHEME, 128),
        "fit scales": lambda: refine._fit_scales(weight, goal, integers, scales, moments, damping),
        "descend": lambda: refine._descend(weight, integers, scales, moments, damping, _SCHEME, 128),
        "solve, whole": lambda: gptq.solve(weight, made, _SCHEME),
        "output error": lambda: gptq.output_error(weight, integers.to(torch.int8), scales, _SCHEME, moments),
    }
    found = [(name, f"{timed(call):.2f}") for name, call in steps.items()]
    chosen = sweep_triton._launch
    for rows in (8, 16, 32):
        for warps in (1, 2, 4):
            sweep_triton._launch = lambda out, rows=rows, warps=warps: {"ROWS": rows, "num_warps": warps}  # type: ignore[misc]
            found.append((f"sweep and descend, {rows} rows, {warps} warps", f"{timed(steps['sweep']):.2f} {timed(steps['descend']):.2f}"))
    sweep_triton._launch = chosen
    return found


def profile(source: Path, ids: Path, samples: int, out: Path, recipe: str) -> None:
    """Quantize `source` in this process under torch's profiler; prints the largest entries."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    from gemq.calibration.sets import load_calibration
    from gemq.quantize.job import Job
    from gemq.quantize.plan import make_plan
    from gemq.quantize.run import quantize
    from gemq.quantize.skeleton import load_skeleton
    from gemq.recipes.model import load_recipe
    from gemq.source import Source

    skeleton, reader = load_skeleton(source)
    assert reader is not None
    windows = load_calibration(str(ids), model_dir=source, samples=samples, length=2048, seed=0)
    job = Job(Source(source.name, "local", source, None), make_plan(skeleton, load_recipe(recipe)), reader, windows, out, 0, "cuda")
    with profiled(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        made = quantize(job)
    output.note(", ".join(f"{name} {seconds:.2f}" for name, seconds in sorted(made.phases.items(), key=lambda item: -item[1])))
    averages = seen.key_averages()
    output.note(averages.table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=60))
    output.note(averages.table(sort_by="self_cpu_time_total", row_limit=20, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=int, metavar="LAYERS")
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--recipe", default="w4a16")
    parser.add_argument("--work", type=Path)
    options = parser.parse_args()
    if options.profile:
        from benchmarks.gpu import build, e4b_config
        from benchmarks.slice import write_ids

        options.work.mkdir(parents=True, exist_ok=True)
        source = build(options.work / f"e4b-{options.profile}", options.profile)
        write_ids(options.work / "ids.jsonl", options.samples, 2048, e4b_config()["vocab_size"])
        profile(source, options.work / "ids.jsonl", options.samples, options.work / "profiled", options.recipe)
        return
    failed = False
    for size, out in ((128, 256), (2560, 256), (2048, 100)):
        for loop, (rows, cost) in check_solver(size, out).items():
            output.note(f"{size} inputs, {out} rows, {loop}: {rows:.1%} of the rows differ from the CPU's, the objective by {cost:.1e}")
            failed |= rows > 0.1 or cost > 1e-3
    for size in (2560, 10240):
        found = check_hessian(size, 8192)
        for name, (error, taken) in found.items():
            output.note(f"X^T X of 8192 x {size}, {name}: {error:.2e} from float64, {taken:.2f} ms")
        failed |= not all(error < (1e-5 if "TF32 products" in name else 1e-4) for name, (error, _) in found.items())
    for size, out in ((2560, 20480), (10240, 2560)):
        output.table(f"a unit of {size} inputs and {out} outputs, ms", ("step", "ms"), solver_steps(size, out))
    sys.exit(failed)


if __name__ == "__main__":
    main()
