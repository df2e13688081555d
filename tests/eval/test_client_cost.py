"""The measuring client costs under 2% of what it measures, against a server that answers at 2,000 tokens a second."""

from __future__ import annotations

import pytest
from benchmarks.client import LIMIT, LOADS, TOKENS_PER_SECOND, client_cost, stub_process


@pytest.mark.parametrize("name", LOADS)
def test_the_client_costs_little(name: str) -> None:
    # the best of a few: whatever else runs on this machine only adds
    costs = []
    with stub_process(TOKENS_PER_SECOND) as url:
        while len(costs) < 5 and not (costs and min(costs) < LIMIT):
            costs.append(client_cost(url, LOADS[name].model_copy(update={"requests": 6})))
    assert -LIMIT < min(costs) < LIMIT, costs
