"""A rehearsal of Efficient Gemma's evaluation on the real vLLM, in one start: the small trained Gemma 4, quantized and packaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from test_vllm_packages import TINY, wikitext_records

from gemq.eval import isolation
from gemq.eval.ppl import evaluate_ppl

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]
STAGES = ["seal", "contract", "speed-single-stream", "decode", "ppl", "greedy"]


def test_every_gate_has_a_value_a_limit_and_a_margin(
    quantized: Path, gemq: Callable[..., None], vllm_python: Path, shared_data: Path, tmp_path: Path
) -> None:
    package, data, out = tmp_path / "package", tmp_path / "records.jsonl", tmp_path / "out"
    gemq("package", quantized, "--arena", "efficient-gemma", "--output", package, "--force")
    data.write_text("".join(json.dumps(record) + "\n" for record in wikitext_records(TINY, shared_data)[:4]))
    expected = evaluate_ppl(str(quantized), data, device="cpu", dtype="float32").ppl.value
    settings = {"MAX_MODEL_LEN": "1024", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-m", "gemq", "rehearse", package, "--arena", "efficient-gemma", "--scale", "0.06", "--ppl", data,
         "--reference-ppl", str(expected), "--engine", "transformers", "--python", vllm_python, "--output", out, "--json"],
        env={**os.environ, **settings}, capture_output=True, text=True, timeout=1500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    verdict = json.loads(done.stdout)
    assert verdict["valid"]
    gates = {gate["name"]: gate for gate in verdict["gates"]}
    assert list(gates) == ["contract", "requests completed", "PPL", "greedy ids identical"]
    assert all(gate["kept"] and gate["margin"] == pytest.approx(abs(gate["value"] - gate["limit"])) for gate in gates.values())
    assert gates["PPL"]["value"] == pytest.approx(expected, rel=0.01)
    assert gates["PPL"]["limit"] == pytest.approx(1.05 * expected)
    assert sorted(path.name[3:-5] for path in out.glob("0*.json")) == sorted(STAGES)
    contract = json.loads((out / "02-contract.json").read_text())
    assert len(contract["points"]) == 13
    speed = json.loads((out / "03-speed-single-stream.json").read_text())
    assert verdict["score"] == speed["loads"][0]["tps"]["mean"] > 0
    held = speed["memory"]["held"]
    assert held["kv_preallocated_bytes"] == 1024**3
    assert 0 < held["kv_used_share"] < 1
    assert held["preemptions"] == 0
    assert 300e6 < held["peak_bytes"] < 8e9
    assert json.loads((out / "06-greedy.json").read_text())["identical"]
    assert any("loopback" in point for point in verdict["not_enforced"]) == bool(isolation.problem())
