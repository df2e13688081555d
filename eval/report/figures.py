"""The figures of a report, each drawn from its section's data alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gemq.eval.report.style import GREY, HEAT, INK, KEPT, LIMIT, OURS, PREDICTED, REFERENCE, new_figure
from gemq.eval.report.tables import number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE = {"submission": (OURS, "", "o"), "reference": (REFERENCE, "////", "s")}
_MARKERS = "oDvP*X<>ph"
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
_LEAST_PERCENT = 0.05  # a scale finer than this would show rounding
_LONGEST = 1.6  # how far over its limit a gate's bar is drawn, in limits


def gates(data: dict[str, Any]) -> Figure:
    """A bar a gate: the share of its limit that its value uses; value, limit and margin in words beside it."""
    rows = [(one, gate) for one in data["rehearsals"] for gate in one["gates"]]
    figure, (axes,) = new_figure(0.9 + 0.32 * len(rows))
    several = len(data["rehearsals"]) > 1
    for place, (_, gate) in enumerate(rows):
        color, used = KEPT if gate["kept"] else LIMIT, gate["used"]
        if used is not None:
            axes.barh(place, min(used, _LONGEST), height=0.55, color=color, hatch="" if gate["kept"] else "////", edgecolor="white", linewidth=0)
            told = f"{number(gate['value'])} of {number(gate['limit'])}, margin {number(gate['margin'], 3)}"
        else:
            told = "not measured" if gate["value"] is None else "yes" if gate["kept"] else "no"
        axes.annotate(f"{'✓ kept' if gate['kept'] else '✗ failed'}: {told}", (1, place), xycoords=("axes fraction", "data"), xytext=(8, 0),
                      textcoords="offset points", va="center", fontsize=8, color=INK, fontweight="normal" if gate["kept"] else "bold")
    axes.axvline(1, color=LIMIT, linestyle="--", linewidth=1.4)
    axes.text(1, -0.75, "limit", color=LIMIT, ha="center", va="bottom", fontsize=8)
    axes.set_yticks(range(len(rows)), [f"{one['name']}: {gate['name']}" if several else gate["name"] for one, gate in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.8)
    axes.set_xlim(0, _LONGEST)
    axes.set_xticks([0, 0.5, 1, 1.5], ["0", "50%", "100%", "150%"])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("share of the limit that is used")
    return figure


def tradeoff(data: dict[str, Any]) -> Figure:
    """Points of (bytes a token, perplexity over the source's in percent), with budgets as lines."""
    figure, (axes,) = new_figure(4.6)
    names = list(dict.fromkeys(one["name"] for one in data["checkpoints"]))
    for place, name in enumerate(names):
        for first, one in enumerate([one for one in data["checkpoints"] if one["name"] == name]):
            whisker(axes, one["bytes_per_token"] / 1e6, one["ratio"], one["ratio_upper_95"], OURS, _MARKERS[place % len(_MARKERS)],
                    "" if first else f"{name}, measured", filled=True)
    rejected = ""
    for place, one in enumerate(data["tried"]):
        bytes_mb = one["bytes_per_token"] / 1e6
        axes.plot([bytes_mb, bytes_mb], [100 * (one["predicted_ratio"] - 1), 100 * (one["ratio"] - 1)], color=PREDICTED, linestyle=":", linewidth=1)
        axes.plot(bytes_mb, 100 * (one["predicted_ratio"] - 1), marker="x", color=PREDICTED, linestyle="none",
                  label=None if place else "predicted by the search")
        if not one["chosen"]:
            whisker(axes, bytes_mb, one["ratio"], one["ratio_upper_95"], OURS, "o", "" if rejected else "built by the search and not chosen",
                    filled=False)
            rejected = "named"
    at = [one["bytes_per_token"] / 1e6 for one in [*data["checkpoints"], *data["tried"]]]
    for one in data["sources"][:1]:
        source_point(axes, one["bytes_per_token"] / 1e6, f"{one['model']}, the source", at)
    for one in data["budgets"]:
        budget_line(axes, 100 * (one["ratio"] - 1), one["label"])
    axes.set_xlabel("bytes of linears and head that a decoded token reads, MB")
    axes.set_ylabel("perplexity over the source's, %")
    axes.set_ylim(bottom=min(axes.get_ylim()[0], -0.5))
    axes.margins(x=0.06)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def pareto(data: dict[str, Any]) -> Figure:
    """The predicted curve, as it is and corrected by what builds came to, the builds themselves with their bounds, and the budgets."""
    figure, (axes,) = new_figure(5.0)
    shown = _shown_curve(data)
    at = [one["bytes_per_token"] / 1e6 for one in shown]
    axes.step(at, [100 * math.expm1(one["predicted_kl_nats"]) for one in shown], where="post", color=PREDICTED, linestyle="--",
              label="predicted from the sensitivities")  # fmt: skip
    factor = data["correction"]["ppl"]
    if factor is not None:
        axes.step(at, [100 * math.expm1(factor * one["predicted_kl_nats"]) for one in shown], where="post", color=INK, linestyle="-.", linewidth=1.2,
                  label=f"predicted, times {number(factor, 3)} as the builds came to")
    for place, one in enumerate(data["measured"]):
        bytes_mb = one["bytes_per_token"] / 1e6
        axes.plot([bytes_mb, bytes_mb], [100 * (one["predicted_ratio"] - 1), 100 * (one["ratio"] - 1)], color=PREDICTED, linestyle=":", linewidth=1)
        label = "" if place else "measured on a build, and its 95% bound"
        whisker(axes, bytes_mb, one["ratio"], one["ratio_upper_95"], OURS, "o", label, filled=True)
    for one in data["budgets"]:
        if one["asked"] and one["kind"] == "ppl":
            budget_line(axes, 100 * one["limit"], f"budget {percent(1 + one['limit'], 1)}")
    source_point(axes, data["source"]["bytes_per_token"] / 1e6, "the source", [*at, *(one["bytes_per_token"] / 1e6 for one in data["measured"])])
    axes.set_xlabel("bytes of linears and head that a decoded token reads, MB")
    axes.set_ylabel("perplexity over the source's, %")
    axes.margins(x=0.04)
    reference = data["reference_ppl"]
    if reference is not None:
        def perplexity(above: Any) -> Any:
            return reference * (1 + above / 100)

        def above(perplexity: Any) -> Any:
            return 100 * (perplexity / reference - 1)

        right = axes.secondary_yaxis("right", functions=(perplexity, above))
        right.set_ylabel(f"perplexity on {data['reference_data']}")
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _shown_curve(data: dict[str, Any]) -> list[dict[str, Any]]:
    """The curve up to where hardly anything is left to buy, or to the last build."""
    last = max([one["bytes_per_token"] for one in data["measured"]], default=0)
    worst = data["curve"][0]["predicted_kl_nats"]
    found = [one for one in data["curve"] if one["predicted_kl_nats"] > 0.03 * worst or one["bytes_per_token"] <= last]
    return [*found, *data["curve"][len(found) : len(found) + 1]]


def budget_line(axes: Axes, at: float, label: str) -> None:
    """A dashed line at a budget, named on it."""
    axes.axhline(at, color=LIMIT, linestyle="--", linewidth=1.4)
    axes.annotate(label, (1, at), xycoords=("axes fraction", "data"), xytext=(-3, 3), textcoords="offset points", ha="right", fontsize=8, color=LIMIT,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8})


def source_point(axes: Axes, at: float, label: str, others: Sequence[float]) -> None:
    """The source as a star at 0%, or in words at the edge where it is so far off that it would press the other points together."""
    spread = max(others) - min(others)
    if spread > 0 and at - max(others) > spread:
        axes.annotate(f"{label}: 0% at {number(at)} MB →", (1, 0), xycoords=("axes fraction", "data"), xytext=(-3, -4),
                      textcoords="offset points", ha="right", va="top", fontsize=8)
        axes.axhline(0, color=INK, linewidth=0.8)
        low, high = axes.get_ylim()
        axes.set_ylim(min(low, -0.08 * high), high)
    else:
        axes.plot(at, 0, marker="*", markersize=13, color=INK, linestyle="none", label=label)


def whisker(axes: Axes, x: float, ratio: float, upper: float | None, color: str, marker: str, label: str, *, filled: bool) -> None:
    """A measured ratio in percent, with a whisker up to its 95% bound."""
    value = 100 * (ratio - 1)
    above = [[0.0], [0.0 if upper is None else max(0.0, 100 * (upper - ratio))]]
    axes.errorbar(x, value, yerr=above, color=color, marker=marker, markersize=7, markerfacecolor=color if filled else "white", capsize=4,
                  linewidth=1.2, linestyle="none", label=label or None)


def errors(data: dict[str, Any]) -> Figure:
    """A heat map a checkpoint: layers across, units down, the error's logarithm as colour, the scheme as letters."""
    from matplotlib.colors import LogNorm

    maps = [one for one in data["checkpoints"] if one["layers"]]
    rows = sum(len(one["kinds"]) for one in maps)
    figure, axes_row = new_figure(0.7 + sum(0.75 + 0.3 * len(one["kinds"]) for one in maps) if maps else 1.5)
    if not maps:
        axes_row[0].axis("off")
        axes_row[0].text(0.5, 0.5, "no unit lies in a layer", ha="center")
        return figure
    figure.clear()
    grid = figure.subplots(len(maps), 1, squeeze=False, height_ratios=[max(2, len(one["kinds"])) for one in maps])
    values = [unit["error"] for one in maps for unit in one["units"] if unit["layer"] is not None and unit["error"] > 0]
    norm = LogNorm(min(values, default=1e-6) * 0.999, max(values, default=1) * 1.001)
    image = None
    for axes, one in zip(grid[:, 0], maps, strict=True):
        cells = [[math.nan] * one["layers"] for _ in one["kinds"]]
        for unit in one["units"]:
            if unit["layer"] is not None:
                cells[one["kinds"].index(unit["kind"])][unit["layer"]] = max(unit["error"], norm.vmin or 1e-12)
        axes.set_facecolor("#D9D9D9")
        image = axes.pcolormesh(cells, norm=norm, cmap=HEAT, edgecolors="white", linewidth=0.4)
        _schemes(axes, one, norm)
        axes.invert_yaxis()
        axes.set_yticks([place + 0.5 for place in range(len(one["kinds"]))], one["kinds"])
        step = max(1, math.ceil(one["layers"] / 24))
        axes.set_xticks([layer + 0.5 for layer in range(0, one["layers"], step)], [str(layer) for layer in range(0, one["layers"], step)])
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_title(one["name"])
        axes.set_xlabel("layer")
    assert image is not None
    label = data.get("label", "relative squared error")
    figure.colorbar(image, ax=list(grid[:, 0]), label=label, aspect=max(8, 2 * rows), pad=0.015, format=_power_of_ten)
    return figure


def _schemes(axes: Axes, one: dict[str, Any], norm: Any) -> None:
    """The scheme's short name in each cell, where the checkpoint has more than one and they are large enough to be read."""
    inside = [unit for unit in one["units"] if unit["layer"] is not None]
    if len({unit["scheme"] for unit in inside}) < 2 or one["layers"] > 64:
        return
    for unit in inside:
        shade = float(norm(max(unit["error"], norm.vmin)))
        axes.text(unit["layer"] + 0.5, one["kinds"].index(unit["kind"]) + 0.5, short_scheme(unit["scheme"]), ha="center", va="center",
                  fontsize=6.5 if one["layers"] <= 32 else 4.6, color=INK if shade > 0.5 else "white", linespacing=0.95)


def short_scheme(scheme: str) -> str:
    """int4 g128 (or int4-g128) -> 4 over 128, int8 channel -> 8, fp8 -> f8."""
    name, _, rest = scheme.replace("-", " ").partition(" ")
    number_of = name.replace("int", "").replace("fp", "f")
    return f"{number_of}\n{rest[1:]}" if rest.startswith("g") else number_of


def divergence(data: dict[str, Any]) -> Figure:
    """A histogram a measurement, with its mean."""
    figure, (axes,) = new_figure(3.4)
    looks = [(OURS, "-", "////"), (REFERENCE, "--", "\\\\\\\\"), (KEPT, "-.", "...."), (GREY, ":", "")]
    for place, one in enumerate(data["measured"]):
        color, line, hatch = looks[place % len(looks)]
        total = sum(one["counts"])
        heights = [100 * count / total for count in one["counts"]]
        axes.stairs(heights, one["edges"], color=color, linestyle=line, linewidth=1.8, label=f"{one['name']} ({total:,} positions)")
        axes.stairs(heights, one["edges"], fill=True, facecolor="none", edgecolor=color, hatch=hatch, linewidth=0, alpha=0.35)
        if one["mean"] >= one["edges"][0]:
            axes.axvline(one["mean"], color=color, linestyle=line, linewidth=1)
            axes.annotate(f"mean {number(one['mean'], 3)}", (one["mean"], 0.97 - 0.07 * place), xycoords=("data", "axes fraction"),
                          xytext=(4, 0), textcoords="offset points", fontsize=8, color=INK, va="top")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(_power_of_ten)
    axes.set_xlim(data["measured"][0]["edges"][0], data["measured"][0]["edges"][-1])
    axes.set_xlabel("KL(reference || checkpoint) at a position, nats")
    axes.set_ylabel("positions, %")
    axes.set_ylim(bottom=0, top=axes.get_ylim()[1] * 1.12)
    axes.legend(loc="upper left")
    return figure


def records(data: dict[str, Any]) -> Figure:
    """A point a record: the reference's perplexity across, the difference from it up."""
    figure, (axes,) = new_figure(3.8)
    looks = [(OURS, "o"), (REFERENCE, "s"), (KEPT, "D"), (GREY, "v")]
    for place, one in enumerate(data["measured"]):
        color, marker = looks[place % len(looks)]
        axes.plot([record["reference_ppl"] for record in one["records"]], [100 * (record["ratio"] - 1) for record in one["records"]], marker=marker,
                  markersize=6, color=color, markerfacecolor="none" if place % 2 else color, alpha=0.8, linestyle="none",
                  label=f"{one['name']} ({len(one['records'])} records)")
        axes.axhline(100 * (one["ratio"] - 1), color=color, linestyle=("-", "-.")[place % 2], linewidth=1.2,
                     label=f"over all: {percent(one['ratio'])}")
    axes.axhline(0, color=INK, linewidth=0.9)
    across = [record["reference_ppl"] for one in data["measured"] for record in one["records"]]
    if max(across) > 8 * min(across):
        axes.set_xscale("log")
        _plain_log_ticks(axes)
    axes.set_xlabel("the reference's perplexity on the record")
    axes.set_ylabel("perplexity over the reference's, %")
    axes.margins(x=0.05, y=0.1)
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -_LEAST_PERCENT), max(high, _LEAST_PERCENT))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def _power_of_ten(value: float, _: object = None) -> str:
    """10⁻³, without asking matplotlib to read mathematics."""
    power = round(math.log10(value))
    return f"10{str(power).translate(_SUPERSCRIPTS)}" if math.isclose(value, 10.0**power, rel_tol=1e-6) else ""


def _plain_log_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    axes.xaxis.set_minor_formatter(NullFormatter())


def speed(data: dict[str, Any]) -> Figure:
    """Tokens a second on the left, latency on the right, a row for each load and side."""
    order = list(dict.fromkeys((one["from"], one["load"]) for one in data["loads"]))
    rows = sorted(data["loads"], key=lambda one: (order.index((one["from"], one["load"])), one["side"] == "reference"))
    several = len({one["from"] for one in rows}) > 1
    figure, (left, right) = new_figure(1.3 + 0.42 * len(rows), 2, sharey=True)
    fastest = max(one["tps_mean"] for one in rows)
    labels = [(f"{one['from']}: " if several else "") + f"{one['load']}\n{one['side']}" for one in rows]
    for place, one in enumerate(rows):
        color, hatch, marker = _SIDE[one["side"]]
        left.barh(place, one["tps_mean"], height=0.55, color=color, hatch=hatch, edgecolor="white", linewidth=0)
        left.text(one["tps_mean"] + 0.015 * fastest, place, number(one["tps_mean"]), va="center", fontsize=8)
        if len(one["tps"]) > 1:
            left.plot(one["tps"], [place] * len(one["tps"]), marker="|", markersize=9, color=INK, linestyle="none")
        for measured, dy, fill in ((one["latency_ms"], -0.14, True), (one["first_token_ms"], 0.16, False)):
            if measured:
                right.plot([measured["median"], measured["p99"]], [place + dy] * 2, color=color, linewidth=1.6, linestyle="-" if fill else ":")
                right.plot(measured["median"], place + dy, marker=marker, markersize=6, color=color, markerfacecolor=color if fill else "white")
                right.plot(measured["p99"], place + dy, marker="|", markersize=9, color=color)
    left.set_yticks(range(len(rows)), labels, fontsize=8)
    left.set_ylim(len(rows) - 0.4, -0.6)
    left.set_xlim(0, fastest * 1.18)
    left.set_xlabel("tokens a second")
    right.set_xscale("log")
    _plain_log_ticks(right)
    right.set_xlabel("ms: filled, whole answer; hollow, first token;\nmarker at the median, tick at the 99th percentile")
    for axes in (left, right):
        axes.grid(axis="y", visible=False)
    return figure


def memory(data: dict[str, Any]) -> Figure:
    """A line a load and side."""
    figure, (axes,) = new_figure(3.4 + 0.1 * len(data["series"]))
    lines = ("-", "--", "-.", ":")
    loads = list(dict.fromkeys((one["from"], one["load"]) for one in data["series"]))
    scale, unit = (1e9, "GB") if max(one["peak_bytes"] for one in data["series"]) >= 1e9 else (1e6, "MB")
    several = len({one["from"] for one in data["series"]}) > 1
    for one in data["series"]:
        color, _, marker = _SIDE[one["side"]]
        at, held = [at for at, _ in one["samples"]], [count / scale for _, count in one["samples"]]
        name = f"{one['from']}: {one['load']}" if several else one["load"]
        axes.plot(at, held, color=color, linestyle=lines[loads.index((one["from"], one["load"])) % 4], marker=marker,
                  markersize=4 if len(at) < 40 else 0, label=f"{one['side']}, {name}: peak {number(one['peak_bytes'] / scale, 3)} {unit}")
    axes.set_xlabel("seconds since the load began")
    axes.set_ylabel(f"memory, {unit}")
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    figure.legend(loc="outside lower center", ncols=2 if len(data["series"]) > 1 else 1)
    return figure


DRAW: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "gates": gates, "tradeoff": tradeoff, "pareto": pareto, "errors": errors, "sensitivities": errors,
    "divergence": divergence, "records": records, "speed": speed, "memory": memory,
}  # fmt: skip
"""A section's key -> what draws its figure."""
