"""What a judge would measure, side by side: checkpoints and packages served by a real vLLM on this machine, then `gemq bench` on one after another.

    python -m benchmarks.served --work out/served --row bf16=SOURCE --row w4a16-fast=DIR --plugin plugin=DIR [--batch plugin w4a16-fast]

All servers start together and stay up; one is measured at a time. --row serves a directory as it is; --plugin makes a package with gemq's int4
plugin of it first, and serves that. Loads: single requests of 200 random ids in and 512 out, and LowBArena's of 1,024 in and 256 out; for rows
named by --batch a second server with the profile `throughput` and 32 requests of 8,192 in and 512 out in flight. Bytes a token are the plan's,
what a decode step must read; on a GPU the share of its copy bandwidth that makes stands beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import measured
from benchmarks.gpu import device_copy
from gemq import output
from gemq.errors import GemqError
from gemq.serve.server import Server, find_python, starting

SINGLE = [
    {"name": "single", "requests": 5, "output_tokens": 512, "input_tokens": 200, "warmups": 1},
    {"name": "single-1k", "requests": 4, "output_tokens": 256, "input_tokens": 1024, "warmups": 1, "streamed": True},
]
BATCH = [{"name": "batch-8k", "requests": 32, "in_flight": 32, "output_tokens": 512, "input_tokens": 8192, "warmups": 1, "streamed": True}]
LONGEST = 8192 + 512 + 8


def named(text: str) -> tuple[str, Path]:
    """NAME=DIR of the command line."""
    name, mark, folder = text.partition("=")
    if not mark or not name or not Path(folder).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=DIR with a directory that is there")
    return name, Path(folder)


def token_bytes(checkpoint: Path) -> dict[str, int]:
    """Bytes that a decode step reads, of a checkpoint of gemq's and of its source, as its manifest has them; nothing of others."""
    manifest = checkpoint / "gemq.json"
    return dict(json.loads(manifest.read_text())["bytes"]) if manifest.is_file() else {}


def bench(url: str, loads: list[dict[str, Any]], work: Path, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """`gemq bench` on `url`; each load's result by its name. Raises RuntimeError where it fails."""
    workload = work / f"{name}.workload.json"
    workload.write_text(json.dumps({"name": "served", "loads": loads}))
    command = measured.gemq("bench", url, "--workload", workload, "--runs", options.runs, "--scale", options.scale, "--no-audit", "--client", "gemq",
                            "--vocabulary", options.vocabulary, "--json")  # fmt: skip
    with open(work / f"{name}.bench.log", "wb") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: gemq bench ended with {done.returncode}: {(work / f'{name}.bench.log').read_text()[-800:]}")
    (work / f"{name}.bench.json").write_bytes(done.stdout)
    return {load["name"]: load for load in json.loads(done.stdout)["loads"]}


def serving(target: Path, name: str, profile: str, python: Path, options: argparse.Namespace) -> AbstractContextManager[Callable[[], Server]]:
    """A server that starts, with compiled code of its own: what two write at once is nobody's."""
    extra = os.environ.get("GEMQ_EXTRA_ARGS", "")
    if options.cache_bytes:  # said, since several servers that measure at once what is free would err
        cache = options.cache_bytes * (6 if profile == "throughput" else 1)
        extra += f" --gpu-memory-utilization 0.1 --kv-cache-memory-bytes {cache}"
    place = (options.work / "caches" / name).absolute()
    environment = {key: str(place / key) for key in ("VLLM_CACHE_ROOT", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
    environment |= {"GEMQ_EXTRA_ARGS": extra.strip(), "MAX_MODEL_LEN": str(max(2048, round(LONGEST * options.scale)))}
    log = options.work / f"{name}.engine.log"
    return starting(target, profile=profile, python=python, log=log, timeout=options.timeout, verify=False, environment=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for packages, logs and results")
    parser.add_argument("--row", type=named, action="append", default=[], help="NAME=DIR: a checkpoint or a submission, as it is")
    parser.add_argument("--plugin", type=named, action="append", default=[], help="NAME=DIR: a checkpoint, packaged with the int4 plugin")
    parser.add_argument("--batch", nargs="*", default=[], help="names of rows that are served for batches too")
    parser.add_argument("--python", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="requests and lengths times this")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--cache-bytes", type=int, default=2 << 30, help="of keys and values a server, six times that for batches; 0: its choice")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that the starts may take")
    options = parser.parse_args()
    work: Path = options.work
    work.mkdir(parents=True, exist_ok=True)
    targets: dict[str, Path] = dict(options.row)
    checkpoints: dict[str, Path] = {**targets, **dict(options.plugin)}
    if unknown := sorted({*options.batch} - {*checkpoints}):
        parser.error(f"--batch {unknown[0]} is no row")
    for name, folder in options.plugin:
        targets[name] = work / f"package-{name}"
        shutil.rmtree(targets[name], ignore_errors=True)
        measured.run(measured.gemq("package", folder, "--arena", "efficient-gemma", "--plugin", "gemq-int4", "--force", "-o", targets[name]),
                     work / f"{name}.package.log")  # fmt: skip
    servers = [(name, name, "single-stream", SINGLE) for name in targets] + [(f"{name}-batch", name, "throughput", BATCH) for name in options.batch]
    python = find_python(options.python)
    rows, failed = [], []
    known = {key: value for folder in checkpoints.values() for key, value in token_bytes(folder).items()}
    bandwidth = device_copy() if torch.cuda.is_available() else None
    torch.cuda.empty_cache()  # the card is the servers'
    with ExitStack() as stack:
        ready = {name: stack.enter_context(serving(targets[target], name, profile, python, options)) for name, target, profile, _ in servers}
        up: dict[str, Server] = {}
        for name, wait in ready.items():
            try:
                up[name] = wait()
            except GemqError as error:
                failed.append(name)
                output.warn(f"{name}: {error.message}")
        output.note(f"{len(up)} of {len(ready)} servers are up")
        for name, target, _, loads in servers:
            if name not in up:
                continue
            try:
                found = bench(f"{up[name].url}#{up[name].model}", loads, work, name, options)
            except RuntimeError as error:
                failed.append(name)
                output.warn(str(error))
                continue
            size = token_bytes(checkpoints[target]).get("per_token_checkpoint", known.get("per_token_source", 0))
            for load in found.values():
                runs, share = load["tps"], ""
                first = load["runs"][0]["first_token_ms"] or (load.get("streamed_probe") or {}).get("first_token_ms")
                if load["name"].startswith("single") and size and bandwidth:
                    share = f"{runs['mean'] * size / bandwidth:.0%}"
                rows.append((name, load["name"], f"{runs['mean']:.1f}", f"{runs['lowest']:.1f}", f"{runs['highest']:.1f}",
                             f"{first['median']:.1f}" if first else "", f"{size / 1e9:.2f}" if size else "", share))  # fmt: skip
                output.note("  ".join(rows[-1]))
    output.note(measured.machine() + (f", copy {bandwidth / 1e12:.2f} TB/s" if bandwidth else ""))
    output.table("", ("served", "load", "tokens a second", "lowest", "highest", "first token ms", "GB a token", "of the copy bandwidth"), rows)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
