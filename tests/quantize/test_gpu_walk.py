"""What a GPU changes about a walk, tried on the CPU: layers run anew for each unit, activations that wait in host memory, writing beside solving.

The kernels run in Triton's interpreter. What only a card can show (speed, its own arithmetic, pinned memory, streams) is benchmarks/gpu.py's and
benchmarks/gpu_kernels.py's.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import contextmanager

import pytest
import torch
from tests.models.gemma3 import build_gemma3_text
from tests.models.gemma4 import build_gemma4, build_gemma4_moe
from tests.quantize.crash_child import limit_file_size, run_child
from tests.quantize.small_jobs import make_job, run_job
from typer.testing import CliRunner

from gemq.cli import app
from gemq.errors import IntegrityError, StoppedSafely, UsageError
from gemq.quantize import gptq, refine, scales
from gemq.quantize import run as quantize_run
from gemq.quantize.activations import Activations
from gemq.quantize.gpu import Budget, parse_memory, paused_bytes, shared_kv_values
from gemq.quantize.replay import Replays
from gemq.quantize.seal import Hashed, check_seal, sha256_of, write_seal
from gemq.quantize.walk import Walk, Walker
from gemq.recipes.model import WeightScheme


def _is_tritons(module: str) -> bool:
    """Whether `module` is Python code of Triton's; its compiled part can be loaded once only, and knows no modes."""
    return module == "triton" or (module.startswith("triton.") and not module.startswith("triton._C"))


@contextmanager
def interpreted(name):
    """The module `name`, imported so that Triton interprets it; nothing of it stays.

    Triton decides when it is imported whether its own functions are interpreted, and another test of this process may have imported it.
    """
    before = os.environ.get("TRITON_INTERPRET")
    held = {key: sys.modules.pop(key) for key in list(sys.modules) if key == name or _is_tritons(key)}
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        yield importlib.import_module(name)
    finally:
        for key in [key for key in sys.modules if key == name or _is_tritons(key)]:
            del sys.modules[key]
        sys.modules.update(held)
        os.environ.pop("TRITON_INTERPRET")
        if before is not None:
            os.environ["TRITON_INTERPRET"] = before


@pytest.fixture(scope="module")
def kernels():
    with interpreted("gemq.quantize.sweep_triton") as module:
        yield module


def solver_problem(size: int, out: int, group: int, bits: int):
    torch.manual_seed(size)
    x = torch.randn(400, size) @ (torch.eye(size) + 0.2 * torch.randn(size, size)) * torch.exp(torch.randn(size))
    moments = x.T @ x / 400
    scheme = WeightScheme(num_bits=bits, strategy="group", group_size=group, observer="mse")
    weight = torch.randn(out, size)
    return weight, moments, scales.find_scales(weight, scheme, moments.diagonal()), scheme


@pytest.mark.parametrize(("size", "out", "group", "bits"), [(96, 3, 32, 4), (32, 17, 32, 8)])
def test_the_kernels_round_as_the_loops_do(kernels, monkeypatch, size, out, group, bits):
    monkeypatch.setattr(kernels, "_WIDTH", min(size, 64))  # the interpreter takes 15 ms a column and program
    weight, moments, chosen, scheme = solver_problem(size, out, group, bits)
    factor = gptq.inverse_factor(moments, 0.01, "test")
    columns = chosen.repeat_interleave(group, 1)
    ours, theirs = kernels.sweep(weight, factor, columns, scheme), gptq._sweep(weight, factor, columns, scheme, 128)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)

    integers, damping = (weight / columns).round().clamp(-(1 << bits - 1), (1 << bits - 1) - 1), 0.01 * moments.diagonal().mean()
    error = (weight - integers * columns).T.contiguous()
    found = integers.T.contiguous()
    kernels.descend(
        moments @ error + damping * error, found, chosen.T.contiguous(), moments, moments.diagonal() + damping, scheme
    )  # fmt: skip
    expected = refine._descend(weight, integers.clone(), chosen, moments, damping, scheme, 128)
    assert not torch.equal(expected, integers)
    assert torch.equal(found.T, expected)


@pytest.mark.parametrize(("out", "groups", "width", "bits"), [(33, 3, 32, 4), (2, 1, 200, 8)])
def test_the_search_of_scales_is_the_one_of_the_loop(out, groups, width, bits):
    torch.manual_seed(out)
    weight = torch.randn(out, groups, width) * torch.exp(3 * torch.randn(out, groups, 1))
    weight[0, 0] = 0
    weight[-1, -1, 1:] = 0
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1
    cost = torch.rand(1, groups, width)
    with interpreted("gemq.quantize.scales_triton") as kernel:
        ours = kernel.best_clips(weight, cost, low, high, tuple(map(scales._reach, range(10))))
    largest = weight.abs().amax(-1)
    theirs = scales._best_clip(weight, largest, scales.stored_scale(largest / ((high - low) / 2)), cost, low, high)
    same = ours == theirs
    assert same.float().mean() > 0.95  # another order of sums: two clips may be as good
    errors = [scales._rounding_error(weight, found, cost, low, high) for found in (ours, theirs)]
    torch.testing.assert_close(*errors, rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize(("tokens", "size"), [(100, 640), (7, 140)])
def test_a_hessian_of_the_kernel_is_the_one_of_torch(kernels, tokens, size):
    ours, theirs = gptq.Hessian(size), gptq.Hessian(size)
    for _ in range(2):
        x = torch.randn(tokens, size).half()
        kernels.add_outer_products(ours.sum, x, ours._block)
        ours.rows += tokens
        theirs.add(x)
    torch.testing.assert_close(ours.mean("ours"), theirs.mean("theirs"), rtol=1e-5, atol=1e-4)


def walked(source, budget):
    """What a walk shows whose units all become a tenth smaller: each unit's Hessian, and the tokens of each expert."""
    job = make_job(source, source.parent / "never", "w4a16-g32")
    seen: dict[str, torch.Tensor] = {}

    def solve(unit, weights, hessian):
        if hessian is not None:
            seen[unit.name] = hessian.mean(unit.name)
        return [weight * 0.9 for weight in weights]

    def experts(units, module, rows_of):
        module.down_proj.data.mul_(0.9)
        for expert in range(module.down_proj.shape[0]):
            seen[f"{units[0].name}[{expert}]"] = rows_of(expert)

    walk = Walk(job.plan, job.reader, job.calibration.windows, budget=budget)
    walk.run(Walker(lambda unit: None, solve, lambda index: None, experts))
    return seen, walk


@pytest.fixture(scope="module")
def small_models(tmp_path_factory):
    """Name -> (model, what a paused walk of it shows)."""
    folder = tmp_path_factory.mktemp("replay")
    kinds = ["sliding_attention", "full_attention"]
    models = {
        "shared keys and per-layer inputs": build_gemma4(folder / "e4b", num_hidden_layers=4, layer_types=kinds * 2, num_kv_shared_layers=2),
        "experts": build_gemma4_moe(folder / "moe", num_hidden_layers=2, layer_types=kinds),
    }
    return {name: (model, walked(model, None)[0]) for name, model in models.items()}


@pytest.mark.parametrize("quota", [1 << 40, 20_000, 0])
@pytest.mark.parametrize("name", ["shared keys and per-layer inputs", "experts"])
def test_layers_that_run_anew_show_each_unit_what_a_paused_forward_shows_it(small_models, monkeypatch, name, quota):
    model, paused = small_models[name]
    monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan: quota)
    monkeypatch.setattr(Walk, "_has_room_within_layers", lambda self, budget: False)
    replayed, walk = walked(model, Budget(1 << 33, torch.float32, batch_tokens=64))
    assert len(walk.batches) == 4
    assert paused.keys() == replayed.keys()
    for unit, tensor in paused.items():
        # batches of another size: sums in another order
        torch.testing.assert_close(replayed[unit], tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max()))
    assert (walk._replays[0]._activations.spilled_bytes > 0) == (quota < 1 << 40)
    assert (walk._replays[0]._scratch._end > 0) == (quota < 1 << 40 and name != "experts")
    assert "project_per_layer_inputs" not in vars(walk.skeleton.decoder)


@pytest.mark.parametrize(("share", "pausing"), [(0.9, True), (0.85, False)])
def test_batches_pause_within_a_layer_where_nearly_all_of_it_has_room(small_models, monkeypatch, share, pausing):
    model, paused = small_models["shared keys and per-layer inputs"]
    job = make_job(model, model.parent / "never", "w4a16-g32")
    tokens = sum(len(window) for window in job.calibration.windows)
    hidden = 4 * tokens * job.plan.skeleton.text.hidden_size
    needed = 2 * hidden + 4 * tokens * shared_kv_values(job.plan)
    monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan: int(share * needed) + hidden // 2)
    assert paused_bytes(job.plan, tokens, 32, torch.float32) > needed  # so that there is no room for all within layers
    replayed, walk = walked(model, Budget(1 << 33, torch.float32, batch_tokens=64))
    assert walk._replays[0]._pausing == pausing
    assert (walk._replays[0]._activations.spilled_bytes > 0) == pausing  # pausing keeps room for what nobody counts
    for unit, tensor in paused.items():
        torch.testing.assert_close(replayed[unit], tensor, rtol=1e-3, atol=1e-4 * float(tensor.abs().max()))


def test_without_room_nothing_that_a_batch_holds_lies_on_the_device_while_a_unit_is_solved(small_models, monkeypatch):
    model, _ = small_models["shared keys and per-layer inputs"]
    monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan: 0)
    job = make_job(model, model.parent / "never", "w4a16-g32")
    left: dict[str, int] = {}

    def solve(unit, weights, hessian):
        calls = [call for call in walk._replays[0]._calls if call is not None]
        pairs = [pair for call in calls for pair in (call.kwargs["shared_kv_states"] or {}).values()]
        tensors = [*(call.args[0] for call in calls), *(tensor for pair in pairs for tensor in pair)]
        left[unit.name] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        kept.update(len(call.kwargs["shared_kv_states"]) for call in calls)
        return weights

    kept: set[int] = set()
    walk = Walk(job.plan, job.reader, job.calibration.windows, budget=Budget(1 << 33, torch.float32, batch_tokens=64))
    walk.run(Walker(lambda unit: None, solve, lambda index: None))
    assert kept == {0, 1, 2}  # layers 0 and 1 leave theirs to 2 and 3
    assert set(left.values()) == {0}, left


def test_the_walk_in_bfloat16_stays_near_the_one_in_float32(tmp_path):
    source = build_gemma3_text(tmp_path / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    (exact, _), (rounded, walk) = walked(source, None), walked(source, Budget(1 << 40, torch.bfloat16, batch_tokens=2048))
    assert walk.dtype == torch.bfloat16
    for name, hessian in exact.items():
        assert (rounded[name] - hessian).norm() < 0.1 * hessian.norm(), name


def test_a_checkpoint_does_not_depend_on_where_activations_waited(tmp_path, monkeypatch, capsys):
    source = build_gemma3_text(tmp_path / "model", num_hidden_layers=1, layer_types=["full_attention"])
    seals = set()
    job = make_job(source, tmp_path / "never")
    enough = paused_bytes(job.plan, sum(map(len, job.calibration.windows)), max(map(len, job.calibration.windows)), torch.bfloat16)
    at_layers, start = set(), Replays.start
    monkeypatch.setattr(Replays, "start", lambda self: (at_layers.add(quota), start(self)))
    for quota in (enough, enough - 1, 0):
        monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan, quota=quota: quota)
        monkeypatch.setattr(quantize_run, "budget_of", lambda *given: Budget(1 << 33, torch.bfloat16, 64))
        seals.add(run_job(source, tmp_path / f"out-{quota}").seal)
        # the budget is 8 GiB, of which so much is said to be left: what lacks comes to that
        assert ("with --gpu-memory 8.1GiB it need not" in capsys.readouterr().err) == (quota < enough)
    assert len(seals) == 1
    assert at_layers == {enough - 1, 0}  # with room for all that batches hold they pause within layers


def test_activations_come_back_as_they_were_and_never_take_more_than_their_quota():
    torch.manual_seed(0)
    activations = Activations(torch.device("cpu"), 3000, 3)
    shared = [torch.randn(50) for _ in range(3)]
    for step in range(4):
        tensors = [torch.randn(100 + step, 2) for _ in range(3)]
        copies = [tensor.clone() for tensor in tensors]
        for position, tensor in enumerate(tensors):
            activations.hold(position, [tensor, shared[position], tensor[1:]])
        assert sum(tensor.untyped_storage().nbytes() for tensor in [*tensors, *shared]) <= 3000
        for _ in range(2):
            for position, (tensor, copy) in enumerate(zip(tensors, copies, strict=True)):
                activations.fetch(position)
                assert torch.equal(tensor, copy)
                activations.release(position)
    for position in range(3):
        activations.hold(position, [])
    assert activations._used == activations._spilled == 0
    assert activations.spilled_bytes > 0


@pytest.mark.parametrize(("text", "expected"), [("8GiB", 8 << 30), ("20 GB", 20 * 10**9), ("1536MiB", 1536 << 20), ("1.5gib", 3 << 29)])
def test_memory_is_read_with_its_unit(text, expected):
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "8", "GiB", "-8GiB", "8GiBs", "8 G", "1e3GiB", "nan GiB", "٨GiB", "512MiB", "0GiB", "8TiB"])
def test_other_memory_is_refused_in_a_sentence(text):
    with pytest.raises(UsageError, match="gpu-memory"):
        parse_memory(text)


def test_gpu_memory_without_a_gpu_is_refused(gemma3):
    ended = CliRunner().invoke(app, ["quantize", str(gemma3), "--device", "cpu", "--gpu-memory", "8GiB", "--output", "never"])
    assert isinstance(ended.exception, UsageError)
    assert "nothing to hold to" in ended.exception.message


def test_a_budget_below_what_the_largest_unit_needs_names_both(gemma3):
    plan = make_job(gemma3, gemma3.parent / "never").plan
    assert 0 < Budget(5 << 28, torch.bfloat16).activation_bytes(plan) < 5 << 28
    with pytest.raises(UsageError, match=r"0\.5GiB is too little .* takes 1\.1 GiB"):
        Budget(1 << 29, torch.bfloat16).activation_bytes(plan)


def beside() -> None:
    """Let this process read and write beside the solving, as it does beside a GPU."""
    quantize_run.threads_for = lambda device: 2


def beside_on_a_full_disk() -> None:
    beside()
    limit_file_size()


@pytest.fixture(scope="module")
def two_layers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("beside")
    source = build_gemma3_text(
        folder / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], max_shard_bytes=100_000
    )
    return source, run_child(source, folder / "out", "w4a16-g32").seal


@pytest.mark.parametrize(("point", "nth"), [("", 1), ("copied", 1), ("solved:layer 0", 1), ("file-written:journal.json", 1), ("sealed", 1)])
def test_writing_beside_the_solving_gives_the_same_seal_wherever_it_is_killed(two_layers, tmp_path, point, nth):
    source, seal = two_layers
    ended = run_child(source, tmp_path / "out", "w4a16-g32", die_at=point, nth=nth, before=beside)
    if point:
        assert ended.code == -9
        assert not (tmp_path / "out").exists()
        ended = run_child(source, tmp_path / "out", "w4a16-g32", before=beside)
    assert ended.seal == seal
    assert check_seal(tmp_path / "out") == []


def test_a_disk_that_fills_while_a_thread_writes_stops_safely(two_layers, tmp_path):
    ended = run_child(two_layers[0], tmp_path / "out", "w4a16-g32", before=beside_on_a_full_disk)
    assert ended.code == StoppedSafely.exit_code
    assert not (tmp_path / "out").exists()


def test_damage_in_a_layer_read_ahead_is_found(tmp_path, monkeypatch):
    source = build_gemma3_text(tmp_path / "model", num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    job = make_job(source, tmp_path / "out")
    info = job.reader.info("model.layers.1.mlp.up_proj.weight")
    with open(info.path, "r+b") as file:
        file.seek(info.offset + 64)
        file.write(torch.full((4,), float("nan"), dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    monkeypatch.setattr(quantize_run, "budget_of", lambda *given: Budget(1 << 40, torch.bfloat16))
    monkeypatch.setattr(quantize_run, "threads_for", lambda device: 2)
    with pytest.raises(IntegrityError, match=r"layers\.1\.mlp\.up_proj\.weight holds \d+ of \d+ values that are NaN"):
        quantize_run.quantize(job)
    assert not (tmp_path / "out").exists()


def test_what_was_hashed_and_changed_since_is_hashed_again(tmp_path):
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(name.encode() * 1000)
    known = {name: sha256_of(folder / name) for name in ("a.bin", "b.bin")}
    (folder / "b.bin").write_bytes(b"another" * 500)
    write_seal(folder, known=known)
    assert check_seal(folder) == []
    assert isinstance(sha256_of(folder / "a.bin"), Hashed)


def test_a_digest_that_is_known_is_not_computed_again(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"a" * 1000)
    status = (tmp_path / "a.bin").lstat()
    write_seal(tmp_path, known={"a.bin": Hashed(b"\1" * 32, 1000, status.st_mtime_ns)})
    assert [difference.path for difference in check_seal(tmp_path)] == ["a.bin"]


def test_phases_add_up_to_the_time_of_the_main_thread(tmp_path):
    source = build_gemma3_text(tmp_path / "model", num_hidden_layers=1, layer_types=["full_attention"])
    made = run_job(source, tmp_path / "out")
    own = {name: seconds for name, seconds in made.phases.items() if not name.endswith("beside")}
    assert {"forward", "statistics", "factorize", "solve", "load", "write", "record", "copy", "seal"} <= own.keys()
    assert 0 < own["forward"] + own["solve"] < sum(own.values())
    assert "phases" not in made.manifest
