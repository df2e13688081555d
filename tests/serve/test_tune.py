"""What `gemq tune` promises, with a stand-in for vLLM: what is faster and decodes the same wins, nothing else does, and a kill costs one trial."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from fake_vllm import seal, wait_until
from switchable_vllm import make_checkpoint, make_environment
from typer.testing import CliRunner

from gemq import atomic, output
from gemq.commands import tune as command
from gemq.errors import IntegrityError, StoppedSafely, UsageError
from gemq.serve import trials, tune_job
from gemq.serve.engine import EngineFacts, ask_engine
from gemq.serve.profile import read_profile
from gemq.serve.trials import Question, Servers, run_trial
from gemq.serve.tune import Journal
from gemq.serve.verdict import Criterion, Trial

RUN = """
import sys
import typer
from gemq import output
from gemq.commands.tune import register
from gemq.errors import GemqError
app = typer.Typer()
app.callback()(lambda: None)
register(app)
try:
    sys.exit(app(["tune", *sys.argv[1:]], standalone_mode=False))
except GemqError as error:
    output.error(error.message, error.next_step)
    sys.exit(error.exit_code)
"""
NO_GAIN = ("slower", "not faster beyond the noise")  # which of them is a matter of the machine's noise
_ASKED: dict[tuple[str, tuple[int, ...]], EngineFacts] = {}
QUICK = ("--requests", 1, "--tokens", 6, "--pairs", 4, "--greedy-prompts", 2, "--greedy-tokens", 12, "--workload", "WORKLOAD")


@pytest.fixture(scope="session")
def cpu_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="session")
def gpu_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("gpu"), "0.26.0")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint with a seal, and an environment in which starts are counted."""
    folder = make_checkpoint(tmp_path / "model")
    seal(folder)
    (tmp_path / "load.yaml").write_text("name: quick\nloads: [{name: quick, requests: 1, output_tokens: 10, input_tokens: 12}]\n")
    monkeypatch.setenv("FAKE_STARTS", str(tmp_path / "starts"))
    return folder


@pytest.fixture(autouse=True)
def _asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment of these tests is asked for its switches once."""
    def ask(python: Path, heads: Sequence[int], backends: Sequence[str]) -> EngineFacts:
        key = (str(python), tuple(heads))
        if key not in _ASKED:
            _ASKED[key] = ask_engine(python, heads, backends)
        return _ASKED[key]

    monkeypatch.setattr(tune_job, "ask_engine", ask)


def arguments(model: Path, python: Path, *more: object) -> list[str]:
    quick = [str(model.parent / "load.yaml") if each == "WORKLOAD" else str(each) for each in QUICK]
    return [str(model), "--python", str(python), "--servers", "2", *quick, *map(str, more), "--json"]


def run(model: Path, python: Path, *more: object) -> dict[str, Any]:
    """`gemq tune --json`; raises what it raises."""
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    result = CliRunner().invoke(app, ["tune", *arguments(model, python, *more)])
    output.mode.json = False
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def behave(monkeypatch: pytest.MonkeyPatch, **words: dict[str, Any]) -> None:
    monkeypatch.setenv("FAKE_BEHAVIOR", json.dumps(words))


def verdicts(found: dict[str, Any]) -> dict[str, str]:
    return {f"{trial['switch']} {trial['value']}": trial["verdict"] for trial in found["trials"]}


def starts(model: Path) -> list[str]:
    return (model.parent / "starts").read_text().splitlines()


@pytest.mark.slow
def test_what_is_faster_and_decodes_the_same_wins_and_nothing_else(model: Path, cpu_python: Path, tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, **{"--enforce-eager=False": {"speed": 3, "shift": True}, "VLLM_CPU_OMP_THREADS_BIND=auto": {"speed": 3},
                           "--block-size=32": {"speed": 3, "unscored": True}, "--block-size=64": {"fail": "ValueError: blocks of 64 are not taken"},
                           "VLLM_CPU_ATTN_SPLIT_KV=0": {"dies": 3}})
    out = tmp_path / "out"
    switches = [part for name in ("compilation", "threads", "block-size", "split-kv") for part in ("--switch", name)]
    found = run(model, cpu_python, *switches, "--output", out)
    told = verdicts(found)
    assert told["compilation compiled"].startswith("faster, but 2 of 2 prompts decode to other ids")
    assert told["threads bound"] == "kept"
    assert "prompt_logprobs are not there" in told["block-size 32"]
    assert "blocks of 64 are not taken" in told["block-size 64"]
    assert "blocks of 64" in (out / "logs" / "block-size-64-threads-bound.log").read_text()
    assert "out of luck" in told["split-kv off"]
    assert told["all together"] == "kept"
    assert found["settings"] == {"threads": "bound"}
    profile = read_profile(out / "profile.json")
    assert profile.environment == {"VLLM_CPU_OMP_THREADS_BIND": "auto"}
    assert profile.measured is not None
    assert 2 < profile.measured.ratio < 4
    assert profile.measured.confirmed
    written = json.loads((out / "tune.json").read_text())
    assert written.pop("engine")["vllm"] == "0.32.0"
    assert written.pop("loads")[0]["output_tokens"] == 6
    assert written == found
    assert not (out / "candidates").exists()
    with pytest.raises(UsageError, match="exists already"):
        run(model, cpu_python, "--output", out)


@pytest.mark.slow
def test_on_a_gpu_kernels_behind_vllms_own_are_reached_and_the_same_kernel_is_not_measured(
        model: Path, gpu_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", f"{gpu_python.parent}:{os.environ['PATH']}")
    behave(monkeypatch, **{"VLLM_DISABLED_KERNELS=MacheteLinearKernel": {"speed": 3}, "--performance-mode=interactivity": {"speed": 0.5},
                           "VLLM_DISABLED_KERNELS=MacheteLinearKernel,MarlinLinearKernel": {"speed": 0.3}})
    found = run(model, gpu_python, *[part for name in ("kernel", "attention", "performance-mode") for part in ("--switch", name)],
                "--output", tmp_path / "out", "--no-confirm")  # fmt: skip
    told = verdicts(found)
    assert told["kernel MarlinLinearKernel"] == "kept"
    assert told["kernel ExllamaLinearKernel"] in NO_GAIN
    assert told["attention TRITON_ATTN"].startswith("vLLM takes the same as before: MarlinLinearKernel, TRITON_ATTN")
    assert told["performance-mode interactivity"] in NO_GAIN
    profile = read_profile(tmp_path / "out" / "profile.json")
    assert profile.environment == {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}
    assert (profile.made_for.card, profile.made_for.vllm, profile.made_for.platform) == ("Stand-in H1", "0.26.0", "cuda")
    assert profile.measured is not None
    assert not profile.measured.confirmed
    left = {(each["switch"], each["value"]): each["why"] for each in found["left_out"]}
    assert "flashinfer" in left["attention", "FLASHINFER"]
    assert left["performance-mode", "throughput"] == "vLLM 0.26.0 takes balanced, interactivity"
    # several servers share the card by what they are told, not by what each finds free
    assert all("--kv-cache-memory-bytes" in line and "--gpu-memory-utilization 0.450" in line for line in starts(model))


def test_a_head_that_a_backend_does_not_take_costs_no_start(tmp_path: Path, gpu_python: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{gpu_python.parent}:{os.environ['PATH']}")
    wide = make_checkpoint(tmp_path / "wide", heads=512, quantized=False)
    plan = run(wide, gpu_python, "--dry-run")
    left = {(each["switch"], each["value"]): each["why"] for each in plan["left_out"]}
    assert left["attention", "FLASH_ATTN"] == "it has no heads of 512"
    assert left["kernel", ""] == "the checkpoint's linears are not quantized"
    assert ("attention", "TRITON_ATTN") in {(each["switch"], each["value"]) for each in plan["candidates"]}
    assert left["runner", "v2"] == "vLLM 0.26.0 doesn't read VLLM_USE_V2_MODEL_RUNNER"
    assert not (tmp_path / "starts").exists()


def test_a_server_that_spins_is_never_up_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    up: list[str] = []
    seen: list[tuple[str, ...]] = []

    @contextlib.contextmanager
    def start(settings: dict[str, str]) -> Iterator[Callable[[], Any]]:
        name = settings.get("waiting", "baseline")
        up.append(name)
        yield lambda: SimpleNamespace(url=f"http://{name}", model="m", log=Path(os.devnull))
        up.remove(name)

    def speed(running: Any, question: Question) -> float:
        seen.append(tuple(up))
        return 100.0

    monkeypatch.setattr(trials, "speed", speed)
    monkeypatch.setattr(trials.Endpoint, "open", lambda url: url)
    question = Question((), {}, 3, (), 1, ())
    for alone, most in ((True, 1), (False, 2)):
        seen.clear()
        servers = Servers(2, start)
        trial = Trial("waiting", "spinning", {"waiting": "spinning"}, {})
        run_trial(trial, servers, question, Criterion(0.99), [], alone=alone)
        assert len(trial.pairs) == 3
        assert max(map(len, seen)) == most
        servers.close()
        assert not up


def test_nothing_starts_while_a_server_is_measured_and_a_failed_start_is_told_to_its_own_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    starting: list[str] = []
    launched: list[str] = []

    @contextlib.contextmanager
    def start(settings: dict[str, str]) -> Iterator[Callable[[], Any]]:
        name = next(iter(settings.values()), "baseline")
        starting.append(name)
        launched.append(name)

        def ready() -> Any:
            starting.remove(name)
            if name == "broken":
                raise StoppedSafely("it did not start", "look into its log")
            return SimpleNamespace(url=f"http://{name}", model="m", log=Path(os.devnull))

        yield ready

    beside: list[tuple[str, ...]] = []
    monkeypatch.setattr(trials, "speed", lambda running, question: beside.append(tuple(starting)) or 100.0)
    monkeypatch.setattr(trials.Endpoint, "open", lambda url: url)
    servers = Servers(4, start)
    servers.ahead([{}, {"kernel": "fine"}, {"kernel": "broken"}, {"kernel": "later"}])
    assert len(starting) == 4
    fine, broken, later = (Trial("kernel", name, {"kernel": name}, {}) for name in ("fine", "broken", "later"))
    for trial in (fine, broken, later):
        run_trial(trial, servers, Question((), {}, 3, (), 1, ()), Criterion(0.99), [])
        servers.drop(trial.settings)
    assert len(beside) == 12
    assert set(beside) == {()}
    assert (fine.failure, broken.failure, later.failure) == ("", "it did not start", "")
    assert launched == ["baseline", "fine", "broken", "later"], "none was started twice"
    servers.close()


def test_a_start_that_hangs_costs_its_timeout_and_minutes_end_the_search(model: Path, cpu_python: Path, tmp_path: Path,
                                                                         monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, **{"VLLM_CPU_ATTN_SPLIT_KV=0": {"hang": True}})
    monkeypatch.setattr(Journal, "spent", property(lambda journal: 0.0 if len(journal.trials) < 2 else 3601.0))
    start = tune_job.starting
    # the baseline may be slow to start on a busy machine
    monkeypatch.setattr(tune_job, "starting", lambda path, **how: start(path, **how | {"timeout": 1.0 if "split-kv" in how["profile"] else 60.0}))
    found = run(model, cpu_python, "--switch", "block-size", "--switch", "split-kv", "--output", tmp_path / "out")
    assert "does not answer after 1 s" in verdicts(found)["split-kv off"]
    assert found["profile"] is None
    assert not (tmp_path / "out" / "profile.json").exists()
    assert (tmp_path / "out" / "tune.json").is_file()
    assert {each["value"] for each in found["left_out"] if each["why"] == "no time was left: give more --minutes"} == {"32", "64"}
    assert len(starts(model)) <= 3, "nothing was started after the time was over"


@pytest.mark.slow
def test_a_stopped_search_goes_on_where_it_was(model: Path, cpu_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    behave(monkeypatch, **{"--block-size=32": {"speed": 3}, "--block-size=64": {"speed": 0.8}, "VLLM_CPU_ATTN_SPLIT_KV=0": {"speed": 0.5}})
    out, journal = tmp_path / "out", tmp_path / "out.partial" / "tried.jsonl"
    more = ("--switch", "block-size", "--switch", "split-kv", "--output", out, "--no-confirm")

    def stop(number: signal.Signals, after: str) -> int:
        """Stop a search when the server that follows the trial `after` is up."""
        with open(tmp_path / "err", "w") as errors:
            process = subprocess.Popen([sys.executable, "-c", RUN, *arguments(model, cpu_python, *more)], stdout=subprocess.DEVNULL, stderr=errors,
                                       start_new_session=True)  # fmt: skip
            before = len(starts(model)) if (tmp_path / "starts").exists() else 0

            def under_way() -> bool:
                assert process.poll() is None, (tmp_path / "err").read_text()
                return journal.exists() and after in journal.read_text() and len(starts(model)) > before

            wait_until(under_way, 90, f"{after} is in the journal")
            process.send_signal(number)
            return process.wait(60)

    assert stop(signal.SIGINT, '"switch": "baseline"') == 130, (tmp_path / "err").read_text()
    assert "1 trials are kept" in (tmp_path / "err").read_text()
    first = len(starts(model))
    assert stop(signal.SIGKILL, '"switch": "split-kv"') == -9, (tmp_path / "err").read_text()
    assert len(starts(model)) - first <= 3, "the baseline was not measured again: one server of it, and a candidate or two"
    assert not out.exists()
    with open(journal, "a") as file:
        file.write('{"trial": {"switch": "half a li')  # as a kill may leave it
    with pytest.raises(UsageError, match=r"another search \(it differs in greedy\)"):
        run(model, cpu_python, *more, "--greedy-tokens", 13)
    second = len(starts(model))
    for folder in ("candidates", "caches"):
        (tmp_path / "out.partial" / folder / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="inside"):
        run(model, cpu_python, *more, "--output", model / "out")
    found = run(model, cpu_python, *more)
    for folder in ("candidates", "caches"):
        assert [path.name for path in (out / folder).iterdir()] == ["notes.txt"]
    assert not (out / atomic.RECORD).exists()
    assert found["settings"] in ({}, {"block-size": "32"}), "on a busy machine it may be lost in the noise: what goes on is what counts here"
    assert [trial["value"] for trial in found["trials"]] == ["again", "off", "32", "64"]
    assert not any("VLLM_CPU" in line for line in starts(model)[second:])
    assert len(starts(model)) - second <= 3, "the incumbent and the two values that were left"
    assert not (tmp_path / "out.partial.lock").exists()


@pytest.mark.parametrize(("more", "named"), [
    (("--output", "OUT", "--switch", "turbo"), "valid are kernel"), (("--output", "OUT", "--tolerance", "-1"), "--tolerance"),
    (("--output", "OUT", "--profile", "fast"), "--profile 'fast'"), (("--output", "OUT", "--drafter", "."), "--drafter"),
    (("--output", "OUT", "--workload", "none"), "workload"), ((), "--output is missing"),
    (("--output", "OUT", "--tokens", "300"), "don't fit into the 256"), (("--output", "OUT", "--greedy-tokens", "300"), "--greedy-tokens"),
    (("--output", "OUT", "--switch", "kernel"), "there is nothing to try"), (("--output", "OUT", "--python", "/nowhere/python"), "/nowhere/python"),
])  # fmt: skip
def test_bad_input_is_told_before_anything_starts(more: tuple[str, ...], named: str, model: Path, cpu_python: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        run(model, cpu_python, *[str(tmp_path / "out") if each == "OUT" else each for each in more])
    assert named in caught.value.message + caught.value.next_step
    assert not (tmp_path / "starts").exists()
    assert not (tmp_path / "out").exists()


def test_targets_that_cannot_be_started_are_refused(model: Path, cpu_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "no-model").mkdir()
    for target in ("http://127.0.0.1:1", str(tmp_path / "nothing"), str(tmp_path / "no-model")):
        app = typer.Typer()
        app.callback()(lambda: None)
        command.register(app)
        result = CliRunner().invoke(app, ["tune", target, *arguments(model, cpu_python, "--dry-run")[1:]])
        output.mode.json = False
        assert isinstance(result.exception, UsageError)
        assert "submission" in result.exception.next_step + result.exception.message
    monkeypatch.setenv("VLLM_DISABLED_KERNELS", "X")
    with pytest.raises(UsageError, match="VLLM_DISABLED_KERNELS is set here"):
        run(model, cpu_python, "--dry-run")


def test_one_server_at_a_time_does_and_a_baseline_that_never_repeats_itself_is_refused(
        model: Path, cpu_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    make = tune_job.start_with

    def start_with(*some: Any) -> Callable[[dict[str, str]], Any]:
        start = make(*some)

        def other(settings: dict[str, str]) -> Any:
            monkeypatch.setenv("FAKE_BEHAVIOR", json.dumps({"--host=127.0.0.1": {"shift": "baseline" in settings}}))
            return start(settings)

        return other

    monkeypatch.setattr(tune_job, "start_with", start_with)
    with pytest.raises(IntegrityError, match="decode every prompt to other ids"):
        run(model, cpu_python, "--switch", "split-kv", "--servers", 1, "--pairs", 2, "--output", tmp_path / "out")
    assert len(starts(model)) == 4, "baseline, again, baseline, again: what is up is used"
