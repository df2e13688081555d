"""Sources: what MODEL may be, a commit on the Hub through the real client against a strict stand-in, and the SHA-256 of files."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass
from pathlib import Path

import pytest
from hub_reads_stand_in import Repository, StandInHub, serving

from gemq import source
from gemq.errors import IntegrityError, UsageError

OLD, NEW = "0123456789abcdef0123456789abcdef01234567", "fedcba9876543210fedcba9876543210fedcba98"
TOKEN, STRANGER = "hf_TrustedTokenNeverToBePrinted", "hf_StrangersTokenNeverToBePrinted"
FILES = {
    "config.json": b'{"architectures": ["Gemma3ForCausalLM"]}',
    "model.safetensors": bytes(range(256)) * 40,
    "tokenizer.json": b"{}",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# small",
    "pytorch_model.bin": b"a pickle",
    "training_args.pkl": b"a pickle",
    "onnx/config.json": b"{}",
    "original/consolidated.safetensors": b"copy",
    "consolidated.00.safetensors": b"copy",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja", "README.md"}

# resolves in a process of its own, since huggingface_hub reads its environment on import; prints the source or the error
PROGRAM = """
import json, sys
from gemq import output
from gemq.errors import GemqError
from gemq.source import resolve
try:
    found = resolve(*json.loads(sys.argv[1]))
    print(json.dumps([found.kind, str(found.directory), found.revision]))
except GemqError as error:
    output.error(error.message, error.next_step)
    sys.exit(error.exit_code)
"""


@dataclass
class Outcome:
    code: int
    out: str
    err: str

    @property
    def revision(self) -> str:
        assert self.code == 0, self.err
        return str(json.loads(self.out)[2])

    @property
    def directory(self) -> Path:
        assert self.code == 0, self.err
        return Path(json.loads(self.out)[1])

    def error(self) -> str:
        """What was printed on a foreseen failure: exit code 2, no traceback, a next step."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err
        assert "next:" in self.err
        return self.err


@pytest.fixture
def hub() -> Iterator[StandInHub]:
    repositories = {
        "org/small": Repository({OLD: {**FILES, "README.md": b"# old"}, NEW: FILES}, {"main": NEW, "wip": OLD}, {"v1.0": OLD}),
        "org/gated": Repository({NEW: FILES}, {"main": NEW}, access="gated"),
        "org/private": Repository({NEW: FILES}, {"main": NEW}, access="private"),
        "org/pickles": Repository({NEW: {"config.json": b"{}", "pytorch_model.bin": b"x"}}, {"main": NEW}),
        "org/no-config": Repository({NEW: {"model.safetensors": b"x"}}, {"main": NEW}),
    }
    with serving(StandInHub(repositories, valid_tokens={TOKEN, STRANGER}, trusted_tokens={TOKEN})) as served:
        yield served
        assert served.unexpected == []


@pytest.fixture
def resolve_with(hub: StandInHub, tmp_path: Path):  # type: ignore[no-untyped-def]
    def run(*arguments: str, **environment: str) -> Outcome:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
        done = subprocess.run([sys.executable, "-c", PROGRAM, json.dumps(arguments)], env={**clean, **ours, **environment}, text=True,
                              capture_output=True, timeout=120, check=False)
        printed = done.stdout + done.stderr
        assert TOKEN not in printed
        assert STRANGER not in printed
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


def test_the_main_branch_becomes_its_commit_and_only_wanted_files_are_fetched(hub, resolve_with, tmp_path):
    found = resolve_with("org/small")
    assert found.revision == NEW
    assert found.directory.is_relative_to(tmp_path / "hf")
    assert {path.name for path in found.directory.iterdir()} == WANTED == hub.fetched()
    assert all((found.directory / name).read_bytes() == FILES[name] for name in WANTED)


@pytest.mark.parametrize("revision", ["wip", "v1.0", OLD, OLD[:10]])
def test_a_branch_a_tag_and_a_commit_become_the_commit(resolve_with, revision):
    found = resolve_with("org/small", revision)
    assert found.revision == OLD
    assert (found.directory / "README.md").read_bytes() == b"# old"


def test_a_commit_in_the_cache_needs_no_network(hub, resolve_with):
    assert resolve_with("org/small", OLD).revision == OLD
    hub.requests.clear()
    assert resolve_with("org/small", OLD).revision == OLD
    assert hub.requests == []


def test_a_branch_that_moved_is_fetched_anew(hub, resolve_with):
    assert resolve_with("org/small").revision == NEW
    hub.repositories["org/small"].branches["main"] = OLD
    assert resolve_with("org/small").revision == OLD


def test_offline_takes_a_branch_or_a_tag_from_the_cache(hub, resolve_with):
    assert resolve_with("org/small").revision == NEW
    assert resolve_with("org/small", "v1.0").revision == OLD
    hub.requests.clear()
    assert resolve_with("org/small", HF_HUB_OFFLINE="1").revision == NEW
    assert resolve_with("org/small", "v1.0", HF_HUB_OFFLINE="1").revision == OLD
    assert hub.requests == []


def test_offline_without_a_copy_says_so(resolve_with):
    error = resolve_with("org/small", HF_HUB_OFFLINE="1").error()
    assert "org/small" in error
    assert "HF_HUB_OFFLINE" in error


def test_offline_with_half_a_copy_says_so(resolve_with):
    found = resolve_with("org/small")
    (found.directory / "model.safetensors").unlink()
    assert "not wholly" in resolve_with("org/small", HF_HUB_OFFLINE="1").error()


SHARDED = {
    **{name: data for name, data in FILES.items() if name != "model.safetensors"},
    "model.safetensors.index.json": json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode(),
    "model-1.safetensors": b"one", "model-2.safetensors": b"two",
}  # fmt: skip


@pytest.mark.parametrize(("lost", "named"), [
    (["config.json"], "config.json"), (["model-2.safetensors"], "model-2.safetensors"), (["model.safetensors.index.json"], "model.safetensors"),
    (["tokenizer.json", "tokenizer.model"], "tokenizer"), (["model-1.safetensors", "model-2.safetensors"], "model-1.safetensors, model-2"),
])  # fmt: skip
def test_a_snapshot_without_a_listing_is_complete_only_if_its_files_prove_it(hub, resolve_with, tmp_path, lost, named):
    hub.repositories["org/sharded"] = Repository({NEW: SHARDED}, {"main": NEW})
    directory = resolve_with("org/sharded").directory
    for listing in [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.suffix == ".json" and "snapshots" not in path.parts
                    and "blobs" not in path.parts]:  # fmt: skip
        listing.unlink()
    assert resolve_with("org/sharded", NEW, HF_HUB_OFFLINE="1").directory == directory
    for name in lost:
        (directory / name).unlink()
    for revision in ([], [NEW]):
        assert named in resolve_with("org/sharded", *revision, HF_HUB_OFFLINE="1").error()
    assert resolve_with("org/sharded", NEW).directory == directory
    assert all((directory / name).is_file() for name in lost)


def test_a_damaged_index_in_the_cache_is_refused_offline(hub, resolve_with, tmp_path):
    hub.repositories["org/sharded"] = Repository({NEW: SHARDED}, {"main": NEW})
    index = resolve_with("org/sharded").directory / "model.safetensors.index.json"
    index.unlink()
    index.write_text("{")
    assert index.name in resolve_with("org/sharded", HF_HUB_OFFLINE="1").error()


@pytest.mark.parametrize("kind", ["a dangling link", "a file"])
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE"])
@pytest.mark.parametrize("offline", ["0", "1"])
def test_a_hub_cache_that_can_not_be_used_is_a_usage_error(resolve_with, tmp_path, variable, kind, offline):
    place = tmp_path / "place"
    place.symlink_to("nowhere") if kind == "a dangling link" else place.write_text("")
    error = resolve_with("org/small", **{variable: str(place), "HF_HUB_OFFLINE": offline}).error()
    assert "HF_HOME" in error


def test_an_unreachable_hub_is_named_without_its_password(resolve_with):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = resolve_with("org/small", HF_ENDPOINT=f"http://user:secret@{address}").error()
    assert address in error
    assert "refused" in error
    assert "HF_HUB_OFFLINE=1" in error
    assert "secret" not in error


def test_an_unreachable_hub_is_no_reason_to_take_an_old_copy_in_silence(resolve_with):
    assert resolve_with("org/small").revision == NEW
    assert "can't be fetched" in resolve_with("org/small", HF_ENDPOINT="http://127.0.0.1:9").error()


def test_an_unknown_name_is_named(resolve_with):
    error = resolve_with("org/smal").error()
    assert "no model org/smal" in error
    assert "without a token" in error
    assert "account of your token" in resolve_with("org/smal", HF_TOKEN=STRANGER).error()


def test_an_unknown_revision_lists_the_known_ones(resolve_with):
    error = resolve_with("org/small", "v2.0").error()
    assert "'v2.0'" in error
    assert "main, wip, v1.0" in error
    assert "'" + "a" * 40 in resolve_with("org/small", "a" * 40).error()


@pytest.mark.parametrize("revision", ["", "../../etc", "two words", "-x"])
def test_a_revision_that_none_can_be_is_refused_before_any_request(hub, resolve_with, revision):
    assert "--revision" in resolve_with("org/small", revision).error()
    assert hub.requests == []


@pytest.mark.parametrize(("token", "who"), [(None, "without a token"), (STRANGER, "account of your token")])
def test_a_gated_model_says_whose_terms_to_accept(hub, resolve_with, token, who):
    error = resolve_with("org/gated", **({"HF_TOKEN": token} if token else {})).error()
    assert "gated" in error
    assert who in error
    assert f"{hub.url}/org/gated" in error


@pytest.mark.parametrize("name", ["org/gated", "org/private"])
def test_a_token_that_may_read_opens_gated_and_private_models(resolve_with, name):
    assert resolve_with(name, HF_TOKEN=TOKEN).revision == NEW


def test_a_private_model_is_as_unknown_to_a_stranger(resolve_with):
    assert "private" in resolve_with("org/private", HF_TOKEN=STRANGER).error()


@pytest.mark.parametrize("token", ["hf_expired", "hf_\x01control", "hf_é"])
def test_a_bad_token_is_refused_and_not_printed(resolve_with, token):
    assert token not in resolve_with("org/small", HF_TOKEN=token).error()


def test_weights_as_pickles_are_refused_before_anything_is_fetched(hub, resolve_with):
    assert "no safetensors" in resolve_with("org/pickles").error()
    assert hub.fetched() == set()


def test_a_repository_without_config_is_refused(resolve_with):
    assert "no config.json" in resolve_with("org/no-config").error()


@pytest.mark.parametrize("status", [403, 429, 500, 503])
def test_a_hub_that_fails_is_quoted_with_its_status(hub, resolve_with, status):
    hub.failing_with = status
    assert f"HTTP {status}" in resolve_with("org/small").error()


def test_a_network_that_wants_a_log_in_is_no_hub(hub, resolve_with):
    hub.portal = True
    assert "doesn't answer as a Hugging Face Hub" in resolve_with("org/small").error()


def test_a_download_that_is_cut_leaves_no_source(hub, resolve_with):
    hub.cut_file = "model.safetensors"
    assert "can't be fetched" in resolve_with("org/small", HF_HUB_DOWNLOAD_TIMEOUT="2").error()
    resolve_with("org/small", HF_HUB_OFFLINE="1").error()
    hub.cut_file = None
    assert (resolve_with("org/small").directory / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_a_local_directory_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert source.resolve(str(tmp_path)) == source.Source(str(tmp_path), "local", tmp_path.resolve(), None)


def test_a_local_directory_wins_over_a_name_on_the_hub(tmp_path, monkeypatch):
    (tmp_path / "org" / "small").mkdir(parents=True)
    (tmp_path / "org" / "small" / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert source.resolve("org/small").kind == "local"


def test_a_directory_without_config_and_a_file_are_refused(tmp_path):
    with pytest.raises(UsageError, match=r"no config\.json"):
        source.resolve(str(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match="is a file"):
        source.resolve(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("model", ["", "gemma", "./nowhere", "/no/where", "~/nowhere/x", "a/b/c", "org/na me", "org/", "../x"])
def test_what_is_neither_here_nor_a_name_lists_what_is_valid(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as caught:
        source.resolve(model)
    assert repr(model) in caught.value.message
    assert all(valid in caught.value.next_step for valid in ("directory with config.json", "org/name", "gemma-3-270m"))


@pytest.mark.parametrize("model", ["org/a--b", "org/x.git", "org/" + "x" * 100, "org/x-"])
def test_a_name_that_the_hub_forbids_is_refused_offline_and_online(resolve_with, model):
    assert model in resolve_with(model).error()
    assert model in resolve_with(model, HF_HUB_OFFLINE="1").error()


def test_a_revision_of_what_has_no_commits_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for model in (str(tmp_path), source.DEMO_MODEL):
        with pytest.raises(UsageError, match="--revision main"):
            source.resolve(model, "main")


def test_hashes_are_sha256_by_relative_name(tmp_path):
    content = {"b.bin": b"x" * 9_000_001, "a/c.json": b"{}", "empty": b""}
    for name, data in {**content, ".hidden": b"1", ".cache/x": b"2"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    expected = {name: hashlib.sha256(content[name]).hexdigest() for name in sorted(content)}
    assert source.file_hashes(tmp_path) == expected
    assert list(source.file_hashes(tmp_path)) == sorted(content)
    assert source.file_hashes(tmp_path, ["empty", "b.bin"]) == {name: expected[name] for name in ("b.bin", "empty")}
    stop = threading.Event()
    assert source.file_hashes(tmp_path, beside=stop) == expected
    stop.set()
    with pytest.raises(CancelledError):
        source.file_hashes(tmp_path, beside=stop)


def test_a_file_that_is_missing_can_not_be_hashed(tmp_path):
    with pytest.raises(IntegrityError, match="gone"):
        source.file_hashes(tmp_path, ["gone"])


def test_files_as_they_lie_are_others_where_one_was_made_anew(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    file = tmp_path / "inner" / "model.safetensors"
    file.write_bytes(b"1234")
    first, made = source.files_as_they_lie(tmp_path), file.stat()
    (tmp_path / ".lock").write_bytes(b"")
    assert source.files_as_they_lie(tmp_path) == first
    os.utime(file, ns=(made.st_atime_ns, made.st_mtime_ns + 1))
    later = source.files_as_they_lie(tmp_path)
    file.write_bytes(b"12345")
    os.utime(file, ns=(made.st_atime_ns, made.st_mtime_ns))
    longer = source.files_as_they_lie(tmp_path)
    file.rename(tmp_path / "inner" / "other.safetensors")
    assert len({first, later, longer, source.files_as_they_lie(tmp_path)}) == 4
