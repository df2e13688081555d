"""What a failed start of vLLM's says in its log, and what usually mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_NEW_ENVIRONMENT = "run make serve-env"

# (what the log says, what usually mends it); the first row that fits counts
SYMPTOMS: tuple[tuple[str, str], ...] = (
    (r"can't be had: Address already in use|[Aa]ddress already in use",
     "the port is taken: choose another --port, or stop what listens there"),
    (r"is not what was sealed|which its seal|bytes, sealed were",
     "the checkpoint is not what was sealed: fetch or copy it again"),
    (r"No available memory for the cache blocks|KV cache is needed|larger than the .*KV cache",
     "the KV cache is too small for one sequence: set MAX_MODEL_LEN lower, or on a CPU VLLM_CPU_KVCACHE_SPACE (GiB) higher"),
    (r"CUDA out of memory|OutOfMemoryError|Free memory on device|bad_alloc|Cannot allocate memory|DefaultCPUAllocator",
     "the model doesn't fit: free memory that others hold, serve with --profile memory, or use a checkpoint of fewer bits"),
    (r"not supported for now|no vLLM implementation|does not recognize this architecture|Cannot find model module",
     "this vLLM doesn't know the architecture: use the version that make serve-env installs"),
    (r"torchvision::nms|No module named 'torchvision'|requires the Torchvision library",
     f"torchvision doesn't work in vLLM's environment: {_NEW_ENVIRONMENT}"),
    (r"No module named '(?:soundfile|av|soxr|librosa)'|install vllm\[audio\]",
     f"the audio decoders are missing in vLLM's environment: {_NEW_ENVIRONMENT}"),
    (r"No module named '?vllm|vLLM is not installed",
     f"vLLM is not installed there: {_NEW_ENVIRONMENT}, or give --python of an environment that has it"),
    (r"has no attribute 'cpu_gemm_wna16'|Expected a\.stride|expected scalar type",
     f"this build of vLLM for CPUs is not mended: {_NEW_ENVIRONMENT}"),
    (r"No package metadata was found for vllm",
     f"this build of vLLM lacks its own name: {_NEW_ENVIRONMENT}"),
    (r"max_model_len .* is greater than",
     "MAX_MODEL_LEN is more than the model was made for: set it lower"),
    (r"max_tokens_per_mm_item .* is larger than max_num_batched_tokens",
     "one image or recording needs more tokens than a batch has: set GEMQ_EXTRA_ARGS='--max-num-batched-tokens 4096'"),
    (r"SafetensorError|HeaderTooLarge|InvalidHeader|MetadataIncompleteBuffer|Expecting value: line 1",
     "a file of the checkpoint is broken: run gemq verify on it, or fetch it again"),
    (r"Can't load|does not appear to have a file named|[Cc]ouldn't connect to|offline mode is enabled|not a valid model identifier",
     "a file is missing, and the Hub can't be reached: point to a complete checkpoint directory"),
    (r"unrecognized arguments|invalid choice",
     "vLLM doesn't know an argument: look at GEMQ_EXTRA_ARGS"),
    (r"[Qq]uantization|compressed.tensors|scheme|Failed to find a kernel",
     "this vLLM can't load the quantization: run gemq doctor to see which recipes can be served here"),
)

_RAISED = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b: ?\S")
_TOLD = re.compile(r"(?:serve\.py|launch\.sh|api_server\.py: error|terminate called|Fatal Python error)\b")
_PREFIX = re.compile(r"^(?:\([\w-]+(?: pid=\d+)?\)\s*)?(?:(?:ERROR|CRITICAL) [\d-]+ [\d:.]+ \[[^\]]+\]\s*)?")
# vLLM's second error only points to the first; serve.py's plain messages are no errors
_NOISE = re.compile(r"Engine core initialization failed|See root cause above|: the seal holds|: no seal to verify|-m vllm\.entrypoints")


@dataclass(frozen=True)
class Diagnosis:
    """Why the engine ended: the log's `lines` that tell it, in the log's order, and what usually mends it (empty if nothing is known)."""

    lines: tuple[str, ...]
    mend: str


def diagnose(log: str, most_lines: int = 6) -> Diagnosis:
    """The lines of a log that name an error, without repeats, and the remedy of the first symptom in them, else in the log's end."""
    told: list[str] = []
    logged: list[str] = []
    for raw in log.splitlines():
        line = _PREFIX.sub("", raw.rstrip())[:400]
        if not line or _NOISE.search(line):
            continue
        if (_RAISED.match(line) or _TOLD.match(line)) and line not in told:
            told.append(line)
        elif " ERROR " in raw and not line.startswith((" ", "Traceback")) and line not in logged:
            logged.append(line)
    lines = (told or logged)[-most_lines:]
    text = "\n".join(lines) or log[-4000:]
    return Diagnosis(tuple(lines), next((mend for symptom, mend in SYMPTOMS if re.search(symptom, text)), ""))
