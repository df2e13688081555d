"""Another peer: AutoRound's signed-gradient tuning on the windows that gemq gets. usage: autoround_peer SOURCE OUT TEXT SAMPLES LENGTH ITERATIONS"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    source, out, text, samples, length, iterations = sys.argv[1:7]
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    with open(text, encoding="utf-8") as file:
        ids = tokenizer(file.read(), add_special_tokens=False).input_ids
    body = int(length) - 1
    windows = [torch.tensor([[2, *ids[start * body : (start + 1) * body]]]) for start in range(int(samples))]
    tuner = AutoRound(
        AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16),
        tokenizer,
        scheme="W4A16",  # int4, groups of 128, symmetric
        iters=int(iterations),
        nsamples=len(windows),
        seqlen=int(length),
        batch_size=8,
        dataset=windows,
        device_map="cuda" if torch.cuda.is_available() else "cpu",
    )
    tuner.quantize_and_save(out, format="llm_compressor")
    folder = Path(out)
    (made,) = [path.parent for path in folder.glob("*/config.json")]  # in a folder of the model's name and the scheme's
    for path in made.iterdir():
        path.rename(folder / path.name)
    made.rmdir()


if __name__ == "__main__":
    main()
