"""`gemq eval-ppl` and `gemq eval-kl`: judge a checkpoint or an endpoint, and hold it to a budget."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemq import atomic, output
from gemq.errors import OverBudgetError, UsageError

if TYPE_CHECKING:
    from gemq.eval.kl import KlResult
    from gemq.eval.ppl import PplResult

_COLUMNS = ("", "value", "std. error", "95% upper bound", "tokens", "records")

Data = Annotated[Path, typer.Option(help="A .txt (windows), or a .jsonl of token records with id, context_token_ids and target_token_ids.")]
Records = Annotated[int | None, typer.Option("--records", "--windows", help="Score at most this many records or windows.")]
Skip = Annotated[int, typer.Option(help="Leave out this many records at the start.")]
Length = Annotated[int | None, typer.Option(help="Tokens a window of text, BOS included (1024), or where token records are cut (nowhere).")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Dtype = Annotated[str, typer.Option(help="Compute in auto (float32 on a CPU without AMX), float32, bfloat16 or float16.")]


def parse_share(text: str) -> float:
    """The budget of a PPL as a share, from "5%" or "0.05"; raises UsageError unless it is above 0 and at most 100%."""
    digits = text.strip()
    try:
        share = float(digits.removesuffix("%")) / (100 if digits.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise UsageError(f"--budget {text!r} is no share above 0 and up to 100%", 'write "5%" or 0.05 for five percent')
    return share


def parse_nats(text: str) -> float:
    """The budget of a KL in nats a token; raises UsageError unless it is a finite number above 0."""
    try:
        nats = float(text)
    except ValueError:
        nats = math.nan
    if not (math.isfinite(nats) and nats > 0):
        raise UsageError(f"--budget {text!r} is no finite number above 0", "give nats a token, such as 0.15")
    return nats


def _require_bound(records: int | None, budget: float | None) -> None:
    if budget is not None and records == 1:
        raise UsageError("--budget binds on an upper confidence bound, which a single record does not have", "score at least 2 records")


def _write(result: PplResult | KlResult, file: Path | None) -> dict[str, Any]:
    """The result as JSON types, also written to `file`; what was kept of a stopped run is deleted then."""
    document = result.to_json()
    if file is not None:
        with atomic.disk_errors(file):
            atomic.write_new_file(file, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
            atomic.partial_of(file).unlink(missing_ok=True)
    return document


def _show(result: PplResult | KlResult, document: dict[str, Any], closing: str) -> None:
    """Print a result; only then is it compared with the budget."""
    output.table(f"{result.target} on {result.data}, computed in {result.dtype}", _COLUMNS, result.rows())
    output.result(document, closing)


def _hold(bound: float | None, limit: float, what: str, next_step: str) -> None:
    if bound is None:
        raise UsageError(
            "the data held a single record, which gives no upper confidence bound to hold to --budget", "score at least 2 records"
        )
    if bound > limit:
        raise OverBudgetError(f"over budget: {what}", next_step)


def eval_ppl(
    target: Annotated[
        str, typer.Argument(help="A checkpoint directory, or an endpoint: http://HOST:PORT, with #NAME if it serves several models.")
    ],
    data: Data,
    reference: Annotated[str | None, typer.Option(help="The source's directory, or an endpoint that serves it.")] = None,
    budget: Annotated[str | None, typer.Option(help="Exit 3 if PPL may be more than this above the reference's: 5% or 0.05.")] = None,
    records: Records = None,
    skip: Skip = 0,
    length: Length = None,
    kl: Annotated[bool, typer.Option("--kl/--no-kl", help="Also KL(reference || target), where both are directories.")] = True,
    tokenizer: Annotated[Path | None, typer.Option(help="A directory with the tokenizer, for text against a URL.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Also write the result as JSON; a stopped run goes on from what it kept.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Perplexity with its standard error, against a reference if there is one; --budget binds on the ratio's 95% upper bound."""
    output.mode.json = output.mode.json or json_output
    share = None if budget is None else parse_share(budget)
    if share is not None and reference is None:
        raise UsageError("--budget needs a --reference to be measured against", "add --reference SOURCE")
    _require_bound(records, share)

    from gemq.eval.endpoint import is_url
    from gemq.eval.ppl import evaluate_ppl

    with_kl = kl and reference is not None and not is_url(target) and not is_url(reference)
    with atomic.held_output(output_file):
        result = evaluate_ppl(target, data, reference=reference, records=records, skip=skip, length=length, device=device, dtype=dtype,
                              with_kl=with_kl, tokenizer=tokenizer, output_path=output_file)  # fmt: skip
        document = _write(result, output_file)
    ratio, closing = result.ratio, ""
    if ratio is not None:
        bound = (
            "no upper bound from a single record" if ratio.upper_95 is None else f"at most {ratio.upper_95 - 1:+.2%} with 95% confidence"
        )
        closing = f"PPL differs from the reference's by {ratio.value - 1:+.2%}, {bound}"
    _show(result, document, closing)
    if share is not None and ratio is not None:
        upper = "" if ratio.upper_95 is None else f"{ratio.upper_95 - 1:+.2%}"
        _hold(ratio.upper_95, 1 + share, f"PPL may differ from the reference's by {upper} (95% upper bound), --budget allows {share:+.2%}",
              "score more records if only the bound is over; otherwise use smaller groups, more bits, or better calibration")  # fmt: skip


def eval_kl(
    target: Annotated[
        str, typer.Argument(help="A checkpoint directory, or an endpoint: http://HOST:PORT, with #NAME if it serves several models.")
    ],
    data: Data,
    reference: Annotated[str | None, typer.Option(help="The source's directory, an endpoint that serves it, or what --record wrote.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write what TARGET tells to this file, a reference for later, and compare nothing.")] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Likeliest tokens to compare where an endpoint is asked (20, vLLM's limit).")] = None,
    budget: Annotated[str | None, typer.Option(help="Exit 3 if KL may be above this many nats a token, such as 0.15.")] = None,
    records: Records = None,
    skip: Skip = 0,
    length: Length = None,
    tokenizer: Annotated[Path | None, typer.Option(help="A directory with the tokenizer, for text against a URL.")] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    output_file: Annotated[
        Path | None, typer.Option("--output", help="Also write the result as JSON; a stopped run goes on from what it kept.")
    ] = None,
    json_output: Json = False,
) -> None:
    """KL(reference || target) in nats a token: of directories over the whole vocabulary, of endpoints through prompt_logprobs."""
    output.mode.json = output.mode.json or json_output
    nats = None if budget is None else parse_nats(budget)
    if (reference is None) == (record is None):
        raise UsageError("what to compare TARGET with is not said" if reference is None else "--reference and --record are both given",
                         "give --reference SOURCE to compare, or --record FILE to keep what TARGET tells")  # fmt: skip
    _require_bound(records, nats)

    from gemq.eval.kl import evaluate_kl, record_reference

    if record is not None or reference is None:
        assert record is not None
        if nats is not None or output_file is not None:
            raise UsageError("--record compares nothing, so there is no --budget to keep and no result for --output", "leave them out")
        with atomic.held_output(record):
            count = record_reference(target, data, record, records=records, skip=skip, length=length, device=device, dtype=dtype,
                                     tokenizer=tokenizer, top=top)  # fmt: skip
        output.result({"kind": "recorded", "file": str(record), "records": count}, f"{count} records of {target} written to {record}")
        return
    with atomic.held_output(output_file):
        result = evaluate_kl(target, data, reference=reference, records=records, skip=skip, length=length, device=device, dtype=dtype,
                             tokenizer=tokenizer, top=top, output_path=output_file)  # fmt: skip
        document = _write(result, output_file)
    closing = "" if result.covered is None else (
        f"a lower bound: compared are the {result.top} likeliest tokens, as far as both tell them; they hold {result.covered:.2%} of the "
        f"reference's probability"
    )
    _show(result, document, closing)
    if nats is not None:
        upper = "" if result.kl_nats.upper_95 is None else f"{result.kl_nats.upper_95:.4f}"
        _hold(
            result.kl_nats.upper_95,
            nats,
            f"KL may be {upper} nats a token (95% upper bound), --budget allows {nats:g}",
            "score more records if only the bound is over; otherwise use smaller groups, more bits, or better calibration",
        )


def register(app: typer.Typer) -> None:
    """Add the commands of this file to `app`."""
    app.command("eval-ppl")(eval_ppl)
    app.command("eval-kl")(eval_kl)
