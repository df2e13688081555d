"""The layer walk: transformers' own forward of the decoder, paused wherever a quantized linear is about to read its input.

Every calibration batch runs the text model's forward in a greenlet of its own. A hook stops it at the entrance of each decoder layer and at
each unit (the linears that read one tensor). When all batches stand at the same unit, its inputs have been seen, it is solved, its weights are
replaced by what their stored form stands for, and all batches go on. So each layer is computed once, every unit is calibrated on the outputs
of everything quantized before it, and masks, rotary embeddings, per-layer inputs and shared K/V are whatever transformers makes of them:
no code here knows an architecture. One layer's weights are in memory at a time; embeddings are read row by row from the source.

A recipe with asymmetric targets sends the same batches through the source's own weights too (`source_beside`), so that each unit also sees what
its inputs would have been.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gemq import output
from gemq.errors import IntegrityError
from gemq.quantize.activations import Activations
from gemq.quantize.gptq import Hessian
from gemq.quantize.gpu import Budget, bytes_within_layers, divide, models_walked, walks_source_within_layers
from gemq.quantize.loading import LayerLoader, prepare_decoder
from gemq.quantize.multimodal import DecoderInputs
from gemq.quantize.phases import Phases
from gemq.quantize.plan import Pair, Plan, Unit
from gemq.quantize.replay import Replays
from gemq.quantize.scratch import Scratch
from gemq.quantize.source_beside import Ahead, Anew
from gemq.quantize.stops import Stops
from gemq.quantize.streams import AtExperts, AtLayer, AtUnit, Done, LeavingLayer, Stream
from gemq.quantize.tuning import Call
from gemq.shards import ShardReader

Media = Callable[[], dict[str, torch.Tensor]]
BATCH_TOKENS = 2048  # of a batch on a CPU; it decides the order of sums, as a GPU's does


@dataclass
class Walker:
    """What the walk calls back.

    `restored(unit)` gives the unit's weights if an earlier run solved it (then it is only replayed), else None. `solve(unit, weights, hessian)`
    returns the weights that the stored form stands for. `layer_done(index)` follows the last unit of a layer. `solve_experts(units, module,
    rows_of)` replaces the weights of a mixture's experts in `module` [experts, out, in]; `rows_of(expert)` gives the inputs routed there.
    `tune(index, layer, calls)` may better the weights of a layer whose units are all solved; it is asked where the recipe has `tuning`.
    `producer(pair)` follows the solving of a unit of the plan's pairs: the weight that its norm has now, or what the rows of its linear are
    divided by; None where smoothing left them. It is also asked for the norms of restored units.
    """

    restored: Callable[[Unit], list[torch.Tensor] | None]
    solve: Callable[[Unit, list[torch.Tensor], Hessian | None], list[torch.Tensor]]
    layer_done: Callable[[int], None]
    solve_experts: Callable[[list[Unit], Any, Callable[[int], torch.Tensor]], None] | None = None
    tune: Callable[[int, nn.Module, list[Call]], None] | None = None
    producer: Callable[[Pair], torch.Tensor | None] | None = None


def batches_of(windows: Sequence[Sequence[int]], tokens: int = BATCH_TOKENS) -> list[torch.Tensor]:
    """The windows as id tensors [windows, length] of one length each and about `tokens` tokens, the longest first."""
    by_length: dict[int, list[Sequence[int]]] = {}
    for window in windows:
        by_length.setdefault(len(window), []).append(window)
    batches = []
    for length in sorted(by_length, reverse=True):
        count = max(1, tokens // length)
        group = by_length[length]
        batches += [torch.tensor(group[start : start + count]) for start in range(0, len(group), count)]
    return batches


class Walk:
    """One pass of `windows` and `media` through the decoder of `plan`'s source, unit by unit.

    Each of `media` gives the arguments of the multimodal model's whole forward, batch 1, and is a batch of its own: it starts in the decoder
    with what that forward hands to it. `budget` is a GPU's: then batches stand at layers only (`replay`), unless there is room for all that they
    hold within a layer.
    `scratch` is a folder with room for the per-layer inputs that don't fit into it; the system's for such files if None.
    """

    def __init__(
        self, plan: Plan, reader: ShardReader, windows: Sequence[Sequence[int]], device: str = "cpu", media: Sequence[Media] = (),
        budget: Budget | None = None, phases: Phases | None = None, scratch: Path | None = None,
    ) -> None:  # fmt: skip
        self._scratch = scratch
        self.plan, self.skeleton, self.reader = plan, plan.skeleton, reader
        self.device, self.budget = torch.device(device), budget
        self.phases = phases or Phases(self.device)
        self.dtype = torch.float32 if budget is None else budget.dtype
        tokens = batches_of(windows) if budget is None else batches_of(windows, budget.batch_tokens)
        self.batches: list[torch.Tensor | Media] = [*tokens, *media]
        self._loader = LayerLoader(self.skeleton, reader, self.device, self.dtype, ahead=budget is not None)
        self._before_decoder = DecoderInputs(self.skeleton, reader, self.device) if media else None
        self._unit_of = plan.quantized_matrices
        self._solved: set[str] = set()
        self._hessians: dict[str, Hessian] = {}
        self._source: Ahead | Anew | None = None
        self._replays: list[Replays] = []
        self._restored_layers: set[int | None] = set()
        self._stops = Stops(plan, self._solved, self._restored_layers, self._replays)

    @torch.no_grad()
    def run(self, walker: Walker) -> None:
        """Drive every batch to the end; raises whatever the callbacks raise."""
        with self.phases("load"):
            prepare_decoder(self.skeleton, self.reader, self.device, self.dtype)
        self._stops.place()
        quantized, self._source = self._streams()
        try:
            restored = self._restore(walker, None)
            if self._source is not None:
                with self.phases("forward"):
                    self._source.start()
            self._quantize_outside(restored)
            self._solve_without_inputs(None, walker)
            with self.phases("forward"):
                quantized.start()
            if self._before_decoder is not None:
                self._before_decoder.release()
            layer: int | None = None
            while not isinstance(event := quantized.events[0], Done):
                if isinstance(event, AtLayer):
                    self._leave(layer, walker)
                    layer = event.index
                    self._enter(layer, self._restore(walker, layer))
                    self._solve_without_inputs(layer, walker)
                elif isinstance(event, AtExperts):
                    self._solve_experts(quantized.events, walker)
                elif isinstance(event, LeavingLayer):
                    self._tune(quantized.events, walker)
                else:
                    self._solve(event.unit, walker)
                    self._refresh(event.unit, quantized.events, walker)
                leaving = isinstance(event, LeavingLayer)
                del event
                with self.phases("forward"):
                    quantized.resume(again=leaving)
            self._leave(layer, walker)
            self._solve_head(quantized.events, walker)
        finally:
            self._stops.remove()
            for stream in (quantized, self._source):
                if stream is not None:
                    stream.close()
            self._loader.close()
            self.skeleton.decoder.__dict__.pop("project_per_layer_inputs", None)

    def _streams(self) -> tuple[Stream | Replays, Ahead | Anew | None]:
        """The quantized model's batches, and the source's where the recipe looks at them."""
        with_source = models_walked(self.plan) > 1
        if self.budget is None or self._has_room_within_layers(self.budget):
            ahead = Ahead(Stream(self._forward, self.batches, _ignore)) if with_source else None
            return Stream(self._forward, self.batches, self._observe), ahead
        tokens = sum(batch.numel() for batch in self.batches if isinstance(batch, torch.Tensor))
        division = divide(self.plan, self.budget, tokens)
        head, scratch = self._unit_of.get("lm_head"), Scratch(self._scratch)

        def replays(seen: Callable[[int, Any], None], pausing: bool) -> Replays:
            activations = Activations(self.device, division.quota_bytes, len(self.batches), reserved=division.reserved_bytes)
            return Replays(
                self._forward, self.batches, seen, self._awaited, self.skeleton.model.get_submodule, activations, scratch,
                pausing=pausing, with_end=head is not None and head.method == "gptq",
            )  # fmt: skip

        self._replays += [replays(self._observe, division.pausing), *([replays(_ignore, False)] if with_source else [])]
        project = getattr(self.skeleton.decoder, "project_per_layer_inputs", None)
        if project is not None:

            def keep(*given: Any) -> Any:
                return next(batches for batches in self._replays if batches.starting).keep_by_layer(project(*given))

            self.skeleton.decoder.project_per_layer_inputs = keep
        return self._replays[0], Anew(self._replays[1]) if with_source else None

    def _has_room_within_layers(self, budget: Budget) -> bool:
        if walks_source_within_layers(self.plan):
            return True
        known = [batch.shape for batch in self.batches if isinstance(batch, torch.Tensor)]
        if len(known) < len(self.batches):
            return False  # how many tokens media come to is not known before they ran
        tokens, longest = sum(shape.numel() for shape in known), max(shape[-1] for shape in known)
        needed = bytes_within_layers(self.plan, budget, tokens, longest)
        has_room = needed <= budget.memory_bytes
        if not has_room and (self.device.type != "cuda" or needed < torch.cuda.get_device_properties(self.device).total_memory):
            rounded = math.ceil(needed / 2**30 * 10) / 10
            output.note(f"each layer runs anew for each of its units: with --gpu-memory {rounded:.1f}GiB it need not, which takes less time")
        return has_room

    def _awaited(self, layer: int) -> Unit | None:
        return next((unit for unit in self.plan.units if unit.layer == layer and unit.name not in self._solved), None)

    def _solve_without_inputs(self, layer: int | None, walker: Walker) -> None:
        """In a stream that runs a layer anew for each unit: solve at once what is rounded to nearest."""
        for unit in self.plan.units if self._replays else []:
            mine = unit.layer == layer and unit.name != "lm_head" and not unit.is_table and unit.matrices[0].experts is None
            if mine and not self.plan.reads_inputs(unit) and unit.name not in self._solved:
                self._solve(unit, walker)

    def _source_at(self, position: int) -> Any:
        """Where the source's batch `position` stands, if targets are to make up for what its inputs would have been."""
        return self._source.at(position) if self._source is not None and self.plan.recipe.gptq.asymmetric else None

    def _observe(self, position: int, event: Any) -> None:
        if not isinstance(event, AtUnit) or not self.plan.reads_inputs(event.unit):
            return
        hessian = self._hessians.get(event.unit.name)
        if hessian is None:
            hessian = self._hessians[event.unit.name] = Hessian(event.unit.in_features, self.device)
        source = self._source_at(position)
        with self.phases.on_device("statistics"):
            hessian.add(event.inputs, None if source is None else source.inputs)

    def _forward(self, batch: torch.Tensor | Media) -> Done:
        if isinstance(batch, torch.Tensor):
            arguments: dict[str, Any] = {"input_ids": batch.to(self.device), "use_cache": False}
        else:
            assert self._before_decoder is not None
            arguments = {name: _as(value, self.dtype) for name, value in self._before_decoder(batch()).items()}
        return Done(self.skeleton.decoder(**arguments).last_hidden_state)

    def _restore(self, walker: Walker, layer: int | None) -> dict[str, torch.Tensor]:
        """Weights of this layer's units that an earlier run solved, by module; those units are not solved again."""
        found: dict[str, torch.Tensor] = {}
        for unit in self.plan.units:
            if unit.layer == layer and unit.name != "lm_head" and not unit.is_table and (weights := walker.restored(unit)) is not None:
                self._solved.add(unit.name)
                self._restored_layers.add(layer)
                found |= {matrix.module: weight for matrix, weight in zip(unit.matrices, weights, strict=True)}
                pair = self.plan.pairs.get(unit.name)
                if pair is not None and pair.is_norm and walker.producer is not None and (norm := walker.producer(pair)) is not None:
                    found[pair.module] = norm
        return found

    def _quantize_outside(self, restored: dict[str, torch.Tensor]) -> None:
        """What stands before the layers, as it will be served."""
        for module, weight in restored.items():
            self.skeleton.model.get_submodule(module).weight.data.copy_(weight)
        for unit in self.plan.units:
            if unit.is_table:
                self.skeleton.model.get_submodule(unit.matrices[0].module).scheme = unit.scheme.weights

    def _enter(self, index: int, restored: dict[str, torch.Tensor]) -> None:
        with self.phases("load"):
            self._loader.load(index, {} if self._source is not None else restored)
        if self._source is not None:
            with self.phases("forward"):
                self._source.enter(self.skeleton.decoder.layers[index])
            if restored:
                self._loader.load(index, restored)

    def _leave(self, index: int | None, walker: Walker) -> None:
        if index is None:
            return
        unsolved = [unit.name for unit in self.plan.units if unit.layer == index and unit.name not in self._solved]
        if unsolved:
            raise IntegrityError(f"the forward of layer {index} never used {unsolved[0]}", "report this architecture as an issue of gemq")
        if self._source is not None:
            with self.phases("forward"):
                self._source.leave()
        self.skeleton.decoder.layers[index].to("meta")
        walker.layer_done(index)

    def _solve(self, unit: Unit, walker: Walker) -> None:
        self._solved.add(unit.name)
        self._lead()
        modules = [self.skeleton.model.get_submodule(matrix.module) for matrix in unit.matrices]
        with self.phases("solve"):
            weights = walker.solve(unit, [module.weight.data.to(torch.float32) for module in modules], self._hessians.pop(unit.name, None))
            for module, weight in zip(modules, weights, strict=True):
                module.weight.data.copy_(weight)

    def _refresh(self, unit: Unit, events: list[AtUnit], walker: Walker) -> None:
        """Give the producer of a smoothed unit its new weight, and each batch that stands at the unit what it makes now.

        To the last bit what a run makes that starts with the new weight: a norm is computed again, rows are divided by powers of two.
        """
        pair = self.plan.pairs.get(unit.name)
        changed = walker.producer(pair) if pair is not None and walker.producer is not None else None
        if pair is None or changed is None:
            return
        producer = self.skeleton.model.get_submodule(pair.module)
        standing = [event for event in events if event.inputs.numel()]  # none where the layer is run anew for each unit
        if not pair.is_norm:
            producer.weight.data.div_(changed.to(producer.weight).unsqueeze(1))
            for event in standing:
                event.inputs.div_(changed.to(event.inputs))
            return
        for event in standing[:1]:
            if event.before is None or not torch.equal(producer.forward(event.before), event.inputs):
                raise IntegrityError(f"{pair.module} is not what {unit.name} reads", "report this architecture as an issue of gemq")
        producer.weight.data.copy_(changed)
        for event in standing:
            event.inputs.copy_(producer.forward(event.before))

    def _tune(self, events: list[LeavingLayer], walker: Walker) -> None:
        assert self._source is not None
        assert walker.tune is not None
        index = events[0].index
        calls = [
            Call(event.args, event.kwargs, self._source.at(position).output) for position, event in enumerate(events)
        ]  # fmt: skip
        walker.tune(index, self.skeleton.decoder.layers[index], calls)
        self._lead()

    def _lead(self) -> None:
        if self._source is not None:
            with self.phases("forward"):
                self._source.lead()

    def _solve_experts(self, events: list[AtExperts], walker: Walker) -> None:
        layer = events[0].layer

        def rows_of(expert: int) -> torch.Tensor:
            return torch.cat([event.hidden[(event.chosen == expert).any(-1)] for event in events])

        assert walker.solve_experts is not None
        units = self.plan.expert_units(layer)
        self._solved.update(unit.name for unit in units)
        self._lead()
        walker.solve_experts(units, self.skeleton.decoder.layers[layer].experts, rows_of)

    def _solve_head(self, events: list[Done], walker: Walker) -> None:
        unit = self._unit_of.get("lm_head")
        if unit is None or walker.restored(unit) is not None:
            return
        hessian = None
        if unit.method == "gptq":
            hessian = Hessian(unit.in_features, self.device)
            for position, event in enumerate(events):
                source = self._source_at(position)
                hessian.add(event.hidden, None if source is None else source.hidden)
        walker.solve(unit, [], hessian)


def _ignore(position: int, event: Any) -> None:
    pass


def _as(value: Any, dtype: torch.dtype) -> Any:
    """A float tensor in the dtype of the walk; anything else as it is."""
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
