"""Fixtures that several rooms' tests share."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config: pytest.Config) -> None:
    """Hear Ctrl-C even where the tests were started in the background: a shell makes its background jobs, and so their children, deaf to it."""
    config.option.loadscopereorder = False  # xdist would put the groups with the most tests first
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with a real server come first: they take longest, and the other processes do the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("vllm") is None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Where several processes share the tests, a module's go to one of them, with its fixtures, and all real servers to one: no two at a time.

    (xdist's own groups come from a mark that it writes into node ids, which pytest 9.2 no longer lets it do.)
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = nodeid.partition("::")[0]
            return "real servers" if Path(module).name.startswith("test_vllm") else module

    return ByModule(config, log)


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
