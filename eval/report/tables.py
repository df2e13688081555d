"""Sections of a report: what each says, with its tables and the data that its figures are drawn from; and how numbers are written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gemq.output import human_bytes

NONE = "–"


@dataclass(frozen=True)
class Table:
    """Rows of text under `columns`; the columns in `numeric` (by position) are set flush right."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    numeric: frozenset[int] = frozenset()
    title: str = ""


@dataclass
class Section:
    """A part of the page. `data` is JSON and all that its figure is drawn from; `figure` describes that figure, "" where there is none."""

    key: str
    title: str
    text: list[str]
    data: dict[str, Any]
    figure: str = ""
    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Missing:
    """A section that could not be made: what is missing, and the command that makes it."""

    key: str
    title: str
    why: str
    command: str


def number(value: Any, digits: int = 4) -> str:
    """A number as a person reads it, – where there is none."""
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return NONE
    if isinstance(value, int) or (abs(value) < 1e6 and value == int(value)):
        return f"{int(value):,}"
    return f"{value:.{digits}g}" if abs(value) < 1e5 else f"{value:,.0f}"


def percent(ratio: Any, digits: int = 2) -> str:
    """A ratio to the source's as a change in percent: 1.0093 is +0.93%."""
    return NONE if not isinstance(ratio, (int, float)) else f"{(ratio - 1) * 100:+.{digits}f}%"


def size(count: Any) -> str:
    """Bytes in decimal units."""
    return NONE if not isinstance(count, (int, float)) else human_bytes(count)


def rows_of(entries: Sequence[Sequence[Any]]) -> list[tuple[str, ...]]:
    """Cells as text."""
    return [tuple(cell if isinstance(cell, str) else number(cell) for cell in row) for row in entries]
