"""Folders and files of the user's: gemq deletes and overwrites only what it can prove it wrote, and works where it may not write."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
from tests.blackbox import sources
from tests.blackbox.command import DONE, INTEGRITY, USAGE
from tests.blackbox.files import names, tree


def users_files(folder: Path) -> dict[str, str]:
    """Files that somebody else wrote into `folder`; what `tree` says of them."""
    (folder / "notes").mkdir(parents=True)
    (folder / "notes" / "thesis.txt").write_text("three years of work")
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "model.safetensors").write_bytes(b"mine")
    return tree(folder)


def survived(folder: Path, before: dict[str, str]) -> bool:
    """Whether everything that was in `folder` still is what it was."""
    now = tree(folder)
    return all(now.get(name) == content for name, content in before.items())


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_partial_folder_that_gemq_did_not_make_survives(gemq, source, options, work, resume):
    before = users_files(work / "out.partial")
    gemq("quantize", source, *options, "--output", work / "out", "--resume", resume).exited(USAGE)
    assert tree(work / "out.partial") == before
    assert not (work / "out").exists()


@pytest.mark.parametrize("journal", ["[]", '{"body": {"version": 99}}'])
def test_a_partial_folder_whose_journal_proves_nothing_survives(gemq, source, options, work, journal):
    users_files(work / "out.partial")
    (work / "out.partial" / "journal.json").write_text(journal)
    before = tree(work / "out.partial")
    gemq("quantize", source, *options, "--output", work / "out", "--resume", "never").exited(USAGE)
    assert survived(work / "out.partial", before)


def test_a_partial_path_that_is_a_file_or_a_link_survives(gemq, source, options, work, tmp_path):
    before = users_files(tmp_path / "elsewhere")
    (work / "link.partial").symlink_to(tmp_path / "elsewhere")
    (work / "file.partial").write_text("mine")
    for name in ("link", "file"):
        gemq("quantize", source, *options, "--output", work / name, "--resume", "never").exited(USAGE)
    assert (work / "file.partial").read_text() == "mine"
    assert (work / "link.partial").is_symlink()
    assert tree(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_users_file_in_a_partial_folder_of_gemqs_survives_and_is_not_sealed(gemq, source, options, work, resume):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    live = gemq.start(*command)
    assert live.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    live.send(signal.SIGKILL)
    live.finish()
    (work / "out.partial" / "notes.txt").write_text("mine")
    (work / "out.partial" / "checkpoint" / "thesis.txt").write_text("mine too")
    gemq(*command, "--resume", resume).exited(DONE, USAGE)
    assert {path.name for path in work.rglob("*.txt")} >= {"notes.txt", "thesis.txt"}
    if out.exists():
        assert "thesis.txt" not in (out / "gemq.seal.json").read_text()
        gemq("verify", out).exited(DONE)


def test_a_search_leaves_the_users_folders_in_its_state_alone(gemq, source, options, records, work):
    state = work / "state"
    for name in ("build-1", "build-notes", "build-0123456789abcdef"):
        users_files(state / name)
    (state / "notes.txt").write_text("mine")
    before = tree(state)
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    gemq("quantize", source, *measured, "--kl-budget", "0.2", "--candidates", "int4-g32,int8", "--search-builds", "1",
         "--search-state", state, "--output", work / "out").exited(DONE, USAGE)  # fmt: skip
    assert survived(state, before)


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link", "link to a folder"])
def test_an_output_that_exists_is_left_alone(gemq, source, options, work, tmp_path, kind):
    out = work / "out"
    if kind == "folder":
        users_files(out)
    elif kind == "file":
        out.write_text("mine")
    else:
        out.symlink_to(tmp_path / "target")
        if kind == "link to a folder":
            users_files(tmp_path / "target")
    before = tree(tmp_path)
    gemq("quantize", source, *options, "--output", out).exited(USAGE)
    if kind == "file":
        gemq("quantize", source, *options, "--output", out, "--dry-run").exited(USAGE)
    assert tree(tmp_path) == before


def copy(source: Path, to: Path) -> Path:
    """A source that a test may damage."""
    shutil.copytree(source, to)
    return to


def test_an_output_in_or_at_the_source_is_refused_and_the_source_stays_as_it_was(gemq, source, options, work, tmp_path):
    model = copy(source, tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    before = tree(model)
    outputs = (model / "deep" / "er" / "out", model, tmp_path / "link" / "out")
    for out in outputs:
        gemq("quantize", model, *options, "--output", out).exited(USAGE)
        assert tree(model) == before, out
    gemq("quantize", tmp_path / "link", *options, "--output", model / "out").exited(USAGE)
    assert tree(model) == before
    gemq("quantize", model, *options, "--output", tmp_path / "model-out").exited(DONE)  # beside it is not in it


@pytest.mark.parametrize("where", ["."])
def test_quantize_from_inside_the_model_never_writes_into_it(gemq, source, options, tmp_path, where):
    model = copy(source, tmp_path / "model")
    before = tree(model)
    done = gemq("quantize", where, *options, "--json", cwd=model).exited(DONE, USAGE)
    assert tree(model) == before
    if done.code == DONE:
        gemq("verify", done.json["checkpoint"], "--source", model, cwd=model).exited(DONE)


def test_an_output_that_holds_the_source_is_refused(gemq, source, options, tmp_path):
    model = copy(source, tmp_path / "above" / "model")
    before = tree(tmp_path / "above")
    gemq("quantize", model, *options, "--output", tmp_path / "above").exited(USAGE)
    assert tree(tmp_path / "above") == before
    # the partial folder of this output would hold the source
    inside = copy(source, tmp_path / "x.partial")
    before = tree(inside)
    gemq("quantize", inside, *options, "--output", tmp_path / "x", "--resume", "never").exited(USAGE)
    assert tree(inside) == before


def test_a_search_state_or_a_result_in_the_source_is_refused(gemq, source, options, records, work, tmp_path):
    model = copy(source, tmp_path / "model")
    before = tree(model)
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    gemq("quantize", model, *measured, "--kl-budget", "0.2", "--candidates", "int4-g32,int8", "--search-builds", "1",
         "--search-state", model / "state", "--output", work / "out").exited(USAGE)  # fmt: skip
    assert tree(model) == before
    gemq("pareto", model, "--search-state", work / "state", "--output", model / "pareto").exited(USAGE)
    assert tree(model) == before


def read_only(folder: Path) -> Path:
    """`folder` without write permission."""
    folder.mkdir(exist_ok=True)
    folder.chmod(0o555)
    return folder


def test_a_read_only_working_folder_is_enough_where_the_output_is_elsewhere(gemq, source, options, work, tmp_path):
    here = read_only(tmp_path / "here")
    gemq("quantize", source, *options, "--output", work / "out", cwd=here, obey_permissions=True).exited(DONE)
    gemq("verify", work / "out", "--source", source, cwd=here, obey_permissions=True).exited(DONE)
    gemq("quantize", source, *options, cwd=here, obey_permissions=True).exited(USAGE)  # the default output is here
    assert names(here) == set()


def test_pareto_in_a_read_only_folder_is_refused(gemq, source, calibration, tmp_path):
    here = read_only(tmp_path / "here")
    given = ["--calibration", calibration, "--samples", "8", "--length", "32"]
    gemq("pareto", source, *given, cwd=here, obey_permissions=True).exited(USAGE)
    assert names(here) == set()


def test_results_that_cannot_be_written_are_refused_before_the_work(gemq, source, records, tmp_path):
    here = read_only(tmp_path / "here")
    (tmp_path / "folder").mkdir()
    for result in (here / "result.json", tmp_path / "folder"):
        gemq("eval-ppl", source, "--data", records, "--output", result, obey_permissions=True).exited(USAGE)
    assert names(here) == names(tmp_path / "folder") == set()


@pytest.mark.parametrize("kind", ["file", "dangling link"])
def test_a_cache_folder_that_is_none_is_named(gemq, kind):
    """The demo model is kept below ~/.cache."""
    if kind == "file":
        (gemq.home / ".cache").write_text("mine")
    else:
        (gemq.home / ".cache").symlink_to("nowhere/at/all")
    done = gemq("quantize", "gemma-3-270m", "--eval-data", "none").exited(USAGE)
    assert ".cache" in done.told


def test_a_dry_run_refuses_what_the_run_would_refuse(gemq, source, options, work, tmp_path):
    def dry(*more: str | Path) -> int:
        return gemq("quantize", source, *options, "--output", work / "out", "--dry-run", *more).code

    assert dry() == DONE
    assert dry("--calibration", tmp_path / "missing.jsonl") == USAGE
    assert dry("--ppl-budget", "wide") == USAGE
    assert dry("--resume", "perhaps") == USAGE
    assert names(work) == set()


@pytest.mark.parametrize("pattern", ["re:layers.(0", "re:*"])
def test_a_recipe_with_an_invalid_regular_expression_is_refused_when_it_is_validated(gemq, work, pattern):
    recipe = work / "recipe.yaml"
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    document = {"version": 1, "name": "mine", "summary": "a test", "method": "rtn", "rules": [{"match": [pattern], "scheme": {"weights": weights}}]}
    recipe.write_text(json.dumps(document))  # JSON is YAML
    gemq("recipes", "validate", recipe).exited(USAGE)
    document["rules"][0]["match"] = ["decoder"]  # type: ignore[index]
    recipe.write_text(json.dumps(document))
    gemq("recipes", "validate", recipe).exited(DONE)


def test_a_model_that_changes_while_it_is_quantized_is_noticed(gemq, source, options, work, tmp_path):
    """The weights are replaced after their digests were taken; a checkpoint that names the old ones must not come of it."""
    model = copy(source, tmp_path / "model")
    other = sources.changed(source, tmp_path / "other", lambda tensors: [tensor.mul_(1.5) for tensor in tensors.values()])
    live = gemq.start("quantize", model, *options, "--output", work / "out")
    assert live.wait_for(lambda: (work / "out.partial" / "checkpoint" / "model.safetensors").exists())
    live.send(signal.SIGKILL)
    live.finish()
    shutil.copyfile(other / "model.safetensors", model / "model.safetensors")
    gemq("quantize", model, *options, "--output", work / "out").exited(USAGE, INTEGRITY)
    assert not (work / "out").exists()
