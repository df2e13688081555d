"""A search's directory: looks at records are never forgotten, and only what gemq wrote is deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gemq import atomic
from gemq.errors import IntegrityError
from gemq.quantize.budget import Spent, Trial
from gemq.quantize.looks import MOST_LOOKS
from gemq.quantize.seal import write_seal
from gemq.quantize.search_state import RECORD_FILE, SearchState
from gemq.quantize.trials import Trials

BUILD = "build-0123456789ab"


def opened(folder: Path) -> SearchState:
    state = SearchState.open(folder)
    state.make()
    return state


def identity(recipe: str = "a", source: str = "s", records: str = "r", count: int = 12) -> dict[str, Any]:
    return {"job": {"source": {"model.safetensors": source}, "recipe": recipe}, "judged on": {"sha256": records, "records": count}}


def trial(mix: dict[str, str], look: int) -> Trial:
    return Trial(mix, 0.01, 1.0, 1, 4.0, 20.0, Spent(12, 1200, 0.01, 0.02, 0.01, 0.02), None, look)


def measured(folder: Path, label: str, **of: Any) -> int:
    """The number of the look at a mix that is measured now, as a new process does it."""
    log = Trials.open(opened(folder), identity(**of))
    mix = {"unit": label}
    look = log.look(mix)
    log.add(trial(mix, look))
    return look


def test_looks_at_the_same_records_and_source_are_counted_over_every_recipe(tmp_path):
    assert [measured(tmp_path, label) for label in ("int4", "int8", "int4")] == [1, 2, 1]
    assert measured(tmp_path, "int4", recipe="b") == 3
    assert measured(tmp_path, "int4", recipe="b", count=11) == 4  # the first 11 of the same records
    assert measured(tmp_path, "int4") == 1
    assert measured(tmp_path, "int4", source="t") == 1
    assert measured(tmp_path, "int4", records="q") == 1
    assert Trials.open(opened(tmp_path), identity()).looks == 4


@pytest.mark.parametrize("damage", ["cut", "deleted", "discarded"])
def test_looks_are_kept_where_their_logs_are_not(tmp_path, damage):
    for label in ("int4", "int8"):
        measured(tmp_path, label)
    (log,) = tmp_path.glob("trials-*.json")
    if damage == "cut":
        log.write_bytes(log.read_bytes()[:20])
    elif damage == "deleted":
        log.unlink()
    else:
        Trials.open(opened(tmp_path), identity()).discard()
    assert measured(tmp_path, "keep") == 3
    assert measured(tmp_path, "int8") == 2


def test_a_look_that_was_interrupted_before_its_log_keeps_its_number(tmp_path):
    assert Trials.open(opened(tmp_path), identity()).look({"unit": "int4"}) == 1
    assert measured(tmp_path, "int8") == 2
    assert measured(tmp_path, "int4") == 1


@pytest.mark.parametrize("damage", [None, b"", b'{"version":1,"made":{},"looks":{"a":1}}'])
def test_a_lost_or_damaged_record_of_looks_is_no_new_beginning(tmp_path, damage):
    measured(tmp_path, "int4")
    path = tmp_path / RECORD_FILE
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage)
    with pytest.raises(IntegrityError):
        measured(tmp_path, "int4", recipe="b")


def test_no_further_checkpoint_may_be_measured_on_records_that_are_used_up(tmp_path):
    log = Trials.open(opened(tmp_path), identity())
    for number in range(MOST_LOOKS):
        assert log.may_look({"unit": str(number)})
        log.look({"unit": str(number)})
    assert log.may_look({"unit": "0"})
    assert not log.may_look({"unit": "another"})
    assert not Trials.open(opened(tmp_path), identity("b")).may_look({"unit": "0"})
    assert Trials.open(opened(tmp_path), identity(records="q")).may_look({"unit": "another"})


def built(folder: Path, *, recorded: bool = True) -> tuple[SearchState, Path]:
    """A state with a sealed checkpoint that has a folder in it."""
    state = opened(folder)
    path = state.claim(BUILD, "identity")
    (path / "inner").mkdir(parents=True)
    (path / "model.safetensors").write_text("weights")
    (path / "inner" / "config.json").write_text("{}")
    seal = write_seal(path)
    if recorded:
        state.finished(BUILD, seal)
    return state, path


@pytest.mark.parametrize("recorded", [True, False])
def test_a_checkpoint_is_deleted_without_the_users_files_in_it(tmp_path, capsys, recorded):
    state, path = built(tmp_path, recorded=recorded)
    for name in ("notes-of-mine.txt", "inner/notes.txt"):
        (path / name).write_text("mine")
    state.remove(BUILD)
    assert sorted(str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()) == ["inner/notes.txt", "notes-of-mine.txt"]
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize("recorded", [True, False])
def test_a_checkpoint_without_files_of_the_users_is_deleted_entirely(tmp_path, recorded):
    state, path = built(tmp_path, recorded=recorded)
    state.remove(BUILD)
    assert not path.exists()
    assert not SearchState.open(tmp_path).names("identity", "build-")


def test_what_is_not_the_recorded_checkpoint_is_left_alone(tmp_path, capsys):
    state, path = built(tmp_path)
    (path / "gemq.seal.json").chmod(0o644)
    (path / "gemq.seal.json").write_text("mine")
    state.remove(BUILD)
    assert len([file for file in path.rglob("*") if file.is_file()]) == 3
    assert "left alone" in capsys.readouterr().err


def test_a_link_or_a_folder_in_the_place_of_a_sealed_one_is_not_followed(tmp_path):
    state, path = built(tmp_path / "state")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "config.json").write_text("mine")
    (path / "inner" / "config.json").unlink()
    (path / "inner").rmdir()
    (path / "inner").symlink_to(mine)
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    (path / "model.safetensors" / "notes.txt").write_text("mine")
    state.remove(BUILD)
    assert (mine / "config.json").read_text() == "mine"
    assert (path / "model.safetensors" / "notes.txt").read_text() == "mine"
    assert (path / "inner").is_symlink()


def test_an_unfinished_build_is_deleted_without_the_users_files_beside_it(tmp_path):
    state = opened(tmp_path)
    partial = atomic.partial_of(state.claim(BUILD, "identity"))
    atomic.claim(partial, "quantize")
    (partial / "checkpoint").mkdir()
    (partial / "checkpoint" / "model.safetensors").write_text("half")
    (partial / "journal.json").write_text("{}")
    (partial / "notes-of-mine.txt").write_text("mine")
    state.remove(BUILD)
    assert not (partial / "checkpoint").exists()
    assert not (partial / "journal.json").exists()
    assert (partial / "notes-of-mine.txt").read_text() == "mine"
