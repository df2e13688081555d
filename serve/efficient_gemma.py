"""Efficient Gemma's package: manifest.json, serve.py, README.md, and the checkpoint inside or by Hub id at a commit.

The harness makes an environment from the manifest's `dependencies` (uv, Python 3.12), starts `serve` in the read-only folder (`python` means
that environment's) with the manifest's `env` and MODEL_ID, SERVED_MODEL_NAME, HOST and PORT, and polls /v1/models.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from gemq import atomic
from gemq.errors import UsageError
from gemq.output_paths import require_separate
from gemq.serve.package import Order, Taken, checkpoint_section, measured_section, place, require_taken
from gemq.serve.profile import SHIPPED, Profile, packaged, put, section
from gemq.serve.serve import DEFAULT_PROFILE
from gemq.serve.wheel import build, entry_points

ARENA = "efficient-gemma"
TAKEN = Taken(
    "google/gemma-4-E4B-it", ("Gemma4ForConditionalGeneration",),
    {"hidden_size": 2560, "num_hidden_layers": 42, "intermediate_size": 10240, "num_attention_heads": 8, "num_key_value_heads": 2,
     "vocab_size": 262144, "sliding_window": 512},
    towers=("vision_tower", "audio_tower"),
)  # fmt: skip
# the release that the tests here serve with; audio needs soundfile and av
DEPENDENCIES = ("vllm==0.32.0", "transformers==5.17.0", "soundfile==0.14.0", "av==18.1.0")
FIELDS = ("name", "description", "dependencies", "model_id", "served_model_name", "port", "serve", "env")
_REQUIREMENT = re.compile(r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?(\[[\w., -]+\])?(\s*@\s*https?://\S+|\s*(===?|[~!<>]=|<|>)[^;]+)?(\s*;.+)?", re.ASCII)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_GIVEN = ("MODEL_ID", "SERVED_MODEL_NAME", "HOST", "PORT")  # the harness sets these itself


def problems(manifest: dict[str, Any], folder: Path) -> list[str]:
    """Where the manifest of the submission in `folder` breaks the harness's rules, in words."""
    found = [f"{field} is missing" for field in FIELDS if field not in manifest]
    if found:
        return found
    for field in ("name", "description", "model_id", "served_model_name"):
        if not isinstance(manifest[field], str) or not manifest[field].strip() or not manifest[field].isprintable():
            found.append(f"{field} is {manifest[field]!r}; a line of text is valid")
    dependencies, serve, env, port = (manifest[field] for field in ("dependencies", "serve", "env", "port"))
    if not isinstance(dependencies, list) or not all(isinstance(each, str) and _REQUIREMENT.fullmatch(each) for each in dependencies):
        found.append(f"dependencies is {dependencies!r}; a list of requirements as pip takes them is valid")
    if type(port) is not int or not 0 < port < 65536:
        found.append(f"port is {port!r}; a number from 1 to 65535 is valid")
    if not isinstance(serve, list) or not serve or not all(isinstance(part, str) and part for part in serve):
        found.append(f"serve is {serve!r}; a list of texts, the command and its arguments, is valid")
    else:
        scripts = [part for part in serve if part.endswith((".py", ".sh"))]
        found += [f"serve names {script}, which is not in the folder" for script in scripts if not _inside(folder, script)]
    if not isinstance(env, dict) or not all(_VARIABLE.fullmatch(key) and isinstance(value, str) for key, value in env.items()):
        found.append(f"env is {env!r}; names and texts are valid")
    else:
        found += [f"env sets {key}, which the harness sets" for key in _GIVEN if key in env]
        if "GEMQ_PLUGIN" in env and not _inside(folder, env["GEMQ_PLUGIN"]):
            found.append(f"env's GEMQ_PLUGIN names {env['GEMQ_PLUGIN']}, which is not in the folder")
    if isinstance(manifest["model_id"], str):
        found += _model_problems(manifest["model_id"], folder)
    return found


def _inside(folder: Path, name: str) -> bool:
    """Whether `name` is a file of the submission itself."""
    path = folder / name
    return not Path(name).is_absolute() and ".." not in Path(name).parts and path.is_file()


def _model_problems(model_id: str, folder: Path) -> list[str]:
    if _inside(folder, f"{model_id}/config.json"):
        return []
    if model_id.startswith((".", "/")) or not _HUB_ID.fullmatch(model_id) or (folder / model_id).exists():
        return [f"model_id is {model_id!r}; a Hub id, or a checkpoint's directory inside the folder, is valid"]
    return []


def make(order: Order, final: Path, *, copy: bool = False, dependencies: tuple[str, ...] = DEPENDENCIES,
         plugin: Path | None = None) -> dict[str, Any]:
    """Write the package to `final` in one step; returns what is in it: `manifest` and `checkpoint`, where and how it got there.

    `plugin`: an engine plugin's source folder. Its wheel lies in the package and serve.py puts it on vLLM's path: what a path among the
    dependencies would be relative to, the harness doesn't say.
    """
    checkpoint = order.checkpoint
    pinned = next((each.partition("==")[2].strip() for each in dependencies if re.fullmatch(r"vllm\s*==[^;]+", each)), "another than gemq knows")
    profile, tuned = packaged(order.profile or DEFAULT_PROFILE, checkpoint.seal_digest, pinned, checkpoint.digest)
    if tuned is not None and tuned.speculation is not None:
        require_separate(final, Path(tuned.speculation.drafter))
    model = require_taken(checkpoint, TAKEN, ARENA, force=order.force)
    atomic.require_absent(final)
    env = {"GEMQ_PROFILE": profile, **({"MODEL_REVISION": order.hub.revision} if order.hub else {})}
    wheel, content = build(plugin) if plugin is not None else ("", b"")
    if plugin is not None:
        env |= {"GEMQ_PLUGIN": wheel, "VLLM_PLUGINS": ",".join(entry_points(plugin))}
    manifest: dict[str, Any] = {
        "name": order.name or checkpoint.directory.name,
        "description": order.description or f"{model} ({checkpoint.schemes()}) on vLLM, packaged by gemq",
        "dependencies": list(dependencies),
        "model_id": order.hub.repo if order.hub else "model",
        "served_model_name": TAKEN.model.rpartition("/")[2],
        "port": 8000,
        "serve": ["python", "serve.py"],
        "env": env,
    }
    with atomic.staged_directory(final) as folder:
        if order.hub is None:
            if copy:
                atomic.require_space(folder, checkpoint.nbytes)
            how = f"inside, {place(checkpoint.directory, checkpoint.files, folder / 'model', copy=copy)}"
        else:
            how = f"{order.hub.repo} at {order.hub.revision}"
        shutil.copyfile(Path(__file__).with_name("serve.py"), folder / "serve.py")
        if wheel:
            (folder / wheel).write_bytes(content)
        if tuned is not None:
            put(tuned, folder, copy=copy)
        (folder / "manifest.json").write_text(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        where = "`model/`" if order.hub is None else f"`{order.hub.repo}` at `{order.hub.revision}`"
        (folder / "README.md").write_text(_readme(order, manifest, where, tuned), encoding="utf-8")
        found = problems(manifest, folder)
        if found:
            raise UsageError(f"the manifest would break the harness's rules: {'; '.join(found)}", "change --name, --description or --dependency")
    return {"manifest": manifest, "checkpoint": how}


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a submission, by the harness's rules; raises UsageError that lists what breaks them."""
    path, advice = folder / "manifest.json", "make it with gemq package"
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read: {error}", advice) from None
    if not isinstance(manifest, dict):
        raise UsageError(f"{path} is no JSON object", advice)
    found = problems(manifest, folder)
    if found:
        raise UsageError(f"{path} is no manifest of a submission: {'; '.join(found)}", advice)
    return manifest


def _readme(order: Order, manifest: dict[str, Any], where: str, tuned: Profile | None) -> str:
    files = [("`manifest.json`", "what the harness installs and starts"), ("`serve.py`", "starts vLLM behind the endpoint; standard library only")]
    if order.hub is None:
        files.append(("`model/`", "the checkpoint"))
    if "GEMQ_PLUGIN" in manifest["env"]:
        files.append((f"`{manifest['env']['GEMQ_PLUGIN']}`", "the engine's plugin, which serve.py turns on; GEMQ_INT4=0 turns it off"))
    if tuned is not None:
        files.append((f"`{SHIPPED}`", "what gemq tune found for vLLM; serve.py applies it"))
    return "\n".join([
        f"# {manifest['name']}", "", f"{manifest['description']}.", "", "| | |", "|---|---|", *(f"| {name} | {what} |" for name, what in files), "",
        checkpoint_section(order.checkpoint, where), measured_section(order.measured),
        *filter(None, [section(tuned)]),
        "## Start it", "", "    gemq serve .", "", "or without gemq, in an environment with the manifest's dependencies:", "",
        f"    MODEL_ID={manifest['model_id']} SERVED_MODEL_NAME={manifest['served_model_name']} HOST=127.0.0.1 PORT=8000 "
        + " ".join(f"{key}={value}" for key, value in manifest["env"].items()) + " python serve.py", "",
        "## Send it", "", f"    hf buckets sync . hf://buckets/gemma-challenge/gemma-$AGENT_ID/submissions/$AGENT_ID/{_slug(manifest['name'])}", "",
    ])  # fmt: skip


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.-]+", "-", name.lower()).strip("-") or "submission"
