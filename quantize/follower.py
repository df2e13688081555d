"""A process that walks its share of the calibration batches beside the leader (`ranks`), and takes every solved weight from it.

It has nothing on disk and decides nothing, so it may be killed at any time; it ends when the leader does, however that ends.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from gemq import output
from gemq.calibration.media import MediaRecord, media_inputs
from gemq.errors import GemqError
from gemq.memory import import_transformers_alone, return_freed_memory
from gemq.quantize.exchange import Exchange
from gemq.quantize.gptq import Hessian
from gemq.quantize.gpu import Budget, budget_of, too_little
from gemq.quantize.plan import Pair, Plan, Unit, make_plan
from gemq.quantize.skeleton import load_skeleton
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import Recipe


@dataclass(frozen=True)
class Share:
    """What one process walks: windows of text, and records with images or recordings."""

    windows: tuple[tuple[int, ...], ...]
    records: tuple[MediaRecord, ...]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.windows)) + sum(len(record.token_ids) for record in self.records)


@dataclass(frozen=True)
class Order:
    """Everything that a follower needs: the source and the recipe as the leader has them, its place, its share, where to meet, where to keep what
    a GPU has no room for."""

    source: Path
    recipe: Recipe
    rank: int
    count: int
    device: str
    memory_bytes: int | None
    budget: Budget | None  # the leader's; a GPU has its own
    threads: int
    share: Share
    folder: Path
    scratch: Path


@dataclass(frozen=True)
class Failed:
    """What a follower says last when it can't go on: gemq's own error, or where another came from."""

    error: GemqError | None
    trace: str = ""


def follow(order: Order, control: Connection) -> None:
    """Walk to the end, or tell the leader through `control` why not; `process` has seen to it that this process ends with the leader's."""
    output.mode.quiet = True
    try:
        _walk(order, control)
    except GemqError as error:
        control.send(Failed(error))
    except torch.OutOfMemoryError as error:
        control.send(Failed(too_little(error, order.memory_bytes)))
    except Exception as error:
        control.send(Failed(None, "".join(traceback.format_exception(error))))
    else:
        return
    os._exit(1)  # whatever still waits for the others is left as it is


def _walk(order: Order, control: Connection) -> None:
    torch.set_num_threads(order.threads)  # how a CPU splits its products decides their last bits
    return_freed_memory()
    import_transformers_alone()
    skeleton, reader = load_skeleton(order.source)
    assert reader is not None
    plan = make_plan(skeleton, order.recipe)
    device = torch.device(order.device)
    budget = budget_of(plan, order.device, order.memory_bytes) if device.type == "cuda" else order.budget
    media = media_inputs(order.share.records, order.source)
    control.send(("ready", "", None))
    _Told(control)("join")
    exchange = Exchange(order.rank, order.count, device, order.folder, lambda: None)
    if budget is not None:
        budget = budget.beside(exchange.taken_bytes, order.device)
    walk = Walk(plan, reader, order.share.windows, order.device, media, budget=budget, scratch=order.scratch)
    walk.run(_walker(plan, device, control, exchange))
    control.send(("end", "", None))
    exchange.leave()


class _Told:
    """What the leader says next, which must be about `what` and `name`."""

    def __init__(self, control: Connection) -> None:
        self._control = control

    def __call__(self, what: str, name: str = "") -> Any:
        said_what, said_name, value = self._control.recv()
        if (said_what, said_name) != (what, name):
            raise AssertionError(f"the leader says {said_what} {said_name}, and {what} {name} is next here")
        return value


def _walker(plan: Plan, device: torch.device, control: Connection, exchange: Exchange) -> Walker:
    """Callbacks that give the leader what this process saw, and take what it made of all."""
    told = _Told(control)

    def restored(unit: Unit) -> list[torch.Tensor] | None:
        if not told("restored", unit.name):
            return None
        if unit.name == "lm_head":
            return []
        weights = []
        for matrix in unit.matrices:
            shape = (matrix.out_features, matrix.in_features)
            weight = torch.empty(shape if matrix.experts is None else (matrix.experts, *shape), device=device)
            exchange.spread([weight])
            weights.append(weight.cpu())  # a layer's are held until it is loaded
        return weights

    def solve(unit: Unit, weights: list[torch.Tensor], hessian: Hessian | None) -> list[torch.Tensor]:
        if hessian is not None:
            control.send(("sums", unit.name, hessian.rows))
            exchange.add_up(hessian)
        told("solved", unit.name)
        weights = [weight.contiguous() for weight in weights]
        exchange.spread(weights)
        return weights

    def solve_experts(units: list[Unit], module: Any, rows_of: Callable[[int], torch.Tensor]) -> None:
        name = units[0].name
        experts = range(module.gate_up_proj.shape[0])
        control.send(("experts", name, [rows_of(expert).shape[0] for expert in experts]))
        for expert, counts in enumerate(told("experts", name)):
            exchange.collect(rows_of(expert), counts)
        told("solved", name)
        exchange.spread(expert_weights(units, module))

    def producer(pair: Pair) -> torch.Tensor | None:
        size = told("producer", pair.unit)
        if size is None:
            return None
        changed = torch.empty(size, device=device)
        exchange.spread([changed])
        return changed

    return Walker(restored, solve, lambda index: None, solve_experts, producer=producer if plan.pairs else None)


def expert_weights(units: list[Unit], module: Any) -> list[torch.Tensor]:
    """The stacks of weights of a mixture's experts in `module` that `units` solve."""
    leaves = [unit.matrices[0].kind.path.rpartition(".")[2] for unit in units]
    return [getattr(module, leaf).data for leaf in leaves]
