"""The arenas' formulas against numbers worked out by hand (with the intermediate steps written down) and the edges of every gate."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gemq.errors import UsageError
from gemq.eval import scores

BF16: dict[str, Any] = {
    "memory_gains": [1.0] * 3, "speed_gains": [1.0] * 3, "length_drift": 0.0, "mean_drop_points": 0.0,
    "drop_bounds_points": {"gsm8k": 0.0}, "kl_nats": 0.0,
}  # fmt: skip


def test_bf16_scores_one() -> None:
    verdict = scores.judge_lowbarena(**BF16)
    assert verdict.score == 1.0
    assert verdict.valid


def test_a_worked_case() -> None:
    # m = 2.25, s = 1.44, L = 0.05: E = sqrt(3.24 / 1.05) = sqrt(3.0857142857) = 1.7566201313
    assert scores.efficiency(2.25, 1.44, 0.05) == pytest.approx(1.7566201313, abs=1e-9)
    # drop 1.5 points, KL 0.05: D = 1.185 + 0.4494 = 1.6344; exp(-0.16344) = 0.849217
    assert scores.quality_drift(1.5, 0.05) == pytest.approx(1.6344, abs=1e-12)
    assert scores.lowb_score(2.25, 1.44, 0.05, 1.5, 0.05) == pytest.approx(1.7566201313 * 0.8492170, rel=1e-6)


def test_shorter_answers_and_better_accuracy_earn_nothing() -> None:
    assert scores.efficiency(4.0, 1.0, -0.09) == 2.0
    assert scores.lowb_score(4.0, 1.0, 0.0, -3.0, 0.0) == 2.0


def test_gains_are_geometric_means() -> None:
    verdict = scores.judge_lowbarena(**BF16 | {"memory_gains": [2.0, 4.0, 8.0], "speed_gains": [1.0, 1.0, 1.0]})
    assert verdict.parts["memory_gain"] == pytest.approx(4.0)
    assert verdict.score == pytest.approx(2.0)


def test_the_speed_gate() -> None:
    # 1.645 * 0.05 / 1.7320508 = 0.04748705
    assert scores.speed_bound([1.0, 1.0, 1.0]) == pytest.approx(0.95251295, abs=1e-7)
    assert scores.judge_lowbarena(**BF16 | {"speed_gains": [0.9975] * 3}).valid
    slow = scores.judge_lowbarena(**BF16 | {"speed_gains": [0.9974] * 3})
    assert not slow.valid
    assert slow.score == pytest.approx(0.1 * math.sqrt(0.9974))


@pytest.mark.parametrize(("change", "kept"), [
    ({"drop_bounds_points": {"gsm8k": 5.0}}, True), ({"drop_bounds_points": {"gsm8k": 0.0, "mmlu": 5.001}}, False),
    ({"drop_bounds_points": {"gsm8k": None}}, False), ({"length_drift": 0.1}, True), ({"length_drift": -0.1001}, False),
])  # fmt: skip
def test_a_failed_gate_keeps_a_tenth(change: dict[str, Any], kept: bool) -> None:
    verdict = scores.judge_lowbarena(**BF16 | change)
    assert verdict.valid == kept
    whole = verdict.parts["score_before_gates"]
    assert verdict.score == pytest.approx(whole if kept else 0.1 * whole)


@pytest.mark.parametrize("change", [{"kl_nats": 0.1501}, {"kl_nats": None}, {"kl_nats": math.nan}, {"contract_kept": False}])
def test_what_scores_nothing(change: dict[str, Any]) -> None:
    verdict = scores.judge_lowbarena(**BF16 | change)
    assert verdict.score == 0.0
    assert not verdict.valid


def test_kl_at_its_limit_counts() -> None:
    # D = 0.21 * 42.8 * 0.15 = 1.3482; exp(-0.13482) = 0.8738733
    assert scores.judge_lowbarena(**BF16 | {"kl_nats": 0.15}).score == pytest.approx(0.8738733, abs=1e-6)


def test_the_boards_cost() -> None:
    assert scores.board_score(1.5, 0.6) == pytest.approx(1.5 * 0.9940180, abs=1e-6)


def test_ratios_that_have_no_mean() -> None:
    for bad in ([], [1.0, 0.0], [1.0, math.nan], [1.0, -1.0]):
        with pytest.raises(UsageError):
            scores.geometric_mean(bad)
    with pytest.raises(UsageError):
        scores.judge_lowbarena(**BF16 | {"drop_bounds_points": {}})


EG: dict[str, Any] = {"tps": 100.0, "ppl": 2.4, "reference_ppl": 2.302, "completed": 128, "requests": 128, "greedy_identical": True}


def test_efficient_gemma_scores_tps() -> None:
    # 2.302 * 1.05 = 2.4171
    assert scores.ppl_cap(2.302) == pytest.approx(2.4171)
    verdict = scores.judge_efficient_gemma(**EG)
    assert (verdict.score, verdict.valid) == (100.0, True)
    gate = next(gate for gate in verdict.gates if gate.name == "PPL")
    assert gate.margin == pytest.approx(0.0171)


@pytest.mark.parametrize("change", [
    {"ppl": 2.4172}, {"ppl": None}, {"completed": 127}, {"greedy_identical": False}, {"greedy_identical": None}, {"contract_kept": False},
    {"reported_tps": 105.3},
])  # fmt: skip
def test_what_efficient_gemma_drops(change: dict[str, Any]) -> None:
    verdict = scores.judge_efficient_gemma(**EG | change)
    assert (verdict.score, verdict.valid) == (0.0, False)
    assert sum(not gate.kept for gate in verdict.gates) == 1


def test_a_rerun_five_percent_slower_is_taken() -> None:
    # 100 / 0.95 = 105.26
    assert scores.judge_efficient_gemma(**EG | {"reported_tps": 105.2}).valid


def test_the_spread_of_runs() -> None:
    # 98, 100, 102: mean 100, s = 2, t(2) = 2.919986; bound 100 - 2.919986 * 2 * sqrt(4/3) = 93.25656
    found = scores.spread([98.0, 100.0, 102.0])
    assert (found.mean, found.deviation, found.lowest, found.highest) == (100.0, 2.0, 98.0, 102.0)
    assert found.lower_95 == pytest.approx(93.25656, abs=1e-4)
    assert scores.spread([7.0]).lower_95 is None
    assert scores.spread([1.0, 100.0]).lower_95 == 0.0  # a rate has no negative bound
    with pytest.raises(UsageError):
        scores.spread([])


def test_the_bound_covers_one_more_run() -> None:
    import random

    rng = random.Random(3)
    below = 0
    for _ in range(4000):
        values = [rng.gauss(100, 2) for _ in range(5)]
        bound = scores.spread(values).lower_95
        assert bound is not None
        below += rng.gauss(100, 2) < bound
    assert 0.04 < below / 4000 < 0.06


def test_rows_say_what_was_not_measured() -> None:
    assert scores.at_most("PPL", None, 2.4).row() == ("PPL", "NO", "not measured", "2.4", "not measured")
