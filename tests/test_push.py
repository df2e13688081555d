"""`gemq push`: one verified commit or one clear sentence, over connections that break and with tokens that are refused."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from hub_stand_in import READER, WRITER, Files, HubStandIn
from huggingface_hub import constants
from sealed_checkpoint import copy_of, replace_file, write_checkpoint
from typer.testing import CliRunner

from gemq.commands import push as command
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.hub_push import git_blob_id, push_checkpoint
from gemq.quantize.seal import check_seal, seal_digest, write_seal

REPO = "somebody/small-w4a16"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("push") / "checkpoint")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubStandIn]:
    """A stand-in that speaks LFS; Xet, which huggingface_hub prefers where it is installed, has a binary protocol of its own."""
    stand_in = HubStandIn()
    monkeypatch.setenv("HF_ENDPOINT", stand_in.url)
    monkeypatch.setenv("HF_TOKEN", WRITER)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "ENDPOINT", stand_in.url)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between its attempts
    yield stand_in
    stand_in.close()


def shards(checkpoint: Path) -> list[Path]:
    return sorted(checkpoint.glob("*.safetensors"))


def test_a_push_makes_one_commit_with_exactly_the_checkpoint(hub: HubStandIn, checkpoint: Path, tmp_path: Path) -> None:
    pushed = push_checkpoint(checkpoint, REPO)
    repository = hub.repositories[REPO]
    assert repository.branches["main"] == pushed.commit
    assert len(repository.commits) == 2  # the Hub's own first one, and this
    files = dict(repository.commits[pushed.commit])
    assert files.pop(".gitattributes")
    for path, (_, content) in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(content)
    assert check_seal(tmp_path) == []
    assert pushed.seal_digest == seal_digest(tmp_path)
    assert pushed.files == len(files)
    assert pushed.bytes == sum(len(content) for _, content in files.values())
    assert not repository.private


def test_a_private_repository_is_private_and_a_public_one_is_refused(hub: HubStandIn, checkpoint: Path) -> None:
    push_checkpoint(checkpoint, REPO, private=True)
    assert hub.repositories[REPO].private
    hub.repositories[REPO].private = False
    with pytest.raises(UsageError, match="public"):
        push_checkpoint(checkpoint, REPO, private=True)


def test_a_branch_is_made_and_main_is_left_alone(hub: HubStandIn, checkpoint: Path) -> None:
    pushed = push_checkpoint(checkpoint, REPO, branch="w4a16")
    repository = hub.repositories[REPO]
    assert repository.branches["w4a16"] == pushed.commit != repository.branches["main"]


def test_connections_that_break_half_way_are_tried_again(hub: HubStandIn, checkpoint: Path) -> None:
    hub.cut_uploads = 3
    pushed = push_checkpoint(checkpoint, REPO)
    assert hub.repositories[REPO].branches["main"] == pushed.commit
    assert len([request for request in hub.requests if request.startswith("PUT")]) == len(shards(checkpoint)) + 3


def test_a_push_that_was_given_up_goes_on_where_it_was(hub: HubStandIn, checkpoint: Path) -> None:
    hub.cut_after = 1
    with pytest.raises(StoppedSafely, match="connection") as stopped:
        push_checkpoint(checkpoint, REPO)
    assert stopped.value.exit_code == 75
    assert len(hub.repositories[REPO].commits) == 1  # no half of a checkpoint
    hub.cut_after = None
    push_checkpoint(checkpoint, REPO)
    assert sorted(hub.uploads) == sorted(hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards(checkpoint))


def test_pushing_the_same_again_names_the_same_commit(hub: HubStandIn, checkpoint: Path) -> None:
    first = push_checkpoint(checkpoint, REPO)
    assert push_checkpoint(checkpoint, REPO) == first
    assert len(hub.repositories[REPO].commits) == 2


def test_other_files_are_refused_or_replaced(hub: HubStandIn, checkpoint: Path) -> None:
    push_checkpoint(checkpoint, REPO)
    repository = hub.repositories[REPO]
    repository.commit("main", {**repository.files("main"), "old.safetensors": ("lfs", b"old")})
    with pytest.raises(UsageError, match=r"old\.safetensors"):
        push_checkpoint(checkpoint, REPO)
    pushed = push_checkpoint(checkpoint, REPO, replace=True)
    assert "old.safetensors" not in repository.commits[pushed.commit]


def spoil_shard(files: Files) -> Files:
    name = next(path for path in files if path.endswith(".safetensors"))
    return {**files, name: ("lfs", files[name][1][:-1] + b"x")}


def spoil_config(files: Files) -> Files:
    return {**files, "config.json": ("regular", files["config.json"][1].replace(b"4", b"8", 1))}


def lose_file(files: Files) -> Files:
    return {path: file for path, file in files.items() if path != "tokens/vocabulary.txt"}


def add_file(files: Files) -> Files:
    return {**files, "extra.py": ("regular", b"")}


@pytest.mark.parametrize("spoil", [spoil_shard, spoil_config, lose_file, add_file])
def test_a_repository_that_is_not_the_checkpoint_is_found(hub: HubStandIn, checkpoint: Path, spoil: Callable[[Files], Files]) -> None:
    hub.spoil = spoil
    with pytest.raises(IntegrityError, match="is not the checkpoint that was sent"):
        push_checkpoint(checkpoint, REPO)


def test_a_checkpoint_that_does_not_verify_is_not_sent(hub: HubStandIn, checkpoint: Path, tmp_path: Path) -> None:
    edited = copy_of(checkpoint, tmp_path / "edited")
    (edited / "notes.txt").write_text("")
    with pytest.raises(IntegrityError, match=r"notes\.txt"):
        push_checkpoint(edited, REPO)
    assert hub.requests == []


def test_a_checkpoint_whose_provenance_is_not_true_is_not_sent(hub: HubStandIn, tmp_path: Path) -> None:
    golden = next(path for path in (Path(__file__).parent / "golden").glob("gemq-*") if path.is_dir())
    edited = copy_of(golden, tmp_path / "edited")
    assert push_checkpoint(edited, REPO).files == len(list(edited.iterdir()))
    replace_file(edited / "generation_config.json", b"{}")
    write_seal(edited)
    hub.requests.clear()
    with pytest.raises(IntegrityError, match=r"generation_config\.json: is not what provenance\.intoto\.json tells of"):
        push_checkpoint(edited, REPO)
    assert hub.requests == []


def test_an_executable_is_not_sent(hub: HubStandIn, checkpoint: Path, tmp_path: Path) -> None:
    edited = copy_of(checkpoint, tmp_path / "edited")
    (edited / "modeling_small.py").chmod(0o755)
    write_seal(edited)
    with pytest.raises(UsageError, match=r"modeling_small\.py is executable"):
        push_checkpoint(edited, REPO)
    assert hub.requests == []


@pytest.mark.parametrize(("token", "said"), [("hf_unknownUNKNOWN", "does not accept"), (READER, "may not write")])
def test_a_refused_token_is_one_sentence_without_the_token(hub: HubStandIn, checkpoint: Path, monkeypatch: pytest.MonkeyPatch,
                                                           token: str, said: str) -> None:  # fmt: skip
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError, match=said) as refused:
        push_checkpoint(checkpoint, REPO)
    assert token not in refused.value.message + refused.value.next_step
    assert "\n" not in refused.value.message


def test_no_token_is_one_sentence(hub: HubStandIn, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(UsageError, match="no Hugging Face token"):
        push_checkpoint(checkpoint, REPO)
    assert hub.requests == []


def test_no_network_is_one_sentence(hub: HubStandIn, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(StoppedSafely, match="connection to the Hub failed") as stopped:
        push_checkpoint(checkpoint, REPO)
    assert "\n" not in stopped.value.message


def test_a_name_that_is_none_is_one_sentence(hub: HubStandIn, checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="no name of a repository"):
        push_checkpoint(checkpoint, "a/b/c")


@pytest.mark.parametrize(("status", "kind"), [(503, StoppedSafely), (429, StoppedSafely), (412, StoppedSafely), (400, UsageError),
                                             (404, UsageError)])  # fmt: skip
def test_what_the_hub_answers_becomes_a_sentence(hub: HubStandIn, checkpoint: Path, status: int, kind: type[GemqError]) -> None:
    hub.fail_with = ("/commit/", status, f"no, {WRITER}")
    with pytest.raises(kind) as failed:
        push_checkpoint(checkpoint, REPO)
    assert WRITER not in failed.value.message
    assert "\n" not in failed.value.message


def run(*arguments: object) -> tuple[Any, str]:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["push", *map(str, arguments)])
    command.output.mode.json = False
    return result.exception, result.output


def test_the_command_prints_the_exact_commit_and_no_token(hub: HubStandIn, checkpoint: Path) -> None:
    error, out = run(checkpoint, REPO)
    assert error is None
    assert f"revision {hub.repositories[REPO].branches['main']}" in out
    assert WRITER not in out


def test_a_dry_run_lists_what_would_go_and_sends_nothing(hub: HubStandIn, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    error, out = run(checkpoint, REPO, "--dry-run", "--json")
    assert error is None
    listed = json.loads(out)["files"]
    there = sorted(str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file())
    assert [file["path"] for file in listed] == there
    assert all(file["sha256"] == hashlib.sha256((checkpoint / file["path"]).read_bytes()).hexdigest() for file in listed)
    assert hub.requests == []


def test_git_blob_ids_are_gits() -> None:
    assert git_blob_id(b"") == "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
    assert git_blob_id(b"hello\n") == "ce013625030ba8dba906f756967f9e9ca394464a"


def test_nothing_is_written_into_the_sealed_folder(hub: HubStandIn, checkpoint: Path) -> None:
    before = sorted(os.listdir(checkpoint))
    push_checkpoint(checkpoint, REPO)
    assert sorted(os.listdir(checkpoint)) == before
    assert check_seal(checkpoint) == []
