"""A stand-in for vLLM with switches: it refuses what its parser doesn't know, and its speed, ids and failures depend on what it is told.

FAKE_BEHAVIOR is a JSON object: a key is an argument or argument=value ("--block-size=64"), or NAME=VALUE of a variable; its value says what that
does: `speed` (a factor), `noise` (a relative deviation of each answer's time), `shift` (ids differ from the 5th on), `fail` (a reason, at the
start), `hang` (never answers), `dies` (after so many completions), `unscored` (refuses prompt_logprobs). FAKE_STARTS names a file that gets
a line a start.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent

_MODULES = {
    "vllm/__init__.py": "",
    "vllm/envs.py": "environment_variables = dict.fromkeys(['VLLM_DISABLED_KERNELS', 'VLLM_PLUGINS', 'VLLM_CPU_OMP_THREADS_BIND', "
                    "'VLLM_CPU_ATTN_SPLIT_KV', 'VLLM_MARLIN_USE_ATOMIC_ADD'])\n",
    "vllm/engine/__init__.py": "",
    "vllm/engine/arg_utils.py": '''
class AsyncEngineArgs:
    @staticmethod
    def add_cli_args(parser):
        from argparse import BooleanOptionalAction
        for name in ("--model", "--served-model-name", "--host", "--tokenizer", "--attention-backend", "--compilation-config",
                     "--speculative-config", "--kv-cache-dtype"):
            parser.add_argument(name)
        for name in ("--port", "--max-model-len", "--seed", "--max-num-seqs", "--max-num-batched-tokens", "--block-size",
                     "--kv-cache-memory-bytes"):
            parser.add_argument(name, type=int)
        parser.add_argument("--gpu-memory-utilization", type=float)
        parser.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
        parser.add_argument("--performance-mode", choices=["balanced", "interactivity"])
        for name in ("--enforce-eager", "--enable-prefix-caching", "--async-scheduling"):
            parser.add_argument(name, action=BooleanOptionalAction)
        return parser
''',
    "vllm/utils/__init__.py": "",
    "vllm/utils/argparse_utils.py": '''
import argparse
class FlexibleArgumentParser(argparse.ArgumentParser):
    def __init__(self):
        super().__init__(allow_abbrev=False)
''',
    "vllm/model_executor/__init__.py": "",
    "vllm/model_executor/kernels/__init__.py": "",
    "vllm/model_executor/kernels/linear/__init__.py": '''
NAMES = ["MacheteLinearKernel", "MarlinLinearKernel", "ExllamaLinearKernel"]
_POSSIBLE_KERNELS = {"cuda": [type(name, (), {}) for name in NAMES]}
_POSSIBLE_FP8_KERNELS = _POSSIBLE_INT8_KERNELS = {}
''',
    "vllm/platforms/__init__.py": '''
from importlib.metadata import version
class current_platform:
    device_type = _enum = "cpu" if "cpu" in version("vllm") else "cuda"
''',
    "vllm/plugins/__init__.py": "def load_general_plugins(): pass\n",
    "vllm/v1/__init__.py": "",
    "vllm/v1/attention/__init__.py": "",
    "vllm/v1/attention/backends/__init__.py": "",
    "vllm/v1/attention/backends/registry.py": '''
class _Backend:
    def __init__(self, name):
        self.name = name
    def get_class(self):
        if self.name == "FLASHINFER":
            raise ImportError("No module named 'flashinfer'")
        return self
    def supports_head_size(self, size):
        return self.name != "FLASH_ATTN" or size <= 256
class _Members(type):
    __members__ = {name: _Backend(name) for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")}
    def __getitem__(cls, name):
        return cls.__members__[name]
class AttentionBackendEnum(metaclass=_Members):
    pass
''',
    "torch.py": "__version__ = '2.13.0'\n",
    "vllm/entrypoints/__init__.py": "",
    "vllm/entrypoints/openai/__init__.py": "",
    "vllm/entrypoints/openai/api_server.py": '''
import asyncio, json, os, random, sys, time
from benchmarks.stub_server import Engine, StubServer
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.kernels.linear import NAMES
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

given = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args()
told = {f"--{name.replace('_', '-')}={value}" for name, value in vars(given).items()}
told |= {f"{name}={value}" for name, value in os.environ.items()}
behavior = [does for key, does in json.loads(os.environ.get("FAKE_BEHAVIOR", "{}")).items() if key in told]
print("INFO 11-30 [api_utils.py:286] non-default args: {}", flush=True)
with open(os.environ["FAKE_STARTS"], "a") as file:
    file.write(" ".join(sys.argv[1:]) + " " + os.environ.get("VLLM_DISABLED_KERNELS", "") + "\\\\n")
if current_platform.device_type == "cuda":
    disabled = os.environ.get("VLLM_DISABLED_KERNELS", "").split(",")
    print(f"INFO 11-30 [x.py:1] Using {next(name for name in NAMES if name not in disabled)} for CompressedTensorsWNA16", flush=True)
    print(f"INFO 11-30 [x.py:1] Using {given.attention_backend or 'TRITON_ATTN'} backend.", flush=True)
for does in behavior:
    if "fail" in does:
        sys.exit(print("(EngineCore pid=2) ERROR 11-30 [core.py:1] " + does["fail"], flush=True) or 1)
    if does.get("hang"):
        time.sleep(600)


class Switched(Engine):
    name = given.served_model_name
    vocabulary = int(os.environ.get("FAKE_VOCABULARY", "512"))
    max_model_len = given.max_model_len

    def decode(self, ids, count):
        made = super().decode(ids, count)
        shift = any(does.get("shift") for does in behavior)
        return made[:5] + [(token + 1) % self.vocabulary for token in made[5:]] if shift else made

    def seconds(self, ids, count):
        noise = sum(does.get("noise", 0.0) for does in behavior)
        return super().seconds(ids, count) * (1 + noise * random.uniform(-1, 1))

    def answer(self, path, body):
        if body.get("prompt_logprobs") is not None and any(does.get("unscored") for does in behavior):
            return 400, {"error": {"message": "prompt_logprobs are not there", "code": 400}}, 0.0
        return super().answer(path, body)


async def main():
    speed = float(os.environ.get("FAKE_SPEED", "40"))
    for does in behavior:
        speed *= does.get("speed", 1.0)
    dies = next((does["dies"] for does in behavior if "dies" in does), None)
    server = StubServer(Switched(speed), dies_after=dies)
    await server.start(given.port)
    print("INFO:     Application startup complete.", flush=True)
    while dies is None or server.completions <= dies:
        await asyncio.sleep(0.05)
    sys.exit(print("(EngineCore pid=2) ERROR 11-30 [core.py:1] RuntimeError: out of luck", flush=True) or 1)


asyncio.run(main())
''',
}
_NVIDIA_SMI = """#!/bin/sh
case "$*" in
  *compute_cap*) echo "Stand-in H1, 9.0, 999.1, 80000, 81920" ;;
  *query-gpu=name*) echo "Stand-in H1" ;;
  *) echo "GPU 0: Stand-in H1" ;;
esac
"""


def make_environment(folder: Path, version: str = "0.32.0+cpu") -> Path:
    """The interpreter of an environment in `folder` with this vLLM; with a `version` that isn't for CPUs there is an nvidia-smi beside it."""
    site = folder / "site"
    for name, text in _MODULES.items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(text.replace("\\\\n", "\\n"))
    (site / "vllm.dist-info").mkdir()
    (site / "vllm.dist-info" / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    python = folder / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site}:{ROOT} exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    if "cpu" not in version:
        (python.parent / "nvidia-smi").write_text(_NVIDIA_SMI)
        (python.parent / "nvidia-smi").chmod(0o755)
    return python


def make_checkpoint(folder: Path, *, quantized: bool = True, heads: int = 64) -> Path:
    """A folder that looks like a checkpoint to who only reads its config: the stand-in has no weights."""
    groups = {"0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}, "input_activations": None}}
    config = {"vocab_size": 512, "max_position_embeddings": 256, "head_dim": heads, "bos_token_id": 2}
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | ({"quantization_config": {"config_groups": groups}} if quantized else {})))
    return folder


