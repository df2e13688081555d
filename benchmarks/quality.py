"""Perplexity and KL of int4 g128 checkpoints, gemq's and llm-compressor's, judged by one ruler in one run.

Gemma 3 270M. wiki: 8 windows of BOS + 1023 tokens of wikitext2-test.txt. ground truth: the first 40 token records. KL(source || checkpoint),
nats a token: records 40 to 55, cut at 1,024 tokens. Calibration: the first 64 windows of BOS + 511 tokens of wikitext2-valid.txt, or self.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import measured
from gemq import output
from gemq.demo import build_demo
from gemq.eval.kl import evaluate_kl
from gemq.eval.ppl import evaluate_ppl


def score(checkpoint: Path, source: Path, data: Path) -> tuple[float, float, float]:
    """wiki perplexity, ground-truth perplexity, KL in nats a token."""
    wiki = evaluate_ppl(str(checkpoint), data / "wikitext2-test.txt", records=8, length=1024)
    truth = evaluate_ppl(str(checkpoint), data / "ppl_ground_truth_tokens.jsonl", records=40)
    if checkpoint == source:
        return wiki.ppl.value, truth.ppl.value, 0.0
    divergence = evaluate_kl(
        str(checkpoint), data / "ppl_ground_truth_tokens.jsonl", reference=str(source), skip=40, records=16, length=1024
    )
    return wiki.ppl.value, truth.ppl.value, divergence.kl_nats.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2-*.txt and ppl_ground_truth_tokens.jsonl")
    parser.add_argument("--only", nargs="*", help="rows to make, by name; all by default")
    options = parser.parse_args()
    data, source = options.data, build_demo()
    text = data / "wikitext2-valid.txt"
    common = ("--samples", 64, "--length", 512, "--eval-data", "none")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rtn = work / "rtn.yaml"
        rtn.write_text(
            "version: 1\nname: w4a16-rtn\nsummary: int4 g128 round to nearest\nmethod: rtn\nrules:\n  - match: [decoder]\n"
            "    scheme: {weights: {num_bits: 4, strategy: group, group_size: 128}}\n"
        )
        commands = {
            "source": None,
            "gemq w4a16": measured.gemq("quantize", source, "--calibration", text, *common, "-o", work / "gemq w4a16"),
            "llm-compressor GPTQ g128": measured.peer(source, work / "llm-compressor GPTQ g128", "gptq", text, 64, 512, "float32"),
            "gemq w4a16, self": measured.gemq("quantize", source, *common, "-o", work / "gemq w4a16, self"),
            "gemq w4a16-g32": measured.gemq("quantize", source, "--recipe", "w4a16-g32", "--calibration", text, *common, "-o", work / "gemq w4a16-g32"),  # noqa: E501
            "gemq w8a16": measured.gemq("quantize", source, "--recipe", "w8a16", *common, "-o", work / "gemq w8a16"),
            "gemq RTN g128": measured.gemq("quantize", source, "--recipe", rtn, *common, "-o", work / "gemq RTN g128"),
            "llm-compressor RTN g128": measured.peer(source, work / "llm-compressor RTN g128", "rtn", text, 64, 512, "float32"),
        }  # fmt: skip
        rows = []
        for name, command in commands.items():
            if options.only and name not in options.only:
                continue
            taken = None if command is None else measured.run(command, work / "log")
            wiki, truth, divergence = score(work / name if command else source, source, data)
            cost = ("", "") if taken is None else (f"{taken.seconds:.0f}", f"{taken.peak_bytes / 2**30:.2f}")
            rows.append((name, f"{wiki:.3f}", f"{truth:.4f}", f"{divergence:.4f}", *cost))
            output.note("  ".join(rows[-1]))
    output.note(measured.machine())
    output.table("", ("checkpoint", "wiki PPL", "ground truth PPL", "KL, nats/token", "seconds", "peak GiB"), rows)


if __name__ == "__main__":
    main()
