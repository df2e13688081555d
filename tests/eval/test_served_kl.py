"""KL through prompt_logprobs by hand, and that it stays below the KL over the whole vocabulary and near it."""

from __future__ import annotations

import math

import pytest
import torch
from benchmarks.stub_server import Engine, StubServer

from gemq.errors import UsageError
from gemq.eval.endpoint import Endpoint
from gemq.eval.records import Record
from gemq.eval.served_kl import position_kl, served_kl, top_distributions


def logs(**shares: float) -> dict[int, float]:
    return {int(token[1:]): math.log(share) for token, share in shares.items()}


def test_one_position_by_hand() -> None:
    # common: 1 and 2; the rest 0.2 and 0.3: 0.5 ln(0.5/0.4) + 0.3 ln(0.3/0.3) + 0.2 ln(0.2/0.3)
    found = position_kl(logs(_1=0.5, _2=0.3, _3=0.1), logs(_1=0.4, _2=0.3, _4=0.2))
    assert found == pytest.approx(0.5 * math.log(1.25) + 0.2 * math.log(2 / 3))
    assert position_kl(logs(_1=0.6, _2=0.4), logs(_1=0.6, _2=0.4)) == pytest.approx(0.0, abs=1e-9)


def test_it_is_a_lower_bound_and_near() -> None:
    generator = torch.Generator().manual_seed(2)
    found = whole = 0.0
    for _ in range(50):  # as peaked as a language model's: the likeliest token has about 0.6
        p = (8 * torch.randn(400, generator=generator, dtype=torch.float64)).log_softmax(0)
        q = (p + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)).log_softmax(0)
        exact = float((p.exp() * (p - q)).sum())
        tops = [{int(i): float(side[i]) for i in side.topk(20).indices} for side in (p, q)]
        assert position_kl(tops[0], tops[1]) < exact + 1e-9
        found, whole = found + position_kl(tops[0], tops[1]), whole + exact
    assert found > 0.9 * whole


def test_two_endpoints() -> None:
    class Surer(Engine):
        def prompt_logprobs(self, ids: list[int]) -> list[dict[str, object] | None]:
            entries = super().prompt_logprobs(ids)
            return [entry and {key: {"logprob": value["logprob"] - 0.05} for key, value in entry.items()} for entry in entries]

    records = [Record(str(n), (2, 9 + n, 11, 12), 1, f"record {n}") for n in range(3)]
    with StubServer(Engine()) as one, StubServer(Surer()) as two:
        sides = [top_distributions(Endpoint.open(server.url), records, "records") for server in (one, two, one)]
    assert [len(record) for record in sides[0]] == [3, 3, 3]
    assert served_kl(sides[0], sides[2]).value == pytest.approx(0.0, abs=1e-12)
    assert served_kl(sides[0], sides[1]).value > 0.001
    with pytest.raises(UsageError):
        served_kl(sides[0], sides[1][:2])
