"""`gemq verify`: whether a checkpoint is what its seal, its config, its source and an arena's rules say."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gemq import output
from gemq.errors import GemqError, IntegrityError, UsageError

if TYPE_CHECKING:
    from gemq.quantize.seal import Difference
    from gemq.quantize.verify import Comparison
    from gemq.signing import Signer

_SHOWN = 50
_DOWNLOADED = (".cache", ".gitattributes")


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a sealed checkpoint.")],
    fast: Annotated[bool, typer.Option("--fast", help="Compare sizes and shard headers only; no byte of a weight is read.")] = False,
    source: Annotated[Path | None, typer.Option(help="The unquantized model: compare every tensor with it.")] = None,
    arena: Annotated[str | None, typer.Option(help="Check an arena's rules too (lowbarena, efficient-gemma); needs --source.")] = None,
    signature: Annotated[Path | None, typer.Option(help="A signature of it; CHECKPOINT.sig if not given.")] = None,
    public_key: Annotated[Path | None, typer.Option(help="The signature must be of this key (PEM).")] = None,
    identity: Annotated[str | None, typer.Option(help="The signature must be of this Sigstore identity; needs a network.")] = None,
    identity_provider: Annotated[str | None, typer.Option(help="Who vouches for --identity: the address of an OpenID Connect issuer.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Check a checkpoint against its seal, and with --source tensor by tensor against what it was made from. Exits 4 on any difference."""
    from gemq.quantize import arena_rules, provenance, seal
    from gemq.quantize.audit import Quantization, Structure, audit_structure
    from gemq.quantize.seal import Difference
    from gemq.quantize.verify import verify_against_source

    output.mode.json = output.mode.json or as_json
    if arena is not None:
        arena_rules.arena_rules(arena)
        if source is None:
            raise UsageError(f"--arena {arena} compares with the source, and there is none", "add --source DIR")
    if fast and source is not None:
        raise UsageError("--fast reads no weights, and --source compares them", "give one of the two")
    if source is not None and not source.is_dir():
        raise UsageError(f"the source {source} is no directory", "give the directory of the unquantized model")
    signer = _signer(signature, public_key, identity, identity_provider, fast)
    sealed = seal.read_seal(checkpoint)
    digest, content = seal.seal_digest(checkpoint), seal.content_digest(sealed)
    differences = seal.check_seal(checkpoint, fast=fast)
    differences += provenance.provenance_differences(checkpoint, sealed)
    if signer is not None:
        from gemq import signing

        signature = signature or signing.signature_of(checkpoint)
        if differences:  # among them may be what no reader should open
            output.note("the signature was not looked at: the files are not what the seal says")
        else:
            differences += signing.signature_differences(checkpoint, signature, signer)
    structure, comparison = Structure({}, {}, Quantization(), []), None
    try:
        if not seal.only_regular(checkpoint):  # no reader must wait for a pipe, nor follow a link out of the folder
            raise IntegrityError("not read: the folder holds links, pipes or devices")
        structure = audit_structure(checkpoint)
        differences += structure.differences
    except GemqError as error:  # damage that the seal has found too must not hide the seal's list
        differences.append(Difference("config.json", error.message))
        source = None
    agrees = not differences
    if source is not None:
        comparison = verify_against_source(checkpoint, source, structure)
        differences += comparison.differences
        if arena is not None:
            differences += arena_rules.check_arena(checkpoint, source, arena, structure, comparison)
    differences = list(dict.fromkeys(differences))
    document: dict[str, Any] = {"checkpoint": str(checkpoint), "seal_digest": digest, "content_digest": content,
                                "files": len(sealed), "provenance": any(file.path == provenance.PROVENANCE_FILE for file in sealed),
                                "tensors": len(structure.tensors),
                                "quantized_units": len(structure.units), "checked": "sizes and headers" if fast else "every byte",
                                "arena": arena, "signature": None if signer is None else str(signature), "ok": not differences,
                                "differences": [{"path": difference.path, "what": difference.what} for difference in differences]}
    if comparison is not None:
        document["source"] = _comparison_json(source, comparison)
        _print_table(comparison)
    text = "" if differences else _sentence(checkpoint, digest, content, document, source)
    output.result(document, text)
    if differences:
        _refuse(checkpoint, differences, agrees=agrees)


def _signer(signature: Path | None, public_key: Path | None, identity: str | None, provider: str | None, fast: bool) -> Signer | None:
    """Who must have signed, None where nobody asks."""
    if signature is None and public_key is None and identity is None and provider is None:
        return None
    if (public_key is None) == (identity is None) or (identity is None) != (provider is None):
        raise UsageError("a signature is checked against a key or an identity", "give --public-key, or --identity and --identity-provider")
    if fast:
        raise UsageError("--fast reads no weights, and a signature covers them", "leave --fast out")
    from gemq.signing import Signer

    return Signer(public_key, identity, provider)


def _comparison_json(source: Path | None, comparison: Comparison) -> dict[str, Any]:
    kinds = {kind: {"count": tally.count, "source_bytes": tally.source_bytes, "checkpoint_bytes": tally.checkpoint_bytes}
             for kind, tally in comparison.kinds.items()}
    largest = max((fit.shift_rms for fit in comparison.fits), default=0.0)
    return {"path": str(source), "kinds": kinds, "added": comparison.added, "largest_shift_rms": largest}


def _print_table(comparison: Comparison) -> None:
    rows = [(kind, tally.count, output.human_bytes(tally.source_bytes), output.human_bytes(tally.checkpoint_bytes))
            for kind, tally in comparison.kinds.items()]
    output.table("", ("tensors", "count", "in the source", "in the checkpoint"), rows)


def _sentence(checkpoint: Path, digest: str, content: str, document: dict[str, Any], source: Path | None) -> str:
    fast = document["checked"] != "every byte"
    how = "names, modes, sizes and shard headers agree (--fast: no content was read)" if fast else "every byte agrees"
    told = "; its provenance describes these files" if document["provenance"] else "; it has no provenance"
    against = f"; every tensor accounted for against {source}" if source else ""
    signed = f"; {document['signature']} signs it" if document["signature"] else ""
    rules = f"; keeps to {document['arena']}'s rules" if document["arena"] else ""
    return f"{checkpoint}: {document['files']} files, {how}{told}{signed}{against}{rules}\nseal {digest}\ncontent {content}"


def _refuse(checkpoint: Path, differences: list[Difference], *, agrees: bool) -> None:
    """Raise IntegrityError with the differences; `agrees`: none of them is between the checkpoint and its own seal and structure."""
    for difference in differences[:_SHOWN]:
        output.note(f"  {difference}")
    if len(differences) > _SHOWN:
        output.note(f"  … and {len(differences) - _SHOWN} more; --json lists all")
    count = f"{len(differences)} difference{'s' if len(differences) > 1 else ''}"
    if all(difference.path.split("/")[0] in _DOWNLOADED for difference in differences):
        raise IntegrityError(f"{checkpoint} holds what a download left beside the checkpoint: {count}",
                             f"remove {' and '.join(_DOWNLOADED)} from it, and verify again")
    if agrees:
        raise IntegrityError(f"verification failed: {checkpoint} agrees with its own seal, and not with what it was compared with: {count}",
                             "check that --source is the model that gemq.json names; if it is, don't use the checkpoint")  # fmt: skip
    raise IntegrityError(f"verification failed: {count} in {checkpoint}", "don't use it; fetch or quantize it again")


def register(app: typer.Typer) -> None:
    """Add `verify` to gemq's commands."""
    app.command("verify")(verify)
