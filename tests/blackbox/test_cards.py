"""Cards, reports and packages state what was measured of these weights: a measurement follows the content, not the path."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.blackbox.command import DONE, INTEGRITY, USAGE, Gemq
from tests.blackbox.files import names, read_json, seal_of


@pytest.fixture(scope="module")
def made(source: Path, options: list[str], records: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two checkpoints of one source, `w4` and `w8`, and what was measured of `w4` at its path, `w4.json`."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "home").mkdir()
    gemq = Gemq(folder / "home", folder)
    gemq("quantize", source, *options, "--output", "w4").exited(DONE)
    gemq("quantize", source, *options, "--recipe", "w8a16", "--output", "w8").exited(DONE)
    gemq("eval-ppl", "w4", "--reference", source, "--data", records, "--output", "w4.json").exited(DONE)
    return folder


@pytest.fixture
def work(gemq: Gemq, made: Path) -> Path:
    """A copy of them at paths of its own; the measurement names the path of this copy."""
    for name in ("w4", "w8"):
        shutil.copytree(made / name, gemq.cwd / name)
    shutil.copyfile(made / "w4.json", gemq.cwd / "w4.json")
    return gemq.cwd


def value(work: Path) -> str:
    """The perplexity that was measured, as a card rounds it."""
    return f"{read_json(work / 'w4.json')['ppl']['value']:.6g}"[:5]


def test_a_measurement_names_what_was_measured_by_content(work):
    document = json.dumps(read_json(work / "w4.json"))
    digests = {seal_of(work / "w4"), content_of(work / "w4")}
    assert any(digest in document for digest in digests)


def content_of(checkpoint: Path) -> str:
    """The content digest, which its own card states."""
    card = (checkpoint / "README.md").read_text()
    return card.split("Content digest: `")[1].split("`")[0]


def test_the_checkpoint_that_was_measured_has_its_numbers_wherever_it_lies(gemq, work):
    shutil.move(work / "w4", work / "moved")
    gemq("card", "moved", "--measured", "w4.json", "--output", "carded").exited(DONE)
    card = (work / "carded" / "README.md").read_text()
    assert value(work) in card
    gemq("verify", "carded").exited(DONE)


def test_another_checkpoint_at_the_measured_path_does_not_get_its_numbers(gemq, work):
    shutil.move(work / "w4", work / "moved")
    shutil.move(work / "w8", work / "w4")
    gemq("card", "w4", "--measured", "w4.json", "--output", "carded").exited(USAGE, INTEGRITY)
    assert not (work / "carded").exists()
    gemq("card", "w4", "--measured", "w4.json").exited(USAGE, INTEGRITY)


def test_the_card_of_another_checkpoint_is_refused_those_numbers(gemq, work):
    gemq("card", "w8", "--measured", "w4.json", "--output", "carded").exited(USAGE, INTEGRITY)
    assert not (work / "carded").exists()


def test_a_package_takes_over_only_its_own_checkpoints_numbers(gemq, work):
    gemq("package", "w4", "--arena", "efficient-gemma", "--force", "--measured", "w4.json", "--output", "package").exited(DONE)
    assert value(work) in (work / "package" / "README.md").read_text()
    shutil.move(work / "w4", work / "moved")
    shutil.move(work / "w8", work / "w4")
    gemq("package", "w4", "--arena", "efficient-gemma", "--force", "--measured", "w4.json", "--output", "wrong").exited(USAGE, INTEGRITY)
    assert "wrong" not in names(work)


def test_a_report_of_a_folder_does_not_print_one_checkpoints_numbers_on_the_other(gemq, work):
    """The folder holds w8's bytes at the path where w4 was measured, and that measurement."""
    shutil.rmtree(work / "w4")
    shutil.move(work / "w8", work / "w4")
    folder = work / "both"
    folder.mkdir()
    shutil.move(work / "w4", folder / "w4")
    result = read_json(work / "w4.json")
    result["target"] = str(folder / "w4")
    (folder / "w4.json").write_text(json.dumps(result))
    done = gemq("report", "both", "--output", "report", "--json").exited(DONE, USAGE, INTEGRITY)
    if done.code != DONE:
        return
    rows = [row for row in _rows(done.json) if value(work) in json.dumps(row)]
    assert not [row for row in rows if "w8a16" in json.dumps(row)], "w4's perplexity stands on w8's bytes"


def _rows(document: object) -> list[object]:
    """The innermost objects and lists of a document: what stands in one row."""
    parts = list(document.values()) if isinstance(document, dict) else document if isinstance(document, list) else []
    inner = [row for part in parts for row in _rows(part)]
    return inner or ([document] if parts else [])


def test_a_measurement_without_digests_is_labelled_or_refused(gemq, work):
    """As an older gemq wrote it."""
    digests = {seal_of(work / "w4"), content_of(work / "w4")}

    def strip(part: object) -> object:
        if isinstance(part, dict):
            return {key: strip(inner) for key, inner in part.items() if not (isinstance(inner, str) and inner in digests) and "digest" not in key}
        return [strip(inner) for inner in part] if isinstance(part, list) else part

    document = strip(read_json(work / "w4.json"))
    assert isinstance(document, dict)
    document["target"] = str(work / "w4")
    (work / "old.json").write_text(json.dumps(document))
    done = gemq("card", "w4", "--measured", "old.json", "--output", "carded").exited(DONE, USAGE)
    if done.code == DONE:
        assert "bound" in (work / "carded" / "README.md").read_text().replace("upper bound", "").replace("upper_95", "")


def test_a_measurement_that_was_edited_or_is_none_is_refused(gemq, work):
    result = read_json(work / "w4.json")
    for name, document in {
        "empty": {}, "list": [], "kind": {**result, "kind": "speed"}, "negative": {**result, "tokens": -1},
        "words": {**result, "ppl": {"value": "good", "standard_error": None, "upper_95": None}},
    }.items():  # fmt: skip
        (work / f"{name}.json").write_text(json.dumps(document))
        gemq("card", "w4", "--measured", f"{name}.json", "--output", "carded").exited(USAGE, INTEGRITY)
    assert "carded" not in names(work)


def test_what_quantize_measures_itself_stands_on_the_card_of_its_own_bytes(gemq, source, options, records, work):
    measured = [*options[: options.index("--eval-data")], "--eval-data", str(records)]
    done = gemq("quantize", source, *measured, "--output", "own", "--json").exited(DONE).json
    assert f"{done['perplexity']['ppl']['value']:.6g}"[:5] in (work / "own" / "README.md").read_text()
    own = read_json(work / "w4.json")["ppl"]["value"]  # of the same weights, which another run made and another command measured
    assert own == pytest.approx(done["perplexity"]["ppl"]["value"], rel=1e-6)
