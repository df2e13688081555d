"""`gemq rehearse`: everything that an arena does with a submission, in its order, on this machine, and the verdict."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gemq import output
from gemq.errors import IntegrityError, OverBudgetError, UsageError


def rehearse(
    submission: Annotated[str, typer.Argument(help="The directory that gemq package wrote, or a checkpoint.")],
    arena: Annotated[str, typer.Option(help="efficient-gemma or lowbarena.")],
    output_dir: Annotated[Path, typer.Option("--output", help="A directory for every stage's result; a stopped rehearsal goes on.")],
    reference: Annotated[str | None, typer.Option(help="The unquantized source: a checkpoint, a submission that serves it, or a URL.")] = None,
    scale: Annotated[float, typer.Option(help="The workloads' requests, lengths and requests in flight times this.")] = 1.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each workload.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="Efficient Gemma's prompts (ShareGPT's .json); made from a seed if not given.")] = None,
    ppl: Annotated[Path | None, typer.Option(help="Token records for the perplexity gate.")] = None,
    kl: Annotated[Path | None, typer.Option(help="Token records or text for the KL gate (lowbarena).")] = None,
    gsm8k: Annotated[Path | None, typer.Option(help="A GSM8K .jsonl for the accuracy gate (lowbarena).")] = None,
    records: Annotated[int | None, typer.Option(min=1, help="Score at most this many records for PPL and KL.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Ask at most this many questions.")] = None,
    reference_ppl: Annotated[float | None, typer.Option(help="The reference's PPL where it is not served here (2.302 on the arena's).")] = None,
    reported_tps: Annotated[float | None, typer.Option(help="The TPS to be reported: this run must not be more than 5% slower.")] = None,
    engine: Annotated[str, typer.Option(help="What decodes plainly for the greedy audit: vllm or transformers.")] = "vllm",
    modality: Annotated[list[str] | None, typer.Option(help="text, image or audio; say it again for more. All three if not given.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory in place of the checkpoint that the submission names.")] = None,
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    isolate: Annotated[bool, typer.Option("--isolate/--no-isolate", help="Run in namespaces with the loopback only, where possible.")] = True,
    json_output: Annotated[bool, typer.Option("--json", help="Print the verdict as JSON on stdout.")] = False,
) -> None:
    """Rehearse an arena's evaluation; exit 0 valid, 3 a gate failed, 4 contract or greedy identity broken, 75 stopped (run it again)."""
    output.mode.json = output.mode.json or json_output
    from gemq.eval import isolation
    from gemq.eval import rehearse as room
    from gemq.eval.endpoint import is_url
    from gemq.serve.contract import MODALITIES

    asked = tuple(modality or MODALITIES)
    if any(name not in MODALITIES for name in asked):
        raise UsageError(f"--modality {', '.join(asked)}: one is unknown", f"valid are {', '.join(MODALITIES)}")
    job = room.Rehearsal(submission, arena, Path(), reference, checkpoint, scale, runs, prompts, ppl, kl, gsm8k, records, limit, reference_ppl,
                         reported_tps, engine, asked, python)  # fmt: skip
    room.require(job)
    if isolate and os.environ.get(isolation.INSIDE) != "1":
        why = "the reference is a URL" if reference is not None and is_url(reference) else isolation.problem()
        if not why:
            code = isolation.run_isolated([sys.executable, "-m", "gemq", *sys.argv[1:]])
            raise typer.Exit(code)
        output.warn(f"not isolated: {why}")
    verdict, open_points = room.run(job, output_dir)
    output.table(f"{submission} at {verdict.arena}", ("gate", "kept", "value", "limit", "margin"), [gate.row() for gate in verdict.gates])
    closing = [f"score {verdict.score:.4g}, {'valid' if verdict.valid else 'NOT valid'}; all of it is in {output_dir}",
               *(f"not enforced here: {point}" for point in open_points)]  # fmt: skip
    output.result({**verdict.to_json(), "not_enforced": open_points}, "\n".join(closing))
    failed = [gate for gate in verdict.gates if not gate.kept]
    if failed:
        kind = IntegrityError if any(gate.name in ("contract", "greedy ids identical") for gate in failed) else OverBudgetError
        raise kind(f"{len(failed)} gates fail, the first: {failed[0].name}", f"see {output_dir} for what each stage found")


def register(app: typer.Typer) -> None:
    """Add this file's command to gemq's."""
    app.command("rehearse")(rehearse)
