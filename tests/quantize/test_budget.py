"""The search for the fastest checkpoint within a budget, on a small Gemma 3, and the arithmetic around it."""

from __future__ import annotations

import json
import math

import pytest
import yaml
from tests.quantize.small_jobs import make_job

from gemq.errors import OverBudgetError, UsageError
from gemq.eval.kl import evaluate_kl
from gemq.eval.ppl import evaluate_ppl
from gemq.eval.windows import write_records
from gemq.quantize import budget as budgets
from gemq.quantize.budget import Budget, search
from gemq.quantize.sensitivity import DEFAULT_CANDIDATES, KEEP, Sensitivities, measure, parse_candidates, search_plan
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import load_recipe


@pytest.mark.parametrize(
    ("ppl", "kl", "nats"), [("5%", None, math.log(1.05)), ("0.05", None, math.log(1.05)), (None, 0.02, 0.02), ("100%", None, math.log(2))]
)
def test_budgets_are_nats(ppl, kl, nats):
    assert Budget.parse(ppl, kl).nats == pytest.approx(nats)


@pytest.mark.parametrize(("ppl", "kl"), [("0%", None), ("-5%", None), ("five", None), ("nan", None), ("500%", None), (None, 0.0), (None, -1.0),
                                         (None, float("inf")), ("5%", 0.1)])  # fmt: skip
def test_what_is_no_budget_is_refused(ppl, kl):
    with pytest.raises(UsageError):
        Budget.parse(ppl, kl)


@pytest.mark.parametrize("text", ["int3", "int4-g128,gguf", "", "keep", " , "])
def test_candidates_that_no_kernel_takes_are_refused(text):
    with pytest.raises(UsageError):
        parse_candidates(text)


def test_the_kept_weight_is_always_a_candidate():
    assert parse_candidates("int8, int4-g32") == ("int8", "int4-g32", KEEP)


@pytest.fixture(scope="module")
def measured(gemma3, tmp_path_factory):
    """A job on the small model with its sensitivities, and records to hold budgets to."""
    folder = tmp_path_factory.mktemp("search")
    job = make_job(gemma3, folder / "unused", "w4a16-g32")
    skeleton, reader = load_skeleton(gemma3)
    units = search_plan(skeleton, job.plan.recipe)
    found = measure(job.source, reader, units, job.calibration.windows, DEFAULT_CANDIDATES, path=folder / "s.json", device="cpu", identity={})
    data = folder / "records.jsonl"
    write_records(data, job.calibration.windows[:6])
    return job, units, found, data


def test_sensitivities_fall_with_every_finer_scheme_and_are_real_kl(measured):
    _, units, found, _ = measured
    assert found.harm.keys() == {unit.name for unit in units.units}
    for harms in found.harm.values():
        assert harms["int4-g128"] >= harms["int4-g32"] > harms["int8"] > harms[KEEP] == 0
    total = sum(harms["int4-g128"] for harms in found.harm.values())
    assert 1e-3 < total < 1


def test_what_was_measured_is_not_measured_again_and_a_stop_loses_one_unit(measured, gemma3, tmp_path, monkeypatch):
    job, _, found, _ = measured
    path = tmp_path / "s.json"
    added = []
    original = Sensitivities.add

    def counting(self, unit, harm, error):
        original(self, unit, harm, error)
        added.append(unit)
        if len(added) == 6:
            raise KeyboardInterrupt

    def go():
        skeleton, reader = load_skeleton(gemma3)
        plan = search_plan(skeleton, job.plan.recipe)
        return measure(job.source, reader, plan, job.calibration.windows, DEFAULT_CANDIDATES, path=path, device="cpu", identity={})

    monkeypatch.setattr(Sensitivities, "add", counting)
    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(json.loads(path.read_bytes())["harm"]) == 6
    resumed = go()
    assert len(added) == len(found.harm)
    for unit, harms in found.harm.items():
        assert resumed.harm[unit] == pytest.approx(harms, rel=0.05, abs=1e-7)
    go()
    assert len(added) == len(found.harm)


def test_sensitivities_of_something_else_or_damaged_are_measured_anew_with_a_word(tmp_path, capsys):
    path = tmp_path / "s.json"
    Sensitivities.open(path, {"source": "a"}).add("unit", {KEEP: 0.0}, {KEEP: 0.0})
    assert Sensitivities.open(path, {"source": "a"}).harm
    assert not Sensitivities.open(path, {"source": "b"}).harm
    path.write_bytes(b"{")
    assert not Sensitivities.open(path, {"source": "a"}).harm
    assert "measuring again" in capsys.readouterr().err


def run(measured, gemma3, tmp_path, budget, **options):
    _, units, found, data = measured
    made = make_job(gemma3, tmp_path / "out", "w4a16-g32")

    def measure_build(directory):
        return evaluate_ppl(str(directory), data, reference=str(gemma3), with_kl=True, dtype="float32"), []

    return search(made, units, found, budget, candidates=DEFAULT_CANDIDATES, objective="decode", state=tmp_path / "state",
                  measure=measure_build, data_identity="records", **options)  # fmt: skip


def test_the_winner_meets_the_budget_on_disk_and_costs_less_than_int8(measured, gemma3, tmp_path):
    (tmp_path / "state").mkdir()
    budget = Budget("kl", 0.02)
    won = run(measured, gemma3, tmp_path, budget)
    again = evaluate_kl(str(won.directory), measured[3], reference=str(gemma3), dtype="float32")
    assert again.kl_nats.upper_95 == pytest.approx(won.trial.upper, rel=1e-3)
    assert again.kl_nats.upper_95 <= 0.02
    assert won.trial.bits_per_decoder_weight < 8
    assert len(set(won.trial.mix.values())) > 1
    assert not verify_against_source(won.directory, gemma3).differences
    manifest = json.loads((won.directory / "gemq.json").read_text())
    assert manifest["search"]["tried"]
    assert sum(trial["chosen"] for trial in manifest["search"]["tried"]) == 1
    assert manifest["search"]["harm"] == measured[2].harm
    recipe = yaml.safe_load((won.directory / "recipe.yaml").read_text())
    assert recipe["name"] == "w4a16-g32-kl-0.02"
    # the recipe it carries makes the same mix without any search
    assert make_job(gemma3, tmp_path / "again", str(won.directory / "recipe.yaml")).plan.bits_per_weight() == pytest.approx(
        won.trial.bits_per_decoder_weight, abs=1e-3
    )


def test_a_larger_budget_uses_what_was_measured_and_buys_fewer_bits(measured, gemma3, tmp_path):
    for folder in ("tight", "loose"):
        (tmp_path / folder / "state").mkdir(parents=True)
    tight = run(measured, gemma3, tmp_path / "tight", Budget("kl", 0.005))
    loose = run(measured, gemma3, tmp_path / "loose", Budget("kl", 0.05))
    assert loose.trial.bits_per_decoder_weight < tight.trial.bits_per_decoder_weight


def test_no_mix_good_enough_says_how_near_the_best_came_and_publishes_nothing(measured, gemma3, tmp_path, monkeypatch):
    (tmp_path / "state").mkdir()
    monkeypatch.setattr(budgets, "allocate", lambda choices, limit: {unit: options[0] for unit, options in choices.items()})
    with pytest.raises(OverBudgetError, match=r"nearest of 1 builds has the bound .* nats at \d\.\d\d bits"):
        run(measured, gemma3, tmp_path, Budget("kl", 1e-6))
    assert not (tmp_path / "out").exists()


def test_mixtures_of_experts_are_refused_with_the_reason(tmp_path):
    from tests.models.gemma4 import build

    skeleton, _ = load_skeleton(build("moe", tmp_path / "moe"))
    with pytest.raises(UsageError, match="mixtures of experts"):
        search_plan(skeleton, load_recipe("w4a16-g32"))
