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


def choose_several(names: str) -> tuple[str, ...]:
    """The devices that `names` (0,1 or cuda:0,cuda:1 or cpu,cpu) means, one process each; raises UsageError for what can't share a walk."""
    given = [name.strip() for name in names.split(",")]
    advice = "give indices of GPUs, such as 0,1, or cpu,cpu"
    if not all(given):
        raise UsageError(f"--devices is {names!r}", advice)
    if any(name in ("auto", "cuda") for name in given):
        raise UsageError(f"--devices {names} leaves open which devices it means", advice)
    known = [f"cuda:{int(name)}" if name.isascii() and name.isdigit() else name for name in given]
    try:
        chosen = tuple(choose(name) for name in known)
    except UsageError as error:
        raise UsageError(error.message.replace("--device ", f"--devices {names}: ", 1), advice) from None
    if len(chosen) < 2:
        raise UsageError(f"--devices {names} names one device", f"give --device {chosen[0]}, or several")
    twice = next((name for name in chosen if name != "cpu" and chosen.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--devices {names} names {twice} twice", "name each GPU once")
    if len({name.partition(":")[0] for name in chosen}) > 1:
        raise UsageError(f"--devices {names} mixes GPUs and the CPU", "name devices of one kind")
    return chosen
