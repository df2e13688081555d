"""Train the small Gemma 4 of `gemma4-tiny/` on the CPU and say what it is worth: `python -m tests.models.train_gemma4 OUT [--data DIR]`.

The decoder learns next tokens from the wikitext-2 validation text; the towers keep their seeded weights, so images and audio mean
nothing to it, only text does. DIR must hold wikitext2-valid.txt and wikitext2-test.txt and is the project's shared data folder unless
told otherwise. It takes about 12 minutes of one core. The same kind of processor and library versions give the same weights; others
differ in the last bits, and then in more.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from .gemma4 import empty_model, save_files, save_model, small_config
from .weights import fill, write_json

SEED = 4  # of the decoder's first weights and of the windows' order
UNTRAINED_SEED = 0  # of the towers, layer scalars and redundant keys and values
TEXT = {"intermediate_size": 512, "sliding_window": 64, "vocab_size": 1536, "vocab_size_per_layer_input": 1536}
WINDOW = 256  # tokens of a training window, BOS included; evaluation uses the same
BATCH = 4
STEPS = 900
WARMUP = 30
PEAK_RATE = 3e-3
WEIGHT_DECAY = 0.1
LOUDNESS = 0.5  # spread of the log-normal channel scales that are folded in after training
HELD_OUT_ROWS = 400  # of the test text's windows, about a quarter of it
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"


def reset_decoder(model: torch.nn.Module, seed: int) -> None:
    """Give the decoder weights that train well: no loud channels, norms at 1. Layer scalars and towers stay as they are."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "language_model" not in name:
                continue
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                width = parameter.shape[-1]
                parameter.copy_(torch.randn(parameter.shape, generator=random) * width**-0.5)


def token_stream(folder: Path, text: str) -> torch.Tensor:
    """All token ids of `text` without BOS, [tokens] int64."""
    from tokenizers import Tokenizer

    return torch.tensor(Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids)


def windows(stream: torch.Tensor, length: int = WINDOW) -> torch.Tensor:
    """`stream` cut into rows of BOS + `length` - 1 tokens, the rest dropped: [rows, length]."""
    body = stream[: len(stream) // (length - 1) * (length - 1)].view(-1, length - 1)
    return torch.cat([torch.full((len(body), 1), 2), body], dim=1)


@torch.no_grad()
def nats_per_token(model: torch.nn.Module, rows: torch.Tensor, batch: int = 16) -> float:
    """Mean negative log-likelihood of every token but BOS, in nats; `model` computes in its own dtype, the softmax in float32."""
    total = 0.0
    for part in rows.split(batch):
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        total += functional.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), reduction="sum").item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


@torch.no_grad()
def kl_nats_per_token(reference: torch.nn.Module, model: torch.nn.Module, rows: torch.Tensor, batch: int = 16) -> float:
    """Mean KL divergence from `reference`'s next-token distribution to `model`'s, in nats a token, over all positions but the last."""
    total = 0.0
    for part in rows.split(batch):
        truth, guess = (each(input_ids=part, use_cache=False).logits[:, :-1].float().log_softmax(-1) for each in (reference, model))
        total += functional.kl_div(guess, truth, reduction="sum", log_target=True).item()
    return total / (rows.shape[0] * (rows.shape[1] - 1))


def unigram_nats_per_token(train: torch.Tensor, rows: torch.Tensor, vocab_size: int) -> float:
    """What a model of token frequencies alone (add-one smoothed, counted on `train`) has on `rows`, in nats a token."""
    counts = torch.bincount(train, minlength=vocab_size).double() + 1
    return -(counts / counts.sum()).log()[rows[:, 1:]].mean().item()


def add_loud_channels(decoder: torch.nn.Module, seed: int, spread: float = LOUDNESS) -> None:
    """Scale channels up before a linear and down in it, in place: `decoder` computes the same and is as hard to quantize as a real one.

    Real Gemmas have channels far louder than others; 900 steps make none. Norm -> q/k/v, norm -> gate/up and up -> down are exact.
    """
    random = torch.Generator().manual_seed(seed)

    def scales(width: int) -> torch.Tensor:
        return torch.exp(spread * torch.randn(width, generator=random))

    with torch.no_grad():
        for layer in decoder.layers:
            attention, mlp = layer.self_attn, layer.mlp
            readers = [getattr(attention, name) for name in ("q_proj", "k_proj", "v_proj") if getattr(attention, name, None) is not None]
            for norm, linears in ((layer.input_layernorm, readers), (layer.pre_feedforward_layernorm, [mlp.gate_proj, mlp.up_proj])):
                loud = scales(norm.weight.numel())
                norm.weight *= loud
                for linear in linears:
                    linear.weight /= loud
            loud = scales(mlp.up_proj.out_features)
            mlp.up_proj.weight *= loud[:, None]
            mlp.down_proj.weight /= loud


def round_to_nearest(model: torch.nn.Module, bits: int = 4, group: int = 32) -> int:
    """Replace every decoder linear's weight by its symmetric round-to-nearest int`bits` value, in place. Returns how many there were."""
    top = 2 ** (bits - 1) - 1
    found = 0
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and "language_model" in name:
            grouped = module.weight.data.unflatten(1, (-1, group))
            scale = grouped.abs().amax(-1, keepdim=True).clamp_min(1e-8) / (top + 0.5)
            module.weight.data = ((grouped / scale).round().clamp(-top - 1, top) * scale).flatten(1)
            found += 1
    return found


def train(model: torch.nn.Module, stream: torch.Tensor, steps: int) -> None:
    """AdamW in float32 on random windows of `stream`, linear warm-up and cosine decay; prints the loss now and then."""
    decoder = [parameter for name, parameter in model.named_parameters() if "language_model" in name]
    matrices = [parameter for parameter in decoder if parameter.ndim > 1]
    vectors = [parameter for parameter in decoder if parameter.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    random = torch.Generator().manual_seed(SEED)
    started, smooth = time.monotonic(), None
    model.train()
    for step in range(steps):
        rate = PEAK_RATE * min(1, (step + 1) / WARMUP) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for part in optimizer.param_groups:
            part["lr"] = rate
        starts = torch.randint(len(stream) - WINDOW, (BATCH,), generator=random)
        targets = torch.stack([stream[start : start + WINDOW] for start in starts])
        inputs = torch.cat([torch.full((BATCH, 1), 2), targets[:, :-1]], dim=1)
        logits = model(input_ids=inputs, use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(decoder, 1.0)
        optimizer.step()
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1}/{steps}  loss {smooth:.3f}  {time.monotonic() - started:.0f} s", flush=True)
    model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--steps", type=int, default=STEPS)
    asked = parser.parse_args()
    torch.set_num_threads(1)  # small matrices: on a shared machine a second thread mostly waits
    raw = {split: (asked.data / f"wikitext2-{split}.txt").read_bytes() for split in ("valid", "test")}
    asked.out.mkdir(parents=True)
    config = small_config("e4b", **TEXT)
    save_files(asked.out, config, text=raw["valid"].decode())
    model = empty_model(config)
    fill(model, UNTRAINED_SEED, one_plus_norms=False)
    reset_decoder(model, SEED)
    stream = token_stream(asked.out, raw["valid"].decode())
    held_out = windows(token_stream(asked.out, raw["test"].decode()))[:HELD_OUT_ROWS]
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {len(stream):,} training tokens, {held_out.numel():,} held out", flush=True)
    train(model, stream, asked.steps)
    finish(asked.out, model, config, stream, held_out, {"steps": asked.steps, "data": {
        f"wikitext2-{split}.txt": hashlib.sha256(text).hexdigest() for split, text in raw.items()
    }})  # fmt: skip


def finish(
    out: Path, model: torch.nn.Module, config: dict[str, Any], stream: torch.Tensor, held_out: torch.Tensor, about: dict[str, Any]
) -> None:
    """Round the trained model to bfloat16, make channels loud, write it into `out`, and judge what was written: training.json."""
    model.to(torch.bfloat16).float()
    add_loud_channels(model.model.language_model, SEED)
    save_model(out, model, config, UNTRAINED_SEED)
    model.to(torch.bfloat16).float()
    quantized = copy.deepcopy(model)
    linears = round_to_nearest(quantized)
    report = about | {
        "batch": BATCH, "window": WINDOW, "seed": SEED, "loudness": LOUDNESS, "torch": torch.__version__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()), "decoder_linears": linears,
        "held_out_tokens": held_out[:, 1:].numel(),
        "unigram_perplexity": math.exp(unigram_nats_per_token(stream, held_out, config["text_config"]["vocab_size"])),
        "perplexity": math.exp(nats_per_token(model, held_out)),
        "perplexity_rtn_int4_g32": math.exp(nats_per_token(quantized, held_out)),
        "kl_rtn_int4_g32_nats": kl_nats_per_token(model, quantized, held_out),
    }  # fmt: skip
    write_json(out / "training.json", report)
    print(report)


if __name__ == "__main__":
    main()
