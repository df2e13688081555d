"""Searches through the command line: results within the budget, kept measurements used only where they apply, nothing of the user's lost."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from tests.quantize.small_jobs import windows
from typer.testing import CliRunner

from gemq import atomic, output
from gemq.cli import app
from gemq.errors import GemqError, Interrupted, OverBudgetError, UsageError
from gemq.eval.windows import write_records
from gemq.quantize.looks import MOST_LOOKS
from gemq.quantize.measurements import Measurements
from gemq.quantize.seal import seal_digest

CANDIDATES = "int4-g32,int8"
USERS = {"build-mine/model.safetensors": "weights of mine", "build-0123456789ab/x": "mine too", "records.jsonl": "my records\n",
         "reference.safetensors": "my reference", "trials.json": "{}", "notes.txt": "notes"}  # fmt: skip
"""What a user has in the folder that is given as --search-state, by path."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Calibration windows and records to judge on, as token ids."""
    folder = tmp_path_factory.mktemp("data")
    calibration = folder / "calibration.jsonl"
    calibration.write_text("".join(json.dumps({"token_ids": window}) + "\n" for window in windows(512, 8, 32)))
    write_records(folder / "records.jsonl", windows(512, 12, 32, seed=9))
    return {"calibration": str(calibration), "records": str(folder / "records.jsonl")}


def search(source: Path, data: dict[str, str], folder: Path, name: str, *more: str) -> dict:
    """The command's JSON; raises what the command raises."""
    output.mode.json = output.mode.quiet = False
    result = CliRunner().invoke(app, [
        "quantize", str(source), "--recipe", "w4a16-g32", "--calibration", data["calibration"], "--samples", "8", "--length", "32",
        "--eval-data", data["records"], "--eval-records", "12", "--candidates", CANDIDATES, "--device", "cpu", "--json",
        "--search-state", str(folder / "state"), "--output", str(folder / name), *more,
    ])  # fmt: skip
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def chosen(printed: dict) -> dict:
    return next(trial for trial in printed["search"]["tried"] if trial["chosen"])


def logs(folder: Path) -> list[Path]:
    return sorted((folder / "state").glob("trials-*.json"))


def add_users_files(state: Path) -> None:
    for name, text in USERS.items():
        (state / name).parent.mkdir(parents=True, exist_ok=True)
        (state / name).write_text(text)


def users_files(state: Path) -> dict[str, str]:
    return {name: (state / name).read_text() for name in USERS}


@pytest.fixture(scope="module")
def heads(gemma3, data, tmp_path_factory):
    """Two searches on one state that differ in --lm-head alone, the first with a head that harms less; and the user's files in that state."""
    folder = tmp_path_factory.mktemp("heads")
    add_users_files(folder / "state")
    first = search(gemma3, data, folder, "int8", "--lm-head", "int8", "--kl-budget", "0.02")
    return folder, first, search(gemma3, data, folder, "int4", "--lm-head", "int4", "--kl-budget", "0.02")


def test_what_a_search_publishes_is_within_its_budget_whatever_another_recipe_left_in_the_state(heads):
    folder, first, second = heads
    for printed, name, scheme in ((first, "int8", "int8 channel"), (second, "int4", "int4 channel")):
        assert chosen(printed)["met"]
        assert chosen(printed)["kl_upper_95"] <= 0.02
        manifest = json.loads((folder / name / "gemq.json").read_text())
        assert manifest["units"]["lm_head"]["scheme"] == scheme
        assert manifest["search"] == printed["search"]
    # the second knows no trial of the first; their looks at the records are counted together
    before, own = (len(printed["search"]["tried"]) for printed in (first, second))
    assert first["search"]["bound"]["looks"] == before
    assert second["search"]["bound"]["looks"] == before + own
    assert sorted(trial["look"] for trial in second["search"]["tried"]) == list(range(before + 1, before + own + 1))
    assert f"all {before + own} checkpoints" in (folder / "int4" / "README.md").read_text()
    assert len(logs(folder)) == 2


def test_the_users_files_in_a_search_state_survive_it(heads):
    folder, _, _ = heads
    assert users_files(folder / "state") == USERS
    assert not [path for path in (folder / "state").glob("build-*") if path.name not in ("build-mine", "build-0123456789ab")]


@pytest.mark.parametrize("more", [
    ("--seed", "1"), ("--recipe", "w4a16-awq"), ("--format", "gptq"), ("--samples", "7"), ("--eval-records", "11"), ("--length", "31"),
])  # fmt: skip
def test_every_option_that_changes_what_is_measured_has_trials_of_its_own(gemma3, data, heads, more, monkeypatch):
    """They are kept apart before anything is built: the log that the search opens is another one. The looks at the records are counted on."""
    from gemq.quantize import search as searching

    class Reached(Exception):
        pass

    seen = []

    def stop(self):
        seen.append((self.log.digest, self.known, self.log.looks))
        raise Reached

    folder, first, second = heads
    monkeypatch.setattr(searching.Search, "run", stop)
    before = {path.name: path.read_bytes() for path in logs(folder)}
    for options in (("--lm-head", "int8"), ("--lm-head", "int8", *more)):
        with pytest.raises(Reached):
            search(gemma3, data, folder, "other", "--kl-budget", "0.03", *options)
    assert seen[0][1]
    assert seen[1][0] != seen[0][0]
    assert seen[1][1:] == ((), second["search"]["bound"]["looks"])
    assert len(first["search"]["tried"]) < seen[1][2]
    assert {path.name: path.read_bytes() for path in logs(folder)} == before


@pytest.mark.slow
def test_a_known_mix_is_measured_again_before_it_is_published(gemma3, data, tmp_path):
    search(gemma3, data, tmp_path, "first", "--kl-budget", "0.02")
    # a record of an earlier search that says too little of a mix that is far over the budget
    (log,) = logs(tmp_path)
    document = json.loads(log.read_bytes())
    digest = max(document["trials"], key=lambda digest: document["trials"][digest]["judged"]["kl"])
    true_bound, look = document["trials"][digest]["judged"]["kl_upper"], document["trials"][digest]["look"]
    document["trials"][digest]["judged"] |= {"kl": 0.00005, "kl_upper": 0.000098, "log_ratio": 0.00005, "log_ratio_upper": 0.000098}
    log.write_text(json.dumps(document))
    with contextlib.suppress(OverBudgetError):
        second = search(gemma3, data, tmp_path, "second", "--kl-budget", "0.0001", "--search-builds", "1")
        assert chosen(second)["kl_upper_95"] <= 0.0001
    trials = json.loads(log.read_bytes())["trials"]
    assert trials[digest]["judged"]["kl_upper"] == pytest.approx(true_bound, rel=1e-3)
    assert trials[digest]["look"] == look


@pytest.mark.slow
def test_records_that_were_used_too_often_are_refused_before_another_build(gemma3, data, tmp_path, monkeypatch):
    first = search(gemma3, data, tmp_path, "first", "--kl-budget", "0.02", "--search-builds", "1")
    path = tmp_path / "state" / "gemq-search.json"
    record = json.loads(path.read_bytes())
    (names,) = record["looks"].values()
    assert len(names) == first["search"]["bound"]["looks"]
    names += [f"{place:012d}/{place:012d}" for place in range(MOST_LOOKS - len(names))]
    path.write_text(json.dumps(record))
    builds = []
    monkeypatch.setattr("gemq.quantize.search.quantize", lambda *arguments: builds.append(arguments))
    with pytest.raises(UsageError) as raised:  # another recipe: nothing is known of it
        search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02", "--lm-head", "int4", "--resume", "never")
    assert str(MOST_LOOKS) in raised.value.message
    assert "--eval-data" in raised.value.next_step
    with pytest.raises(UsageError):
        search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02", "--search-builds", str(MOST_LOOKS + 1), "--dry-run")
    assert not builds
    monkeypatch.undo()
    # what was measured already can still be published
    again = search(gemma3, data, tmp_path, "again", "--kl-budget", "0.02")
    assert chosen(again)["mix"] == chosen(first)["mix"]
    assert again["search"]["bound"]["looks"] == MOST_LOOKS


def test_pareto_finds_the_state_of_a_search_whose_output_is_elsewhere(gemma3, data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    output.mode.json = output.mode.quiet = False
    calibrated = ("--calibration", data["calibration"], "--samples", "8", "--length", "32", "--device", "cpu")
    done = CliRunner().invoke(app, ["quantize", str(gemma3), "--recipe", "w4a16-g32", *calibrated, "--eval-data", data["records"],
                                    "--kl-budget", "0.5", "--candidates", CANDIDATES, "--search-builds", "1",
                                    "--output", "elsewhere/out"])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert (tmp_path / f"{gemma3.name}-w4a16-g32.search").is_dir()
    monkeypatch.setattr("gemq.calibration.sets.load_calibration", lambda name, **options: pytest.fail("the search's state was not found"))
    drawn = CliRunner().invoke(app, ["pareto", str(gemma3), "--recipe", "w4a16-g32", "--device", "cpu", "--output", "drawn/out", "--json"])
    assert drawn.exit_code == 0, drawn.output
    assert len(json.loads(drawn.stdout)["pareto"]["measured"]) == 1
    for command in ("quantize", "pareto"):
        assert "current directory" in " ".join(CliRunner().invoke(app, [command, "--help"], terminal_width=400).output.split())


def test_an_unreachable_budget_is_over_budget_with_the_nearest_build_and_its_own_digits(gemma3, data, tmp_path):
    add_users_files(tmp_path / "state")
    with pytest.raises(OverBudgetError) as raised:
        search(gemma3, data, tmp_path, "out", "--ppl-budget", "0.001%", "--candidates", "int4-g32", "--search-builds", "1", "--lm-head", "keep")
    assert "0.00100%" in raised.value.message
    assert "nearest of" in raised.value.message
    assert not (tmp_path / "out").exists()
    assert users_files(tmp_path / "state") == USERS


def test_other_candidates_measure_only_what_is_missing(gemma3, data, tmp_path, monkeypatch):
    added = []
    original = Measurements.add

    def counting(self, decision, measured):
        added.append(decision)
        original(self, decision, measured)

    monkeypatch.setattr(Measurements, "add", counting)
    monkeypatch.setattr("gemq.quantize.search.Search.run", lambda self: (_ for _ in ()).throw(OverBudgetError("stop here")))

    def measured_for(candidates: str) -> None:
        added.clear()
        with pytest.raises(OverBudgetError):
            search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02", "--candidates", candidates)

    measured_for("int4-g32,int8")
    first, document = len(added), json.loads(next((tmp_path / "state").glob("sensitivities-*.json")).read_bytes())
    assert first == len(document["units"]) > 8
    measured_for("int4-g32")
    assert not added
    measured_for("int4-g32,int8,fp8")
    assert 0 < len(added) < first  # nothing of the head, which takes no fp8
    after = json.loads(next((tmp_path / "state").glob("sensitivities-*.json")).read_bytes())
    for unit, measured in document["units"].items():
        for kind, values in measured.items():
            assert {label: after["units"][unit][kind][label] for label in values} == values
    assert after["units"]["layers.0.mlp.down_proj"]["kl"] == document["units"]["layers.0.mlp.down_proj"]["kl"]
    measured_for("int4-g32,int8")
    assert not added


def interrupt(monkeypatch: pytest.MonkeyPatch, point: str, times: int, go) -> None:
    """Carry out `go` until the write point `point` is passed for the time number `times`, where it is interrupted as by Ctrl-C."""
    left = [times]

    def stop(name: str) -> None:
        if name == point:
            left[0] -= 1
            if not left[0]:
                raise Interrupted("stopped here")

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "on_write_point", stop)
        with pytest.raises(Interrupted):
            go()


@pytest.mark.slow
def test_an_interrupted_search_is_resumed_to_the_same_seal_and_can_be_required_or_discarded(gemma3, data, tmp_path, monkeypatch):
    options = ("--kl-budget", "0.02", "--lm-head", "keep")
    whole = search(gemma3, data, tmp_path / "whole", "out", *options)
    assert len(whole["search"]["tried"]) > 1
    folder = tmp_path / "stopped"
    for name in ("absent", "state"):  # no directory, then one without a search
        with pytest.raises(UsageError):
            search(gemma3, data, folder, "out", *options, "--resume", "required", "--search-state", str(folder / name))
        (folder / "state").mkdir(parents=True, exist_ok=True)
    add_users_files(folder / "state")
    interrupt(monkeypatch, "solved:layer 1", 2, lambda: search(gemma3, data, folder, "out", *options))  # in the second build
    assert len(json.loads(logs(folder)[0].read_bytes())["trials"]) == 1
    with pytest.raises(UsageError):  # another budget: not that search
        search(gemma3, data, folder, "out", "--kl-budget", "0.03", "--lm-head", "keep", "--resume", "required")
    resumed = search(gemma3, data, folder, "out", *options, "--resume", "required")
    assert resumed["search"] == whole["search"]
    assert resumed["seal"] == whole["seal"] == seal_digest(folder / "out")
    with pytest.raises(UsageError):  # it came to its end
        search(gemma3, data, folder, "again", *options, "--resume", "required")
    never = search(gemma3, data, folder, "again", *options, "--resume", "never")
    assert [trial["mix"] for trial in never["search"]["tried"]] == [trial["mix"] for trial in whole["search"]["tried"]]
    assert [trial["look"] for trial in never["search"]["tried"]] == [trial["look"] for trial in whole["search"]["tried"]]
    assert users_files(folder / "state") == USERS


def test_a_folder_of_the_users_where_a_build_would_go_is_refused_and_left_alone(gemma3, data, tmp_path, monkeypatch):
    interrupt(monkeypatch, "solved:layer 1", 1, lambda: search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02", "--lm-head", "keep"))
    (partial,) = (tmp_path / "state").glob("build-*.partial")
    mine = tmp_path / "other" / "state" / partial.name.removesuffix(".partial")
    mine.mkdir(parents=True)
    (mine / "mine.txt").write_text("mine")
    for resume in ("auto", "never"):
        with pytest.raises(UsageError) as raised:
            search(gemma3, data, tmp_path / "other", "out", "--kl-budget", "0.02", "--lm-head", "keep", "--resume", resume)
        assert mine.name in raised.value.message
        assert (mine / "mine.txt").read_text() == "mine"


def test_a_damaged_record_of_the_state_is_refused(gemma3, data, tmp_path):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "gemq-search.json").write_text("not gemq's")
    with pytest.raises(GemqError) as raised:
        search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02")
    assert raised.value.exit_code == 4
    assert (tmp_path / "state" / "gemq-search.json").read_text() == "not gemq's"


def test_a_dry_run_shows_what_a_search_would_do_and_creates_nothing(gemma3, data, tmp_path):
    printed = search(gemma3, data, tmp_path, "out", "--ppl-budget", "5%", "--dry-run", "--candidates", "int4-g32,int8,fp8")
    made = printed["search"]
    assert made["budget"]["limit"] == 0.05
    assert made["candidates"] == ["int4-g32", "int8", "fp8", "keep"]
    assert made["records"] == {"judged": 9, "held_out": 3}
    assert set(made["decisions"]["layers.0.mlp.down_proj"]["options"]) == {"int4-g32", "int8", "fp8", "keep"}
    assert "fp8" in made["decisions"]["lm_head"]["refused"]
    assert "lm_head" not in search(gemma3, data, tmp_path, "out", "--kl-budget", "0.1", "--dry-run", "--lm-head", "keep")["search"]["decisions"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("budget", [(), ("--kl-budget", "0.02")])
@pytest.mark.parametrize("more", [
    ("--calibration", "none.jsonl"), ("--calibration", "no such thing"), ("--calibration", "TABLE"), ("--length", "1000000"), ("--output", "HERE"),
    ("--output", "FILE/x"), ("--eval-data", "none.jsonl"), ("--eval-data", "TABLE"), ("--eval-data", "EMPTY"), ("--resume", "required"),
    ("--resume", "perhaps"),
])  # fmt: skip
def test_a_dry_run_refuses_what_the_run_would_refuse(gemma3, data, tmp_path, budget, more):
    (tmp_path / "table.csv").write_text("a,b\n")
    (tmp_path / "empty.jsonl").write_text("")
    names = {"TABLE": tmp_path / "table.csv", "EMPTY": tmp_path / "empty.jsonl", "HERE": tmp_path, "FILE/x": tmp_path / "table.csv" / "x"}
    options = [str(names.get(option, option)) for option in more]
    arguments = [
        "quantize", str(gemma3), "--recipe", "w4a16-g32", "--calibration", data["calibration"], "--eval-data", data["records"], "--device", "cpu",
        "--output", str(tmp_path / "out"), "--dry-run", *budget, *(["--search-state", str(tmp_path / "state")] if budget else []), *options,
    ]  # fmt: skip
    error = CliRunner().invoke(app, arguments).exception
    assert isinstance(error, UsageError), error
    assert error.next_step
    assert {path.name for path in tmp_path.iterdir()} == {"table.csv", "empty.jsonl"}


@pytest.mark.parametrize("more", [
    ("--samples", "3"), ("--eval-records", "1"), ("--candidates", "fp8", "--format", "gptq"), ("--search-state", "SOURCE"),
    ("--search-state", "FILE"), ("--search-state", "OUT"), ("--search-state", "OUT/inside"), ("--candidates", "int3"),
    ("--objective", "fun"), ("--kl-budget", "0"),
])  # fmt: skip
@pytest.mark.parametrize("dry", [("--dry-run",), ()])
def test_a_search_that_can_t_work_is_refused_before_anything_is_calibrated(gemma3, data, tmp_path, monkeypatch, more, dry):
    monkeypatch.setattr("gemq.calibration.sets.load_calibration", lambda name, **options: pytest.fail("calibrated before the check"))
    (tmp_path / "file").write_text("mine")
    names = {"SOURCE": gemma3 / "state", "FILE": tmp_path / "file" / "x", "OUT": tmp_path / "out", "OUT/inside": tmp_path / "out" / "state"}
    with pytest.raises(UsageError):
        search(gemma3, data, tmp_path, "out", "--kl-budget", "0.02", *[str(names.get(option, option)) for option in more], *dry)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not (gemma3 / "state").exists()
    assert os.listdir(tmp_path) == ["file"]


def test_a_mixed_rule_s_head_is_kept_as_the_recipe_says_in_a_search(gemma3, data, tmp_path):
    recipe = tmp_path / "mixed.yaml"
    recipe.write_text("version: 1\nname: mixed\nsummary: s\nrules:\n  - match: [decoder, lm_head]\n"
                      "    scheme: {weights: {num_bits: 8, strategy: channel}}\n")  # fmt: skip
    printed = search(gemma3, data, tmp_path, "out", "--recipe", str(recipe), "--kl-budget", "0.1", "--search-builds", "1")
    assert "lm_head" not in printed["search"]["decisions"]
    manifest = json.loads((tmp_path / "out" / "gemq.json").read_text())
    assert manifest["units"]["lm_head"]["scheme"] == "int8 channel"


@pytest.mark.slow
def test_files_of_a_source_that_are_left_out_do_not_count_in_a_search(gemma3, data, tmp_path):
    """A log file that changes during a search, or between two, is no part of what is quantized."""
    source = tmp_path / "source"
    shutil.copytree(gemma3, source)
    (source / "trainer_state.json").write_text("{}")
    first = search(source, data, tmp_path, "first", "--kl-budget", "0.5")
    (source / "trainer_state.json").write_text('{"step": 2}')
    second = search(source, data, tmp_path, "second", "--kl-budget", "0.5")
    assert [trial["mix"] for trial in first["search"]["tried"]] == [trial["mix"] for trial in second["search"]["tried"]]
    assert len(list((tmp_path / "state").glob("sensitivities-*.json"))) == 1


@pytest.mark.parametrize("option", [("--candidates", "int8"), ("--objective", "size"), ("--search-builds", "2"), ("--search-state", "state")])
def test_options_of_a_search_without_a_budget_are_refused(gemma3, option):
    refused = CliRunner().invoke(app, ["quantize", str(gemma3), "--recipe", "w4a16-g32", "--dry-run", *option])
    assert isinstance(refused.exception, UsageError)
    assert option[0] in refused.exception.message
