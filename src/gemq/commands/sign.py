"""`gemq sign`: who made a checkpoint, in a signature beside it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gemq import output
from gemq.errors import UsageError


def sign(
    checkpoint: Annotated[Path, typer.Argument(help="The directory of a sealed checkpoint.")],
    key: Annotated[Path | None, typer.Option(help="A private key, PEM, on a NIST curve; $GEMQ_KEY_PASSWORD if it has a password.")] = None,
    sigstore: Annotated[bool, typer.Option("--sigstore", help="Sign as who logs in in a browser; needs a network.")] = False,
    ambient: Annotated[bool, typer.Option("--ambient", help="With --sigstore: sign as the CI job that this runs in.")] = False,
    output_file: Annotated[Path | None, typer.Option("--output", "-o", help="The signature; CHECKPOINT.sig beside it if not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")] = False,
) -> None:
    """Sign a checkpoint that agrees with its seal. `gemq verify CHECKPOINT --public-key KEY` and `model_signing verify` check it."""
    from gemq import signing

    output.mode.json = output.mode.json or as_json
    if (key is not None) == sigstore:
        raise UsageError("a signature is made with --key or with --sigstore", "give one of the two")
    if ambient and not sigstore:
        raise UsageError("--ambient says which Sigstore identity signs, and there is no --sigstore", "give both, or neither")
    to = output_file or signing.signature_of(checkpoint)
    if key is not None:
        digest = signing.sign_with_key(checkpoint, key, to, os.environ.get("GEMQ_KEY_PASSWORD"))
    else:
        digest = signing.sign_with_sigstore(checkpoint, to, ambient=ambient)
    output.result({"checkpoint": str(checkpoint), "signature": str(to), "seal_digest": digest}, f"{to} signs {checkpoint}\nseal {digest}")


def register(app: typer.Typer) -> None:
    """Add `sign` to gemq's commands."""
    app.command("sign")(sign)
