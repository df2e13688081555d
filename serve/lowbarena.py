"""LowBArena's package: engine/ with launch.sh (and a plugin), and submission.json, the body of POST /api/submissions.

The arena fetches the checkpoint from the Hub at its commit and the engine from the body or a repository, installs engine/plugin if there is
one, and runs `launch.sh serve`. The document's fields, patterns and lengths are those of its OpenAPI document.
"""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import shutil
import tarfile
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemq import atomic
from gemq.errors import IntegrityError, UsageError
from gemq.quantize.audit import ITEM_BYTES
from gemq.serve.package import Checkpoint, Order, Taken, checkpoint_section, measured_section, require_commit, require_taken, why_not
from gemq.serve.profile import Profile, packaged, put, section

ARENA = "lowbarena"
DEFAULT_PROFILE = "throughput"
TASKS = {
    "qwen3-8b": Taken("Qwen/Qwen3-8B", ("Qwen3ForCausalLM",),
                      {"hidden_size": 4096, "num_hidden_layers": 36, "intermediate_size": 12288, "num_attention_heads": 32,
                       "num_key_value_heads": 8, "vocab_size": 151936}),
    "qwen3.5-27b": Taken("Qwen/Qwen3.5-27B", ("Qwen3_5ForConditionalGeneration", "Qwen3_5ForCausalLM"),
                         {"hidden_size": 5120, "num_hidden_layers": 64, "intermediate_size": 17408, "num_attention_heads": 24,
                          "num_key_value_heads": 4, "vocab_size": 248320}),
}  # fmt: skip
LARGEST_ARCHIVE_BYTES = 2_000_000
_IN_LAYERS = re.compile(r"(?:^|\.)layers\.\d+\.")
_IN_TOWERS = re.compile(r"vision|visual|audio|multi_modal")


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Artifact(_Body):
    """The checkpoint's repository at its commit."""

    uri: str = Field(min_length=1)
    revision: str = Field(pattern=r"^[0-9a-f]{40}$")


class Engine(_Body):
    """The engine: in the body as base64 of a .tar.gz, or a repository at a commit."""

    uri: str | None = None
    revision: Annotated[str | None, Field(pattern=r"^[0-9a-f]{40}$")] = None
    subdir: Annotated[str | None, Field(max_length=200)] = None
    inline: Annotated[str | None, Field(max_length=2_800_000)] = None


class Serving(_Body):
    """How the arena serves it."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"


class Solution(_Body):
    """The names that the boards show."""

    method: Annotated[str | None, Field(max_length=60, pattern=r"^[^<>]*$")] = None
    checkpoint: Annotated[str | None, Field(max_length=80, pattern=r"^[^<>]*$")] = None
    w_a_kv: Annotated[str | None, Field(max_length=32, pattern=r"^W[0-9.]+A[0-9.]+KV[0-9.]+$")] = None


class Submission(_Body):
    """The body of POST /api/submissions."""

    task_id: str = Field(min_length=1)
    kind: Literal["engine"] = "engine"
    artifact: Artifact
    engine: Engine = Engine()
    serving: Serving = Serving()
    split: Literal["test", "dev"] = "dev"
    measure_efficiency: bool = True
    compute_gpu_hours: Annotated[float | None, Field(ge=0)] = None
    notes: Annotated[str | None, Field(max_length=2000)] = None
    solution: Solution = Solution()


def parse(document: object, where: str) -> Submission:
    """The submission in `document`; raises UsageError that names the field and what is valid. `where` names it in errors."""
    try:
        return Submission.model_validate(document)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, each['loc'])) or 'the body'}: {each['msg']}" for each in error.errors())
        raise UsageError(f"{where} is no submission that LowBArena takes: {problems}", "change the option of that name") from None


def w_a_kv(checkpoint: Checkpoint, kv_cache_dtype: str = "auto") -> str:
    """The bits of weights, activations and KV cache, as in W4A16KV8, from the checkpoint's config and headers.

    Weights: the mean over the decoder layers' linears, by parameters, unquantized ones at their own width; scales aren't counted. The
    activations' mean is over the same linears. Embeddings, head and towers count for neither.
    """
    structure = checkpoint.structure
    stated = checkpoint.config.get("quantization_config")
    groups = list(stated["config_groups"].values()) if isinstance(stated, dict) and "config_groups" in stated else []
    inputs_of = {scheme: _input_bits(group) for scheme, group in zip(structure.quantization.schemes, groups, strict=False)}
    weight_bits = activation_bits = count = 0
    in_units = {tensor.name for unit in structure.units.values() for tensor in unit.tensors.values()}
    for module, unit in structure.units.items():
        if _counts(module):
            size = unit.shape[0] * unit.shape[1]
            count, weight_bits = count + size, weight_bits + size * unit.scheme.num_bits
            activation_bits += size * inputs_of.get(unit.scheme, 16)
    for name, tensor in structure.tensors.items():
        if name not in in_units and len(tensor.shape) >= 2 and _counts(name):
            size, bits = tensor.nbytes // ITEM_BYTES[tensor.dtype], 8 * ITEM_BYTES[tensor.dtype]
            count, weight_bits, activation_bits = count + size, weight_bits + size * bits, activation_bits + size * 16
    if not count:
        raise IntegrityError(f"{checkpoint.directory} has no decoder layers whose bits could be told", "give a whole checkpoint")
    kv = stated.get("kv_cache_scheme") if isinstance(stated, dict) else None
    kv_bits = kv.get("num_bits", 8) if isinstance(kv, dict) else 8 if kv_cache_dtype == "fp8" else 16
    return f"W{_short(weight_bits / count)}A{_short(activation_bits / count)}KV{_short(kv_bits)}"


def _counts(name: str) -> bool:
    return _IN_LAYERS.search(name) is not None and _IN_TOWERS.search(name) is None


def _input_bits(group: Any) -> int:
    inputs = group.get("input_activations") if isinstance(group, dict) else None
    bits = inputs.get("num_bits") if isinstance(inputs, dict) else None
    return bits if isinstance(bits, int) else 16


def _short(bits: float) -> str:
    return f"{bits:.2f}".rstrip("0").rstrip(".")


def archive(folder: Path) -> bytes:
    """A .tar.gz of the files in `folder` that depends on names, contents and executable bits alone."""
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            content = path.read_bytes()
            entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o111 else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return gzip.compress(raw.getvalue(), 9, mtime=0)


def _copy_plugin(plugin: Path, target: Path) -> None:
    if not plugin.is_dir() or not any((plugin / name).is_file() for name in ("pyproject.toml", "setup.py")):
        raise UsageError(f"--plugin {plugin} is no Python package: it has neither pyproject.toml nor setup.py", "give a vLLM plugin's directory")
    for folder, folders, files in os.walk(plugin):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in ("__pycache__", "build", "dist"))
        for name in sorted(files):
            source = Path(folder) / name
            if source.is_symlink() or not source.is_file():
                raise UsageError(f"--plugin: {source} is no regular file", "replace it by the file itself")
            if name.startswith(".") or name.endswith(".pyc"):
                continue
            place = target / source.relative_to(plugin)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, place)
            place.chmod(0o755 if source.stat().st_mode & 0o111 else 0o644)


def _task(checkpoint: Checkpoint, task: str, *, force: bool) -> str:
    """The task to submit to: the one given, else the one whose model the checkpoint is; refused for another model."""
    if not task:
        task = next((name for name, taken in TASKS.items() if not why_not(checkpoint, taken)), "")
        if not task:
            models = ", ".join(f"{taken.model} ({name})" for name, taken in TASKS.items())
            raise UsageError(f"{ARENA} takes {models}, and {checkpoint.directory.name} is none of them: "
                             f"{why_not(checkpoint, next(iter(TASKS.values())))[0]}", "--task ID --force packages it all the same, to try it out")
    elif task in TASKS:
        require_taken(checkpoint, TASKS[task], f"{ARENA}'s task {task}", force=force)
    elif not force:
        raise UsageError(f"--task is {task!r}; known are {', '.join(TASKS)}", "--force takes a task that is newer than gemq")
    return task


def make(order: Order, final: Path, *, task: str = "", split: str = "dev", method: str = "", kv_cache_dtype: str = "auto",
         plugin: Path | None = None, repository: tuple[str, str, str | None] | None = None) -> dict[str, Any]:
    """Write the package to `final` in one step; returns the submission (without the inline archive) and the archive's size in bytes.

    `repository`: the engine's URL, commit and folder, in place of the archive in the body.
    """
    checkpoint = order.checkpoint
    profile, tuned = packaged(order.profile or DEFAULT_PROFILE, checkpoint.seal_digest, None, checkpoint.digest)
    if tuned is not None and tuned.speculation is not None:
        raise UsageError(f"{ARENA} fetches one checkpoint, and {order.profile} drafts with another", "run gemq tune without --drafter")
    task = _task(checkpoint, task, force=order.force)  # before the Hub: no upload makes another model fit
    if order.hub is None:
        raise UsageError(f"{ARENA} fetches the checkpoint from the Hub at a commit, and none is given",
                         "upload it with gemq push, and add --repo OWNER/NAME --revision COMMIT")
    atomic.require_absent(final)
    if repository is not None:
        require_commit(repository[1], "--engine-revision")
    recipe = checkpoint.manifest.get("recipe")
    body: dict[str, Any] = {
        "task_id": task, "kind": "engine", "artifact": {"uri": order.hub.repo, "revision": order.hub.revision}, "engine": {},
        "serving": {"kv_cache_dtype": kv_cache_dtype}, "split": split,
        "solution": {"method": method or (f"gemq-{recipe}" if isinstance(recipe, str) else "gemq"),
                     "checkpoint": order.name or order.hub.repo.rpartition("/")[2], "w_a_kv": w_a_kv(checkpoint, kv_cache_dtype)},
    }  # fmt: skip
    if order.description:
        body["notes"] = order.description
    with atomic.staged_directory(final) as folder:
        engine = folder / "engine"
        engine.mkdir()
        shutil.copyfile(Path(__file__).with_name("launch.sh"), engine / "launch.sh")
        (engine / "launch.sh").chmod(0o755)
        (engine / "profile").write_text(profile + "\n")
        if tuned is not None:
            put(tuned, engine, copy=True)
        if plugin is not None:
            _copy_plugin(plugin, engine / "plugin")
        size = 0
        if repository is None:
            packed = archive(engine)
            size = len(packed)
            if size > LARGEST_ARCHIVE_BYTES:
                raise UsageError(f"the engine is {size} bytes as .tar.gz, {ARENA} takes {LARGEST_ARCHIVE_BYTES} in the body",
                                 "put it into a repository: --engine-repo URL --engine-revision COMMIT")
            body["engine"] = {"inline": base64.b64encode(packed).decode("ascii")}
        else:
            uri, revision, subdir = repository
            body["engine"] = {"uri": uri, "revision": revision, **({"subdir": subdir} if subdir else {})}
        parse(body, "the package")
        (folder / "submission.json").write_text(json.dumps(body, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        (folder / "README.md").write_text(_readme(order, body, profile, tuned), encoding="utf-8")
    shown = {**body, "engine": {key: "…" if key == "inline" else value for key, value in body["engine"].items()}}
    return {"submission": shown, "checkpoint": f"{order.hub.repo} at {order.hub.revision}", "archive_bytes": size}


def read_submission(folder: Path) -> Submission:
    """The submission in `folder`, whose engine in the body must be the one in engine/; raises UsageError or IntegrityError."""
    path = folder / "submission.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} can't be read: {error}", "make it with gemq package") from None
    submission = parse(document, str(path))
    if submission.engine.inline is not None and submission.engine.inline != base64.b64encode(archive(folder / "engine")).decode("ascii"):
        raise IntegrityError(f"{path} holds another engine than {folder / 'engine'}", "package it again: what is sent is the one in the body")
    return submission


def _readme(order: Order, body: dict[str, Any], profile: str, tuned: Profile | None) -> str:
    hub, solution = body["artifact"], body["solution"]
    held = "submission.json holds it too" if "inline" in body["engine"] else f"its copy in {body['engine']['uri']} is what the arena fetches"
    return "\n".join([
        f"# {solution['method']} · {solution['checkpoint']} · {solution['w_a_kv']}", "", *([order.description, ""] if order.description else []),
        "| | |", "|---|---|", f"| `engine/` | `launch.sh serve` starts vLLM, profile {profile}; {held} |",
        f"| `submission.json` | the body of POST /api/submissions: task {body['task_id']}, split {body['split']} |", "",
        checkpoint_section(order.checkpoint, f"`{hub['uri']}` at `{hub['revision']}`"), measured_section(order.measured),
        *filter(None, [section(tuned)]),
        "## Start it", "", "    gemq serve .", "", "## Send it", "",
        "    curl -s -X POST https://lowbarena.com/api/submissions -H \"authorization: Bearer $TOKEN\" \\",
        "      -H 'content-type: application/json' -d @submission.json", "",
    ])  # fmt: skip
