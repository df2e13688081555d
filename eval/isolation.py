"""Runs a command in user and network namespaces of its own: only the loopback, and no right over this machine beyond its own user's.

    python -m gemq.eval.isolation COMMAND...     (inside `unshare --user --map-root-user --net`)
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys

INSIDE = "GEMQ_ISOLATED"  # set in what runs inside
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_UNSHARE = ("unshare", "--user", "--map-root-user", "--net")


def problem() -> str:
    """Why namespaces can't be used here, in words; empty where they can."""
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run([*_UNSHARE, "true"], capture_output=True, text=True, check=False)
    return "" if tried.returncode == 0 else (tried.stderr.strip().splitlines() or ["unshare failed"])[-1]


def run_isolated(command: list[str]) -> int:
    """Run `command` with the loopback as its only network; returns its exit code."""
    inside = [*_UNSHARE, sys.executable, "-m", "gemq.eval.isolation", *command]
    process = subprocess.Popen(inside, env={**os.environ, INSIDE: "1"})
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue  # it has got the signal too, and ends by itself


def raise_loopback() -> None:
    """Switch the loopback interface on: it is off in a new network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))


if __name__ == "__main__":
    raise_loopback()
    os.execvp(sys.argv[1], sys.argv[1:])
