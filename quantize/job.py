"""A quantization as it is ordered, what makes it the same one when it goes on, and what its checkpoint tells of it."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

import gemq
from gemq.calibration.sets import CalibrationSet
from gemq.quantize.companions import left_out
from gemq.quantize.journal import Resume
from gemq.quantize.plan import Plan
from gemq.shards import ShardReader
from gemq.source import Source


@dataclass(frozen=True)
class Job:
    """Everything that decides what the checkpoint will be, and where it goes."""

    source: Source
    plan: Plan
    reader: ShardReader
    calibration: CalibrationSet | None
    output: Path
    seed: int
    device: str = "cpu"
    resume: Resume = "auto"
    gpu_memory_bytes: int | None = None  # None: 8 GiB
    devices: tuple[str, ...] = ()  # that share the calibration batches, `device` first; none: `device` alone


def versions() -> dict[str, str]:
    """The versions that a result depends on."""
    packages = {name: version(name) for name in ("torch", "transformers", "compressed-tensors", "safetensors")}
    return {"gemq": gemq.__version__, "python": platform.python_version(), **packages}


def identity_of(job: Job, hashes: dict[str, str]) -> dict[str, Any]:
    """What must be the same for a run to go on where another stopped; `hashes` are the source's."""
    needs = job.plan.recipe.needs_calibration
    return {
        "source": hashes,
        "recipe": job.plan.recipe.model_dump(mode="json"),
        "calibration": job.calibration.sha256 if job.calibration and needs else None,
        "seed": job.seed,
        "device": torch.device(job.device).type,
        "threads": _threads_that_matter(job),
        "versions": versions(),
        **({"number of devices": len(job.devices)} if len(job.devices) > 1 else {}),  # it decides the order of sums
    }


def manifest_of(job: Job, hashes: dict[str, str], reports: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What was done, from the source's `hashes` and the units' `reports`, without anything that differs between two runs that give the same bytes."""
    plan = job.plan
    before, after = plan.bytes_per_token()
    calibration = job.calibration if plan.recipe.needs_calibration else None
    return {
        "version": 1,
        "source": {"model": _name_of(job.source), "revision": job.source.revision, "files": hashes},
        "recipe": plan.recipe.name,
        "calibration": None if calibration is None else {"sha256": calibration.sha256, **calibration.description},
        "seed": job.seed,
        "device": torch.device(job.device).type,
        "threads": _threads_that_matter(job),
        **({"devices": len(job.devices)} if len(job.devices) > 1 else {}),
        "versions": versions(),
        "bytes": {"source": plan.source_bytes(), "checkpoint": plan.checkpoint_bytes(), "per_token_source": int(before),
                  "per_token_checkpoint": int(after), "bits_per_decoder_weight": round(plan.bits_per_weight(), 4)},
        "dropped_tensors": plan.dropped,
        "left_out": left_out(job.source.directory, job.reader),
        **({} if plan.recipe.smoothing is None else {"smoothed_tensors": _smoothed_tensors(plan, reports)}),
        "units": {unit.name: reports[unit.name] for unit in plan.units},
    }  # fmt: skip


def _smoothed_tensors(plan: Plan, reports: dict[str, dict[str, Any]]) -> list[str]:
    """The producers that smoothing changed, by their names in the source."""
    told = (reports[unit.name].get("smoothing", {"kept": ""}) for unit in plan.units)
    return sorted(report["producer"] for report in told if "kept" not in report)


def _threads_that_matter(job: Job) -> int | None:
    """torch's threads where they decide the result: how a CPU splits a matrix product decides its last bits, and so where GPTQ rounds to."""
    calibrated_here = job.plan.recipe.needs_calibration and torch.device(job.device).type == "cpu"
    return torch.get_num_threads() if calibrated_here else None


def _name_of(source: Source) -> str:
    """The source's name for others: of a local directory its last part, since where it lies here is nobody's business."""
    return source.directory.name if source.kind == "local" else source.model
