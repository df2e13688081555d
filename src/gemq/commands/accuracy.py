"""`gemq eval-accuracy`: a served model's accuracy, by lm-eval, and its drop against a reference."""

from __future__ import annotations

import contextlib
import json
import math
from pathlib import Path
from typing import Annotated

import typer

from gemq import atomic, output
from gemq.errors import OverBudgetError, UsageError
from gemq.output_paths import require_separate


def eval_accuracy(
    target: Annotated[str, typer.Argument(help="http://HOST:PORT (with #NAME if it serves several), or a checkpoint or submission to start.")],
    data: Annotated[Path | None, typer.Option(help="A local GSM8K .jsonl of question and answer; needs no hub.")] = None,
    tasks: Annotated[str | None, typer.Option(help="Names of lm-eval's tasks, with commas between, in place of --data.")] = None,
    reference: Annotated[str | None, typer.Option(help="The source's directory, an endpoint that serves it, or its earlier result.json.")] = None,
    budget: Annotated[float | None, typer.Option(help="Exit 3 if a task's drop may be above this many points (5 at LowBArena).")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions of each task.")] = None,
    shots: Annotated[int, typer.Option(min=0, help="Worked examples in front of each GSM8K question.")] = 8,
    shots_from: Annotated[Path | None, typer.Option(help="Where they come from; else the data's first, which are then not asked.")] = None,
    chat: Annotated[bool, typer.Option("--chat/--completions", help="Ask through the chat template, or as plain text.")] = False,
    in_flight: Annotated[int, typer.Option(min=1, help="Questions asked at a time.")] = 8,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory in place of the checkpoint that a submission names.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A directory with the tokenizer, for tasks that need one against a URL.")] = None,
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Also write the result as JSON; a stopped run goes on from what it kept.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Accuracy with its 95% interval, GSM8K from a local file first; the drop against a reference is paired, with its upper bound."""
    output.mode.json = output.mode.json or json_output
    names = tuple(name.strip() for name in (tasks or "").split(",") if name.strip())
    if (data is None) == (not names):
        raise UsageError("what to ask is not said, or twice", "give --data FILE (GSM8K), or --tasks NAMES")
    if budget is not None and (reference is None or not math.isfinite(budget)):
        raise UsageError("--budget needs a --reference and a number of points", "add --reference SOURCE, and --budget 5 for five points")
    if output_file is not None:
        atomic.require_absent(output_file)
    from gemq.eval.lm_eval_run import KEPT_FILES, Questions, evaluate_accuracy
    from gemq.eval.target import Target

    for path in (data, shots_from):
        if path is not None and not path.is_file():
            raise UsageError(f"{path} does not exist", "give GSM8K's .jsonl")
    parsed, questions = Target.parse(target, checkpoint), Questions(data, names, shots, shots_from, limit, chat)
    with contextlib.ExitStack() as stack:
        kept = None
        if output_file is not None:
            other = None if reference is None or reference.endswith(".json") else Target.parse(reference)
            require_separate(output_file, *parsed.directories, tokenizer, *(() if other is None else other.directories))
            kept = stack.enter_context(atomic.resumable_directory(output_file, "eval-accuracy"))
        result = evaluate_accuracy(parsed, questions, reference=reference, in_flight=in_flight, tokenizer=tokenizer, python=python, kept=kept)
        document = result.to_json()
        if output_file is not None and kept is not None:
            with atomic.disk_errors(output_file):
                atomic.write_new_file(output_file, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
            atomic.discard_after(kept, *KEPT_FILES)
    rows = []
    for domain in result.domains:
        drop = domain.drop
        upper = "–" if drop is None or drop.upper_95_points is None else f"{drop.upper_95_points:.2f}"
        rows.append((domain.name, f"{domain.accuracy:.2%}", f"{domain.low:.2%}", f"{domain.high:.2%}", str(len(domain.questions)),
                     "–" if drop is None else f"{drop.reference_accuracy:.2%}", "–" if drop is None else f"{drop.points:.2f}", upper))  # fmt: skip
    output.table(f"accuracy of {result.target}",
                 ("task", "accuracy", "95% from", "to", "questions", "reference", "drop, points", "drop, 95% upper bound"), rows)  # fmt: skip
    closing = "" if result.mean_drop_points is None else f"mean drop {result.mean_drop_points:.2f} points"
    if result.length_drift is not None:
        closing += f"; answers {result.length_drift:+.1%} long against the reference's, in characters"
    output.result(document, closing)
    if budget is not None:
        for domain in result.domains:
            bound = None if domain.drop is None else domain.drop.upper_95_points
            if bound is None or bound > budget:
                shown = "has no upper bound" if bound is None else f"may be {bound:.2f} points (95% upper bound)"
                raise OverBudgetError(f"over budget: the drop on {domain.name} {shown}, --budget allows {budget:g}",
                                      "ask more questions if only the bound is over; otherwise use smaller groups or more bits")  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this file's command to gemq's."""
    app.command("eval-accuracy")(eval_accuracy)
