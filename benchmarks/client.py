"""What the measuring client costs: its wall time over what a stub server at 2,000 tokens a second says that answering took.

    python -m benchmarks.client [REQUESTS]

The server runs in a process of its own and counts from the last byte of a request to the last byte of its answer; what the client's clock
shows beyond that is the client's: writing the request, reading the answer, and everything between two requests. Exits 1 at 2% or more.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from gemq import output
from gemq.eval.endpoint import Endpoint
from gemq.eval.load import Finished, drive
from gemq.eval.workloads import Load, prompts_for

TOKENS_PER_SECOND, LIMIT = 2000, 0.02
LOADS = {
    "chat, not streamed": Load(name="plain", requests=1, output_tokens=512, chat=True, warmups=2),
    "ids, not streamed": Load(name="ids", requests=1, output_tokens=512, input_tokens=1024, warmups=2),
    "chat, streamed": Load(name="streamed", requests=1, output_tokens=512, chat=True, streamed=True, warmups=2),
}


@contextmanager
def stub_process(tokens_per_second: float) -> Iterator[str]:
    """The URL of a stub server in a process of its own."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.stub_server", str(tokens_per_second)], stdout=subprocess.PIPE, text=True,
                               cwd=Path(__file__).resolve().parent.parent)  # fmt: skip
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def client_cost(url: str, load: Load) -> float:
    """The share by which the client's time for a load exceeds the server's."""
    endpoint = Endpoint.open(url)
    prompts = prompts_for(load, None, vocabulary=500, bos=2)

    def served() -> float:
        return float(httpx.get(f"{url}/stats", trust_env=False).json()["service_seconds"])

    drive(endpoint, load.model_copy(update={"requests": load.warmups}), prompts[: load.warmups], range(load.warmups), lambda answer: None)
    before, answers = served(), list[Finished]()
    drive(endpoint, load.model_copy(update={"warmups": 0}), prompts, range(len(prompts)), answers.append)
    wall = max(answer.ended_s for answer in answers) - min(answer.started_s for answer in answers)
    return wall / (served() - before) - 1


def main(requests: int = 24) -> int:
    """Print the cost a kind of request; returns the exit code."""
    rows = []
    with stub_process(TOKENS_PER_SECOND) as url:
        for name, load in LOADS.items():
            cost = client_cost(url, load.model_copy(update={"requests": requests}))
            rows.append((name, requests, f"{cost:.3%}", "yes" if cost < LIMIT else "NO"))
    output.table(f"the client's share at {TOKENS_PER_SECOND} tokens a second", ("requests", "how many", "cost", f"under {LIMIT:.0%}"), rows)
    return int(any(row[-1] == "NO" for row in rows))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
