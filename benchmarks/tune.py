"""`gemq tune` on E4B's whole shape with weights that vLLM makes up: whether it finds by itself what was once set by hand.

    python -m benchmarks.tune --shape DIR --work out/tune [--scheme w4g128h] [--python PYTHON] [--path DIR] -- [gemq tune's own options]

DIR holds e4b.json (the full config) with tokenizer and processor files. vLLM's `--load-format dummy` needs no weights, and leaves integers as it
finds them in memory: a plugin of vLLM's, written here for this run alone, fills packed weights from a seed, so that two starts decode the same.
Made-up logits lie so close that two kernels' rounding parts them soon: near-ties are taken (--tolerance). The load is one request of 200 random
ids in and 512 out, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

TOWERS = ["re:.*vision_tower.*", "re:.*audio_tower.*", "re:.*embed_vision.*", "re:.*embed_audio.*"]
HEAD = "re:.*lm_head$"
LOAD = "name: single\nloads: [{name: single, requests: 1, output_tokens: 512, input_tokens: 200, warmups: 1}]\n"
TOLERANCE_NATS = 0.25
FILL = """
def register():
    import torch
    from vllm.model_executor.model_loader import dummy_loader, weight_utils

    made = weight_utils.initialize_single_dummy_weight

    def initialize_single_dummy_weight(param, low=-1e-3, high=1e-3, seed=1234):
        if param.dtype == torch.int32 and param.numel() > 1024 and param.device.type != "meta":
            draw = torch.Generator(device=param.device).manual_seed(seed)
            param.data.random_(-(2**31), 2**31 - 1, generator=draw)
        else:
            made(param, low, high, seed)

    for module in (dummy_loader, weight_utils):
        module.initialize_single_dummy_weight = initialize_single_dummy_weight
"""


def _weights(bits: int, kind: str, group_size: int | None) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "group" if group_size else "channel", "group_size": group_size,
            "dynamic": False}  # fmt: skip


def quantization(scheme: str) -> dict[str, Any] | None:
    """The quantization_config of a scheme: bf16, fp8, w4g32, w4g128, or w4g128h with an int4 head."""
    if scheme == "bf16":
        return None
    inputs, form = None, "pack-quantized"
    weights = _weights(4, "int", 32 if scheme == "w4g32" else 128)
    if scheme == "fp8":
        inputs = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
        weights, form = _weights(8, "float", None), "float-quantized"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": form}}
    if scheme == "w4g128h":
        groups["group_1"] = {"targets": [HEAD], "weights": _weights(4, "int", None), "input_activations": None, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed", "config_groups": groups,
            "ignore": TOWERS if scheme == "w4g128h" else [*TOWERS, HEAD]}  # fmt: skip


def write_shape(shape: Path, out: Path, scheme: str) -> Path:
    """A checkpoint without weights in `out`: the config of `shape` with the scheme, and its tokenizer and processor."""
    out.mkdir(parents=True, exist_ok=True)
    for path in shape.iterdir():
        if path.is_file() and path.name != "e4b.json":
            shutil.copyfile(path, out / path.name)
    config = json.loads((shape / "e4b.json").read_text(encoding="utf-8"))
    made = quantization(scheme)
    if made is not None:
        config["quantization_config"] = made
    if scheme == "w4g128h":  # a quantized head is one of its own
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    return out


def write_python(work: Path, python: str, path: str | None) -> Path:
    """An interpreter for vLLM that finds `path` and, as a plugin of vLLM's, what fills packed weights."""
    site = (work / "site").absolute()
    info = site / "gemq_fill-1.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (site / "gemq_fill.py").write_text(FILL, encoding="utf-8")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gemq-fill\nVersion: 1\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ngemq_fill = gemq_fill:register\n", encoding="utf-8")
    script = work.absolute() / "python"
    finds = shlex.quote(str(site) + (f":{path}" if path else ""))
    script.write_text(f'#!/bin/sh\nPYTHONPATH={finds} exec {shlex.quote(python)} "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    return script


def main() -> int:
    """Write the checkpoint's shape, run gemq tune on it, and return its exit code."""
    parser = argparse.ArgumentParser(description="gemq tune on E4B's shape with made-up weights.")
    parser.add_argument("--shape", type=Path, required=True, help="folder with e4b.json, tokenizer and processor")
    parser.add_argument("--work", type=Path, required=True, help="where everything is written")
    parser.add_argument("--scheme", default="w4g128h", choices=("bf16", "fp8", "w4g32", "w4g128", "w4g128h"))
    parser.add_argument("--python", help="the interpreter of vLLM's environment")
    parser.add_argument("--path", help="a folder with vLLM for that interpreter, as in PYTHONPATH")
    parser.add_argument("rest", nargs="*", help="gemq tune's own options, after --")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    model = write_shape(given.shape, given.work / given.scheme, given.scheme)
    found = shutil.which(given.python) if given.python else sys.executable
    if found is None:
        parser.error(f"--python {given.python} can't be run")
    python = write_python(given.work, str(Path(found).absolute()), given.path)
    load = given.work / "load.yaml"
    load.write_text(LOAD, encoding="utf-8")
    extra = " ".join(filter(None, [os.environ.get("GEMQ_EXTRA_ARGS", ""), "--load-format dummy"]))
    command = [sys.executable, "-m", "gemq", "tune", str(model), "--workload", str(load), "--requests", "1", "--tolerance", str(TOLERANCE_NATS),
               "--output", str(given.work / f"{given.scheme}-tuned"), "--python", str(python), *given.rest]
    print(shlex.join(command), file=sys.stderr, flush=True)
    return subprocess.run(command, env={**os.environ, "GEMQ_EXTRA_ARGS": extra}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
