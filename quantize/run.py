"""Quantize a source into a sealed checkpoint: plan, copy, walk, write, publish."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml

from gemq import atomic, output
from gemq.calibration.media import media_inputs
from gemq.calibration.sets import CalibrationSet
from gemq.errors import UsageError
from gemq.memory import return_freed_memory
from gemq.output_paths import require_separate
from gemq.quantize import gptq, smoothing
from gemq.quantize.card import inherited_fields
from gemq.quantize.checkpoint import accounts, file_names, require_own_files, write_companions
from gemq.quantize.companions import files_read
from gemq.quantize.experts import solve_experts
from gemq.quantize.folds import Folds
from gemq.quantize.follower import Share
from gemq.quantize.gpu import budget_of, too_little
from gemq.quantize.job import Job, identity_of, manifest_of
from gemq.quantize.journal import Journal, discard_after, is_fresh, open_journal
from gemq.quantize.loading import FiniteCheck
from gemq.quantize.phases import Phases
from gemq.quantize.plan import Pair, Stored, Unit, stored_matrices
from gemq.quantize.ranks import Ranks, shares_of
from gemq.quantize.rtn import round_to_nearest
from gemq.quantize.scales import restore
from gemq.quantize.seal import CARD_FILE, WRITTEN_LAST, SealedFile, write_seal
from gemq.quantize.skeleton import Matrix
from gemq.quantize.squared_errors import ErrorSums, measured_error, share_of
from gemq.quantize.tuning import Call, Solved, tune
from gemq.quantize.walk import Walk, Walker
from gemq.quantize.writing import ReadAhead, Request, Writing, threads_for
from gemq.shard_headers import INDEX_FILE
from gemq.shards import ShardWriter
from gemq.source import file_hashes

_ROWS_AT_ONCE = 1 << 24  # weights in float32 that a matrix outside the layers is read and written by: 64 MiB
_REST = "outside the layers"
_TABLES = "the tables"


@dataclass(frozen=True)
class Outcome:
    """What a quantization made: the directory, its seal's digest, the manifest, and the seconds until it could be measured.

    phases: seconds by phase, sealing included; those named "beside" were spent by other threads meanwhile.
    """

    directory: Path
    seal: str
    manifest: dict[str, Any]
    seconds: float
    phases: dict[str, float] = field(default_factory=dict)


def quantize(job: Job, measure: Callable[[Path], list[dict[str, Any]]] | None = None) -> Outcome:
    """Make the checkpoint of `job`, or finish one that was interrupted.

    `measure` gets the directory when only card and seal are missing, and gives what the card is to tell of it (`card.summary`).
    Raises UsageError for an output that exists or can't fit, IntegrityError for a damaged source, StoppedSafely when the disk is full.
    """
    started = time.monotonic()
    atomic.require_absent(job.output)
    require_separate(job.output, job.source.directory)
    partial = atomic.partial_of(job.output)
    atomic.make_parent(job.output)
    return_freed_memory()
    with atomic.locked(partial), atomic.disk_errors(job.output.parent):
        atomic.require_absent(job.output)  # another process may have published it before it let go of the lock
        run = _Run(job, partial)
        try:
            run.copy_rest()
            run.solve()
            manifest = manifest_of(job, run.hashes, run.journal.reports)
            run.finish(manifest)
            seconds = time.monotonic() - started
            describe = run.describe(manifest, [] if measure is None else measure(run.directory))
            with run.phases("seal"):
                seal = write_seal(run.directory, describe, run.writing.hashes())
                atomic.write_point("sealed")
                atomic.publish(run.directory, job.output)
                discard_after(partial)
        except torch.OutOfMemoryError as error:
            raise too_little(error, job.gpu_memory_bytes) from None
        finally:
            run.stop()
    return Outcome(job.output, seal, manifest, seconds, run.phases.seconds)


class _Run:
    def __init__(self, job: Job, partial: Path) -> None:
        self.job, self.plan, self.reader = job, job.plan, job.reader
        self.phases, self._threads = Phases(job.device), threads_for(job.device)
        with self.phases("start the device"):
            self._budget = budget_of(job.plan, job.device, job.gpu_memory_bytes)
        needs = self.plan.recipe.needs_calibration
        if needs and job.calibration is None:
            raise UsageError(f"recipe {self.plan.recipe.name} needs a calibration set", "give --calibration")
        shares = shares_of(job, self._budget)
        # beside a GPU there is no need to wait for the source's digests before a fresh run begins, only before its first record
        later = self._threads > 0 and is_fresh(partial, job.resume)
        self._hashing: Future[dict[str, str]] | None = None
        self._stopping = threading.Event()
        self.hashes: dict[str, str] = {}
        sources = files_read(job.source.directory, job.reader)
        if not later:
            with self.phases("hash the source"):
                self.hashes = file_hashes(job.source.directory, sources)
        identity = identity_of(job, self.hashes)
        self.directory = partial / "checkpoint"
        self.writer = ShardWriter(self.directory, self.plan.specs)
        already = sum(path.stat().st_size for path in partial.rglob("*") if path.is_file()) if partial.exists() else 0
        atomic.require_space(job.output.parent, int((self.writer.total_bytes - already) * 1.01))
        self.journal: Journal = open_journal(partial, identity, job.resume, save=not later)
        with self.phases("allocate"):
            changed = self.writer.allocate()
        if changed and self.journal.parts:
            output.warn(f"{changed[0]} in {partial} had another size or header than was written: its tensors are checked one by one")
        self.writing = Writing(self.writer, self.journal, self.phases, self._threads, self._know_source if later else None)
        if later:
            pool = ThreadPoolExecutor(1, "source")
            self._hashing = pool.submit(file_hashes, job.source.directory, sources, beside=self._stopping)
            pool.shutdown(wait=False)
        self._parts: dict[str, list[Unit]] = {}
        for unit in self.plan.units:
            self._parts.setdefault(_part_of(unit), []).append(unit)
        self._solved: dict[str, tuple[Unit, Solved]] = {}  # by module: what the layer's tuning starts from
        self._folds = Folds(self.plan, self.reader, self.writing)
        self._awaiting: dict[str, tuple[Unit, Matrix, Solved]] = {}  # by module: solved, and written when its scales are final
        self._held = {part for part in self._parts if self._holds(part)}
        # they make ready while the rest is copied
        self._ranks = Ranks(job, shares, self._budget, self.phases) if shares and len(self._held) < len(self._parts) else None

    def _know_source(self) -> None:
        assert self._hashing is not None
        self.hashes = self.journal.job["source"] = self._hashing.result()

    def stop(self) -> None:
        """End what works beside the solving, before the lock on the output goes."""
        self._stopping.set()  # nobody waits for the source's digests any more, and an interpreter that ends would
        if self._ranks is not None:
            self._ranks.close()
        self.writing.close()

    def _names(self, part: str) -> list[str]:
        return [spec.name for unit in self._parts[part] for spec in [*self.plan.written[unit.name], *self.plan.adjusted(unit.name)]]

    def _holds(self, part: str) -> bool:
        return self._is_held(part, self._names(part))

    def _is_held(self, part: str, names: list[str]) -> bool:
        held = self.journal.holds(part, self.writer, names)
        if held:
            self.writing.held(names)
        return held

    def copy_rest(self) -> None:
        """Copy, byte for byte, what is not quantized."""
        names = [spec.name for spec in self.plan.copied]
        if self._is_held("copied", names):
            return
        total = sum(spec.nbytes for spec in self.plan.copied) // 1_000_000
        with self.phases("copy"), output.progress("copying what stays as it is", total, "MB") as advance:
            for spec in sorted(self.plan.copied, key=lambda spec: -spec.nbytes):  # one thread hashes a shard: the longest first
                self.writing.copy(self.reader, spec.name, lambda spec=spec: advance(spec.nbytes // 1_000_000, spec.name))  # type: ignore[misc]
        self.writing.finish("copied", names, lambda: atomic.write_point("copied"))

    def solve(self) -> None:
        """Solve every unit: in a walk where calibration matters, else matrix by matrix."""
        done = sum(len(self._parts[part]) for part in self._held)
        with output.progress("quantizing", len(self.plan.units), "units") as advance:
            if done:
                advance(done)
            self._advance = advance
            if _TABLES in self._parts and _TABLES not in self._held:
                for unit in self._parts[_TABLES]:
                    self._solve_by_rows(unit, None)
                self._finish(_TABLES)
            if self.plan.recipe.needs_calibration and len(self._held) < len(self._parts):
                self._walk()
            else:
                left = [part for part in self._parts if part not in self._held]
                ahead = self._read_ahead([unit for part in left for unit in self._parts[part]])
                try:
                    for part in left:
                        for unit in self._parts[part]:
                            self._solve_by_rows(unit, None, ahead)
                        self._finish(part)
                finally:
                    ahead.close()
            if _REST in self._parts:
                self._finish(_REST)
            with self.phases("wait for the disk"):
                self.writing.drain()

    def _walk(self) -> None:
        """Solve in a walk, alone or with the processes on further devices."""
        walker = Walker(
            self._restored, self._solve_unit, lambda index: self._finish(f"layer {index}"), self._solve_experts, self._tune, self._producer
        )
        mine: CalibrationSet | Share | None = self.job.calibration
        budget = self._budget
        assert mine is not None
        if self._ranks is not None:
            budget, mine, walker = self._ranks.join(), self._ranks.share, self._ranks.led(walker)
        media = media_inputs(mine.records, self.job.source.directory)
        walk = Walk(self.plan, self.reader, mine.windows, self.job.device, media, budget, self.phases, scratch=self.directory.parent)
        walk.run(walker)
        if self._ranks is not None:
            self._ranks.end()

    def _finish(self, part: str) -> None:
        if part in self._parts and part not in self._held:
            self.writing.finish(part, self._names(part), lambda: atomic.write_point(f"solved:{part}"))
            self._held.add(part)

    def _restored(self, unit: Unit) -> list[torch.Tensor] | None:
        if _part_of(unit) not in self._held:
            return None
        if unit.name == "lm_head":
            return []
        return [self._restored_matrix(matrix, unit) for matrix in unit.matrices]

    def _restored_matrix(self, matrix: Matrix, unit: Unit) -> torch.Tensor:
        parts = []
        for stored in stored_matrices(self.plan.skeleton, matrix):
            suffixes = self.plan.storage.suffixes(unit.scheme)
            tensors = {suffix: self.writer.read(f"{stored.module}.{suffix}") for suffix in suffixes}
            parts.append(self.plan.storage.from_tensors(tensors, unit.scheme))
        return parts[0] if matrix.experts is None else torch.cat(parts).reshape(matrix.experts, matrix.out_features, matrix.in_features)

    def _solve_unit(self, unit: Unit, weights: list[torch.Tensor], hessian: gptq.Hessian | None) -> list[torch.Tensor]:
        if not weights:
            self._solve_by_rows(unit, hessian)
            return []
        started = time.monotonic()
        stacked, scheme = torch.cat(weights), unit.scheme.weights
        report: dict[str, Any] = {"scheme": unit.scheme.label(), "method": unit.method}
        if hessian is None:
            moments = None
            stored, scales = round_to_nearest(stacked, scheme)
        else:
            moments = hessian.mean(unit.name)
            factorization, notes = None, [hessian.drop_unusable_cross()]
            if unit.method == "gptq":
                with self.phases("factorize"):
                    factorization = gptq.factorize(moments, self.plan.recipe.gptq, unit.name)
                stacked = gptq.target(stacked, factorization, hessian)  # the error is measured from there
                hessian.cross = None  # as large as the moments, and told
            if unit.name in self.plan.pairs:
                with self.phases("smooth"):
                    scale, report["smoothing"] = self._folds.search(unit, stacked, moments, factorization)
                if scale is not None:
                    stacked = stacked * scale
                    if factorization is not None:
                        factorization = smoothing.refactored(factorization, scale)
                    else:
                        moments = smoothing.of_smoothed_inputs(moments, scale)
            if factorization is not None:
                solved_rows = gptq.solution(stacked, factorization, scheme)
                stored, scales = solved_rows.stored, solved_rows.scales
                notes.append(gptq.note_on_rows(factorization, solved_rows.overflowed_rows))
                if solved_rows.nearest_rows:
                    report["rows_rounded_to_nearest"] = solved_rows.nearest_rows
            else:
                stored, scales = round_to_nearest(stacked, scheme, moments.diagonal())
                if why := gptq.degenerate(moments):
                    notes.append(f"{why}: rounded to nearest, with scales that look at the weights alone")
            _note(report, notes)
        kind, error = measured_error(stacked, restore(stored, scales, scheme), moments)
        report[kind] = error
        sizes = [matrix.out_features for matrix in unit.matrices]
        for matrix, meant, part, part_scales in zip(
            unit.matrices, stacked.split(sizes), stored.split(sizes), scales.split(sizes), strict=True
        ):
            # what it was meant to be is for tuning alone to know
            solved = Solved(meant if self.plan.recipe.tuning else meant.new_empty(0), part, part_scales, scheme)
            if matrix.module in self._folds.awaiting:
                self._awaiting[matrix.module] = unit, matrix, solved
            else:
                self._settle(unit, matrix, solved)
        pair = self.plan.pairs.get(unit.name)
        if pair is not None and not pair.is_norm:
            above, matrix, solved = self._awaiting.pop(pair.module)
            divisor = self._folds.divisor(pair)
            self._settle(above, matrix, solved if divisor is None else solved.over(divisor))
        atomic.write_point(f"written:{unit.name}")
        self._report(unit, report, started)
        return list(restore(stored, scales, scheme).split(sizes))

    def _settle(self, unit: Unit, matrix: Matrix, solved: Solved) -> None:
        (whole,) = stored_matrices(self.plan.skeleton, matrix)
        self._write(whole, 0, solved.stored, solved.scales, unit)
        if self.plan.recipe.tuning and solved.scheme.type == "int" and unit.layer is not None:
            self._solved[matrix.module] = unit, solved

    def _producer(self, pair: Pair) -> torch.Tensor | None:
        if f"layer {pair.layer}" in self._held:
            return self.writer.read(pair.tensor).to(torch.float32) if pair.is_norm else None
        return self._folds.of_producer(pair)

    def _tune(self, index: int, layer: torch.nn.Module, calls: list[Call]) -> None:
        """Tune what was solved of a layer, and write it again where that brought its output nearer to the source's."""
        assert self.plan.recipe.tuning is not None
        solved, self._solved = self._solved, {}
        if not solved:
            return
        prefix = f"model.layers.{index}."
        tuned = tune(
            layer, {module.removeprefix(prefix): matrix for module, (_, matrix) in solved.items()}, calls, self.plan.recipe.tuning,
            self.job.seed + index,
        )  # fmt: skip
        if tuned.note:
            output.warn(f"layer {index}: {tuned.note}")
        for module, (unit, _) in solved.items():
            report: dict[str, Any] = {"before": tuned.before, "after": tuned.after, "kept": bool(tuned.matrices)}
            _note(report, [tuned.note])
            self.journal.reports[unit.name]["layer_tuning"] = report
            if not tuned.matrices:
                continue
            stored, scales = tuned.matrices[module.removeprefix(prefix)]
            (matrix,) = (matrix for matrix in unit.matrices if matrix.module == module)
            (whole,) = stored_matrices(self.plan.skeleton, matrix)
            self._write(whole, 0, stored, scales, unit)
            linear: Any = layer.get_submodule(module.removeprefix(prefix))
            linear.weight.data.copy_(restore(stored, scales, unit.scheme.weights))
        atomic.write_point(f"tuned:layer {index}")

    def _pieces(self, unit: Unit) -> Iterator[tuple[Matrix, Stored, int, Request]]:
        """The rows of `unit` that are solved at a time: its matrix, the whole that is stored, the first row there, where to read them."""
        for matrix, whole in self._wholes(unit):
            count = max(1, _ROWS_AT_ONCE // whole.in_features)
            for first in range(0, whole.out_features, count):
                yield matrix, whole, first, (matrix.tensor, whole.first_row + first, min(count, whole.out_features - first))

    def _read_ahead(self, units: list[Unit]) -> ReadAhead:
        requests = (request for unit in units for _, _, _, request in self._pieces(unit))
        return ReadAhead(self.reader, requests, self.phases, self._threads, pinned=torch.device(self.job.device).type == "cuda")

    def _solve_by_rows(self, unit: Unit, hessian: gptq.Hessian | None, ahead: ReadAhead | None = None) -> None:
        """Solve the matrices of `unit` in pieces of rows, read from the source: rows are independent, whatever the solver."""
        started, scheme = time.monotonic(), unit.scheme.weights
        device = torch.device(self.job.device)
        moments = None if hessian is None else hessian.mean(unit.name)
        factorization = None if moments is None else gptq.factorize(moments, self.plan.recipe.gptq, unit.name)
        notes = [] if hessian is None else [hessian.drop_unusable_cross()]
        sums, finite, nearest_rows, overflowed_rows = [], FiniteCheck(), 0, 0
        if factorization is not None and factorization.degenerate:
            notes.append(gptq.note_on_rows(factorization, 0))
            moments = factorization = None
        reading = ahead or self._read_ahead([unit])
        try:
            for matrix, whole, first, request in self._pieces(unit):
                read = reading.take(*request)
                with self.phases("round"):
                    rows = read.to(device, non_blocking=True).to(torch.float32)
                    finite.add(rows, matrix.tensor)
                    if factorization is None:
                        stored, scales = round_to_nearest(rows, scheme)
                    else:
                        assert hessian is not None
                        rows = gptq.target(rows, factorization, hessian)
                        found = gptq.solution(rows, factorization, scheme)
                        stored, scales = found.stored, found.scales
                        nearest_rows, overflowed_rows = nearest_rows + found.nearest_rows, overflowed_rows + found.overflowed_rows
                    difference = rows - restore(stored, scales, scheme)
                    sums.append(ErrorSums.of(rows, difference, moments))
                    self._write(whole, first, stored, scales, unit)
        finally:
            if ahead is None:
                reading.close()
        finite.check()
        kind, error = share_of(sums)
        atomic.write_point(f"written:{unit.name}")
        report: dict[str, Any] = {"scheme": unit.scheme.label(), "method": unit.method}
        if factorization is not None:
            notes.append(gptq.note_on_rows(factorization, overflowed_rows))
        if nearest_rows:
            report["rows_rounded_to_nearest"] = nearest_rows
        _note(report, notes)
        self._report(unit, {**report, kind: error}, started)

    def _wholes(self, unit: Unit) -> Iterator[tuple[Matrix, Stored]]:
        for matrix in unit.matrices:
            for whole in stored_matrices(self.plan.skeleton, matrix):
                yield matrix, whole

    def _solve_experts(self, units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor]) -> None:
        started = time.monotonic()
        for unit, expert, stored, scales in (solved := solve_experts(units, module, rows_of, self.plan.recipe.gptq)):
            (matrix,) = unit.matrices
            wholes = stored_matrices(self.plan.skeleton, matrix)
            each = len(wholes) // (matrix.experts or 1)
            mine = wholes[expert * each : (expert + 1) * each]
            sizes = [whole.out_features for whole in mine]
            for whole, part, part_scales in zip(mine, stored.split(sizes), scales.split(sizes), strict=True):
                self._write(whole, 0, part, part_scales, unit)
        for unit in units:
            atomic.write_point(f"written:{unit.name}")
            self._report(unit, {"scheme": unit.scheme.label(), "method": unit.method, **solved.reports[unit.name]}, started)

    def _write(self, whole: Stored, first: int, stored: torch.Tensor, scales: torch.Tensor, unit: Unit) -> None:
        storage = self.plan.storage
        for suffix, tensor in storage.to_tensors(stored, scales, unit.scheme, (whole.out_features, whole.in_features)).items():
            name, axis = f"{whole.module}.{suffix}", storage.OUTPUT_AXES[suffix]
            if axis is None:
                self.writing.write(name, tensor)
            elif axis == 0:
                self.writing.write_rows(name, first, tensor)
            else:
                self.writing.write_columns(name, first, tensor)

    def _report(self, unit: Unit, report: dict[str, Any], started: float) -> None:
        self.journal.reports[unit.name] = report
        for note in report.get("notes", []):
            output.warn(f"{unit.name}: {note}")
        kind = "output_error" if "output_error" in report else "weight_error"
        self._advance(1, f"{unit.name} {kind.replace('_', ' ')} {report[kind]:.2e} in {time.monotonic() - started:.1f} s")

    def finish(self, manifest: dict[str, Any]) -> None:
        """Write what stands beside the shards."""
        self.writer.close()
        self.reader.close()
        for name in WRITTEN_LAST:  # of a run that ended between them and its publication
            (self.directory / name).unlink(missing_ok=True)
        write_companions(self.plan, self.job.source.directory, self.directory, manifest)
        index = self.writer.index_json()
        if index is not None:
            atomic.write_file(self.directory / INDEX_FILE, index)
        own = file_names(self.plan, self.job.source.directory, [path.name for path in self.writer.files])
        require_own_files(self.directory, {*own, INDEX_FILE, *WRITTEN_LAST}.__contains__)

    def describe(self, manifest: dict[str, Any], measurements: list[dict[str, Any]]) -> Callable[[list[SealedFile]], dict[str, bytes]]:
        """What makes provenance, card and measurements of the checkpoint's files."""
        recipe = yaml.safe_load(self.plan.recipe.to_yaml())
        inherited = inherited_fields(self.job.source.directory / CARD_FILE)

        return lambda files: accounts(files, manifest, recipe, measurements, inherited)


def _part_of(unit: Unit) -> str:
    if unit.is_table:
        return _TABLES
    return _REST if unit.layer is None else f"layer {unit.layer}"


def _note(report: dict[str, Any], notes: Iterable[str]) -> None:
    """Put those of `notes` that say something into a unit's report."""
    if found := [note for note in notes if note]:
        report["notes"] = found
