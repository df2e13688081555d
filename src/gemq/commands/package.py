"""`gemq package`: what an arena asks for, made from a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gemq import atomic, output
from gemq.errors import UsageError
from gemq.output_paths import require_separate
from gemq.serve.serve import PROFILES

ARENAS = ("efficient-gemma", "lowbarena")
_ONLY = {
    "efficient-gemma": ("--copy", "--dependency"),
    "lowbarena": ("--task", "--split", "--method", "--kv-cache", "--engine-repo", "--engine-revision", "--engine-subdir"),
}


def package(
    checkpoint: Annotated[Path, typer.Argument(help="The directory that gemq quantize wrote.")],
    arena: Annotated[str, typer.Option(help=f"{' or '.join(ARENAS)}.")],
    output_directory: Annotated[Path, typer.Option("--output", "-o", help="The package's directory; it must not exist.")],
    repo: Annotated[str | None, typer.Option(help="OWNER/NAME on the Hub that holds the checkpoint, in place of the files inside.")] = None,
    revision: Annotated[str | None, typer.Option(help="The commit there, 40 hex digits: gemq push prints it.")] = None,
    measured: Annotated[
        list[Path] | None, typer.Option(help="JSON that gemq eval-ppl or eval-kl wrote, for the README's numbers; say it again for more.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help=f"What vLLM is set for: {', '.join(PROFILES)}, or a tuned profile.json. Else the arena's usual one.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The submission's name; on LowBArena's board the checkpoint's.")] = None,
    description: Annotated[str | None, typer.Option(help="One line on it; LowBArena keeps it as private notes.")] = None,
    copy: Annotated[bool, typer.Option("--copy", help="Copy the checkpoint's files; else they are hard links where the disk allows.")] = False,
    dependency: Annotated[list[str] | None, typer.Option(help="Efficient Gemma: a requirement in place of gemq's own; say it again.")] = None,
    task: Annotated[str | None, typer.Option(help="LowBArena: the task; else the one whose model it is.")] = None,
    split: Annotated[str | None, typer.Option(help="LowBArena: dev (never ranked; the default) or test (scored).")] = None,
    method: Annotated[str | None, typer.Option(help="LowBArena: the method's name on the board; else gemq-RECIPE.")] = None,
    kv_cache: Annotated[str | None, typer.Option(help="LowBArena: the KV cache's type, auto or fp8.")] = None,
    plugin: Annotated[
        str | None, typer.Option(help="An engine plugin: gemq-int4 is gemq's own; LowBArena takes a directory with a vLLM plugin too.")
    ] = None,
    engine_repo: Annotated[str | None, typer.Option(help="LowBArena: a repository that holds engine/, in place of the archive.")] = None,
    engine_revision: Annotated[str | None, typer.Option(help="LowBArena: the commit there, 40 hex digits.")] = None,
    engine_subdir: Annotated[str | None, typer.Option(help="LowBArena: engine's folder there.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Package a model that the arena would refuse.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was made as JSON on stdout.")] = False,
) -> None:
    """Make CHECKPOINT into what an arena asks for: the same inputs give the same bytes. Try it with gemq serve before it is sent."""
    output.mode.json = output.mode.json or as_json
    if arena not in ARENAS:
        raise UsageError(f"--arena is {arena!r}", f"give {' or '.join(ARENAS)}")
    given = {"--copy": copy, "--dependency": dependency, "--task": task, "--split": split, "--method": method, "--kv-cache": kv_cache,
             "--engine-repo": engine_repo, "--engine-revision": engine_revision, "--engine-subdir": engine_subdir}
    for other, options in _ONLY.items():
        foreign = next((option for option in options if other != arena and given[option]), None)
        if foreign:
            raise UsageError(f"{foreign} is for {other}, and the arena is {arena}", "leave it out")
    _require_pair("--repo", repo, "--revision", revision)
    _require_pair("--engine-repo", engine_repo, "--engine-revision", engine_revision)
    if engine_subdir and not engine_repo:
        raise UsageError("--engine-subdir is given, and --engine-repo is not", "give --engine-repo and --engine-revision too")
    atomic.require_absent(output_directory)

    from gemq.serve import efficient_gemma, lowbarena
    from gemq.serve.package import Hub, Order, read_checkpoint, read_measured
    from gemq.serve.wheel import resolve

    source = resolve(plugin, arena, directories=arena == lowbarena.ARENA) if plugin is not None else None
    require_separate(output_directory, checkpoint, source)
    hub = Hub(repo, revision) if repo and revision else None
    read = read_checkpoint(checkpoint)
    numbers = [read_measured(path, read) for path in measured or ()]
    order = Order(read, hub, numbers, profile or "", name or "", description or "", force)
    made: dict[str, Any]
    if arena == efficient_gemma.ARENA:
        chosen = tuple(dependency) if dependency else efficient_gemma.DEPENDENCIES
        made = efficient_gemma.make(order, output_directory, copy=copy, dependencies=chosen, plugin=source)
    else:
        repository = (engine_repo, engine_revision, engine_subdir) if engine_repo and engine_revision else None
        made = lowbarena.make(order, output_directory, task=task or "", split=split or "dev", method=method or "",
                              kv_cache_dtype=kv_cache or "auto", plugin=source, repository=repository)
    size = f"\nengine: {made['archive_bytes']} bytes in submission.json" if made.get("archive_bytes") else ""
    output.result({"package": str(output_directory), "arena": arena, **made},
                  f"{output_directory}: a package for {arena}\ncheckpoint: {made['checkpoint']}{size}")
    output.note(f"next: gemq serve {output_directory}, and gemq check the address that it prints")


def _require_pair(one: str, value: str | None, other: str, second: str | None) -> None:
    if bool(value) != bool(second):
        given, lacking = (one, other) if value else (other, one)
        raise UsageError(f"{given} is given, and {lacking} is not", f"give both: {one} and {other}")


def register(app: typer.Typer) -> None:
    """Add `package` to gemq's commands."""
    app.command("package")(package)
