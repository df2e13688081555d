"""`gemq push`: a verified checkpoint to the Hugging Face Hub, in one commit that is verified there."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gemq import output


def push(
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a sealed checkpoint.")],
    repo: Annotated[str, typer.Argument(help="The model repository, owner/name; made if it does not exist.")],
    private: Annotated[bool, typer.Option("--private", help="Make the repository private; a public one that exists is refused.")] = False,
    branch: Annotated[str | None, typer.Option("--branch", "--revision", help="Commit to this branch (main), made if it is new.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Delete the branch's other files in the same commit.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Verify, list what would go, and send nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Verify a checkpoint, upload it in one commit, print that commit, and hold the repository's hashes against the seal."""
    from gemq import hub_push

    output.mode.json = output.mode.json or as_json
    if dry_run:
        files = hub_push.sealed_files(checkpoint)
        size = sum(file.size for file in files)
        output.table("", ("file", "size", "SHA-256"), [(file.path, output.human_bytes(file.size), file.sha256) for file in files])
        document = {"repo": repo, "branch": branch or "main", "private": private, "dry_run": True, "bytes": size,
                    "files": [{"path": file.path, "size": file.size, "sha256": file.sha256} for file in files]}
        output.result(document, f"{len(files)} files, {output.human_bytes(size)}, would go to {repo}; nothing was sent")
        return
    pushed = hub_push.push_checkpoint(checkpoint, repo, private=private, branch=branch, replace=replace)
    size = pushed.bytes
    output.result(asdict(pushed), f"{pushed.files} files, {output.human_bytes(size)}, are in {pushed.repo} and agree with the seal\n"
                  f"revision {pushed.commit}\nseal {pushed.seal_digest}\n{pushed.url}")


def register(app: typer.Typer) -> None:
    """Add `push` to gemq's commands."""
    app.command("push")(push)
