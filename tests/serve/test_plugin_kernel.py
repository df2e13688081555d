"""The plugin's kernels in Triton's interpreter against float64: shapes of E4B cut in N, odd sizes, scales from tiny to huge, one to eight rows.

The interpreter does what a card does, operation by operation, but slowly: N is a program or two. What it can't show (registers, speed, the
order of a reduction on a card) `benchmarks/plugin.py kernels` checks on one.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gemq.quantize.packing import to_tensors
from gemq.recipes.model import Scheme
from gemq.serve import serve as serve_script

PLUGIN = Path(serve_script.__file__).resolve().parent / "plugin"


@pytest.fixture(scope="module")
def kernels() -> Iterator[SimpleNamespace]:
    """The plugin's modules, imported so that Triton interprets; nothing of it stays in this process."""
    before, path = os.environ.get("TRITON_INTERPRET"), list(sys.path)
    os.environ["TRITON_INTERPRET"] = "1"
    sys.path.insert(0, str(PLUGIN))
    try:
        found = {name: importlib.import_module(f"gemq_int4.{name}") for name in ("layout", "launch", "cuts", "settings")}
        yield SimpleNamespace(**found)
    finally:
        sys.path[:] = path
        for name in [name for name in sys.modules if name.startswith("gemq_int4")]:
            del sys.modules[name]
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def matrix(kernels: SimpleNamespace, n: int, k: int, bits: int, group: int, low: float = 1e-3, high: float = 1e-2) -> tuple[Any, ...]:
    """(layout, words, scales, the weights in float64): a checkpoint's own tensors, as gemq packs them, laid out for the kernel."""
    strategy = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    scheme = Scheme.model_validate({"weights": {"num_bits": bits, **strategy}})
    stored = torch.randint(-(1 << (bits - 1)), 1 << (bits - 1), (n, k), dtype=torch.int8)
    scales = (torch.rand(n, 1 if group == -1 else k // group) * (high - low) + low).bfloat16()
    tensors = to_tensors(stored, scales, scheme, (n, k))
    layout = kernels.layout.Layout(bits, k, group)
    words, arranged = kernels.layout.arrange(tensors["weight_packed"], tensors["weight_scale"], layout)
    return layout, words, arranged, stored.double() * scales.double().repeat_interleave(k if group == -1 else group, 1)


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


# every K of E4B's linears, with the groups that recipes make; blocks of K side by side, fewer than there are where the loop goes around
@pytest.mark.parametrize(("k", "group", "blocks"), [(2560, 128, 4), (2560, 32, 8), (2560, 64, 8), (2560, -1, 8), (2048, 128, 2), (4096, 128, 8),
                                                    (10240, 128, 8), (256, 128, 1), (256, 32, 1)])  # fmt: skip
def test_e4bs_shapes_agree_with_float64(kernels: SimpleNamespace, k: int, group: int, blocks: int) -> None:
    torch.manual_seed(k + group)
    layout, words, scales, dense = matrix(kernels, 4, k, 4, group)
    x = torch.randn(1, k).bfloat16()
    cut = kernels.launch.Cut(2, blocks, max(1, blocks * layout.lanes // 32), 1)
    found = kernels.launch.matvec(x, words, scales, None, layout, cut, torch.float32)
    assert relative(found, x.double() @ dense.T) < 2e-5


@pytest.mark.parametrize(("bits", "k", "group"), [(4, 544, 32), (4, 96, 32), (8, 256, 128), (8, 512, 32), (8, 288, 32), (8, 96, -1), (4, 32, -1)])
def test_odd_sizes_and_bytes(kernels: SimpleNamespace, bits: int, k: int, group: int) -> None:
    torch.manual_seed(bits + k)
    layout, words, scales, dense = matrix(kernels, 5, k, bits, group)
    x, bias = torch.randn(1, k).bfloat16(), torch.randn(5).bfloat16()
    found = kernels.launch.matvec(x, words, scales, bias, layout, kernels.launch.Cut(1, 2, 1, 1), torch.float32)
    assert relative(found, x.double() @ dense.T + bias.double()) < 1e-4, "bytes sit in a float of 2**15: two digits fewer than nibbles"


@pytest.mark.parametrize(("low", "high", "size"), [(1e-30, 1e-28, 1.0), (1e20, 1e22, 1.0), (1e-3, 1e-2, 1e30), (1e-8, 1e8, 1.0)])
def test_extreme_scales_and_activations(kernels: SimpleNamespace, low: float, high: float, size: float) -> None:
    torch.manual_seed(1)
    layout, words, scales, dense = matrix(kernels, 4, 256, 4, 32, low, high)
    x = (torch.randn(1, 256) * size).bfloat16()
    found = kernels.launch.matvec(x, words, scales, None, layout, kernels.launch.Cut(1, 1, 1, 1), torch.float32)
    assert relative(found, x.double() @ dense.T) < 2e-5


def test_a_row_has_the_same_bits_in_every_batch_and_run(kernels: SimpleNamespace) -> None:
    torch.manual_seed(2)
    layout, words, scales, dense = matrix(kernels, 8, 256, 4, 128)
    x = torch.randn(8, 256).bfloat16()
    cut = kernels.launch.Cut(1, 1, 1, 1)

    def times(rows: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = kernels.launch.matvec(rows, words, scales, None, layout, cut, torch.float32)
        return made

    alone = torch.cat([times(x[row : row + 1]) for row in range(3)])
    assert relative(alone, x[:3].double() @ dense.T) < 2e-5
    whole = times(x)
    assert torch.equal(whole[:3], alone)
    assert torch.equal(times(x[3:]), whole[3:]), "five rows"
    assert torch.equal(times(x[1:3]), whole[1:3])
    assert torch.equal(times(x[:3]), alone)
    assert torch.equal(times(x[:1]), alone[:1]), "a second run"
    wider = kernels.launch.matvec(x[:1], words, scales, None, layout, kernels.launch.Cut(2, 1, 1, 2), torch.float32)
    assert torch.equal(wider, whole[:1]), "rows a thread and stages must not change a bit"


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, -1), (8, 32)])
def test_large_batches_need_no_second_copy(kernels: SimpleNamespace, bits: int, group: int) -> None:
    torch.manual_seed(3)
    layout, words, scales, dense = matrix(kernels, 6, 256, bits, group)
    assert torch.equal(kernels.layout.restore(words, scales.double(), layout), dense)
    x = torch.randn(33, 256).bfloat16()
    found = kernels.launch.product(x, words, scales, None, layout, kernels.launch.Cut(1, 1, 1, 1))
    assert relative(found, x.double() @ dense.T) < 8e-3  # the weights themselves in bfloat16, and the interpreter cuts them off


def test_the_words_only_move(kernels: SimpleNamespace) -> None:
    packed = torch.arange(2 * 320, dtype=torch.int32).view(2, 320)
    layout = kernels.layout.Layout(4, 2560, 128)
    words, _ = kernels.layout.arrange(packed, torch.ones(2, 20), layout)
    assert torch.equal(words.flatten().sort().values, packed.flatten())
    assert words[0, 0, 1].tolist() == [1, 17, 33, 49], "a thread's four words are a quarter apart"


@pytest.mark.parametrize(("bits", "k", "group", "says"), [(3, 256, 32, "3 bits"), (4, 256, 48, "groups of 48"), (4, 100, -1, "K = 100"),
                                                          (4, 160, 64, "no multiple of the group")])
def test_what_it_can_not_take_is_said(kernels: SimpleNamespace, bits: int, k: int, group: int, says: str) -> None:
    assert says in kernels.layout.why_not(bits, k, group)


@pytest.mark.parametrize("k", [32, 256, 544, 2048, 2560, 4096, 10240, 17408])
@pytest.mark.parametrize("n", [1, 256, 2048, 20480, 262144])
def test_every_shape_has_a_cut_that_keeps_the_order_of_sums(kernels: SimpleNamespace, n: int, k: int) -> None:
    layout = kernels.layout.Layout(4, k, -1)
    chooser = kernels.cuts.Chooser("a card of no table")
    made = [chooser.cut(layout, n, m) for m in range(1, 9)]
    assert all(cut.fits(layout) for cut in made)
    assert len({cut.blocks for cut in made}) == 1


def test_tuned_cuts_keep_the_order_of_sums(kernels: SimpleNamespace) -> None:
    files = sorted((PLUGIN / "gemq_int4" / "tuned").glob("*.json"))
    assert files
    for path in files:
        card = json.loads(path.read_text())["card"]
        for (bits, _, k, group), cuts in kernels.cuts.tuned(card).items():
            assert set(cuts) == {1, 2, 4, 8}
            assert len({cut.blocks for cut in cuts.values()}) == 1
            assert all(cut.fits(kernels.layout.Layout(bits, k, group)) for cut in cuts.values())


@pytest.mark.parametrize(("name", "value"), [("GEMQ_INT4", "yes"), ("GEMQ_INT4_LARGE", "both"), ("GEMQ_INT4_TUNE", "soon"),
                                             ("GEMQ_INT4_TUNE", "-1"), ("GEMQ_INT4_TUNE", "nan"), ("GEMQ_INT4_TUNE", "9999")])
def test_a_setting_that_makes_no_sense_is_named(kernels: SimpleNamespace, name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        kernels.settings.read({name: value})
    assert kernels.settings.read({}) == kernels.settings.Settings(True, "stock", 0.0)
