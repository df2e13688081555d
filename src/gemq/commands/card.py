"""`gemq card`: the model card of a checkpoint, with what was measured of it since."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gemq import atomic, output
from gemq.errors import IntegrityError, UsageError
from gemq.output_paths import require_separate

_MAX_OWN_BYTES = 64 << 20


def card(
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a sealed checkpoint.")],
    measured: Annotated[list[Path] | None, typer.Option(help="What eval-ppl or eval-kl wrote to --output of it; may be repeated.")] = None,
    output_directory: Annotated[
        Path | None, typer.Option("--output", "-o", help="A new directory: the same content with this card and a seal of its own.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Print the card of CHECKPOINT as it would be, or write it: a sealed checkpoint is never changed, so into a new one that shares its files."""
    from gemq.quantize import seal
    from gemq.quantize.card import inherited_fields, joined, model_name, read_measured, reports
    from gemq.quantize.reseal import reseal

    output.mode.json = output.mode.json or json_output
    if output_directory is not None:
        atomic.require_absent(output_directory)
        require_separate(output_directory, checkpoint)
    files = seal.read_seal(checkpoint)
    results = [_result(path, checkpoint, seal.content_digest(files)) for path in measured or []]
    differences = seal.check_seal(checkpoint, fast=output_directory is None)
    if differences:
        raise IntegrityError(f"{checkpoint} is not what its seal says: {differences[0]}", f"see all of it with `gemq verify {checkpoint}`")
    manifest, recipe = _account(checkpoint)
    measurements = joined(read_measured(checkpoint), results)
    try:
        made = reports(manifest, recipe, files, measurements, inherited_fields(checkpoint / seal.CARD_FILE))
        name = model_name(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise IntegrityError(f"gemq.json or recipe.yaml in {checkpoint} lacks what a card needs ({type(error).__name__}: {error})",
                             "only a checkpoint that `gemq quantize` wrote can have a card") from None
    document: dict[str, Any] = {"checkpoint": str(checkpoint), "name": name, "measurements": measurements,
                                "content_digest": seal.content_digest(files), "card": made[seal.CARD_FILE].decode()}
    if output_directory is None:
        output.result(document, document["card"].rstrip("\n"))
        return
    digest = reseal(checkpoint, output_directory, [file for file in files if file.path not in seal.REPORTS], made)
    output.result({**document, "output": str(output_directory), "seal_digest": digest},
                  f"{output_directory}: the content of {checkpoint}, {len(measurements)} measurements on its card\n"
                  f"seal {digest}\ncontent {document['content_digest']}")


def _result(path: Path, checkpoint: Path, digest: str) -> dict[str, Any]:
    """The summary of a result file; raises UsageError where it is a measurement of another content than `checkpoint`'s, which has `digest`.

    A measurement without a digest is taken with a warning: the card lists it as unbound.
    """
    from gemq.quantize.audit import strict_json
    from gemq.quantize.card import UNBOUND, summary, whose

    advice = "give what `gemq eval-ppl` or `gemq eval-kl` wrote to --output"
    if not path.is_file():
        raise UsageError(f"there is no result file {path}", advice)
    try:
        document = strict_json(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}", advice) from None
    except IntegrityError as error:
        raise UsageError(error.message, advice) from None
    try:
        made = summary(document)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", error.next_step) from None
    other = whose(made, digest)
    if other == UNBOUND:
        output.warn(f"{path} does not record which weights it measured: the card lists it as unbound. Measure {checkpoint} again to bind it")
    elif other:
        raise UsageError(f"{path} is a measurement of other weights (content digest {other[:16]}…), and {checkpoint} has {digest[:16]}…",
                         f"measure that one: `gemq eval-ppl {checkpoint} --reference SOURCE --data FILE --output FILE.json`")
    return made


def _account(checkpoint: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    import yaml

    from gemq.quantize.audit import strict_json
    from gemq.quantize.provenance import MANIFEST_FILE, RECIPE_FILE
    from gemq.quantize.seal import read_regular

    manifest = strict_json(read_regular(checkpoint / MANIFEST_FILE, _MAX_OWN_BYTES) or b"", str(checkpoint / MANIFEST_FILE))
    try:
        recipe = yaml.safe_load(read_regular(checkpoint / RECIPE_FILE, _MAX_OWN_BYTES) or b"")
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise IntegrityError(f"{checkpoint / RECIPE_FILE} is no YAML: {str(error)[:100]}", "quantize again") from None
    return manifest, recipe


def register(app: typer.Typer) -> None:
    """Add `card` to gemq's commands."""
    app.command("card")(card)
