"""vLLM's own switches as data: what `gemq tune` may try, on which platform, and why the rest is left out.

A row says what vLLM calls a switch and which values are worth a start. Which of them this vLLM has is asked of it (engine.py): an argument,
value, variable, kernel or backend that it doesn't know is left out and said. Read in the sources of vLLM 0.26 (GPU) and 0.32 (GPU and CPU).

Never a row: what changes the numbers that a model computes with, other than by the order of a sum (VLLM_MARLIN_INPUT_DTYPE and
VLLM_CPU_INT4_W4A8 quantize activations, --kv-cache-dtype the cache), prefix caching, and whatever switches an encoder off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemq.serve.engine import EngineFacts

CUDA, CPU = "cuda", "cpu"


@dataclass(frozen=True)
class Switch:
    """A row: `values` are (label, words), words being vLLM's arguments or NAME=VALUE; `absent` tells why a platform has no use for it."""

    name: str
    what: str
    values: tuple[tuple[str, str], ...] = ()
    absent: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Value:
    """A switch at a value: what it adds to vLLM's arguments and environment, and the drafter's tokens a step."""

    switch: str
    label: str
    arguments: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    draft_tokens: int = 0

    @property
    def words(self) -> str:
        """What a user would type."""
        drafted = (f"--speculative-config num_speculative_tokens={self.draft_tokens}",) if self.draft_tokens else ()
        return " ".join([*(f"{name}={value}" for name, value in self.environment), *self.arguments, *drafted])


@dataclass(frozen=True)
class LeftOut:
    """What is not tried, and why."""

    switch: str
    value: str
    why: str


@dataclass(frozen=True)
class Task:
    """What the candidates depend on besides the engine: kernel list (mp, fp8, int8 or "" if unquantized), load, base profile, drafter, and
    whether the submission carries gemq's plugin."""

    kernels: str
    in_flight: int
    sequences: int
    batched_tokens: int
    drafter: bool = False
    plugin: bool = False


_GRAPHS_ONLY = "CUDA graphs are not there on a CPU"
# In the order in which they are tried: what moves most comes first, since time may end. `kernel` and `drafter` get their values below.
SWITCHES: tuple[Switch, ...] = (
    Switch("kernel", "the kernel of quantized linears", absent=((CPU, "vLLM has one kernel a format there"),)),
    Switch("attention", "the attention backend", tuple(
        (name, f"--attention-backend {name}") for name in ("FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "FLEX_ATTENTION")
    ), absent=((CPU, "vLLM has CPU_ATTN alone there"),)),
    Switch("drafter", "speculative decoding"),
    Switch("performance-mode", "finer graphs and kernels for latency, or larger ones", (
        ("interactivity", "--performance-mode interactivity"), ("throughput", "--performance-mode throughput"),
    ), absent=((CPU, f"it chooses graph sizes, and {_GRAPHS_ONLY}"),)),
    Switch("compilation", "torch.compile", (("compiled", "--no-enforce-eager"),), absent=((CUDA, "it is on already"),)),
    Switch("graphs", "what CUDA graphs hold", tuple(
        (mode, f'--compilation-config {{"cudagraph_mode":"{mode}"}}') for mode in ("FULL", "FULL_DECODE_ONLY", "PIECEWISE")
    ), absent=((CPU, _GRAPHS_ONLY),)),
    Switch("graph-sizes", "the batch sizes that graphs are captured for", absent=((CPU, _GRAPHS_ONLY),)),
    Switch("async-scheduling", "the next step is planned while this one is computed", (
        ("off", "--no-async-scheduling"), ("on", "--async-scheduling"),
    ), absent=((CPU, "vLLM switches it off there"),)),
    Switch("gemq-plugin", "the plugin that the submission carries", (("off", "GEMQ_INT4=0"), ("large batches too", "GEMQ_INT4_LARGE=own")),
           absent=((CPU, "its kernels are for NVIDIA GPUs"),)),
    Switch("plugins", "other plugins of vLLM's that are installed", (("off", "VLLM_PLUGINS="),)),
    Switch("batched-tokens", "tokens a step", tuple((str(n), f"--max-num-batched-tokens {n}") for n in (1024, 2048, 4096, 8192))),
    Switch("sequences", "sequences a step", tuple((str(n), f"--max-num-seqs {n}") for n in (1, 2, 8, 32, 64, 128, 512))),
    Switch("runner", "the model runner's generation", (("v2", "VLLM_USE_V2_MODEL_RUNNER=1"), ("v1", "VLLM_USE_V2_MODEL_RUNNER=0")),
           absent=((CPU, "the second is for GPUs"),)),
    Switch("marlin-reduce", "Marlin adds partial sums up atomically", (("atomic", "VLLM_MARLIN_USE_ATOMIC_ADD=1"),),
           absent=((CPU, "Marlin is for NVIDIA GPUs"),)),
    Switch("fp8-weight-only", "Marlin for fp8, which leaves activations unquantized", (("marlin", "VLLM_TEST_FORCE_FP8_MARLIN=1"),),
           absent=((CPU, "Marlin is for NVIDIA GPUs"),)),
    Switch("threads", "threads bound to cores", (("bound", "VLLM_CPU_OMP_THREADS_BIND=auto"),), absent=((CUDA, "for CPUs"),)),
    Switch("waiting", "waiting threads spin", (("spinning", "OMP_WAIT_POLICY=ACTIVE"),), absent=((CUDA, "for CPUs"),)),
    Switch("split-kv", "attention splits a long sequence over threads", (("off", "VLLM_CPU_ATTN_SPLIT_KV=0"),), absent=((CUDA, "for CPUs"),)),
    Switch("block-size", "tokens a block of the KV cache", tuple((str(n), f"--block-size {n}") for n in (32, 64)),
           absent=((CUDA, "the attention backend chooses it"),)),
)  # fmt: skip
NAMES = tuple(switch.name for switch in SWITCHES)
# kernels worth a start, by list; whichever vLLM picks by itself, only those behind it in its list can be reached
KERNELS = {
    "mp": ("MarlinLinearKernel", "HummingLinearKernel", "ExllamaLinearKernel", "TritonW4A16LinearKernel"),
    "fp8": ("CutlassFP8ScaledMMLinearKernel", "ChannelWiseTorchFP8ScaledMMLinearKernel", "HummingFP8ScaledMMLinearKernel"),
    "int8": ("TritonInt8ScaledMMLinearKernel", "HummingInt8ScaledMMLinearKernel"),
}
DRAFT_TOKENS = (3, 5, 7)
# what takes time from other servers while it is idle
ALONE = ("waiting",)
_FOR_LIST = {"marlin-reduce": "mp", "fp8-weight-only": "fp8"}
# what the two derived switches and a profile may use besides the rows' own words
_DERIVED_ARGUMENTS, _DERIVED_VARIABLES = {"--cudagraph-capture-sizes"}, {"VLLM_DISABLED_KERNELS"}


def _words(switch: str, label: str, words: str) -> Value:
    if words.startswith("--"):
        return Value(switch, label, tuple(words.split(" ")))
    name, _, value = words.partition("=")
    return Value(switch, label, environment=((name, value),))


def known_arguments() -> set[str]:
    """Every argument of vLLM's that a profile may carry."""
    found = {part for switch in SWITCHES for _, words in switch.values for part in words.split(" ") if part.startswith("--")}
    return found | _DERIVED_ARGUMENTS


def known_variables() -> set[str]:
    """Every environment variable that a profile may carry."""
    found = {words.partition("=")[0] for switch in SWITCHES for _, words in switch.values if not words.startswith("--")}
    return found | _DERIVED_VARIABLES


def candidates(engine: EngineFacts, task: Task, only: Sequence[str] = ()) -> tuple[list[list[Value]], list[LeftOut]]:
    """The values to try, a list a switch in their order, and what is left out with the reason. `only` names switches; empty means all."""
    offered: list[list[Value]] = []
    left_out: list[LeftOut] = []
    for switch in SWITCHES:
        if only and switch.name not in only:
            continue
        why = dict(switch.absent).get(engine.platform) or _why_not(switch, engine, task)
        if why:
            left_out.append(LeftOut(switch.name, "", why))
            continue
        good = []
        for value in _values(switch, engine, task):
            why = _unknown(value, engine) or _no_change(value, task)
            if why:
                left_out.append(LeftOut(switch.name, value.label, why))
            else:
                good.append(value)
        if good:
            offered.append(good)
    return offered, left_out


def _why_not(switch: Switch, engine: EngineFacts, task: Task) -> str:
    if engine.platform not in (CUDA, CPU):
        return f"gemq knows no switches for {engine.platform}"
    if switch.name == "drafter" and not task.drafter:
        return "no --drafter is given"
    if switch.name == "drafter" and "--speculative-config" not in engine.arguments:
        return f"vLLM {engine.version} has no --speculative-config"
    if switch.name == "kernel" and not task.kernels:
        return "the checkpoint's linears are not quantized"
    if switch.name == "gemq-plugin" and not task.plugin:
        return "the submission carries none"
    if switch.name == "plugins" and not engine.plugins:
        return "none is installed"
    wanted = _FOR_LIST.get(switch.name)
    if wanted and task.kernels != wanted:
        return {"mp": "the checkpoint's weights are not int with 16-bit activations", "fp8": "the checkpoint is not fp8"}[wanted]
    return ""


def _values(switch: Switch, engine: EngineFacts, task: Task) -> list[Value]:
    if switch.name == "kernel":
        listed = engine.kernels.get(task.kernels, [])
        wanted = [name for name in KERNELS[task.kernels] if name in listed]
        # a plugin's kernel is asked before vLLM's list
        off = (("GEMQ_INT4", "0"),) if task.plugin else ()
        return [Value("kernel", name, environment=(("VLLM_DISABLED_KERNELS", ",".join(listed[: listed.index(name)])), *off)) for name in wanted
                if listed.index(name)]  # fmt: skip
    if switch.name == "drafter":
        return [Value("drafter", f"{tokens} tokens", draft_tokens=tokens) for tokens in DRAFT_TOKENS]
    if switch.name == "graph-sizes":
        sizes = [str(2**power) for power in range(task.in_flight.bit_length()) if 2**power < task.in_flight] + [str(task.in_flight)]
        return [Value("graph-sizes", f"up to {task.in_flight}", ("--cudagraph-capture-sizes", *sizes))]
    return [_words(switch.name, label, words) for label, words in switch.values]


def _unknown(value: Value, engine: EngineFacts) -> str:
    """Why this vLLM doesn't take `value`; empty if it does."""
    version = f"vLLM {engine.version}"
    for position, part in enumerate(value.arguments):
        if not part.startswith("--"):
            continue
        if part not in engine.arguments:
            return f"{version} has no {part}"
        valid = engine.arguments[part]
        given = value.arguments[position + 1] if position + 1 < len(value.arguments) else ""
        if valid and given not in valid:
            return f"{version} takes {', '.join(valid)}"
    for name, _ in value.environment:
        if name.startswith("VLLM_") and name not in engine.variables:
            return f"{version} doesn't read {name}"
    if value.switch == "attention":
        return engine.attention.get(value.label, f"{version} has no such backend")
    return ""


def _no_change(value: Value, task: Task) -> str:
    if value.switch == "sequences" and not task.in_flight <= int(value.label) <= 2 * task.sequences:
        return f"{task.in_flight} are in flight" if int(value.label) < task.in_flight else "more than twice the profile's"
    given = {"sequences": task.sequences, "batched-tokens": task.batched_tokens}.get(value.switch)
    return "the profile's own" if given is not None and str(given) == value.label else ""


def behind(offered: Sequence[Value], engine: EngineFacts, task: Task, chosen: Sequence[str]) -> tuple[list[Value], list[LeftOut]]:
    """The kernels of `offered` that can be reached where vLLM picked `chosen` by itself: those in front of it refused this model already."""
    listed = engine.kernels.get(task.kernels, [])
    first = next((listed.index(name) for name in listed if name in chosen), -1)
    good = [value for value in offered if value.switch != "kernel" or listed.index(value.label) > first]
    return good, [LeftOut(value.switch, value.label, f"vLLM takes {listed[first]} by itself") for value in offered if value not in good]
