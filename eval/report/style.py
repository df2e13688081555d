"""How figures look, and how they become SVG for a page and PNG for elsewhere.

Colours are Okabe and Ito's (Color Universal Design, 2008), told apart with every common kind of colour blindness, and no series is told by its
colour alone: shape, hatching or line style says the same, for print in grey. Heat maps take cividis (Nuñez et al., PLOS ONE 13, 2018), whose
lightness rises evenly. Text is drawn as outlines of matplotlib's own font, so that a page needs no font, and never read as mathematics.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gemq.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, VERMILLION, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#6E6E6E", "#1A1A1A"
OURS, REFERENCE, KEPT, LIMIT, PREDICTED = BLUE, ORANGE, GREEN, VERMILLION, GREY
HEAT = "cividis"
PNG_DPI = 180
WIDTH = 8.2  # inches
_SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"], "font.size": 9, "axes.titlesize": 10, "axes.titlelocation": "left", "axes.titleweight": "bold",
    "axes.titlepad": 10, "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.edgecolor": "#8A8A8A",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#E2E2E2", "grid.linewidth": 0.7,
    "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8.5, "lines.linewidth": 1.6, "figure.facecolor": "white",
    "text.parse_math": False, "svg.fonttype": "path", "svg.hashsalt": "gemq", "hatch.linewidth": 0.6, "axes.formatter.useoffset": False,
}  # fmt: skip


def require_matplotlib() -> None:
    """Raise UsageError where matplotlib is missing, before anything is measured or read."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise UsageError("figures need matplotlib, which is not installed", "pip install 'gemq[report]'") from None


@contextmanager
def house_style() -> Iterator[None]:
    """Draw in this house's style, whatever matplotlibrc says."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def new_figure(height: float, columns: int = 1, **options: Any) -> tuple[Figure, list[Axes]]:
    """A figure of the page's width, `height` inches high, and its axes from left to right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **options)
    return figure, list(axes[0])


def lay_out(figure: Figure) -> None:
    """Place everything in the figure once, so that each format need not do it again."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def png_bytes(figure: Figure) -> bytes:
    """The figure as a PNG, the same bytes for the same figure."""
    made = io.BytesIO()
    figure.savefig(made, format="png", dpi=PNG_DPI, metadata={"Software": None})
    return made.getvalue()


def inline_svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an <svg> element for an HTML page: no prolog, no namespaces, ids of its own, named for who can't see it."""
    from html import escape

    made = io.StringIO()
    figure.savefig(made, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = made.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    # several figures share a page, and matplotlib numbers parts of each from one
    rest = re.sub(r'\bid="', f'id="{name}-', rest)
    rest = re.sub(r'(xlink:href|href)="#', f'href="#{name}-', rest)
    rest = rest.replace("url(#", f"url(#{name}-")
    return f'<svg {box[0]} role="img" aria-label="{escape(description)}">{rest}'
