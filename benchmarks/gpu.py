"""E4B's whole decoder on a GPU: seconds from command to sealed checkpoint by recipe and phase, and what that is of what the card can do.

The weights are random (normal, of a trained model's size) in E4B's exact shapes, text decoder with its tables and without towers, made on the
machine. Calibration: random ids, 128 windows of 2,048. Phases are gemq's own; those named "beside" are seconds of threads that work while
the main thread does something else. What the machine can do is measured in the same run: a bfloat16 and a float32 product, a copy in device
memory, one thread's SHA-256, and writing to the disk until it is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.models.real_configs import real_config

from benchmarks.slice import save_tokenizer, write_ids
from gemq import output
from gemq.quantize.architectures import ARCHITECTURES
from gemq.quantize.whole_model import full_inventory
from gemq.shard_headers import TensorSpec
from gemq.shards import DTYPES, ShardWriter


def e4b_config(layers: int | None = None) -> dict[str, Any]:
    """The config.json of E4B's text model; `layers` cuts it to the first ones, without shared keys and values."""
    text = real_config("e4b")["text_config"] | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    if layers is not None:
        kinds = [*text["layer_types"][: layers - 1], "full_attention"]
        text |= {"num_hidden_layers": layers, "layer_types": kinds, "num_kv_shared_layers": 0}
    return text


def redundant_kv(config: dict[str, Any], specs: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """What the Hub's files hold for layers that share keys and values: no forward reads it, and vLLM refuses an unquantized model without it."""
    kinds, found = config["layer_types"], {}
    first = len(kinds) - config["num_kv_shared_layers"]
    for layer in range(first, len(kinds)):
        like = max(other for other in range(first) if kinds[other] == kinds[layer])
        for leaf in ("k_proj", "v_proj", "k_norm"):
            name = f"model.layers.{layer}.self_attn.{leaf}.weight"
            found[name] = replace(specs[f"model.layers.{like}.self_attn.{leaf}.weight"], name=name)
    return found


def build(out: Path, layers: int | None = None) -> Path:
    """Write a source of that shape into `out`, unless it is there."""
    if out.exists():
        return out
    out.mkdir(parents=True)
    config = e4b_config(layers)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(out)
    specs = full_inventory(config, ARCHITECTURES["Gemma4ForCausalLM"])
    specs |= redundant_kv(config, specs)
    writer = ShardWriter(out, specs.values())
    writer.allocate()
    draw = torch.Generator("cuda").manual_seed(0)
    for spec in specs.values():
        rows = max(1, (1 << 28) // max(1, math.prod(spec.shape[1:])))
        if len(spec.shape) < 2:
            writer.write(spec.name, (1 + 0.1 * torch.randn(spec.shape, generator=draw, device="cuda")).to(DTYPES[spec.dtype]).cpu())
            continue
        for first in range(0, spec.shape[0], rows):
            shape = (min(rows, spec.shape[0] - first), *spec.shape[1:])
            value = torch.randn(shape, generator=draw, device="cuda") / math.sqrt(spec.shape[-1])
            writer.write_rows(spec.name, first, value.to(DTYPES[spec.dtype]).cpu())
    writer.sync()  # a source lies on the disk; what doesn't yet would be written beside the checkpoint
    writer.close()
    index = writer.index_json()
    if index is not None:
        (out / "model.safetensors.index.json").write_text(index)
    return out


def device_bytes() -> int:
    """Bytes of device memory in use now, by whatever runs, on the first card that this process sees."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(said.stdout.splitlines()[0]) << 20


def anonymous_bytes(pid: int) -> int:
    """Bytes of memory that a process holds beyond the page cache, 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


@dataclass(frozen=True)
class Ran:
    """How a command ended, and the most that it took of the card and of memory."""

    code: int
    seconds: float
    device_bytes: int
    host_bytes: int
    said: dict[str, Any]


def run(command: list[str], log: Path, limit_seconds: float, *, json_out: bool = True) -> Ran:
    """Run `command`, for `limit_seconds` at most; its stderr goes to `log`, its stdout beside it, which is JSON unless `json_out` is false."""
    before, peak, done = device_bytes(), [0, 0], threading.Event()
    started = time.monotonic()
    with open(log, "wb") as errors, open(log.with_suffix(".json"), "wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=errors)

        def watch() -> None:
            while not done.wait(0.2):
                peak[0] = max(peak[0], device_bytes() - before)
                peak[1] = max(peak[1], anonymous_bytes(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            code = process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    said = log.with_suffix(".json").read_text()
    return Ran(code, seconds, peak[0], peak[1], json.loads(said) if code == 0 and json_out else {})


def rate(amount: float, call: Callable[[], object]) -> float:
    """`amount` a second that `call` does on the device, over five calls after one that doesn't count."""
    call()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(5):
        call()
    torch.cuda.synchronize()
    return 5 * amount / (time.perf_counter() - started)


def device_copy() -> float:
    """Bytes a second that a copy in device memory reads and writes."""
    block = torch.empty(1 << 31, dtype=torch.uint8, device="cuda")
    there = torch.empty_like(block)
    return rate(2 * block.numel(), lambda: there.copy_(block))


def probes(work: Path) -> dict[str, float]:
    """What this machine does: operations a second of products, bytes a second of a device copy, of one thread's SHA-256, and to the disk."""
    made = {}
    sizes = {"bf16": (torch.bfloat16, 8192), "float32": (torch.float32, 4096), "float64": (torch.float64, 4096)}
    for name, (dtype, size) in sizes.items():
        left, right = torch.randn(2, size, size, device="cuda", dtype=dtype)
        made[f"{name} product"] = rate(2 * size**3, lambda left=left, right=right: left @ right)  # type: ignore[misc]
    made["device copy"] = device_copy()
    pinned = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device="cuda")
    made["host to device"] = rate(pinned.numel(), lambda: there.copy_(pinned))
    raw = os.urandom(1 << 26)
    started = time.perf_counter()
    for _ in range(8):
        hashlib.sha256(raw)
    made["sha256"] = 8 * len(raw) / (time.perf_counter() - started)
    path = work / "probe"
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(32):
            file.write(raw)
        made["page cache write"] = 32 * len(raw) / (time.perf_counter() - started)
        os.fdatasync(file.fileno())
    made["disk write"] = 32 * len(raw) / (time.perf_counter() - started)
    path.unlink()
    return made


def operations(layers: int | None, tokens: int) -> dict[str, float]:
    """What the walk must do at least, in floating-point operations: one forward of the layers, and the upper half of each Hessian."""
    config = e4b_config(layers)
    forward = statistics = 0.0
    for name, spec in full_inventory(config, ARCHITECTURES["Gemma4ForCausalLM"]).items():
        if ".layers." not in name or len(spec.shape) != 2:
            continue
        forward += 2 * math.prod(spec.shape) * tokens
        if name.endswith(("q_proj.weight", "o_proj.weight", "gate_proj.weight", "down_proj.weight")):
            statistics += spec.shape[1] ** 2 * tokens
    return {"forward": forward, "statistics": statistics}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder with 40 GB of space")
    parser.add_argument("--recipes", nargs="*", default=["w4a16", "w4a16-fast", "fp8", "w4a16@4GiB"], help="by name; with @4GiB: --gpu-memory 4GiB")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--no-probes", action="store_true", help="don't measure what the machine can do")
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints in the folder, as out-RECIPE")
    parser.add_argument("--layers", type=int, help="a slice without shared layers instead of the whole model")
    parser.add_argument("--peer", type=Path, help="a script that runs llm-compressor on a slice: CONFIG_JSON LAYERS SAMPLES LENGTH")
    parser.add_argument("--peer-config", type=Path, help="the config.json of E4B that it reads, beside a tokenizer")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a recipe may take")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    source = build(options.work / f"e4b-{options.layers or 'whole'}", options.layers)
    source_bytes = sum(path.stat().st_size for path in source.iterdir())
    output.note(f"source made in {time.monotonic() - started:.1f} s, {source_bytes / 1e9:.2f} GB")
    ids = options.work / "ids.jsonl"
    write_ids(ids, options.samples, options.length, e4b_config()["vocab_size"])
    can = {} if options.no_probes else probes(options.work)
    torch.cuda.empty_cache()
    output.note(torch.cuda.get_device_name())
    units = {name: (1e12, "TFLOP/s") if "product" in name else (1e9, "GB/s") for name in can}
    if can:
        output.note("this machine: " + ", ".join(f"{name} {rate / units[name][0]:.3g} {units[name][1]}" for name, rate in can.items()))
        dry = run([sys.executable, "-m", "gemq", "quantize", str(source), "--dry-run", "--device", "cpu", "--json"], options.work / "dry.log", 120)
        output.note(f"a dry run, which imports and plans as every command does, takes {dry.seconds:.1f} s")
    must = operations(options.layers, options.samples * options.length)
    failed = []
    for given in options.recipes:
        recipe, _, gpu_memory = given.partition("@")
        out = options.work / f"out-{recipe}"
        shutil.rmtree(out, ignore_errors=True)
        shutil.rmtree(out.with_name(out.name + ".partial"), ignore_errors=True)
        command = [sys.executable, "-m", "gemq", "quantize", str(source), "--recipe", recipe, "--calibration", str(ids),
                   "--samples", str(options.samples), "--length", str(options.length), "--eval-data", "none", "--device", "cuda",
                   "--json", "--output", str(out)]  # fmt: skip
        if gpu_memory:
            command += ["--gpu-memory", gpu_memory]
        ran = run(command, options.work / f"{given}.log", options.limit)
        if ran.code:
            failed.append(given)
            last = (options.work / f"{given}.log").read_text(errors="replace")[-1500:]
            output.warn(f"{given} ended with {ran.code} after {ran.seconds:.1f} s: {last}")
            continue
        written = sum(path.stat().st_size for path in out.iterdir())
        if not options.keep:
            shutil.rmtree(out)
        show(given, options, ran, written, source_bytes, must, can)
    if options.peer:
        command = [sys.executable, str(options.peer), str(options.peer_config), str(options.layers), str(options.samples), str(options.length)]
        ran = run(command, options.work / "peer.log", options.limit, json_out=False)
        lines = [line for line in (options.work / "peer.json").read_text().splitlines() if line.startswith("PEER")]
        output.note(f"llm-compressor: exit {ran.code}, {ran.seconds:.1f} s whole, {ran.host_bytes / 2**30:.2f} GiB of memory; " + " ".join(lines))
        failed += ["the peer"] if ran.code else []
    sys.exit(bool(failed))


def show(
    recipe: str, options: argparse.Namespace, ran: Ran, written: int, source_bytes: int, must: dict[str, float], can: dict[str, float]
) -> None:
    """The table of one recipe's phases."""
    phases: dict[str, float] = dict(ran.said["phases"])
    main_seconds = sum(seconds for name, seconds in phases.items() if not name.endswith("beside"))
    rows = [("imports, plan, calibration, end", f"{ran.seconds - main_seconds:.2f}", "")]
    for name, seconds in sorted(phases.items(), key=lambda item: (item[0].endswith("beside"), -item[1])):
        reached = ""
        if name in must and seconds:
            reached = f"{must[name] / seconds / 1e12:.0f} TFLOP/s" + (f" of {can['bf16 product'] / 1e12:.0f}" if can else "")
        elif name == "hash, beside" and seconds and can:
            reached = f"one thread does {can['sha256'] / 1e9:.2f} GB/s"
        rows.append((name, f"{seconds:.2f}", reached))
    shape = f"{options.layers} layers of E4B's widths" if options.layers else "E4B's shape"
    calibrated = f", {options.samples} x {options.length} tokens" if "forward" in phases else ""
    output.table(f"{recipe}, {shape}, random weights{calibrated}", ("phase", "seconds", "reached"), rows)
    output.note(
        f"{recipe}: {ran.seconds:.1f} s from command to sealed checkpoint, {source_bytes / 1e9:.2f} GB read and {written / 1e9:.2f} GB written, "
        f"{source_bytes / ran.seconds / 1e9:.2f} GB/s of source; {ran.device_bytes / 2**30:.2f} GiB of the card, "
        f"{ran.host_bytes / 2**30:.2f} GiB of host memory beyond the page cache"
    )


if __name__ == "__main__":
    main()
