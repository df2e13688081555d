"""The plugin's kernels in Triton's interpreter against float64: shapes of E4B cut in N, odd sizes, scales from tiny to huge, one to eight rows.

The interpreter does what a card does, operation by operation, but slowly: N is a program or two, and all cases run in one process. What it
can't show (registers, speed, the order of a reduction on a card) `benchmarks/plugin.py kernels` checks on one.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gemq.quantize.packing import to_tensors
from gemq.recipes.model import Scheme
from gemq.serve.wheel import PLUGINS

PLUGIN = PLUGINS["gemq-int4"]
sys.path.insert(0, str(PLUGIN))
from gemq_int4 import cuts, layout, settings  # noqa: E402
from gemq_int4.launch import Cut  # noqa: E402

Cutting = tuple[int, ...]  # a Cut's numbers

# every K of E4B's linears with the groups that recipes make, and blocks of K side by side: fewer than there are where the loop goes around
E4B = [(2560, 128, 4), (2560, 32, 8), (2560, 64, 8), (2560, -1, 8), (2048, 128, 2), (4096, 128, 8), (10240, 128, 8), (256, 128, 1), (256, 32, 1)]
ODD = [(4, 544, 32), (4, 96, 32), (8, 256, 128), (8, 512, 32), (8, 288, 32), (8, 96, -1), (4, 32, -1)]
EXTREMES = [(1e-30, 1e-28, 1.0), (1e20, 1e22, 1.0), (1e-3, 1e-2, 1e30), (1e-8, 1e8, 1.0)]
LARGE = [(4, 128), (4, -1), (8, 32)]
TILED = [(256, 128), (256, 32), (96, -1)]
ROWS: Cutting = (1, 1, 1, 1)


def case(n: int, k: int, bits: int, group: int, calls: list[tuple[int, Cutting]], *, low: float = 1e-3, high: float = 1e-2, size: float = 1.0,
         bias: bool = False, how: str = "matvec") -> dict[str, Any]:  # fmt: skip
    """A checkpoint's own tensors, as gemq packs them, inputs of so many rows, and what comes out in float64."""
    torch.manual_seed(n + k + bits + group)
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = Scheme.model_validate({"weights": {"num_bits": bits, **strategy}})
    stored = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k), dtype=torch.int8)
    scales = (torch.rand(n, 1 if group == -1 else k // group) * (high - low) + low).bfloat16()
    tensors = to_tensors(stored, scales, scheme, (n, k))
    dense = stored.double() * scales.double().repeat_interleave(k if group == -1 else group, 1)
    x, added = (torch.randn(40, k) * size).bfloat16(), torch.randn(n).bfloat16() if bias else None
    return {"bits": bits, "k": k, "group": group, "how": how, "packed": tensors["weight_packed"], "scales": tensors["weight_scale"],
            "bias": added, "calls": [(x[:m], cut) for m, cut in calls], "dense": dense,
            "expected": x.double() @ dense.T + (added.double() if added is not None else 0)}  # fmt: skip


def cases() -> dict[str, dict[str, Any]]:
    found = {}
    for k, group, blocks in E4B:
        found[f"e4b {k} {group}"] = case(4, k, 4, group, [(1, (4, blocks, max(1, blocks * layout.Layout(4, k, group).lanes // 32), 1))])
    for bits, k, group in ODD:
        found[f"odd {bits} {k} {group}"] = case(3, k, bits, group, [(1, (4, 2, 1, 1))], bias=True)
    for low, high, size in EXTREMES:
        found[f"extreme {low} {size}"] = case(4, 256, 4, 32, [(1, ROWS)], low=low, high=high, size=size)
    # up to eight rows of one x; then a second run, and other cuts of N and of the loads
    found["rows"] = case(4, 128, 4, 128, [*((m, ROWS) for m in range(1, 9)), (1, ROWS), (1, (2, 1, 1, 2))])
    found["unrolled"] = case(4, 1536, 4, 128, [(1, ROWS), (1, (1, 1, 1, 1, 3))])
    for bits, group in LARGE:
        found[f"large {bits} {group}"] = case(3, 256, bits, group, [(33, ROWS)], how="product")
        found[f"weights {bits} {group}"] = case(3, 256, bits, group, [(1, ROWS)], how="expanded")
    for k, group in TILED:
        found[f"tiled {k} {group}"] = case(8, k, 4, group, [(1, ROWS)], how="tiled")
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[torch.Tensor], dict[str, Any]]]:
    """By name: what the kernels gave, and the case."""
    folder, given = tmp_path_factory.mktemp("plugin"), cases()
    torch.save({name: {key: value for key, value in one.items() if key not in ("dense", "expected")} for name, one in given.items()}, folder / "in")
    script = Path(__file__).with_name("plugin_in_interpreter.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PLUGIN)}
    done = subprocess.run([sys.executable, script, folder / "in", folder / "out"], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(folder / "out")
    return {name: (found[name], one) for name, one in given.items()}


Ran = dict[str, tuple[list[torch.Tensor], dict[str, Any]]]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", [f"e4b {k} {group}" for k, group, _ in E4B] + [f"extreme {low} {size}" for low, _, size in EXTREMES])
def test_e4bs_shapes_and_extreme_scales_agree_with_float64(ran: Ran, name: str) -> None:
    found, one = ran[name]
    assert relative(found[0], one["expected"][:1]) < 2e-5


@pytest.mark.parametrize("name", [f"odd {bits} {k} {group}" for bits, k, group in ODD])
def test_odd_sizes_and_bytes_and_a_bias(ran: Ran, name: str) -> None:
    found, one = ran[name]
    assert relative(found[0], one["expected"][:1]) < 1e-4, "bytes sit in a float of 2**15: two digits fewer than nibbles"


def test_a_row_has_the_same_bits_in_every_batch_and_run(ran: Ran) -> None:
    found, one = ran["rows"]
    *batches, again, otherwise = found
    whole = batches[-1]
    assert relative(whole, one["expected"][:8]) < 2e-5
    for m, batch in enumerate(batches, 1):
        assert torch.equal(batch, whole[:m]), m
    assert torch.equal(again, whole[:1])
    assert torch.equal(otherwise, whole[:1]), "rows a thread and stages must not change a bit"
    (once, unrolled), one = ran["unrolled"]
    assert relative(once, one["expected"][:1]) < 2e-5
    assert torch.equal(unrolled, once)


@pytest.mark.parametrize(("bits", "group"), LARGE)
def test_large_batches_need_no_second_copy(ran: Ran, bits: int, group: int) -> None:
    found, one = ran[f"large {bits} {group}"]
    assert relative(found[0], one["expected"][:33]) < 8e-3  # the weights themselves in bfloat16, and the interpreter cuts digits off
    found, one = ran[f"weights {bits} {group}"]
    assert relative(found[0], one["dense"]) < 8e-3


@pytest.mark.parametrize(("k", "group"), TILED)
def test_the_tensor_cores_tiles_hold_the_weights(ran: Ran, k: int, group: int) -> None:
    found, one = ran[f"tiled {k} {group}"]
    assert relative(found[0], one["dense"]) < 8e-3


@pytest.mark.parametrize(("bits", "k", "group"), [(4, 2560, 128), (4, 256, 32), (4, 544, 32), (8, 256, 128), (8, 288, 32), (4, 96, -1)])
def test_what_is_laid_out_can_be_restored(bits: int, k: int, group: int) -> None:
    one, how = case(3, k, bits, group, []), layout.Layout(bits, k, group)
    words, scales = layout.arrange(one["packed"], one["scales"], how)
    assert torch.equal(layout.restore(words, scales.double(), how), one["dense"])


def test_the_words_only_move() -> None:
    packed = torch.arange(2 * 320, dtype=torch.int32).view(2, 320)
    words, _ = layout.arrange(packed, torch.ones(2, 20), layout.Layout(4, 2560, 128))
    assert torch.equal(words.flatten().sort().values, packed.flatten())
    assert words[0, 0, 1].tolist() == [1, 17, 33, 49], "a thread's four words are a quarter apart"


@pytest.mark.parametrize(("bits", "k", "group", "says"), [(3, 256, 32, "3 bits"), (4, 256, 48, "groups of 48"), (4, 100, -1, "K = 100"),
                                                          (4, 160, 64, "no multiple of the group")])
def test_what_it_can_not_take_is_said(bits: int, k: int, group: int, says: str) -> None:
    assert says in (layout.why_not(bits, k, group) or "")


@pytest.mark.parametrize("k", [32, 256, 544, 2048, 2560, 4096, 10240, 17408])
@pytest.mark.parametrize("n", [1, 256, 2048, 20480, 262144])
def test_every_shape_has_a_cut_that_keeps_the_order_of_sums(n: int, k: int) -> None:
    how = layout.Layout(4, k, -1)
    chooser = cuts.Chooser("a card of no table")
    made = [chooser.cut(how, n, m) for m in range(1, 9)]
    tensor, chunks = chooser.tensor_cut(n, k, -1), -(-k // 128)
    assert tensor.eights % 2 == 0
    assert -(-chunks // tensor.warps) % tensor.chunks == 0
    assert all(cut.fits(how) for cut in made)
    assert len({cut.blocks for cut in made}) == 1


def test_tuned_cuts_keep_the_order_of_sums() -> None:
    files = sorted((PLUGIN / "gemq_int4" / "tuned").glob("*.json"))
    assert files
    for path in files:
        document = json.loads(path.read_text())
        table, tensors = cuts.tuned(document["card"])
        assert len(table) >= len(document.get("cuts", {}))
        assert len(tensors) >= len(document.get("tensor", {}))
        assert table or tensors
        for (bits, _, k, group), by_rows in table.items():
            assert set(by_rows) == {1, 2, 4, 8}
            assert len({cut.blocks for cut in by_rows.values()}) == 1
            assert all(isinstance(cut, Cut) and cut.fits(layout.Layout(bits, k, group)) for cut in by_rows.values())
            assert all(cut.registers * 32 * cut.warps <= 65536 for cut in by_rows.values())
        for (n, k, group), cut in tensors.items():
            assert layout.can_tile(4, n, k, group)
            assert cut.eights % 2 == 0
            assert math.ceil(math.ceil(k / 128) / cut.warps) % cut.chunks == 0
            assert cut.registers * 32 * cut.warps <= 65536


@pytest.mark.parametrize(("name", "value"), [("GEMQ_INT4", "yes"), ("GEMQ_INT4_LARGE", "both"), ("GEMQ_INT4_TENSOR", "2"), ("GEMQ_INT4_TUNE", "soon"),
                                             ("GEMQ_INT4_TUNE", "-1"), ("GEMQ_INT4_TUNE", "nan"), ("GEMQ_INT4_TUNE", "9999")])
def test_a_setting_that_makes_no_sense_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        settings.read({name: value})
    assert settings.read({}) == settings.Settings(True, "stock", 0.0, True)
