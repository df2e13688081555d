"""The `gemq` command: gathers the commands, turns errors into a sentence and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from types import FrameType
from typing import Annotated

import typer

import gemq
from gemq import output
from gemq.commands import COMMANDS
from gemq.errors import GemqError

app = typer.Typer(
    name="gemq",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Make a Gemma small and fast without making it worse: quantize, measure, package, serve.",
    epilog="Exit codes: 0 done, 1 unexpected, 2 usage or recipe, 3 over budget, 4 integrity, 75 stopped safely (run it again), 130 interrupted.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        output.result({"version": gemq.__version__}, gemq.__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes and no progress; warnings and errors stay.")] = False,
) -> None:
    output.mode.quiet = quiet


for _register in COMMANDS:
    _register(app)


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def ignore_signals() -> None:
    """Let no further SIGINT or SIGTERM change the exit code: what was asked for is done, or has ended with an error."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _code_of_app() -> object:
    try:
        return app(standalone_mode=False)  # typer turns an interrupt into 130 here, and raises in other versions
    finally:
        ignore_signals()


def run() -> int:
    """Run the command line in `sys.argv`; returns the exit code. SIGINT and SIGTERM are ignored from then on."""
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        code = _code_of_app()
    except GemqError as error:
        output.error(error.message, error.next_step)
        return error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except typer.Exit as stop:
        code = stop.exit_code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if hasattr(error, "format_message") and hasattr(error, "exit_code"):  # what typer's parser raises: a usage error
            hint = getattr(getattr(error, "ctx", None), "command_path", "gemq")
            output.error(error.format_message(), f"{hint} --help")
            return 2
        traceback.print_exc()
        output.error(f"unexpected {type(error).__name__}: {error}", "this is a bug of gemq: report it with the lines above")
        return 1
    if code == 130:
        output.error("interrupted", "run the same command again; it resumes from what was finished, if anything was")
    return code if isinstance(code, int) else 0


def main() -> None:
    """The console script."""
    sys.exit(run())
