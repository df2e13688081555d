"""An engine plugin for vLLM: int4 and int8 weights at batch 1 to 8 near the memory's speed, in front of the stock kernels."""

from __future__ import annotations

__version__ = "0.1.0"


def register() -> None:
    """vLLM's entry point (`vllm.general_plugins`): put the kernel first; where that can't be, vLLM stays as it is and one line says why."""
    import logging

    log = logging.getLogger("vllm.gemq_int4")
    from gemq_int4 import settings

    if not settings.read().on:
        return
    try:
        from gemq_int4.linear import put_first

        put_first()
    except Exception as error:  # a vLLM or Triton of another time: the engine must still serve
        log.warning("gemq_int4: left to vLLM's own kernels: %s: %s", type(error).__name__, error)
