"""The small model behind the stub server: true greedy decoding and true log-probabilities."""

from __future__ import annotations

from typing import Any

import torch
from benchmarks.stub_server import Engine
from small import VOCABULARY


class ModelEngine(Engine):
    """The small model behind the stub server: true greedy decoding and true log-probabilities."""

    name = "small-gemma"
    max_model_len = 256
    vocabulary = VOCABULARY

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """[len(ids), vocabulary] of what follows each id."""
        return self.model(input_ids=torch.tensor([ids])).logits[0]

    def next_id(self, ids: list[int]) -> int:
        return int(self.logits(ids)[-1].argmax())

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        table = self.logits(ids[:-1]).double().log_softmax(-1)
        entries: list[dict[str, Any] | None] = [None]
        for row, own in zip(table, ids[1:], strict=True):
            entries.append({str(i): {"logprob": row[i].item(), "rank": 1} for i in {own, int(row.argmax())}})
        return entries
