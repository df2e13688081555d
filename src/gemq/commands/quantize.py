"""`gemq quantize`: the main job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemq import output
from gemq.errors import GemqError, UsageError

if TYPE_CHECKING:
    from gemq.eval.ppl import PplResult
    from gemq.quantize.job import Job
    from gemq.quantize.plan import Plan
    from gemq.quantize.run import Outcome
    from gemq.quantize.search_run import BudgetData, Order
    from gemq.quantize.skeleton import Skeleton
    from gemq.shards import ShardReader
    from gemq.source import Source

DEFAULT_MODEL = "google/gemma-4-E4B-it"
_SHOWN_FILES = 20


def quantize(
    model: Annotated[str, typer.Argument(help="A directory, a Hub id, or the demo model gemma-3-270m.")] = DEFAULT_MODEL,
    recipe: Annotated[str, typer.Option(help="A built-in recipe (`gemq recipes ls`) or a YAML file.")] = "w4a16",
    output_directory: Annotated[
        Path | None, typer.Option("--output", "-o", help="The checkpoint's directory; it must not exist. Default: MODEL-RECIPE here.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    calibration: Annotated[str, typer.Option(help="self (the model's own samples), a .txt or .jsonl file, or a Hub data set.")] = "self",
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window, BOS included.")] = 512,
    split: Annotated[str, typer.Option(help="The data set's split.")] = "train",
    column: Annotated[str | None, typer.Option(help="The data set's column.")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="Let windows run over the ends of documents.")] = False,
    lm_head: Annotated[str | None, typer.Option(help="Quantize an untied head too: int4, int8, or keep.")] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="compressed-tensors or gptq (AutoGPTQ's, int4 and int8 only); else the recipe's.")
    ] = None,
    eval_data: Annotated[
        str, typer.Option(help="Where to measure perplexity afterwards: self (fresh samples of the source), a .txt or .jsonl, or none.")
    ] = "self",
    eval_records: Annotated[int, typer.Option(min=1, help="Records or windows to measure on.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")] = "auto",
    devices: Annotated[
        str | None,
        typer.Option(help="Several that share the calibration batches, instead of --device: 0,1 (GPUs) or cpu,cpu. The first solves and writes."),
    ] = None,
    gpu_memory: Annotated[
        str | None, typer.Option(help="What to take of each GPU at most, such as 20GiB; the rest waits in host memory and in a file. Default: 8GiB.")
    ] = None,
    resume: Annotated[
        str,
        typer.Option(help="An unfinished run, or search, of the same options: auto goes on with it, required refuses to start without one, never "
                          "discards it, and what is kept of such a search."),
    ] = "auto",
    ppl_budget: Annotated[
        str | None, typer.Option(help="Search the fastest mix of schemes whose perplexity, at its upper 95% bound, is at most this much worse: 5%.")
    ] = None,
    kl_budget: Annotated[float | None, typer.Option(help="Likewise by KL(source || checkpoint), in nats a token.")] = None,
    objective: Annotated[
        str | None, typer.Option(help="What the search makes small: decode (bytes a token), size or throughput. Default: decode.")
    ] = None,
    candidates: Annotated[
        str | None, typer.Option(help="Schemes that the search chooses among, such as int4-g128,int4-g32,int8,keep.")
    ] = None,
    search_builds: Annotated[int | None, typer.Option(min=1, help="Checkpoints that the search may build and measure. Default: 3.")] = None,
    search_state: Annotated[
        Path | None, typer.Option(help="Where the search keeps what it measured, for the next budget. Default: MODEL-RECIPE.search in the current "
                                         "directory, whatever --output is.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan; a config.json is enough.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Quantize MODEL's text decoder with a recipe into a sealed checkpoint, and measure it beside its source."""
    output.mode.json = json_output
    if resume not in ("auto", "required", "never"):
        raise UsageError(f"--resume is {resume!r}", "give auto, required or never")

    from gemq import atomic
    from gemq.memory import import_transformers_alone, let_segments_grow, prefer_large_pages
    from gemq.output_paths import require_separate

    prefer_large_pages()
    let_segments_grow()
    import_transformers_alone()
    from gemq.quantize.gpu import parse_memory
    from gemq.quantize.plan import make_plan, require_pairs, with_format, with_head
    from gemq.recipes.model import load_recipe

    used = load_recipe(recipe)
    gpu_memory_bytes = None if gpu_memory is None else parse_memory(gpu_memory)
    budget = None
    if ppl_budget is not None or kl_budget is not None:
        from gemq.quantize.budget import OBJECTIVES, Budget
        from gemq.quantize.decisions import DEFAULT_CANDIDATES, decides_on_head, parse_candidates

        budget = Budget.parse(ppl_budget, kl_budget)
        objective, search_builds = objective or "decode", search_builds or 3
        if objective not in OBJECTIVES:
            raise UsageError(f"--objective is {objective!r}", f"give {', '.join(OBJECTIVES)}")
        named = DEFAULT_CANDIDATES if candidates is None else parse_candidates(candidates)
        if eval_data == "none":
            raise UsageError("a budget needs data to be measured on, and --eval-data is none", "give self, or a .txt or .jsonl file")
    else:
        of_a_search = {"--candidates": candidates, "--objective": objective, "--search-builds": search_builds, "--search-state": search_state}
        given = [name for name, value in of_a_search.items() if value is not None]
        if given:
            raise UsageError(f"{' and '.join(given)} can be used in a search alone, and no budget is given", "add --ppl-budget or --kl-budget")
    from gemq.source import default_name, default_search_state, resolve

    default = default_name(model, used.name)
    target = output_directory or Path(default if budget is None else f"{default}-{budget.label}")
    atomic.require_absent(target)
    state = search_state or default_search_state(model, used.name)
    if lm_head is not None:
        used = with_head(used, lm_head)
    if format_ is not None:
        used = with_format(used, format_)
    measure_on = _measuring_data(eval_data)

    if devices is not None:
        if device != "auto":
            raise UsageError(f"--device {device} and --devices {devices} are given", "give one of them")
        if budget is not None:
            raise UsageError("a search builds and measures on one device, and --devices is given", "give --device instead")
        if not dry_run:
            from gemq.quantize.process import prepare

            prepare()
    from gemq.devices import choose, choose_several
    from gemq.quantize.skeleton import load_skeleton

    together: tuple[str, ...] = ()
    if devices is not None:
        from gemq.quantize.ranks import require_divisible

        together = choose_several(devices)
        require_divisible(used)
    chosen = together[0] if together else choose(device)
    if gpu_memory is not None and not chosen.startswith("cuda"):
        raise UsageError(f"--gpu-memory {gpu_memory} has nothing to hold to: this runs on the {chosen}", "leave it out, or give --device cuda")
    source = resolve(model, revision)
    require_separate(target, source.directory)
    require_separate(search_state or target, source.directory, option="--output" if search_state is None else "--search-state")
    skeleton, reader = load_skeleton(source.directory)
    plan = make_plan(skeleton, used)
    require_pairs(plan)
    _tell_of(source, skeleton, reader)
    from gemq.calibration.sets import load_calibration, require_source
    from gemq.quantize import preview

    preview.require_writable(target)
    if resume == "required":
        preview.require_unfinished(target if budget is None else state, is_search=budget is not None)
    if used.needs_calibration or budget is not None:
        require_source(calibration, length, source.directory)
    if measure_on is not None:
        preview.require_records(measure_on, eval_records, None if reader is None else source.directory, for_budget=budget is not None)
    order, searched = None, None
    if budget is not None:
        from gemq.quantize.search_run import Order
        from gemq.quantize.search_state import RECORD_FILE, require_state_apart

        preview.require_windows(samples)
        preview.require_writable(state / RECORD_FILE)
        require_state_apart(state, source.directory, target)
        order = Order(budget, named, objective, search_builds, decides_on_head(used, skeleton), resume)  # type: ignore[arg-type]
        searched = preview.search_preview(plan, order, eval_records)
    if dry_run:
        _show_plan(plan, samples, length, chosen, max(1, len(together)), gpu_memory_bytes, searched)
        return
    if reader is None:
        raise UsageError(f"{source.directory} has a config.json and no weights", "fetch the weights too; --dry-run works without them")
    from gemq.quantize.job import Job
    from gemq.quantize.run import quantize as make_checkpoint

    windows = None
    if used.needs_calibration or budget is not None:
        windows = load_calibration(
            calibration,
            model_dir=source.directory,
            samples=samples,
            length=length,
            seed=seed,
            split=split,
            column=column,
            pack=pack,
            device=chosen,
        )
    if order is not None:
        from gemq.quantize.search_run import BudgetData

        assert measure_on is not None
        job = Job(source, plan, reader, windows, target, seed, chosen, "auto", gpu_memory_bytes)
        # another seed than the calibration's, so that nothing is judged on what it was fitted to
        _search(job, order, state, BudgetData(measure_on, eval_records, length, seed + 1))
        return
    results: list[PplResult] = []

    def measure(directory: Path) -> list[dict[str, Any]]:
        """What the card tells; the checkpoint is measured where it was built, before it is sealed."""
        from gemq.quantize.card import summary

        if measure_on is None:
            return []
        data = f"self, seed {seed + 1}" if measure_on == "self" else None
        try:
            results.append(_measure(directory, target, source, measure_on, eval_records, length, seed, chosen))
        except (GemqError, KeyboardInterrupt):
            output.note("the weights are finished: the same command measures and seals them, --eval-data none seals them unmeasured")
            raise
        return [summary(results[0].to_json(), data)]

    job = Job(source, plan, reader, windows, target, seed, chosen, resume, gpu_memory_bytes, together)  # type: ignore[arg-type]
    outcome = make_checkpoint(job, measure)
    _show_outcome(outcome, plan, results[0] if results else None)


def _tell_of(source: Source, skeleton: Skeleton, reader: ShardReader | None) -> None:
    """Print what of the source is not taken as it is written, and which of its files stay behind."""
    from gemq.quantize.companions import left_out
    from gemq.quantize.source_tensors import index_note

    if reader is None:
        return
    for text in filter(None, (skeleton.output_head.note, index_note(reader))):
        output.warn(text)
    stays = left_out(source.directory, reader)
    if stays:
        shown = ", ".join(stays[:_SHOWN_FILES]) + (f" and {len(stays) - _SHOWN_FILES} more" if len(stays) > _SHOWN_FILES else "")
        output.note(f"left out of the checkpoint, since no server reads them: {shown}")


def _search(job: Job, order: Order, state: Path, data: BudgetData) -> None:
    """The fastest mix within the budget, published at the job's output and printed."""
    from gemq.quantize.search_run import run_search

    budget = order.budget
    won = run_search(job, order, state, data)
    output.table(
        f"within {budget.show(budget.nats)}", ("", "bits a weight", "a token reads", "predicted KL", "measured", "95% bound", "mix"),
        [("chosen" if trial is won.trial else "", f"{trial.bits_per_decoder_weight:.2f}", output.human_bytes(trial.bytes_per_token),
          f"{trial.predicted:.4f}", *map(budget.show, trial.judged.of_budget(budget)), trial.described) for trial in won.trials],
    )  # fmt: skip
    search = won.manifest["search"]
    lines = [f"{won.directory}: {won.trial.bits_per_decoder_weight:.2f} bits a decoder weight, bound {budget.show(won.trial.upper(budget))} "
             f"of {budget.show(budget.nats)} on {won.trial.judged.records} records",
             f"the 95% bounds hold for all {search['bound']['looks']} checkpoints measured on these records in this search "
             "directory together (Bonferroni correction)"]  # fmt: skip
    if search["held_out"] is None:
        lines.append("none of the records was held out from the search: with eight or more (--eval-records) every fourth is")
    else:
        lines.append(f"on {search['held_out']['records']} held-out records, which the search did not use: {search['held_out']['told']}")
        if not search["held_out"]["within"]:
            output.warn(f"on the held-out records it is {search['held_out']['told']}, above the budget: measure on more (--eval-records)")
    lines += [f"seal sha256:{won.seal}", f"what was measured is kept in {state} for the next budget and for gemq pareto"]
    output.result({"checkpoint": str(won.directory), "seal": won.seal, "search": search}, "\n".join(lines))


def _measuring_data(eval_data: str) -> str | None:
    """None, "self", or a .txt or .jsonl file: found out before hours are spent."""
    if eval_data in ("none", "self"):
        return None if eval_data == "none" else eval_data
    if not Path(eval_data).is_file() or Path(eval_data).suffix not in (".txt", ".jsonl"):
        why = "does not end in .txt or .jsonl" if Path(eval_data).is_file() else "is not a file"
        raise UsageError(f"--eval-data {eval_data} {why}", "give self, none, or a .txt or .jsonl file")
    return eval_data


def _measure(
    directory: Path, target: Path, source: Source, data: str, records: int, length: int, seed: int, device: str
) -> PplResult:
    """The unsealed checkpoint in `directory` beside its source, under the name `target` that it will have."""
    import tempfile
    from dataclasses import replace

    from gemq.eval.ppl import evaluate_ppl

    def evaluated(path: Path, records: int | None) -> PplResult:
        result = evaluate_ppl(str(directory), path, reference=str(source.directory), records=records, device=device, with_kl=True)
        return replace(result, target=str(target))

    if data != "self":
        return evaluated(Path(data), records)

    from gemq.calibration.sets import load_calibration
    from gemq.eval.windows import write_records

    # another seed than the calibration's, so that nothing is judged on what it was fitted to
    fresh = load_calibration("self", model_dir=source.directory, samples=records, length=length, seed=seed + 1, device=device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "self.jsonl"
        write_records(path, fresh.windows)
        return evaluated(path, None)


def _show_plan(
    plan: Plan, samples: int, length: int, device: str, devices: int, gpu_memory_bytes: int | None, searched: tuple[dict[str, Any], list[str]] | None
) -> None:  # fmt: skip
    from gemq.quantize.estimate import estimate
    from gemq.quantize.plan import describe_units

    rows = describe_units(plan)
    before, after = plan.bytes_per_token()
    tokens = samples * length
    expected = estimate(plan, -(-tokens // devices), device, length, gpu_memory_bytes)
    gpu = "" if expected.device_bytes is None else f" and at most {output.human_bytes(expected.device_bytes)} of the GPU"
    each, where = ("this machine", device) if devices == 1 else (f"each of {devices}", f"{devices} devices")
    architecture = plan.skeleton.architecture.name
    output.table(
        f"{architecture} with {plan.recipe.name}: {plan.recipe.summary}",
        ("unit", "linears", "scheme", "solver", "before", "after"),
        [
            (
                row["unit"],
                row["linears"],
                row["scheme"],
                row["method"],
                output.human_bytes(row["bytes_before"]),
                output.human_bytes(row["bytes_after"]),
            )
            for row in rows
        ],
    )
    linears = sum(matrix.module != "lm_head" for matrix in plan.skeleton.matrices)
    quantized = sum(matrix.module != "lm_head" and matrix.module in plan.quantized_matrices for matrix in plan.skeleton.matrices)
    size, made = plan.source_bytes(), plan.checkpoint_bytes()
    norms = sum(pair.is_norm for pair in plan.pairs.values())
    smoothing = [f"smoothing        is searched for {len(plan.pairs)} units; up to {norms} norms take their scales"] if plan.pairs else []
    output.result(
        {"architecture": architecture, "recipe": plan.recipe.model_dump(mode="json"), "decoder_linears": linears, "quantized_linears": quantized,
         "units": rows, "bytes": {"source": size, "checkpoint": made, "per_token_source": before, "per_token_checkpoint": after},
         "bits_per_decoder_weight": plan.bits_per_weight(), "expected": expected.to_json(),
         "smoothing": {name: pair.tensor for name, pair in plan.pairs.items()},
         **({} if searched is None else {"search": searched[0]})},
        "\n".join((
            f"decoder linears  {quantized} of {linears} quantized, {plan.bits_per_weight():.2f} bits a weight",
            f"checkpoint       {output.human_bytes(size)} -> {output.human_bytes(made)} on disk",
            f"a decoded token  reads {output.human_bytes(before)} -> {output.human_bytes(after)} of linears and head",
            *smoothing,
            f"{each:<17}about {output.human_bytes(expected.memory_bytes)} of memory{gpu}, {output.human_seconds(expected.seconds)} "
            f"for {tokens} calibration tokens on {where}",
            *([] if searched is None else searched[1]),
        )),
    )  # fmt: skip


def _show_outcome(outcome: Outcome, plan: Plan, measured: PplResult | None) -> None:
    from dataclasses import replace

    from gemq.quantize.seal import content_digest, read_seal

    if measured is not None:  # it was made before the seal that names these weights
        measured = replace(measured, target_digest=content_digest(read_seal(outcome.directory)))
    sizes = outcome.manifest["bytes"]
    data: dict[str, Any] = {
        "checkpoint": str(outcome.directory),
        "seal": outcome.seal,
        "seconds": round(outcome.seconds, 1),
        "phases": {name: round(seconds, 3) for name, seconds in outcome.phases.items()},
        "bytes": sizes,
        "perplexity": None if measured is None else measured.to_json(),
    }
    lines = [
        f"{outcome.directory}: {output.human_bytes(sizes['source'])} -> {output.human_bytes(sizes['checkpoint'])}, "
        f"{sizes['bits_per_decoder_weight']:.2f} bits a decoder weight, quantized in {output.human_seconds(outcome.seconds)}",
        f"seal sha256:{outcome.seal}",
    ]
    if measured is not None:
        output.table(
            f"on {measured.tokens} tokens of {Path(measured.data).name}",
            ("", "value", "std. error", "95% upper bound", "tokens", "records"),
            measured.rows(),
        )
    output.result(data, "\n".join(lines))


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command()(quantize)
