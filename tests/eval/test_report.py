"""`gemq report`: its numbers worked out anew, a page that asks the network for nothing, colours that everyone can tell apart, and refusals."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import html5lib
import numpy as np
import pytest
import typer
from PIL import Image
from report_material import HOSTILE, SOURCE_DIGEST, checkpoint, estimate, everything, manifest, per_record, rehearsal, write
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import UsageError
from gemq.eval.histogram import EDGES, kl_histogram
from gemq.eval.report import style
from gemq.eval.report.collect import collect
from gemq.eval.report.figures import short_scheme
from gemq.eval.report.tables import Missing
from gemq.eval.report.write import PAGE, SECTIONS, report
from gemq.quantize.seal import read_seal, seal_bytes

ALLOWED = {"#", ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return everything(tmp_path_factory.mktemp("material"))


@pytest.fixture(scope="module")
def made(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of the whole folder, drawn once."""
    target = tmp_path_factory.mktemp("out") / "report"
    report(folder, target)
    return target


def data(made: Path, key: str) -> dict[str, Any]:
    return dict(json.loads((made / f"{key}.json").read_text(encoding="utf-8")))


def elements(page: str) -> list[Any]:
    """Every element of the page; raises where HTML's own grammar is broken anywhere."""
    tree = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False).parse(page)
    return list(tree.iter())


def test_the_page_is_whole_and_asks_the_network_for_nothing(made: Path) -> None:
    page = (made / PAGE).read_text(encoding="utf-8")
    found = elements(page)
    names = {str(element.tag).rpartition("}")[2] for element in found if isinstance(element.tag, str)}
    assert not names & {"script", "link", "iframe", "object", "embed", "img", "base", "form", "foreignObject"}, names
    ids: list[str] = []
    for element in found:
        for key, value in element.attrib.items():
            name = str(key).rpartition("}")[2]
            assert name not in ("src", "srcset", "action", "data", "background"), (element.tag, name)
            assert not name.startswith("on"), (element.tag, name)
            if name == "href":
                assert value.startswith(("#", "data:image/png;base64,"))
            if name == "id":
                ids.append(value)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"url\(([^)]{0,1})", page)) <= ALLOWED
    assert "@import" not in page
    assert "http:" not in page
    assert "https:" not in page
    for used in re.findall(r'(?:href="|url\()#([^")]+)', page):
        assert used in ids, used
    assert "default-src 'none'" in page
    assert "@media print" in page


def test_what_a_stranger_wrote_is_text_and_no_markup(made: Path) -> None:
    page = (made / PAGE).read_text(encoding="utf-8")
    assert "&lt;script&gt;" in page
    texts = "".join("".join(element.itertext()) for element in elements(page)[:1])
    assert HOSTILE in texts


def test_every_figure_is_a_picture_beside_its_numbers_and_named_in_the_index(made: Path) -> None:
    index = json.loads((made / "report.json").read_text(encoding="utf-8"))
    assert [section["key"] for section in index["sections"]] == ["gates", "tradeoff", "records", "divergence", "errors", "speed", "memory",
                                                                  "answers", "provenance"]  # fmt: skip
    assert not index["missing"]
    for section in index["sections"]:
        assert (made / section["data"]).is_file()
        if section["figure"]:
            with Image.open(made / section["figure"]) as picture:
                assert picture.width > 1200
                assert len(set(picture.convert("L").resize((64, 64)).get_flattened_data())) > 4, section["key"]  # something was drawn


def test_gates_tell_value_limit_margin_and_how_much_is_used(made: Path) -> None:
    (entry,) = data(made, "gates")["rehearsals"]
    used = {gate["name"]: gate["used"] for gate in entry["gates"]}
    assert used["contract"] is None  # yes or no
    assert used["accuracy drop"] is None  # not measured
    assert used["KL, nats a token"] == pytest.approx(0.2)
    assert used[HOSTILE] == pytest.approx(2.4)
    assert used["speed over BF16, lower bound"] == pytest.approx(0.5)  # twice what is asked for
    index = json.loads((made / "report.json").read_text(encoding="utf-8"))
    assert index["verdicts"] == [{"text": "rehearsal at lowbarena: 3 of 5 gates kept, score 1.25", "good": False}]
    assert "the arena&#x27;s own hardware" in (made / PAGE).read_text(encoding="utf-8")


def test_perplexity_against_bytes_has_every_checkpoint_the_search_and_the_budget(made: Path) -> None:
    found = data(made, "tradeoff")
    points = {(one["name"], one["records"]): one for one in found["checkpoints"]}
    assert points["best", 4]["ratio"] == 1.04
    assert points["plain", 4]["bytes_per_token"] == 1_000_000
    assert points["plain", 3]["ratio"] == pytest.approx(math.exp(2.5 / 30))  # of a result whose target was moved here
    assert [one["ratio"] for one in found["tried"]] == pytest.approx([1.07, 1.04])
    assert [one["predicted_ratio"] for one in found["tried"]] == pytest.approx([math.exp(0.06), math.exp(0.03)])
    assert [one["ratio"] for one in found["budgets"]] == [1.05]


def test_records_are_compared_one_by_one(made: Path) -> None:
    (entry,) = data(made, "records")["measured"]
    by_id = {record["id"]: record for record in entry["records"]}
    assert by_id["a"]["ppl"] == pytest.approx(math.exp(2.2))
    assert by_id["a"]["reference_ppl"] == pytest.approx(math.exp(2.0))
    assert by_id["b"]["ratio"] == pytest.approx(math.exp(-0.05))
    assert entry["ratio"] == pytest.approx(math.exp(2.5 / 30))


def test_kl_is_counted_position_by_position(made: Path) -> None:
    served, whole = data(made, "divergence")["measured"]
    # one position of three differs: 1/2 ln 1 + 1/4 ln(1/4 : 1/8) + 1/4 ln(1/4 : 3/8)
    different = 0.25 * math.log(2) + 0.25 * math.log(2 / 3)
    assert served["mean"] == pytest.approx(different / 3)
    assert sum(served["counts"]) == 3
    (place,) = [place for place, count in enumerate(served["counts"]) if count == 1]
    assert EDGES[place] <= different < EDGES[place + 1]
    assert sum(whole["counts"]) == 100
    page = (made / PAGE).read_text(encoding="utf-8")
    assert "50.0%" in page  # above 0.1: the bin that begins there, and the last


def test_bins_hold_what_they_say() -> None:
    values = [0.0, 1e-9, 1e-6, 2e-6, 0.1, 0.11, 5.0, 99.0]
    counts = kl_histogram(values)
    assert sum(counts) == len(values)
    inside = [value for value in values if EDGES[0] <= value < EDGES[-1]]
    expected, _ = np.histogram(inside, bins=np.asarray(EDGES))
    expected[0] += 2
    expected[-1] += 1
    assert counts == expected.tolist()


def test_errors_stand_by_layer_and_unit(made: Path) -> None:
    for entry in data(made, "errors")["checkpoints"]:
        assert entry["layers"] == 3
        assert entry["kinds"] == ["self_attn.qkv_proj", "mlp.down_proj"]
        unit = next(unit for unit in entry["units"] if unit["unit"] == "layers.2.mlp.down_proj")
        assert (unit["layer"], unit["error"], unit["of"]) == (2, 1e-4, "output")
        assert next(unit for unit in entry["units"] if unit["unit"] == "lm_head")["layer"] is None
    assert [short_scheme(scheme) for scheme in ("int4 g128", "int4-g32", "int8 channel", "fp8 channel, fp8 inputs")] == [
        "4\n128", "4\n32", "8", "f8"]  # fmt: skip


def test_speed_and_memory_of_both_sides(made: Path) -> None:
    sides = {one["side"]: one for one in data(made, "speed")["loads"]}
    assert sides["submission"]["tps"] == [100.0, 101.0]
    assert sides["reference"]["tps_lower_95"] == 48.0
    assert {one["side"]: one["peak_bytes"] for one in data(made, "memory")["series"]} == {"submission": 2_000_000_000, "reference": 5_000_000_000}
    (capped,) = data(made, "memory")["capped"]
    assert (capped["load"], capped["share_of_speed"]) == ("batch-8k", 0.945)
    page = (made / PAGE).read_text(encoding="utf-8")
    for told in ("500 MB", "KV in use at most", "250 MB", "Served again under a hard cap", "94.5%"):
        assert told in page, told


def test_provenance_names_every_file_that_was_read_by_its_digest(made: Path, folder: Path) -> None:
    files = data(made, "provenance")["files"]
    assert {"best/gemq.json", "rehearsal/verdict.json", "ppl.json"} <= set(files)
    assert "linked.json" not in files
    for name, digest in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


def test_what_cannot_be_read_is_told_and_left_out(made: Path) -> None:
    index = json.loads((made / "report.json").read_text(encoding="utf-8"))
    assert any("broken.json" in problem for problem in index["unreadable"])
    assert any("linked.json" in problem for problem in index["unreadable"])


def test_what_is_missing_is_said_with_a_command_that_exists(tmp_path: Path) -> None:
    write(tmp_path / "bench.json", {"kind": "bench", "loads": [], "memory": {"samples": []}})
    missing = [made for make in SECTIONS if isinstance(made := make(collect(tmp_path)), Missing)]
    assert [one.key for one in missing] == ["gates", "tradeoff", "records", "divergence", "errors", "speed", "memory", "answers"]
    group = typer.main.get_command(app)
    for one in missing:
        for command in one.command.split("; "):
            program, name, *rest = shlex.split(command)
            assert program == "gemq"
            known = {option for parameter in group.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
            assert {word for word in rest if word.startswith("-")} <= known, command


def test_a_document_of_another_shape_costs_its_section_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint(tmp_path / "made", 1, 1.0)
    write(tmp_path / "bad" / "gemq.json", {"version": 1, "units": [], "bytes": 3, "source": None})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gemq.eval.report.figures.DRAW", {})
        index = report(tmp_path, tmp_path / "out")
    assert {one["key"] for one in index["missing"]} >= {"tradeoff", "errors", "provenance"}
    assert "is left out" in capsys.readouterr().err


def test_an_unfinished_rehearsal_is_told_as_such(tmp_path: Path) -> None:
    rehearsal(tmp_path / "r")
    (tmp_path / "r" / "verdict.json").unlink()
    (tmp_path / "r" / "key.json").write_text("{}")
    found = SECTIONS[0](collect(tmp_path))
    assert isinstance(found, Missing)
    assert "not finished" in found.why


def test_bad_input(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    (tmp_path / "there").mkdir()
    for given, target, word in ((tmp_path / "none", "o", "no directory"), (tmp_path / "file", "o", "no directory"),
                                (tmp_path / "empty", "o", "nothing to report"), (folder, "there", "exists")):  # fmt: skip
        with pytest.raises(UsageError, match=word):
            report(given, tmp_path / target)
    with pytest.raises(UsageError, match="sealed checkpoint best"):
        report(folder / "best", folder / "best" / "report")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(app, ["report", str(folder), "--output", str(tmp_path / "o")])
    assert isinstance(result.exception, UsageError)
    assert result.exception.next_step == "pip install 'gemq[report]'"
    assert not (tmp_path / "o").exists()


# Machado, Oliveira & Fernandes, IEEE TVCG 15 (2009): linear RGB as people without one kind of cone see it
MACHADO = {
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def lab(color: str, matrix: list[list[float]] | None = None) -> np.ndarray:
    """CIELAB of an sRGB colour, as seen through `matrix`."""
    srgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    if matrix is not None:
        linear = np.clip(np.array(matrix) @ linear, 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear / [0.9505, 1.0, 1.089]
    f = np.where(xyz > 216 / 24389, np.cbrt(xyz), (24389 / 27 * xyz + 16) / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("sight", [None, *MACHADO])
def test_colours_that_mean_different_things_are_told_apart_by_everyone(sight: str | None) -> None:
    pairs = [(style.OURS, style.REFERENCE), (style.KEPT, style.LIMIT), (style.OURS, style.LIMIT), (style.OURS, style.PREDICTED)]
    for one, other in pairs:
        matrix = MACHADO[sight] if sight else None
        assert np.linalg.norm(lab(one, matrix) - lab(other, matrix)) > 15, (one, other, sight)
    for color in (style.OURS, style.LIMIT, style.PREDICTED, style.INK):  # lines and words on white
        assert 100 - lab(color)[0] > 40, color


def test_the_heat_map_gets_lighter_all_the_way_for_everyone() -> None:
    import matplotlib

    colors = [matplotlib.colors.to_hex(matplotlib.colormaps[style.HEAT](value)) for value in np.linspace(0, 1, 12)]
    for matrix in (None, *MACHADO.values()):
        assert (np.diff([lab(color, matrix)[0] for color in colors]) > 2).all()


def test_measurements_are_matched_by_digest_alone(tmp_path: Path) -> None:
    """A result without a digest is nobody's, one of other weights isn't shown as the checkpoint's, whatever the paths say."""
    folder, out = tmp_path / "folder", tmp_path / "report"
    own = checkpoint(folder / "mine", 1_000_000, 1.1)
    shown = {"kind": "ppl", "target": str(folder / "mine"), "reference_digest": SOURCE_DIGEST,
             "data": "d.jsonl", "data_sha256": "3" * 64, "tokens": 30, "records": 1, "per_record": [],
             "ppl": estimate(30.0), "reference_ppl": estimate(20.0), "ratio": estimate(1.5)}  # fmt: skip
    write(folder / "old.json", shown)
    write(folder / "other.json", {**shown, "target_digest": "4" * 64})
    write(folder / "same.json", {**shown, "target": "moved", "target_digest": own, "ratio": estimate(1.2), "tokens": 31})
    report(folder, out)
    assert sorted(one["ratio"] for one in data(out, "tradeoff")["checkpoints"]) == [1.1, 1.2]
    page = (out / PAGE).read_text(encoding="utf-8")
    assert "old.json is unbound" in page
    assert "other.json is of weights that are not here" in page


def test_a_ratio_to_another_reference_is_not_shown_as_the_ratio_to_the_source(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "report"
    own = checkpoint(folder / "mine", 1_000_000, 1.1)
    itself = {"kind": "ppl", "target": "mine", "target_digest": own, "reference_digest": own, "data": "d.jsonl",
              "data_sha256": "3" * 64, "tokens": 30,
              "records": 1, "per_record": per_record({"a": 22.0}, {"a": 22.0}), "ppl": estimate(30.0), "reference_ppl": estimate(30.0),
              "ratio": estimate(1.0), "kl_nats": estimate(0.0), "kl_histogram": [10] + [0] * 27, "dtype": "float32", "device": "cpu"}  # fmt: skip
    write(folder / "itself.json", itself)
    write(folder / "unknown.json", {**itself, "reference_digest": None})
    report(folder, out)
    found = data(out, "tradeoff")
    assert [one["ratio"] for one in found["checkpoints"]] == [1.1]
    assert [one["ppl"] for one in found["sources"]] == [20.0]
    assert [(one["from"], own[:12] in one["against"]) for one in found["against_others"]] == [("itself.json", True), ("unknown.json", False)]
    for section in ("records", "divergence"):
        assert {one["name"]: own[:12] in one["against"] for one in data(out, section)["measured"]} == {"itself.json": True, "unknown.json": False}
    (folder / "mine" / "measured.json").unlink()
    (folder / "mine" / "gemq.seal.json").write_bytes(seal_bytes([file for file in read_seal(folder / "mine") if file.path != "measured.json"]))
    report(folder, tmp_path / "again")
    (missing,) = [one for one in json.loads((tmp_path / "again" / "report.json").read_text())["missing"] if one["key"] == "tradeoff"]
    assert "itself.json" in json.dumps(missing)


def test_measurements_that_were_computed_differently_are_each_shown(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "report"
    own = checkpoint(folder / "mine", 1_000_000, 1.1)
    same = {"kind": "ppl", "target": "mine", "target_digest": own, "reference_digest": SOURCE_DIGEST, "data": "here/records.jsonl",
            "data_sha256": "2" * 64, "tokens": 100, "records": 4, "per_record": [], "ppl": estimate(30.0), "reference_ppl": estimate(20.0),
            "dtype": "float32"}  # fmt: skip
    ways: list[dict[str, Any]] = [{}, *({"dtype": "bfloat16", "device": device} for device in (None, "cuda A", "cuda B"))]
    for place, changed in enumerate(ways):
        write(folder / f"{place}.json", {**same, **changed, "ratio": estimate(1.2 + place / 10)})
    report(folder, out)
    found = data(out, "tradeoff")["checkpoints"]  # the checkpoint's own is the first result, in its own words
    assert sorted(round(one["ratio"], 6) for one in found) == [1.2, 1.3, 1.4, 1.5]
    assert len({(one["dtype"], one["device"]) for one in found}) == 4
    page = (out / PAGE).read_text(encoding="utf-8")
    assert "bfloat16 on cuda B" in page


def test_a_checkpoint_that_is_not_what_was_sealed_has_no_measurements(tmp_path: Path) -> None:
    folder, out = tmp_path / "folder", tmp_path / "report"
    checkpoint(folder / "mine", 1_000_000, 1.1)
    write(folder / "mine" / "gemq.json", manifest("another", 2_000_000))
    report(folder, out)
    assert "tradeoff" in {one["key"] for one in json.loads((out / "report.json").read_text())["missing"]}
    assert any("not what was sealed" in problem for problem in json.loads((out / "report.json").read_text())["unreadable"])
