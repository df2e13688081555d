"""Small quantizations for tests: a model, a few windows, one call."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from gemq import atomic
from gemq.calibration.sets import CalibrationSet
from gemq.quantize.content import directory_digest
from gemq.quantize.job import Job
from gemq.quantize.plan import make_plan
from gemq.quantize.run import Outcome, quantize
from gemq.quantize.skeleton import load_skeleton
from gemq.recipes.model import Recipe, load_recipe
from gemq.source import Source


def windows(vocabulary: int, count: int = 8, length: int = 32, seed: int = 0) -> list[list[int]]:
    """`count` windows of BOS and random ids."""
    draw = random.Random(seed)
    return [[2] + [draw.randrange(8, vocabulary) for _ in range(length - 1)] for _ in range(count)]


def make_job(source: Path, output: Path, recipe: str | Recipe = "w4a16-g32", **options: Any) -> Job:
    """A job on `source` with a random calibration set of its vocabulary."""
    skeleton, reader = load_skeleton(source)
    assert reader is not None
    used = load_recipe(recipe) if isinstance(recipe, str) else recipe
    calibration = options.pop("calibration", None) or CalibrationSet.of(windows(skeleton.text.vocab_size), {"kind": "test"})
    plan = make_plan(skeleton, used)
    return Job(Source(source.name, "local", source, None), plan, reader, calibration, output, options.pop("seed", 0), **options)


def stop_job(monkeypatch: pytest.MonkeyPatch, point: str, source: Path, output: Path, recipe: str | Recipe, **options: Any) -> None:
    """Carry a job out until it passes the write point `point`, where it is interrupted as by Ctrl-C."""

    def stop(name: str) -> None:
        if name == point:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(atomic, "write_point", stop)
        with pytest.raises(KeyboardInterrupt):
            run_job(source, output, recipe, **options)


def run_job(source: Path, output: Path, recipe: str | Recipe = "w4a16-g32", *, measured: bool = False, **options: Any) -> Outcome:
    """Carry a job out. measured: also take the digest of the unsealed checkpoint, as every measurement does first."""
    return quantize(make_job(source, output, recipe, **options), _digested if measured else None)


def _digested(directory: Path) -> list[dict[str, Any]]:
    assert directory_digest(directory)
    return []
