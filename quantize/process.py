"""The first moments of a follower's process, before anything is imported that takes seconds: from here on it ends with the leader."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path


def prepare() -> None:
    """Start the server that followers are forked from, which imports what they need while this process does the same for itself."""
    forkserver.set_forkserver_preload(["gemq.quantize.warm"])
    forkserver.ensure_running()


def begin(control: Connection, stderr: Path) -> None:
    """Carry out the order that comes through `control`; what is printed to standard error goes to the file `stderr`, in the walk's own folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal: the leader ends this one
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_leader() -> None:
        parent.join()
        shutil.rmtree(stderr.parent, ignore_errors=True)  # nobody else can any more
        os._exit(1)

    threading.Thread(target=end_with_leader, name="end with the leader", daemon=True).start()
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    try:
        order = control.recv()
    except EOFError:
        return
    from gemq.quantize.follower import follow

    follow(order, control)
