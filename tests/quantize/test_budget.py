"""The search for the fastest checkpoint within a budget, on a small Gemma 3, and the arithmetic around it."""

from __future__ import annotations

import json
import math

import pytest
import torch
import yaml
from tests.quantize.small_jobs import make_job, windows

from gemq.errors import OverBudgetError, UsageError
from gemq.eval.kl import evaluate_kl
from gemq.eval.ppl import RecordScore, evaluate_ppl
from gemq.eval.statistics import cluster_mean, upper_bound
from gemq.eval.windows import write_records
from gemq.quantize import explore as exploring
from gemq.quantize.budget import Budget, Spent, judged_and_held_out
from gemq.quantize.decisions import (
    DEFAULT_CANDIDATES,
    HEAD,
    KEEP,
    decides_on_head,
    decisions_of,
    options_of,
    parse_candidates,
    refusals,
    require_useful,
    search_plan,
)  # fmt: skip
from gemq.quantize.looks import confidence_of
from gemq.quantize.measurements import Measured, Measurements
from gemq.quantize.overlap import require_disjoint
from gemq.quantize.search import Search, recipe_of
from gemq.quantize.search_state import SearchState
from gemq.quantize.sensitivity import Split, measure
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.trials import Trials
from gemq.quantize.verify import verify_against_source
from gemq.recipes.model import load_recipe
from gemq.source import file_hashes


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
    write_records(data, windows(512, 8, 32, seed=9))
    return job, units, found, data


def test_sensitivities_fall_with_every_finer_scheme_and_are_real_kl(measured):
    _, units, found, _ = measured
    assert list(found.harm) == [decision.name for decision in decisions_of(units)]
    assert list(found.harm)[-1] == HEAD
    for name, harms in found.harm.items():
        if name != HEAD:
            assert harms["int4-g128"] >= harms["int4-g32"] > harms["int8"] > harms[KEEP] == 0
    assert found.harm[HEAD].keys() == {"int4-channel", "int8", KEEP}
    assert found.harm[HEAD]["int4-channel"] > 10 * found.harm[HEAD]["int8"] > found.harm[HEAD][KEEP] == 0
    total = sum(harms["int4-g128"] for name, harms in found.harm.items() if name != HEAD)
    assert 1e-3 < total < 1


def test_what_was_measured_is_not_measured_again_and_a_stop_loses_one_unit(measured, gemma3, tmp_path, monkeypatch):
    job, _, found, _ = measured
    path = tmp_path / "s.json"
    added = []
    original = Measurements.add

    def counting(self, unit, measured):
        original(self, unit, measured)
        added.append(unit)
        if len(added) == 6:
            raise KeyboardInterrupt

    def go():
        skeleton, reader = load_skeleton(gemma3)
        plan = search_plan(skeleton, job.plan.recipe)
        return measure(job.source, reader, plan, job.calibration.windows, DEFAULT_CANDIDATES, path=path, device="cpu", identity={})

    monkeypatch.setattr(Measurements, "add", counting)
    with pytest.raises(KeyboardInterrupt):
        go()
    assert len(json.loads(path.read_bytes())["units"]) == 6
    resumed = go()
    assert len(added) == len(found.harm)
    for unit, harms in found.harm.items():
        assert resumed.harm[unit] == pytest.approx(harms, rel=0.05, abs=1e-7)
    go()
    assert len(added) == len(found.harm)


def test_sensitivities_of_something_else_or_damaged_are_measured_again_with_a_warning(tmp_path, capsys):
    path = tmp_path / "s.json"
    Measurements.open(path, {"source": "a"}).add("unit", Measured({"int8": 0.1}))
    assert Measurements.open(path, {"source": "a"}).of("unit").kl == {"int8": 0.1}
    assert not Measurements.open(path, {"source": "b"}).units
    path.write_bytes(b"{")
    assert not Measurements.open(path, {"source": "a"}).units
    assert "measuring again" in capsys.readouterr().err


def open_log(folder, identity=None):
    state = SearchState.open(folder)
    state.make()
    return state, Trials.open(state, identity or {"sensitivities": "s", "judged on": {}})


def make_search(measured, gemma3, folder, budget, candidates=DEFAULT_CANDIDATES, **options):
    _, units, found, data = measured
    state, log = open_log(folder / "state")
    made = make_job(gemma3, folder / "out", "w4a16-g32")

    def judge(directory):
        return evaluate_ppl(str(directory), data, reference=str(gemma3), with_kl=True, dtype="float32", kept=folder / "state" / "kept"), []

    known = tuple(trial.digest for trial in log.all())
    return Search(made, units, found, budget, candidates, "decode", state, log, known, judge, file_hashes(gemma3),
                  {"judged_on": "records.jsonl"}, **options)  # fmt: skip


@pytest.fixture(scope="module")
def won(measured, gemma3, tmp_path_factory):
    """A search that came to its end, and its folder."""
    folder = tmp_path_factory.mktemp("won")
    return make_search(measured, gemma3, folder, Budget("kl", 0.02)).run(), folder


def test_the_winner_meets_the_budget_on_disk_and_costs_less_than_int8(measured, gemma3, tmp_path, won):
    found, _ = won
    again = evaluate_kl(str(found.directory), measured[3], reference=str(gemma3), dtype="float32")
    kept = [record for place, record in enumerate(again.per_record) if place % 4 != 3]
    sums, counts = [record.kl_nats for record in kept], [record.tokens for record in kept]
    bound = upper_bound(sums, counts, confidence_of(found.trial.look), positive=True)
    assert bound > cluster_mean(sums, counts, positive=True).upper_95
    assert bound == pytest.approx(found.trial.judged.kl_upper, rel=1e-3)
    assert bound <= 0.02
    assert found.trial.bits_per_decoder_weight < 8
    assert len(set(found.trial.mix.values())) > 1
    assert not verify_against_source(found.directory, gemma3).differences
    recipe = yaml.safe_load((found.directory / "recipe.yaml").read_text())
    assert recipe["name"] == "w4a16-g32-kl-0.02"
    # the recipe it carries makes the same mix without any search
    plan = make_job(gemma3, tmp_path / "again", str(found.directory / "recipe.yaml")).plan
    assert plan.bits_per_weight() == pytest.approx(found.trial.bits_per_decoder_weight, abs=1e-3)
    assert plan.bytes_per_token()[1] == found.trial.bytes_per_token
    assert (HEAD in plan.quantized_matrices) == (found.trial.mix[HEAD] != KEEP)


def test_the_manifest_and_the_card_tell_what_was_searched_tried_and_rejected(measured, won):
    found, _ = won
    told = json.loads((found.directory / "gemq.json").read_text())["search"]
    assert sum(trial["chosen"] for trial in told["tried"]) == 1
    for trial in told["tried"]:
        assert trial["chosen"] == (trial["why_not"] == "")
        assert trial["met"] == (trial["upper"] <= 0.02)
    assert told["bound"]["looks"] == len(told["tried"])
    assert sorted(trial["look"] for trial in told["tried"]) == list(range(1, len(told["tried"]) + 1))
    assert told["held_out"]["records"] == 2
    chosen = {name: entry["chosen"] for name, entry in told["decisions"].items()}
    assert chosen == found.trial.mix
    unit = told["decisions"]["layers.0.mlp.down_proj"]
    assert unit["considered"]["int8"]["predicted_kl_nats"] == pytest.approx(measured[2].harm["layers.0.mlp.down_proj"]["int8"], rel=1e-4)
    assert unit["considered"]["int8"]["bytes"] > unit["considered"]["int4-g128"]["bytes"]
    card = (found.directory / "README.md").read_text()
    assert "## How the schemes were chosen" in card
    assert all(f"| {trial['mix']} |" in card for trial in told["tried"])
    assert "2 held-out records, which the search did not use" in card


def counted_builds(patch):
    """The mixes that are built from now on."""
    builds, original = [], Search._built

    def counting(self, job, name, mix, predicted, cost):
        builds.append(mix)
        return original(self, job, name, mix, predicted, cost)

    patch.setattr(Search, "_built", counting)
    return builds


@pytest.mark.slow
def test_a_larger_budget_starts_from_what_is_known_and_buys_fewer_bytes(measured, gemma3, won, monkeypatch):
    _, folder = won
    before = len(open_log(folder / "state")[1].all())
    loose = make_search(measured, gemma3, folder, Budget("kl", 0.08))
    (folder / "out").rename(folder / "first")
    builds = counted_builds(monkeypatch)
    found = loose.run()
    assert found.trial.bytes_per_token < won[0].trial.bytes_per_token
    assert len(open_log(folder / "state")[1].all()) == before + len(builds)
    # the first budget again: it goes on from what is known by now, and publishes nothing that costs more than the first winner
    (folder / "out").rename(folder / "second")
    known = [trial.mix for trial in open_log(folder / "state")[1].all()]
    builds.clear()
    again = make_search(measured, gemma3, folder, Budget("kl", 0.02)).run()
    assert again.trial.meets(Budget("kl", 0.02))
    assert again.trial.cost <= won[0].trial.cost
    assert [mix for mix in builds if mix in known] == [again.trial.mix] * (again.trial.mix in known)
    # with no build left to win anything, its winner alone is built and measured again
    (folder / "out").rename(folder / "third")
    builds.clear()
    last = make_search(measured, gemma3, folder, Budget("kl", 0.02)).run()
    assert last.trial.mix == again.trial.mix
    assert builds == [again.trial.mix]


def test_no_mix_good_enough_says_how_near_the_best_came_and_publishes_nothing(measured, gemma3, tmp_path, monkeypatch):
    monkeypatch.setattr(exploring, "allocate", lambda choices, limit: {unit: options[0] for unit, options in choices.items()})
    with pytest.raises(OverBudgetError, match=r"nearest of 1 builds has the bound .* nats at \d\.\d\d bits"):
        make_search(measured, gemma3, tmp_path, Budget("kl", 1e-6)).run()
    assert not (tmp_path / "out").exists()


def test_every_fourth_record_is_held_out_once_there_are_eight():
    def scored(count):
        return [RecordScore(str(place), 10, 20.0 + place, 20.0, 0.1) for place in range(count)]

    class Result:
        def __init__(self, count):
            self.per_record = tuple(scored(count))

    judged, held_out = judged_and_held_out(Result(9))
    assert [record.id for record in held_out] == ["3", "7"]
    assert [record.id for record in judged] == ["0", "1", "2", "4", "5", "6", "8"]
    assert judged_and_held_out(Result(7))[1] == []
    spent = Spent.of(judged)
    assert spent.log_ratio == pytest.approx((0 + 1 + 2 + 4 + 5 + 6 + 8) / 70)
    assert spent.kl == pytest.approx(0.01)
    with pytest.raises(UsageError, match="one record"):
        Spent.of(judged[:1]).of_budget(Budget("kl", 0.1))


def test_records_that_stand_in_the_calibration_set_are_refused():
    fitted, other = windows(512, 4, 64), windows(512, 4, 64, seed=5)
    assert require_disjoint(fitted, other) == 0
    with pytest.raises(UsageError, match="2 of the 4 records"):
        require_disjoint(fitted, [*other[:2], fitted[1][10:], fitted[0]])
    assert 0 < require_disjoint(fitted, [[*other[0], *fitted[0][:20]]]) < 0.5


def test_windows_for_solving_and_for_measuring_are_disjoint():
    given = windows(512, 16, 40)
    split = Split.of([*given[:14], given[0], given[15]])
    assert split.solved_on == tuple(map(tuple, given[:14]))
    assert split.scored_on == (tuple(given[15]),)
    with pytest.raises(UsageError, match="held out"):
        Split.of([given[0]] * 8)
    with pytest.raises(UsageError, match="3 calibration windows"):
        Split.of(given[:3])


def test_a_candidate_that_no_unit_takes_is_refused_with_its_reason(gemma3):
    skeleton, _ = load_skeleton(gemma3)
    gptq = load_recipe("w4a16-g32").model_copy(update={"format": "gptq"})
    units = search_plan(skeleton, gptq)
    with pytest.raises(UsageError, match=r"no unit .* fp8: "):
        require_useful(units, ("fp8", "int8", KEEP))
    require_useful(units, ("int4-g32", "int8", KEEP))
    head = decisions_of(units)[-1]
    assert "weight-only" in refusals(search_plan(skeleton, load_recipe("w4a16")), head, ("fp8", KEEP))["fp8"]


def test_a_tied_head_costs_a_token_its_bytes_and_the_disk_nothing_until_it_is_untied(gemma3):
    skeleton, _ = load_skeleton(gemma3)
    units = search_plan(skeleton, load_recipe("w4a16"))
    options = options_of(units, decisions_of(units)[-1], DEFAULT_CANDIDATES)
    assert options[KEEP].disk_bytes == 0
    assert options[KEEP].token_bytes == 2 * skeleton.text.vocab_size * skeleton.text.hidden_size
    assert options["int8"].disk_bytes == options["int8"].token_bytes > options["int4-channel"].token_bytes
    assert decides_on_head(load_recipe("w4a16"), skeleton)
    assert not decides_on_head(load_recipe("w4a16-fast"), skeleton)
    assert HEAD not in [decision.name for decision in decisions_of(search_plan(skeleton, load_recipe("w4a16"), head=False))]


@pytest.mark.parametrize("kind", ["e4b", "moe"])
def test_a_forward_begun_in_the_middle_gives_what_a_whole_one_gives(kind, tmp_path):
    from tests.models.gemma4 import build

    from gemq.eval.local import LocalCheckpoint
    from gemq.quantize.held_out import HeldOut

    directory = build(kind, tmp_path / kind)
    skeleton, _ = load_skeleton(directory)
    decisions = [decision for decision in decisions_of(search_plan(skeleton, load_recipe("w4a16-g32"))) if not decision.is_head]
    chosen = [decision for decision in decisions if decision.layer in (None, 1, 5, 7)]
    generator = torch.Generator().manual_seed(0)
    with LocalCheckpoint.open(str(directory)).loaded("cpu", "float32") as loaded:
        model, whole = HeldOut(loaded, windows(512, 3, 24)), HeldOut(loaded, windows(512, 3, 24))
        assert model.partial
        whole.partial = False
        for decision in chosen:
            weights = [torch.randn(matrix.experts or 1, matrix.out_features, matrix.in_features, generator=generator).mul_(0.05)
                       for matrix in decision.matrices]  # fmt: skip
            weights = [weight if matrix.experts else weight[0] for matrix, weight in zip(decision.matrices, weights, strict=True)]
            expected = whole.kl(decision, weights)
            assert expected > 0
            assert model.kl(decision, weights) == pytest.approx(expected, rel=1e-4), decision.name
        assert model.tokens < 0.7 * whole.tokens


@pytest.mark.slow
def test_all_experts_of_a_layer_are_one_decision_and_are_measured_together(tmp_path):
    from tests.models.gemma4 import build

    directory = build("moe", tmp_path / "moe")
    job = make_job(directory, tmp_path / "out", "w4a16-g32")
    skeleton, reader = load_skeleton(directory)
    units = search_plan(skeleton, job.plan.recipe, head=False)
    experts = [decision for decision in decisions_of(units) if decision.is_experts]
    assert [decision.name for decision in experts] == [f"layers.{layer}.experts" for layer in range(8)]
    assert {len(decision.matrices) for decision in experts} == {2}
    candidates = ("int4-g128", "int4-g32", "int8", KEEP)
    options = options_of(units, experts[0], candidates)
    assert "int4-g128" not in options  # 192 inputs
    assert "192 inputs" in refusals(units, experts[0], candidates)["int4-g128"]
    assert options[KEEP].token_bytes == options[KEEP].disk_bytes / 2  # two of four experts are read
    few = [window[:16] for window in job.calibration.windows[:4]]
    found = measure(job.source, reader, units, few, ("int4-g32", "int8", KEEP), path=tmp_path / "s.json", device="cpu", identity={})
    for decision in experts:
        harms = found.harm[decision.name]
        assert harms["int4-g32"] > harms["int8"] > harms[KEEP] == 0
    mix = {decision.name: "int4-g32" if decision.is_experts else "int8" for decision in decisions_of(units)}
    recipe = recipe_of(job.plan.recipe, units, mix, "mixed", "a mix")
    plan = make_job(directory, tmp_path / "mixed", recipe).plan
    assert {unit.scheme.label() for unit in plan.units if unit.matrices[0].experts} == {"int4 g32"}
    assert {unit.scheme.label() for unit in plan.units if not unit.matrices[0].experts} == {"int8 channel"}
