"""`gemq serve`: a checkpoint or a submission behind the endpoint that it was made for."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from gemq import output
from gemq.errors import Interrupted, UsageError
from gemq.serve.serve import PROFILES


def serve(
    path: Annotated[Path, typer.Argument(metavar="CHECKPOINT_OR_SUBMISSION", help="What quantize or package wrote.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    profile: Annotated[str | None, typer.Option(help=f"What vLLM is set for: {', '.join(PROFILES)} (a manifest's, else the first).")] = None,
    name: Annotated[str | None, typer.Option(help="The model's name at the endpoint; else the manifest's, else the directory's.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="A directory in place of what a submission names.")] = None,
    python: Annotated[Path | None, typer.Option(help="Python of an environment with vLLM; else .venv-vllm, else this one.")] = None,
    log: Annotated[Path | None, typer.Option(help="Where the engine's log goes; gemq-serve-PORT.log here if not given.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that a start may take.")] = 900.0,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Don't check the checkpoint's seal.")] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the address as JSON on stdout.")] = False,
) -> None:
    """Start the packaged server on a real vLLM, wait until it answers, and stop it on Ctrl-C."""
    from gemq.serve import server as room

    output.mode.json = output.mode.json or json_
    if profile is not None and profile not in PROFILES:
        raise UsageError(f"--profile {profile!r} is unknown", f"valid are {', '.join(PROFILES)}")
    port = port or room.free_port(host)
    log = log or Path(f"gemq-serve-{port}.log")
    up = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        with room.serving(path, port=port, host=host, profile=profile, name=name, checkpoint=checkpoint, python=python, log=log,
                          timeout=timeout, verify=not no_verify) as server:
            up = True
            data = {"url": f"{server.url}/v1", "model": server.model, "pid": server.pid, "log": str(log)}
            output.result(data, f"{server.url}/v1 serves {server.model}")
            output.note(f"log: {log}; Ctrl-C stops it")
            while True:
                server.require_alive()
                time.sleep(room.HEALTH_SECONDS)
    except KeyboardInterrupt:
        if not up:
            raise Interrupted("stopped before the server was ready", f"the engine's log is {log}") from None
        output.note("stopped; no process is left")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def register(app: typer.Typer) -> None:
    """Add this room's commands to gemq's."""
    app.command("serve")(serve)
