"""What is worth a start follows from what vLLM says of itself, the checkpoint and the load; what is left out has a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gemq.serve.engine import EngineFacts
from gemq.serve.switches import NAMES, SWITCHES, LeftOut, Task, Value, behind, candidates, known_arguments, known_variables
from gemq.serve.tune_job import head_sizes, kernel_list

MP = ["CutlassW4A8LinearKernel", "MacheteLinearKernel", "AllSparkLinearKernel", "MarlinLinearKernel", "ConchLinearKernel", "TritonW4A16LinearKernel"]
GPU = EngineFacts(
    "0.26.0", "cuda", "NVIDIA H200", "2.11.0", {**{name: [] for name in known_arguments()}, "--speculative-config": []},
    sorted(known_variables()), {"mp": MP, "fp8": ["FlashInferFP8ScaledMMLinearKernel", "CutlassFP8ScaledMMLinearKernel"], "int8": []},
    {"TRITON_ATTN": "", "FLASHINFER": "it has no heads of 512"}, [],
)  # fmt: skip
SINGLE = Task("mp", 1, 4, 512)


def offered(engine: EngineFacts = GPU, task: Task = SINGLE, *only: str) -> dict[tuple[str, str], Value]:
    return {(value.switch, value.label): value for values in candidates(engine, task, only)[0] for value in values}


def why(engine: EngineFacts = GPU, task: Task = SINGLE) -> dict[tuple[str, str], str]:
    return {(each.switch, each.value): each.why for each in candidates(engine, task)[1]}


def test_a_kernel_is_reached_by_disabling_what_stands_in_front_of_it() -> None:
    marlin = offered()["kernel", "MarlinLinearKernel"]
    assert marlin.environment == (("VLLM_DISABLED_KERNELS", "CutlassW4A8LinearKernel,MacheteLinearKernel,AllSparkLinearKernel"),)
    assert ("kernel", "ConchLinearKernel") not in offered()
    good, refused = behind([marlin, offered()["kernel", "TritonW4A16LinearKernel"]], GPU, SINGLE, ["MarlinLinearKernel", "TRITON_ATTN"])
    assert [value.label for value in good] == ["TritonW4A16LinearKernel"]
    assert refused == [LeftOut("kernel", "MarlinLinearKernel", "vLLM takes MarlinLinearKernel by itself")]


def test_a_plugin_that_is_carried_is_switched_off_for_vllms_own_kernels() -> None:
    carried = offered(GPU, replace(SINGLE, plugin=True))
    assert ("GEMQ_INT4", "0") in carried["kernel", "MarlinLinearKernel"].environment
    assert carried["gemq-plugin", "off"].words == "GEMQ_INT4=0"
    assert why()["gemq-plugin", ""] == "the submission carries none"


def test_what_a_checkpoint_or_a_platform_has_no_use_for_is_left_out() -> None:
    assert why(GPU, replace(SINGLE, kernels=""))["kernel", ""] == "the checkpoint's linears are not quantized"
    assert why()["fp8-weight-only", ""] == "the checkpoint is not fp8"
    assert ("fp8-weight-only", "marlin") in offered(GPU, replace(SINGLE, kernels="fp8"))
    assert why()["attention", "FLASHINFER"] == "it has no heads of 512"
    assert why()["attention", "FLASH_ATTN"] == "vLLM 0.26.0 has no such backend"
    cpu = replace(GPU, platform="cpu", kernels={})
    assert not {"kernel", "attention", "graphs", "async-scheduling", "runner"} & {switch for switch, _ in offered(cpu)}
    assert {"compilation", "threads"} <= {switch for switch, _ in offered(cpu)}
    assert not offered(replace(GPU, platform="tpu"))
    assert {switch for switch, _ in why(cpu)} | {switch for switch, _ in offered(cpu)} == set(NAMES), "nothing goes unsaid"


def test_what_this_vllm_does_not_know_is_never_started() -> None:
    older = replace(GPU, arguments={**GPU.arguments, "--performance-mode": ["balanced"]}, variables=[])
    del older.arguments["--async-scheduling"]
    told = why(older)
    assert told["performance-mode", "interactivity"] == "vLLM 0.26.0 takes balanced"
    assert told["async-scheduling", "on"] == "vLLM 0.26.0 has no --async-scheduling"
    assert told["runner", "v2"] == "vLLM 0.26.0 doesn't read VLLM_USE_V2_MODEL_RUNNER"
    assert ("async-scheduling", "off") in offered(older)


def test_a_load_decides_on_batch_sizes() -> None:
    assert offered(GPU, SINGLE, "graph-sizes")["graph-sizes", "up to 1"].arguments == ("--cudagraph-capture-sizes", "1")
    busy = Task("mp", 48, 256, 2048)
    assert offered(GPU, busy)["graph-sizes", "up to 48"].arguments == ("--cudagraph-capture-sizes", "1", "2", "4", "8", "16", "32", "48")
    assert {label for switch, label in offered(GPU, busy) if switch == "sequences"} == {"64", "128", "512"}
    assert {label for switch, label in offered() if switch == "sequences"} == {"1", "2", "8"}
    assert why(GPU, busy)["batched-tokens", "2048"] == "the profile's own"


def test_speculation_needs_a_drafter_and_a_vllm_that_drafts() -> None:
    assert [label for switch, label in offered(GPU, replace(SINGLE, drafter=True)) if switch == "drafter"] == ["3 tokens", "5 tokens", "7 tokens"]
    assert why()["drafter", ""] == "no --drafter is given"
    assert "no --speculative-config" in why(replace(GPU, arguments={}), replace(SINGLE, drafter=True))["drafter", ""]


def test_no_switch_degrades_a_model_or_remembers_a_prompt() -> None:
    words = " ".join(words for switch in SWITCHES for _, words in switch.values) + " ".join(known_arguments() | known_variables())
    for never in ("prefix-caching", "kv-cache-dtype", "INPUT_DTYPE", "INT4_W4A8", "mm-", "language-model-only", "sliding-window", "hf-overrides"):
        assert never not in words


@pytest.mark.parametrize(("groups", "kind"), [
    ([{"weights": {"type": "int", "num_bits": 4}}], "mp"), ([{"weights": {"type": "float"}, "input_activations": {"type": "float"}}], "fp8"),
    ([{"weights": {"type": "int"}, "input_activations": {"type": "int"}}], "int8"),
    ([{"weights": {"type": "float"}, "input_activations": {}}, {"weights": {"type": "int"}}], "mp"),
])  # fmt: skip
def test_a_checkpoints_config_tells_its_kernel_list(groups: list[dict[str, object]], kind: str) -> None:
    assert kernel_list({"quantization_config": {"config_groups": dict(enumerate(groups))}}) == kind
    assert kernel_list({}) == ""
    assert kernel_list({"quantization_config": {"quant_method": "gptq"}}) == "mp"
    assert head_sizes({"text_config": {"head_dim": 256, "global_head_dim": 512}}) == [256, 512]
    assert head_sizes({"hidden_size": 640, "num_attention_heads": 4}) == [160]
