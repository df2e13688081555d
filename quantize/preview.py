"""What can be checked and printed before any work: the output's place, an unfinished run, and what a search would decide on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from gemq import atomic
from gemq.errors import UsageError
from gemq.eval.records import read_records
from gemq.quantize.budget import FEWEST_TO_HOLD_OUT, HELD_OUT_ONE_IN
from gemq.quantize.decisions import decisions_of, options_of, refusals, require_useful, search_plan
from gemq.quantize.looks import MOST_LOOKS, confidence_of
from gemq.quantize.plan import Plan
from gemq.quantize.search_run import Order, require_bound
from gemq.quantize.sensitivity import FEWEST_WINDOWS


def require_writable(final: Path) -> None:
    """Refuse an output for which no directory can be made or written to; nothing is created. Raises UsageError naming the directory."""
    parent = final.absolute().parent
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        why = "it can't be written to" if parent.is_dir() else "it is not a directory"
        raise UsageError(f"output {final} can't be made in {parent}: {why}", "choose a place that you may write to")


def require_unfinished(where: Path, *, is_search: bool) -> None:
    """For --resume required: refuse where nothing was begun. `where`: the output of a quantization, or the directory of a search."""
    begun = where.is_dir() if is_search else atomic.partial_of(where).is_dir()
    if not begun:
        raise UsageError(f"--resume required: {where if is_search else atomic.partial_of(where)} does not exist, so there is nothing to go on with",
                         "leave out --resume required")  # fmt: skip


def require_records(data: str, count: int, tokenizer: Path | None, *, for_budget: bool) -> None:
    """Refuse data that can't be measured on: "self" or a file of which at most `count` records are read; a .txt is read where there is a tokenizer.

    Raises UsageError, for a budget also where there are too few records for an upper bound.
    """
    records = count
    if data != "self" and (tokenizer is not None or data.endswith(".jsonl")):
        records = len(read_records(Path(data), tokenizer=tokenizer, vocab_size=None, records=count))
    if for_budget:
        require_bound(records)


def require_windows(samples: int) -> None:
    """Refuse fewer calibration windows than a search can split."""
    if samples < FEWEST_WINDOWS:
        raise UsageError(f"a search with --samples {samples} has too few calibration windows",
                         f"give at least {FEWEST_WINDOWS}: some are held out to measure on")  # fmt: skip


def search_preview(plan: Plan, order: Order, records: int) -> tuple[dict[str, Any], list[str]]:
    """(JSON, lines) of what a search from `plan`'s recipe would do: its limits, and what each decision may take.

    Raises UsageError for a candidate that no unit can take.
    """
    units = search_plan(plan.skeleton, plan.recipe, head=order.head)
    require_useful(units, order.candidates)
    decisions: dict[str, dict[str, Any]] = {}
    for decision in decisions_of(units):
        options = options_of(units, decision, order.candidates)
        refused = refusals(units, decision, order.candidates)
        decisions[decision.name] = {
            "options": {label: {"bytes": option.disk_bytes, "bytes_per_token": int(option.token_bytes)} for label, option in options.items()},
            **({"refused": refused} if refused else {}),
        }
    held_out = records // HELD_OUT_ONE_IN if records >= FEWEST_TO_HOLD_OUT else 0
    if order.builds > MOST_LOOKS:
        raise UsageError(f"--search-builds is {order.builds}, and at most {MOST_LOOKS} checkpoints may be measured on the same records",
                         f"give at most {MOST_LOOKS}")  # fmt: skip
    budget, first, last = order.budget, confidence_of(1), confidence_of(order.builds)
    made = {
        "budget": {"kind": budget.kind, "limit": budget.limit, "nats": budget.nats}, "objective": order.objective,
        "candidates": list(order.candidates), "builds": order.builds, "head": order.head,
        "records": {"judged": records - held_out, "held_out": held_out},
        "bound": {"confidence": 0.95, "first_look": first, "last_look": last}, "decisions": decisions,
    }  # fmt: skip
    head = "with" if order.head else "without"
    lines = [
        f"search           for at most {budget.show(budget.nats)} at the upper 95% bound on {records - held_out} records, {held_out} more held out",
        f"decisions        {len(decisions)}, {head} the head, among {', '.join(order.candidates)}; made small: {order.objective}",
        f"builds           at most {order.builds}; one bound alone has {100 * first:.2f}% at the first and {100 * last:.2f}% at the last, "
        "on records that no search has used",
        *(f"refused          {name}: {label} ({why})" for name, entry in decisions.items() for label, why in entry.get("refused", {}).items()),
    ]
    return made, lines
