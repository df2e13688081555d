"""The only module that prints: messages and progress on stderr, results on stdout.

With `--json`, stdout carries one JSON document and nothing else. NO_COLOR and a stdout that is no terminal turn colours off (rich does both).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

_LOG_WIDTH = 160  # of tables in a file or a pipe, unless COLUMNS says otherwise: a log needs no cells folded to a terminal's 80


def _console(*, stderr: bool) -> Console:
    made = Console(stderr=stderr, highlight=False, soft_wrap=True)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made = Console(stderr=stderr, highlight=False, soft_wrap=True, width=_LOG_WIDTH)
    return made


_err, _out = _console(stderr=True), _console(stderr=False)


class _Mode:
    json = False
    quiet = False


mode = _Mode()


def note(text: str) -> None:
    """Print a line of what is going on (stderr)."""
    if not mode.quiet:
        _err.print(escape(text))


def warn(text: str) -> None:
    """Print a warning: the result is right, but the user should know (stderr)."""
    _err.print(f"[yellow]warning:[/yellow] {escape(text)}")


def error(message: str, next_step: str = "") -> None:
    """Print an error and, below it, what to do next (stderr)."""
    _err.print(f"[red]error:[/red] {escape(message)}")
    if next_step:
        _err.print(f"  [bold]next:[/bold] {escape(next_step)}")


def result(data: dict[str, Any], text: str) -> None:
    """Print a command's result on stdout: `data` as one JSON document under `--json`, else `text`."""
    if mode.json:
        print(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False), flush=True)  # of a command that goes on: gemq serve
    elif text:
        _out.print(escape(text))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]], *, to_stderr: bool = False) -> None:
    """Print a table (stdout unless `to_stderr`); nothing under `--json`, where the data is in the document. Numbers are right-aligned."""
    if mode.json and not to_stderr:
        return
    made = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        numeric = all(isinstance(row[index], (int, float)) or _looks_numeric(str(row[index])) for row in rows) and bool(rows)
        made.add_column(escape(name), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        made.add_row(*(escape(str(cell)) for cell in row))
    (_err if to_stderr else _out).print(made)


def _looks_numeric(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-–" or text == ""


@contextmanager
def progress(label: str, total: int, unit: str = "") -> Iterator[Callable[..., None]]:
    """Yield `advance(done=1, detail="")`, a bar with the time left on a terminal, and a line every ten seconds elsewhere."""
    if not _err.is_terminal or mode.quiet:
        yield _plain_progress(label, total, unit)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    )
    with Progress(*columns, console=_err, transient=True) as bar:
        task = bar.add_task(escape(label), total=total, detail="")

        def advance(done: int = 1, detail: str = "") -> None:
            bar.update(task, advance=done, detail=escape(detail)) if detail else bar.advance(task, done)

        yield advance


def _plain_progress(label: str, total: int, unit: str) -> Callable[..., None]:
    started = last = time.monotonic()
    done_so_far = 0

    def advance(done: int = 1, detail: str = "") -> None:
        nonlocal last, done_so_far
        done_so_far += done
        now = time.monotonic()
        if now - last >= 10 and not mode.quiet and done_so_far:
            last = now
            left = (now - started) / done_so_far * (total - done_so_far)
            note(f"{label}: {done_so_far}/{total} {unit}, {left:.0f} s left {detail}".rstrip())

    return advance


def human_bytes(count: float) -> str:
    """`count` bytes in decimal units with three figures: 536 MB, 9.29 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.5 or unit == "GB":
            return f"{count:.3g} {unit}" if unit != "B" else f"{count:.0f} B"
        count /= 1000
    raise AssertionError("unreachable")


def human_seconds(seconds: float) -> str:
    """A duration with the precision that a person wants: 0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{int(seconds // 60)} min {int(seconds % 60)} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60)} min"
