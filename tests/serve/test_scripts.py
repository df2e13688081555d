"""What serve.py and launch.sh promise, told by a stand-in for vLLM."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from fake_vllm import alive, wait_until

from gemq.quantize.seal import write_seal
from gemq.serve import serve as serve_script
from gemq.serve.server import free_port

SERVE = Path(serve_script.__file__).resolve().parent
SCRIPTS = {"serve.py": ["python", str(SERVE / "serve.py")], "launch.sh": ["bash", str(SERVE / "launch.sh"), "serve"]}
NEEDED = {
    "serve.py": ("MODEL_ID", "SERVED_MODEL_NAME", "HOST", "PORT"),
    "launch.sh": ("ARTIFACT", "TOKENIZER", "PORT", "SERVED_NAME", "MAX_MODEL_LEN", "GPU_MEMORY_UTILIZATION", "KV_CACHE_DTYPE"),
}
both = pytest.mark.parametrize("script", SCRIPTS)


def given(script: str, model: Path, port: int) -> dict[str, str]:
    """A sound environment for `script`."""
    if script == "serve.py":
        return {"MODEL_ID": str(model), "SERVED_MODEL_NAME": "m", "HOST": "127.0.0.1", "PORT": str(port)}
    return {"ARTIFACT": str(model), "TOKENIZER": str(model), "PORT": str(port), "SERVED_NAME": "m", "MAX_MODEL_LEN": "1024",
            "GPU_MEMORY_UTILIZATION": "0.9", "KV_CACHE_DTYPE": "auto"}


@pytest.fixture
def base(fake_python: Path) -> dict[str, str]:
    """An environment in which the stand-in is the vLLM, and nothing of the caller's is set."""
    return {"PATH": f"{fake_python.parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), "GEMQ_PYTHON": str(fake_python)}


def run(script: str, environment: dict[str, str], *arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*SCRIPTS[script], *arguments], env=environment, capture_output=True, text=True, timeout=60, cwd=cwd)


def start(script: str, environment: dict[str, str], note: Path, *arguments: str) -> tuple[subprocess.Popen[bytes], dict]:
    """Start for good; returns once the stand-in has told what it was started with."""
    process = subprocess.Popen([*SCRIPTS[script], *arguments], env={**environment, "FAKE_NOTE": str(note)}, stderr=subprocess.DEVNULL)

    def told() -> bool:
        assert process.poll() is None, process.returncode
        return note.exists() and note.read_text().endswith("}")

    wait_until(told, 60, "the engine is started")
    return process, json.loads(note.read_text())


def end(process: subprocess.Popen[bytes]) -> int:
    process.terminate()
    return process.wait(30)


@both
def test_each_missing_variable_is_named(script: str, base: dict[str, str], checkpoint: Path) -> None:
    for name in NEEDED[script]:
        environment = base | given(script, checkpoint, free_port())
        del environment[name]
        done = run(script, environment)
        assert done.returncode == 2
        assert name in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    empty = run(script, base | given(script, checkpoint, free_port()) | {NEEDED[script][0]: ""})
    assert empty.returncode == 2
    assert NEEDED[script][0] in empty.stderr


@both
@pytest.mark.parametrize(("name", "value"), [("PORT", "80a"), ("PORT", "0"), ("PORT", "65536"), ("GEMQ_PROFILE", "fastest")])
def test_values_that_make_no_sense_are_refused(script: str, name: str, value: str, base: dict[str, str], checkpoint: Path) -> None:
    done = run(script, base | given(script, checkpoint, free_port()) | {name: value})
    assert done.returncode == 2
    assert name in done.stderr
    assert value in done.stderr


@both
def test_a_model_that_is_not_there_is_refused_by_name(script: str, base: dict[str, str], tmp_path: Path) -> None:
    done = run(script, base | given(script, tmp_path / "nowhere", free_port()))
    assert done.returncode == 2
    assert "nowhere" in done.stderr


@both
def test_a_taken_port_is_refused_at_once(script: str, base: dict[str, str], checkpoint: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        done = run(script, base | given(script, checkpoint, port))
    assert done.returncode == 2
    assert str(port) in done.stderr
    assert "in use" in done.stderr


@both
@pytest.mark.parametrize("damage", ["flipped", "shorter", "lost", "surplus", "seal"])
def test_a_checkpoint_that_is_not_what_was_sealed_never_starts(script: str, damage: str, base: dict[str, str], checkpoint: Path,
                                                               tmp_path: Path) -> None:
    weights, named = checkpoint / "model.safetensors", "model.safetensors"
    raw = bytearray(weights.read_bytes())
    if damage == "flipped":
        raw[5000] ^= 1
        weights.write_bytes(raw)
    elif damage == "shorter":
        weights.write_bytes(raw[:-1])
    elif damage == "lost":
        weights.unlink()
    elif damage == "surplus":
        (checkpoint / "sub" / "modeling.py").write_text("evil")
        named = "sub/modeling.py"
    else:
        (checkpoint / "gemq.seal.json").write_text("{}")
        named = "gemq.seal.json"
    note = tmp_path / "note"
    done = run(script, base | given(script, checkpoint, free_port()) | {"FAKE_NOTE": str(note)})
    assert done.returncode == 4, done.stderr
    assert named in done.stderr
    assert not note.exists()


@both
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_seal_check_can_be_turned_off(script: str, how: str, base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "sub" / "extra.txt").write_text("y")
    environment = base | given(script, checkpoint, free_port()) | ({"GEMQ_SKIP_VERIFY": "1"} if how == "variable" else {})
    process, _ = start(script, environment, tmp_path / "note", *(["--no-verify"] if how == "flag" else []))
    end(process)


@both
def test_gemqs_own_seal_holds_also_with_what_the_hub_leaves(script: str, base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / "gemq.seal.json").unlink()
    write_seal(checkpoint)
    (checkpoint / ".gitattributes").write_text("*.safetensors filter=lfs")
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache" / "x").write_text("x")
    process, _ = start(script, base | given(script, checkpoint, free_port()), tmp_path / "note")
    end(process)


@both
def test_the_process_becomes_the_engine_so_signals_reach_it(script: str, base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    process, told = start(script, base | given(script, checkpoint, free_port()), tmp_path / "note")
    assert told["pid"] == process.pid
    assert end(process) == -signal.SIGTERM
    assert not alive(told["pid"])


@both
@pytest.mark.parametrize("profile", serve_script.PROFILES)
def test_every_modality_stays_on_in_every_profile(script: str, profile: str, base: dict[str, str], checkpoint: Path,
                                                  tmp_path: Path) -> None:
    process, told = start(script, base | given(script, checkpoint, free_port()) | {"GEMQ_PROFILE": profile}, tmp_path / "note")
    end(process)
    flags = " ".join(told["arguments"])
    assert not re.search(r"limit-mm|language-model-only|skip-mm|skip-.*tower|mm-per-prompt", flags)
    assert "--no-enable-prefix-caching" in flags
    assert serve_script.PROFILES[profile].split(" --gpu")[0] in flags


def test_both_scripts_hold_one_table_of_profiles() -> None:
    rows = dict(re.findall(r'^\s+([\w-]+)\) echo "(.+)" ;;$', (SERVE / "launch.sh").read_text(), re.M))
    # the arena sets the card's share itself
    assert rows == {name: re.sub(r" --gpu-memory-utilization \S+", "", row) for name, row in serve_script.PROFILES.items()}


def test_serve_py_tells_vllm_what_the_harness_said(base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    extra = {"GEMQ_EXTRA_ARGS": "--kv-cache-dtype 'fp8 e5m2'", "MAX_MODEL_LEN": "512"}
    process, told = start("serve.py", base | given("serve.py", checkpoint, free_port()) | extra, tmp_path / "note")
    end(process)
    value = dict(zip(told["arguments"], told["arguments"][1:], strict=False))
    assert value["--model"] == str(checkpoint)
    assert value["--served-model-name"] == "m"
    assert value["--max-model-len"] == "512"
    assert value["--kv-cache-dtype"] == "fp8 e5m2"


def test_launch_sh_tells_vllm_what_the_arena_said(base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    wishes = {"GENERATION_CONFIG": "vllm", "LANGUAGE_MODEL_ONLY": "1", "KV_CACHE_DTYPE": "fp8", "GPU_MEMORY_UTILIZATION": "0.77"}
    process, told = start("launch.sh", base | given("launch.sh", checkpoint, free_port()) | wishes, tmp_path / "note")
    end(process)
    value = dict(zip(told["arguments"], told["arguments"][1:], strict=False))
    assert value["--tokenizer"] == value["--model"] == str(checkpoint)
    assert value["--kv-cache-dtype"] == "fp8"
    assert value["--gpu-memory-utilization"] == "0.77"
    assert value["--max-model-len"] == "1024"
    assert value["--generation-config"] == "vllm"
    assert "--language-model-only" in told["arguments"]


def test_launch_sh_uses_the_vllm_command_on_path(base: dict[str, str], checkpoint: Path, tmp_path: Path, fake_python: Path) -> None:
    command = fake_python.parent / "vllm"
    command.write_text(f'#!/bin/sh\nexec "{fake_python}" -m vllm.entrypoints.openai.api_server "$@"\n')
    command.chmod(0o755)
    environment = base | given("launch.sh", checkpoint, free_port())
    del environment["GEMQ_PYTHON"]
    process, told = start("launch.sh", environment, tmp_path / "note")
    assert end(process) == -signal.SIGTERM
    assert told["arguments"][1] == str(checkpoint)


def test_what_a_cpu_needs_is_set_only_for_a_vllm_that_was_built_for_cpus(base: dict[str, str], checkpoint: Path, tmp_path: Path,
                                                                         fake_site: Path) -> None:
    environment = base | given("serve.py", checkpoint, free_port()) | {"VLLM_CPU_KVCACHE_SPACE": "3"}
    process, told = start("serve.py", environment, tmp_path / "note")
    end(process)
    assert told["environment"]["VLLM_CPU_INT4_W4A8"] == "0"
    assert told["environment"]["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert told["environment"]["HF_HUB_OFFLINE"] == "1"
    assert "--enforce-eager" in told["arguments"]

    site = tmp_path / "gpu-site"
    shutil.copytree(fake_site, site)
    (site / "vllm-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    done = subprocess.run([sys.executable, SERVE / "serve.py", "--dry-run"], capture_output=True, text=True, timeout=60,
                          env=base | given("serve.py", checkpoint, free_port()) | {"PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    assert "--enforce-eager" not in done.stderr
    assert serve_script.engine_environment({"HOME": "/tmp"}, None, False) == {"HOME": "/tmp"}


def test_serve_py_says_where_vllm_is_missing(base: dict[str, str], checkpoint: Path) -> None:
    done = subprocess.run([sys.executable, "-S", SERVE / "serve.py"], capture_output=True, text=True, timeout=60,
                          env=given("serve.py", checkpoint, free_port()))
    assert done.returncode == 2
    assert "vLLM is not installed" in done.stderr


def test_a_model_length_fits_the_model(checkpoint: Path) -> None:
    assert serve_script.model_length(checkpoint) == 4096
    (checkpoint / "config.json").write_text('{"max_position_embeddings": 131072}')
    assert serve_script.model_length(checkpoint) == serve_script.MAX_MODEL_LEN
    assert serve_script.model_length(None) == serve_script.MAX_MODEL_LEN


def test_a_model_id_is_a_path_in_the_folder_or_a_hub_id(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoint.parent)
    assert serve_script.find_model("checkpoint") == (str(checkpoint), checkpoint)
    assert serve_script.find_model("./checkpoint") == (str(checkpoint), checkpoint)
    assert serve_script.find_model("google/gemma-4-E4B-it") == ("google/gemma-4-E4B-it", None)
    with pytest.raises(serve_script.Refused, match=r"without a config\.json"):
        serve_script.find_model("./checkpoint/sub")


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to become another user")
def test_it_serves_from_a_read_only_folder_as_an_unprivileged_user(checkpoint: Path, fake_site: Path, tmp_path: Path) -> None:
    folder = Path("/tmp") / f"gemq-submission-{os.getpid()}"
    try:
        shutil.copytree(checkpoint, folder / "model")
        shutil.copy(SERVE / "serve.py", folder / "serve.py")
        site = folder / "site"
        shutil.copytree(fake_site, site)
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o555 if path.is_dir() else 0o444)
        note = Path("/tmp") / f"gemq-note-{os.getpid()}"
        note.touch()
        note.chmod(0o666)
        environment = {"PYTHONPATH": str(site), "HOME": "/", "FAKE_NOTE": str(note), "PATH": os.environ["PATH"]}
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
        process = subprocess.Popen([python, "serve.py"], cwd=folder, user=65534, group=65534, extra_groups=[], stderr=subprocess.PIPE,
                                   env=environment | given("serve.py", Path("./model"), free_port()))
        try:
            wait_until(lambda: process.poll() is not None or note.read_text().endswith("}"), 60, "the engine is started")
            assert process.poll() is None, process.stderr.read().decode() if process.stderr else ""
            told = json.loads(note.read_text())
            assert told["uid"] == 65534
            scratch = Path(told["environment"]["VLLM_CACHE_ROOT"])
            assert scratch.parent.stat().st_uid == 65534
            assert told["environment"]["HOME"] == str(scratch.parent)
        finally:
            end(process)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        note.unlink(missing_ok=True)


def test_both_files_stand_alone() -> None:
    imported = {name.split(".")[0] for node in ast.walk(ast.parse((SERVE / "serve.py").read_text()))
                for name in ([alias.name for alias in node.names] if isinstance(node, ast.Import)
                             else [node.module or ""] if isinstance(node, ast.ImportFrom) else [])}
    assert imported <= sys.stdlib_module_names
    embedded = [part.split("\nPYTHON\n")[0].split("\n", 1)[1] for part in (SERVE / "launch.sh").read_text().split("<<'PYTHON'")[1:]]
    assert len(embedded) == 2
    for script in embedded:
        names = {alias.name.split(".")[0] for node in ast.walk(ast.parse(script)) if isinstance(node, ast.Import) for alias in node.names}
        assert names <= sys.stdlib_module_names


