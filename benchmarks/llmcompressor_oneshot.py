"""The peer: llm-compressor's oneshot on the windows that gemq gets. usage: llmcompressor_oneshot SOURCE OUT rtn|gptq TEXT SAMPLES LENGTH DTYPE

TEXT: a .txt, or a .jsonl of {"token_ids": [...]} rows.
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    source, out, method, text, samples, length, dtype = sys.argv[1:8]
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    weights = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
    ignored = ["lm_head", "re:.*per_layer_model_projection"]  # the second is never visited: a run would end without its statistics
    settings = {"config_groups": {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}, "ignore": ignored}
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, dtype))
    if method == "rtn":
        oneshot(model=model, processor=tokenizer, recipe=[QuantizationModifier(**settings)])
    else:
        count, body = int(samples), int(length) - 1
        with open(text, encoding="utf-8") as file:
            if text.endswith(".jsonl"):
                windows = [json.loads(line)["token_ids"] for line in file][:count]
            else:
                ids = tokenizer(file.read(), add_special_tokens=False).input_ids
                windows = [[2, *ids[i * body : (i + 1) * body]] for i in range(count)]
        rows = [{"input_ids": window, "attention_mask": [1] * len(window)} for window in windows]
        oneshot(
            model=model,
            processor=tokenizer,
            dataset=Dataset.from_list(rows),
            recipe=[GPTQModifier(**settings)],
            max_seq_length=int(length),
            num_calibration_samples=count,
        )
    model.save_pretrained(out, save_compressed=True)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main()
