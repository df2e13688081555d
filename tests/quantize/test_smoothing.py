"""Smoothing: the same function before anything is rounded, a smaller error after it, a checkpoint that tells, a run that resumes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models import gemma4
from tests.models.rough import roughen
from tests.quantize.problems import INT4, problem
from tests.quantize.small_jobs import make_job, run_job, stop_job, windows

from gemq.errors import UsageError
from gemq.quantize import gptq, smoothing
from gemq.quantize.architectures import ARCHITECTURES, Architecture
from gemq.quantize.audit import audit_structure
from gemq.quantize.decisions import decisions_of, search_plan
from gemq.quantize.gpu import Budget
from gemq.quantize.plan import make_plan, require_pairs
from gemq.quantize.search import recipe_of
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.verify import verify_against_source
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Gptq, Recipe, load_recipe, parse_recipe

HEAD = "version: 1\nname: test-smoothing\nsummary: for tests\n"
RULES = "rules: [{match: [decoder], scheme: {weights: {num_bits: 4, strategy: group, group_size: 32, observer: mse}}}]\n"


def recipe(options: str = "") -> Recipe:
    return parse_recipe(f"{HEAD}smoothing: {{alphas: [0.25, 0.5, 0.9]}}\n{options}{RULES}", "here")


@pytest.fixture(scope="session")
def rough(gemma3, tmp_path_factory):
    return roughen(gemma3, tmp_path_factory.mktemp("rough") / "gemma3")


@pytest.fixture(scope="session")
def rough4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rough4")
    return roughen(gemma4.build("e4b", folder / "source"), folder / "e4b")


@pytest.fixture(scope="module")
def smoothed(rough, tmp_path_factory):
    out = tmp_path_factory.mktemp("smoothed") / "checkpoint"
    return out, run_job(rough, out, recipe())


# --- the mathematics


def test_a_folded_norm_and_its_scale_give_the_source_s_gain_exactly_and_the_norm_can_be_stored():
    torch.manual_seed(0)
    weight, wanted = (torch.randn(4096) * 0.5).to(torch.bfloat16), torch.exp(torch.randn(4096)).clamp(1 / 16, 16)
    for one_plus_w in (True, False):
        stored, scale = smoothing.fold_into_norm(weight, wanted, one_plus_w=one_plus_w)
        one = float(one_plus_w)
        assert stored.dtype == torch.bfloat16
        assert scale.dtype == torch.float64
        torch.testing.assert_close((stored.double() + one) * scale, weight.double() + one, rtol=1e-15, atol=0)
        assert ((scale / wanted).log().abs().median()) < 0.005


def test_a_channel_that_a_norm_silences_or_could_not_store_is_left_alone():
    weight = torch.tensor([-1.0, -1.0 + 2**-8, 0.5]).to(torch.bfloat16)
    stored, scale = smoothing.fold_into_norm(weight, torch.tensor([4.0, 16.0, 2.0]), one_plus_w=True)
    assert stored[0] == weight[0]
    assert scale[0] == 1.0
    assert ((stored.double() + 1) * scale == weight.double() + 1).all()
    assert scale[2] == 2.0


def test_wanted_scales_follow_the_inputs_have_mean_one_and_leave_silent_inputs_alone():
    moments = torch.diag(torch.tensor([0.0, 1.0, 16.0, 256.0]))
    scale = smoothing.wanted_scale(moments, 0.5)
    assert scale[0] == 1.0
    torch.testing.assert_close(scale[1:], torch.tensor([0.5, 1.0, 2.0]))
    assert smoothing.wanted_scale(torch.zeros(3, 3), 0.5).eq(1).all()
    assert smoothing.powers_of_two(torch.tensor([0.3, 0.9, 1.5, 11.0])).tolist() == [0.25, 1.0, 2.0, 8.0]


def test_a_factorization_of_smoothed_inputs_is_that_of_their_own_hessian():
    torch.manual_seed(0)
    inputs = torch.randn(600, 96) + torch.randn(600, 1)
    scale = torch.exp(torch.randn(96))
    options = Gptq(dampening=1e-6)

    def moments(of):
        return of.T @ of / of.shape[0]

    made = smoothing.refactored(gptq.factorize(moments(inputs), options, "test"), scale)
    torch.testing.assert_close(made.moments, moments(inputs / scale), rtol=1e-3, atol=1e-5)
    ordered = made.moments[made.order][:, made.order].double()
    identity = made.factor.double() @ ordered @ made.factor.double().T
    torch.testing.assert_close(identity, torch.eye(96, dtype=torch.float64), rtol=0, atol=0.02)


def test_the_variances_that_judge_before_gptq_are_conditional_ones():
    _, inputs = problem(size=32, tokens=2000)
    factorization = gptq.factorize(inputs.T @ inputs / len(inputs), Gptq(dampening=1e-7), "test")
    found = smoothing.conditional_variances(factorization)
    column, later = factorization.order[10], factorization.order[11:]
    best = torch.linalg.lstsq(inputs[:, later].double(), inputs[:, column].double().unsqueeze(1)).solution
    left = inputs[:, column].double() - (inputs[:, later].double() @ best).squeeze(1)
    assert found[column].item() == pytest.approx(left.square().mean().item(), rel=0.01)


def test_the_search_lowers_the_loss_where_inputs_are_loud_and_keeps_weights_where_they_are_not():
    torch.manual_seed(0)
    weight, inputs = torch.randn(64, 64), torch.randn(500, 64)
    loud = torch.ones(64)
    loud[::16] = 16.0
    moments = (inputs * loud).T @ (inputs * loud) / 500
    found = smoothing.search(weight / loud, moments, INT4, (0.25, 0.5, 0.9), lambda scale: scale)
    assert found.scale is not None
    assert found.after < 0.5 * found.before
    quiet = smoothing.search(weight, inputs.T @ inputs / 500, INT4, (0.25, 0.5), lambda scale: scale)
    assert quiet.scale is None
    assert quiet.after == quiet.before
    assert "kept" in quiet.report("norm")
    assert "kept" not in found.report("norm")
    refused = smoothing.search(weight / loud, moments, INT4, (0.5,), torch.ones_like)
    assert refused.scale is None


@pytest.mark.parametrize("kind", ["gemma3", "gemma4 e4b"])
def test_the_whole_model_is_the_same_function_in_float64_before_anything_is_rounded(kind, gemma3, rough4, monkeypatch):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    source = gemma3 if kind == "gemma3" else rough4
    shortened = torch.Tensor.float  # the norms compute in float32 by themselves; here they stay in float64
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor if tensor.dtype == torch.float64 else shortened(tensor))
    skeleton, reader = load_skeleton(source)
    plan = make_plan(skeleton, recipe())
    assert {pair.module.rpartition("layers.")[2].split(".", 1)[1] for pair in plan.pairs.values()} == {
        "input_layernorm", "pre_feedforward_layernorm", "mlp.up_proj"
    }  # fmt: skip
    loader = AutoModelForCausalLM if kind == "gemma3" else AutoModelForImageTextToText
    model = loader.from_pretrained(source, dtype=torch.float64).eval()
    text = getattr(model.model, "language_model", model.model)
    ids = torch.tensor(windows(skeleton.text.vocab_size, 2, 20))
    with torch.no_grad():
        before = text(input_ids=ids, use_cache=False).last_hidden_state
        torch.manual_seed(1)
        for unit in plan.units:
            if (pair := plan.pairs.get(unit.name)) is None:
                continue
            wanted = torch.exp(torch.randn(unit.in_features)).clamp(1 / 16, 16)
            producer = text.get_submodule(pair.module.removeprefix("model."))
            if pair.is_norm:
                one_plus_w = skeleton.architecture.norm_is_one_plus_w
                stored, scale = smoothing.fold_into_norm(reader.read(pair.tensor), wanted, one_plus_w=one_plus_w)
                producer.weight.copy_(stored)
            else:
                scale = smoothing.powers_of_two(wanted).double()
                producer.weight.div_(scale.unsqueeze(1))
            for matrix in unit.matrices:
                text.get_submodule(matrix.module.removeprefix("model.")).weight.mul_(scale)
        after = text(input_ids=ids, use_cache=False).last_hidden_state
    assert before.dtype == torch.float64
    assert ((after - before).abs().max() / before.abs().max()).item() < 1e-12


# --- the run


def test_smoothing_brings_the_outputs_of_a_rough_model_nearer_to_its_own(rough, smoothed, tmp_path):
    _, with_it = smoothed
    without = run_job(rough, tmp_path / "without", recipe().model_copy(update={"smoothing": None}))
    for name in with_it.manifest["smoothed_tensors"]:
        unit = next(unit for unit, made in with_it.manifest["units"].items() if made.get("smoothing", {}).get("producer") == name)
        ours, plain = with_it.manifest["units"][unit], without.manifest["units"][unit]
        assert ours["smoothing"]["loss_after"] < ours["smoothing"]["loss_before"]
        assert ours["output_error"] < plain["output_error"]
    assert len(with_it.manifest["smoothed_tensors"]) >= 8
    assert "smoothed_tensors" not in without.manifest


def test_only_norms_that_the_manifest_names_differ_from_the_source(rough, smoothed):
    checkpoint, outcome = smoothed
    ours, theirs = load_file(checkpoint / "model.safetensors"), load_file(rough / "model.safetensors")
    changed = {name for name in ours.keys() & theirs.keys() if not torch.equal(ours[name], theirs[name])}
    assert changed == {name for name in outcome.manifest["smoothed_tensors"] if name.endswith("layernorm.weight")}
    assert len(changed) >= 6


def mixed():
    """Attention rounded to nearest, the MLP solved for targets that the source's own inputs move."""
    made = recipe("gptq: {asymmetric: 0.25}\n")
    attention = made.rules[0].model_copy(update={"match": ("attention",), "method": "rtn"})
    return made.model_copy(update={"rules": (attention, *made.rules)})


@pytest.mark.parametrize("made", [recipe(), mixed()], ids=["gptq", "asymmetric, half of it rtn"])
def test_a_run_that_stops_in_the_middle_ends_in_the_same_bytes(made, rough, smoothed, tmp_path, monkeypatch):
    whole = smoothed[1] if made == recipe() else run_job(rough, tmp_path / "whole", made)
    stop_job(monkeypatch, "solved:layer 1", rough, tmp_path / "resumed", made)
    resumed = run_job(rough, tmp_path / "resumed", made)
    assert resumed.seal == whole.seal
    assert resumed.manifest == whole.manifest
    assert any(name.startswith("model.layers.0.") for name in whole.manifest["smoothed_tensors"])
    assert {entry["method"] for entry in whole.manifest["units"].values()} == {rule.method or "gptq" for rule in made.rules}


def test_a_gemma_4_with_shared_keys_is_smoothed_and_verified(rough4, tmp_path):
    outcome = run_job(rough4, tmp_path / "out", recipe())
    names = outcome.manifest["smoothed_tensors"]
    assert any("layers.0.input_layernorm" in name for name in names)
    assert verify_against_source(tmp_path / "out", rough4).differences == []


@pytest.mark.parametrize(
    ("options", "budget"),
    [("gptq: {asymmetric: 0.5}\n", None), ("", None), ("", Budget(1 << 40, torch.float32))],
    ids=["asymmetric", "plain", "as on a GPU"],
)
def test_the_walk_gives_later_units_the_inputs_of_the_smoothed_model_and_the_source_its_own(options, budget, rough, tmp_path):
    """Weights are only scaled, never rounded: every later unit must see what it sees without smoothing, and so must the source's stream."""
    sets = windows(512, 3, 12)

    def walked(smoothes: bool):
        job = make_job(rough, tmp_path / "out", recipe(options))
        seen, folded = {}, {}

        def solve(unit, weights, hessian):
            source = None if hessian.cross is None else hessian.cross / hessian.rows
            moments = hessian.mean(unit.name)
            seen[unit.name] = moments.clone(), source
            if unit.name not in job.plan.pairs or not smoothes:
                return weights
            scale = torch.exp2(torch.randint(-2, 3, (unit.in_features,)).float())
            pair = job.plan.pairs[unit.name]
            if pair.is_norm:
                folded[unit.name], scale = smoothing.fold_into_norm(job.reader.read(pair.tensor), scale, one_plus_w=True)
            else:
                folded[unit.name] = scale
            return [(weight.double() * scale).float() for weight in weights]

        def producer(pair):
            return folded[pair.unit].float() if smoothes else None

        Walk(job.plan, job.reader, sets, budget=budget).run(Walker(lambda unit: None, solve, lambda index: None, producer=producer))
        return seen

    plain, scaled = walked(False), walked(True)
    assert plain.keys() == scaled.keys()
    for name, (moments, cross) in plain.items():
        torch.testing.assert_close(scaled[name][0], moments, rtol=1e-3, atol=1e-4)
        if cross is not None:
            assert (scaled[name][1] - cross).abs().max() < 1e-5 * moments.max()  # both streams compute the same function


# --- verify


def edited(checkpoint, tmp_path, change, manifest_change=None):
    """`checkpoint` with its tensors and manifest changed, and what verify says of it."""
    out = tmp_path / "edited"
    shutil.copytree(checkpoint, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    (out / "model.safetensors").unlink()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    manifest = json.loads((out / "gemq.json").read_text())
    if manifest_change is not None:
        manifest_change(manifest)
    (out / "gemq.json").unlink()
    (out / "gemq.json").write_text(json.dumps(manifest))
    return out


def test_verify_accepts_a_smoothed_checkpoint_and_counts_its_norms(rough, smoothed):
    comparison = verify_against_source(smoothed[0], rough)
    assert comparison.differences == []
    norms = [name for name in smoothed[1].manifest["smoothed_tensors"] if name.endswith("layernorm.weight")]
    assert comparison.kinds["smoothed"].count == len(norms)
    assert comparison.kinds["changed"].count == 0


def nothing(tensors):
    pass


def undeclare(manifest):
    manifest["smoothed_tensors"].remove(NORM)


def declare(name):
    return lambda manifest: manifest["smoothed_tensors"].append(name)


NORM, UP = "model.layers.0.pre_feedforward_layernorm.weight", "model.layers.0.mlp.up_proj.weight"


def louder(name, channel, factor):
    def change(tensors):
        tensors[name][channel] = ((tensors[name][channel].float() + 1) * factor - 1).to(torch.bfloat16)

    return change


def row_scales(row, factor):
    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight_scale"][row] *= factor

    return change


@pytest.mark.parametrize(
    ("change", "manifest_change", "names"),
    [
        (nothing, undeclare, {NORM, "model.layers.0.mlp.up_proj"}),
        (louder(NORM, 5, 2.0), None, {"model.layers.0.mlp.gate_proj"}),
        (louder(NORM, 24, 0.5), None, {"model.layers.0.mlp.up_proj"}),
        (louder(NORM, 5, -1.0), None, {NORM}),
        (louder(NORM, 5, 1000.0), None, {NORM}),
        (louder("model.layers.0.post_attention_layernorm.weight", 5, 2.0), None, {"model.layers.0.post_attention_layernorm.weight"}),
        (louder("model.layers.0.post_attention_layernorm.weight", 5, 2.0), declare("model.layers.0.post_attention_layernorm.weight"),
         {"model.layers.0.post_attention_layernorm.weight"}),
        (louder("model.norm.weight", 5, 2.0), declare("model.norm.weight"), {"model.norm.weight"}),
        (row_scales(7, 2.0), None, {"model.layers.0.mlp.down_proj"}),
        (row_scales(7, 0.5), None, {"model.layers.0.mlp.down_proj"}),
        (row_scales(7, 64.0), None, {UP}),
        (nothing, lambda manifest: manifest["smoothed_tensors"].remove(UP), {"model.layers.0.mlp.up_proj"}),
        (nothing, declare("model.layers.9.input_layernorm.weight"), {"model.layers.9.input_layernorm.weight"}),
        (lambda tensors: tensors.pop(NORM), None, {NORM}),
    ],
)  # fmt: skip
def test_verify_refuses_everything_else(change, manifest_change, names, rough, smoothed, tmp_path):
    assert {NORM, UP} <= set(smoothed[1].manifest["smoothed_tensors"])
    out = edited(smoothed[0], tmp_path, change, manifest_change)
    found = {difference.path for difference in verify_against_source(out, rough).differences}
    assert names <= found, found


def test_verify_refuses_a_smoothed_norm_whose_readers_stayed_as_they_were(rough, tmp_path):
    keep = "  - {match: ['re:.*layers.0.mlp.(gate|up)_proj$'], scheme: keep}\n"
    made = parse_recipe(f"{HEAD}smoothing: {{}}\nrules:\n{keep}  - {RULES.removeprefix('rules: [').rstrip()[:-1]}\n", "here")
    out = tmp_path / "out"
    outcome = run_job(rough, out, made)
    assert not any("layers.0.mlp" in name or "layers.0.pre_feed" in name for name in outcome.manifest["smoothed_tensors"])
    assert outcome.manifest["units"]["layers.0.mlp.down_proj"].keys() == {"scheme", "method", "output_error"}
    assert verify_against_source(out, rough).differences == []
    bad = edited(out, tmp_path, louder(NORM, 5, 2.0), declare(NORM))
    assert "is not quantized" in str(verify_against_source(bad, rough).differences)


GATE_UP = {
    "int4-group": "{weights: {num_bits: 4, strategy: group, group_size: 64}}",
    "int4-channel": "{weights: {num_bits: 4, strategy: channel}}",
    "int8-group": "{weights: {num_bits: 8, strategy: group, group_size: 32}}",
    "int8-channel": "{weights: {num_bits: 8, strategy: channel}}",
    "w8a8": "{weights: {num_bits: 8, strategy: channel}, input_activations: {type: int}}",
    "fp8": "{weights: {num_bits: 8, type: float, strategy: channel}, input_activations: {type: float}}",
}


@pytest.fixture(scope="module", params=list(GATE_UP))
def beside(request, rough, tmp_path_factory):
    """A checkpoint whose down_proj is smoothed through an up_proj of each scheme, and whether gate and up are smoothed too."""
    gate_up = f"  - {{match: ['re:.*mlp.(gate|up)_proj$'], scheme: {GATE_UP[request.param]}}}\n"
    others = RULES.removeprefix("rules: [").rstrip()[:-1]
    made = parse_recipe(f"{HEAD}smoothing: {{alphas: [0.25, 0.5, 0.9]}}\nrules:\n{gate_up}  - {others}\n", "here")
    out = tmp_path_factory.mktemp("beside") / "checkpoint"
    manifest = run_job(rough, out, made).manifest
    assert UP in manifest["smoothed_tensors"]
    return out, NORM in manifest["smoothed_tensors"]


def test_verify_accepts_a_down_proj_that_is_smoothed_through_an_up_proj_of_any_scheme(beside, rough):
    checkpoint, _ = beside
    assert audit_structure(checkpoint).differences == []
    assert verify_against_source(checkpoint, rough).differences == []


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (row_scales(7, 2.0), {"model.layers.0.mlp.down_proj"}),
        (row_scales(7, 0.5), {"model.layers.0.mlp.down_proj"}),
        (row_scales(7, -1.0), {"model.layers.0.mlp.up_proj"}),
        (row_scales(7, 64.0), {UP}),
        (row_scales(slice(None), 2.0), {"model.layers.0.mlp.down_proj"}),
        (row_scales(slice(None), 1.3), {"model.layers.0.mlp.up_proj"}),
        (louder("model.layers.0.post_feedforward_layernorm.weight", 5, 1.03), {"model.layers.0.post_feedforward_layernorm.weight"}),
    ],
)
def test_verify_refuses_a_forged_scale_beside_an_up_proj_of_any_scheme(change, names, beside, rough, tmp_path):
    found = {difference.path for difference in verify_against_source(edited(beside[0], tmp_path, change), rough).differences}
    assert names <= found, found


def test_a_norm_that_smoothing_left_alone_may_not_move_at_all(beside, rough, tmp_path):
    checkpoint, norm_is_smoothed = beside
    found = {difference.path for difference in verify_against_source(edited(checkpoint, tmp_path, louder(NORM, 5, 1.03)), rough).differences}
    assert norm_is_smoothed or NORM in found, found


def test_the_audit_finds_nothing_in_a_smoothed_checkpoint_and_its_card_names_what_changed(smoothed):
    assert audit_structure(smoothed[0]).differences == []
    norms = sum(name.endswith("layernorm.weight") for name in smoothed[1].manifest["smoothed_tensors"])
    assert f"byte for byte, but for {norms} norms that take scales" in (smoothed[0] / "README.md").read_text()


# --- recipes and plans


def test_the_built_in_recipes_that_smooth_need_calibration():
    for name in ("w4a16-awq", "w4a16-gptq-awq"):
        made = load_recipe(name)
        assert made.smoothing is not None
        assert made.needs_calibration
        assert parse_recipe(made.to_yaml(), "again") == made
    assert load_recipe("w4a16-awq").method == "rtn"


@pytest.mark.parametrize(
    ("options", "rules", "word"),
    [
        ("smoothing: {alphas: []}\n", RULES, "smoothing.alphas"),
        ("smoothing: {alphas: [0.5, 0.2]}\n", RULES, "each larger"),
        ("smoothing: {alphas: [0, 0.2]}\n", RULES, "above 0"),
        ("smoothing: {alphas: [.nan]}\n", RULES, "above 0"),
        ("smoothing: {alphas: [1.5]}\n", RULES, "up to 1"),
        ("smoothing: {alpha: 0.5}\n", RULES, "valid: alphas"),
        ("smoothing: yes\n", RULES, "smoothing"),
        ("smoothing: {}\n", "rules: [{match: [decoder], scheme: {weights: {num_bits: 8, strategy: channel}, input_activations: {type: int}}}]\n",
         "inputs are not quantized"),
        ("smoothing: {}\n", "rules: [{match: [lm_head, ple], scheme: {weights: {num_bits: 8, strategy: channel}}}]\n", "attention or mlp"),
        ("smoothing: {}\n", "rules: [{match: [decoder], scheme: keep}]\n", "attention or mlp"),
    ],
)  # fmt: skip
def test_a_recipe_that_can_not_smooth_is_refused_with_the_reason(options, rules, word):
    with pytest.raises(UsageError, match=word):
        parse_recipe(f"{HEAD}{options}{rules}", "here")


def test_a_plan_tells_pairs_and_takes_their_norms_from_what_is_copied(rough):
    skeleton, _ = load_skeleton(rough)
    plan = make_plan(skeleton, recipe())
    assert len(plan.pairs) == 3 * 4
    adjusted = {spec.name for unit in plan.units for spec in plan.adjusted(unit.name)}
    assert len(adjusted) == 2 * 4
    assert not adjusted & {spec.name for spec in plan.copied}
    assert adjusted <= {spec.name for spec in plan.specs}
    assert len(plan.specs) == len({spec.name for spec in plan.specs})


def test_a_search_s_mixes_are_smoothed_where_they_can_be_and_its_sensitivities_are_not(rough):
    skeleton, _ = load_skeleton(rough)
    units = search_plan(skeleton, recipe(), head=False)
    assert units.pairs == {}
    mixes = {label: {decision.name: label for decision in decisions_of(units)} for label in ("int4-g32", "int8", "keep")}
    made = {label: make_plan(skeleton, recipe_of(recipe(), units, mix, "mix", "a mix")) for label, mix in mixes.items() if label != "keep"}
    assert [len(plan.pairs) for plan in made.values()] == [12, 12]
    half = {**mixes["int4-g32"], **{name: "keep" for name in mixes["keep"] if "mlp" in name}}
    plan = make_plan(skeleton, recipe_of(recipe(), units, half, "mix", "a mix"))
    assert {pair.module.rpartition(".")[2] for pair in plan.pairs.values()} == {"input_layernorm"}


def test_a_mixture_s_norm_is_left_alone_and_its_attention_is_smoothed(tmp_path):
    skeleton, _ = load_skeleton(gemma4.build("moe", tmp_path / "moe"))
    plan = make_plan(skeleton, recipe())
    kinds = {pair.module.split(".", 3)[3] for pair in plan.pairs.values()}
    assert kinds == {"input_layernorm", "mlp.up_proj"}


def test_nothing_to_smooth_and_an_architecture_whose_norms_nobody_looked_at_are_refused(rough, monkeypatch):
    skeleton, _ = load_skeleton(rough)
    only_o = parse_recipe(f"{HEAD}smoothing: {{}}\n{RULES.replace('[decoder]', '[' + chr(39) + 're:.*o_proj' + chr(39) + ']')}", "here")
    plan = make_plan(skeleton, only_o)
    assert plan.pairs == {}
    with pytest.raises(UsageError, match="can none of what it quantizes"):
        require_pairs(plan)
    monkeypatch.setattr(skeleton, "architecture", Architecture("Unseen", None, ("model.",), ("lm_head",)))
    with pytest.raises(UsageError, match="norms of Unseen"):
        make_plan(skeleton, recipe())
    assert all(row.norm_is_one_plus_w is not None for row in ARCHITECTURES.values())
