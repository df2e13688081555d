"""The way of tensors between the processes that share a walk: torch.distributed within one machine, gloo between CPUs, NCCL between GPUs.

Sums are taken in the order of ranks, one process's part after the other's: their bytes depend on the split alone, never on how the machine
is wired, as those of an all-reduce do. What is sent has been agreed on before (`ranks`), so an operation here takes milliseconds; whether
the others still live is asked all the while, since NCCL waits for the dead for ever.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemq.errors import UsageError
from gemq.quantize.gptq import Hessian

_PATIENCE = timedelta(minutes=5)  # for an operation at whose both ends somebody stands
_POLL_S = 0.0002
# one machine: nothing listens on its network. And a failed operation raises here, instead of ending the process behind our back.
_SETTINGS = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}


class Exchange:
    """Process `rank` of `count`, on `device`, joined with the others through a file in `folder`; all must come at about the same time.

    `require_all` raises an error once one of the others has ended. `taken_bytes` is what NCCL took of a GPU's memory, outside torch's.
    Raises UsageError where this torch was built without the backend.
    """

    def __init__(self, rank: int, count: int, device: torch.device, folder: Path, require_all: Callable[[], None]) -> None:
        self._rank, self._count, self._device, self._require_all = rank, count, device, require_all
        self.taken_bytes = 0
        self._in_time(lambda: self._join(folder))

    def add_up(self, hessian: Hessian) -> None:
        """Give rank 0 the sums of everyone's `hessian`, in its own; the rows are its caller's to count."""
        for block in hessian.blocks():
            for part in self._gather(block.contiguous())[1:]:
                block.add_(part)

    def spread(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give everyone what rank 0 has in `tensors`: contiguous, on the device, of the same shapes and dtypes everywhere."""
        for tensor in tensors:
            self._wait(dist.broadcast(tensor, 0, async_op=True))

    def collect(self, rows: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """Everyone's `rows` [n, features], in the order of ranks, on rank 0 (its own elsewhere); `counts` are the n of each rank."""
        most = max(counts)
        if most == 0:
            return rows
        padded = rows.new_zeros(most, rows.shape[1])
        padded[: rows.shape[0]] = rows
        parts = self._gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)]) if parts else rows

    def leave(self) -> None:
        """End a walk that everyone came to the end of."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def abort(self) -> None:
        """End one that failed: operations that still wait for others end too."""
        if dist.is_initialized():
            dist.distributed_c10d._abort_process_group()

    def _join(self, folder: Path) -> None:
        cuda = self._device.type == "cuda"
        backend = "nccl" if cuda else "gloo"
        if not (dist.is_nccl_available() if cuda else dist.is_gloo_available()):
            raise UsageError(f"--devices needs a torch with {backend}, and this one has none", "install another build of torch, or use --device")
        free = 0
        if cuda:
            torch.cuda.set_device(self._device)  # of this thread
            free = torch.cuda.mem_get_info(self._device)[0]
        with _environment(_SETTINGS):
            store = dist.FileStore(str(folder / "rendezvous"), self._count)
            dist.init_process_group(backend, store=store, rank=self._rank, world_size=self._count, timeout=_PATIENCE,
                                    device_id=self._device if cuda else None)  # fmt: skip
            probe = torch.ones(1, device=self._device)  # NCCL takes its memory with the first operation of each kind
            self.spread([probe])
            self._gather(probe)
        if cuda:
            torch.cuda.synchronize(self._device)
            self.taken_bytes = max(0, free - torch.cuda.mem_get_info(self._device)[0])

    def _in_time(self, work: Callable[[], None]) -> None:
        """Do `work` in a thread, which is left behind if another process dies on the way: NCCL's start can't be called off."""
        failed: list[BaseException] = []

        def attempt() -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=attempt, name="join the others", daemon=True)
        thread.start()
        while thread.is_alive():
            self._require_all()
            thread.join(0.01)
        if failed:
            self._explain(failed[0])

    def _gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Everyone's `part` on rank 0, nothing elsewhere."""
        parts = [torch.empty_like(part) for _ in range(self._count)] if self._rank == 0 else []
        self._wait(dist.gather(part, parts or None, dst=0, async_op=True))
        return parts

    def _wait(self, work: Any) -> None:
        try:
            while not work.is_completed():
                self._require_all()
                time.sleep(_POLL_S)
            work.wait()
        except BaseException as error:
            self.abort()  # else the device's queue stands still, and whoever waits for it next hangs
            self._explain(error)

    def _explain(self, error: BaseException) -> None:
        """Raise why `error` came: a connection is lost a moment before its process has ended for the system."""
        if isinstance(error, RuntimeError):
            for _ in range(200):
                self._require_all()
                time.sleep(0.01)
        raise error


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    """`settings` in the environment where it doesn't have them, until the block ends."""
    added = [name for name in settings if name not in os.environ]
    os.environ.update({name: settings[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
