"""Tuning a layer by signed gradients: what it gains is gained on batches it has not learnt from, and where nothing is gained nothing is touched."""

from __future__ import annotations

import pytest
import torch
from tests.models.gemma4 import build
from tests.quantize.problems import INT4
from tests.quantize.small_jobs import make_job, run_job, stop_job, windows
from torch import nn

from gemq.errors import UsageError
from gemq.quantize import rtn
from gemq.quantize.scales import restore
from gemq.quantize.tuning import Call, Solved, _Latent, tune
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Tuning, parse_recipe


class Block(nn.Module):
    """Up, GELU, down, beside a residual: what a decoder layer does to a token."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(nn.functional.gelu(self.up(hidden)))


def rounded_block(calls: int = 9) -> tuple[Block, dict[str, Solved], list[Call]]:
    """A block rounded to nearest in int4, and the source block's outputs."""
    torch.manual_seed(3)
    block = Block().requires_grad_(False)
    for matrix in (block.up, block.down):
        matrix.weight.mul_(3)
    mix = torch.randn(64, 64) / 8 * torch.rand(64).mul(3).exp()
    inputs = [torch.randn(128, 64) @ mix for _ in range(calls)]
    found = [Call((x,), {}, block(x)) for x in inputs]
    solved = {
        name: Solved(getattr(block, name).weight.clone(), *rtn.round_to_nearest(getattr(block, name).weight, INT4), INT4)
        for name in ("up", "down")
    }
    put(block, {name: (matrix.stored, matrix.scales) for name, matrix in solved.items()})
    return block, solved, found


def put(block: Block, matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    for name, (stored, scales) in matrices.items():
        getattr(block, name).weight.copy_(restore(stored, scales, INT4))


def error(block: Block, calls: list[Call]) -> float:
    return sum(((block(*call.args) - call.target).square().sum() / call.target.square().sum()).item() for call in calls) / len(calls)


def test_the_held_out_error_falls_and_is_what_the_stored_matrices_give():
    block, solved, calls = rounded_block()
    held_out = [calls[0], calls[4], calls[8]]
    before = error(block, held_out)
    tuned = tune(block, solved, calls, Tuning(iterations=40, hold_out_every=4, learning_rate=0.005), seed=0)
    assert tuned.before == pytest.approx(before, rel=1e-5)
    assert tuned.after < 0.95 * before
    assert error(block, held_out) == pytest.approx(before, rel=1e-6), "the layer itself is the caller's to change"
    put(block, tuned.matrices)
    assert error(block, held_out) == pytest.approx(tuned.after, rel=1e-4)
    for stored, scales in tuned.matrices.values():
        assert stored.dtype == torch.int8
        assert stored.min() >= -8
        assert stored.max() <= 7
        assert (scales == scales.to(torch.bfloat16).to(torch.float32)).all()
    assert any((scales != solved[name].scales).any() for name, (_, scales) in tuned.matrices.items())


def test_a_gradient_moves_every_integer_against_its_sign_once_the_offset_is_far_enough():
    _, solved, _ = rounded_block()
    latent = _Latent(solved["up"])
    start = latent.state()[0]
    sign = torch.where(torch.rand(latent.offset.shape) < 0.5, -1.0, 1.0)
    latent.offset.grad, latent.factor.grad = sign.clone(), torch.zeros_like(latent.factor)
    latent.step(0.3)  # from at most 0.1 off its integer to at most 0.4
    assert torch.equal(latent.state()[0], start)
    latent.offset.grad = sign.clone()
    latent.step(0.4)  # now at least 0.6 off
    moved = latent.state()[0]
    assert torch.equal(moved, (start - sign.reshape(start.shape)).clamp(-8, 7).to(torch.int8))
    assert torch.equal(latent.weight().detach(), restore(*latent.state(), INT4))
    assert latent.offset.grad is None


def test_where_no_step_helps_nothing_is_taken():
    block, solved, calls = rounded_block()
    tuned = tune(block, solved, calls, Tuning(iterations=8, hold_out_every=4, learning_rate=0.5), seed=0)
    assert tuned.matrices == {}
    assert tuned.after == tuned.before


def test_the_same_seed_gives_the_same_integers():
    first, second, other = (
        tune(*rounded_block(), Tuning(iterations=20, hold_out_every=4, learning_rate=0.05), seed=seed).matrices["up"] for seed in (1, 1, 2)
    )  # fmt: skip
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not (torch.equal(first[0], other[0]) and torch.equal(first[1], other[1]))


@pytest.mark.parametrize("option", ["iterations: 0", "hold_out_every: 1", "learning_rate: 0", "batches: 0", "steps: 3"])
def test_options_that_can_not_be_are_refused(option):
    text = (
        "version: 1\nname: t\nsummary: t\ntuning: {%s}\nrules:\n  - match: [decoder]\n"
        "    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}\n"
    )
    with pytest.raises(UsageError, match="tuning") as caught:
        parse_recipe(text % option, "t.yaml")
    assert option.split(":")[0] in str(caught.value)


RULES = "rules:\n  - match: [decoder]\n    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}\n"
RECIPE = parse_recipe(
    "version: 1\nname: test-tuned\nsummary: t\nmethod: rtn\ntuning: {iterations: 3, learning_rate: 0.05}\n" + RULES, "here"
)


def test_after_a_layer_is_tuned_the_walk_goes_on_from_its_new_outputs(tmp_path):
    """The callback halves a layer; what the next layers are called with must be what the halved model makes of the batches."""
    source = build("e4b", tmp_path / "e4b")  # keys and values of one layer are read by others
    job = make_job(source, tmp_path / "out", RECIPE)
    seen: dict[int, list[Call]] = {}

    def halve(index, layer, calls):
        seen[index] = [Call(tuple(part.clone() for part in call.args), {}, call.target.clone()) for call in calls]
        layer.self_attn.o_proj.weight.data.mul_(0.5)
        if hasattr(layer.self_attn, "k_proj"):
            layer.self_attn.k_proj.weight.data.mul_(0.5)

    sets = windows(512, 3, 12)
    walk = Walk(job.plan, job.reader, sets)
    walk.run(Walker(lambda unit: None, lambda unit, weights, hessian: list(weights), lambda index: None, tune=halve))
    own, halved = layer_inputs(source, walk.batches, 1.0), layer_inputs(source, walk.batches, 0.5)
    assert sorted(seen) == list(range(len(own) - 1))
    for index, calls in seen.items():
        for position, call in enumerate(calls):
            torch.testing.assert_close(call.args[0], halved[index][position], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(call.target, own[index + 1][position], rtol=1e-4, atol=1e-5)


def layer_inputs(directory, batches, factor):
    """What each layer reads, and at last what the last one gives, in transformers' own forward: [layers + 1][batches]."""
    from transformers import AutoModelForImageTextToText

    text = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval().model.language_model
    found: list[list[torch.Tensor]] = [[] for _ in range(len(text.layers) + 1)]
    for index, layer in enumerate(text.layers):
        layer.self_attn.o_proj.weight.data.mul_(factor)
        if hasattr(layer.self_attn, "k_proj"):
            layer.self_attn.k_proj.weight.data.mul_(factor)
        layer.register_forward_pre_hook(lambda module, args, index=index: found[index].append(args[0].clone()))
    text.layers[-1].register_forward_hook(lambda module, args, output: found[-1].append(output.clone()))
    with torch.no_grad():
        for batch in batches:
            text(input_ids=batch, use_cache=False)
    return found


def test_a_tuned_checkpoint_tells_what_each_layer_gained_and_a_stopped_run_ends_in_the_same_bytes(gemma3, tmp_path, monkeypatch):
    whole = run_job(gemma3, tmp_path / "whole", RECIPE)
    reports = [unit["layer_tuning"] for unit in whole.manifest["units"].values()]
    assert any(report["kept"] for report in reports)
    assert all(report["after"] < report["before"] if report["kept"] else report["after"] == report["before"] for report in reports)
    stop_job(monkeypatch, "tuned:layer 1", gemma3, tmp_path / "resumed", RECIPE)
    assert run_job(gemma3, tmp_path / "resumed", RECIPE).seal == whole.seal
