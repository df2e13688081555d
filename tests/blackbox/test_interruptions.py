"""Stopped at random moments by signals and full disks, a run leaves no checkpoint or a whole one, and goes on to the same seal.

The moments are drawn from seeds that are in the tests' names and printed; GEMQ_BLACKBOX_SEED is added to each for other moments.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.blackbox.command import DONE, INTERRUPTED, STOPPED, Gemq, Running
from tests.blackbox.files import left_beside, names, read_json, seal_of
from tests.models.gemma3 import build_gemma3_text

LAYERS = 12
MORE = int(os.environ.get("GEMQ_BLACKBOX_SEED", "0"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve layers: long enough to be hit between two of them."""
    return build_gemma3_text(
        tmp_path_factory.mktemp("sources") / "twelve", num_hidden_layers=LAYERS, layer_types=["sliding_attention", "full_attention"] * (LAYERS // 2)
    )


@pytest.fixture(scope="module")
def undisturbed(source, options, records, tmp_path_factory) -> tuple[dict[str, str], float]:
    """The seals of runs that nothing stopped, by what they were measured on, and how long one took."""
    folder = tmp_path_factory.mktemp("undisturbed")
    gemq = Gemq(folder, folder)
    seals, seconds = {}, 0.0
    for data in ("none", str(records)):
        done = gemq("quantize", source, *with_data(options, data), "--output", folder / "out").exited(DONE)
        seals[data] = seal_of(folder / "out")
        shutil.rmtree(folder / "out")
        seconds = max(seconds, done.seconds)
    return seals, seconds


def with_data(options: list[str], data: str) -> list[str]:
    """The options with another `--eval-data`."""
    return [*options[: options.index("--eval-data") + 1], data]


def draw(seed: int) -> random.Random:
    """Random moments of a seed."""
    return random.Random(seed + 1000 * MORE)


def sleep_while_running(running: Running, seconds: float) -> None:
    """Let the command run for a while, or to its end."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and running.process.poll() is None:
        time.sleep(0.002)


def unfinished(out: Path, code: int) -> bool:
    """Whether a run that was stopped has something left to do. Beside it only its partial folder and lock may lie there.

    The signal may come after the checkpoint was published: then it is there whole, which the caller's comparison of seals shows.
    """
    left = left_beside(out)
    assert code != DONE or left == {"out"}
    if "out" in left:
        assert left <= {"out", "out.partial.lock"}
        return False
    assert left <= {"out.partial", "out.partial.lock"}
    return True


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_a_signal_while_layers_are_solved(gemq, source, options, undisturbed, work, number, seed):
    seals, seconds = undisturbed
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    running = gemq.start(*command)
    running.wait_for(lambda: (work / "out.partial").exists() or out.exists())
    moment = draw(seed).uniform(0, 0.4 * seconds)
    print(f"seed {seed}: {number.name} {moment:.3f} s after the partial folder was made")
    sleep_while_running(running, moment)
    running.send(number)
    done = running.finish().exited(DONE, -signal.SIGKILL if number == signal.SIGKILL else INTERRUPTED)
    if unfinished(out, done.code):
        gemq(*command).exited(DONE)
        assert left_beside(out) == {"out"}
    assert seal_of(out) == seals["none"]


@pytest.mark.parametrize("seed", range(2))
def test_killed_again_and_again_a_run_comes_to_the_same_end(gemq, source, options, records, undisturbed, work, seed):
    """At any moment of the command, measuring included; what one run finished is never lost to the next."""
    seals, seconds = undisturbed
    random_moments, out = draw(100 + seed), work / "out"
    command = ("quantize", source, *with_data(options, str(records)), "--output", out)
    for attempt in range(4):
        number = random_moments.choice([signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
        moment = random_moments.uniform(0.35, 1.0) * seconds
        print(f"seed {seed}, attempt {attempt}: {number.name} after {moment:.3f} s")
        running = gemq.start(*command)
        sleep_while_running(running, moment)
        running.send(number)
        if not unfinished(out, running.finish().code):
            break
    else:
        gemq(*command).exited(DONE)
        assert left_beside(out) == {"out"}
    assert seal_of(out) == seals[str(records)]


def test_interrupted_three_times_by_an_impatient_user(gemq, source, options, work):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    running = gemq.start(*command)
    assert running.wait_for(lambda: (work / "out.partial").exists())
    for _ in range(3):
        running.send(signal.SIGINT)
        time.sleep(0.05)
    unfinished(out, running.finish().exited(INTERRUPTED, DONE).code)


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_while_libraries_are_loaded_is_no_crash(gemq, source, options, work, seed):
    """From when the command loads PyTorch; what Python itself prints in the moments before cannot be gemq's."""
    running = gemq.start("quantize", source, *options, "--output", work / "out")
    assert running.wait_for(lambda: "libtorch" in Path(f"/proc/{running.process.pid}/maps").read_text())
    moment = draw(200 + seed).uniform(0, 1.5)
    print(f"seed {seed}: SIGINT {moment:.3f} s after PyTorch began to load")
    sleep_while_running(running, moment)
    running.send(signal.SIGINT)
    unfinished(work / "out", running.finish().exited(INTERRUPTED, DONE).code)


def test_resume_required_goes_on_and_never_starts_over(gemq, source, options, undisturbed, work):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    gemq(*command, "--resume", "required").exited(2)
    assert left_beside(out) <= {"out.partial.lock"}
    running = gemq.start(*command)
    assert running.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    running.send(signal.SIGKILL)
    running.finish()
    shutil.copytree(work / "out.partial", work / "other.partial")
    gemq(*command, "--resume", "required").exited(DONE)
    gemq("quantize", source, *options, "--output", work / "other", "--resume", "never").exited(DONE)
    assert seal_of(out) == seal_of(work / "other") == undisturbed[0]["none"]
    assert names(work) == {"out", "other"}


def test_an_unfinished_run_with_other_options_is_not_gone_on_with(gemq, source, options, undisturbed, work, calibration, tmp_path):
    out = work / "out"
    running = gemq.start("quantize", source, *options, "--output", out)
    assert running.wait_for(lambda: (work / "out.partial" / "journal.json").exists())
    running.send(signal.SIGKILL)
    running.finish()
    other = tmp_path / "other.jsonl"
    other.write_text("".join(reversed(calibration.read_text().splitlines(keepends=True))))
    changed = [str(other) if part == str(calibration) else part for part in options]
    gemq("quantize", source, *changed, "--output", out).exited(2)
    gemq("quantize", source, *options, "--output", out).exited(DONE)
    assert seal_of(out) == undisturbed[0]["none"]


# a full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path | None]:
    """A file system of 24 MB of its own; None where this user may not mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", folder], capture_output=True).returncode == 0
    try:
        yield folder if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", "-l", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the space that is left."""
    path = disk / "filler"
    with open(path, "wb", buffering=0) as file:
        for piece in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    if file.write(b"\0" * piece) < piece:
                        break
            except OSError:
                pass
    return path


@pytest.mark.parametrize("seed", range(3))
def test_a_disk_that_fills_up_at_a_random_moment(gemq, source, options, records, undisturbed, work, small_disk, seed):
    """Where no file system can be mounted, a limit on the size of files stands for it (the test after this one)."""
    seals, seconds = undisturbed
    folder = small_disk or work
    out, moments = folder / "out", draw(300 + seed)
    data = "none" if seed % 2 else str(records)
    command = ("quantize", source, *with_data(options, data), "--output", out)
    running = gemq.start(*command)
    assert running.wait_for(lambda: (folder / "out.partial").exists())
    moment = moments.uniform(0, 0.4 * seconds) if seed else 0.0
    print(f"seed {seed}: full {moment:.3f} s after the partial folder was made")
    sleep_while_running(running, moment)
    filler = fill(folder) if small_disk else None
    done = running.finish().exited(STOPPED, DONE)
    assert left_beside(out) <= ({"out"} if done.code == DONE else {"out.partial", "out.partial.lock"})
    if done.code == STOPPED:
        assert "space" in done.told
        assert filler is not None
        filler.unlink()
        gemq(*command).exited(DONE)
    assert seal_of(out) == seals[data]
    gemq("verify", out).exited(DONE)


@pytest.mark.parametrize("limit", [2_000, 700_000])
def test_a_limit_on_the_size_of_files_stops_a_run_that_then_goes_on(gemq, source, options, undisturbed, work, limit):
    out = work / "out"
    command = ("quantize", source, *options, "--output", out)
    done = gemq(*command, file_size_limit=limit).exited(STOPPED, 2)
    assert left_beside(out) <= {"out.partial", "out.partial.lock"}, done
    gemq(*command).exited(DONE)
    assert seal_of(out) == undisturbed[0]["none"]


def test_a_full_disk_where_a_result_goes_is_no_crash(gemq, source, records, work, small_disk):
    folder = small_disk or work
    filler = fill(folder) if small_disk else None
    result = folder / "result.json"
    limits = {} if small_disk else {"file_size_limit": 100}
    gemq("eval-ppl", source, "--data", records, "--output", result, **limits).exited(STOPPED, 2)
    if filler is not None:
        filler.unlink()
    assert not result.exists()
    gemq("eval-ppl", source, "--data", records, "--output", result).exited(DONE)
    assert read_json(result)["records"] == 16
    assert names(folder) == {"result.json"}


# measurements


@pytest.mark.parametrize("seed", [0])
def test_an_interrupted_measurement_goes_on_to_the_same_result(gemq, source, records, work, seed):
    whole = gemq("eval-ppl", source, "--data", records, "--output", work / "whole.json").exited(DONE)
    moments = draw(400 + seed)
    command = ("eval-ppl", source, "--data", records, "--output", work / "result.json")
    for attempt in range(2):
        moment = moments.uniform(0.5, 1.0) * whole.seconds
        number = moments.choice([signal.SIGINT, signal.SIGKILL])
        print(f"seed {seed}, attempt {attempt}: {number.name} after {moment:.3f} s")
        running = gemq.start(*command)
        sleep_while_running(running, moment)
        running.send(number)
        if running.finish().exited(DONE, INTERRUPTED, STOPPED, -signal.SIGKILL).code == DONE:
            break
        assert not (work / "result.json").exists()
    else:
        gemq(*command).exited(DONE)
    assert read_json(work / "result.json") == read_json(work / "whole.json")
    assert names(work) == {"result.json", "whole.json"}


def test_records_of_one_checkpoint_are_not_taken_for_those_of_another_at_its_path(gemq, source, records, work, tmp_path):
    """A measurement is stopped, other weights are put where it read, and the same command goes on: every record must be the new weights'."""
    one, other = work / "one", tmp_path / "other"
    build_gemma3_text(other, seed=7, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    build_gemma3_text(one, seed=8, num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    command = ("eval-ppl", one, "--data", records, "--output", work / "result.json")
    running = gemq.start(*command)
    if running.wait_for(lambda: any(name.startswith((".result.json", "result.json.")) for name in names(work)), 60):
        sleep_while_running(running, 0.05)
    running.send(signal.SIGKILL)
    stopped = running.finish().code != DONE
    print(f"stopped half-way: {stopped}, left: {sorted(names(work))}")
    shutil.rmtree(one)
    shutil.copytree(other, one)
    (work / "result.json").unlink(missing_ok=True)
    gemq(*command).exited(DONE, 2)
    if not (work / "result.json").exists():
        return  # refused: it says that the partial result is of other weights
    gemq("eval-ppl", other, "--data", records, "--output", work / "fresh.json").exited(DONE)
    assert read_json(work / "result.json")["per_record"] == read_json(work / "fresh.json")["per_record"]
