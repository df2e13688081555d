"""The ladder: quality of int4 checkpoints against bytes a token and seconds, gemq's, llm-compressor's and AutoRound's, by one ruler in one run.

Gemma 3 270M. wiki: perplexity of 8 windows of BOS + 1023 tokens of wikitext2-test.txt. ground truth: of the first 40 token records. KL(source ||
checkpoint), nats a token: records 40 to 55, cut at 1,024 tokens. Calibration: the first 64 windows of BOS + 511 tokens of wikitext2-valid.txt,
or self. Bytes a token: all tensors on disk, since a decode step reads each once (the tied embedding as the head). Every row is a process of its
own; with `--places 0-1 2-3` two rows run at a time, each on cores of its own, with `--places 0-7@0` one at a time on GPU 0 beside eight cores.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from benchmarks import measured
from gemq import output
from gemq.demo import build_demo

TRUTH = "ppl_ground_truth_tokens.jsonl"


def score(checkpoint: Path, source: Path, data: Path) -> dict[str, float]:
    """wiki perplexity, ground-truth perplexity, KL in nats a token, bytes a token of `checkpoint`."""
    from gemq.eval.kl import evaluate_kl
    from gemq.eval.ppl import evaluate_ppl

    wiki = evaluate_ppl(str(checkpoint), data / "wikitext2-test.txt", records=8, length=1024)
    truth = evaluate_ppl(str(checkpoint), data / TRUTH, records=40)
    divergence = 0.0
    if checkpoint != source:
        divergence = evaluate_kl(
            str(checkpoint), data / TRUTH, reference=str(source), skip=40, records=16, length=1024
        ).kl_nats.value  # fmt: skip
    return {"wiki": wiki.ppl.value, "truth": truth.ppl.value, "kl": divergence, "bytes": float(_tensor_bytes(checkpoint))}


def _tensor_bytes(checkpoint: Path) -> int:
    total = 0
    for shard in checkpoint.glob("*.safetensors"):
        with open(shard, "rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        total += sum(entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__")
    return total


@dataclass(frozen=True)
class Row:
    """A row of the ladder: its name, and the command that makes its checkpoint (none for the source)."""

    name: str
    command: Sequence[str] | None


def rows(source: Path, text: Path, work: Path) -> list[Row]:
    """The ladder's rows, the longest first where that matters to how they are packed."""
    common = ("--samples", 64, "--length", 512, "--eval-data", "none")
    rtn = work / "rtn.yaml"
    rtn.write_text(
        "version: 1\nname: w4a16-rtn\nsummary: int4 g128 round to nearest\nmethod: rtn\nrules:\n  - match: [decoder]\n"
        "    scheme: {weights: {num_bits: 4, strategy: group, group_size: 128}}\n"
    )

    def ours(name: str, recipe: str | Path, on: str | Path = text) -> Row:
        return Row(name, measured.gemq("quantize", source, "--recipe", recipe, "--calibration", on, *common, "-o", work / name))

    def oneshot(name: str, method: str, dtype: str = "float32") -> Row:
        return Row(name, measured.peer(source, work / name, method, text, 64, 512, dtype))

    return [
        Row("AutoRound g128, 200 iterations", measured.autoround(source, work / "AutoRound g128, 200 iterations", text, 64, 512, 200)),
        oneshot("llm-compressor GPTQ g128", "gptq"),
        oneshot("llm-compressor GPTQ g128, bfloat16", "gptq", "bfloat16"),
        ours("gemq w4a16-best", "w4a16-best"),
        ours("gemq w4a16-best, self", "w4a16-best", "self"),
        ours("gemq w4a16-tuned", "w4a16-tuned"),
        ours("gemq w4a16", "w4a16"),
        ours("gemq w4a16, self", "w4a16", "self"),
        ours("gemq w4a16-awq", "w4a16-awq"),
        ours("gemq w4a16-gptq-awq", "w4a16-gptq-awq"),
        ours("gemq w4a16-g32", "w4a16-g32"),
        ours("gemq w8a16", "w8a16"),
        ours("gemq RTN g128", rtn),
        oneshot("llm-compressor RTN g128", "rtn"),
        Row("source", None),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with wikitext2-*.txt and {TRUTH}")
    parser.add_argument("--only", nargs="*", help="rows to make, by name; all by default")
    parser.add_argument("--places", nargs="*", type=measured.Place.parse, default=[], metavar="CORES[@GPU]",
                        help="where rows are made, such as 0-1 2-3 or 0-7@0: a row at a time on each; all of this machine by default")  # fmt: skip
    parser.add_argument("--json", type=Path, help="a file that keeps each row as soon as it is there")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    data, source = options.data, build_demo()
    if options.score:
        print(json.dumps(score(options.score, source, data)))
        return
    places: queue.Queue[measured.Place | None] = queue.Queue()
    for place in options.places or [None]:
        places.put(place)
    failed: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        chosen = [row for row in rows(source, data / "wikitext2-valid.txt", work) if not options.only or row.name in options.only]

        def make(row: Row) -> tuple[str, ...]:
            place, log, said = places.get(), work / f"{row.name}.log", work / f"{row.name}.score"
            figures = {"wiki": math.nan, "truth": math.nan, "kl": math.nan, "bytes": math.nan}
            taken: measured.Run | None = None
            try:
                taken = None if row.command is None else measured.run(list(row.command), log, place)
                checkpoint = source if row.command is None else work / row.name
                measured.run([sys.executable, "-m", "benchmarks.quality", "--data", str(data), "--score", str(checkpoint)], said, place)
                figures = json.loads(said.read_text().splitlines()[-1])
            except RuntimeError as error:
                output.warn(str(error))
                failed.append(row.name)
            finally:
                places.put(place)
            cost = ("", "") if taken is None else (f"{taken.seconds:.0f}", f"{taken.peak_bytes / 2**30:.2f}")
            line = (
                row.name,
                f"{figures['wiki']:.3f}",
                f"{figures['truth']:.4f}",
                f"{figures['kl']:.4f}",
                f"{figures['bytes'] / 1e6:.1f}",
                *cost,
            )
            output.note("  ".join(line))
            if options.json:
                with open(options.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            return line

        with ThreadPoolExecutor(places.qsize()) as pool:
            made = list(pool.map(make, chosen))
    output.note(measured.machine())
    output.table("", ("checkpoint", "wiki PPL", "ground truth PPL", "KL, nats/token", "MB a token", "seconds", "peak GiB"), made)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
