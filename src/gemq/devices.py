"""Where to compute."""

from __future__ import annotations

from gemq.errors import UsageError


def choose(name: str) -> str:
    """The torch device that `name` (auto, cpu, cuda, cuda:N) means here; raises UsageError for one that isn't there."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device is {name!r}", "give auto, cpu, cuda or cuda:N") from None
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise UsageError(f"--device is {name!r}", "give auto, cpu, cuda or cuda:N")
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(
            f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices", "use --device cpu, or install a CUDA build of torch"
        )
    return name
