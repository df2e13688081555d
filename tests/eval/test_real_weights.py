"""On real weights and the arena's own records, the float32 scores are those of a plain transformers forward."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from small import plain_model, plain_scores

from gemq.eval.ppl import evaluate_ppl


@pytest.fixture(autouse=True)
def _both_cores(_one_thread: None) -> None:
    torch.set_num_threads(2)


def test_ground_truth_records(demo_model: Path, shared_data: Path) -> None:
    data = shared_data / "ppl_ground_truth_tokens.jsonl"
    with open(data, encoding="utf-8") as file:
        records = [json.loads(line) for line in itertools.islice(file, 3)]
    model = plain_model(demo_model)
    rows = [plain_scores(model, record["context_token_ids"], record["target_token_ids"]) for record in records]
    del model
    result = evaluate_ppl(str(demo_model), data, records=3, device="cpu", dtype="float32")
    for found, row in zip(result.per_record, rows, strict=True):
        assert found.nll_nats / found.tokens == pytest.approx(-math.fsum(row) / len(row), abs=1e-6)
    assert result.ppl.value == pytest.approx(math.exp(-math.fsum(map(math.fsum, rows)) / sum(map(len, rows))), rel=1e-6)
    assert 2 < result.ppl.value < 20


def test_wikitext_windows_in_the_range_of_the_peers(demo_model: Path, shared_data: Path) -> None:
    # bf16 on the peers' common ground gives 48.633 over 8 windows; float32 differs by rounding alone
    result = evaluate_ppl(str(demo_model), shared_data / "wikitext2-test.txt", records=8, device="cpu", dtype="float32")
    assert result.tokens == 8 * 1023
    assert result.ppl.value == pytest.approx(48.633, rel=0.01)
