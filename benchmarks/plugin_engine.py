"""vLLM with and without the int4 plugin on a card: E4B's shape, random weights, one stream of 200 tokens in and 512 out.

    PYTHONPATH=/path/to/vllm-site python benchmarks/plugin_engine.py --e4b E4B_CONFIG_FOLDER --out "$OUT" [--seconds 540]

Every engine is a process of its own; they start side by side and are timed one after another. The weights are drawn from their names, so that
all engines hold the same: int4 g128 with an int4 head, or (for KL) the matrices that these stand for, rounded to bf16 (`bf16-kl`) or exactly, in
float32 and multiplied in float32 (`exact-kl`). For KL the prompt goes through eight tokens at a time: batches that the plugin multiplies.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PLUGIN = HERE.parent / "serve" / "plugin"
LINEARS = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj", "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "lm_head")
HEAD = "re:.*lm_head$"
TOWERS = ("vision_tower", "audio_tower", "embed_vision", "embed_audio")
MARLIN = {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
# name -> (weights, plugin, further environment, what is measured)
ENGINES: dict[str, tuple[str, bool, dict[str, str], str]] = {
    "marlin": ("w4", False, MARLIN, "speed"),
    "machete": ("w4", False, {}, "speed"),
    "plugin": ("w4", True, MARLIN, "speed"),
    "plugin-machete": ("w4", True, {}, "speed"),
    "plugin-plain": ("w4", True, {**MARLIN, "GEMQ_INT4_TENSOR": "0"}, "speed"),
    "plugin-own": ("w4", True, {"GEMQ_INT4_LARGE": "own"}, "speed"),
    "bf16": ("bf16", False, {}, "speed"),
    "fp8": ("fp8", False, {}, "speed"),
    "w4-body": ("w4-body", False, MARLIN, "speed"),
    "w4-body-plugin": ("w4-body", True, MARLIN, "speed"),
    "marlin-kl": ("w4", False, MARLIN, "kl"),
    "plugin-kl": ("w4", True, MARLIN, "kl"),
    "bf16-kl": ("bf16", False, {}, "kl"),
    "exact-kl": ("bf16", False, {}, "kl"),
}


def write_model(source: Path, out: Path, weights: str) -> None:
    """A model folder without weights: E4B's config, quantized or not, head untied."""
    out.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.name != "e4b.json":
            shutil.copy(path, out)
    config = json.loads((source / "e4b.json").read_text())
    if weights in ("w4", "bf16"):  # bf16 is what w4 stands for, its head included
        config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    if weights.startswith("w4"):
        def group(targets: list[str], size: int | None) -> dict[str, Any]:
            scheme = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "channel" if size is None else "group", "group_size": size,
                      "dynamic": False, "actorder": None, "observer": "minmax", "observer_kwargs": {}, "block_structure": None}  # fmt: skip
            return {"targets": targets, "weights": scheme, "input_activations": None, "output_activations": None, "format": "pack-quantized"}

        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"body": group(["Linear"], 128)} | ({"head": group([HEAD], None)} if weights == "w4" else {}),
            "ignore": [*(f"re:.*{tower}.*" for tower in TOWERS), *([] if weights == "w4" else [HEAD])], "global_compression_ratio": None,
        }  # fmt: skip
    elif weights == "fp8":
        common = {"num_bits": 8, "type": "float", "symmetric": True, "group_size": None, "block_structure": None, "actorder": None}
        config["quantization_config"] = {
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed", "kv_cache_scheme": None,
            "config_groups": {"body": {"targets": ["Linear"], "weights": {**common, "strategy": "channel", "dynamic": False},
                                       "input_activations": {**common, "strategy": "token", "dynamic": True}, "output_activations": None}},
            "ignore": [*(f"re:.*{tower}.*" for tower in TOWERS), HEAD], "global_compression_ratio": None,
        }  # fmt: skip
    (out / "config.json").write_text(json.dumps(config))


def fill(model: Any, exact: bool = False) -> None:
    """Give every tensor values that follow from its name; `exact`: keep the matrices of integers and scales in float32 beside those in bf16."""
    import torch

    def draw(name: str) -> Any:
        return torch.Generator("cuda").manual_seed(int(hashlib.sha256(name.encode()).hexdigest()[:12], 16))

    def integers(prefix: str, n: int, k: int) -> Any:
        return torch.randint(0, 16, (n, k), generator=draw(f"{prefix}.q"), device="cuda", dtype=torch.int32)

    def scales(prefix: str, n: int, k: int) -> Any:
        groups = 1 if prefix.endswith("lm_head") else k // 128
        return ((0.5 + torch.rand(n, groups, generator=draw(f"{prefix}.s"), device="cuda")) / (4.6 * math.sqrt(k))).to(torch.bfloat16)

    tensors = model.state_dict()
    with torch.no_grad():
        for name, tensor in tensors.items():
            prefix, _, kind = name.rpartition(".")
            ours = prefix.endswith(LINEARS) and not any(tower in name for tower in TOWERS)
            if ours and kind == "weight_packed":
                q = integers(prefix, tensor.shape[0], tensor.shape[1] * 8)
                tensor.zero_()
                for j in range(8):
                    tensor |= q[:, j::8] << (4 * j)
            elif tensor.element_size() == 1 and tensor.is_floating_point():
                for part in tensor.split(65536):
                    part.copy_(torch.empty(part.shape, dtype=torch.bfloat16, device="cuda").normal_(0, 20, generator=draw(name)))
            elif ours and kind == "weight_scale" and f"{prefix}.weight_packed" not in tensors:
                tensor.fill_(0.001)  # of an fp8 matrix
            elif ours and kind == "weight_scale":
                groups = tensor.shape[1]
                k = model.get_parameter(f"{prefix}.weight_packed").shape[1] * 8
                tensor.copy_(scales(prefix, tensor.shape[0], k))
                assert groups in (1, k // 128)
            elif ours and kind == "weight":
                n, k = tensor.shape
                q, s = integers(prefix, n, k), scales(prefix, n, k)  # the same draws as above
                if exact:
                    model.get_submodule(prefix).exact_weight = torch.empty(n, k, dtype=torch.float32, device="cuda")
                for first in range(0, n, 65536):
                    part = slice(first, first + 65536)
                    each = s[part].repeat_interleave(k // s.shape[1], 1).float()
                    value = (q[part] - 8) * each  # a product of 4 and 8 bits: float32 holds it
                    tensor[part].copy_(value)
                    if exact:
                        model.get_submodule(prefix).exact_weight[part] = value
            elif not tensor.is_floating_point():
                continue
            elif tensor.dim() < 2:
                tensor.fill_(1.0)
            else:
                tensor.normal_(0, 0.02, generator=draw(name))


def multiply_exactly() -> None:
    """Let vLLM's linears without a quantization, and the head, multiply by `exact_weight` where there is one, in float32."""
    import torch
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    for method in (UnquantizedLinearMethod, UnquantizedEmbeddingMethod):
        plain = method.apply

        def apply(self: Any, layer: Any, x: Any, bias: Any = None, plain: Any = plain) -> Any:
            exact = getattr(layer, "exact_weight", None)
            if exact is None:
                return plain(self, layer, x, bias)
            product = torch.nn.functional.linear(x.float(), exact)
            return (product if bias is None else product + bias.float()).to(x.dtype)

        method.apply = apply


def child(name: str, folder: Path, out: Path, beside: list[str]) -> None:
    """One engine: start, wait until those `beside` it are up or gone and for the card, measure, write OUT/NAME.json."""
    weights, _, _, what = ENGINES[name]
    import torch
    from vllm import LLM, SamplingParams
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.model_loader import dummy_loader

    exact = name == "exact-kl"
    dummy_loader.DummyModelLoader.load_weights = lambda self, model, config: fill(model, exact)
    if exact:
        multiply_exactly()
    seen: list[Any] = []
    if what == "kl":
        plain = LogitsProcessor.forward

        def kept(self: Any, *given: Any, **more: Any) -> Any:
            logits = plain(self, *given, **more)
            seen.append(logits.to("cpu", torch.bfloat16, copy=True))
            return logits

        LogitsProcessor.forward = kept
    began = time.time()
    options: dict[str, Any] = {"max_num_batched_tokens": 8 if what == "kl" else 512, "enforce_eager": what == "kl"}
    if what == "kl":
        options["limit_mm_per_prompt"] = {"image": 0, "audio": 0, "video": 0}
    llm = LLM(str(folder), load_format="dummy", dtype="bfloat16", max_model_len=4096, max_num_seqs=1, kv_cache_memory_bytes=2 << 30, seed=0,
              attention_backend="TRITON_ATTN", gpu_memory_utilization=0.12, disable_log_stats=True, enable_prefix_caching=False,
              **options)  # fmt: skip
    result: dict[str, Any] = {"weights": weights, "start_s": round(time.time() - began, 1)}
    result["allocated_gib"] = round(torch.cuda.memory_allocated() / 2**30 - 2, 2)
    ids = [2] + [100 + i * 37 % 7000 for i in range(199)]
    prompt, many = [{"prompt_token_ids": ids}], [{"prompt_token_ids": [2] + [100 + i * 41 % 9000 for i in range(3499)]}]
    greedy = SamplingParams(temperature=0, max_tokens=512, ignore_eos=True, detokenize=False)
    one = SamplingParams(temperature=0, max_tokens=1, detokenize=False)

    def answer(question: Any, sampling: Any) -> tuple[list[int], float]:
        torch.cuda.synchronize()
        start = time.perf_counter()
        given = llm.generate(question, sampling, use_tqdm=False)
        return list(given[0].outputs[0].token_ids), time.perf_counter() - start

    (out / f"{name}.up").touch()
    while not all((out / f"{other}.up").exists() or (out / f"{other}.gone").exists() for other in beside):
        time.sleep(0.2)  # an engine that starts takes the processor from one that is timed
    with open("/tmp/plugin_engine.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if what == "kl":
            seen.clear()
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False), use_tqdm=False)
            rows = [row for logits in seen for row in logits]
            torch.save(torch.stack(rows[:199]), out / f"{name}.pt")
            result["rows"] = len(rows)
        else:
            answer(prompt, greedy)
            runs = [answer(prompt, greedy) for _ in range(10 if weights == "w4" else 5)]
            result["tok_s"] = [round(512 / seconds, 1) for _, seconds in runs]
            result |= {"ids": runs[0][0], "stable": all(found == runs[0][0] for found, _ in runs), "distinct_ids": len(set(runs[0][0]))}
            result["ttft_ms"] = round(min(answer(prompt, one)[1] for _ in range(8)) * 1e3, 2)
            result["prefill_tok_s"] = round(3500 / min(answer(many, one)[1] for _ in range(5)))
            result["kernels"] = profile(llm, prompt)
            with outside_graphs() as steps:
                found, seconds = answer(prompt, greedy)
            result["outside_graphs"] = {"same_ids": found == runs[0][0], "tok_s": round(512 / seconds, 1), "steps": steps[0]}
    (out / f"{name}.json").write_text(json.dumps(result, indent=1))
    print("RESULT", name, {key: value for key, value in result.items() if key not in ("ids", "kernels")}, flush=True)
    os._exit(0)


@contextmanager
def outside_graphs() -> Iterator[list[int]]:
    """Let this engine launch its compiled code's kernels one by one, as long as this lasts; the number of steps that did.

    Another engine without graphs would compare more: it may compile otherwise, since the compiler chooses how a norm is summed by timing.
    """
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager

    plain, steps = CudaGraphManager.dispatch, [0]

    def dispatch(self: Any, *given: Any, **more: Any) -> Any:
        captured, self._graphs_captured = self._graphs_captured, False
        try:
            steps[0] += 1
            return plain(self, *given, **more)
        finally:
            self._graphs_captured = captured

    CudaGraphManager.dispatch = dispatch
    try:
        yield steps
    finally:
        CudaGraphManager.dispatch = plain


def profile(llm: Any, prompt: Any) -> list[Any]:
    """(kernel, milliseconds a step, launches a step) over 32 decoding steps, the longest first."""
    import torch
    from vllm import SamplingParams

    short = SamplingParams(temperature=0, max_tokens=33, ignore_eos=True, detokenize=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        llm.generate(prompt, short, use_tqdm=False)
        torch.cuda.synchronize()
    events = sorted(found.key_averages(), key=lambda event: -event.self_device_time_total)
    return [[event.key[:110], round(event.self_device_time_total / 33e3, 4), round(event.count / 33, 1)] for event in events[:24]]


def divergence(reference: Path, other: Path) -> dict[str, float]:
    """Mean and greatest KL(reference || other), nats a token, and the share of equal greedy choices."""
    import torch

    a, b = (torch.load(path).cuda() for path in (reference, other))
    p, q = (logits.double().log_softmax(-1) for logits in (a, b))
    kl = (p.exp() * (p - q)).sum(-1)
    return {"mean_nats": float(kl.mean()), "max_nats": float(kl.max()), "same_argmax": float((a.argmax(-1) == b.argmax(-1)).double().mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--e4b", type=Path, required=True, help="folder with e4b.json and a tokenizer")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--engines", default="marlin,machete,plugin,plugin-plain,plugin-own,marlin-kl,plugin-kl,bf16-kl,exact-kl")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.child:
        child(args.child, Path(f"/tmp/plugin-e4b-{ENGINES[args.child][0]}"), args.out, args.engines.split(","))
        return
    began, names, started = time.monotonic(), args.engines.split(","), {}
    site = Path("/tmp/plugin-site/gemq_int4-0.dist-info")  # what an installation would leave for vLLM to find
    site.mkdir(parents=True, exist_ok=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: gemq-int4\nVersion: 0\n")
    (site / "entry_points.txt").write_text("[vllm.general_plugins]\ngemq_int4 = gemq_int4:register\n")
    for weights in {ENGINES[name][0] for name in names}:
        write_model(args.e4b, Path(f"/tmp/plugin-e4b-{weights}"), weights)
    for name in names:
        _, plugin, environment, _ = ENGINES[name]
        path = [str(PLUGIN), str(site.parent), os.environ.get("PYTHONPATH", "")]
        env = {**os.environ, **environment, "PYTHONPATH": os.pathsep.join(path), "VLLM_PLUGINS": "gemq_int4" if plugin else "none",
               "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": f"/tmp/cache-{name}",
               "TRITON_CACHE_DIR": f"/tmp/triton-{name}", "TORCHINDUCTOR_CACHE_DIR": f"/tmp/inductor-{name}"}  # fmt: skip
        log = open(args.out / f"{name}.log", "w")  # noqa: SIM115
        command = [sys.executable, __file__, "--e4b", str(args.e4b), "--out", str(args.out), "--engines", args.engines, "--child", name]
        started[name] = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
    while any(process.poll() is None for process in started.values()):
        for name, process in started.items():
            if process.poll() is None and time.monotonic() - began > args.seconds:
                process.kill()
            if process.poll() is not None:
                (args.out / f"{name}.gone").touch()
        time.sleep(0.2)
    for name in names:
        (args.out / f"{name}.up").unlink(missing_ok=True)
        (args.out / f"{name}.gone").unlink(missing_ok=True)
        if not (args.out / f"{name}.json").exists():
            print(name, "failed:", (args.out / f"{name}.log").read_text(errors="replace")[-1500:], flush=True)
    found = {name: json.loads((args.out / f"{name}.json").read_text()) for name in names if (args.out / f"{name}.json").exists()}
    summary: dict[str, Any] = {name: {key: value for key, value in one.items() if key != "ids"} for name, one in found.items()}
    for name in ("marlin-kl", "plugin-kl"):
        for reference in ("bf16", "exact"):
            if {name, f"{reference}-kl"} <= set(found):
                summary[f"{name}_to_{reference}"] = divergence(args.out / f"{reference}-kl.pt", args.out / f"{name}.pt")
    for path in args.out.glob("*.pt"):
        path.unlink()
    (args.out / "engine.json").write_text(json.dumps(summary, indent=1))
    for name, one in summary.items():
        print(name, {key: value for key, value in one.items() if key != "kernels"} if isinstance(one, dict) else one, flush=True)
    for name in ("marlin", "plugin"):
        if name in summary:
            print(name, *summary[name]["kernels"], sep="\n  ", flush=True)


if __name__ == "__main__":
    main()
