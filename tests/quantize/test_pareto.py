"""`gemq pareto`: the curve, the steps and the budgets worked out anew from sensitivities, and the command on what a search left behind."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
from pathlib import Path

import pytest
from tests.quantize.small_jobs import make_job
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import UsageError
from gemq.quantize.budget import Budget, Spent, Trial
from gemq.quantize.decisions import DEFAULT_CANDIDATES, HEAD, KEEP, decisions_of, options_of, search_plan
from gemq.quantize.measurements import Measured, Measurements
from gemq.quantize.pareto import pareto, sensitivity_map
from gemq.quantize.search import recipe_of
from gemq.quantize.search_run import stored_sensitivities
from gemq.quantize.search_state import SearchState, short_digest
from gemq.quantize.sensitivity import method_of, worked_out
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.trials import Trials
from gemq.recipes.model import load_recipe
from gemq.source import Source, file_hashes


def made_up(source: Path, path: Path) -> tuple:
    """The small model's search plan, and sensitivities of it that nobody measured: each finer scheme harms a third."""
    draw = random.Random(0)
    skeleton, _ = load_skeleton(source)
    units = search_plan(skeleton, load_recipe("w4a16-g32"))
    decisions = decisions_of(units)
    measured = Measurements.open(path, {"source": file_hashes(source), **method_of(units)})
    for decision in decisions:
        worst = draw.uniform(0.001, 0.01)
        labels = [label for label in options_of(units, decision, DEFAULT_CANDIDATES) if label != KEEP]
        harm = {label: worst / 3**place for place, label in enumerate(labels)}
        measured.add(decision.name, Measured(harm, harm, harm))
    return units, worked_out(units, DEFAULT_CANDIDATES, measured)


def test_a_decision_without_an_error_on_its_calibration_still_harms_as_much_as_was_measured(gemma3, tmp_path):
    """Its inputs were all zero there: the ratio of errors says nothing, and the KL on other windows does."""
    units, _ = made_up(gemma3, tmp_path / "sensitivities.json")
    decision = next(decision for decision in decisions_of(units) if not decision.is_head)
    labels = [label for label in options_of(units, decision, DEFAULT_CANDIDATES) if label != KEEP]
    measured = Measurements.open(tmp_path / "sensitivities.json", {"source": file_hashes(gemma3), **method_of(units)})
    nothing = dict.fromkeys(labels, 0.0)
    measured.add(decision.name, Measured(dict.fromkeys(labels, 0.3), nothing, nothing))
    assert worked_out(units, DEFAULT_CANDIDATES, measured).harm[decision.name] == {**dict.fromkeys(labels, 0.3), KEEP: 0.0}


@pytest.fixture(scope="module")
def known(gemma3, tmp_path_factory):
    return made_up(gemma3, tmp_path_factory.mktemp("state") / "sensitivities-made-up.json")


def trial(value: float, predicted: float, size: int = 400_000) -> Trial:
    spent = Spent(6, 100, value, value + 0.01, value, value + 0.01)
    return Trial({"layers.0.mlp.down_proj": "int8"}, predicted, 1.0, size, 5.0, 20.0, spent, Spent(2, 30, value, None, value, None))


def test_the_curve_goes_from_the_coarsest_to_the_source_step_by_step(known):
    units, found = known
    made = pareto(units, found, DEFAULT_CANDIDATES, [], {})
    mix = {name: max(harms, key=harms.get) for name, harms in found.harm.items()}  # the coarsest harms most, here
    options = {decision.name: options_of(units, decision, DEFAULT_CANDIDATES) for decision in decisions_of(units)}
    before = None
    for point in made["curve"]:
        if (step := point["step"]) is not None:
            assert mix[step["decision"]] == step["from"]
            mix[step["decision"]] = step["to"]
            assert step["kl_nats"] == pytest.approx(before["predicted_kl_nats"] - point["predicted_kl_nats"])
            assert step["bytes"] == pytest.approx(point["bytes_per_token"] - before["bytes_per_token"], abs=1)
            assert point["bytes_per_token"] > before["bytes_per_token"]
        assert point["predicted_kl_nats"] == pytest.approx(sum(found.harm[name][label] for name, label in mix.items()), abs=1e-12)
        assert point["bytes_per_token"] == pytest.approx(sum(options[name][label].token_bytes for name, label in mix.items()), abs=1)
        assert point["predicted_ratio"] == pytest.approx(math.exp(point["predicted_kl_nats"]))
        before = point
    assert set(mix.values()) == {KEEP}
    assert before["bytes_per_token"] == units.bytes_per_token()[0] == made["source"]["bytes_per_token"]


def test_steps_are_worth_less_and_less(known):
    units, found = known
    rates = [point["step"]["kl_nats"] / point["step"]["bytes"] for point in pareto(units, found, DEFAULT_CANDIDATES, [], {})["curve"][1:]]
    assert all(later <= earlier * (1 + 1e-6) for earlier, later in itertools.pairwise(rates))


def test_each_budget_has_its_mix_and_what_it_bought(known, gemma3, tmp_path):
    units, found = known
    made = pareto(units, found, DEFAULT_CANDIDATES, [Budget("ppl", 0.04), Budget("kl", 0.015)], {})
    rows = made["budgets"]
    assert [row["budget"] for row in rows if row["asked"]] == ["+4.00%", "0.0150 nats"]
    for row in rows:
        limit = math.log1p(row["limit"]) if row["kind"] == "ppl" else row["limit"]
        assert row["predicted_kl_nats"] <= limit
    for earlier, later in itertools.pairwise(rows):
        assert later["bytes_per_token"] >= earlier["bytes_per_token"]
        assert later["bought"]["bytes"] == later["bytes_per_token"] - earlier["bytes_per_token"]
        assert later["bought"]["kl_nats"] == pytest.approx(earlier["predicted_kl_nats"] - later["predicted_kl_nats"])
    # bits and bytes are those of the checkpoint that such a mix would make
    mix = {name: "int8" if place % 2 else "int4-g32" for place, name in enumerate(found.harm) if name != HEAD} | {HEAD: "int8"}
    plan = make_job(gemma3, tmp_path / "x", recipe_of(load_recipe("w4a16-g32"), units, mix, "mixed", "a mix")).plan
    from gemq.quantize.pareto import _costs

    costs = _costs(units, DEFAULT_CANDIDATES)
    assert costs.token_bytes(mix) == plan.bytes_per_token()[1]
    assert costs.bits(mix) == pytest.approx(plan.bits_per_weight(), rel=2e-3)  # but for each weight's stored shape


def test_builds_are_told_apart_from_predictions_and_correct_them(known):
    units, found = known
    trials = {"data; decode": [trial(0.03, 0.02), trial(0.012, 0.01)], "other; decode": [trial(0.05, 0.02)]}
    made = pareto(units, found, DEFAULT_CANDIDATES, [], trials)
    assert [one["ratio"] for one in made["measured"]] == pytest.approx([math.exp(0.03), math.exp(0.012), math.exp(0.05)])
    assert made["measured"][0]["predicted_ratio"] == pytest.approx(math.exp(0.02))
    assert made["measured"][0]["held_out_ratio"] == pytest.approx(math.exp(0.03))
    assert made["correction"]["ppl"] == pytest.approx(1.5)
    for row in made["budgets"]:
        assert 1.5 * row["predicted_kl_nats"] <= math.log1p(row["limit"])
        assert row["predicted_ratio"] == pytest.approx(math.exp(1.5 * row["predicted_kl_nats"]))
    assert pareto(units, found, DEFAULT_CANDIDATES, [], {})["correction"] == {"ppl": None, "kl": None}


def test_the_map_has_every_unit_at_its_coarsest(known):
    units, found = known
    (entry,) = sensitivity_map(units, found, DEFAULT_CANDIDATES)["checkpoints"]
    assert len(entry["units"]) == len(found.harm)
    assert all(unit["error"] == max(found.harm[unit["unit"]].values()) for unit in entry["units"])


def test_the_command_reads_what_a_search_left_behind(gemma3, tmp_path, capfd):
    state, out = tmp_path / "state", tmp_path / "out"
    state.mkdir()
    _, found = made_up(gemma3, state / "sensitivities-made-up.json")
    identity = {"sensitivities": short_digest(found.identity), "judged on": {"sha256": "0", "records": 8}}
    Trials.open(SearchState.open(state), identity).add(trial(0.03, 0.02))
    arguments = ["pareto", str(gemma3), "--recipe", "w4a16-g32", "--search-state", str(state), "--ppl-budget", "4%", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--output", str(out), "--json"])
    assert result.exception is None, result.exception
    printed = json.loads(result.stdout)
    assert len(printed["pareto"]["measured"]) == 1
    assert printed["pareto"]["reference_ppl"] == 20.0
    assert {path.name for path in out.iterdir()} == {"report.html", "report.json", "pareto.png", "pareto.json", "sensitivities.png",
                                                     "sensitivities.json"}  # fmt: skip
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "Predicted: the cheapest mix" in page
    assert "Measured: every build" in page
    assert "+4.00% (asked for)" in page
    assert json.loads((out / "pareto.json").read_text()) == printed["pareto"]
    for more, word in ((["--output", str(out)], "exists"), (["--ppl-budget", "0%"], "more than 0"), (["--data", "none.txt"], "not a file"),
                       (["--candidates", "int3"], "int3"), (["--recipe", "none"], "none")):  # fmt: skip
        error = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "other"), *more]).exception
        assert isinstance(error, UsageError), (more, error)
        assert word in error.message + error.next_step, error.message
    assert not (tmp_path / "other").exists()


def test_where_nothing_is_measured_yet_it_is_measured_as_a_search_does(gemma3, tmp_path, monkeypatch):
    from gemq.calibration.sets import CalibrationSet
    from gemq.quantize import search_run

    asked = []

    def fake(source, reader, plan, windows, candidates, *, path, device, identity):
        asked.append((len(windows), candidates))
        return made_up(gemma3, path)[1]

    monkeypatch.setattr(search_run, "measure", fake)
    monkeypatch.setattr("gemq.calibration.sets.load_calibration",
                        lambda name, **options: CalibrationSet.of([[2, 3 + number] for number in range(options["samples"])], {}))  # fmt: skip
    result = CliRunner().invoke(app, ["pareto", str(gemma3), "--recipe", "w4a16-g32", "--search-state", str(tmp_path / "s"), "--samples", "5",
                                      "--device", "cpu", "--output", str(tmp_path / "out")])  # fmt: skip
    assert result.exception is None, result.exception
    assert asked == [(5, DEFAULT_CANDIDATES)]
    assert "0 builds measured, the rest is predicted" in result.output


@pytest.mark.parametrize("place", ["state", "output"])
def test_a_place_that_can_t_be_written_to_is_a_usage_error_before_anything_is_measured(gemma3, tmp_path, monkeypatch, place):
    monkeypatch.setattr("gemq.calibration.sets.load_calibration", lambda name, **options: pytest.fail("calibrated before the check"))
    closed = tmp_path / "closed"
    closed.mkdir()
    real = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != closed and real(path, mode))  # root may write anywhere
    state, out = (closed / "s", tmp_path / "out") if place == "state" else (tmp_path / "s", closed / "out")
    error = CliRunner().invoke(app, ["pareto", str(gemma3), "--search-state", str(state), "--output", str(out), "--device", "cpu"]).exception
    assert isinstance(error, UsageError)
    assert str(closed) in error.message
    assert not list(closed.iterdir())


def test_a_directory_that_the_system_refuses_to_make_is_a_usage_error(gemma3, tmp_path, monkeypatch):
    from gemq.calibration.sets import CalibrationSet

    monkeypatch.setattr("gemq.calibration.sets.load_calibration", lambda name, **options: CalibrationSet.of([[2, 3]] * 8, {}))
    taken = tmp_path / "taken"
    taken.write_text("a file of the user's")
    arguments = ["pareto", str(gemma3), "--output", str(tmp_path / "out"), "--device", "cpu", "--search-state"]
    assert isinstance(CliRunner().invoke(app, [*arguments, str(taken)]).exception, UsageError)
    assert isinstance(CliRunner().invoke(app, [*arguments, str(taken / "inside")]).exception, UsageError)
    real = os.mkdir

    def refuse(path, *more, **options):
        if Path(path).name == "refused":
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *more, **options)

    monkeypatch.setattr(os, "mkdir", refuse)
    error = CliRunner().invoke(app, [*arguments, str(tmp_path / "refused")]).exception
    assert isinstance(error, UsageError)
    assert "Permission denied" in error.message
    assert taken.read_text() == "a file of the user's"


def test_candidates_that_are_measured_are_used_and_others_are_not_made_up(gemma3, tmp_path):
    state = tmp_path / "state"
    state.mkdir()
    made_up(gemma3, state / "sensitivities-made-up.json")
    source = Source(gemma3.name, "local", gemma3, None)
    recipe = load_recipe("w4a16-g32")
    named = stored_sensitivities(source, recipe, SearchState.open(state), None, head=True)[2]
    assert named == DEFAULT_CANDIDATES
    assert stored_sensitivities(source, recipe, SearchState.open(state), ("int4-g128", "int8", KEEP), head=True)[2] == ("int4-g128", "int8", KEEP)
    # a coarsest scheme that was never put into the model, and one that was never tried
    assert stored_sensitivities(source, recipe, SearchState.open(state), ("fp8", KEEP), head=True) is None
    other = recipe.model_copy(update={"gptq": recipe.gptq.model_copy(update={"dampening": 0.5})})
    assert stored_sensitivities(source, other, SearchState.open(state), None, head=True) is None
