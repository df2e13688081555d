"""Several devices on one calibration set: what comes out is one device's, and a death on either side ends the run and loses nothing.

Two CPU processes with gloo; the followers are forked from the crash tests' server, which has imported torch once. What only GPUs can show (NCCL,
its memory, its waiting for the dead) is not tried here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch
from tests.models.gemma4 import build_gemma4, build_gemma4_moe
from tests.quantize import crash_child
from tests.quantize.small_jobs import make_job, run_job, windows
from typer.testing import CliRunner

from gemq import atomic
from gemq.calibration.media import MediaFile, MediaRecord
from gemq.calibration.sets import CalibrationSet
from gemq.cli import app
from gemq.errors import GemqError, StoppedSafely, UsageError
from gemq.quantize import run as quantize_run
from gemq.quantize.gpu import Budget, paused_bytes
from gemq.quantize.phases import Phases
from gemq.quantize.ranks import Ranks, shares_of, split
from gemq.quantize.seal import check_seal
from gemq.quantize.source_beside import Anew
from gemq.quantize.walk import Walk, Walker, batches_of
from gemq.recipes.model import Recipe, load_recipe
from gemq.shards import ShardReader

assert crash_child.run_child  # its server is the one that followers are forked from
TWO = ("cpu", "cpu")
# all that changes what a follower has to be told: targets from the source's own walk, norms and up projections that change
RECIPE = load_recipe("w4a16-gptq-awq").model_copy(update={
    "rules": load_recipe("w4a16-g32").rules, "gptq": load_recipe("w4a16-best").gptq, "name": "all-at-once",
})  # fmt: skip


def calibration(vocabulary: int = 512) -> CalibrationSet:
    """Seven batches of three lengths, the last of a length smaller than the others."""
    texts = [*windows(vocabulary, 70, 96), *windows(vocabulary, 60, 64, seed=1), *windows(vocabulary, 8, 32, seed=2)]
    return CalibrationSet.of(texts, {"kind": "test"})


def quantized(source: Path, out: Path, recipe: Recipe, **options):
    torch.set_num_threads(1)
    return run_job(source, out, recipe, calibration=calibration(), **options)


@pytest.fixture(scope="module")
def together(gemma3, tmp_path_factory):
    """An undisturbed run on two devices."""
    out = tmp_path_factory.mktemp("together") / "out"
    return quantized(gemma3, out, RECIPE, devices=TWO)


@pytest.mark.slow
def test_two_devices_whose_source_runs_layers_anew_find_what_one_finds(gemma3, tmp_path, monkeypatch):
    texts = calibration()
    plan = make_job(gemma3, tmp_path / "never", RECIPE, calibration=texts).plan
    ample = Budget(1 << 40, torch.float32, 1024)
    room = paused_bytes(plan, texts.description["tokens"] // 4, 96, torch.float32)  # half of what a half would need
    small = Budget(ample.memory_bytes - ample.activation_bytes(plan) + room, torch.float32, 1024)
    anew: list[int] = []
    enter = Anew.enter
    monkeypatch.setattr(Anew, "enter", lambda self, layer: (anew.append(1), enter(self, layer)))
    monkeypatch.setattr(quantize_run, "budget_of", lambda *given: small)
    alone, both = (quantized(gemma3, tmp_path / f"out{len(devices)}", RECIPE, devices=devices) for devices in ((), TWO))
    assert len(anew) == 2 * plan.skeleton.layer_count
    for unit, report in alone.manifest["units"].items():
        assert both.manifest["units"][unit]["output_error"] == pytest.approx(report["output_error"], rel=1e-2)
        assert both.manifest["units"][unit].get("smoothing", {}).get("alpha") == report.get("smoothing", {}).get("alpha")


def test_the_checkpoint_is_one_device_s_but_for_the_order_of_sums(gemma3, together, tmp_path):
    """Float32 sums of 10,000 rows in another order differ by about 1e-6 of themselves. That moves a weight which stands on the border
    between two integers, rarely; what a unit loses is the same to a thousandth."""
    alone = quantized(gemma3, tmp_path / "alone", RECIPE)
    assert check_seal(together.directory) == []
    assert together.manifest["devices"] == 2
    assert "devices" not in alone.manifest
    ours, theirs = ShardReader(together.directory), ShardReader(alone.directory)
    assert ours.tensors.keys() == theirs.tensors.keys()
    same = count = 0
    for name in theirs.tensors:
        mine, other = ours.read(name), theirs.read(name)
        if name.endswith("weight_packed"):
            nibbles = [torch.stack([(packed >> shift) & 15 for shift in range(0, 32, 4)]) for packed in (mine, other)]
            same += (nibbles[0] == nibbles[1]).sum().item()
            count += nibbles[0].numel()
        elif not name.endswith("weight_shape"):
            torch.testing.assert_close(mine.float(), other.float(), rtol=0.05, atol=1e-6)
    assert same / count > 0.99
    for unit, report in alone.manifest["units"].items():
        assert together.manifest["units"][unit]["output_error"] == pytest.approx(report["output_error"], rel=1e-2)
        assert together.manifest["units"][unit].get("smoothing", {}).get("alpha") == report.get("smoothing", {}).get("alpha")


class Walked:
    """What the leader's solver hears of in a walk whose weights it all halves, as two devices or one walk it."""

    def __init__(self, job, budget=None):
        self.sums: dict[str, tuple[torch.Tensor, int]] = {}
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        self.pids: list[int] = []
        ranks = None
        walker = Walker(lambda unit: None, self.solve, lambda index: None, self.experts)
        if job.devices:
            ranks = Ranks(job, shares_of(job, budget), budget, Phases())
            self.pids = ranks.pids
        try:
            texts = job.calibration.windows
            if ranks is not None:
                budget, texts, walker = ranks.join(), ranks.share.windows, ranks.led(walker)
            Walk(job.plan, job.reader, texts, budget=budget).run(walker)
            if ranks is not None:
                ranks.end()
        finally:
            if ranks is not None:
                ranks.close()

    def solve(self, unit, weights, hessian):
        if hessian is not None:
            self.sums[unit.name] = hessian.mean(unit.name), hessian.rows
        return [weight * 0.5 for weight in weights]

    def experts(self, units, module, rows_of):
        for expert in range(module.gate_up_proj.shape[0]):
            self.rows[units[0].name, expert] = rows_of(expert).clone()
        module.gate_up_proj.data.mul_(0.5)
        module.down_proj.data.mul_(0.5)


@pytest.mark.parametrize("budget", [None, Budget(8 << 30, torch.float32, 1024)], ids=["paused", "run anew"])
def test_the_leader_solves_from_the_sums_and_rows_of_all_after_weights_that_all_have(tmp_path, budget):
    """Every batch, whoever walks it, meets the halved weights of all units before; a mixture's rows come from all processes."""
    source = build_gemma4_moe(tmp_path / "moe", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    torch.set_num_threads(1)
    texts = calibration()
    alone, both = (
        Walked(make_job(source, tmp_path / "out", load_recipe("w4a16-g32"), calibration=texts, devices=devices), budget)
        for devices in ((), TWO)
    )  # fmt: skip
    assert alone.sums.keys() == both.sums.keys()
    assert len(alone.sums) == 8  # q/k/v, o, gate/up and down, twice
    assert alone.rows.keys() == both.rows.keys()
    assert alone.rows
    tokens = texts.description["tokens"]
    for name, (mean, rows) in alone.sums.items():
        assert rows == both.sums[name][1] == tokens
        torch.testing.assert_close(both.sums[name][0], mean, rtol=1e-4, atol=1e-6 * mean.diagonal().max().item())
    for place, rows in alone.rows.items():
        # the same tokens in another order: their sums, and their number but for a router's ties
        assert both.rows[place].shape == rows.shape
        torch.testing.assert_close(both.rows[place].sum(0), rows.sum(0), rtol=1e-3, atol=1e-2)


def stat_of(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["Z"]


def gone(pid: int, seconds: float = 20) -> bool:
    """Whether the process ends within that time; a zombie that nobody has waited for has ended."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if stat_of(pid)[0] in "ZX":
            return True
        time.sleep(0.02)
    return False


def disturb(monkeypatch, point, act):
    """Call `act(pids)` with the followers' processes when a run passes the write point `point`."""
    pids: list[int] = []
    original = Ranks._start

    def start(self, *given):
        original(self, *given)
        pids.extend(self.pids)

    monkeypatch.setattr(Ranks, "_start", start)
    monkeypatch.setattr(atomic, "write_point", lambda name: act(pids) if name == point else None)
    return pids


def test_a_killed_follower_ends_the_run_which_then_goes_on_to_the_same_bytes(gemma3, together, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        disturb(patched, "written:layers.1.self_attn.o_proj", lambda pids: os.kill(pids[0], signal.SIGKILL))
        with pytest.raises(StoppedSafely, match=r"the process \d+ on cpu was killed by SIGKILL") as raised:
            quantized(gemma3, out, RECIPE, devices=TWO)
    assert "run the same command" in raised.value.next_step
    assert not out.exists()
    with pytest.raises(UsageError, match="with another number of devices"):
        quantized(gemma3, out, RECIPE)
    solved: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr(atomic, "write_point", solved.append)
        again = quantized(gemma3, out, RECIPE, devices=TWO, resume="required")
    assert "written:layers.1.self_attn.qkv_proj" in solved
    assert "written:layers.0.self_attn.qkv_proj" not in solved  # restored, in the follower too
    assert again.seal == together.seal


def test_an_interrupted_leader_leaves_no_process_behind(gemma3, tmp_path, monkeypatch):
    def interrupt(pids):
        raise KeyboardInterrupt

    pids = disturb(monkeypatch, "solved:layer 0", interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantized(gemma3, tmp_path / "out", RECIPE, devices=TWO)
    assert len(pids) == 1
    assert all(gone(pid) for pid in pids)


def _lead_and_die(source: Path, out: Path, told: str) -> None:
    """In a process of its own: write the follower's pid to `told`, and be killed in the second layer."""
    patched = pytest.MonkeyPatch()
    tempfile.tempdir = str(Path(told).parent)

    def die(pids):
        Path(told).write_text(f"{pids[0]}")
        os.kill(os.getpid(), signal.SIGKILL)

    disturb(patched, "written:layers.1.mlp.gate_up_proj", die)
    quantized(source, out, RECIPE, devices=TWO)


@pytest.mark.slow
def test_a_killed_leader_takes_the_follower_along_and_the_next_run_gives_the_same_bytes(gemma3, together, tmp_path):
    process = crash_child._CONTEXT.Process(target=_lead_and_die, args=(gemma3, tmp_path / "out", str(tmp_path / "pid")))
    process.start()
    process.join(240)
    assert process.exitcode == -signal.SIGKILL
    assert gone(int((tmp_path / "pid").read_text()))
    assert list(tmp_path.glob("gemq-devices-*")) == []
    assert quantized(gemma3, tmp_path / "out", RECIPE, devices=TWO, resume="required").seal == together.seal


def test_what_a_follower_can_t_do_is_told_with_its_reason(gemma3, tmp_path):
    """Its share is a recording that is not there; the leader's is text."""
    source = build_gemma4(tmp_path / "e4b")
    lost = MediaRecord(tuple(range(20, 4020)), (MediaFile("audio", tmp_path / "lost.wav", "0" * 64),), "line 1")
    mixed = CalibrationSet.of(windows(512, 2, 32), {"kind": "test"}, [lost])
    job = make_job(source, tmp_path / "out", load_recipe("w4a16-g32"), calibration=mixed, devices=TWO)
    shares = shares_of(job, None)
    assert [len(share.records) for share in shares] == [1, 0]
    ranks = Ranks(job, shares[::-1], None, Phases())

    def walk():
        ranks.join()
        walker = ranks.led(Walker(lambda unit: None, lambda unit, weights, hessian: weights, lambda index: None))
        Walk(job.plan, job.reader, ranks.share.windows).run(walker)

    try:
        with pytest.raises(GemqError, match=r"cpu: line 1: there is no file .*lost.wav"):
            walk()
    finally:
        ranks.close()


def test_shares_are_whole_batches_of_about_the_same_number_of_tokens():
    texts = calibration()
    record = MediaRecord(tuple(range(1500)), (), "line 9")
    mixed = CalibrationSet.of(texts.windows, {"kind": "test"}, [record])
    whole = [tuple(map(tuple, batch.tolist())) for batch in batches_of(mixed.windows)]
    for count in (2, 3):
        shares = split(mixed, count, 2048)
        batches = [tuple(map(tuple, batch.tolist())) for share in shares for batch in batches_of(share.windows)]
        assert sorted(batches) == sorted(whole)
        assert [share.records for share in shares if share.records] == [(record,)]
        loads = [share.tokens for share in shares]
        assert sum(loads) == mixed.description["tokens"]
        assert max(loads) - min(loads) <= 2048
    with pytest.raises(UsageError, match="names 9 devices, and the calibration set makes 8 batches"):
        split(mixed, 9, 2048)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--devices", "cpu"], "names one device"),
        (["--devices", "cpu,"], "--devices is 'cpu,'"),
        (["--devices", "cpu,tpu"], "'tpu'"),
        (["--devices", "cpu,auto"], "leaves open which"),
        (["--devices", "97,98"], "CUDA devices"),
        (["--devices", "cpu,cpu", "--device", "cpu"], "are given"),
        (["--devices", "cpu,cpu", "--ppl-budget", "5%"], "a search builds and measures on one device"),
        (["--devices", "cpu,cpu", "--recipe", "fp8"], "looks at no calibration set"),
        (["--devices", "cpu,cpu", "--gpu-memory", "2GiB"], "nothing to hold to"),
        (["--devices", "cpu,cpu", "--recipe", "TUNED"], "has `tuning`"),
    ],
)
def test_devices_that_can_t_share_a_walk_are_refused_before_any_work(gemma3, tmp_path, options, why):
    tuned = load_recipe("w4a16-g32").model_dump(mode="json", exclude_none=True) | {"tuning": {}}
    (tmp_path / "tuned.yaml").write_text(Recipe.model_validate(tuned).to_yaml())
    given = [str(tmp_path / "tuned.yaml") if option == "TUNED" else option for option in options]
    ended = CliRunner().invoke(app, ["quantize", str(gemma3), "--output", str(tmp_path / "out"), *given])
    assert isinstance(ended.exception, UsageError)
    assert why in ended.exception.message
    assert ended.exception.next_step
    assert not (tmp_path / "out.partial").exists()


PREPARED = """
import multiprocessing, sys
from gemq.quantize.process import prepare

def modules(pipe):
    pipe.send(["transformers.modeling_utils" in sys.modules, "gemq.quantize.follower" in sys.modules, sys.modules.get("sklearn", 0) is None])

if __name__ == "__main__":
    prepare()
    assert "torch" not in sys.modules, "the server is to import while this process does"
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=modules, args=(theirs,))
    process.start()
    print(*mine.recv())
    process.join()
"""


@pytest.mark.slow
def test_a_follower_finds_imported_what_it_needs(tmp_path):
    script = tmp_path / "prepared.py"
    script.write_text(PREPARED)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
