"""Run the plugin's kernels in Triton's interpreter: python plugin_in_interpreter.py CASES OUT. In a process of its own, because Triton decides
when it is imported whether it interprets, and other libraries import it too."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from gemq_int4.launch import Cut, expanded, matvec, product, tensor_expanded
from gemq_int4.layout import Layout, arrange, tile


def outputs(case: dict[str, Any]) -> list[torch.Tensor]:
    """What the kernels make of each x of a case; or of its weights, where `how` says so."""
    layout = Layout(case["bits"], case["k"], case["group"])
    words, scales = arrange(case["packed"], case["scales"], layout)
    found = []
    for x, cut in case["calls"]:
        if case["how"] == "matvec":
            found.append(matvec(x, words, scales, case["bias"], layout, Cut(*cut), torch.float32))
        elif case["how"] == "product":
            few = functools.partial(matvec, words=words, scales=scales, bias=case["bias"], layout=layout, cut=Cut(*cut))
            whole = expanded(words, scales, layout)
            found.append(product(x, case["bias"], words.shape[0], few, whole.__getitem__))
        elif case["how"] == "tiled":
            own = case["scales"].reshape(-1) if layout.group == -1 else case["scales"]
            found.append(tensor_expanded(tile(case["packed"]), own, layout.k, layout.group))
        else:
            found.append(expanded(words, scales, layout))
    return found


def main() -> None:
    cases = torch.load(sys.argv[1])
    torch.save({name: outputs(case) for name, case in cases.items()}, sys.argv[2])


if __name__ == "__main__":
    main()
