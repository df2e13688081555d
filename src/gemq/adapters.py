"""Loading a model without the adapter that its folder may hold too: with peft installed, transformers would add it to the weights unasked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_adapters() -> Iterator[None]:
    """Let transformers' `from_pretrained` load what the weights' own files hold, whether or not peft is installed."""
    from transformers.integrations import peft
    from transformers.models.auto import auto_factory

    modules = (peft, auto_factory)
    before = [module.is_peft_available for module in modules]
    for module in modules:
        module.is_peft_available = lambda: False
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.is_peft_available = own
