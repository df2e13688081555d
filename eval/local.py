"""Log-probabilities of a checkpoint directory, computed by transformers on its dequantized weights.

Weights are dequantized as they load; activations that a scheme quantizes (fp8, int8) are quantized and dequantized in each linear
as served. Memory: the weights, one record's hidden states, and log-probabilities of a few dozen positions at a time. Computed in
float32 on CPUs (bf16 matrix products are slower there unless the CPU has AMX), in the checkpoint's dtype on GPUs; log-softmax is
always float32.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gemq.adapters import no_adapters
from gemq.config_file import complete_config, read_config, text_config
from gemq.devices import choose
from gemq.errors import GemqError, IntegrityError, UsageError
from gemq.eval.records import Record
from gemq.shards import ShardReader

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CHUNK_ELEMENTS = 1 << 25  # logits at a time: 128 MiB of float32


def require_dtype(name: str, device: torch.device, stored: str | None = None) -> torch.dtype:
    """The dtype to compute in: float32 on a CPU without AMX, bfloat16 with it, the checkpoint's own on a GPU; or the one asked for."""
    if name in DTYPES:
        return DTYPES[name]
    if name != "auto":
        raise UsageError(f"dtype {name!r} is unknown", f"choose --dtype auto, {', '.join(DTYPES)}")
    if device.type == "cpu":
        return torch.bfloat16 if _cpu_has_amx() else torch.float32
    return DTYPES.get(stored or "", torch.bfloat16)


def _cpu_has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore")
    except OSError:  # not Linux
        return False


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint directory and its config with its class's defaults; nothing is loaded yet. `name` is the path as it was given."""

    name: str
    directory: Path
    config: dict[str, Any]

    @classmethod
    def open(cls, target: str) -> LocalCheckpoint:
        """Read `target`'s config.json; raises UsageError where it is no directory with a causal language model."""
        directory = Path(target)
        if not directory.is_dir():
            raise UsageError(
                f"{target} is neither a directory nor an http(s) URL", "give a checkpoint's directory, or http://HOST:PORT of an endpoint"
            )
        if not (directory / "config.json").exists():
            raise UsageError(
                f"{target} has no config.json, so it is not a checkpoint", "give the directory that holds config.json and *.safetensors"
            )
        try:
            config = complete_config(read_config(directory))
        except UsageError as error:
            raise IntegrityError(error.message, error.next_step) from None
        checkpoint = cls(target, directory, config)
        checkpoint._require_language_model()
        return checkpoint

    def _require_language_model(self) -> None:
        names = self.config.get("architectures")
        if not (isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)):
            raise UsageError(f"{self.name}: config.json names the architectures {names!r}", "give a checkpoint that names exactly one")
        if not names[0].endswith(("ForCausalLM", "ForConditionalGeneration")):
            raise UsageError(f"{self.name} is a {names[0]}, which has no next-token probabilities",
                             "give a checkpoint of a ...ForCausalLM or ...ForConditionalGeneration")  # fmt: skip
        method = self.quantization.get("quant_method")
        if self.quantization and method not in ("compressed-tensors", "gptq"):
            raise UsageError(f"{self.name} is quantized by {method!r}; compressed-tensors and gptq can be dequantized here",
                             "serve it and give the endpoint's URL instead")  # fmt: skip
        if not isinstance(self._text("vocab_size"), int):
            raise UsageError(f"{self.name}: config.json has no vocab_size", "give a checkpoint with its whole config.json")

    def _text(self, key: str) -> Any:
        found = text_config(self.config).get(key)
        return self.config.get(key) if found is None else found

    @property
    def architecture(self) -> str:
        return str(self.config["architectures"][0])

    @property
    def quantization(self) -> dict[str, Any]:
        found = self.config.get("quantization_config")
        return found if isinstance(found, dict) else {}

    @property
    def vocab_size(self) -> int:
        return int(self._text("vocab_size"))

    @property
    def max_length(self) -> int | None:
        length = self._text("max_position_embeddings")
        return length if isinstance(length, int) else None

    @property
    def bos_token_id(self) -> int | None:
        token = self._text("bos_token_id")
        return token if isinstance(token, int) else None

    @property
    def stored_dtype(self) -> str | None:
        """The dtype that config.json names."""
        found = self._text("dtype") or self._text("torch_dtype")
        return found if isinstance(found, str) else None

    @contextlib.contextmanager
    def loaded(self, device: str = "auto", dtype: str = "auto") -> Iterator[LocalModel]:
        """Yield the model in memory; it is freed when the block ends."""
        where = torch.device(choose(device))
        model = LocalModel(self.name, _load(self, where, require_dtype(dtype, where, self.stored_dtype)), where)
        try:
            yield model
        finally:
            model.free()


def _load(checkpoint: LocalCheckpoint, device: torch.device, dtype: torch.dtype) -> Any:
    import transformers

    ShardReader(checkpoint.directory).close()  # truncated or missing shards, named
    model_class = getattr(transformers, checkpoint.architecture, None)
    if model_class is None:
        raise UsageError(f"{checkpoint.name} is a {checkpoint.architecture}, which transformers {transformers.__version__} does not know",
                         "give a checkpoint of a known architecture, or the URL of an endpoint that serves it")  # fmt: skip
    arguments: dict[str, Any] = {"dtype": dtype, "local_files_only": True, "output_loading_info": True}
    source: str | None = str(checkpoint.directory)
    mixtures: dict[str, int] = {}
    noise = io.StringIO()  # progress bars of the libraries; gemq's output module is the one that prints
    try:
        with contextlib.redirect_stderr(noise), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            method = checkpoint.quantization.get("quant_method")
            if method == "compressed-tensors":
                from gemq.eval.experts import experts_stored_apart, is_of_experts, read_stacks, round_inputs
                from gemq.eval.tables import quantized_tables, without_tables
                from gemq.eval.tables import read_state_dict as read_with_tables

                arguments["quantization_config"] = transformers.CompressedTensorsConfig(dequantize=True)
                tables = quantized_tables(checkpoint.directory)
                mixtures = experts_stored_apart(checkpoint.directory, checkpoint._text("num_experts"))
                if mixtures:
                    arguments["experts_implementation"] = "eager"  # computes experts by linears, whose inputs can be rounded
                if tables or mixtures:
                    arguments["config"] = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
                    arguments["config"].quantization_config = without_tables(checkpoint.quantization, tables)
                    arguments["state_dict"] = {
                        **read_with_tables(checkpoint.directory, tables, is_of_experts),
                        **read_stacks(checkpoint.directory, mixtures, dtype),
                    }
                    del arguments["local_files_only"]
                    source = None
            elif method == "gptq":
                from gemq.eval.gptq_format import read_state_dict

                arguments["config"] = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
                del arguments["config"].quantization_config
                arguments["state_dict"] = read_state_dict(checkpoint.directory, checkpoint.quantization)
                del arguments["local_files_only"]
                source = None
            with no_adapters():
                model, info = model_class.from_pretrained(source, **arguments)
            if method == "compressed-tensors":
                # it leaves each module with a cache of its own, which holds the weights on the CPU whatever device they are moved to
                from compressed_tensors.offload import remove_dispatch

                remove_dispatch(model)
                round_inputs(model, checkpoint.config, mixtures)
            model.to(device)
    except (GemqError, MemoryError):
        raise
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"{checkpoint.name} does not fit into the memory of {device}", "choose another --device, or evaluate through an endpoint"
        ) from error
    except Exception as error:  # whatever transformers raises on a config or tensors that don't belong together
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise IntegrityError(f"{checkpoint.name} can't be loaded as {checkpoint.architecture}: {reason}",
                             "check that its files belong together, or fetch or quantize it again") from error  # fmt: skip
    for problem in ("missing_keys", "mismatched_keys"):
        if info[problem]:
            first, kind = min(str(key) for key in info[problem]), problem.replace("_", " ")
            raise IntegrityError(f"{checkpoint.name} does not fill {checkpoint.architecture}: {len(info[problem])} {kind}, e.g. {first}",
                                 "fetch or quantize the checkpoint again")  # fmt: skip
    return model.eval()


class Head:
    """The output projection of a model, with its soft cap; outlives the rest of the model."""

    def __init__(self, projection: torch.nn.Module, softcap: float | None) -> None:
        self.projection = projection
        self.softcap = softcap

    @torch.inference_mode()
    def log_probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """The log-softmax [positions, vocabulary] float32 of hidden states [positions, hidden size]."""
        return self.normalized(self.logits(hidden))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The capped logits [positions, vocabulary] in the model's dtype."""
        return self.capped(self.projection(hidden))

    def capped(self, logits: torch.Tensor) -> torch.Tensor:
        """`logits` under the soft cap, if there is one."""
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits

    @staticmethod
    def normalized(logits: torch.Tensor) -> torch.Tensor:
        """The log-softmax in float32 of capped `logits`, whose memory it may take."""
        logits = logits.float()
        # not log_softmax: over 262,144 tokens its float32 sum loses the tail, 1e-5 to 2e-5 nats a token, always in the model's favour
        return logits.sub_(logits.logsumexp(-1, keepdim=True))


class LocalModel:
    """A model in memory that scores records; `head` may be kept when the rest is freed."""

    def __init__(self, name: str, model: Any, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = model.dtype
        self._model = model
        self.head = Head(model.get_output_embeddings(), getattr(model.config.get_text_config(), "final_logit_softcapping", None))
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self._head_checked = False

    @property
    def causal_model(self) -> Any:
        """The transformers model itself, for who changes weights in place."""
        return self._model

    def free(self) -> None:
        """Drop the model; a head that was taken from it stays usable."""
        self._model = None
        del self.head
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def hidden(self, record: Record) -> torch.Tensor:
        """The last hidden states that predict the record's targets: [targets, hidden size]."""
        tokens = torch.tensor([record.tokens[:-1]], device=self.device)
        try:
            states = self._model.base_model(input_ids=tokens, use_cache=False)[0][0]
        except torch.OutOfMemoryError as error:
            raise UsageError(f"{record.where}: {len(record.tokens)} tokens do not fit into the memory of {self.device}",
                             "choose a smaller --length or another --device") from error  # fmt: skip
        if not self._head_checked:
            self._check_head(tokens, states)
        return states[record.first_target - 1 :]

    def _check_head(self, tokens: torch.Tensor, states: torch.Tensor) -> None:
        """Compare the chunked head with the model's own forward once, so that a head of a kind unknown here can't go unnoticed."""
        own = self._model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[0, -1].float()
        ours = self.head.logits(states[-1:])[0].float()
        tolerance = 1e-3 if self.dtype == torch.float32 else 0.1
        if own.shape != ours.shape or not torch.allclose(own, ours, atol=tolerance, rtol=tolerance, equal_nan=True):
            raise UsageError(f"{self.name}: the output head of {type(self._model).__name__} is not projection and soft cap alone",
                             "evaluate it through an endpoint's URL")  # fmt: skip
        self._head_checked = True

    def score(self, record: Record) -> list[float]:
        """The log-probabilities, in nats, of the record's targets; raises IntegrityError where one is not finite."""
        hidden = self.hidden(record)
        targets = torch.tensor(record.targets, device=self.device)
        found: list[float] = []
        for part in chunks(len(targets), self.vocab_size):
            table = self.head.log_probabilities(hidden[part])
            # compressed-tensors may leave a checkpoint's modules, and so its outputs, on another device than it was asked for
            found += table.gather(1, targets[part].to(table.device).unsqueeze(1)).squeeze(1).tolist()
        require_finite(found, self.name, record)
        return found

    @torch.inference_mode()
    def distributions(self, record: Record, top: int) -> list[dict[int, float]]:
        """The log-probabilities, in nats, of the `top` likeliest tokens at each target, and of the target itself; raises as `score` does."""
        hidden = self.hidden(record)
        targets = torch.tensor(record.targets, device=self.device)
        found: list[dict[int, float]] = []
        for part in chunks(len(targets), self.vocab_size):
            table = self.head.log_probabilities(hidden[part])
            chosen = targets[part].to(table.device).unsqueeze(1)
            likeliest = table.topk(min(top, table.shape[-1]))
            tokens = torch.cat([chosen, likeliest.indices], 1).tolist()
            values = torch.cat([table.gather(1, chosen), likeliest.values], 1).tolist()
            found += [dict(zip(*row, strict=True)) for row in zip(tokens, values, strict=True)]
        require_finite([position[token] for position, token in zip(found, record.targets, strict=True)], self.name, record)
        return found


def chunks(positions: int, vocab_size: int) -> Iterator[slice]:
    """Slices over positions whose logits take at most 128 MiB."""
    size = max(1, _CHUNK_ELEMENTS // vocab_size)
    return (slice(start, min(start + size, positions)) for start in range(0, positions, size))


def require_finite(log_probabilities: list[float], name: str, record: Record) -> None:
    """Raise IntegrityError naming the record if a log-probability is NaN or infinite."""
    for offset, value in enumerate(log_probabilities):
        if not math.isfinite(value):
            raise IntegrityError(f"{record.where}: {name} gives target {offset}, token {record.targets[offset]}, the value {value}",
                                 "the checkpoint or its kernel is broken: verify it, or quantize again")  # fmt: skip
