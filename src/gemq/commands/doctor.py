"""`gemq doctor`: what is here, what can be served, and which command brings what is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemq import output


def doctor(
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print what was found as JSON on stdout.")] = False,
) -> None:
    """Look at this machine: Python, torch, vLLM, GPU, memory, disk; which recipes can be served; what is missing. Always exits 0."""
    from gemq.serve import machine

    output.mode.json = output.mode.json or json_
    found = machine.look(python)
    output.table("here", ("what", "found"), [(fact.what, fact.found) for fact in found.facts])
    output.table("\nrecipes that can be served here", ("recipe", "served", "why"),
                 [(row.name, "yes" if row.served else "no", row.why) for row in found.formats])
    if found.missing:
        output.table("\nmissing", ("what", "bring it with"), found.missing)
    output.result(found.to_json(), "" if found.missing else "\nnothing is missing")


def register(app: typer.Typer) -> None:
    """Add this command to gemq's."""
    app.command("doctor")(doctor)
