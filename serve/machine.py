"""What this machine is, and which number formats vLLM can serve on it: what `gemq doctor` shows."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gemq.errors import UsageError
from gemq.output import human_bytes

MAKE_ENVIRONMENT = "make serve-env"
_VERSIONS = "import importlib.metadata as m, json; print(json.dumps({d.metadata['Name'].lower(): d.version for d in m.distributions()}))"

# (number format, least NVIDIA compute capability, whether vLLM's CPU build has a kernel, a word on it); read in vLLM 0.32's kernel classes
FORMATS: tuple[tuple[str, float, bool, str], ...] = (
    ("bf16", 7.5, True, "unquantized"),
    ("W4A16 int4", 7.5, True, "Marlin; on a CPU vLLM's kernel, or unpacked by vllm_cpu_mends.py"),
    ("W8A16 int8", 7.5, True, "Marlin; on a CPU unpacked by vllm_cpu_mends.py"),
    ("W8A8 int8", 7.5, True, "CUTLASS; oneDNN on a CPU"),
    ("W8A8 fp8", 8.0, False, "native from compute capability 8.9, weight-only (Marlin) below; not on a CPU"),
)
_FORMAT_OF = {"int4": "W4A16 int4", "int8": "W8A16 int8", "int8 inputs": "W8A8 int8", "fp8 inputs": "W8A8 fp8"}


@dataclass(frozen=True)
class Fact:
    """One thing that was looked at and what it is."""

    what: str
    found: str


@dataclass(frozen=True)
class Served:
    """A recipe, whether vLLM can serve what it makes here, and why."""

    name: str
    served: bool
    why: str


@dataclass(frozen=True)
class Machine:
    """Everything that was found: facts, what can be served, and (what is missing, the command that brings it)."""

    facts: tuple[Fact, ...]
    formats: tuple[Served, ...]
    missing: tuple[tuple[str, str], ...]

    def to_json(self) -> dict[str, Any]:
        """One JSON document of all of it."""
        return {"facts": {fact.what: fact.found for fact in self.facts}, "recipes": [asdict(row) for row in self.formats],
                "missing": [{"what": what, "bring": bring} for what, bring in self.missing]}


@dataclass(frozen=True)
class Gpu:
    """An NVIDIA GPU as its driver tells it; memory in bytes."""

    name: str
    capability: float
    driver: str
    free_bytes: float
    total_bytes: float


def gpus() -> list[Gpu]:
    """The NVIDIA GPUs here; empty without a driver that answers."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version,memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(listed)


def parse_gpus(listed: str) -> list[Gpu]:
    """The GPUs in nvidia-smi's lines of name, compute capability, driver, free and total MiB."""
    found = []
    for line in listed.splitlines():
        fields = [field.strip() for field in line.split(",")]
        try:
            found.append(Gpu(fields[0], float(fields[1]), fields[2], float(fields[3]) * 2**20, float(fields[4]) * 2**20))
        except (IndexError, ValueError):
            continue  # a card that answers "[N/A]" can't be served on
    return found


def engine_versions(python: Path) -> dict[str, str]:
    """The versions of what is installed beside `python`, by lower-case name; empty if it doesn't run."""
    try:
        done = subprocess.run([python, "-c", _VERSIONS], capture_output=True, text=True, timeout=60, check=True)
        found: dict[str, str] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return {}
    return found


def can_serve(number_format: str, has_vllm: bool, on_cpu: bool, capability: float | None) -> tuple[bool, str]:
    """Whether a row of FORMATS can be served, and why."""
    _, least, cpu_kernel, word = next(row for row in FORMATS if row[0] == number_format)
    if not has_vllm:
        return False, "there is no vLLM"
    if on_cpu:
        return cpu_kernel, word
    if capability is None:
        return False, "this vLLM is for a GPU, and there is none"
    return capability >= least, word if capability >= least else f"needs compute capability {least}, the card has {capability}"


def recipe_formats(name: str) -> dict[str, list[str]]:
    """The number formats that a built-in recipe's rules use, each with the parts that only some models have ([] if every model has it)."""
    from gemq.recipes.model import load_recipe

    used: dict[str, list[str]] = {}
    for rule in load_recipe(name).rules:
        if rule.scheme == "keep":
            continue
        weights, inputs = rule.scheme.weights, rule.scheme.input_activations
        kind = f"int{weights.num_bits}" if inputs is None else f"{'fp8' if inputs.type == 'float' else 'int8'} inputs"
        parts = list(rule.match) if rule.optional else []
        used[_FORMAT_OF[kind]] = parts if used.get(_FORMAT_OF[kind], parts) else []
    return used


def _memory() -> str:
    values = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        key, _, rest = line.partition(":")
        values[key] = int(rest.split()[0]) * 1024
    return f"{human_bytes(values['MemAvailable'])} free of {human_bytes(values['MemTotal'])}"


def look(python: Path | None = None) -> Machine:
    """This machine as it is now. `python`: the interpreter of vLLM's environment, found as `gemq serve` finds it if not given."""
    from gemq.recipes.model import built_in_names
    from gemq.serve.server import find_python

    missing: list[tuple[str, str]] = []
    engine: dict[str, str] = {}
    try:
        interpreter = find_python(python)
        engine = engine_versions(interpreter)
        where = str(interpreter)
    except UsageError:
        where = "none"
    vllm = engine.get("vllm") or engine.get("vllm-cpu", "")
    if not vllm:
        missing.append(("vLLM, to serve", MAKE_ENVIRONMENT))
    on_cpu = "vllm-cpu" in engine or "cpu" in vllm
    cards = gpus()
    if vllm and not on_cpu and not cards:
        missing.append(("a GPU for this vLLM", f"rm -r .venv-vllm && {MAKE_ENVIRONMENT} builds one for the CPU"))
    if vllm and on_cpu and cards:
        missing.append(("vLLM for the GPU that is here", f"rm -r .venv-vllm && {MAKE_ENVIRONMENT}"))
    if vllm and "soundfile" not in engine:
        missing.append(("audio decoders for vLLM", MAKE_ENVIRONMENT))
    disk = shutil.disk_usage(Path.cwd())
    facts = [
        Fact("Python", f"{platform.python_version()} at {sys.executable}"),
        *[Fact(name, _own_version(name)) for name in ("gemq", "torch", "transformers", "compressed-tensors")],
        Fact("vLLM", f"{vllm} ({'CPU' if on_cpu else 'GPU'}) at {where}" if vllm else "none"),
        *[Fact(f"vLLM's {name}", engine[name]) for name in ("torch", "transformers", "compressed-tensors") if name in engine],
        *[Fact("GPU", f"{card.name}, compute capability {card.capability}, driver {card.driver}, "
                      f"{human_bytes(card.free_bytes)} free of {human_bytes(card.total_bytes)}") for card in cards],
        *([] if cards else [Fact("GPU", "none")]),
        Fact("CPU", f"{len(os.sched_getaffinity(0))} cores, {_instruction_set()}"),
        Fact("memory", _memory()),
        Fact("disk here", f"{human_bytes(disk.free)} free of {human_bytes(disk.total)}"),
    ]
    capability = min((card.capability for card in cards), default=None)
    rows = []
    for name in built_in_names():
        rows.append(_recipe_row(name, bool(vllm), on_cpu, capability))
    return Machine(tuple(facts), tuple(rows), tuple(missing))


def _recipe_row(name: str, has_vllm: bool, on_cpu: bool, capability: float | None) -> Served:
    told, served = [], True
    for used, parts in recipe_formats(name).items():
        good, why = can_serve(used, has_vllm, on_cpu, capability)
        served = served and (good or bool(parts))
        told.append(used if good else f"not models with {', '.join(parts)} ({used}: {why})" if parts else f"{used}: {why}")
    return Served(name, served, "; ".join(told))


def _own_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _instruction_set() -> str:
    try:
        flags = set(next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")).split())
    except (OSError, StopIteration):
        return platform.machine()
    known = (("AMX", "amx_bf16"), ("AVX-512 bf16", "avx512_bf16"), ("AVX-512", "avx512f"), ("AVX2", "avx2"))
    return next((name for name, flag in known if flag in flags), platform.machine())
