"""The `gemq` command of the environment that runs the tests, as a user's shell starts it; every output is searched for a crash."""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GEMQ = Path(sys.executable).parent / "gemq"
DONE, USAGE, OVER_BUDGET, INTEGRITY, STOPPED, INTERRUPTED = 0, 2, 3, 4, 75, 130
DOCUMENTED = (DONE, USAGE, OVER_BUDGET, INTEGRITY, STOPPED, INTERRUPTED)
CRASHED = ("Traceback", "bug of gemq")
TIMEOUT_S = 240.0

_PR_CAPBSET_DROP, _DAC_OVERRIDE, _DAC_READ_SEARCH = 24, 1, 2


@dataclass(frozen=True)
class Done:
    """A command that ended: its exit code (negative: the signal that killed it), what it printed, how long it took."""

    arguments: tuple[str, ...]
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def json(self) -> Any:
        """What `--json` printed."""
        return json.loads(self.stdout)

    @property
    def told(self) -> str:
        """Both outputs as one line of text, so that a sentence that a terminal would wrap is found."""
        return " ".join((self.stdout + "\n" + self.stderr).split())

    def exited(self, *codes: int) -> Done:
        """This command, if it ended with one of `codes`; fails the test otherwise."""
        assert self.code in codes, f"exit code {self.code}, expected {' or '.join(map(str, codes))}\n{self}"
        return self

    def __str__(self) -> str:
        return f"$ gemq {' '.join(self.arguments)}\nexit {self.code} after {self.seconds:.1f} s\n{self.stdout[-2500:]}\n{self.stderr[-2500:]}"


def environment(home: Path, **more: str) -> dict[str, str]:
    """A user's environment without what could lead outside: an own home, no hub, no proxy, one thread."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("GEMQ_", "HF_", "XDG_")) and "proxy" not in key.lower()}
    kept.pop("PYTHONDONTWRITEBYTECODE", None)
    return {**kept, "HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "200", **more}


class Running:
    """A command that was started."""

    def __init__(self, process: subprocess.Popen[str], arguments: tuple[str, ...]) -> None:
        self.process = process
        self.arguments = arguments
        self.started = time.monotonic()

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the command, if it still runs."""
        if self.process.poll() is None:
            self.process.send_signal(number)

    def wait_for(self, condition: Callable[[], bool], seconds: float = TIMEOUT_S) -> bool:
        """Wait until `condition` holds or the command has ended; whether it held first."""
        limit = time.monotonic() + seconds
        while not condition():
            if self.process.poll() is not None:
                return condition()
            assert time.monotonic() < limit, f"after {seconds} s nothing of what was waited for\n{self.arguments}"
            time.sleep(0.002)
        return True

    def finish(self, seconds: float = TIMEOUT_S) -> Done:
        """Wait for the end. Fails the test at a crash, or at an exit code that gemq does not document."""
        try:
            stdout, stderr = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            stdout, stderr = self.process.communicate()
            raise AssertionError(f"gemq {' '.join(self.arguments)} did not end within {seconds} s\n{stdout}\n{stderr}") from None
        done = Done(self.arguments, self.process.returncode, stdout, stderr, time.monotonic() - self.started)
        for sign in CRASHED:
            assert sign not in stdout + stderr, f"{sign!r} in the output\n{done}"
        assert done.code in DOCUMENTED or done.code == -signal.SIGKILL, f"exit code {done.code} is not a documented one\n{done}"
        return done


class Gemq:
    """Starts gemq with a home of its own; `cwd` is the folder that a command runs in unless it is given another."""

    def __init__(self, home: Path, cwd: Path) -> None:
        self.home = home
        self.cwd = cwd

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        obey_permissions: bool = False,
        file_size_limit: int | None = None,
    ) -> Running:
        """Start a command. obey_permissions: as root too, file modes count. file_size_limit: bytes that a file may have."""

        def prepare() -> None:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's children would ignore it
            if obey_permissions and os.geteuid() == 0:
                for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
                    if ctypes.CDLL(None).prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0):
                        raise OSError("a capability can't be dropped")
            if file_size_limit is not None:
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_size_limit, file_size_limit))

        told = tuple(map(str, arguments))
        process = subprocess.Popen(
            [GEMQ, *told], cwd=cwd or self.cwd, env=environment(self.home, **(env or {})), preexec_fn=prepare, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        return Running(process, told)

    def __call__(self, *arguments: str | Path, **options: Any) -> Done:
        """Run a command to its end."""
        return self.start(*arguments, **options).finish()


@contextmanager
def stopped(running: Running) -> Iterator[None]:
    """Hold a command where it is (SIGSTOP), so that what happens meanwhile happens beside a live process."""
    running.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, running.process.pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        running.process.send_signal(signal.SIGCONT)
