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


@pytest.mark.slow
def test_ground_truth_records(demo_model: Path, shared_data: Path) -> None:
    data, length = shared_data / "ppl_ground_truth_tokens.jsonl", 300
    with open(data, encoding="utf-8") as file:
        records = [json.loads(line) for line in itertools.islice(file, 3)]
    cut = [(r["id"], r["context_token_ids"], r["target_token_ids"][: length - len(r["context_token_ids"])])
           for r in records if len(r["context_token_ids"]) < length]  # fmt: skip
    assert cut
    model = plain_model(demo_model)
    rows = [plain_scores(model, context, target) for _, context, target in cut]
    del model
    result = evaluate_ppl(str(demo_model), data, records=3, length=length, device="cpu", dtype="float32")
    for found, (name, _, _), row in zip(result.per_record, cut, rows, strict=True):
        assert (found.id, found.tokens) == (name, len(row))
        assert found.nll_nats / found.tokens == pytest.approx(-math.fsum(row) / len(row), abs=1e-6)
    assert result.ppl.value == pytest.approx(math.exp(-math.fsum(map(math.fsum, rows)) / sum(map(len, rows))), rel=1e-6)
    assert 2 < result.ppl.value < 30
