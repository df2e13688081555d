"""A report's directory: report.html, report.json, and each figure as PNG beside its data as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gemq
from gemq import atomic, output
from gemq.eval.report import quality, running, style
from gemq.eval.report.collect import Material, collect
from gemq.eval.report.page import html_page
from gemq.eval.report.tables import Missing, Section, number
from gemq.output_paths import require_separate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAGE, INDEX = "report.html", "report.json"
SECTIONS: tuple[Callable[[Material], Section | Missing], ...] = (
    quality.gates, quality.tradeoff, quality.records, quality.divergence, quality.errors, running.speed, running.memory, running.answers,
    running.provenance,
)  # fmt: skip


def report(directory: Path, target: Path) -> dict[str, Any]:
    """Tell of what `directory` holds, in the new directory `target`; returns what report.json holds.

    Raises UsageError where there is nothing to tell of, matplotlib is missing, or `target` would lie inside a sealed checkpoint.
    """
    style.require_matplotlib()
    require_separate(target)
    atomic.require_absent(target)
    material = collect(directory)
    sections: list[Section] = []
    missing: list[Missing] = []
    for make in SECTIONS:
        made: Section | Missing
        try:
            made = make(material)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, ZeroDivisionError, OverflowError) as error:
            made = Missing(make.__name__, make.__name__.capitalize(), f"a file is not as gemq writes it ({type(error).__name__}: {str(error)[:100]})",
                           "gemq verify CHECKPOINT, or measure again")
            output.warn(f"{make.__name__} is left out: {made.why}")
        if isinstance(made, Missing):
            missing.append(made)
        else:
            sections.append(made)
    for problem in material.unreadable:
        output.warn(f"left out: {problem}")
    names = [*(one.name for one in material.checkpoints), *(one.name for one in material.rehearsals)]
    name = directory.resolve().name
    opening = [f"Made by gemq {gemq.__version__} from {len(material.files)} files in {name}. This page asks the network for nothing.",
               *(f"Left out: {problem}." for problem in material.unreadable)]  # fmt: skip
    document = {"kind": "report", "directory": name, "unreadable": material.unreadable}
    return publish(target, f"Report on {', '.join(names[:3]) or name}", opening, verdicts(material), sections, missing, document)


def verdicts(material: Material) -> list[tuple[str, bool]]:
    """A sentence on each finished rehearsal, and whether it is good news."""
    found = []
    for one in material.rehearsals:
        if isinstance(one.verdict, dict) and isinstance(one.verdict.get("gates"), list):
            gates = one.verdict["gates"]
            kept = sum(bool(gate.get("kept")) for gate in gates if isinstance(gate, dict))
            found.append((f"{one.name} at {one.verdict.get('arena')}: {kept} of {len(gates)} gates kept, score {number(one.verdict.get('score'))}",
                          kept == len(gates)))
    return found


def publish(target: Path, title: str, opening: Sequence[str], judged: Sequence[tuple[str, bool]], sections: Sequence[Section],
            missing: Sequence[Missing], document: dict[str, Any]) -> dict[str, Any]:  # fmt: skip
    """Draw and write everything; returns what report.json holds."""
    from gemq.eval.report.figures import DRAW

    shown: list[tuple[Section, str]] = []
    with atomic.disk_errors(target.parent), atomic.staged_directory(target) as staged, style.house_style():
        for section in sections:
            svg = ""
            if section.figure:
                figure: Figure = DRAW[section.key](section.data)
                style.lay_out(figure)
                svg = style.inline_svg(figure, section.key, section.figure)
                (staged / f"{section.key}.png").write_bytes(style.png_bytes(figure))
            (staged / f"{section.key}.json").write_text(_json(section.data), encoding="utf-8")
            shown.append((section, svg))
        (staged / PAGE).write_text(html_page(title, opening, judged, shown, missing), encoding="utf-8")
        whole = {
            **document, "title": title, "verdicts": [{"text": text, "good": good} for text, good in judged],
            "sections": [{"key": section.key, "title": section.title, "data": f"{section.key}.json",
                          "figure": f"{section.key}.png" if section.figure else None} for section in sections],
            "missing": [asdict(one) for one in missing],
        }  # fmt: skip
        (staged / INDEX).write_text(_json(whole), encoding="utf-8")
    return whole


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
