"""A server that a test submission starts in place of vLLM: the small model of MODEL_ID behind the stub server, on HOST and PORT."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from benchmarks.stub_server import StubServer
from model_engine import ModelEngine
from small import plain_model


async def main() -> None:
    engine = ModelEngine(plain_model(Path(os.environ["MODEL_ID"])))
    engine.name = os.environ["SERVED_MODEL_NAME"]
    dies_after = os.environ.get("DIES_AFTER")
    server = StubServer(engine, None if dies_after is None else int(dies_after))
    await server.start(int(os.environ["PORT"]))
    print("INFO:     Application startup complete.", flush=True)
    await asyncio.Event().wait()


asyncio.run(main())
