"""`gemq pareto`: what each byte a token buys, predicted and measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemq import atomic, output
from gemq.errors import UsageError
from gemq.output_paths import require_separate

if TYPE_CHECKING:
    from gemq.source import Source


def pareto(
    model: Annotated[str, typer.Argument(help="A directory, a Hub id, or the demo model gemma-3-270m.")],
    recipe: Annotated[str, typer.Option(help="The recipe that a search varies.")] = "w4a16",
    output_dir: Annotated[Path | None, typer.Option("--output", "-o", help="A new directory. Default: MODEL-RECIPE-pareto here.")] = None,
    search_state: Annotated[
        Path | None, typer.Option(help="Where a search keeps what it measured; made if not there. Default: MODEL-RECIPE.search in the current "
                                         "directory, whatever --output is.")
    ] = None,
    ppl_budget: Annotated[list[str] | None, typer.Option(help="Draw this budget, such as 5%; say it again for more.")] = None,
    kl_budget: Annotated[list[float] | None, typer.Option(help="Tell the mix for this budget of KL, in nats a token; likewise.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="A .txt or .jsonl on which the source's perplexity is measured, for an axis of perplexities.")
    ] = None,
    records: Annotated[int | None, typer.Option(min=1, help="At most this many records or windows of --data.")] = None,
    candidates: Annotated[str | None, typer.Option(help="Schemes to choose among; else those that were measured, or the search's own.")] = None,
    lm_head: Annotated[str | None, typer.Option(help="int4, int8 or keep: fix the head's scheme, which is decided on otherwise.")] = None,
    calibration: Annotated[str, typer.Option(help="For what is not measured yet, as in quantize: self, a file, or a Hub data set.")] = "self",
    samples: Annotated[int, typer.Option(min=1, help="Calibration windows.")] = 128,
    length: Annotated[int, typer.Option(min=2, help="Tokens a window, BOS included.")] = 512,
    split: Annotated[str, typer.Option(help="The data set's split.")] = "train",
    column: Annotated[str | None, typer.Option(help="The data set's column.")] = None,
    pack: Annotated[bool, typer.Option("--pack", help="Let windows run over the ends of documents.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub id.")] = None,
    device: Annotated[str, typer.Option(help="Where to compute: auto, cpu, cuda or cuda:N.")] = "auto",
    json_output: Annotated[bool, typer.Option("--json", help="Print figures' data and table as JSON on stdout.")] = False,
) -> None:
    """Perplexity against bytes a token: what sensitivities predict, what builds measured, what each step buys; as HTML, PNG and JSON."""
    output.mode.json = output.mode.json or json_output
    from gemq.eval.report.style import require_matplotlib
    from gemq.eval.report.write import PAGE

    require_matplotlib()
    if data is not None and not data.is_file():
        raise UsageError(f"--data {data} is not a file", "give a .txt or .jsonl file")

    from gemq.memory import import_transformers_alone

    import_transformers_alone()
    from gemq.devices import choose
    from gemq.eval.report.pareto_page import write_pareto
    from gemq.quantize.budget import Budget
    from gemq.quantize.decisions import DEFAULT_CANDIDATES, decides_on_head, parse_candidates
    from gemq.quantize.pareto import pareto as compute
    from gemq.quantize.pareto import sensitivity_map
    from gemq.quantize.plan import with_head
    from gemq.quantize.preview import require_windows, require_writable
    from gemq.quantize.search_run import Prepared, stored_sensitivities
    from gemq.quantize.search_state import RECORD_FILE, SearchState, require_state_apart
    from gemq.quantize.skeleton import load_skeleton
    from gemq.quantize.trials import Trials
    from gemq.recipes.model import load_recipe
    from gemq.source import default_name, default_search_state, resolve

    asked = [made for made in (*(Budget.parse(text, None) for text in ppl_budget or []), *(Budget.parse(None, nats) for nats in kl_budget or []))
             if made is not None]  # fmt: skip
    named = None if candidates is None else parse_candidates(candidates)
    used = load_recipe(recipe)
    used = used if lm_head is None else with_head(used, lm_head)
    default = default_name(model, used.name)
    state, target = search_state or default_search_state(model, used.name), output_dir or Path(f"{default}-pareto")
    atomic.require_absent(target)
    chosen = choose(device)
    source = resolve(model, revision)
    head = decides_on_head(used, load_skeleton(source.directory)[0])
    require_separate(target, source.directory)
    require_writable(target)
    require_state_apart(state, source.directory, target)
    kept = SearchState.open(state)
    stored = stored_sensitivities(source, used, kept, named, head=head)
    if stored is None:
        from gemq.calibration.sets import load_calibration

        require_windows(samples)
        require_writable(state / RECORD_FILE)
        named = named or DEFAULT_CANDIDATES
        windows = load_calibration(calibration, model_dir=source.directory, samples=samples, length=length, seed=seed, split=split, column=column,
                                   pack=pack, device=chosen)  # fmt: skip
        kept.make()
        with atomic.locked(state), atomic.disk_errors(state):
            kept = SearchState.open(state)  # as it is now that nobody else writes to it
            prepared = Prepared.of(source, used, windows, named, chosen, head=head)
            units, found = prepared.units, prepared.sensitivities(source, windows, named, kept, chosen)
    else:
        units, found, named = stored
    trials = {log.judged_on: log.all() for log in Trials.every(kept, found.identity)}
    made = compute(units, found, named, asked, trials)
    made |= _reference(source, data, records, chosen, made["measured"])
    index = write_pareto(target, Path(model).name, made, sensitivity_map(units, found, named))
    output.table(
        f"{Path(model).name}: predicted mixes" + ("" if made["correction"]["ppl"] is None else ", corrected by the builds"),
        ("budget", "", "bits a weight", "a token reads", "predicted KL", "mix"),
        [(row["budget"], "asked for" if row["asked"] else "", f"{row['bits_per_decoder_weight']:.2f}", output.human_bytes(row["bytes_per_token"]),
          f"{row['predicted_kl_nats']:.4f}", row["mix"]) for row in made["budgets"] if row["mix"] is not None],
    )  # fmt: skip
    builds = len(made["measured"])
    closing = f"{target / PAGE}: {builds} build{'' if builds == 1 else 's'} measured, the rest is predicted"
    output.result({"output": str(target), **index, "pareto": made}, closing)


def _reference(source: Source, data: Path | None, records: int | None, device: str, measured: list[dict[str, Any]]) -> dict[str, Any]:
    """The source's perplexity and on what: measured on `data`, or as the last build found it; None where neither is there."""
    if data is not None:
        from gemq.eval.ppl import evaluate_ppl

        result = evaluate_ppl(str(source.directory), data, records=records, device=device)
        return {"reference_ppl": result.ppl.value, "reference_data": f"{data.name}, {result.records} records", "reference_tokens": result.tokens}
    if measured:
        return {"reference_ppl": measured[-1]["reference_ppl"], "reference_data": "the builds' records", "reference_tokens": None}
    return {"reference_ppl": None, "reference_data": None, "reference_tokens": None}


def register(app: typer.Typer) -> None:
    """Add `pareto` to gemq's commands."""
    app.command("pareto")(pareto)
