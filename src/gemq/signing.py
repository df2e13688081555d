"""Sign a sealed checkpoint with OpenSSF's model-signing, and check such a signature (extra `gemq[sign]`).

The signature lies beside the checkpoint, never in it: the seal's world is closed (docs/decisions/0004-signatures-lie-beside-the-checkpoint.md).
It is a Sigstore bundle that `model_signing verify` reads too. What model-signing lets pass the seal does not, and the other way round:
- model-signing leaves out `.git*` unless told otherwise, and whatever else the signer named. Here nothing is left out, a signature that
  leaves anything out is refused, and the seal refuses hidden files.
- It says nothing of modes. The seal does, and the seal is among the signed files.
- The seal says nothing of who made it. The signature does.
So both are checked, and the signed list must be the seal's list and the seal itself, to the digest.
"""

from __future__ import annotations

import base64
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gemq import atomic
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.output_paths import require_separate
from gemq.quantize.audit import strict_json
from gemq.quantize.seal import SEAL_FILE, Difference, check_seal, read_regular, read_seal, seal_digest

CURVES = ("secp256r1", "secp384r1", "secp521r1")
_MAX_BYTES = 64 << 20
_NO_KEY = "make one: openssl ecparam -name prime256v1 -genkey -noout -out key.pem; openssl ec -in key.pem -pubout -out key.pub"


@dataclass(frozen=True)
class Signer:
    """Who a signature must be of: the owner of a public key (PEM file), or a Sigstore identity and the provider that vouches for it."""

    public_key: Path | None = None
    identity: str | None = None
    provider: str | None = None


def signature_of(checkpoint: Path) -> Path:
    """Where a checkpoint's signature lies unless it is said: beside it."""
    whole = checkpoint.resolve()
    return whole.with_name(whole.name + ".sig")


def sign_with_key(checkpoint: Path, key: Path, to: Path, password: str | None = None) -> str:
    """Sign a checkpoint that agrees with its seal with a private key (PEM, NIST curve); returns the seal's digest. `to` must be new."""
    config = _signing_config(checkpoint, to)
    _private_key(key, password)
    # the library hands the password on to cryptography, which wants bytes
    config.use_elliptic_key_signer(private_key=key, password=None if password is None else password.encode())
    return _write(config, checkpoint, to)


def sign_with_sigstore(checkpoint: Path, to: Path, *, ambient: bool = False) -> str:
    """Sign as a Sigstore identity: that of the CI job (`ambient`) or of who logs in in a browser; returns the seal's digest.

    Raises StoppedSafely where Sigstore can't be reached.
    """
    config = _signing_config(checkpoint, to)
    with _sigstore_errors():
        config.use_sigstore_signer(use_ambient_credentials=ambient)
        return _write(config, checkpoint, to)


def signature_differences(checkpoint: Path, signature: Path, signer: Signer) -> list[Difference]:
    """Where a signature is not `signer`'s, or not over this seal and all that it lists; none when it is.

    Raises UsageError for a key that is none, StoppedSafely where Sigstore is needed and can't be reached.
    """
    _require_library()
    raw = read_regular(signature, _MAX_BYTES)
    if raw is None:
        raise UsageError(f"there is no signature {signature}", "give --signature FILE; `gemq sign` makes one")
    import model_signing.verifying

    config = model_signing.verifying.Config().set_hashing_config(_whole_folder())
    if signer.public_key is not None:
        _public_key(signer.public_key)
        config.use_elliptic_key_verifier(public_key=signer.public_key)
    else:
        assert signer.identity is not None
        assert signer.provider is not None
        with _sigstore_errors():
            config.use_sigstore_verifier(identity=signer.identity, oidc_issuer=signer.provider)
    # one reading of the file: what was verified is what is looked into
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        copy = Path(folder) / "signature"
        copy.write_bytes(raw)
        try:
            config.verify(checkpoint, copy)
        except GemqError:
            raise
        except Exception as error:  # whatever the library and those below it raise on a file that may be a stranger's
            problems = _coverage_problems(raw, checkpoint) if str(error).startswith("Signature mismatch") else []
            if problems:  # it is the signer's, and of something else
                return [Difference(str(signature), problem) for problem in problems]
            why = f"{type(error).__name__}: {error}" if str(error) else f"{type(error).__name__}, so another key signed it or it was changed"
            return [Difference(str(signature), f"is no valid signature of this checkpoint ({' '.join(why.split())[:300]})")]
    return [Difference(str(signature), problem) for problem in _coverage_problems(raw, checkpoint)]


def _coverage_problems(raw: bytes, checkpoint: Path) -> list[str]:
    """What a verified bundle does not cover of the seal's files and the seal itself."""
    try:
        statement = strict_json(base64.b64decode(strict_json(raw, "the signature")["dsseEnvelope"]["payload"], validate=True), "its payload")
        form, resources = statement["predicate"]["serialization"], statement["predicate"]["resources"]
        signed = {entry["name"]: entry["digest"] for entry in resources if entry["algorithm"] == "sha256"}
    except (IntegrityError, ValueError, KeyError, TypeError) as error:
        return [f"has a payload that model-signing 1.x does not write ({type(error).__name__}: {error})"]
    if form.get("method") != "files" or form.get("ignore_paths"):
        return [f"leaves files out or lists them otherwise than whole: {str(form)[:200]}"]
    expected = {file.path: file.sha256 for file in read_seal(checkpoint)} | {SEAL_FILE: seal_digest(checkpoint)}
    absent = sorted(path for path in expected if signed.get(path) != expected[path])
    more = sorted(set(signed) - set(expected))
    return ([f"does not cover {absent[0]} as it is sealed"] if absent else []) + ([f"covers {more[0]}, which is not sealed"] if more else [])


def _require_library() -> None:
    if find_spec("model_signing") is None or find_spec("OpenSSL") is None:
        raise UsageError("signatures need the package model-signing, which is not installed", "pip install 'gemq[sign]'")


def _whole_folder() -> Any:
    import model_signing.hashing

    return model_signing.hashing.Config().use_file_serialization(hashing_algorithm="sha256", allow_symlinks=False).set_ignored_paths(
        paths=[], ignore_git_paths=False)  # fmt: skip


def _signing_config(checkpoint: Path, to: Path) -> Any:
    """model-signing's configuration for a checkpoint that agrees with its seal; nothing else is signed."""
    _require_library()
    require_separate(to, checkpoint)
    if to.exists() or to.is_symlink():
        raise UsageError(f"the signature {to} exists already", "choose another --output, or move that one away")
    if not to.parent.is_dir():
        raise UsageError(f"{to.parent} is no directory to write {to.name} into", "choose another --output, or make that directory")
    differences = check_seal(checkpoint)
    if differences:
        raise IntegrityError(f"{checkpoint} is not what its seal says, and is not signed: {differences[0]}",
                             f"see all of it with `gemq verify {checkpoint}`")
    import model_signing.signing

    return model_signing.signing.Config().set_hashing_config(_whole_folder())


def _write(config: Any, checkpoint: Path, to: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "signature"
        with contextlib.redirect_stdout(sys.stderr):
            config.sign(checkpoint, made)
        raw = made.read_bytes()
    problems = _coverage_problems(raw, checkpoint)
    if problems:
        raise IntegrityError(f"the signature of {checkpoint} {problems[0]}", "see what else writes there, and sign again")
    with atomic.disk_errors(to):
        atomic.write_new_file(to, raw)
    return seal_digest(checkpoint)


def _private_key(path: Path, password: str | None) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    raw = _key_bytes(path)
    try:
        key = load_pem_private_key(raw, None if password is None else password.encode())
    except TypeError:  # how cryptography says that a password is missing, or one too many
        raise UsageError(f"the key {path} {'has no password' if password else 'has a password'}",
                         "unset GEMQ_KEY_PASSWORD" if password else "set GEMQ_KEY_PASSWORD to it") from None
    except Exception as error:  # ValueError, UnsupportedAlgorithm and others of its parser
        wrong = " or its password is another" if password else ""
        raise UsageError(f"{path} is no private key in PEM form{wrong} ({' '.join(str(error).split())[:100]})", _NO_KEY) from None
    _require_curve(path, key)


def _public_key(path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    raw = _key_bytes(path)
    try:
        key = load_pem_public_key(raw)
    except Exception as error:
        raise UsageError(f"{path} is no public key in PEM form ({' '.join(str(error).split())[:100]})", _NO_KEY) from None
    _require_curve(path, key)


def _require_curve(path: Path, key: Any) -> None:
    name = getattr(getattr(key, "curve", None), "name", type(key).__name__.removesuffix("Key"))
    if name not in CURVES:
        raise UsageError(f"the key {path} is of {name}, and model-signing signs with {', '.join(CURVES)}", _NO_KEY)


def _key_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise UsageError(f"there is no key {path}", _NO_KEY)
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the key {path} can't be read: {error.strerror}", "check its permissions") from None


@contextlib.contextmanager
def _sigstore_errors() -> Iterator[None]:
    """Sigstore has no offline mode for signing: what goes wrong on the way there is one sentence."""
    try:
        yield
    except (GemqError, KeyboardInterrupt):
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:150]
        raise StoppedSafely(f"Sigstore can't be used from here ({type(error).__name__}{': ' + said if said else ''})",
                            "it needs a network and an identity: try again with both, or use a key (--key, --public-key)") from None
