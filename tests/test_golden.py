"""Every golden checkpoint, of this version and of those before it, still verifies, and still says what it said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from sealed_checkpoint import replace_file
from typer.testing import CliRunner

import gemq
from gemq.commands import verify as command
from gemq.errors import IntegrityError
from gemq.quantize.audit import audit_structure
from gemq.quantize.card import UNBOUND, read_measured, whose
from gemq.quantize.seal import content_digest, read_seal, seal_digest
from gemq.recipes.model import load_recipe

GOLDEN = Path(__file__).parent / "golden"
# written down beside the files: a seal that was made anew over other files is not the golden one
SEALS = {
    "gemq-0.1.0": "70328d86edfafe8f7a54639561195f8644b7c5a1420a2fb64d78c2371b17fa22",
}
CONTENTS = {
    "gemq-0.1.0": "aa1cd1da0a3aaa706cf43992c88072de061f6c58cc14a7f58b30fefe5e4aaaf0",
}


@pytest.fixture(params=sorted(SEALS))
def golden(request: pytest.FixtureRequest) -> Path:
    return GOLDEN / str(request.param)


def verify(*arguments: object) -> tuple[Any, dict[str, Any]]:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["verify", *map(str, arguments), "--json"])
    command.output.mode.json = False
    return result.exception, json.loads(result.stdout or "{}")


def test_every_version_up_to_this_one_has_a_golden_checkpoint_and_all_are_listed() -> None:
    assert {path.name for path in GOLDEN.glob("gemq-*") if path.is_dir()} == set(SEALS) == set(CONTENTS)
    assert f"gemq-{gemq.__version__}" in SEALS, "make it with `python -m tests.golden.make`, and write its digests down here"


def test_it_verifies_where_git_put_it_seal_provenance_and_signature(golden: Path) -> None:
    error, document = verify(golden, "--public-key", golden.with_name(golden.name + ".pub"))
    assert (error, document["differences"]) == (None, [])
    assert (document["seal_digest"], document["content_digest"]) == (SEALS[golden.name], CONTENTS[golden.name])
    assert document["provenance"]


@pytest.mark.parametrize("mode", [0o444, 0o644, 0o664, 0o600])
def test_it_verifies_with_any_mode_that_a_clone_or_a_download_gives(golden: Path, tmp_path: Path, mode: int) -> None:
    copy = Path(shutil.copytree(golden, tmp_path / "copy"))
    for path in copy.iterdir():
        path.chmod(mode)
    error, document = verify(copy)
    assert (error, document["seal_digest"]) == (None, SEALS[golden.name])


def test_this_version_reads_what_it_holds(golden: Path) -> None:
    structure = audit_structure(golden)
    assert structure.differences == []
    labels = {unit.scheme.label() for unit in structure.units.values()}
    assert {"int4 g32 pack-quantized", "int4 g64 pack-quantized", "int8 channel int-quantized", "int8 channel pack-quantized"} <= labels
    assert load_recipe(str(golden / "recipe.yaml")).name == "golden"
    assert content_digest(read_seal(golden)) in (golden / "README.md").read_text()


def test_its_weights_still_give_the_perplexity_on_its_card(golden: Path, tmp_path: Path) -> None:
    """Read by this version's own loader: a format that is read otherwise than it was written would show here."""
    import random

    from gemq.eval.ppl import evaluate_ppl

    torch.set_num_threads(1)
    draw = random.Random(4)  # as tests/golden/make.py drew them
    ids = [[draw.randrange(20, 384) for _ in range(31)] for _ in range(12)][8:]
    records = ({"id": f"r{number}", "context_token_ids": [2], "target_token_ids": row} for number, row in enumerate(ids))
    (tmp_path / "held-out.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    result = evaluate_ppl(str(golden), tmp_path / "held-out.jsonl", device="cpu")
    (told,) = read_measured(golden)
    assert result.data_sha256 == told["data_sha256"]
    assert result.ppl.value == pytest.approx(told["ppl"]["value"], rel=1e-3)


def test_its_measurements_are_of_before_digests_and_so_unbound(golden: Path) -> None:
    (told,) = read_measured(golden)
    assert whose(told, content_digest(read_seal(golden))) == UNBOUND


def test_one_changed_byte_would_be_found(golden: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(golden, tmp_path / "copy"))
    raw = bytearray((copy / "model.safetensors").read_bytes())
    raw[len(raw) // 2] ^= 1
    replace_file(copy / "model.safetensors", bytes(raw))
    error, document = verify(copy)
    assert isinstance(error, IntegrityError)
    assert [difference["path"] for difference in document["differences"]] == ["model.safetensors"]
    assert seal_digest(copy) == SEALS[golden.name]
