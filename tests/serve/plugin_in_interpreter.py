"""Run the plugin's kernels in Triton's interpreter: python plugin_in_interpreter.py CASES OUT. In a process of its own, because Triton decides
when it is imported whether it interprets, and other libraries import it too."""

from __future__ import annotations

import sys
from typing import Any

import torch
from gemq_int4.launch import Cut, expanded, matvec, product
from gemq_int4.layout import Layout, arrange


def outputs(case: dict[str, Any]) -> list[torch.Tensor]:
    """What the kernels make of each x of a case; or of its weights, where `how` says so."""
    layout = Layout(case["bits"], case["k"], case["group"])
    words, scales = arrange(case["packed"], case["scales"], layout)
    found = []
    for x, cut in case["calls"]:
        if case["how"] == "matvec":
            found.append(matvec(x, words, scales, case["bias"], layout, Cut(*cut), torch.float32))
        elif case["how"] == "product":
            found.append(product(x, words, scales, case["bias"], layout, Cut(*cut)))
        else:
            found.append(expanded(words, scales, layout))
    return found


def main() -> None:
    cases = torch.load(sys.argv[1])
    torch.save({name: outputs(case) for name, case in cases.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
