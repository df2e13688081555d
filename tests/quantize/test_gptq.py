"""The solver: what it minimizes, against which references, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from tests.quantize.problems import FP8, INT4, INT4_MINMAX, INT8, hessian_of, problem

from gemq.errors import IntegrityError
from gemq.quantize import gptq, rtn
from gemq.quantize.scales import find_scales, integer_range, restore, round_to_scales
from gemq.recipes.model import Gptq, WeightScheme


def plain_gptq(weight: torch.Tensor, hessian: torch.Tensor, scales: torch.Tensor, scheme: WeightScheme, options: Gptq) -> torch.Tensor:
    """Algorithm 1 of the paper column by column in float64: the inverse Hessian's Cholesky factor, no blocks, no strips."""
    weight, hessian = weight.double().clone(), hessian.double().clone()
    hessian.diagonal().add_(options.dampening * hessian.diagonal().mean())
    order = (
        torch.argsort(torch.diagonal(hessian), descending=True, stable=True)
        if options.actorder == "static"
        else torch.arange(weight.shape[1])
    )
    weight, hessian = weight[:, order], hessian[order][:, order]
    factor = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True)
    group = weight.shape[1] // scales.shape[1]
    low, high = integer_range(scheme)
    stored = torch.zeros_like(weight)
    for column in range(weight.shape[1]):
        scale = scales[:, order[column] // group].double()
        stored[:, column] = (weight[:, column] / scale).round().clamp(low, high)
        error = (weight[:, column] - stored[:, column] * scale) / factor[column, column]
        weight[:, column:] -= error[:, None] * factor[column, column:]
    return stored[:, torch.argsort(order)]


def test_hessian_is_the_mean_outer_product_however_it_is_fed():
    _, inputs = problem()
    expected = inputs.double().T @ inputs.double() / inputs.shape[0]
    torch.testing.assert_close(hessian_of(inputs).double(), expected, rtol=1e-4, atol=1e-3)


def test_inverse_factor_is_the_cholesky_factor_of_the_damped_inverse():
    _, inputs = problem()
    hessian = hessian_of(inputs)
    factor = gptq.inverse_factor(hessian, 0.01, "test").double()
    damped = hessian.double() + 0.01 * hessian.diagonal().mean() * torch.eye(hessian.shape[0])
    torch.testing.assert_close(factor.T @ factor @ damped, torch.eye(hessian.shape[0], dtype=torch.float64), rtol=0, atol=1e-3)
    assert torch.equal(factor, factor.triu())


@pytest.mark.parametrize("actorder", ["static", "none"])
@pytest.mark.parametrize("block_size", [1, 7, 64, 1000])
def test_blocks_and_strips_give_what_the_paper_gives_column_by_column(actorder, block_size):
    weight, inputs = problem()
    hessian, options = hessian_of(inputs), Gptq(actorder=actorder, block_size=block_size, refine=0)
    stored, scales = gptq.solve(weight, gptq.factorize(hessian, options, "test"), INT4_MINMAX)
    expected = plain_gptq(weight, hessian, scales, INT4_MINMAX, options)
    # a rounding tie may fall the other way in float32, and then changes what follows in that row
    agreeing_rows = (stored.double() == expected).all(1).float().mean()
    assert agreeing_rows > 0.9


@pytest.mark.parametrize("scheme", [INT4, INT4_MINMAX, INT8, FP8], ids=lambda scheme: scheme.label() + scheme.observer)
def test_gptq_never_does_worse_than_rounding_to_nearest(scheme):
    weight, inputs = problem()
    hessian = hessian_of(inputs)
    nearest = gptq.output_error(weight, *rtn.round_to_nearest(weight, scheme), scheme, hessian)
    solved = gptq.output_error(weight, *gptq.solve(weight, gptq.factorize(hessian, Gptq(), "test"), scheme), scheme, hessian)
    assert solved < 0.8 * nearest


def test_output_error_is_the_relative_error_of_the_outputs():
    weight, inputs = problem()
    stored, scales = rtn.round_to_nearest(weight, INT4)
    restored = restore(stored, scales, INT4)
    direct = ((inputs @ (weight - restored).T).square().sum() / (inputs @ weight.T).square().sum()).item()
    assert gptq.output_error(weight, stored, scales, INT4, hessian_of(inputs)) == pytest.approx(direct, rel=1e-3)


def test_rows_are_independent_so_that_modules_may_be_stacked():
    weight, inputs = problem(out=40)
    factorization = gptq.factorize(hessian_of(inputs), Gptq(), "test")
    together, scales = gptq.solve(weight, factorization, INT4)
    apart = [gptq.solve(part, factorization, INT4) for part in weight.split([16, 8, 16])]
    assert torch.equal(scales, torch.cat([part[1] for part in apart]))
    assert (together == torch.cat([part[0] for part in apart])).float().mean() > 0.999


def test_inputs_that_never_fire_are_rounded_to_nearest_and_not_zeroed():
    weight, inputs = problem()
    inputs[:, 5] = 0
    stored, scales = gptq.solve(weight, gptq.factorize(hessian_of(inputs), Gptq(), "test"), INT8)
    assert torch.equal(stored[:, 5], round_to_scales(weight, scales, INT8)[:, 5])


def test_damping_is_raised_with_a_warning_when_the_factorization_fails(capsys):
    hessian = torch.diag(torch.tensor([1.0, 1.0, -0.5, 1.0]))
    factor = gptq.inverse_factor(hessian, 0.01, "layers.0.broken")
    assert torch.isfinite(factor).all()
    assert "layers.0.broken" in (said := capsys.readouterr().err)
    assert "damping raised to 1" in said


def test_a_hessian_beyond_help_is_an_error_that_names_the_unit():
    with pytest.raises(IntegrityError, match=r"layers\.7\.worse"):
        gptq.inverse_factor(torch.diag(torch.tensor([1.0, -50.0])), 0.01, "layers.7.worse")


def test_inputs_that_are_not_finite_or_absent_are_errors_that_name_the_unit():
    hessian = gptq.Hessian(4)
    with pytest.raises(IntegrityError, match=r"no calibration token reached layers\.1\.x"):
        hessian.mean("layers.1.x")
    hessian.add(torch.tensor([[1.0, float("inf"), 0.0, 0.0]]))
    with pytest.raises(IntegrityError, match=r"inputs of layers\.1\.x are not finite"):
        hessian.mean("layers.1.x")


def test_scales_are_exact_in_bfloat16_and_never_zero():
    weight, _ = problem()
    weight[3] = 0
    for scheme in (INT4, INT4_MINMAX, INT8, FP8):
        scales = find_scales(weight, scheme)
        assert torch.equal(scales, scales.to(torch.bfloat16).float())
        assert (scales != 0).all()
        assert torch.isfinite(restore(round_to_scales(weight, scales, scheme), scales, scheme)).all()


def test_fitted_scales_never_round_worse_than_minmax_under_the_given_importance():
    weight, inputs = problem(out=200)
    importance = inputs.square().mean(0)
    errors = []
    for scheme in (INT4_MINMAX, INT4):
        scales = find_scales(weight, scheme, importance)
        errors.append(((restore(round_to_scales(weight, scales, scheme), scales, scheme) - weight).square() * importance).sum(1))
    assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert errors[1].sum() < 0.9 * errors[0].sum()


def test_int4_weights_on_the_grid_come_back_exactly():
    integers = torch.randint(-8, 8, (16, 64))
    integers[:, ::32], integers[:, 1::32] = -8, 7
    weight = integers * 0.25
    for scheme in (INT4,):
        stored, scales = rtn.round_to_nearest(weight.float(), scheme)
        assert torch.equal(restore(stored, scales, scheme), weight)


def test_fp8_saturates_and_keeps_its_largest_number():
    weight = torch.tensor([[448.0, 1.0, -448.0, 0.5]])
    stored, scales = rtn.round_to_nearest(weight, FP8)
    assert torch.equal(restore(stored, scales, FP8), weight)
