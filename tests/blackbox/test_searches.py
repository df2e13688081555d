"""Budget searches: what is published meets the budget when it is measured again, on any state; what no mix meets exits 3."""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests.blackbox.command import DONE, INTERRUPTED, OVER_BUDGET, USAGE, Done, Gemq
from tests.blackbox.files import left_beside, names, read_json, seal_of, tensors_of


@pytest.fixture
def search(gemq: Gemq, source: Path, options: list[str], records: Path):
    """A search with a budget into `out`, its state beside it."""

    def run(
        out: str, budget: float | str, *more: str | Path, kind: str = "--kl-budget", state: str = "state", candidates: str = "int4-g32,int8"
    ) -> Done:
        measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
        return gemq("quantize", source, *measured, kind, str(budget), "--candidates", candidates, "--search-builds", "2", "--search-state", state,
                    "--output", out, "--json", *more)  # fmt: skip

    return run


def measured_again(gemq: Gemq, out: Path, source: Path, records: Path, budget: str) -> Done:
    """The checkpoint held to its budget on the records that the search was given."""
    return gemq("eval-kl", out, "--reference", source, "--data", records, "--budget", budget, "--json")


@pytest.fixture(scope="module")
def searched(source: Path, options: list[str], records: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Done]:
    """A folder with what a search for 0.02 nats left, `state` and `first`; and the search."""
    folder = tmp_path_factory.mktemp("searched")
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    done = Gemq(folder, folder)("quantize", source, *measured, "--kl-budget", "0.02", "--candidates", "int4-g32,int8", "--search-builds", "2",
                                "--search-state", "state", "--output", "first", "--json")  # fmt: skip
    return folder, done.exited(DONE)


@pytest.fixture
def state(searched: tuple[Path, Done], work: Path) -> Path:
    """A copy of that state in the working folder."""
    return Path(shutil.copytree(searched[0] / "state", work / "state"))


def test_what_a_search_publishes_meets_its_budget_when_it_is_measured_again(gemq, searched, search, source, records, state, work):
    folder, done = searched
    assert done.json["seal"] == seal_of(folder / "first")
    again = measured_again(gemq, folder / "first", source, records, "0.02").exited(DONE).json
    assert again["kl_nats"]["upper_95"] <= 0.02
    gemq("verify", folder / "first", "--source", source).exited(DONE)
    assert names(folder) >= {"first", "state"}
    assert left_beside(folder / "first") == {"first"}
    told = read_json(folder / "first" / "gemq.json")["search"]
    assert any(value == pytest.approx(0.02) for value in _numbers(told)), told
    # the same search on the state that it left may build more, so it finds the same or something better, within the budget
    search("more", 0.02).exited(DONE)
    measured_again(gemq, work / "more", source, records, "0.02").exited(DONE)
    first, more = (read_json(out / "gemq.json")["bytes"]["per_token_checkpoint"] for out in (folder / "first", work / "more"))
    assert more <= first


def test_a_perplexity_budget_is_met_when_it_is_measured_again(gemq, search, source, records, work):
    search("out", "2%", kind="--ppl-budget").exited(DONE)
    gemq("eval-ppl", work / "out", "--reference", source, "--data", records, "--budget", "2%").exited(DONE)


def test_another_head_on_the_same_state_is_measured_against_the_budget_itself(gemq, search, source, records, work):
    """The int8 head is cheap in KL and the int4 head is not: what is known of a mix under the one says nothing of the other."""
    for head in ("int8", "int4"):
        done = search(head, 0.02, "--lm-head", head).exited(DONE, OVER_BUDGET)
        print(head, done.code)
        if done.code == OVER_BUDGET:
            assert left_beside(work / head) == set()
            continue
        packed = tensors_of(work / head)["lm_head.weight_packed"].shape
        assert packed[1] == 128 * int(head.removeprefix("int")) // 32
        measured_again(gemq, work / head, source, records, "0.02").exited(DONE)


def test_another_format_on_one_state_is_measured_against_the_budget_itself(gemq, search, source, records, work):
    done = search("out", 0.02, "--format", "gptq", "--lm-head", "keep").exited(DONE, OVER_BUDGET)
    assert left_beside(work / "out") == ({"out"} if done.code == DONE else set())
    if done.code == DONE:
        assert read_json(work / "out" / "config.json")["quantization_config"]["quant_method"] == "gptq"
        measured_again(gemq, work / "out", source, records, "0.02").exited(DONE)


def test_other_candidates_on_one_state_meet_the_budget_with_those_alone(gemq, search, source, records, state, work):
    """What was built of int8 linears is known and meets this budget; it is not among the candidates any more."""
    done = search("out", 0.06, candidates="int4-g128,int4-g32").exited(DONE, OVER_BUDGET)
    if done.code == OVER_BUDGET:
        assert left_beside(work / "out") == set()
        return
    measured_again(gemq, work / "out", source, records, "0.06").exited(DONE)
    schemes = {unit["scheme"] for name, unit in read_json(work / "out" / "gemq.json")["units"].items() if name != "lm_head"}
    assert schemes <= {"int4 g32", "int4 g128"}


@pytest.mark.parametrize(("kind", "budget"), [("--ppl-budget", "0.001%")])
def test_a_budget_that_no_mix_meets_exits_3_with_the_nearest_build(search, work, kind, budget):
    done = search("out", budget, kind=kind, candidates="int4-g32").exited(OVER_BUDGET)
    assert left_beside(work / "out") == set()
    assert "nearest" in done.told
    assert re.search(r"0\.0*1", done.stderr), "the budget is printed as zero"
    assert "0.00%" not in done.stderr


def test_a_search_says_so_where_resume_cannot_be_met(search, work):
    search("out", 0.2, "--resume", "required").exited(USAGE)
    assert left_beside(work / "out") == set()


@pytest.mark.parametrize("seed", [0])
def test_a_search_that_is_stopped_goes_on_to_the_same_checkpoint(gemq, searched, search, source, options, records, work, seed):
    folder, whole = searched
    draw = random.Random(500 + seed)
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    for attempt in range(3):
        moment, number = draw.uniform(0.4, 1.0) * whole.seconds, draw.choice([signal.SIGINT, signal.SIGKILL])
        print(f"seed {seed}, attempt {attempt}: {number.name} after {moment:.3f} s")
        running = gemq.start("quantize", source, *measured, "--kl-budget", "0.02", "--candidates", "int4-g32,int8", "--search-builds", "2",
                             "--search-state", "state", "--output", "out", "--json")  # fmt: skip
        limit = time.monotonic() + moment
        while time.monotonic() < limit and running.process.poll() is None:
            time.sleep(0.005)
        running.send(number)
        running.finish().exited(DONE, INTERRUPTED, -signal.SIGKILL)
        if (work / "out").exists():
            break
        assert left_beside(work / "out") <= {"out.partial", "out.partial.lock"}
    else:
        search("out", 0.02).exited(DONE)
    assert seal_of(work / "out") == seal_of(folder / "first")


def test_a_search_of_another_source_on_one_state_takes_nothing_over(gemq, options, records, source, state, work, tmp_path):
    """The state is of a search of the same architecture with other weights."""
    from tests.blackbox import sources

    model = sources.changed(source, tmp_path / "model", lambda tensors: tensors["model.layers.0.mlp.down_proj.weight"].mul_(3.0))
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]

    def run(out: str, state: str) -> Done:
        return gemq("quantize", model, *measured, "--kl-budget", "0.02", "--candidates", "int4-g32,int8", "--search-state", state, "--output", out)

    code = run("two", "state").exited(DONE, OVER_BUDGET).code
    run("alone", "alone-state").exited(code)
    if code == DONE:
        measured_again(gemq, work / "two", model, records, "0.02").exited(DONE)
        assert seal_of(work / "two") == seal_of(work / "alone")


def test_pareto_draws_from_the_searchs_state_and_changes_nothing_else(gemq, searched, source, options, state, work):
    given = options[2 : options.index("--eval-data")]
    command = ("pareto", source, "--recipe", "w4a16-g32", *given, "--search-state", "state", "--output", "pareto", "--kl-budget", "0.02", "--json")
    gemq(*command).exited(DONE)
    assert names(work) - {"state.lock"} == {"state", "pareto"}
    assert any(name.endswith(".html") for name in names(work / "pareto"))
    gemq(*command).exited(USAGE)  # it exists


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [number for inner in value.values() for number in _numbers(inner)]
    if isinstance(value, list):
        return [number for inner in value for number in _numbers(inner)]
    return [float(value)] if isinstance(value, (int, float)) else []


def test_budgets_and_candidates_that_make_no_sense_are_refused(search, work):
    for kind, budget in (("--kl-budget", "nan"), ("--ppl-budget", "-5%")):
        search("out", budget, kind=kind).exited(USAGE, OVER_BUDGET)
    search("out", 0.02, candidates="int5-g7").exited(USAGE)
    assert left_beside(work / "out") == set()
