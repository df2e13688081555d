"""After a power cut at any instant there is no output or a complete one, the same command ends in the same bytes, and what was recorded is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.models.gemma3 import build_gemma3_text
from tests.quantize.power_cut import Image, PowerCut
from tests.quantize.small_jobs import run_job

from gemq import output
from gemq.errors import GemqError
from gemq.quantize import journal
from gemq.quantize import run as quantize_run
from gemq.quantize.seal import check_seal, seal_digest
from gemq.shards import ShardWriter

RECIPE = "w4a16-g32"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_gemma3_text(
        tmp_path_factory.mktemp("power") / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]
    )


@pytest.fixture(autouse=True)
def _several_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_run, "ShardWriter", partial(ShardWriter, max_shard_bytes=150_000))
    torch.set_num_threads(1)


@pytest.fixture
def seal(source: Path, tmp_path: Path) -> str:
    return run_job(source, tmp_path / "whole" / "out", RECIPE).seal


def interrupted_everywhere(root: Path, work: Callable[[], object], **options: object) -> tuple[list[Image], list[Image]]:
    """The distinct images of `root` while `work` ran, and those after it."""
    root.mkdir(exist_ok=True)
    disk = PowerCut(root, **options)  # type: ignore[arg-type]
    try:
        with disk.recording():
            work()
        during = list(disk.images.values())
        return during, disk.take("at the end")
    finally:
        disk.close()


def problem(image: Image, source: Path, root: Path, seal: str, *, ended: bool = False) -> str | None:
    """What is wrong with the state that a power cut left, or with what the same command makes of it; None where nothing is."""
    image.restore(root)
    out = root / "out"
    warned: list[str] = []
    if not out.exists():
        if ended:
            return "the run had ended well, and there is no output"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(output, "warn", warned.append)
            patch.setattr(quantize_run.output, "warn", warned.append)
            patch.setattr(journal, "warn", warned.append)
            try:
                run_job(source, out, RECIPE, measured=True)
            except GemqError as error:
                return f"the next run was refused: {error.message}"
    try:
        differences = check_seal(out)
    except GemqError as error:
        return f"the output has no sound seal: {error.message}"
    if differences:
        return f"the output is not what its seal says: {differences[0]}"
    if seal_digest(out) != seal:
        return "the output has another seal than an uninterrupted run's"
    return f"the journal had more than the disk: {warned[0]}" if warned else None


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "seeds"), [(0, 1), (2, 0)])
def test_the_power_cut_at_any_instant(source, seal, tmp_path, monkeypatch, threads, seeds):
    monkeypatch.setattr(quantize_run, "threads_for", lambda device: threads)
    root = tmp_path / "disk"
    during, after = interrupted_everywhere(root, lambda: run_job(source, root / "out", RECIPE, measured=True), seeds=seeds)
    assert len(during) > 40
    during = [image for number, image in enumerate(during) if " some " not in image.label or number % 3 == 0]
    monkeypatch.setattr(quantize_run, "threads_for", lambda device: 0)
    found = [(image.label, problem(image, source, root, seal)) for image in during]
    found += [(image.label, problem(image, source, root, seal, ended=True)) for image in after]
    assert [one for one in found if one[1]] == []


def first_of_each_shard() -> Callable[[str], bool]:
    """Whether a sync is the first one of a shard: that of its header, when it was made."""
    seen: set[str] = set()

    def is_first(path: str) -> bool:
        first = path.endswith(".safetensors") and path not in seen
        seen.add(path)
        return first

    return is_first


# what a missing sync would lose, and of which paths that sync is
SYNCS = {
    "a shard's header": first_of_each_shard(),
    "a shard's bytes": lambda path: path.endswith(".safetensors"),
    "the shards' names": lambda path: path.endswith("/checkpoint"),
    "the journal's bytes": lambda path: ".journal.json." in path,
    "a companion's bytes": lambda path: path.endswith("tokenizer.json"),
    "the seal's bytes": lambda path: "gemq.seal.json" in path,
    "the record's bytes": lambda path: ".gemq-partial.json." in path,
    "the output's name": lambda path: path.endswith("/disk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("ignored", SYNCS.values(), ids=SYNCS)
def test_a_sync_that_is_missing_would_be_found(source, seal, tmp_path, ignored):
    root = tmp_path / "disk"
    during, after = interrupted_everywhere(root, lambda: run_job(source, root / "out", RECIPE, measured=True), seeds=0, ignored=ignored)
    during = [image for image in reversed(during) if image.label.endswith("least")]
    assert any(problem(image, source, root, seal, ended=True) for image in after) or any(
        problem(image, source, root, seal) for image in during
    )
