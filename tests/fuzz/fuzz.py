"""Attack one reader of targets.py with coverage-guided bytes: `python tests/fuzz/fuzz.py READER [--seconds N] [--corpus FOLDER]`.

libFuzzer (through atheris) changes sound inputs and keeps what reaches new code of gemq's. What raises anything but a printable refusal stops it,
with the input in a file `crash-…` here. `make fuzz` runs it for every reader in turn.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["gemq", "yaml", "json"]):
    from targets import READERS, refusal


def main() -> None:
    """Parse, write the corpus, and never return: libFuzzer ends the process."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("reader", choices=READERS)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--corpus", type=Path, help="keep what was found interesting here; else it is thrown away")
    asked = parser.parse_args()
    reader = READERS[asked.reader]
    for seed in reader.seeds:
        if said := refusal(reader, seed):
            sys.exit(f"{asked.reader} refuses its own sound input: {said}")
    with tempfile.TemporaryDirectory() as folder:
        corpus = asked.corpus or Path(folder)
        corpus.mkdir(parents=True, exist_ok=True)
        for number, seed in enumerate(reader.seeds):
            (corpus / f"seed-{number}").write_bytes(seed)
        options = [f"-max_total_time={asked.seconds}", "-max_len=8192", "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"]
        atheris.Setup([sys.argv[0], *options, str(corpus)], lambda raw: refusal(reader, raw) and None)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
