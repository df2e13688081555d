"""`gemq tune`: vLLM's own switches, tried on this machine for this checkpoint."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemq import atomic, output
from gemq.errors import UsageError
from gemq.serve.serve import PROFILES

if TYPE_CHECKING:
    from gemq.serve.tune import Tuned
    from gemq.serve.tune_job import Prepared
    from gemq.serve.verdict import Trial

_COLUMNS = ("tried", "pairs", "TPS before", "after", "ratio", "bound", "verdict")


def _row(tuned: Tuned, trial: Trial, why: str) -> tuple[object, ...]:
    name = f"{trial.switch} {trial.value}"
    ratio = tuned.ratio(trial)
    if ratio is None:
        return (name, 0, "–", "–", "–", "–", why)
    before, after = (median(pair[side] for pair in trial.pairs) for side in (0, 1))
    bound = "–" if ratio.lower is None else f"{ratio.lower:.4f}"
    return (name, len(trial.pairs), f"{before:.2f}", f"{after:.2f}", f"{ratio.ratio:.4f}", bound, why)


def _show_plan(prepared: Prepared) -> None:
    plan = prepared.search
    rows = [(value.switch, value.label, value.words) for values in plan.offered for value in values]
    output.table(f"vLLM {plan.engine.version} ({plan.engine.platform}) on {plan.engine.card}", ("switch", "value", "what is set"), rows)
    _show_left_out(prepared.left_out)
    data = {"kind": "tune-plan", "engine": plan.engine.key(), "profile": plan.base, "servers": prepared.room, "confidence": plan.confidence,
            "candidates": [{"switch": switch, "value": value, "words": words} for switch, value, words in rows],
            "left_out": [{"switch": each.switch, "value": each.value, "why": each.why} for each in prepared.left_out]}  # fmt: skip
    output.result(data, f"{len(rows)} candidates, on top of the profile {plan.base}; {prepared.room} servers at a time")


def _show_left_out(left_out: list[Any]) -> None:
    if left_out:
        output.table("left out", ("switch", "value", "why"), [(each.switch, each.value or "all", each.why) for each in left_out])


def _show(tuned: Tuned, output_directory: Path) -> str:
    from gemq.serve.contract import NEAR_TIE_NATS

    output.table("", _COLUMNS, [_row(tuned, trial, why) for trial, _, why in tuned.trials])
    _show_left_out(tuned.left_out)
    lines = [f"a candidate is kept if the lower bound ({tuned.confidence:.4f} one-sided) is above {tuned.floor:.4f}, and its ids are the baseline's"]
    for trial, _, why in tuned.trials:
        margins = [NEAR_TIE_NATS + 1 if each.margin_nats is None else each.margin_nats for each in trial.divergences]
        if why.startswith("faster, but") and margins and max(margins) <= NEAR_TIE_NATS:
            lines.append(f"{trial.switch} {trial.value}: ids part at near-ties, {max(margins):.3f} nats at most, as two kernels that round "
                         f"differently do; --tolerance {NEAR_TIE_NATS} would take them (cp -r {output_directory} NEW.partial, then --output NEW "
                         "measures nothing twice)")  # fmt: skip
    if tuned.profile is None or tuned.profile.measured is None:
        lines.append("nothing is kept: vLLM's own choices stay")
    else:
        gain = tuned.profile.measured
        lines.append(f"{gain.baseline_tps:.2f} -> {gain.tuned_tps:.2f} TPS, ratio {gain.ratio:.4f} (lower bound {gain.lower_bound:.4f})"
                     + ("" if gain.confirmed else "; not confirmed in fresh starts"))  # fmt: skip
        lines += [f"{tuned.profile.switches()}", f"{output_directory / 'profile.json'}: gemq package --profile and gemq serve --profile take it"]
    return "\n".join([*lines, f"written to {output_directory} after {output.human_seconds(tuned.seconds)}"])


def tune(
    target: Annotated[str, typer.Argument(metavar="SUBMISSION|CHECKPOINT", help="What package or quantize wrote.")],
    output_directory: Annotated[
        Path | None, typer.Option("--output", "-o", help="A directory for profile.json and what was tried; a stopped search goes on.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.1, help="No candidate is started, nor measured further, after these; the last check is.")] = 60,
    switch: Annotated[list[str] | None, typer.Option(help="Try this switch alone; say it again for more. All if not given.")] = None,
    drafter: Annotated[Path | None, typer.Option(help="A drafter's directory, for speculative decoding.")] = None,
    profile: Annotated[str | None, typer.Option(help=f"What candidates build on: {', '.join(PROFILES)}. Else the submission's own.")] = None,
    workload: Annotated[str, typer.Option(help="efficient-gemma, lowbarena, or a .yaml that describes loads.")] = "efficient-gemma",
    requests: Annotated[int, typer.Option(min=1, help="Requests a run; at least as many as a load has in flight.")] = 2,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens a request makes, in place of the workload's.")] = None,
    pairs: Annotated[int, typer.Option(min=2, help="Pairs of runs, in turn; 24 or more where noise may hide a gain.")] = 6,
    prompts: Annotated[Path | None, typer.Option(help="Prompts: ShareGPT's .json, or a .jsonl; made from a seed if not given.")] = None,
    greedy_prompts: Annotated[int, typer.Option(min=1, help="Prompts whose greedy ids are compared.")] = 8,
    greedy_tokens: Annotated[int, typer.Option(min=1, help="Tokens that are decoded for each.")] = 128,
    tolerance: Annotated[float, typer.Option(help="Nats up to which other ids are a near-tie; 0: ids stay as they are.")] = 0.0,
    servers: Annotated[int | None, typer.Option(min=1, max=16, help="Servers up at a time; 2 where they fit, 1 starts each in turn.")] = None,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds that a start may take.")] = 600,
    confirm: Annotated[bool, typer.Option("--confirm/--no-confirm", help="Measure what is kept once more, in fresh starts.")] = True,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory in place of the checkpoint that a submission names.")] = None,
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't check the checkpoint's seal at every start.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the candidates and what is left out, and stop.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print everything as JSON on stdout.")] = False,
) -> None:
    """Try vLLM's switches, each in a server of its own; keep what is faster beyond the noise and leaves greedy ids as they are."""
    output.mode.json = output.mode.json or json_
    if output_directory is None and not dry_run:
        raise UsageError("--output is missing", "give a directory for the profile, or --dry-run")
    if output_directory is not None:
        atomic.require_absent(output_directory)
    from gemq.serve.tune_job import Options, prepare
    from gemq.serve.tune_job import tune as run

    options = Options(target, checkpoint, profile, workload, requests, tokens, pairs, prompts, greedy_prompts, greedy_tokens, tolerance,
                      tuple(switch or ()), drafter, minutes, start_timeout, servers, confirm, python, not no_verify)  # fmt: skip
    prepared = prepare(options)
    if dry_run:
        _show_plan(prepared)
        return
    assert output_directory is not None
    plan = prepared.search
    count = sum(map(len, plan.offered))
    output.note(f"{count} candidates on vLLM {plan.engine.version} ({plan.engine.platform}), {plan.engine.card}; {prepared.room} servers at a time")

    def told(trial: Trial, kept: bool, why: str) -> None:
        speeds = f": {trial.pairs[-1][0]:.2f} -> {trial.pairs[-1][1]:.2f} TPS" if trial.pairs else ""
        output.note(f"{trial.switch} {trial.value}{speeds}, {why}")

    tuned = run(prepared, options, output_directory, told)
    output.result(tuned.to_json(), _show(tuned, output_directory))


def register(app: typer.Typer) -> None:
    """Add `tune` to gemq's commands."""
    app.command("tune")(tune)
