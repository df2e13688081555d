"""Serve a checkpoint through vLLM's OpenAI server, as Efficient Gemma's harness starts it. Standard library only; shipped as it is.

    MODEL_ID=./model SERVED_MODEL_NAME=gemma HOST=127.0.0.1 PORT=8000 python serve.py

Needed in the environment: MODEL_ID (a directory, or a Hub id), SERVED_MODEL_NAME, HOST, PORT.
Understood besides: GEMQ_PROFILE (a key of PROFILES, or a .json that gemq tune wrote), MODEL_REVISION (a Hub commit), MAX_MODEL_LEN
(tokens), GEMQ_EXTRA_ARGS (more of vLLM's own arguments, quoted as for a shell), GEMQ_SKIP_VERIFY=1 (or --no-verify: don't check the
seal); `--dry-run` prints the command and stops.

A checkpoint with a gemq.seal.json is verified first. Then this process becomes vLLM's, so every signal reaches it. Exit codes before
that: 2 for an environment that can't be served, 4 for a checkpoint that isn't what was sealed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

# One row a profile: vLLM's arguments. launch.sh holds the same table; a test holds them together. Scoring a prompt's tokens
# (prompt_logprobs) takes memory that vLLM doesn't plan for, batch x vocabulary x 4 bytes and more: hence small batches and some room.
PROFILES = {
    "single-stream": "--max-num-seqs 4 --max-num-batched-tokens 512 --gpu-memory-utilization 0.90",
    "throughput": "--max-num-seqs 256 --max-num-batched-tokens 2048 --gpu-memory-utilization 0.85",
    "memory": "--max-num-seqs 64 --max-num-batched-tokens 512 --gpu-memory-utilization 0.75",
}
DEFAULT_PROFILE = "single-stream"
# No prefix caching: a prompt that was seen before must cost what it cost at first. No flag here or above switches an encoder off.
ALWAYS = "--no-enable-prefix-caching --seed 0"
MAX_MODEL_LEN = 8192  # tokens, or what the checkpoint was made for if that is less
# vLLM on a CPU: GiB for keys and values, int4 weights without int8 activations, threads free to move, and waiting threads that let others
# work: three processes share the cores, and a spinning one keeps the one that it waits for from running
CPU_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_INT4_W4A8": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                   "OMP_WAIT_POLICY": "PASSIVE"}
# without torch.compile a start takes half as long there and needs no C++ compiler
CPU_ARGUMENTS = "--enforce-eager"

TUNED_KEYS = {"version", "kind", "base", "arguments", "environment", "speculation", "made_for", "measured"}
NEEDED = ("MODEL_ID", "SERVED_MODEL_NAME", "HOST", "PORT")
SEAL_FILE = "gemq.seal.json"
CACHE_VARIABLES = ("VLLM_CACHE_ROOT", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


class Refused(Exception):
    """Why nothing is served, in a sentence, and the exit code."""

    def __init__(self, message: str, code: int = 2) -> None:
        super().__init__(message)
        self.code = code


def read_environment(environment: dict[str, str]) -> dict[str, str]:
    """The variables that this script needs; raises Refused naming those that are missing or make no sense."""
    missing = [name for name in NEEDED if not environment.get(name, "").strip()]
    if missing:
        raise Refused(f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set; needed are {', '.join(NEEDED)}")
    port = environment["PORT"].strip()
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise Refused(f"PORT is {port!r}; a number from 1 to 65535 is valid")
    profile = environment.get("GEMQ_PROFILE", "") or DEFAULT_PROFILE
    if profile not in PROFILES and not profile.endswith(".json"):
        raise Refused(f"GEMQ_PROFILE is {profile!r}; valid are {', '.join(PROFILES)}, or a .json that gemq tune wrote")
    return {**{name: environment[name].strip() for name in NEEDED}, "GEMQ_PROFILE": profile}


def find_model(model_id: str) -> tuple[str, Path | None]:
    """What to tell vLLM, and the directory if it is one; a relative path counts from here, then from this file's folder."""
    for base in (Path.cwd(), Path(__file__).resolve().parent):
        path = base / model_id
        if (path / "config.json").is_file():
            return str(path.resolve()), path.resolve()
        if path.is_dir() and (model_id.startswith((".", "/")) or model_id.count("/") != 1):
            raise Refused(f"MODEL_ID is {model_id!r}, a directory without a config.json; a checkpoint's directory is valid")
    if model_id.startswith((".", "/")) or model_id.count("/") > 1:
        raise Refused(f"MODEL_ID is {model_id!r}, and there is no such directory; a checkpoint's directory or a Hub id is valid")
    return model_id, None


def read_tuned(name: str) -> tuple[dict[str, Any], Path]:
    """The profile that gemq tune wrote, and its file; a relative path counts from here, then from this file's folder. Raises Refused."""
    path = next((base / name for base in (Path.cwd(), Path(__file__).resolve().parent) if (base / name).is_file()), None)
    if path is None:
        raise Refused(f"GEMQ_PROFILE is {name!r}, and there is no such file; valid are {', '.join(PROFILES)}, or a .json that gemq tune wrote")
    try:
        tuned = json.loads(path.read_text(encoding="utf-8"))
        made_for, speculation = tuned["made_for"], tuned["speculation"]
        texts = [*tuned["arguments"], *tuned["environment"], *tuned["environment"].values(), made_for["vllm"], made_for["platform"],
                 made_for["card"], made_for["checkpoint"] or "", *([speculation["drafter"]] if speculation else [])]
        sound = (set(tuned) == TUNED_KEYS and tuned["version"] == 1 and tuned["kind"] == "gemq-profile" and tuned["base"] in PROFILES
                 and all(isinstance(text, str) for text in texts) and (not speculation or type(speculation["tokens"]) is int))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(f"{path} can't be read as a profile of gemq tune ({error!r}); write it again with gemq tune") from None
    if not sound:
        raise Refused(f"{path} is no profile of gemq tune, version 1; write it again with gemq tune")
    return tuned, path


def card(on_cpu: bool) -> str:
    """The name of what computes here: the first GPU's as its driver tells it, or the processor's; "unknown" where nothing tells."""
    try:
        if on_cpu:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
        query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()[0].strip()
    except (OSError, StopIteration, IndexError, subprocess.SubprocessError):
        return "unknown"


def require_made_for(tuned: dict[str, Any], path: Path, on_cpu: bool, directory: Path | None) -> str | None:
    """Refuse a profile made for another vLLM or checkpoint; another card is only told: its flags are valid there, its gain was not measured."""
    made_for, advice = tuned["made_for"], "run gemq tune here, or set GEMQ_PROFILE to one of " + ", ".join(PROFILES)
    here, there = ("cpu" if on_cpu else "cuda"), made_for["platform"]
    version = vllm_version()
    if (version, here) != (made_for["vllm"], there):
        raise Refused(f"{path} was made for vLLM {made_for['vllm']} ({there}), and here is {version} ({here}); {advice}")
    if directory is not None and made_for["checkpoint"]:
        seal = directory / SEAL_FILE
        digest = hashlib.sha256(seal.read_bytes()).hexdigest() if seal.exists() else None
        if digest != made_for["checkpoint"]:
            raise Refused(f"{path} was made for the checkpoint sealed {made_for['checkpoint'][:12]}…, and {directory} is another; {advice}", 4)
    found = card(on_cpu)
    return None if found == made_for["card"] else f"{path.name} was tuned on {made_for['card']}, and here is {found}: its gain was not measured here"


def tuned_arguments(tuned: dict[str, Any], path: Path) -> list[str]:
    """The arguments of a tuned profile; a drafter's relative path counts from the profile's folder."""
    speculation = tuned["speculation"]
    if not speculation:
        return list(tuned["arguments"])
    drafter = (path.parent / speculation["drafter"]).resolve()
    if not (drafter / "config.json").is_file():
        raise Refused(f"{path} drafts with {drafter}, and there is no checkpoint; put it there, or set GEMQ_PROFILE to {tuned['base']}")
    told = {"model": str(drafter), "num_speculative_tokens": speculation["tokens"]}
    return [*tuned["arguments"], "--speculative-config", json.dumps(told, separators=(",", ":"))]


def verify_seal(directory: Path) -> int | None:
    """The number of files that agree with the seal, None if there is no seal; raises Refused naming the first that doesn't agree.

    A closed world: a file that the seal doesn't list is refused too, but for hidden ones, which the Hub's client leaves and vLLM never
    reads.
    """
    seal = directory / SEAL_FILE
    if not seal.exists():
        return None
    try:
        document = json.loads(seal.read_bytes())
        if document["version"] != 1:
            raise ValueError(f"its version is {document['version']!r}, 1 is valid")
        listed = {str(entry["path"]): (int(entry["size"]), str(entry["sha256"])) for entry in document["files"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refused(f"{seal} can't be read as a seal ({error}); fetch the checkpoint again", 4) from None
    found = set()
    for folder, folders, files in os.walk(directory, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found |= {os.path.relpath(os.path.join(folder, name), directory) for name in files if not name.startswith(".")}
    surplus, lost = sorted(found - set(listed) - {SEAL_FILE}), sorted(set(listed) - found)
    if lost:
        raise Refused(f"{directory} lacks {lost[0]}, which its seal lists; fetch the checkpoint again", 4)
    if surplus:
        raise Refused(f"{directory} holds {surplus[0]}, which its seal doesn't list; remove it or fetch the checkpoint again", 4)

    def check(path: str) -> str | None:
        size, digest = listed[path]
        try:
            with open(directory / path, "rb") as file:
                actual_size = os.fstat(file.fileno()).st_size
                if actual_size != size:
                    return f"{directory / path} has {actual_size} bytes, sealed were {size}"
                if hashlib.file_digest(file, "sha256").hexdigest() != digest:
                    return f"{directory / path} is not what was sealed: its SHA-256 differs"
        except OSError as error:
            return f"{directory / path} can't be read: {error.strerror}"
        return None

    with ThreadPoolExecutor(4) as pool:
        problems = [problem for problem in pool.map(check, sorted(listed)) if problem]
    if problems:
        raise Refused(f"{problems[0]}; fetch the checkpoint again", 4)
    return len(listed)


def require_free_port(host: str, port: int) -> None:
    """Refuse at once an address that can't be had, not after a minute of loading."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        why = f"port {port} on {host} can't be had: {error.strerror or error}"
        raise Refused(f"{why}; choose another PORT or stop what listens there") from None


def vllm_is_for_cpu() -> bool:
    """Whether the vLLM beside this interpreter was built for CPUs; raises Refused if there is none."""
    versions = installed_vllm()
    if not versions:
        raise Refused(f"vLLM is not installed for {sys.executable}; start this with the Python of an environment that has it")
    return "vllm-cpu" in versions or "cpu" in versions["vllm"]


def installed_vllm() -> dict[str, str]:
    """The versions of the distributions that are vLLM beside this interpreter, by name."""
    versions = {}
    for name in ("vllm", "vllm-cpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def vllm_version() -> str:
    """vLLM's release, without what names its build (0.32.0 for 0.32.0+cpu)."""
    return next(iter(installed_vllm().values()), "none").partition("+")[0]


def model_length(directory: Path | None) -> int:
    """The longest sequence to serve, in tokens."""
    if directory is None:
        return MAX_MODEL_LEN
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        text = config.get("text_config") or config
        made_for = text.get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise Refused(f"{directory / 'config.json'} can't be read: {error}") from None
    return min(MAX_MODEL_LEN, made_for) if isinstance(made_for, int) and made_for > 0 else MAX_MODEL_LEN


def command_line(settings: dict[str, str], environment: dict[str, str], model: str, directory: Path | None, on_cpu: bool,
                 tuned: list[str] | None = None) -> list[str]:
    """The command that serves: vLLM's server as a module, because a build for CPUs has no `vllm` command that works.

    Of an argument that comes twice vLLM takes the last: what was tuned goes behind the profile, GEMQ_EXTRA_ARGS behind all.
    """
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", settings["SERVED_MODEL_NAME"], "--host", settings["HOST"], "--port", settings["PORT"]]
    command += ["--max-model-len", environment.get("MAX_MODEL_LEN", "").strip() or str(model_length(directory))]
    if environment.get("MODEL_REVISION", "").strip() and directory is None:
        command += [part for flag in ("--revision", "--tokenizer-revision") for part in (flag, environment["MODEL_REVISION"].strip())]
    command += shlex.split(ALWAYS) + shlex.split(PROFILES[settings["GEMQ_PROFILE"]])
    if on_cpu:
        command += shlex.split(CPU_ARGUMENTS)
    return command + (tuned or []) + shlex.split(environment.get("GEMQ_EXTRA_ARGS", ""))


def find_plugin(environment: dict[str, str]) -> Path | None:
    """The wheel that GEMQ_PLUGIN names, None if it names none; raises Refused unless it lies beside this file and is a wheel."""
    name = environment.get("GEMQ_PLUGIN", "").strip()
    if not name:
        return None
    path = Path(__file__).resolve().parent / name
    if not name.endswith(".whl") or "/" in name or not zipfile.is_zipfile(path):
        raise Refused(f"GEMQ_PLUGIN is {name!r}; the name of a wheel beside serve.py is valid")
    return path


def unpack_plugin(wheel: Path, environment: dict[str, str]) -> None:
    """Put the plugin in `wheel` on the path of vLLM's processes: unpacked, because Triton reads its kernels' source from files."""
    place = tempfile.mkdtemp(prefix="gemq-plugin-")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    environment["PYTHONPATH"] = os.pathsep.join(part for part in (place, environment.get("PYTHONPATH", "")) if part)


def engine_environment(environment: dict[str, str], directory: Path | None, on_cpu: bool) -> dict[str, str]:
    """The environment for vLLM: what was given, completed where nothing was said."""
    made = dict(environment)
    if on_cpu:
        made = CPU_ENVIRONMENT | made
    if directory is not None:
        made.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the directory: never wait for a Hub that can't be reached
    cache = Path(made.get("XDG_CACHE_HOME") or Path(made.get("HOME") or "/") / ".cache")
    writable = next((path for path in (cache, *cache.parents) if path.exists()), Path("/"))
    if not os.access(writable, os.W_OK | os.X_OK):  # an unprivileged process in a read-only place
        scratch = tempfile.mkdtemp(prefix="gemq-serve-")
        for name in CACHE_VARIABLES:
            made.setdefault(name, os.path.join(scratch, name.lower()))
        if not os.access(made.get("HOME") or "/", os.W_OK):
            made["HOME"] = scratch
    return made


def main(arguments: list[str]) -> int:
    """Check everything that can be checked without vLLM, then become vLLM's server; returns an exit code only if that can't be."""
    unknown = [argument for argument in arguments if argument not in ("--no-verify", "--dry-run")]
    try:
        if unknown:
            raise Refused(f"unknown argument {unknown[0]!r}; valid are --no-verify and --dry-run, the environment tells the rest")
        environment = dict(os.environ)
        settings = read_environment(environment)
        model, directory = find_model(settings["MODEL_ID"])
        plugin = find_plugin(environment)
        require_free_port(settings["HOST"], int(settings["PORT"]))
        on_cpu = vllm_is_for_cpu()
        more: list[str] = []
        if settings["GEMQ_PROFILE"].endswith(".json"):
            tuned, path = read_tuned(settings["GEMQ_PROFILE"])
            warning = require_made_for(tuned, path, on_cpu, directory)
            if warning:
                print(f"serve.py: warning: {warning}", file=sys.stderr, flush=True)
            settings["GEMQ_PROFILE"], more = tuned["base"], tuned_arguments(tuned, path)
            environment |= tuned["environment"]
        skip = "--no-verify" in arguments or environment.get("GEMQ_SKIP_VERIFY", "") == "1"
        if directory is not None and not skip:
            count = verify_seal(directory)
            found = "no seal to verify" if count is None else f"the seal holds, {count} files"
            print(f"serve.py: {found}", file=sys.stderr, flush=True)
        command = command_line(settings, environment, model, directory, on_cpu, more)
    except Refused as error:
        print(f"serve.py: {error}", file=sys.stderr, flush=True)
        return error.code
    print("serve.py: " + shlex.join(command), file=sys.stderr, flush=True)
    if "--dry-run" not in arguments:
        made = engine_environment(environment, directory, on_cpu)
        if plugin is not None:
            unpack_plugin(plugin, made)
        os.execve(command[0], command, made)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
