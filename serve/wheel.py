"""An engine plugin as the file that pip and Python take: a wheel, built here from its source folder without a build tool or a network.

A wheel is a zip of the package and a .dist-info folder (packaging.python.org, binary distribution format 1.0). The same source gives the same
bytes: names sorted, times fixed, nothing compressed that needn't be.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from gemq.errors import UsageError

# gemq's own plugins, by the name that --plugin takes
PLUGINS = {"gemq-int4": Path(__file__).resolve().parent / "plugin"}
_WHEN = (1980, 1, 1, 0, 0, 0)  # the first time that a zip can tell


def resolve(plugin: str, arena: str, *, directories: bool) -> Path:
    """The source folder of the plugin that --plugin names: one of gemq's own, or a directory where the arena's package takes one."""
    if plugin in PLUGINS:
        return PLUGINS[plugin]
    if directories and plugin and Path(plugin).is_dir():
        return Path(plugin)
    if directories:
        raise UsageError(f"--plugin is {plugin!r}, and there is no such plugin",
                         f"give {', '.join(PLUGINS)}, or the directory of a vLLM plugin with its pyproject.toml")  # fmt: skip
    raise UsageError(f"--plugin is {plugin!r}, and {arena} takes {', '.join(PLUGINS)}",
                     "for a plugin of your own put its release into --dependency")  # fmt: skip


def read_project(source: Path) -> dict[str, Any]:
    """The pyproject.toml of the plugin in `source`; raises UsageError where there is none to read."""
    try:
        return tomllib.loads((source / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{source / 'pyproject.toml'} can't be read: {error}", "install gemq again") from None


def entry_points(source: Path) -> list[str]:
    """The names by which vLLM knows what the plugin registers, for VLLM_PLUGINS."""
    return sorted(read_project(source)["project"]["entry-points"]["vllm.general_plugins"])


def build(source: Path) -> tuple[str, bytes]:
    """The wheel's file name and bytes. Only what a plugin of ours has is read: one list of packages, JSON data, entry points."""
    document = read_project(source)
    project, packages = document["project"], document["tool"]["setuptools"]["packages"]
    name, version = project["name"].replace("-", "_"), project["version"]
    info = f"{name}-{version}.dist-info"
    files: dict[str, bytes] = {}
    for package in packages:
        for path in sorted((source / package).rglob("*")):
            if path.suffix in (".py", ".json") and "__pycache__" not in path.parts:
                files[path.relative_to(source).as_posix()] = path.read_bytes()
    points = ""
    for group, entries in sorted(project["entry-points"].items()):
        points += f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in sorted(entries.items()))
    files[f"{info}/METADATA"] = (
        f"Metadata-Version: 2.4\nName: {project['name']}\nVersion: {version}\nSummary: {project['description']}\n"
        f"License-Expression: {project['license']}\nRequires-Python: {project['requires-python']}\n"
    ).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: gemq\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/entry_points.txt"] = points.encode()
    files[f"{info}/top_level.txt"] = "".join(f"{package}\n" for package in packages).encode()
    record = "".join(f"{path},sha256={_digest(content)},{len(content)}\n" for path, content in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    raw = io.BytesIO()
    with zipfile.ZipFile(raw, "w") as archive:
        for path, content in files.items():
            entry = zipfile.ZipInfo(path, _WHEN)
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, content)
    return f"{name}-{version}-py3-none-any.whl", raw.getvalue()


def _digest(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
