"""Several devices on one calibration set: each walks its share of the batches, and the first, the leader, solves for all.

The leader is this process. Every other device gets a process of its own (`follower`), which goes through the decoder at the same pace. At a
unit the followers' sums are added to the leader's (`exchange`), the leader solves it, writes it and gives everyone the new weights. What a
process says before a tensor is sent goes through a pipe, where a death is heard at once; so nobody waits for the dead.
"""

from __future__ import annotations

import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from gemq import atomic, output
from gemq.calibration.sets import CalibrationSet
from gemq.errors import StoppedSafely, UsageError
from gemq.quantize.exchange import Exchange
from gemq.quantize.follower import Failed, Order, Share, expert_weights
from gemq.quantize.gptq import Hessian
from gemq.quantize.gpu import Budget
from gemq.quantize.job import Job
from gemq.quantize.phases import Phases
from gemq.quantize.plan import Pair, Unit
from gemq.quantize.process import begin
from gemq.quantize.walk import BATCH_TOKENS, Walker, batches_of
from gemq.recipes.model import Recipe

_SILENCE_S = 1800  # a follower that lives and says nothing for so long: its device hangs
_LAST_WORDS_S = 10


def require_divisible(recipe: Recipe) -> None:
    """Raise UsageError for a recipe whose work several devices can't share."""
    if not recipe.needs_calibration:
        raise UsageError(f"recipe {recipe.name} looks at no calibration set, so --devices has nothing to split", "give one device, by --device")
    if recipe.tuning is not None:
        raise UsageError(f"recipe {recipe.name} has `tuning`, which learns from one batch after the other on one device",
                         "give one device, by --device, or leave `tuning` out of the recipe")  # fmt: skip


def shares_of(job: Job, budget: Budget | None) -> list[Share]:
    """What each of `job`'s devices walks; nothing where it has one. Raises UsageError for a recipe or a calibration set that can't be split."""
    if len(job.devices) < 2:
        return []
    require_divisible(job.plan.recipe)
    assert job.calibration is not None
    return split(job.calibration, len(job.devices), BATCH_TOKENS if budget is None else budget.batch_tokens)


def split(calibration: CalibrationSet, count: int, batch_tokens: int) -> list[Share]:
    """The batches of `calibration` in `count` shares of about the same number of tokens; the same every time, and batches stay whole.

    Raises UsageError where there are fewer batches than shares.
    """
    texts = batches_of(calibration.windows, batch_tokens)
    sizes = [*(batch.numel() for batch in texts), *(len(record.token_ids) for record in calibration.records)]
    if len(sizes) < count:
        raise UsageError(f"--devices names {count} devices, and the calibration set makes {len(sizes)} batches of up to {batch_tokens} tokens",
                         "give fewer devices, or more samples: --samples")  # fmt: skip
    mine: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        lightest = loads.index(min(loads))
        mine[lightest].append(number)
        loads[lightest] += sizes[number]
    # in their old order a share's windows fall into the same batches again: only the last of a length may be smaller than the others
    return [
        Share(
            tuple(tuple(row) for number in sorted(numbers) if number < len(texts) for row in texts[number].tolist()),
            tuple(calibration.records[number - len(texts)] for number in sorted(numbers) if number >= len(texts)),
        )
        for numbers in mine
    ]  # fmt: skip


class Ranks:
    """The followers on `job`'s further devices, started at once; `shares` are what each device walks, the leader's first.

    `budget` is the leader's. Whoever made one must `close` it.
    """

    def __init__(self, job: Job, shares: Sequence[Share], budget: Budget | None, phases: Phases) -> None:
        self._devices, self._device, self._phases, self._budget = job.devices, torch.device(job.device), phases, budget
        self.share = shares[0]
        self._folder = Path(tempfile.mkdtemp(prefix="gemq-devices-"))
        self._processes: list[Any] = []
        self._controls: list[Connection] = []
        self._exchange: Exchange | None = None
        try:
            self._start(job, shares, budget)
        except BaseException:
            self.close()
            raise

    def _start(self, job: Job, shares: Sequence[Share], budget: Budget | None) -> None:
        context = multiprocessing.get_context("forkserver")  # neither CUDA nor threads survive a plain fork
        for rank, device in enumerate(self._devices[1:], 1):
            control, theirs = context.Pipe()
            self._controls.append(control)
            process = context.Process(target=begin, args=(theirs, self._stderr_of(rank)), name=f"gemq {device}", daemon=True)
            process.start()
            self._processes.append(process)
            theirs.close()  # so that the pipe ends with the process
            order = Order(job.source.directory, job.plan.recipe, rank, len(self._devices), device, job.gpu_memory_bytes, budget,
                          torch.get_num_threads(), shares[rank], self._folder, atomic.partial_of(job.output))  # fmt: skip
            try:
                control.send(order)
            except ConnectionError:
                raise self._ended(rank - 1) from None
        tokens = ", ".join(f"{device} {share.tokens}" for device, share in zip(self._devices, shares, strict=True))
        output.note(f"calibration tokens by device: {tokens}")

    def _stderr_of(self, rank: int) -> Path:
        return self._folder / f"stderr-{rank}"

    @property
    def pids(self) -> list[int]:
        """The followers' processes."""
        return [process.pid for process in self._processes]

    def join(self) -> Budget | None:
        """Wait until all followers are ready, and connect with them; gives the leader's budget, less what the connection takes of its GPU."""
        self._hear("ready")
        self._tell("join")
        self._exchange = Exchange(0, len(self._devices), self._device, self._folder, self._require_all)
        return None if self._budget is None else self._budget.beside(self._exchange.taken_bytes, str(self._device))

    def led(self, walker: Walker) -> Walker:
        """`walker` for the leader's walk: it solves from everyone's sums, and everyone gets what it made."""
        exchange = self._exchange
        assert exchange is not None

        def restored(unit: Unit) -> list[torch.Tensor] | None:
            weights = walker.restored(unit)
            self._tell("restored", unit.name, weights is not None)
            self._spread(_in_float32(weights or []))
            return weights

        def solve(unit: Unit, weights: list[torch.Tensor], hessian: Hessian | None) -> list[torch.Tensor]:
            if hessian is not None:
                hessian.rows += sum(self._hear("sums", unit.name))
                with self._phases("exchange between devices"):
                    exchange.add_up(hessian)
            solved = walker.solve(unit, weights, hessian)
            self._tell("solved", unit.name)
            self._spread(_in_float32(solved))
            return solved

        def solve_experts(units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor]) -> None:
            assert walker.solve_experts is not None
            name = units[0].name
            own = [rows_of(expert).shape[0] for expert in range(module.gate_up_proj.shape[0])]
            counts = list(zip(own, *self._hear("experts", name), strict=True))  # by expert and rank
            self._tell("experts", name, counts)
            following = iter(range(len(counts)))

            def rows_of_all(expert: int) -> torch.Tensor:
                if expert != next(following):
                    raise AssertionError(f"expert {expert} of {name} was asked for out of turn")
                return exchange.collect(rows_of(expert), counts[expert])

            walker.solve_experts(units, module, rows_of_all)
            self._tell("solved", name)
            self._spread(expert_weights(units, module))

        def producer(pair: Pair) -> torch.Tensor | None:
            assert walker.producer is not None
            changed = walker.producer(pair)
            self._tell("producer", pair.unit, None if changed is None else changed.numel())
            self._spread([] if changed is None else _in_float32([changed]))
            return changed

        return Walker(restored, solve, walker.layer_done, solve_experts, producer=None if walker.producer is None else producer)

    def end(self) -> None:
        """After the walk: everyone has come to its end too."""
        assert self._exchange is not None
        self._hear("end")
        self._exchange.leave()
        for process in self._processes:
            process.join(_LAST_WORDS_S)

    def close(self) -> None:
        """End what is still there of the followers, in whatever state; they have nothing to lose."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(_LAST_WORDS_S)
        if self._exchange is not None:
            self._exchange.abort()
        for control in self._controls:
            control.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spread(self, tensors: Sequence[torch.Tensor]) -> None:
        assert self._exchange is not None
        with self._phases("exchange between devices"):
            self._exchange.spread([tensor.to(self._device).contiguous() for tensor in tensors])

    def _tell(self, what: str, name: str = "", value: Any = None) -> None:
        for position, control in enumerate(self._controls):
            try:
                control.send((what, name, value))
            except ConnectionError:
                raise self._ended(position) from None

    def _hear(self, what: str, name: str = "") -> list[Any]:
        """What each follower says about `what` and `name`, in the order of ranks; raises the error of one that failed or is gone."""
        waiting, said = {control: position for position, control in enumerate(self._controls)}, {}
        with self._phases("wait for other devices"):
            while waiting:
                ready: Any = wait(list(waiting), _SILENCE_S)
                if not ready:
                    device = self._devices[1 + min(waiting.values())]
                    raise StoppedSafely(f"{device} has not answered for {_SILENCE_S // 60} minutes", "look at `nvidia-smi`, and run the same command")
                for control in ready:
                    position = waiting.pop(control)
                    try:
                        message = control.recv()
                    except (EOFError, ConnectionError):
                        raise self._ended(position) from None
                    if isinstance(message, Failed):
                        raise self._told(position, message)
                    if message[:2] != (what, name):
                        raise AssertionError(f"{self._devices[1 + position]} is at {message[:2]}, the leader at {what} {name}")
                    said[position] = message[2]
        return [said[position] for position in range(len(self._controls))]

    def _require_all(self) -> None:
        for position, process in enumerate(self._processes):
            if process.exitcode is not None:
                raise self._ended(position)

    def _ended(self, position: int) -> Exception:
        """Why the follower at `position` is no more: what it said last, or how it died."""
        process, control, device = self._processes[position], self._controls[position], self._devices[1 + position]
        process.join(_LAST_WORDS_S)
        try:
            while control.poll():
                message = control.recv()
                if isinstance(message, Failed):
                    return self._told(position, message)
        except (EOFError, ConnectionError):
            pass  # it said nothing
        code = process.exitcode
        how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"ended with code {code}"
        hint = "the kernel sends SIGKILL where memory runs out; " if code == -signal.SIGKILL else ""
        try:
            lines = [line for line in self._stderr_of(position + 1).read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            lines = []
        last = f": {lines[-1].strip()}" if lines else ""
        return StoppedSafely(f"the process {process.pid} on {device} {how}{last}", f"{hint}run the same command to go on where it was")

    def _told(self, position: int, failed: Failed) -> Exception:
        device = self._devices[1 + position]
        if failed.error is not None:
            return type(failed.error)(f"{device}: {failed.error.message}", failed.error.next_step)
        error = RuntimeError(f"the process on {device} failed: {failed.trace.strip().splitlines()[-1]}")
        error.add_note(f"There:\n{failed.trace}")
        return error


def _in_float32(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What the followers have room for."""
    return [tensor.to(torch.float32) for tensor in tensors]
