"""Signatures: made with a real key by the published tool, beside the seal, and neither lets pass what the other misses."""

from __future__ import annotations

import base64
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import model_signing.hashing
import model_signing.signing
import model_signing.verifying
import pytest
import typer
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from sealed_checkpoint import copy_of, replace_file, write_checkpoint
from typer.testing import CliRunner

from gemq import signing
from gemq.commands import sign as sign_command
from gemq.commands import verify as verify_command
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.quantize.seal import SEAL_FILE, check_seal, seal_digest, write_seal
from gemq.signing import Signer, sign_with_key, sign_with_sigstore, signature_differences, signature_of

PEM, OPENSSL = serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL


def write_keys(folder: Path, key: Any, name: str = "key", password: bytes | None = None, form: Any = OPENSSL) -> Path:
    """A key pair as `openssl` would write it; returns the private key's file, the public one is beside it as .pub."""
    cipher = serialization.NoEncryption() if password is None else serialization.BestAvailableEncryption(password)
    (folder / f"{name}.pem").write_bytes(key.private_bytes(PEM, form, cipher))
    (folder / f"{name}.pub").write_bytes(key.public_key().public_bytes(PEM, serialization.PublicFormat.SubjectPublicKeyInfo))
    return folder / f"{name}.pem"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("signing") / "checkpoint")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_keys(tmp_path_factory.mktemp("keys"), ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture(scope="module")
def signature(checkpoint: Path, key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("signature") / "checkpoint.sig"
    assert sign_with_key(checkpoint, key, to) == seal_digest(checkpoint)
    return to


def problems(checkpoint: Path, signature: Path, key: Path) -> list[str]:
    return [str(difference) for difference in signature_differences(checkpoint, signature, Signer(key.with_suffix(".pub")))]


# --- an honest one


def test_a_signed_checkpoint_is_still_sealed_and_its_signature_holds(checkpoint: Path, signature: Path, key: Path) -> None:
    assert problems(checkpoint, signature, key) == []
    assert check_seal(checkpoint) == []
    assert not any(path.suffix == ".sig" for path in checkpoint.rglob("*"))


def test_the_published_tool_accepts_it(checkpoint: Path, signature: Path, key: Path) -> None:
    model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub")).verify(checkpoint, signature)


def test_it_covers_every_file_and_the_seal(checkpoint: Path, signature: Path) -> None:
    payload = json.loads(base64.b64decode(json.loads(signature.read_text())["dsseEnvelope"]["payload"]))
    signed = {entry["name"] for entry in payload["predicate"]["resources"]}
    assert signed == {str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()}
    assert SEAL_FILE in signed


def test_it_holds_for_a_copy_under_another_name(checkpoint: Path, signature: Path, key: Path, tmp_path: Path) -> None:
    assert problems(copy_of(checkpoint, tmp_path / "renamed"), signature, key) == []


@pytest.mark.parametrize("curve", [ec.SECP384R1(), ec.SECP521R1()])
def test_other_curves_and_passwords_sign_too(checkpoint: Path, tmp_path: Path, curve: ec.EllipticCurve) -> None:
    made = write_keys(tmp_path, ec.generate_private_key(curve), password=b"secret", form=serialization.PrivateFormat.PKCS8)
    sign_with_key(checkpoint, made, tmp_path / "s.sig", "secret")
    assert problems(checkpoint, tmp_path / "s.sig", made) == []


# --- what the signature finds


def resealed(checkpoint: Path, to: Path) -> Path:
    """What a forger makes: other content under a sound seal."""
    copy = copy_of(checkpoint, to)
    replace_file(copy / "config.json", (copy / "config.json").read_bytes() + b" ")
    write_seal(copy)
    assert check_seal(copy) == []
    return copy


def test_other_content_under_a_seal_of_its_own_is_found(checkpoint: Path, signature: Path, key: Path, tmp_path: Path) -> None:
    assert "does not cover config.json as it is sealed" in problems(resealed(checkpoint, tmp_path / "forged"), signature, key)[0]


def test_another_key_is_found(checkpoint: Path, signature: Path, tmp_path: Path) -> None:
    other = write_keys(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    assert "is no valid signature" in problems(checkpoint, signature, other)[0]


def test_two_hundred_changed_bytes_of_a_signature_are_all_found(checkpoint: Path, signature: Path, key: Path, tmp_path: Path) -> None:
    """Of its payload, its signature and its key's name; what else the bundle says (media type, an empty key id) is not signed and decides nothing."""
    chance, raw = random.Random(7), signature.read_bytes()
    document = json.loads(raw)
    texts = [document["dsseEnvelope"]["payload"], document["dsseEnvelope"]["signatures"][0]["sig"],
             document["verificationMaterial"]["publicKey"]["hint"]]  # fmt: skip
    for number in range(200):
        text = texts[number % 3].encode()
        at = raw.index(text) + chance.randrange(len(text.rstrip(b"=")) - 2)
        changed = bytearray(raw)
        changed[at] = ord("A") if changed[at] != ord("A") else ord("B")
        (tmp_path / "s.sig").write_bytes(bytes(changed))
        assert problems(checkpoint, tmp_path / "s.sig", key), at


@pytest.mark.parametrize("raw", [b"", b"{}", b"null", b"[1]", b"\xff", b"[" * 100_000, b'{"dsseEnvelope": {}}',
                                 b'{"mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json"}'])  # fmt: skip
def test_what_is_no_signature_is_found(checkpoint: Path, key: Path, tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "s.sig").write_bytes(raw)
    assert "is no valid signature" in problems(checkpoint, tmp_path / "s.sig", key)[0]


# --- what model-signing alone would let pass


def by_the_tool_alone(checkpoint: Path, to: Path, key: Path, ignored: list[str]) -> Path:
    hashing = model_signing.hashing.Config().set_ignored_paths(paths=[checkpoint / path for path in ignored])
    model_signing.signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(hashing).sign(checkpoint, to)
    return to


@pytest.mark.parametrize("ignored", [[SEAL_FILE], ["config.json"]])
def test_a_signature_that_leaves_a_file_out_is_refused(checkpoint: Path, key: Path, tmp_path: Path, ignored: list[str]) -> None:
    made = by_the_tool_alone(checkpoint, tmp_path / "s.sig", key, ignored)
    model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub")).verify(checkpoint, made)
    assert problems(checkpoint, made, key) != []


def test_a_signature_in_shards_is_refused_since_it_names_no_files_digest(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    hashing = model_signing.hashing.Config().use_shard_serialization()
    model_signing.signing.Config().use_elliptic_key_signer(private_key=key).set_hashing_config(hashing).sign(checkpoint, tmp_path / "s.sig")
    assert problems(checkpoint, tmp_path / "s.sig", key) != []


def hide_a_file(copy: Path) -> None:
    (copy / ".gitattributes").write_text("*.safetensors filter=lfs")


def change_a_mode(copy: Path) -> None:
    (copy / "modeling_small.py").chmod(0o755)


@pytest.mark.parametrize("edit", [hide_a_file, change_a_mode])
def test_what_the_tool_lets_pass_the_seal_does_not(checkpoint: Path, signature: Path, key: Path, tmp_path: Path,
                                                   edit: Callable[[Path], None]) -> None:  # fmt: skip
    copy = copy_of(checkpoint, tmp_path / "copy")
    edit(copy)
    model_signing.verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub")).verify(copy, signature)
    error, _ = run("verify", copy, "--signature", signature, "--public-key", key.with_suffix(".pub"))
    assert isinstance(error, IntegrityError)


# --- what is not signed


def test_a_checkpoint_that_does_not_verify_is_not_signed(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    copy = copy_of(checkpoint, tmp_path / "copy")
    hide_a_file(copy)
    with pytest.raises(IntegrityError, match="is not signed"):
        sign_with_key(copy, key, tmp_path / "s.sig")
    assert not (tmp_path / "s.sig").exists()


def test_a_signature_never_lies_in_the_checkpoint_nor_over_another_file(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    for inside in (checkpoint / "model.sig", checkpoint / "tokens" / "x", checkpoint / ".." / checkpoint.name / "x"):
        with pytest.raises(UsageError, match="inside"):
            sign_with_key(checkpoint, key, inside)
    (tmp_path / "s.sig").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        sign_with_key(checkpoint, key, tmp_path / "s.sig")
    with pytest.raises(UsageError, match="no directory"):
        sign_with_key(checkpoint, key, tmp_path / "no" / "s.sig")
    assert check_seal(checkpoint) == []


def bad_key(folder: Path, kind: str) -> Path:
    if kind == "none":
        return folder / "none.pem"
    if kind == "text":
        (folder / "key.pem").write_text("hello")
        return folder / "key.pem"
    made: dict[str, Any] = {"rsa": lambda: rsa.generate_private_key(65537, 2048), "ed25519": ed25519.Ed25519PrivateKey.generate,
                            "secp256k1": lambda: ec.generate_private_key(ec.SECP256K1()),
                            "locked": lambda: ec.generate_private_key(ec.SECP256R1())}  # fmt: skip
    locked = b"secret" if kind == "locked" else None
    return write_keys(folder, made[kind](), password=locked, form=serialization.PrivateFormat.PKCS8)


@pytest.mark.parametrize("kind", ["none", "text", "rsa", "ed25519", "secp256k1", "locked"])
def test_a_key_that_can_not_sign_is_one_sentence(checkpoint: Path, tmp_path: Path, kind: str) -> None:
    with pytest.raises(UsageError) as refused:
        sign_with_key(checkpoint, bad_key(tmp_path, kind), tmp_path / "s.sig")
    assert "\n" not in refused.value.message
    assert not (tmp_path / "s.sig").exists()


def test_a_wrong_or_needless_password_is_one_sentence(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    for path, password in ((bad_key(tmp_path, "locked"), "hunter2"), (key, "hunter2")):
        with pytest.raises(UsageError) as refused:
            sign_with_key(checkpoint, path, tmp_path / "s.sig", password)
        assert password not in refused.value.message


@pytest.mark.parametrize("kind", ["none", "text", "rsa", "private"])
def test_a_public_key_that_is_none_is_a_usage_error(checkpoint: Path, signature: Path, key: Path, tmp_path: Path, kind: str) -> None:
    public = key if kind == "private" else bad_key(tmp_path, kind)
    public = public.with_suffix(".pub") if kind == "rsa" else public
    with pytest.raises(UsageError):
        signature_differences(checkpoint, signature, Signer(public))


# --- without the package, without a network


def test_without_the_package_it_is_one_sentence_with_the_command(checkpoint: Path, key: Path, signature: Path, tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setattr(signing, "find_spec", lambda name: None)
    with pytest.raises(UsageError) as refused:
        sign_with_key(checkpoint, key, tmp_path / "s.sig")
    assert "gemq[sign]" in refused.value.next_step
    with pytest.raises(UsageError):
        problems(checkpoint, signature, key)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("XDG_DATA_HOME", "XDG_CACHE_HOME", "HOME"):  # and nothing that an earlier time left
        monkeypatch.setenv(name, str(tmp_path / "home"))
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_network")
def test_without_a_network_sigstore_is_one_sentence(checkpoint: Path, signature: Path, tmp_path: Path) -> None:
    with pytest.raises(StoppedSafely, match="Sigstore can't be used from here") as stopped:
        sign_with_sigstore(checkpoint, tmp_path / "s.sig")
    assert "\n" not in stopped.value.message
    assert "--key" in stopped.value.next_step
    with pytest.raises(StoppedSafely):
        signature_differences(checkpoint, signature, Signer(identity="me@example.org", provider="https://example.org"))
    assert not (tmp_path / "s.sig").exists()


# --- the commands


def run(*arguments: object) -> tuple[Any, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    for command in (sign_command, verify_command):
        command.register(app)
    result = CliRunner().invoke(app, list(map(str, arguments)))
    sign_command.output.mode.json = False
    return result.exception, result.stdout


def test_sign_and_verify_find_the_signature_beside_the_checkpoint(checkpoint: Path, key: Path, tmp_path: Path) -> None:
    copy = copy_of(checkpoint, tmp_path / "copy")
    error, out = run("sign", copy, "--key", key)
    assert error is None
    assert signature_of(copy) == tmp_path / "copy.sig"
    assert f"seal {seal_digest(copy)}" in out
    error, out = run("verify", copy, "--public-key", key.with_suffix(".pub"), "--json")
    assert error is None
    assert json.loads(out)["signature"] == str(tmp_path / "copy.sig")
    shutil.move(tmp_path / "copy.sig", tmp_path / "elsewhere")
    error, _ = run("verify", copy, "--public-key", key.with_suffix(".pub"))
    assert isinstance(error, UsageError)


def test_the_password_comes_from_the_environment(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = bad_key(tmp_path, "locked")
    monkeypatch.setenv("GEMQ_KEY_PASSWORD", "secret")
    error, _ = run("sign", checkpoint, "--key", locked, "--output", tmp_path / "s.sig")
    assert error is None


@pytest.mark.parametrize("arguments", [["sign"], ["sign", "--key", "k", "--sigstore"], ["sign", "--key", "k", "--ambient"],
                                       ["verify", "--signature", "s"], ["verify", "--identity", "me"],
                                       ["verify", "--identity-provider", "it"], ["verify", "--public-key", "k", "--identity", "me"],
                                       ["verify", "--public-key", "k", "--fast"]])  # fmt: skip
def test_options_that_make_no_sense_are_refused(checkpoint: Path, arguments: list[str]) -> None:
    error, _ = run(arguments[0], checkpoint, *arguments[1:])
    assert isinstance(error, GemqError)
    assert error.exit_code == 2
