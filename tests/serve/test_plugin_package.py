"""gemq's own plugin in both packages: a wheel that pip takes and serve.py turns on, a source folder that LowBArena installs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import small_checkpoint as small
from fake_vllm import wait_until
from test_package import HUB, contents, refused, run
from test_scripts import end, given, start

from gemq.serve.server import free_port
from gemq.serve.wheel import PLUGINS, build, entry_points

SOURCE = PLUGINS["gemq-int4"]


def test_the_wheel_is_the_same_bytes_each_time_and_pip_installs_it(tmp_path: Path) -> None:
    name, content = build(SOURCE)
    assert (name, content) == build(SOURCE)
    (tmp_path / name).write_bytes(content)
    target = tmp_path / "site"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--target", target, tmp_path / name],
                   check=True, capture_output=True)  # fmt: skip
    source = {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in (SOURCE / "gemq_int4").rglob("*")
              if path.suffix in (".py", ".json") and "__pycache__" not in path.parts}  # fmt: skip
    assert {path: (target / path).read_bytes() for path in source} == source
    assert any(path.endswith(".json") for path in source), "the tuned cuts are part of it"
    ask = "import importlib.metadata as m; print(*m.entry_points(group='vllm.general_plugins'))"
    environment = {"PYTHONPATH": str(target), "PATH": os.environ["PATH"]}
    found = subprocess.run([sys.executable, "-c", ask], env=environment, capture_output=True, text=True, check=True)
    assert "gemq_int4:register" in found.stdout
    assert entry_points(SOURCE) == ["gemq_int4"]


def test_efficient_gemmas_package_holds_the_wheel_and_names_it(tmp_path: Path) -> None:
    checkpoint = small.e4b(tmp_path / "e4b")
    made = run(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--plugin", "gemq-int4")
    name, content = build(SOURCE)
    assert (tmp_path / "out" / name).read_bytes() == content
    assert made["manifest"]["env"]["GEMQ_PLUGIN"] == name
    assert made["manifest"]["env"]["VLLM_PLUGINS"] == "gemq_int4"
    assert name in (tmp_path / "out" / "README.md").read_text()
    run(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "again", "--plugin", "gemq-int4")
    assert contents(tmp_path / "out") == contents(tmp_path / "again")
    run(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "without")
    assert not list((tmp_path / "without").glob("*.whl"))


def test_lowbarenas_package_holds_the_source_folder(tmp_path: Path) -> None:
    checkpoint = small.qwen(tmp_path / "qwen")
    made = run(checkpoint, "--arena", "lowbarena", "--output", tmp_path / "out", *HUB, "--plugin", "gemq-int4")
    folder = tmp_path / "out" / "engine" / "plugin"
    held = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {"pyproject.toml", "gemq_int4/__init__.py", "gemq_int4/kernel.py", "gemq_int4/linear.py"} <= held
    assert not any("__pycache__" in path for path in held)
    assert made["archive_bytes"] < 100_000


def test_a_plugin_that_is_none_is_refused(tmp_path: Path) -> None:
    checkpoint = small.e4b(tmp_path / "e4b")
    error = refused(checkpoint, "--arena", "efficient-gemma", "--output", tmp_path / "out", "--plugin", str(tmp_path))
    assert "gemq-int4" in error.message
    assert not (tmp_path / "out").exists()


@pytest.fixture
def base(fake_python: Path) -> dict[str, str]:
    return {"PATH": f"{fake_python.parent}:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), "GEMQ_PYTHON": str(fake_python)}


def test_serve_py_puts_the_wheel_on_the_engines_path(base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "package"
    folder.mkdir()
    name, content = build(SOURCE)
    (folder / name).write_bytes(content)
    shutil.copyfile(SOURCE.parent / "serve.py", folder / "serve.py")
    environment = base | given("serve.py", checkpoint, free_port())
    environment |= {"GEMQ_PLUGIN": name, "VLLM_PLUGINS": "gemq_int4", "TMPDIR": str(tmp_path), "FAKE_NOTE": str(tmp_path / "note")}
    process = subprocess.Popen(["python", str(folder / "serve.py")], env=environment, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: (tmp_path / "note").exists() and (tmp_path / "note").read_text().endswith("}"), 60, "the engine is started")
        told = json.loads((tmp_path / "note").read_text())["environment"]
    finally:
        end(process)
    first = Path(told["PYTHONPATH"].split(os.pathsep)[0])
    assert (first / "gemq_int4" / "kernel.py").is_file()
    assert list(first.glob("gemq_int4-*.dist-info/entry_points.txt"))
    assert told["VLLM_PLUGINS"] == "gemq_int4"


@pytest.mark.parametrize("name", ["nothing.whl", "../x.whl", "serve.py", "/etc/passwd"])
def test_serve_py_refuses_what_is_no_wheel_beside_it(base: dict[str, str], checkpoint: Path, name: str) -> None:
    done = subprocess.run(["python", str(SOURCE.parent / "serve.py"), "--dry-run"], capture_output=True, text=True, timeout=60,
                          env=base | given("serve.py", checkpoint, free_port()) | {"GEMQ_PLUGIN": name})  # fmt: skip
    assert done.returncode == 2
    assert "GEMQ_PLUGIN" in done.stderr
    assert name in done.stderr


@pytest.mark.parametrize("installed", [True, False])
def test_launch_sh_turns_the_plugin_on_and_says_when_it_is_not_installed(base: dict[str, str], checkpoint: Path, tmp_path: Path, fake_site: Path,
                                                                          installed: bool) -> None:  # fmt: skip
    engine = tmp_path / "engine"
    shutil.copytree(SOURCE, engine / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copyfile(SOURCE.parent / "launch.sh", engine / "launch.sh")
    site = shutil.copytree(fake_site, tmp_path / "its-site")
    if installed:
        name, content = build(SOURCE)
        (tmp_path / name).write_bytes(content)
        zipfile.ZipFile(tmp_path / name).extractall(site)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    environment = base | given("launch.sh", checkpoint, free_port())
    environment |= {"GEMQ_PYTHON": str(python), "FAKE_NOTE": str(tmp_path / "note"), "FAKE_FAIL": "x"}
    done = subprocess.run(["bash", str(engine / "launch.sh"), "serve"], env=environment, capture_output=True, text=True, timeout=60)
    told = json.loads((tmp_path / "note").read_text())["environment"]
    assert told["VLLM_PLUGINS"] == "gemq_int4"
    assert ("not installed" in done.stderr) is not installed


def test_without_a_plugin_nothing_is_turned_on(base: dict[str, str], checkpoint: Path, tmp_path: Path) -> None:
    process, told = start("serve.py", base | given("serve.py", checkpoint, free_port()), tmp_path / "note")
    end(process)
    assert "VLLM_PLUGINS" not in told["environment"]
