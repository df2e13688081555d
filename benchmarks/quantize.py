"""Time and memory of one GPTQ quantization, gemq and llm-compressor in turn, each a whole process from start to checkpoint on disk.

Gemma 3 270M, int4 g128 symmetric, 64 windows of BOS + 511 tokens. The peer runs in the dtype that the processor is fast in, and in bfloat16,
as it loads the model by itself, when `--bfloat16` is given: on a processor without bfloat16 products that is many times slower.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import measured
from gemq import output
from gemq.demo import build_demo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with wikitext2-valid.txt")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--bfloat16", action="store_true")
    parser.add_argument("--keep", type=Path, help="a new folder for the checkpoints, to be scored afterwards")
    options = parser.parse_args()
    text, source = options.data / "wikitext2-valid.txt", build_demo()
    runs: dict[str, list[measured.Run]] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = options.keep or Path(folder)
        work.mkdir(exist_ok=True)
        for number in range(options.runs):
            commands = {
                "gemq w4a16": measured.gemq("quantize", source, "--calibration", text, "--samples", options.samples, "--length", 512,
                                            "--eval-data", "none", "-o", work / f"gemq-{number}"),
                "llm-compressor GPTQ, float32": measured.peer(source, work / f"peer-{number}", "gptq", text, options.samples, 512, "float32"),
            }  # fmt: skip
            if options.bfloat16:
                commands["llm-compressor GPTQ, bfloat16"] = measured.peer(
                    source, work / f"bf16-{number}", "gptq", text, options.samples, 512, "bfloat16"
                )
            for name, command in commands.items():
                taken = measured.run(command, work / "log")
                output.note(f"{name}: {taken.seconds:.1f} s, {taken.peak_bytes / 2**30:.2f} GiB")
                runs.setdefault(name, []).append(taken)
    output.note(measured.machine())
    first = runs["gemq w4a16"]
    rows = []
    for name, taken in runs.items():
        ratio = statistics.median(other.seconds / own.seconds for own, other in zip(first, taken, strict=True))
        rows.append((name, f"{statistics.median(run.seconds for run in taken):.1f}",
                     f"{min(run.seconds for run in taken):.1f}–{max(run.seconds for run in taken):.1f}", f"{ratio:.2f}",
                     f"{max(run.peak_bytes for run in taken) / 2**30:.2f}"))  # fmt: skip
    output.table(f"whole process, {options.runs} runs in turn", ("", "seconds, median", "range", "times gemq's", "peak GiB"), rows)


if __name__ == "__main__":
    main()
