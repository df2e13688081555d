"""E4B's whole decoder on a GPU: seconds from command to sealed checkpoint, and peak device memory, by recipe.

The weights are random (normal, of a trained model's size) in E4B's exact shapes, text decoder with its tables and without towers, made on the
machine. Calibration: random ids, 128 windows of 2,048. Seconds by phase are those of gemq's own log.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from tests.models.real_configs import real_config

from benchmarks.slice import save_tokenizer, write_ids
from gemq import output
from gemq.quantize.architectures import ARCHITECTURES
from gemq.quantize.whole_model import full_inventory
from gemq.shards import DTYPES, ShardWriter


def e4b_config(layers: int | None = None) -> dict[str, Any]:
    """The config.json of E4B's text model; `layers` cuts it to the first ones, without shared keys and values."""
    text = real_config("e4b")["text_config"] | {"architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"}
    if layers is not None:
        text |= {"num_hidden_layers": layers, "layer_types": text["layer_types"][:layers], "num_kv_shared_layers": 0}
    return text


def build(out: Path, layers: int | None = None) -> Path:
    """Write a source of that shape into `out`, unless it is there."""
    if out.exists():
        return out
    out.mkdir(parents=True)
    config = e4b_config(layers)
    (out / "config.json").write_text(json.dumps(config, indent=2))
    save_tokenizer(out)
    specs = full_inventory(config, ARCHITECTURES["Gemma4ForCausalLM"])
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
    writer.close()
    index = writer.index_json()
    if index is not None:
        (out / "model.safetensors.index.json").write_text(index)
    return out


def device_bytes() -> int:
    """Bytes of device memory in use now, by whatever runs."""
    said = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True, check=True)
    return int(said.stdout.splitlines()[0]) << 20


def run(command: list[str], log: Path) -> tuple[int, float, int]:
    """(exit code, seconds, peak device bytes) of `command`; what it says goes to `log`."""
    peak, done = [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.25):
            peak[0] = max(peak[0], device_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.monotonic()
    with open(log, "wb") as file:
        code = subprocess.run(command, stdout=file, stderr=file).returncode
    seconds = time.monotonic() - started
    done.set()
    watcher.join()
    return code, seconds, peak[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder with 40 GB of space")
    parser.add_argument("--recipes", nargs="*", default=["w4a16", "w4a16-fast", "fp8"])
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--layers", type=int, help="a slice without shared layers instead of the whole model")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    source = build(options.work / f"e4b-{options.layers or 'whole'}", options.layers)
    output.note(f"source made in {time.monotonic() - started:.1f} s, {sum(path.stat().st_size for path in source.iterdir()) / 1e9:.2f} GB")
    ids = options.work / "ids.jsonl"
    write_ids(ids, options.samples, options.length, e4b_config()["vocab_size"])
    rows = []
    for recipe in options.recipes:
        out = options.work / f"out-{recipe}"
        shutil.rmtree(out, ignore_errors=True)
        before = device_bytes()
        command = [sys.executable, "-m", "gemq", "quantize", str(source), "--recipe", recipe, "--calibration", str(ids),
                   "--samples", str(options.samples), "--length", str(options.length), "--eval-data", "none", "--device", "cuda",
                   "--output", str(out)]  # fmt: skip
        code, seconds, peak = run(command, options.work / f"{recipe}.log")
        size = sum(path.stat().st_size for path in out.iterdir()) / 1e9 if out.exists() else 0
        rows.append((recipe, str(code), f"{seconds:.1f}", f"{(peak - before) / 2**30:.1f}", f"{size:.2f}"))
        output.note(f"{recipe}: exit {code}, {seconds:.1f} s, {(peak - before) / 2**30:.1f} GiB")
        shutil.rmtree(out, ignore_errors=True)
    output.note(torch.cuda.get_device_name())
    output.table(f"E4B's shape, random weights, {options.samples} x {options.length} tokens", ("recipe", "exit", "seconds", "device GiB", "GB"), rows)


if __name__ == "__main__":
    main()
