"""`gemq bench` and `gemq eval-greedy`: an endpoint measured and its greedy ids compared, as the judges do."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gemq import atomic, output
from gemq.errors import IntegrityError, UsageError
from gemq.output_paths import require_separate

if TYPE_CHECKING:
    from gemq.eval.bench import BenchResult, Times

_COLUMNS = ("load", "run", "TPS", "latency ms mean", "median", "p99", "first token ms", "between tokens ms", "requests", "s")

Target = Annotated[str, typer.Argument(help="http://HOST:PORT (with #NAME if it serves several), or a checkpoint or submission to start.")]
Python = Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")]
Checkpoint = Annotated[Path | None, typer.Option(help="A directory in place of the checkpoint that a submission names.")]
Tokenizer = Annotated[Path | None, typer.Option(help="A directory with the tokenizer, where text must become token ids.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]


def _ms(times: Times | None) -> str:
    return "–" if times is None else f"{times.mean:.2f}"


def _show(result: BenchResult) -> str:
    """Print the tables; returns the closing lines."""
    rows: list[tuple[object, ...]] = []
    for one in result.loads:
        for run in one.runs:
            latency = run.latency_ms
            first = one.probe.first_token_ms if one.probe else run.first_token_ms
            between = one.probe.between_tokens_ms if one.probe else run.between_tokens_ms
            rows.append((one.load.name, run.run + 1, f"{run.tps:.2f}", f"{latency.mean:.1f}", f"{latency.median:.1f}", f"{latency.p99:.1f}",
                         _ms(first), _ms(between), run.requests, f"{run.duration_s:.1f}"))  # fmt: skip
    output.table(f"{result.model} at {result.base_url}", _COLUMNS, rows)
    findings = [(one.load.name, finding.name, "yes" if finding.kept else "NO", finding.seen) for one in result.loads for finding in one.audit]
    if findings:
        output.table("asked beside the clock", ("load", "question", "kept", "seen"), findings)
    closing = []
    for one in result.loads:
        tps = one.tps
        stops = sum(run.interruptions for run in one.runs)
        if stops:
            closing.append(f"{one.load.name}: interrupted {stops} times; the time between is not counted")
        if tps.lower_95 is None or tps.deviation is None:
            closing.append(f"{one.load.name}: {tps.mean:.2f} TPS in one run; --runs 5 tells what is safe to report")
        else:
            closing.append(
                f"{one.load.name}: {tps.mean:.2f} TPS, standard deviation {tps.deviation:.2f} over {tps.runs} runs; safe to report: "
                f"{tps.lower_95:.2f} (one more run is above it with 95% confidence)"
            )
    if result.peak_memory_bytes is not None:
        closing.append(f"peak {result.memory_kind}: {output.human_bytes(result.peak_memory_bytes)}")
        held = result.memory_held or {}
        if held.get("kv_used_share") is not None and held.get("kv_preallocated_bytes"):
            closing.append(f"KV cache: at most {held['kv_used_share']:.1%} of {output.human_bytes(held['kv_preallocated_bytes'])} in use; "
                           f"{held['preemptions']} preemptions")  # fmt: skip
    if result.ppl is not None:
        closing.append(f"PPL {result.ppl['ppl']['value']:.5g} over {result.ppl['tokens']} tokens")
    return "\n".join(closing)


def bench(
    target: Target,
    workload: Annotated[str, typer.Option(help="efficient-gemma, lowbarena, or a .yaml that describes loads.")] = "efficient-gemma",
    scale: Annotated[float, typer.Option(help="Requests, lengths and requests in flight times this: 0.1 for a small machine.")] = 1.0,
    runs: Annotated[int, typer.Option(min=1, help="Runs of each load; from several comes the TPS that is safe to report.")] = 1,
    prompts: Annotated[Path | None, typer.Option(help="Prompts: ShareGPT's .json, or a .jsonl; made from a seed if not given.")] = None,
    ppl: Annotated[Path | None, typer.Option(help="Token records to score after the loads, for summary.json's ppl.")] = None,
    ppl_records: Annotated[int | None, typer.Option(min=1, help="Score at most this many of them.")] = None,
    client: Annotated[str, typer.Option(help="Who sends the load: gemq, vllm (its own bench client, which streams), or auto: vLLM's where it "
                                        "is at hand and the load is streamed.")] = "auto",
    audit: Annotated[bool, typer.Option("--audit/--no-audit", help="Ask what an endpoint that cheats answers differently.")] = True,
    checkpoint: Checkpoint = None,
    tokenizer: Tokenizer = None,
    vocabulary: Annotated[int | None, typer.Option(min=16, help="Tokens that a URL's model knows, for random prompts (32000).")] = None,
    python: Python = None,
    output_dir: Annotated[Path | None, typer.Option("--output", help="A directory for all of it; a stopped run goes on from what it kept.")] = None,
    json_output: Json = False,
) -> None:
    """Speed of an endpoint under an arena's workload, tokens counted from ids; exit 4 where it is not honest, 75 where it dies half-way."""
    output.mode.json = output.mode.json or json_output
    from gemq.eval import bench as room
    from gemq.eval.memory import MemoryWatch
    from gemq.eval.target import Target as Opened
    from gemq.eval.vllm_load import opened_client
    from gemq.eval.workloads import find_workload, prompts_for, read_prompts

    chosen = find_workload(workload, scale)
    given = None if prompts is None else read_prompts(prompts)
    opened = Opened.parse(target, checkpoint)
    if ppl is not None and not ppl.is_file():
        raise UsageError(f"--ppl {ppl} does not exist", "give a .jsonl of token records")
    sent = {load.name: prompts_for(load, given, vocabulary=vocabulary or opened.vocabulary, bos=opened.bos,
                                   tokenizer=tokenizer or opened.checkpoint) for load in chosen.loads}  # fmt: skip
    for load in chosen.loads:
        if len(sent[load.name]) < load.requests:
            output.note(f"{load.name}: {len(sent[load.name])} prompts were given for {load.requests} requests; each is sent once")
    if output_dir is not None:
        require_separate(output_dir, *opened.directories, tokenizer)
    with atomic.resumable_directory(output_dir, "bench") if output_dir is not None else contextlib.nullcontext() as partial:
        with opened.opened(python=python) as (endpoint, pid):
            with contextlib.ExitStack() as stack:
                driver = stack.enter_context(opened_client(client, chosen.loads, python))
                watch = stack.enter_context(MemoryWatch(pid, endpoint.base_url)) if pid is not None else None
                result, partial = room.run_bench(endpoint, chosen, sent, target=str(target), runs=runs, audited=audit, partial=partial,
                                                 server_dependencies=opened.dependencies, client=driver, client_kind=client,
                                                 target_digest=opened.digest)  # fmt: skip
            if watch is not None:
                result.take_memory(watch)
            if ppl is not None:
                from gemq.eval.ppl import evaluate_ppl

                # a server of gemq's own gets another port next time, and its kept scores would not be recognized
                kept = None if partial is None or pid is not None else partial / "ppl.json"
                scored = evaluate_ppl(endpoint.name, ppl, records=ppl_records, tokenizer=tokenizer or opened.checkpoint, output_path=kept)
                result.ppl = replace(scored, target_digest=opened.digest).to_json()
                if kept is not None:
                    atomic.partial_of(kept).unlink(missing_ok=True)
        if partial is not None and output_dir is not None:
            room.write_result(result, partial, output_dir, time.strftime("gemq-%Y%m%dT%H%M%SZ", time.gmtime()))
    closing = _show(result)
    if output_dir is not None:
        closing += f"\nwritten to {output_dir}"
    output.result(result.to_json(), closing)
    if result.broken:
        load_name, finding = result.broken[0]
        raise IntegrityError(f"{load_name}: not so that {finding.name}: {finding.seen}",
                             "the numbers above are not a model's that does the work; find what answers in its place")  # fmt: skip


def eval_greedy(
    target: Annotated[str, typer.Argument(help="An endpoint's URL, a checkpoint or submission to start, or a .jsonl of decode records.")],
    reference: Annotated[str, typer.Option(help="The served checkpoint's directory, a .jsonl of decode records, or the URL of a plain server.")],
    prompts: Annotated[Path | None, typer.Option(help="Prompts: ShareGPT's .json, or a .jsonl; the reference's, or made, if not given.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Compare at most this many prompts.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens to decode a prompt (512, or as many as the reference's records).")] = None,
    tolerance: Annotated[float | None, typer.Option(help="Nats up to which a difference is a near-tie (0.25 across engines, else 0).")] = None,
    engine: Annotated[str, typer.Option(help="What reads the reference checkpoint: transformers, or vllm, started plainly.")] = "transformers",
    device: Annotated[str, typer.Option(help="For transformers: auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="For transformers: auto (float32 on a CPU without AMX), float32, bfloat16 or float16.")] = "auto",
    checkpoint: Checkpoint = None,
    tokenizer: Tokenizer = None,
    python: Python = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output", help="A directory for decode.jsonl and greedy.json; a stopped capture goes on.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Greedy ids against plain decoding of the same checkpoint: exit 0 the same, 4 divergent, 2 not comparable, 75 the endpoint died."""
    output.mode.json = output.mode.json or json_output
    from gemq.eval.greedy_run import Job, evaluate_greedy

    result = evaluate_greedy(Job(str(target), str(reference), prompts, limit, tokens, tolerance, engine, device, dtype, checkpoint, tokenizer,
                                 python, output_dir))  # fmt: skip
    shown = [one for one in result.per_prompt if one.verdict != "identical"][:20]
    rows = [(one.id, one.verdict, *("–" if value is None else str(value) for value in (one.divergence, one.served_token, one.reference_token)),
             "–" if one.margin_nats is None else f"{one.margin_nats:.4f}", one.near_ties) for one in shown]  # fmt: skip
    if rows:
        output.table(f"{result.target} against {result.reference}",
                     ("prompt", "verdict", "first at", "served", "reference", "margin, nats", "near-ties"), rows)  # fmt: skip
    count = len(result.per_prompt)
    ties = sum(one.near_ties for one in result.per_prompt)
    closing = f"{result.identical_share:.1%} of {count} prompts identical, {len(result.divergent)} divergent"
    if ties:
        closing += f"; {ties} near-ties within {result.tolerance_nats:g} nats: --engine vllm decodes with the same kernels and takes none"
    output.result(result.to_json(), closing)
    if result.divergent:
        first = result.divergent[0]
        apart = "" if first.margin_nats is None else f", {first.margin_nats:.3f} nats behind {first.reference_token}"
        raise IntegrityError(f"{len(result.divergent)} of {count} prompts diverge; {first.id} first at token {first.divergence}: "
                             f"{first.served_token}{apart}", "switch off speculation, batching and tuned kernels one by one" + (
                                 "; --engine vllm compares with the same kernels" if engine == "transformers" else ""))  # fmt: skip


def register(app: typer.Typer) -> None:
    """Add this file's commands to gemq's."""
    app.command("bench")(bench)
    app.command("eval-greedy")(eval_greedy)
