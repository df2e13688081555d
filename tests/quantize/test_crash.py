"""Killed anywhere, on a full disk, with damaged state: no checkpoint or a whole one, and a resumed run gives the same bytes."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.crash_child import Ended, limit_file_size, obey_modes, run_child, wait_in_the_middle
from tests.quantize.small_jobs import make_job, run_job

from gemq import atomic
from gemq.errors import StoppedSafely, UsageError
from gemq.quantize import run as quantize_run
from gemq.quantize.journal import canonical
from gemq.quantize.seal import check_seal

RECIPE = "w4a16-g32"
# (write point, its occurrence): every kind of instant between two changes on disk
POINTS = [
    ("file-staged:gemq-partial.json", 1), ("file-written:gemq-partial.json", 1), ("file-staged:journal.json", 1),
    ("file-written:journal.json", 1), ("sized:model.safetensors", 1), ("allocated", 1), ("copied", 1), ("file-staged:journal.json", 2),
    ("file-written:journal.json", 2), ("written:layers.0.self_attn.qkv_proj", 1), ("written:layers.0.mlp.down_proj", 1), ("solved:layer 0", 1),
    ("file-written:journal.json", 3), ("written:layers.1.self_attn.o_proj", 1), ("solved:layer 1", 1), ("file-written:journal.json", 4),
    ("companions-copied", 1), ("file-staged:config.json", 1), ("file-written:recipe.yaml", 1), ("file-written:gemq.json", 1), ("modes-set", 1),
    ("file-staged:provenance.intoto.json", 1), ("file-written:README.md", 1), ("sealed", 1), ("before-publish", 1), ("published", 1),
]  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_text(
        tmp_path_factory.mktemp("crash") / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )


@pytest.fixture(scope="module")
def undisturbed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return child(source, tmp_path_factory.mktemp("whole") / "out").seal


def child(source: Path, out: Path, die_at: str = "", nth: int = 1, resume: str = "auto", before: Callable[[], None] | None = None) -> Ended:
    return run_child(source, out, RECIPE, die_at=die_at, nth=nth, resume=resume, before=before)


def test_the_points_tested_are_all_the_points_there_are(source, tmp_path):
    seen = Counter(child(source, tmp_path / "out").points)
    tested = {name for name, _ in POINTS}
    kinds = {name.rpartition(":")[0] + ":" if name.startswith(("written:", "solved:")) else name for name in seen}
    assert kinds <= {name.rpartition(":")[0] + ":" if name.startswith(("written:", "solved:")) else name for name in tested} | {
        "file-written:config.json",
        "file-staged:recipe.yaml",
        "file-staged:gemq.json",
        "file-written:provenance.intoto.json",
        "file-staged:README.md",
        "file-staged:gemq.seal.json",
        "file-written:gemq.seal.json",
    }
    assert all(seen[name] >= nth for name, nth in POINTS)
    assert len(POINTS) >= 12


@pytest.mark.parametrize(("point", "nth"), POINTS, ids=[f"{name}-{nth}" for name, nth in POINTS])
def test_killed_at_a_write_point_there_is_no_output_or_a_whole_one_and_the_next_run_gives_the_same_bytes(
    source, undisturbed, tmp_path, point, nth
):
    out = tmp_path / "out"
    killed = child(source, out, point, nth)
    assert killed.code == -9, killed.stderr
    if out.exists():
        assert point == "published"
    else:
        again = child(source, out)
        assert again.code == 0, again.stderr
        assert again.seal == undisturbed
    assert check_seal(out) == []
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "out") in (
        [],
        ["out.partial"],
        ["out.partial", "out.partial.lock"],
    )


def test_a_resumed_run_does_not_solve_again_what_was_finished(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert child(source, out, "solved:layer 1").code == -9
    solved = []
    original = quantize_run._Run._solve_unit

    def counted(self, unit, weights, hessian):
        solved.append(unit.name)
        return original(self, unit, weights, hessian)

    monkeypatch.setattr(quantize_run._Run, "_solve_unit", counted)
    torch.set_num_threads(1)
    run_job(source, out, RECIPE)
    assert {name.split(".")[1] for name in solved} == {"1"}


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("where", [0.02, 0.3, 0.5, 0.7, 0.9, 0.99])
def test_state_that_was_changed_costs_work_and_never_truth(source, undisturbed, tmp_path, where):
    out = tmp_path / "out"
    assert child(source, out, "written:layers.1.self_attn.o_proj").code == -9
    shard = atomic.partial_of(out) / "checkpoint" / "model.safetensors"
    flip(shard, 8 + int((shard.stat().st_size - 9) * where))
    assert child(source, out).seal == undisturbed


@pytest.mark.parametrize("where", [0.01, 0.4, 0.8])
def test_a_damaged_journal_is_noticed_and_the_run_starts_over(source, undisturbed, tmp_path, where):
    out = tmp_path / "out"
    assert child(source, out, "written:layers.1.self_attn.o_proj").code == -9
    journal = atomic.partial_of(out) / "journal.json"
    flip(journal, int(journal.stat().st_size * where))
    again = child(source, out)
    assert again.seal == undisturbed
    assert "starting over" in again.stderr


def test_the_journal_of_another_version_is_refused_and_kept(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert child(source, out, "written:layers.1.self_attn.o_proj").code == -9
    path = atomic.partial_of(out) / "journal.json"
    body = json.loads(path.read_text())["body"] | {"version": 1}
    written = json.dumps({"sha256": hashlib.sha256(canonical(body)).hexdigest(), "body": body})
    path.write_text(written)
    torch.set_num_threads(1)
    with pytest.raises(UsageError, match="another version of gemq") as refused:
        run_job(source, out, RECIPE)
    assert "--resume never" in refused.value.next_step
    assert path.read_text() == written
    assert run_job(source, out, RECIPE, resume="never").seal == undisturbed


def test_an_unfinished_run_with_other_options_is_not_mixed_up_nor_thrown_away(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert child(source, out, "solved:layer 1").code == -9
    torch.set_num_threads(1)
    with pytest.raises(UsageError, match="with another seed"):
        run_job(source, out, RECIPE, seed=1)
    assert child(source, out).seal == undisturbed


def test_resume_required_needs_a_run_and_resume_never_discards_one(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(UsageError, match="holds no unfinished quantization"):
        run_job(source, out, RECIPE, resume="required")
    assert child(source, out, "solved:layer 1").code == -9
    again = child(source, out, resume="never")
    assert again.seal == undisturbed
    assert "going on" not in again.stderr


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("name", ["a folder", "a folder with a damaged journal", "a file", "a link"])
def test_what_gemq_did_not_make_at_the_place_of_the_partial_directory_is_refused_and_kept(source, tmp_path, resume, name):
    place, mine = tmp_path / "out.partial", tmp_path / "mine"
    (mine / "checkpoint").mkdir(parents=True)
    (mine / "checkpoint" / "thesis.txt").write_text("years of work")
    if name == "a folder with a damaged journal":
        (mine / "journal.json").write_text('{"sha256": "", "body": {"version": 2}}')
    if name == "a file":
        place.write_text("years of work")
    elif name == "a link":
        place.symlink_to(mine)
    else:
        mine.rename(place)
    before = sorted((str(path), path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*"))
    with pytest.raises(UsageError) as refused:
        run_job(source, tmp_path / "out", RECIPE, resume=resume)
    assert "another --output" in refused.value.next_step
    assert sorted((str(path), path.is_file() and path.read_bytes()) for path in tmp_path.rglob("*")) == before


def test_a_file_of_the_user_in_the_partial_directory_outlives_the_run(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert child(source, out, "solved:layer 1").code == -9
    (atomic.partial_of(out) / "notes.txt").write_text("mine")
    assert child(source, out, resume="never").seal == undisturbed
    assert (atomic.partial_of(out) / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("point", ["solved:layer 0", "before-publish"])
@pytest.mark.parametrize(("resume", "name"), [("auto", "thesis.txt"), ("auto", "sub/thesis.txt"), ("auto", "vocab.txt"), ("never", "thesis.txt")])
def test_a_file_of_the_user_in_the_unfinished_checkpoint_is_neither_sealed_nor_deleted(source, undisturbed, tmp_path, resume, name, point):
    out, mine = tmp_path / "out", tmp_path / "out.partial" / "checkpoint" / name
    child(source, out, point)
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("mine")
    torch.set_num_threads(1)
    with pytest.raises(UsageError, match=re.escape(str(mine))):
        run_job(source, out, RECIPE, resume=resume)
    assert mine.read_text() == "mine"
    assert not out.exists()
    mine.rename(tmp_path / "mine")
    if mine.parent.name == "sub":
        mine.parent.rmdir()
    assert child(source, out, resume=resume).seal == undisturbed


@pytest.mark.parametrize("trouble", ["a folder in the way", "no permission"])
def test_what_can_not_be_deleted_after_the_publication_does_not_fail_the_run(source, undisturbed, tmp_path, monkeypatch, trouble):
    out = tmp_path / "out"

    def at(name: str) -> None:
        if name == "published" and trouble == "a folder in the way":
            (atomic.partial_of(out) / ".x.1.tmp").mkdir()
        elif name == "published":
            monkeypatch.setattr(Path, "unlink", refuse)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(path))

    monkeypatch.setattr(atomic, "on_write_point", at)
    run_job(source, out, RECIPE)
    monkeypatch.undo()
    assert check_seal(out) == []
    assert atomic.partial_of(out).is_dir()


@pytest.mark.parametrize("damage", ["zeros", "another shard's", "cut"])
def test_a_shard_s_header_or_size_that_was_lost_is_written_again(source, undisturbed, tmp_path, damage):
    out = tmp_path / "out"
    assert child(source, out, "solved:layer 1").code == -9
    shard = atomic.partial_of(out) / "checkpoint" / "model.safetensors"
    raw = bytearray(shard.read_bytes())
    length = 8 + int.from_bytes(raw[:8], "little")
    if damage == "zeros":
        raw[:length] = bytes(length)
    elif damage == "another shard's":
        raw[:length] = raw[:length].replace(b"BF16", b"F16 ")
    else:
        del raw[len(raw) // 2 :]
    shard.write_bytes(raw)
    again = child(source, out)
    assert again.seal == undisturbed
    assert "header" in again.stderr
    assert check_seal(out) == []


def test_a_user_without_root_s_powers_goes_on_from_files_that_were_made_read_only(source, undisturbed, tmp_path):
    out = tmp_path / "out"
    assert child(source, out, "modes-set").code == -9
    again = child(source, out, before=obey_modes)
    assert again.code == 0, again.stderr
    assert again.seal == undisturbed


@pytest.mark.parametrize("resume", ["auto", "never", "required"])
def test_refused_attempts_leave_a_live_run_alone(source, undisturbed, tmp_path, resume):
    """The run waits in the middle until two more processes were refused; then it ends as if nothing had been."""
    out = tmp_path / "out"
    marks = tmp_path / "marks"
    marks.mkdir()
    ended: list[Ended] = []
    running = threading.Thread(target=lambda: ended.append(child(source, out, before=partial(wait_in_the_middle, str(marks)))))
    running.start()
    while not (marks / "waiting").exists():
        assert running.is_alive()
        time.sleep(0.05)
    refused = [child(source, spelled, resume=resume) for spelled in (out, tmp_path / "marks" / ".." / "out")]
    (marks / "go").touch()
    running.join()
    assert [(one.code, "another gemq is building" in one.stderr) for one in refused] == [(2, True)] * 2
    assert ended[0].seal == undisturbed, ended[0].stderr
    assert not (tmp_path / "out.partial.lock").exists()


def test_two_runs_cannot_build_one_output(source, tmp_path):
    out = tmp_path / "out"
    with atomic.locked(atomic.partial_of(out)), pytest.raises(UsageError, match="another gemq is building"):
        run_job(source, out, RECIPE)


def test_an_output_where_nothing_can_be_written_is_refused(source):
    with pytest.raises(UsageError, match="nothing can be written into /proc/1 "):
        run_job(source, Path("/proc/1/out"), RECIPE)


def test_an_output_that_cannot_fit_is_refused_before_any_work(source, tmp_path, monkeypatch):
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1000})())
    with pytest.raises(UsageError, match="free"):
        run_job(source, tmp_path / "out", RECIPE)
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_stops_safely_and_the_next_run_finishes(source, undisturbed, tmp_path, monkeypatch):
    """The write of the second layer meets ENOSPC, as a real file system reports it."""
    torch.set_num_threads(1)  # as in the child
    job = make_job(source, tmp_path / "out", RECIPE)
    original = quantize_run.ShardWriter.write_rows

    def full(self, name, first, rows):
        if ".layers.1.mlp" in name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        original(self, name, first, rows)

    monkeypatch.setattr(quantize_run.ShardWriter, "write_rows", full)
    with pytest.raises(StoppedSafely, match="no space left") as raised:
        quantize_run.quantize(job)
    assert raised.value.exit_code == 75
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    assert child(source, tmp_path / "out").seal == undisturbed


def test_a_really_full_disk_leaves_nothing_half_written(source, tmp_path):
    """A file size limit makes the kernel itself refuse the bytes."""
    out = tmp_path / "out"
    stopped = child(source, out, before=limit_file_size)
    assert stopped.code == 75, stopped.stderr
    assert "no space left" in stopped.stderr
    assert not out.exists()
