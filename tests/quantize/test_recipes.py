"""Recipes: what is read, what is refused and in which words."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import UsageError
from gemq.quantize.plan import make_plan, with_head
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import built_in_names, load_recipe, parse_recipe

GOOD = """
version: 1
name: mine
summary: for tests
rules:
  - match: [decoder]
    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}
"""


@pytest.mark.parametrize("name", built_in_names())
def test_built_in_recipes_load_say_what_they_trade_and_come_back_from_their_yaml(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert len(recipe.summary) > 30
    assert parse_recipe(recipe.to_yaml(), name) == recipe


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (("version: 1", "version: 2"), "version"),
        (("summary: for tests", "summary: for tests\nspeed: 11"), r"unknown key speed \(valid: version, name"),
        (("num_bits: 4", "num_bits: 3"), r"rules\.0\.scheme\.weights\.num_bits: Input should be 4 or 8"),
        (("num_bits: 4", "num_bits: 4, bits: 4"), r"unknown key rules\.0\.scheme\.weights\.bits \(valid: num_bits, type"),
        (("group_size: 32", "group_size: 48"), "group_size is 48, vLLM's kernels take 32, 64, 128"),
        (("[decoder]", "[decodr]"), "'decodr' is neither a part"),
        (("[decoder]", "[]"), r"rules\.0\.match"),
        (("name: mine", "name: mine\nname: yours"), "'name' is given twice"),
        (("strategy: group, group_size: 32", "strategy: channel, group_size: 32"), "takes no group_size"),
        (("num_bits: 4", "num_bits: 8, type: float"), "type: float takes"),
        (("name: mine", "name: ../../etc"), "name"),
        (("num_bits: 4", "num_bits: 4, symmetric: false"), "symmetric"),
        (("rules:", "rules: {"), "not valid YAML"),
        (("version: 1", "- version"), "not valid YAML"),
    ],
)
def test_a_bad_recipe_is_refused_by_key_and_valid_values(edit, says):
    text = GOOD.replace(*edit)
    assert text != GOOD
    with pytest.raises(UsageError, match=says) as raised:
        parse_recipe(text, "mine.yaml")
    assert raised.value.exit_code == 2
    assert raised.value.next_step


@pytest.mark.parametrize("text", ["", "[]", "1", "a: &a [*a]", "\x00", "!!python/object/apply:os.system ['true']"])
def test_what_is_no_recipe_at_all_is_refused(text):
    with pytest.raises(UsageError):
        parse_recipe(text, "mine.yaml")


def test_an_unknown_recipe_lists_those_there_are():
    with pytest.raises(UsageError, match="no recipe 'w3a16'") as raised:
        load_recipe("w3a16")
    assert "w4a16" in raised.value.next_step


def test_a_missing_file_is_no_traceback(tmp_path):
    with pytest.raises(UsageError, match="can't be read"):
        load_recipe(str(tmp_path / "none.yaml"))


def rule(match: str, scheme: str = "{weights: {num_bits: 4, strategy: group, group_size: 32}}", **more: str) -> str:
    extra = "".join(f"\n    {key}: {value}" for key, value in more.items())
    return f"version: 1\nname: mine\nsummary: for tests\nrules:\n  - match: {match}\n    scheme: {scheme}{extra}\n"


@pytest.mark.parametrize(
    ("text", "says", "advice"),
    [
        (rule("[ple]"), "matches no linear", "attention"),
        (rule("[ple_embedding]"), "matches no linear", "no such table"),
        (rule("['re:.*embed_tokens']"), "matches no linear", r"match: [embedding]"),
        (rule("['re:model.layers.9.*']"), "matches no linear", "patterns match from the start"),
        (rule("['re:.*q_proj']"), "splits layers.0.self_attn.qkv_proj, which vLLM fuses", "one scheme"),
        (rule("['re:.*norm']"), "matches no linear", "only decoder linears"),
    ],
)
def test_a_rule_that_cannot_be_carried_out_is_refused_with_the_reason(gemma3, text, says, advice):
    skeleton, _ = load_skeleton(gemma3)
    with pytest.raises(UsageError, match=says) as raised:
        make_plan(skeleton, parse_recipe(text, "mine.yaml"))
    assert advice in raised.value.next_step


def test_a_rule_into_a_tower_is_refused_by_the_tensors_name(gemma3_multimodal):
    skeleton, _ = load_skeleton(gemma3_multimodal)
    with pytest.raises(UsageError, match="matches no linear") as raised:
        make_plan(skeleton, parse_recipe(rule("['re:vision_tower.*']"), "mine.yaml"))
    assert "vision_tower.vision_model" in raised.value.next_step


def test_a_group_size_that_does_not_divide_is_refused_by_the_tensors_name(tmp_path):
    from tests.models.gemma3 import build_gemma3_text

    skeleton, _ = load_skeleton(build_gemma3_text(tmp_path / "model", intermediate_size=224))
    with pytest.raises(UsageError, match=r"group_size 128 doesn't divide the 224 inputs of model\.layers\.0\.mlp\.down_proj") as raised:
        make_plan(skeleton, load_recipe("w4a16"))
    assert "32" in raised.value.next_step


def test_the_first_rule_that_matches_wins(gemma3):
    skeleton, _ = load_skeleton(gemma3)
    text = GOOD.replace("rules:", "rules:\n  - match: ['re:.*layers.1.mlp.*']\n    scheme: keep")
    plan = make_plan(skeleton, parse_recipe(text, "mine.yaml"))
    assert {matrix.module for matrix in plan.kept} == {f"model.layers.1.mlp.{name}_proj" for name in ("gate", "up", "down")} | {"lm_head"}


def test_the_head_option_adds_replaces_and_removes_the_heads_rule(gemma3):
    skeleton, _ = load_skeleton(gemma3)
    plan = make_plan(skeleton, with_head(load_recipe("w4a16"), "int4"))
    assert plan.quantized_matrices["lm_head"].scheme.label() == "int4 channel"
    assert "lm_head" not in make_plan(skeleton, with_head(with_head(load_recipe("w4a16"), "int8"), "keep")).quantized_matrices
    with pytest.raises(UsageError, match="--lm-head is 'int5'"):
        with_head(load_recipe("w4a16"), "int5")


@pytest.mark.parametrize("match", ["[decoder, lm_head]", "['re:.*']", "['re:lm_head']", "['re:(lm_|.*_proj)']", "[lm_head, decoder, 're:.*head']"])
def test_the_head_option_wins_over_every_rule_that_reaches_the_head(gemma3, match):
    skeleton, _ = load_skeleton(gemma3)
    decoder = "" if "_proj" in match or "decoder" in match or ".*']" in match else (
        "\n  - match: [decoder]\n    scheme: {weights: {num_bits: 8, strategy: channel}}")  # fmt: skip
    text = f"version: 1\nname: mine\nsummary: s\nrules:\n  - match: {match}\n    scheme: {{weights: {{num_bits: 8, strategy: channel}}}}{decoder}\n"
    recipe = parse_recipe(text, "mine.yaml")
    others = {name for name in make_plan(skeleton, recipe).quantized_matrices if name != "lm_head"}
    assert others
    assert "lm_head" in make_plan(skeleton, recipe).quantized_matrices
    for head, label in (("keep", None), ("int4", "int4 channel"), ("int8", "int8 channel")):
        made = make_plan(skeleton, with_head(recipe, head)).quantized_matrices
        assert ("lm_head" in made) == (label is not None), head
        assert label is None or made["lm_head"].scheme.label() == label
        assert {name for name in made if name != "lm_head"} == others
    # the last option given is the one that counts
    assert "lm_head" not in make_plan(skeleton, with_head(with_head(recipe, "int4"), "keep")).quantized_matrices
    assert "lm_head" in make_plan(skeleton, with_head(with_head(recipe, "keep"), "int4")).quantized_matrices


def test_the_head_option_wins_over_a_rule_that_keeps_the_head(gemma3):
    skeleton, _ = load_skeleton(gemma3)
    text = GOOD.replace("rules:", "rules:\n  - match: ['re:.*head.*', 're:.*layers.1.mlp.*']\n    scheme: keep")
    made = make_plan(skeleton, with_head(parse_recipe(text, "mine.yaml"), "int8")).quantized_matrices
    assert made["lm_head"].scheme.label() == "int8 channel"
    assert not [name for name in made if "layers.1.mlp" in name]


def test_a_plan_covers_every_tensor_of_the_source_once(gemma3_multimodal):
    skeleton, reader = load_skeleton(gemma3_multimodal)
    plan = make_plan(skeleton, load_recipe("w4a16"))
    replaced = {matrix.tensor for matrix in plan.quantized_matrices and [m for unit in plan.units for m in unit.matrices]}
    assert {spec.name for spec in plan.copied} | replaced == set(reader.tensors)
    assert not {spec.name for spec in plan.copied} & replaced
    assert len(replaced) == 4 * 7


MORE_RULE = "  - match: {0}\n    scheme: keep\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("[decoder]", "['re:.*(']"), r"rules\.0\.match: 're:\.\*\(' is not a valid regular expression"),
        (GOOD.replace("[decoder]", "['re:*']"), r"rules\.0\.match.*not a valid regular expression"),
        (GOOD.replace("[decoder]", r"['re:.*q_proj\.weight$']"), r"rules\.0\.match.*without \.weight"),
        (GOOD.replace("[decoder]", "['re:.*(q_proj|k_proj).weight']"), r"without \.weight"),
        (GOOD.replace("[decoder]", "['re:']"), "empty pattern"),
        (GOOD.replace("[decoder]", "[mlp, mlp]"), "'mlp' is given twice"),
        (GOOD.replace("[decoder]", "decoder"), r"rules\.0\.match: 'decoder' is not valid: give a list"),
        (GOOD + MORE_RULE.format("[decoder]"), r"rules\.1 \['decoder'\] never applies.*rules\.0"),
        (GOOD + MORE_RULE.format("[mlp, attention]"), r"rules\.1 .*never applies"),
        (GOOD.replace("[decoder]", "['re:.*']") + MORE_RULE.format("[lm_head]"), r"rules\.1 .*never applies"),
        (GOOD.replace("[decoder]", "['re:a']") + MORE_RULE.format("['re:a']"), r"rules\.1 .*never applies"),
        (GOOD.replace("[decoder]", "[attention, mlp]") + MORE_RULE.format("[experts]") + MORE_RULE.format("[decoder]"), r"rules\.2 .*never"),
        (GOOD + "    optional: yes\n", r"rules\.0\.optional: 'yes' is not valid: give true or false"),
        (GOOD.replace("group_size: 32", 'group_size: "32"'), r"group_size: '32' is not valid: give a whole number"),
        (GOOD.replace("group_size: 32", "group_size: 040"), r"group_size"),
        (GOOD.replace("num_bits: 4", "num_bits: 4.0"), r"num_bits: 4\.0 is not a whole number"),
        (GOOD.replace("version: 1", "version: true"), "version: True is not a whole number"),
        (GOOD.replace("name: mine", "name:"), "name: None is not valid: give text"),
        (GOOD + "smoothing: true\n", "smoothing: True is not valid: give a mapping"),
        (GOOD + "gptq: {dampening: .nan}\n", r"gptq\.dampening"),
        (GOOD.replace("{weights: {num_bits: 4, strategy: group, group_size: 32}}", "int4"), r"rules\.0\.scheme.*'keep'"),
        (GOOD.replace("[decoder]", "!!set {decoder}"), r"rules\.0\.match is a set"),
        (GOOD + "1: 2\n", "the key 1 is not a name"),
        (GOOD + "? [a]\n: 1\n", "not a valid key"),
        (GOOD + "---\n" + GOOD, "another document"),
        (GOOD.replace("for tests", '"\\ud800"'), "surrogate"),
        ("\n".join(["a0: &a0 [1,1,1,1,1,1,1,1,1,1]"] + [f"a{i}: &a{i} [{','.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]), "too large"),
    ],
)
def test_a_recipe_that_is_not_what_it_looks_like_is_refused_by_its_key(text, says):
    with pytest.raises(UsageError, match=says) as raised:
        parse_recipe(text, "mine.yaml")
    assert raised.value.next_step


def test_rules_that_overlap_in_part_aliases_merges_a_byte_order_mark_and_plain_words_are_read():
    shared = GOOD.replace("scheme: {", "scheme: &int4 {").replace("[decoder]", "[mlp]") + "  - match: [decoder, lm_head]\n    scheme: *int4\n"
    recipe = parse_recipe("\ufeff" + shared, "mine.yaml")
    assert recipe.rules[0].scheme == recipe.rules[1].scheme
    merged = GOOD + "    <<: {optional: true}\n"
    assert parse_recipe(merged, "mine.yaml").rules[0].optional
    assert parse_recipe(GOOD.replace("mine", "no"), "mine.yaml").name == "no"
    assert parse_recipe(GOOD + "gptq: {dampening: 1e-3}\n", "mine.yaml").gptq.dampening == 0.001


@pytest.mark.parametrize("kind", ["directory", "latin-1", "utf-16", "empty", "list", "pattern", "shadowed", "twice", "missing"])
def test_validate_refuses_a_file_that_is_not_a_recipe(kind, tmp_path):
    path = tmp_path / "mine.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind != "missing":
        path.write_bytes({
            "latin-1": GOOD.replace("tests", "tests\u00e9").encode("latin-1"), "utf-16": GOOD.encode("utf-16"), "empty": b"", "list": b"- a\n",
            "pattern": GOOD.replace("[decoder]", "['re:.*(']").encode(), "shadowed": (GOOD + MORE_RULE.format("[mlp]")).encode(),
            "twice": GOOD.replace("version: 1", "version: 1\nversion: 1").encode(),
        }[kind])  # fmt: skip
    done = CliRunner().invoke(app, ["recipes", "validate", str(path)])
    assert isinstance(done.exception, UsageError), done.output
    assert done.exception.exit_code == 2
    assert done.exception.next_step
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    assert CliRunner().invoke(app, ["recipes", "validate", str(path)]).exit_code == 0
