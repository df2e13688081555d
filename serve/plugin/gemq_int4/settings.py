"""What the environment says: GEMQ_INT4 (0: leave vLLM as it is), GEMQ_INT4_LARGE (stock or own), GEMQ_INT4_TUNE (seconds) and
GEMQ_INT4_TENSOR (0: without the tensor cores' kernel)."""

from __future__ import annotations

import os
from dataclasses import dataclass

LARGE = ("stock", "own")


@dataclass(frozen=True)
class Settings:
    """`on`; `large`: who multiplies batches above 8 rows (stock keeps a second copy of the weights, own doesn't); `tune`: seconds at the start;
    `tensor`: int4 by the tensor cores' kernel where the card's check holds.
    """

    on: bool = True
    large: str = "stock"
    tune: float = 0.0
    tensor: bool = True


def read(environment: dict[str, str] | None = None) -> Settings:
    """The settings; raises ValueError naming the variable, its value and what is valid."""
    env = os.environ if environment is None else environment
    switches = {}
    for name, usual in (("GEMQ_INT4", "1"), ("GEMQ_INT4_TENSOR", "1")):
        switches[name] = env.get(name, "").strip() or usual
        if switches[name] not in ("0", "1"):
            raise ValueError(f"{name} is {switches[name]!r}; 0 or 1 is valid")
    large = env.get("GEMQ_INT4_LARGE", "").strip() or "stock"
    if large not in LARGE:
        raise ValueError(f"GEMQ_INT4_LARGE is {large!r}; valid are {' and '.join(LARGE)}")
    said = env.get("GEMQ_INT4_TUNE", "").strip() or "0"
    try:
        tune = float(said)
    except ValueError:
        tune = -1.0
    if not 0 <= tune <= 600:
        raise ValueError(f"GEMQ_INT4_TUNE is {said!r}; seconds from 0 to 600 are valid")
    return Settings(switches["GEMQ_INT4"] == "1", large, tune, switches["GEMQ_INT4_TENSOR"] == "1")
