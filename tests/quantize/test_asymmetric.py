"""Asymmetric targets: the closed form against least squares, and the walk that carries the source's activations along."""

from __future__ import annotations

import pytest
import torch
from tests.models.gemma4 import build, build_gemma4_moe
from tests.quantize.problems import problem
from tests.quantize.small_jobs import make_job, run_job, stop_job, windows

from gemq.quantize import gptq
from gemq.quantize import run as quantize_run
from gemq.quantize.gpu import Budget, paused_bytes, walks_source_within_layers
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Gptq, load_recipe, parse_recipe


def test_the_whole_way_is_the_least_squares_weight_for_the_source_s_outputs():
    weight, inputs = problem(out=12, size=32, tokens=600)
    source = inputs + 0.02 * torch.randn_like(inputs) + 0.05 * inputs.roll(1, dims=1)
    hessian = gptq.Hessian(32)
    for part, own in zip(inputs.split(150), source.split(150), strict=True):
        hessian.add(part, own)
    options = Gptq(asymmetric=1.0, dampening=1e-6)
    got = gptq.target(weight, gptq.factorize(hessian.mean("test"), options, "test"), hessian)
    wanted = source.double() @ weight.double().T
    best = torch.linalg.lstsq(inputs.double(), wanted).solution.T

    def distance(candidate):
        return (inputs.double() @ candidate.double().T - wanted).square().sum().item()

    assert distance(got) == pytest.approx(distance(best), rel=1e-3)
    assert distance(got) < 0.9 * distance(weight)


def test_a_share_goes_that_far_and_equal_streams_change_nothing():
    weight, inputs = problem(out=12, size=32)
    options = Gptq(asymmetric=0.25)
    same, other = gptq.Hessian(32), gptq.Hessian(32)
    same.add(inputs, inputs.clone())
    other.add(inputs, inputs * 1.02)
    factorization = gptq.factorize(same.mean("test"), options, "test")
    assert torch.equal(gptq.target(weight, factorization, same), weight)
    whole = gptq.factorize(other.mean("test"), Gptq(asymmetric=1.0), "test")
    step = gptq.target(weight, whole, other) - weight
    quarter = gptq.target(weight, gptq.Factorization(whole.order, whole.factor, whole.moments, options), other) - weight
    torch.testing.assert_close(quarter, 0.25 * step)
    assert step.abs().max() > 0.001


@pytest.mark.parametrize("factor", [-1.0, 0.0, 0.5, 2.0, 1e6])
def test_a_target_that_would_grow_or_shrink_its_row_too_far_is_stopped_on_the_way(factor):
    """What verify allows: a recipe must not make a checkpoint that is taken for a forged one."""
    weight, inputs = problem(out=12, size=32)
    weight[3] = 0
    hessian = gptq.Hessian(32)
    hessian.add(inputs, inputs * factor)
    step = gptq.target(weight, gptq.factorize(hessian.mean("test"), Gptq(asymmetric=1.0), "test"), hessian) - weight
    gain = (step * weight).sum(1) / weight.square().sum(1)
    alive = torch.arange(12) != 3
    torch.testing.assert_close(gain[alive].abs(), torch.full((11,), 0.03), rtol=1e-3, atol=1e-4)
    assert torch.equal(step[3], torch.zeros(32))


def test_a_target_that_turns_its_row_too_far_is_stopped_on_the_way():
    weight, inputs = problem(out=12, size=32)
    hessian = gptq.Hessian(32)
    hessian.add(inputs, inputs + 5 * (inputs.roll(1, dims=1) - inputs.roll(-1, dims=1)))
    step = gptq.target(weight, gptq.factorize(hessian.mean("test"), Gptq(asymmetric=1.0), "test"), hessian) - weight
    length = step.norm(dim=1) / weight.norm(dim=1)
    assert length.max() <= 0.2 * 1.001
    assert ((step * weight).sum(1) / weight.square().sum(1)).abs().max() <= 0.03 * 1.001


RECIPE = parse_recipe(
    """
version: 1
name: test-asymmetric
summary: every linear of the decoder
gptq: {asymmetric: 0.5}
rules:
  - match: [ple]
    optional: true
    scheme: {weights: {num_bits: 8, strategy: channel}}
  - match: [decoder]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
""",
    "here",
)

PLE_ROUNDED = parse_recipe(RECIPE.to_yaml().replace("- match:\n  - ple\n", "- match:\n  - ple\n  method: rtn\n"), "here")


@pytest.fixture(scope="module", params=["gemma3", "gemma4 e4b"])
def source(request, gemma3, tmp_path_factory):
    return gemma3 if request.param == "gemma3" else build("e4b", tmp_path_factory.mktemp("gemma4") / "e4b")


@pytest.mark.parametrize("restored_layers", [set(), {None, 0, 1}], ids=["from the start", "two layers replayed"])
@pytest.mark.parametrize("room", [None, 2, 1.9, 0], ids=["on a CPU", "with room for both", "run anew", "run anew without room"])
def test_both_streams_are_what_each_set_of_weights_makes_of_the_batches(source, tmp_path, monkeypatch, room, restored_layers):
    """The solver shrinks every weight; the inputs it hears of must be those of the shrunken model, and of the model as it was."""
    job, sets = make_job(source, tmp_path / "out", RECIPE if room is None else PLE_ROUNDED), windows(512, 3, 12)
    monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan: int(room * paused_bytes(plan, 36, 12, torch.float32)))
    budget = None if room is None else Budget(1 << 33, torch.float32, batch_tokens=64)
    seen: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def solve(unit, weights, hessian):
        if job.plan.reads_inputs(unit):
            seen[unit.name] = (hessian.mean(unit.name), hessian.cross / hessian.rows)
        return [weight * 0.9 for weight in weights]

    def restored(unit):
        return [job.reader.read(matrix.tensor).float() * 0.9 for matrix in unit.matrices] if unit.layer in restored_layers else None

    walk = Walk(job.plan, job.reader, sets, budget=budget)
    walk.run(Walker(restored, solve, lambda index: None))
    assert len(walk._replays) == (0 if room in (None, 2) else 2)
    assert all((batches._activations.spilled_bytes > 0) == (room == 0) for batches in walk._replays[1:])
    own, shrunken = captured_inputs(source, sets, job, 1.0), captured_inputs(source, sets, job, 0.9)
    expected = [unit for unit in job.plan.units if unit.layer not in restored_layers and job.plan.reads_inputs(unit)]
    assert seen.keys() == {unit.name for unit in expected}
    for unit in expected:
        moments, cross = seen[unit.name]
        y, x = own[unit.matrices[0].module], shrunken[unit.matrices[0].module]
        torch.testing.assert_close(moments, x.T @ x / x.shape[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(cross, (y - x).T @ x / x.shape[0], rtol=1e-3, atol=1e-4)


def captured_inputs(directory, sets, job, scale):
    """Each linear's inputs in transformers' own forward, the plan's linears scaled by `scale`."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    kind = AutoModelForCausalLM if job.plan.skeleton.architecture.name.startswith("Gemma3ForCausal") else AutoModelForImageTextToText
    model = kind.from_pretrained(directory, dtype=torch.float32).eval().model
    text = getattr(model, "language_model", model)
    found: dict[str, list[torch.Tensor]] = {}
    for module in job.plan.quantized_matrices:
        linear = text.get_submodule(module.removeprefix("model."))
        linear.weight.data.mul_(scale)
        linear.register_forward_pre_hook(lambda m, args, module=module: found.setdefault(module, []).append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for batch in Walk(job.plan, job.reader, sets).batches:
            text(input_ids=batch, use_cache=False)
    return {module: torch.cat(parts) for module, parts in found.items()}


def test_a_recipe_with_asymmetric_targets_runs_and_resumes_to_the_same_bytes(gemma3, tmp_path, monkeypatch):
    whole = run_job(gemma3, tmp_path / "whole", RECIPE)
    stop_job(monkeypatch, "solved:layer 1", gemma3, tmp_path / "resumed", RECIPE)
    assert run_job(gemma3, tmp_path / "resumed", RECIPE).seal == whole.seal


@pytest.mark.parametrize("kind", ["gemma3", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("e4b", "moe"))])
def test_a_checkpoint_does_not_depend_on_whether_both_models_had_room_within_layers(kind, gemma3, tmp_path, monkeypatch):
    source = gemma3
    if kind == "e4b":
        source = build("e4b", tmp_path / "e4b")
    elif kind == "moe":
        source = build_gemma4_moe(tmp_path / "moe", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    recipe = parse_recipe(load_recipe("w4a16-best").to_yaml().replace("group_size: 128", "group_size: 32"), "here")
    monkeypatch.setattr(quantize_run, "budget_of", lambda *given: Budget(1 << 33, torch.bfloat16, 64))
    seals = set()
    for room in (1 << 40, 1 << 16, 0):
        monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan, room=room: room)
        seals.add(run_job(source, tmp_path / f"out-{room}", recipe).seal)
    stop_job(monkeypatch, "solved:layer 0", source, tmp_path / "resumed", recipe)
    assert {run_job(source, tmp_path / "resumed", recipe).seal} == seals


def test_units_before_the_layers_that_need_the_source_s_inputs_keep_both_models_within_layers(tmp_path):
    source = build("e4b", tmp_path / "e4b")
    assert walks_source_within_layers(make_job(source, tmp_path / "a", RECIPE).plan)
    assert not walks_source_within_layers(make_job(source, tmp_path / "b", PLE_ROUNDED).plan)
    assert walks_source_within_layers(make_job(source, tmp_path / "c", load_recipe("w4a16-tuned")).plan)
