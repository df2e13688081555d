"""Degenerate inputs, weights and statistics: never worse than rounding to nearest, never a false error, and the report says what was kept."""

from __future__ import annotations

import json
import math
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.models.gemma4 import build_gemma4_moe
from tests.quantize.problems import FP8, INT4, INT4_MINMAX, INT8, hessian_of, problem
from tests.quantize.small_jobs import run_job
from tests.quantize.test_gpu_walk import interpreted
from tests.quantize.test_tuning import rounded_block
from torch import nn

from gemq.errors import IntegrityError
from gemq.quantize import gptq, rtn, smoothing
from gemq.quantize.experts import solve_experts
from gemq.quantize.gptq import Gptq, Hessian
from gemq.quantize.refine import refine
from gemq.quantize.scales import integer_range, restore, stored_scale, to_fp8
from gemq.quantize.seal import check_seal
from gemq.quantize.squared_errors import measured_error
from gemq.quantize.tuning import Call, Solved, tune
from gemq.recipes.model import Tuning, WeightScheme, parse_recipe

SIZE, OUT, TOKENS = 128, 12, 40
SCHEMES = [
    INT4, INT4_MINMAX, INT8, FP8,
    WeightScheme(num_bits=4, group_size=64, observer="mse"), WeightScheme(num_bits=4, group_size=128, observer="mse"),
    WeightScheme(num_bits=4, strategy="channel", observer="mse"), WeightScheme(num_bits=8, group_size=128),
    WeightScheme(num_bits=8, strategy="channel", observer="mse"),
]  # fmt: skip


def inputs_of(kind: str) -> torch.Tensor:
    x = torch.randn(TOKENS, SIZE)
    one_channel = torch.zeros(TOKENS, SIZE)
    one_channel[:, 7] = 3.0
    dead = x * (torch.rand(SIZE) < 0.3)
    made = {
        "random": x, "zero": x * 0, "constant": torch.ones_like(x), "one constant channel": one_channel, "rank 1": x[:, :1] * x[:1],
        "one token": x[:1], "dead channels": dead, "loud channel": x * torch.where(torch.arange(SIZE) == 5, 1e6, 1.0),
        "denormal": x * 1e-40, "tiny": x * 1e-15, "large": x * 1e10, "huge": x * 1e17, "twice the same": x[:, :1].expand(-1, SIZE) * 2,
    }  # fmt: skip
    return made[kind].contiguous()


def weight_of(kind: str) -> torch.Tensor:
    w = torch.randn(OUT, SIZE)
    rows = w.clone()
    rows[::2] = 0
    groups = w.clone()
    groups[:, :32] = 0
    spike = w.clone()
    spike[:, 3] = 1e8
    sizes = w * torch.logspace(-35, 35, OUT).unsqueeze(1)
    made = {
        "random": w, "zero": w * 0, "constant": torch.full_like(w, 0.3), "zero rows": rows, "zero groups": groups, "denormal": w * 1e-40,
        "tiny": w * 1e-25, "huge": w * 1e30, "the largest": w.sign() * 3.38e38, "spike": spike, "rows of every size": sizes,
    }  # fmt: skip
    return made[kind]


INPUTS = ["random", "zero", "constant", "one constant channel", "rank 1", "one token", "dead channels", "loud channel", "denormal", "tiny", "large",
          "huge", "twice the same"]  # fmt: skip
WEIGHTS = ["random", "zero", "constant", "zero rows", "zero groups", "denormal", "tiny", "huge", "the largest", "spike", "rows of every size"]


def true_error(weight: torch.Tensor, restored: torch.Tensor, moments: torch.Tensor | None) -> float | None:
    """The relative squared error in float64; None where it is 0/0 or lost in the rounding of float32 moments."""
    weight, restored = weight.double(), restored.double()
    h = torch.eye(weight.shape[1], dtype=torch.float64) if moments is None else moments.double()
    signal = ((weight @ h) * weight).sum().item()
    return (((weight - restored) @ h) * (weight - restored)).sum().item() / signal if signal > 0 else None


def rounding_of_the_error(weight: torch.Tensor, restored: torch.Tensor, moments: torch.Tensor | None) -> float:
    """How far float32 may be off: its forward error bound of a quadratic form (Higham, Accuracy and Stability, section 3.1), where terms cancel."""
    weight, restored = weight.double(), restored.double()
    h = torch.eye(weight.shape[1], dtype=torch.float64) if moments is None else moments.double()
    signal = ((weight @ h) * weight).sum().item()
    off, unit = (weight - restored).abs(), torch.finfo(torch.float32).eps
    of_error, of_signal = (((part @ h.abs()) * part).sum().item() for part in (off, weight.abs()))
    terms = of_error + of_signal * (true_error(weight, restored, moments) or 0.0)
    return 4 * SIZE * unit * terms / signal if signal > 0 else 0.0


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(INPUTS), st.sampled_from(WEIGHTS), st.sampled_from(SCHEMES), st.sampled_from([torch.float32, torch.bfloat16]),
    st.builds(Gptq, dampening=st.sampled_from([1e-9, 0.01, 1.0]), actorder=st.sampled_from(["static", "none"]),
              refine=st.sampled_from([0, 1, 3]), asymmetric=st.sampled_from([0.0, 1.0])), st.integers(0, 5),
)  # fmt: skip
def test_gptq_is_finite_no_worse_than_rounding_to_nearest_and_its_error_is_the_true_one(inputs, weights, scheme, dtype, options, seed):
    torch.manual_seed(seed)
    x, weight = inputs_of(inputs).to(dtype), weight_of(weights)
    hessian = Hessian(SIZE)
    hessian.add(x, (x.float() * 1.5).to(dtype) if options.asymmetric else None)
    moments = hessian.mean("test")
    factorization = gptq.factorize(moments, options, "test")
    weight = gptq.target(weight, factorization, hessian)
    assert torch.isfinite(weight).all()
    found = gptq.solution(weight, factorization, scheme)
    restored = restore(found.stored, found.scales, scheme)
    nearest_stored, nearest_scales = rtn.round_to_nearest(weight, scheme, moments.diagonal())
    nearest = restore(nearest_stored, nearest_scales, scheme)
    for scales in (found.scales, nearest_scales):
        assert torch.isfinite(scales).all()
        assert (scales != 0).all()
        assert torch.equal(scales, scales.to(torch.bfloat16).float())
    assert torch.isfinite(restored).all()
    kind, error = measured_error(weight, restored, moments)
    assert math.isfinite(error)
    assert error >= 0
    held = None if kind == "weight_error" else moments
    expected = true_error(weight, restored, held)
    assert error == pytest.approx(expected or 0.0, rel=1e-2, abs=1e-5 + rounding_of_the_error(weight, restored, held))
    assert error <= measured_error(weight, nearest, held)[1] * (1 + 1e-3) + 1e-7
    if gptq.degenerate(moments):
        assert found.nearest_rows == OUT
        assert torch.equal(restored, nearest)
    for row in (weight.abs().amax(1) > 1e-30).nonzero().flatten().tolist():
        assert restored[row].any(), "a row of weights is not made zero"


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda scheme: scheme.label() + scheme.observer)
@pytest.mark.parametrize("kind", ["zero", "denormal"])
def test_inputs_that_are_zero_leave_the_weights_rounded_to_nearest_and_state_the_weights_error(kind, scheme):
    weight, _ = problem(size=SIZE)
    hessian = hessian_of(inputs_of(kind))
    factorization = gptq.factorize(hessian, Gptq(), "test")
    found = gptq.solution(weight, factorization, scheme)
    assert gptq.note_on_rows(factorization, found.overflowed_rows)
    expected = rtn.round_to_nearest(weight, scheme)
    assert torch.equal(found.stored.float(), expected[0].float())
    restored = restore(*expected, scheme)
    assert measured_error(weight, restored, hessian) == ("weight_error", pytest.approx(true_error(weight, restored, None), rel=1e-4))
    assert gptq.output_error(weight, *expected, scheme, hessian) > 0


@pytest.mark.parametrize("scheme", [INT4, INT8], ids=lambda scheme: scheme.label())
@pytest.mark.parametrize("moments", [torch.zeros(SIZE, SIZE), torch.full((SIZE, SIZE), 1e-42), torch.ones(SIZE, SIZE) * 1e38])
def test_refinement_without_usable_moments_changes_nothing_for_the_worse(moments, scheme):
    weight, _ = problem(size=SIZE)
    stored, scales = rtn.round_to_nearest(weight, scheme)
    got, fitted = refine(weight * 1e5, stored, scales * 1e5, moments, scheme, dampening=0.01, rounds=2)
    assert torch.isfinite(fitted).all()
    assert (fitted != 0).all()
    assert (got.float().abs().sum(1) > 0).all()


def test_a_singular_system_of_scales_keeps_the_scales():
    weight, _ = problem(size=SIZE)
    stored, scales = rtn.round_to_nearest(weight, INT4)
    got, fitted = refine(weight, stored, scales, torch.ones(SIZE, SIZE), INT4, dampening=1e-12, rounds=1)
    assert torch.isfinite(fitted).all()
    assert got.any(1).all()


@pytest.mark.parametrize("weights", ["huge", "the largest", "rows of every size", "zero groups", "tiny"])
def test_the_kernels_of_a_gpu_give_finite_integers_in_range(weights, monkeypatch):
    torch.manual_seed(0)
    moments, weight = hessian_of(inputs_of("rank 1")), weight_of(weights)[:4]
    low, high = integer_range(INT4)
    with interpreted("gemq.quantize.sweep_triton") as kernels:
        monkeypatch.setattr(kernels, "_WIDTH", 64)
        monkeypatch.setattr(gptq, "_sweep", lambda work, factor, scales, scheme, block: kernels.sweep(work, factor, scales, scheme))
        found = gptq.solution(weight, gptq.factorize(moments, Gptq(), "test"), INT4)
    assert found.stored.min() >= low
    assert found.stored.max() <= high
    assert torch.isfinite(found.scales).all()
    error, nearest = (
        measured_error(weight, restore(stored, scales, INT4), moments)[1]
        for stored, scales in ((found.stored, found.scales), rtn.round_to_nearest(weight, INT4, moments.diagonal()))
    )
    assert error <= nearest * (1 + 1e-3) + 1e-7


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_smoothing_search_is_finite_and_never_raises_the_loss(inputs, weights):
    torch.manual_seed(0)
    moments = hessian_of(inputs_of(inputs))
    found = smoothing.search(weight_of(weights), moments, INT4, (0.1, 0.5, 1.0), lambda scale: scale)
    assert math.isfinite(found.before)
    assert math.isfinite(found.after)
    assert found.after <= found.before
    assert found.scale is None or (torch.isfinite(found.scale).all() and (found.scale > 0).all())
    if inputs in ("zero", "denormal") or weights == "zero":
        assert found.note
        assert found.report("norm")["kept"] == found.note


def test_a_cross_moment_that_is_not_finite_is_dropped_with_a_note():
    weight, inputs = problem()
    source = inputs.clone()
    source[0, 0] = math.nan
    hessian = Hessian(inputs.shape[1])
    hessian.add(inputs, source)
    options = Gptq(asymmetric=1.0)
    factorization = gptq.factorize(hessian.mean("test"), options, "test")
    assert torch.equal(gptq.target(weight, factorization, hessian), weight)
    assert hessian.drop_unusable_cross()
    assert hessian.cross is None
    assert not hessian.drop_unusable_cross()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_inputs_that_are_not_finite_are_an_error(bad):
    hessian = Hessian(4)
    hessian.add(torch.tensor([[1.0, bad, 0.0, 0.0]]))
    with pytest.raises(IntegrityError, match="not finite"):
        hessian.mean("layers.0.x")


@pytest.mark.parametrize("target", [0.0, math.nan, math.inf])
def test_a_layer_whose_held_out_error_is_not_finite_is_not_tuned(target):
    block, solved, calls = rounded_block(4)
    bad = [Call(call.args, call.kwargs, torch.full_like(call.target, target)) for call in calls]
    tuned = tune(block, solved, bad, Tuning(iterations=4), seed=0)
    assert tuned.note
    assert not tuned.matrices
    assert math.isfinite(tuned.before)


def test_a_batch_whose_loss_is_nothing_over_nothing_does_not_stop_the_tuning():
    block, solved, calls = rounded_block()
    calls[1] = Call((torch.zeros_like(calls[1].args[0]),), {}, torch.zeros_like(calls[1].target))
    tuned = tune(block, solved, calls, Tuning(iterations=40, hold_out_every=4, learning_rate=0.005), seed=0)
    assert tuned.after < tuned.before


def test_rows_of_zeros_keep_a_normal_scale_when_their_producer_is_divided():
    weight = torch.zeros(4, 64)
    solved = Solved(weight, *rtn.round_to_nearest(weight, INT4), INT4).over(torch.full((4,), 16.0))
    assert (solved.scales.abs() >= torch.finfo(torch.bfloat16).tiny).all()
    other = Solved(torch.ones(1, 64), *rtn.round_to_nearest(torch.ones(1, 64), INT4), INT4)
    assert torch.equal(other.over(torch.tensor([4.0])).scales, other.scales / 4)


# --- casts


def old_cast(monkeypatch):
    """Casts to float8_e4m3fn as torch 2.10 and 2.11 make them: NaN beyond the largest number."""
    new = torch.Tensor.to

    def cast(tensor, *args, **kwargs):
        made = new(tensor, *args, **kwargs)
        if torch.float8_e4m3fn in (*args, *kwargs.values()) and tensor.dtype != torch.float8_e4m3fn:
            made.view(torch.int8)[new(tensor, torch.float32).abs() >= 464] = 127  # NaN
        return made

    monkeypatch.setattr(torch.Tensor, "to", cast)


def test_the_old_cast_makes_nan_of_what_is_too_large(monkeypatch):
    old_cast(monkeypatch)
    assert torch.tensor([1e4, -500.0]).to(torch.float8_e4m3fn).float().isnan().all()
    assert to_fp8(torch.tensor([1e4, -500.0, 2.0])).float().tolist() == [448.0, -448.0, 2.0]


@pytest.mark.parametrize("options", [Gptq(), Gptq(actorder="none"), Gptq(dampening=1e-6)])
def test_fp8_by_gptq_saturates_where_the_cast_does_not(monkeypatch, options):
    weight, inputs = problem()
    inputs = inputs @ (torch.eye(96) + torch.ones(96, 96))  # correlated, so that errors move weights beyond their row's largest
    hessian = hessian_of(inputs)
    factorization = gptq.factorize(hessian, options, "test")
    expected = gptq.solve(weight, factorization, FP8)
    old_cast(monkeypatch)
    scales = expected[1]
    swept = gptq._sweep(weight, factorization.factor, scales.expand(-1, 96).contiguous(), FP8, 128)
    assert torch.isfinite(swept).all()
    got = gptq.solution(weight, factorization, FP8)
    assert torch.isfinite(got.stored.float()).all()
    assert torch.equal(got.stored.float(), expected[0].float())
    assert got.overflowed_rows == 0
    assert got.nearest_rows < len(weight) / 4


# --- experts


class Experts(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(count, 128, 64))
        self.down_proj = nn.Parameter(torch.randn(count, 64, 64))
        self.act_fn = nn.GELU()


@pytest.fixture
def expert_units(tmp_path):
    from tests.quantize.small_jobs import make_job

    plan = make_job(build_gemma4_moe(tmp_path / "moe"), tmp_path / "never", "w4a16-g32").plan
    return plan.expert_units(0)


def test_experts_without_tokens_or_with_zero_inputs_are_rounded_to_nearest_and_left_out_of_the_output_error(expert_units):
    torch.manual_seed(0)
    module = Experts()
    own = module.gate_up_proj.data.clone()
    rows = {0: torch.randn(80, 64), 1: torch.zeros(5, 64), 2: torch.empty(0, 64), 3: torch.randn(1, 64)}
    solved = solve_experts(expert_units, module, rows.__getitem__, Gptq())
    error = signal = 0.0
    for unit, expert, stored, scales in solved:
        assert torch.isfinite(scales).all()
        assert stored.any(1).all()
        if unit.name.endswith("gate_up_proj"):
            if expert in (1, 2):
                assert torch.equal(stored, rtn.round_to_nearest(own[expert], unit.scheme.weights)[0])
            difference = (own[expert] - restore(stored, scales, unit.scheme.weights)).double()
            error += (rows[expert].double() @ difference.T).square().sum().item()
            signal += (rows[expert].double() @ own[expert].double().T).square().sum().item()
    report = next(report for name, report in solved.reports.items() if name.endswith("gate_up_proj"))
    assert report["output_error"] == pytest.approx(error / signal, rel=1e-3)
    assert len(report["notes"]) == 1
    assert report["experts_without_tokens"] == 1


# --- a whole run


RULES = "rules: [{match: [decoder], scheme: %s}]\n"
INTEGERS = "{weights: {num_bits: 4, strategy: group, group_size: 32, observer: mse}}"
RECIPES = {
    "gptq": RULES % INTEGERS,
    "everything": "smoothing: {alphas: [0.5]}\ngptq: {asymmetric: 0.5, refine: 2}\ntuning: {iterations: 4}\n" + RULES % INTEGERS,
    "awq": "method: rtn\nsmoothing: {alphas: [0.5]}\n" + RULES % INTEGERS,
    "w8a8": RULES % "{weights: {num_bits: 8, strategy: channel}, input_activations: {type: int}}",
    "fp8": RULES % "{weights: {num_bits: 8, type: float, strategy: channel}, input_activations: {type: float}}",
}


@pytest.fixture(scope="module")
def silent(gemma3, tmp_path_factory):
    """A model whose layer 1 multiplies the inputs of q, k and v by zero, and has a row of zeros and one of tiny weights in gate."""
    out = tmp_path_factory.mktemp("silent") / "source"
    shutil.copytree(gemma3, out)
    tensors = load_file(out / "model.safetensors")
    tensors["model.layers.1.input_layernorm.weight"].fill_(-1)
    tensors["model.layers.0.mlp.gate_proj.weight"][3] = 0
    tensors["model.layers.0.mlp.gate_proj.weight"][4] *= 1e-30
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.mark.parametrize("name", RECIPES)
def test_a_unit_whose_inputs_are_zero_is_rounded_to_nearest_with_a_note_in_the_manifest(name, silent, tmp_path, capsys):
    recipe = parse_recipe("version: 1\nname: mine\nsummary: for tests\n" + RECIPES[name], "here")
    outcome = run_job(silent, tmp_path / "out", recipe)
    check_seal(outcome.directory)
    units = json.loads((outcome.directory / "gemq.json").read_text())["units"]
    unit = "layers.1.self_attn.qkv_proj"
    assert len(units[unit]["notes"]) == 1
    assert unit in capsys.readouterr().err
    assert units[unit]["weight_error"] > 0
    assert "output_error" not in units[unit]
    assert [other for other, report in units.items() if "notes" in report and "layers.1" not in other] == []
    scheme = next(iter(recipe.rules)).scheme.weights
    tensors = load_file(outcome.directory / "model.safetensors")
    weight = load_file(silent / "model.safetensors")["model.layers.1.self_attn.q_proj.weight"].float()
    expected = rtn.round_to_nearest(weight, scheme)[1]
    assert torch.isfinite(tensors["model.layers.1.self_attn.q_proj.weight_scale"].float()).all()
    if name != "everything":  # tuning may move scales
        assert torch.equal(tensors["model.layers.1.self_attn.q_proj.weight_scale"].float(), expected)
    for tensor, value in tensors.items():
        if tensor.endswith("weight_scale"):
            assert torch.isfinite(value.float()).all()
            assert (value != 0).all()


def test_a_scale_is_never_infinite_or_zero():
    for value in (0.0, 1e-45, -1e-45, 2.9e38):
        made = stored_scale(torch.tensor([value]))
        assert torch.isfinite(made).all()
        assert (made != 0).all()
