"""What a refusal of a recipe advises is followed to the letter here, and the result must plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.models.gemma3 import build_gemma3_text
from tests.models.gemma4 import build
from tests.models.real_configs import real_config

from gemq.errors import UsageError
from gemq.quantize.plan import Plan, make_plan, with_format, with_head
from gemq.quantize.skeleton import Skeleton, load_skeleton
from gemq.recipes.model import Recipe, Rule, built_in_names, load_recipe, parse_recipe

_G128 = "{weights: {num_bits: 4, strategy: group, group_size: 128}}"
_G32 = "{weights: {num_bits: 4, strategy: group, group_size: 32}}"
_INT8 = "{weights: {num_bits: 8, strategy: channel}}"
_FP8 = "{weights: {num_bits: 8, type: float, strategy: channel}, input_activations: {type: float}}"


def recipe_of(*rules: str) -> Recipe:
    lines = "".join(f"  - {{{rule}}}\n" for rule in rules)
    return parse_recipe(f"version: 1\nname: mine\nsummary: mine\nmethod: rtn\nrules:\n{lines}", "mine.yaml")


def real(name: str, **text: object) -> Callable[[Path], None]:
    """A folder with the config of a real model alone, `text` overriding keys of its decoder's."""

    def make(folder: Path) -> None:
        folder.mkdir()
        config = real_config(name)
        config["text_config"] |= text
        (folder / "config.json").write_text(json.dumps(config))

    return make


MODELS: dict[str, Callable[[Path], object]] = {
    "gemma3": build_gemma3_text,
    "gemma3-narrow-mlp": lambda out: build_gemma3_text(out, intermediate_size=200),  # no multiple of 32
    "gemma3-narrow-mlp-224": lambda out: build_gemma3_text(out, intermediate_size=224),
    "gemma3-odd-vocabulary": lambda out: build_gemma3_text(out, vocab_size=520),
    "gemma3-odd-hidden": lambda out: build_gemma3_text(out, hidden_size=100),
    "e4b": lambda out: build("e4b", out),
    "e4b-narrow-ple": lambda out: build("e4b", out, hidden_size_per_layer_input=12),
    "26b-a4b": real("26b-a4b"),
    "26b-a4b-odd-experts": real("26b-a4b", moe_intermediate_size=700),
    "31b": real("31b"),
    "e2b": real("e2b"),
}


@pytest.fixture(scope="module")
def skeleton_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Skeleton]:
    folder, made = tmp_path_factory.mktemp("advice"), {}

    def get(name: str) -> Skeleton:
        if name not in made:
            MODELS[name](folder / name)
            made[name] = load_skeleton(folder / name)[0]
        return made[name]

    return get


def followed(recipe: Recipe, advice: str) -> Recipe:
    """`recipe` with what `advice` says done to it, by its words alone."""
    rules = list(recipe.rules)
    done = 0

    def with_match(text: str) -> int:
        match = tuple(yaml.safe_load(text))
        return next(number for number, rule in enumerate(rules) if rule.match == match)

    if "--format gptq" in advice or "leave out --format" in advice:
        recipe, done = recipe.model_copy(update={"format": "compressed-tensors"}), done + 1
    if "leave out --lm-head" in advice:
        rules, done = list(with_head(recipe, "keep").rules), done + 1
    if "--lm-head int8" in advice:
        rules, done = list(with_head(recipe, "int8").rules), done + 1
    for step in re.split(r"; ", advice):
        if found := re.search(r"set group_size: (\d+) in the rule with match: (\[.*?\])(?: \(|$)", step):
            number = with_match(found.group(2))
            weights = rules[number].scheme.weights.model_copy(update={"group_size": int(found.group(1))})
            rules[number] = rules[number].model_copy(update={"scheme": rules[number].scheme.model_copy(update={"weights": weights})})
        elif found := re.search(r"set strategy: channel, without group_size, in the rule with match: (\[.*\])$", step):
            number = with_match(found.group(1))
            weights = rules[number].scheme.weights.model_copy(update={"group_size": None, "strategy": "channel"})
            rules[number] = rules[number].model_copy(update={"scheme": rules[number].scheme.model_copy(update={"weights": weights})})
        elif found := re.search(r"put this rule first: (\{.*\})$", step):
            rules.insert(0, Rule.model_validate(yaml.safe_load(found.group(1))))
        elif found := re.search(r"add (.*) to match: (\[.*\])$", step):
            number = with_match(found.group(2))
            added = tuple(yaml.safe_load(f"[{found.group(1)}]"))
            rules[number] = rules[number].model_copy(update={"match": (*rules[number].match, *added)})
        elif found := re.search(r"take (\w+) out of match: (\[.*\])$", step):
            number = with_match(found.group(2))
            left = tuple(entry for entry in rules[number].match if entry != found.group(1))
            rules[number : number + 1] = [rules[number].model_copy(update={"match": left})] if left else []
        elif found := re.search(r"in the rule with match: (\[.*\]): scheme: (\{.*\})$", step):
            number = with_match(found.group(1))
            rules[number] = Rule.model_validate({**rules[number].model_dump(), "scheme": yaml.safe_load(found.group(2))})
        elif found := re.search(r"give the rule with match: (\[.*\]) method: rtn$", step):
            number = with_match(found.group(1))
            rules[number] = rules[number].model_copy(update={"method": "rtn"})
        else:
            continue
        done += 1
    assert done, f"nothing to follow in: {advice}"
    return recipe.model_copy(update={"rules": tuple(rules)})


MINE: dict[str, tuple[str, Recipe]] = {
    "half of gate and up kept": (
        "gemma3", recipe_of("match: ['re:.*layers[.]0[.]mlp[.]gate_proj'], scheme: keep", f"match: [decoder], scheme: {_G32}"),
    ),
    "q alone in every layer": ("gemma3", recipe_of(f"match: ['re:.*q_proj'], scheme: {_G32}")),
    "q and o in one rule": ("gemma3", recipe_of(f"match: ['re:.*(q|o)_proj'], scheme: {_INT8}", f"match: [decoder], scheme: {_G32}")),
    "k before q in some layers": (
        "e4b", recipe_of("match: ['re:.*layers[.][1-3].*k_proj'], scheme: keep", f"match: ['re:.*q_proj'], scheme: {_INT8}",
                         f"match: [decoder, ple], scheme: {_G32}"),
    ),
    "down projections of a mixture in int8": (
        "26b-a4b", recipe_of(f"match: ['re:.*experts[.]down_proj$'], scheme: {_INT8}", f"match: [decoder], scheme: {_G32}"),
    ),
    "a mixture split and too wide groups": (
        "26b-a4b", recipe_of(f"match: ['re:.*experts[.]down_proj$'], scheme: {_G128}", f"match: [decoder], scheme: {_G128}"),
    ),
    "v of a model without v in full layers": ("31b", recipe_of("match: ['re:.*v_proj'], scheme: keep", f"match: [decoder], scheme: {_G32}")),
    "groups in an mlp of 200": ("gemma3-narrow-mlp", recipe_of(f"match: [decoder], scheme: {_G128}")),
    "rows in an mlp of 200": ("gemma3-narrow-mlp", recipe_of(f"match: [decoder], scheme: {_INT8}")),
    "groups in an mlp of 224": ("gemma3-narrow-mlp-224", recipe_of(f"match: [mlp], scheme: {_G128}", f"match: [attention], scheme: {_G128}")),
    "experts of 700": ("26b-a4b-odd-experts", recipe_of(f"match: [decoder], scheme: {_G128}")),
    "a head of 520 rows": ("gemma3-odd-vocabulary", recipe_of(f"match: [lm_head], scheme: {_INT8}", f"match: [decoder], scheme: {_G32}")),
    "a tied table": ("gemma3", recipe_of(f"match: [embedding], scheme: {_G128}", f"match: [decoder], scheme: {_G32}")),
    "a table by its name": ("gemma3", recipe_of(f"match: [embedding], scheme: {_FP8}, method: gptq", f"match: [decoder], scheme: {_G128}")),
    "a narrow table": ("e4b-narrow-ple", recipe_of(f"match: [ple_embedding], scheme: {_G128}", f"match: [decoder, ple], scheme: {_G32}")),
}  # fmt: skip


def refused(skeleton: Skeleton, recipe: Recipe) -> UsageError | None:
    try:
        make_plan(skeleton, recipe)
    except UsageError as error:
        return error
    return None


def plan_as_advised(skeleton: Skeleton, recipe: Recipe) -> Plan:
    error = refused(skeleton, recipe)
    assert error is not None, "the recipe is not refused, and tests nothing"
    return make_plan(skeleton, followed(recipe, error.next_step))


@pytest.mark.parametrize("name", MINE)
def test_a_recipe_changed_as_advised_plans(name, skeleton_of):
    model, recipe = MINE[name]
    plan_as_advised(skeleton_of(model), recipe)


@pytest.mark.parametrize("name", MINE)
def test_in_the_gptq_format_too(name, skeleton_of):
    model, recipe = MINE[name]
    plan_as_advised(skeleton_of(model), with_format(recipe, "gptq"))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
@pytest.mark.parametrize("name", built_in_names())
def test_a_built_in_recipe_plans_or_tells_how(name, form, model, skeleton_of):
    recipe = with_format(with_head(load_recipe(name), "int8"), form)
    error = refused(skeleton_of(model), recipe)
    if error is None or "matches no linear" in error.message:
        return
    if model == "gemma3-odd-hidden":
        assert "serve this model unquantized" in error.next_step
    else:
        make_plan(skeleton_of(model), followed(recipe, error.next_step))


def test_advice_about_the_head_can_be_followed_on_the_command_line(skeleton_of):
    """--lm-head puts its rule before those of the file: a rule there could not keep the head."""
    error = refused(skeleton_of("gemma3-odd-vocabulary"), with_head(load_recipe("w4a16"), "int8"))
    assert error is not None
    assert "leave out --lm-head" in error.next_step
    make_plan(skeleton_of("gemma3-odd-vocabulary"), load_recipe("w4a16"))


def test_the_advice_leaves_as_much_as_possible_quantized(skeleton_of):
    """Only what has no kernel is kept: gate, up and down of 200, in every layer; attention takes the groups that it was given."""
    skeleton = skeleton_of("gemma3-narrow-mlp")
    plan = plan_as_advised(skeleton, MINE["groups in an mlp of 200"][1])
    assert {matrix.kind.part for matrix in plan.kept} == {"mlp", "lm_head"}
    assert {unit.scheme.label() for unit in plan.units} == {"int4 g128"}
    experts = plan_as_advised(skeleton_of("26b-a4b-odd-experts"), MINE["experts of 700"][1])
    assert {matrix.kind.part for matrix in experts.kept} == {"experts", "lm_head"}
    assert {unit.scheme.label() for unit in experts.units} == {"int4 g64"}


def test_the_real_mixture_takes_groups_of_64_as_advised(skeleton_of):
    for name in ("w4a16", "w8a16"):
        plan = plan_as_advised(skeleton_of("26b-a4b"), load_recipe(name))
        assert {unit.scheme.weights.group_size for unit in plan.units} == {64}
        assert sum("experts" in unit.name for unit in plan.units) == 60


def test_channel_wise_is_not_advised_where_no_kernel_takes_it(skeleton_of):
    for recipe in (MINE["groups in an mlp of 200"][1], load_recipe("w4a16")):
        error = refused(skeleton_of("gemma3-narrow-mlp"), recipe)
        assert error is not None
        assert "strategy: channel" not in error.next_step
        assert "gate_proj" in error.next_step
        assert "up_proj" in error.next_step
