"""Fitting scales and integers to each other: never worse, and what is checked against brute force."""

from __future__ import annotations

import pytest
import torch
from tests.quantize.problems import FP8, INT4, INT8, hessian_of, problem

from gemq.quantize import gptq, rtn
from gemq.quantize.refine import refine
from gemq.quantize.scales import integer_range, restore
from gemq.recipes.model import Gptq, WeightScheme


def objective(
    weight: torch.Tensor, stored: torch.Tensor, scales: torch.Tensor, moments: torch.Tensor, scheme: WeightScheme
) -> torch.Tensor:
    """Each row's share of tr(D H' D^T), damped by a hundredth, in float64."""
    difference = (weight - restore(stored, scales, scheme)).double()
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(moments.shape[0], dtype=torch.float64)
    return ((difference @ damped) * difference).sum(1)


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=lambda scheme: scheme.label())
@pytest.mark.parametrize("start", ["gptq", "nearest"])
def test_every_round_lowers_the_objective_and_no_row_gets_worse(scheme, start):
    weight, inputs = problem()
    moments = hessian_of(inputs)
    stored, scales = (
        rtn.round_to_nearest(weight, scheme)
        if start == "nearest"
        else gptq.solve(weight, gptq.factorize(moments, Gptq(refine=0), "test"), scheme)
    )
    before = objective(weight, stored, scales, moments, scheme)
    for rounds in (1, 3):
        after = objective(weight, *refine(weight, stored, scales, moments, scheme, dampening=0.01, rounds=rounds), moments, scheme)
        assert (after <= before * (1 + 1e-4)).all()
        assert after.sum() < before.sum()
        before = after


def test_one_round_is_the_exact_minimum_over_scales_then_over_each_integer_in_turn():
    weight, inputs = problem(out=6, size=64)
    moments = hessian_of(inputs)
    start, scales = gptq.solve(weight, gptq.factorize(moments, Gptq(refine=0), "test"), INT4)
    stored, fitted = refine(weight, start, scales, moments, INT4, dampening=0.01)
    low, high = integer_range(INT4)
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(64, dtype=torch.float64)
    for row in range(6):
        basis = torch.zeros(64, 2, dtype=torch.float64)
        basis[:32, 0], basis[32:, 1] = start[row, :32].double(), start[row, 32:].double()
        best = torch.linalg.solve(basis.T @ damped @ basis, basis.T @ damped @ weight[row].double())
        torch.testing.assert_close(fitted[row].double(), best, rtol=2**-8, atol=0)
        expected = start[row].double().clone()
        for column in range(64):
            costs = []
            for value in range(low, high + 1):
                tried = expected.clone()
                tried[column] = value
                difference = weight[row].double() - tried * fitted[row].double().repeat_interleave(32)
                costs.append((difference @ damped @ difference).item())
            expected[column] = low + costs.index(min(costs))
        assert (stored[row].double() == expected).float().mean() > 0.98  # ties in float32


@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
def test_blocks_do_not_change_the_result(block_size):
    weight, inputs = problem()
    moments = hessian_of(inputs)
    stored, scales = rtn.round_to_nearest(weight, INT4)
    expected = refine(weight, stored, scales, moments, INT4, dampening=0.01)
    got = refine(weight, stored, scales, moments, INT4, dampening=0.01, block_size=block_size)
    assert torch.equal(got[1], expected[1])
    assert (got[0] == expected[0]).float().mean() > 0.99


def test_a_group_of_zeros_keeps_its_scale_and_stays_zero():
    weight, inputs = problem()
    weight[2, :32] = 0
    weight[4] = 0
    moments = hessian_of(inputs)
    stored, scales = rtn.round_to_nearest(weight, INT4)
    got, fitted = refine(weight, stored, scales, moments, INT4, dampening=0.01, rounds=2)
    assert torch.isfinite(fitted).all()
    assert torch.equal(fitted[4], scales[4])
    assert not got[4].any()


def test_fp8_comes_back_as_it_was():
    weight, inputs = problem()
    stored, scales = rtn.round_to_nearest(weight, FP8)
    got, fitted = refine(weight, stored, scales, hessian_of(inputs), FP8, dampening=0.01)
    assert got is stored
    assert fitted is scales
