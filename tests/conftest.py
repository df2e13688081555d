"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C even where the tests were started in the background: a shell makes its background jobs, and so their children, deaf to it."""
    config.option.loadscopereorder = False  # xdist would put the groups with the most tests first
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups in its own hook of this name, which would otherwise come before this one
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where several processes share the tests, a module's go to one of them, with its fixtures, and all real servers to one: no two at a time.

    The servers come first, since they take longest: the other processes do the rest meanwhile.
    """
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)
    for item in items:
        group = "vllm" if item.get_closest_marker("vllm") else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def _plain_output() -> None:
    """Each test starts as a command line does: without what `--json` or `--quiet` of an earlier one has set."""
    from gemq import output

    output.mode.json = output.mode.quiet = False


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real evaluation text and vectors beside the project; where CI runs it must be there."""
    found = Path(os.environ.get("GEMQ_SHARED_DATA", ROOT.parent / "shared" / "data"))
    if not found.is_dir():
        if os.environ.get("CI") == "true":
            pytest.fail(f"{found} is missing, and CI must not pass without it")
        pytest.skip(f"{found} is not here")
    return found


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The demo model's directory: real weights, made once in the cache ($GEMQ_CACHE, or its default place) and used again."""
    from gemq.demo import build_demo

    return build_demo()
