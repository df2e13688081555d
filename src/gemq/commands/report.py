"""`gemq report`: what was measured, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gemq import output


def report(
    directory: Annotated[Path, typer.Argument(help="A checkpoint, the --output of rehearse, bench or an eval- command, or a folder with several.")],
    output_dir: Annotated[Path | None, typer.Option("--output", "-o", help="A new directory. Default: DIR-report here.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print what the report holds as JSON on stdout.")] = False,
) -> None:
    """Write DIR's report: one offline HTML page, and its figures as PNG and JSON."""
    output.mode.json = output.mode.json or json_output
    from gemq.eval.report.write import PAGE
    from gemq.eval.report.write import report as write_report

    target = output_dir or Path(f"{directory.resolve().name}-report")
    made = write_report(directory, target)
    for verdict in made["verdicts"]:
        output.note(verdict["text"])
    lines = [f"{target / PAGE}: {', '.join(section['title'].lower() for section in made['sections'])}",
             *(f"missing: {one['title'].lower()}, for {one['why']}\n  next: {one['command']}" for one in made["missing"])]  # fmt: skip
    output.result({"output": str(target), **made}, "\n".join(lines))


def register(app: typer.Typer) -> None:
    """Add `report` to gemq's commands."""
    app.command("report")(report)
