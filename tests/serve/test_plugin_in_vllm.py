"""What vLLM's side of the plugin promises, told by a stand-in for the names of vLLM that it uses; in Triton's interpreter, one process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gemq.serve.wheel import PLUGINS


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    """What `plugin_in_stub_vllm.py` saw."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(PLUGINS["gemq-int4"])}
    script = Path(__file__).with_name("plugin_in_stub_vllm.py")
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_is_asked_first_and_stands_in_the_list_once(told: dict[str, Any]) -> None:
    assert told["first"] == "GemqInt4LinearKernel"
    assert told["times"] == 1


def test_other_cards_and_weights_are_left_to_the_stock_kernel(told: dict[str, Any]) -> None:
    assert {told[f"capability {number}"] for number in (80, 86, 90, 100)} == {"GemqInt4LinearKernel"}
    assert {told[f"capability {number}"] for number in (0, 75, 120)} == {"Stock"}
    assert {told[name] for name in ("zero points", "half", "order", "groups of 48", "three bits")} == {"Stock"}


@pytest.mark.parametrize(("large", "batches"), [("stock", {"0", "1", "9", "33"}), ("own", {"0", "3", "9", "33"})])
def test_every_batch_size_is_right_with_a_bias_that_the_stock_kernel_has_moved(told: dict[str, Any], large: str, batches: set[str]) -> None:
    errors = told[f"{large} errors"]
    assert set(errors) == batches
    assert max(errors.values()) < 8e-3  # bfloat16, and the interpreter cuts digits off instead of rounding


def test_without_the_stock_kernel_there_is_no_second_copy(told: dict[str, Any]) -> None:
    assert told["stock kernel"] == "Stock"
    assert told["own kernel"] == "NoneType"
    assert told["own packed"] == 0


def test_the_operator_is_one_node_of_a_compiled_graph_for_every_batch_size(told: dict[str, Any]) -> None:
    assert told["compiled"] == [[2, 16], [9, 16], [2, 1, 16]]


def test_where_the_tensor_cores_kernel_can_not_run_the_plain_one_does(told: dict[str, Any]) -> None:
    assert "not supported" in told["tensor cores"]
