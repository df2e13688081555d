"""A server that a test submission starts in place of vLLM: the stub's made-up language, which also adds up what it is asked, right or wrong."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

from benchmarks.stub_server import Engine, StubServer


class Adder(Engine):
    """Answers "What is N and N?" with 2 N in GSM8K's form, wrong for multiples of WRONG."""

    max_model_len = 100_000
    vocabulary = 320

    def tokenize(self, text: str) -> list[int]:
        return [2, *(4 + byte for byte in text.encode())]

    asked = 0

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        self.asked += 1
        if self.asked > int(os.environ.get("RUNS_OUT_AFTER", "1000000")):
            print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", flush=True)
            os._exit(1)
        status, document, seconds = super().answer(path, body)
        prompt = body.get("prompt")
        text = prompt[0] if isinstance(prompt, list) and isinstance(prompt[0], str) else prompt
        asked = re.findall(r"What is (\d+) and", text) if isinstance(text, str) else []
        if asked:
            number = int(asked[-1])
            wrong = number % int(os.environ.get("WRONG", "1000000")) == 0
            status, document, seconds = super().answer(path, {**body, "prompt": "x", "max_tokens": 1})
            document["choices"][0]["text"] = f" So.\n#### {2 * number + wrong}"
        return status, document, seconds


async def main() -> None:
    engine = Adder(float(os.environ.get("SPEED", "400")))
    engine.name = os.environ["SERVED_MODEL_NAME"]
    server = StubServer(engine)
    await server.start(int(os.environ["PORT"]))
    print("INFO:     Application startup complete.", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
