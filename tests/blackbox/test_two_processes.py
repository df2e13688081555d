"""Two commands at one output, state or result: one wins with the right result, the other is refused, and a refusal changes nothing.

The first is held by SIGSTOP, so that it is alive and half-way while the others try.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tests.blackbox.command import DONE, STOPPED, USAGE, Gemq, stopped
from tests.blackbox.files import left_beside, names, read_json, seal_of, tree
from tests.models.gemma3 import build_gemma3_text


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers: long enough to be held half-way."""
    return build_gemma3_text(
        tmp_path_factory.mktemp("sources") / "eight", num_hidden_layers=8, layer_types=["sliding_attention", "full_attention"] * 4
    )


@pytest.fixture(scope="module")
def alone(source: Path, options: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The seal of a run that was alone."""
    folder = tmp_path_factory.mktemp("alone")
    Gemq(folder, folder)("quantize", source, *options, "--output", "out").exited(DONE)
    return seal_of(folder / "out")


def test_two_quantizations_of_one_output_at_once(gemq, source, options, alone, work):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    both = [gemq.start(*command), gemq.start(*command)]
    codes = sorted(running.finish().code for running in both)
    assert codes == [DONE, USAGE]
    assert left_beside(out) == {"out"}
    gemq("verify", out, "--source", source).exited(DONE)
    assert seal_of(out) == alone


def test_refused_attempts_leave_the_live_run_and_its_lock_alone(gemq, source, options, alone, work):
    """Whatever is tried, as often as it is tried: the second attempt after a refusal is refused as well."""
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    live = gemq.start(*command)
    assert live.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    with stopped(live):
        before = tree(work)
        for more in ([], [], ["--resume", "never"]):
            refused = gemq(*command, *more).exited(USAGE)
            assert "another" in refused.stderr
            assert tree(work) == before
    live.finish().exited(DONE)
    assert left_beside(out) == {"out"}
    assert seal_of(out) == alone


def test_another_spelling_of_a_live_runs_output_is_the_same_output(gemq, source, options, work):
    (work / "link").symlink_to(work)
    live = gemq.start("quantize", source, *options, "--output", work / "out")
    assert live.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    with stopped(live):
        for spelling in ("out/", work / "link" / "out"):
            gemq("quantize", source, *options, "--output", spelling, "--resume", "never").exited(USAGE)
    live.finish().exited(DONE)
    gemq("verify", work / "out").exited(DONE)


def test_an_output_that_appears_while_a_run_works_is_not_overwritten(gemq, source, options, work):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    live = gemq.start(*command)
    assert live.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    with stopped(live):
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    live.finish().exited(USAGE, STOPPED)
    assert tree(out).keys() == {"mine.txt"}
    shutil.rmtree(out)
    gemq(*command).exited(DONE)
    gemq("verify", out).exited(DONE)


def search(source: Path, options: list[str], records: Path, state: Path, out: Path) -> list[str | Path]:
    """A search of few builds."""
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    return ["quantize", source, *measured, "--kl-budget", "0.2", "--candidates", "int4-g32,int8", "--search-builds", "1",
            "--search-state", state, "--output", out]  # fmt: skip


def test_two_searches_do_not_share_a_state_at_once(gemq, source, options, records, work):
    live = gemq.start(*search(source, options, records, work / "state", work / "one"))
    assert live.wait_for(lambda: (work / "state").is_dir() and any(not name.endswith(".lock") for name in names(work / "state")))
    with stopped(live):
        before = tree(work)
        for name in ("two", "two"):
            gemq(*search(source, options, records, work / "state", work / name)).exited(USAGE)
        gemq("pareto", source, "--recipe", "w4a16-g32", "--search-state", work / "state", "--output", work / "pareto").exited(USAGE)
        assert tree(work) == before
    live.finish().exited(DONE)
    gemq("verify", work / "one", "--source", source).exited(DONE)


def test_two_measurements_into_one_result(gemq, source, records, work):
    """Either one is refused, or both wrote the same whole result."""
    command = ("eval-ppl", source, "--data", records, "--output", work / "result.json")
    both = [gemq.start(*command), gemq.start(*command)]
    codes = sorted(running.finish().code for running in both)
    assert codes in ([DONE, DONE], [DONE, USAGE], [DONE, STOPPED])
    gemq("eval-ppl", source, "--data", records, "--output", work / "alone.json").exited(DONE)
    assert read_json(work / "result.json") == read_json(work / "alone.json")
    assert names(work) == {"result.json", "alone.json"}
