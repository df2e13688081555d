"""After a power cut while `gemq card` or `gemq package` writes, there is no output or a complete one, and the same command makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from small_checkpoint import INT4, e4b_config, write_checkpoint
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.power_cut import PowerCut
from tests.quantize.small_jobs import run_job

from gemq.cli import app
from gemq.quantize.seal import check_seal, seal_digest
from gemq.source import file_hashes


def everywhere(root: Path, work: Callable[[], object], right: Callable[[], bool], ignored: Callable[[str], bool] = lambda path: False) -> list[str]:
    """The instants at which a power cut leaves a wrong output, one that the command can't be run again after, or none when it has ended."""
    root.mkdir()
    disk = PowerCut(root, ignored=ignored)
    with disk.recording():
        work()
    assert right()
    during, after = list(disk.images.values()), disk.take("at the end")
    disk.close()
    assert len(during) > 5
    found = []
    for image in [*during, *after]:
        image.restore(root)
        if not (root / "new").exists() and image not in after:
            work()
        if not (root / "new").exists() or not right():
            found.append(image.label)
    return found


def run(*arguments: object) -> None:
    app([*map(str, arguments)], standalone_mode=False)


pytestmark = pytest.mark.slow

NOTHING: Callable[[str], bool] = lambda path: False  # noqa: E731


@pytest.mark.parametrize(("ignored", "is_found"), [(NOTHING, False), (lambda path: "README.md" in path, True),
                                                   (lambda path: path.endswith("/disk"), True)],
                         ids=["all syncs", "not the card's", "not the name's"])  # fmt: skip
def test_card(tmp_path, ignored, is_found):
    torch.set_num_threads(1)
    made = build_gemma3_text(tmp_path / "model", num_hidden_layers=1, layer_types=["full_attention"])
    checkpoint = run_job(made, tmp_path / "checkpoint", "w8a16").directory
    root = tmp_path / "disk"
    run("card", checkpoint, "--output", tmp_path / "undisturbed")
    seal = seal_digest(tmp_path / "undisturbed")
    before = file_hashes(checkpoint)

    def right() -> bool:
        return sound(root / "new") and seal_digest(root / "new") == seal

    assert bool(everywhere(root, lambda: run("card", checkpoint, "--output", root / "new"), right, ignored)) == is_found
    assert file_hashes(checkpoint) == before


def sound(directory: Path) -> bool:
    try:
        return check_seal(directory) == []
    except Exception:
        return False


@pytest.mark.parametrize(("ignored", "is_found"), [(NOTHING, False), (lambda path: path.endswith("/output/model"), True),
                                                   (lambda path: path.endswith("manifest.json"), True)],
                         ids=["all syncs", "not the names in a sub-folder", "not the manifest's"])  # fmt: skip
def test_package(tmp_path, ignored, is_found):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", e4b_config(), [INT4, INT4])
    arguments = ["package", checkpoint, "--arena", "efficient-gemma", "--output"]
    run(*arguments, tmp_path / "undisturbed")
    files, root = file_hashes(tmp_path / "undisturbed"), tmp_path / "disk"

    def right() -> bool:
        return file_hashes(root / "new") == files

    assert bool(everywhere(root, lambda: run(*arguments, root / "new"), right, ignored)) == is_found
