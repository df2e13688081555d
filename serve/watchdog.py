"""Run a command so that nothing of it outlives whoever asked for it. Standard library only; used by serve/server.py.

    python watchdog.py GRACE_SECONDS COMMAND...

Holds until the command ends, until SIGTERM, SIGINT or SIGHUP comes, or until standard input closes, which happens when the process at its
other end dies, however it dies. Then the command gets SIGTERM, and after GRACE_SECONDS everything that it left behind gets SIGKILL,
whichever session or group it moved to: this process is their subreaper, so each is among its descendants. Exits with the command's code.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.1


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def descendants(root: int) -> list[int]:
    """The living processes below `root`, zombies left out."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if state not in "ZX":
            parents[int(entry.name)] = int(parent)
    found: list[int] = []
    fresh = {root}
    while fresh:
        fresh = {pid for pid, parent in parents.items() if parent in fresh}
        found += fresh
    return found


def _signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def main(arguments: list[str]) -> int:
    """Run the command and return its exit code, 128 + N after signal N."""
    grace, command = float(arguments[0]), arguments[1:]
    stop = False

    def on_signal(number: int, frame: FrameType | None) -> None:
        nonlocal stop
        stop = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, on_signal)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # if even this process is killed, the kernel still asks the command to end
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True,
                             preexec_fn=lambda: _prctl(PR_SET_PDEATHSIG, signal.SIGTERM))
    while child.poll() is None and not stop:
        readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
        stop = stop or (bool(readable) and not os.read(sys.stdin.fileno(), 4096))
    if child.poll() is None:
        child.terminate()
    deadline = time.monotonic() + grace
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    # what the command left behind has a moment to end by itself, and is made to end then
    for number, seconds in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)):
        _signal_all(left := descendants(os.getpid()), number)
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            time.sleep(POLL_SECONDS)
            if child.poll() is not None:
                _reap()
            left = descendants(os.getpid())
        if not left:
            break
    code = child.wait()
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
