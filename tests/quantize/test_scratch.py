"""The file that per-layer inputs wait in where a GPU has no room for them."""

from __future__ import annotations

import os
import threading
import time

import pytest
import torch
from tests.models.gemma4 import build_gemma4
from tests.quantize.small_jobs import run_job

from gemq.errors import StoppedSafely
from gemq.quantize import run as quantize_run
from gemq.quantize import scratch as scratch_room
from gemq.quantize.activations import Activations
from gemq.quantize.gpu import Budget
from gemq.quantize.scratch import ByLayer, Scratch


@pytest.mark.parametrize("quota", [10_000, 0])
@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 2, 1, 2, 0]])
def test_per_layer_inputs_are_given_layer_by_layer(tmp_path, quota, order):
    inputs = torch.randn(2, 5, 3, 8, dtype=torch.bfloat16)
    activations, scratch = Activations(torch.device("cpu"), quota, 1, reserved=100), Scratch(tmp_path)
    kept = ByLayer(inputs, activations, scratch)
    taken = [kept[:, :, layer, :] for layer in order]
    for layer, given in zip(order, taken, strict=True):
        assert torch.equal(given, inputs[:, :, layer, :])
    assert activations._used == (inputs.nbytes if quota else 0)
    assert scratch._end == (0 if quota else inputs.nbytes)
    scratch.close()


def test_many_batches_come_back_whole_through_pieces_smaller_than_they_are(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_room, "_PIECE_BYTES", 100)
    activations, scratch = Activations(torch.device("cpu"), 0, 1), Scratch(tmp_path)
    batches = [torch.randn(3, 7, 4, 8) for _ in range(20)]
    kept = [ByLayer(inputs, activations, scratch) for inputs in batches]
    for layer in range(4):
        for inputs, by_layer in zip(batches, kept, strict=True):
            assert torch.equal(by_layer[:, :, layer, :], inputs[:, :, layer, :])
    scratch.close()


def test_what_waits_to_be_written_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_room, "_PIECE_BYTES", 1 << 10)
    going, wrote, most = threading.Event(), os.pwrite, []

    def slow(descriptor, raw, place):
        going.wait()
        return wrote(descriptor, raw, place)

    monkeypatch.setattr(scratch_room.os, "pwrite", slow)
    scratch = Scratch(tmp_path)
    read = []
    filler = threading.Thread(target=lambda: read.append(scratch.put(torch.arange(1 << 14))))
    filler.start()
    deadline = time.monotonic() + 10
    while scratch._pool._work_queue.qsize() < scratch_room._PIECES - 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    most.append(scratch._pool._work_queue.qsize() + 2)
    assert not read  # it waits for room
    going.set()
    filler.join()
    assert most == [scratch_room._PIECES]
    back = torch.empty(1 << 14, dtype=torch.int64)
    read[0](0, back)
    assert torch.equal(back, torch.arange(1 << 14))
    scratch.close()


def test_the_file_has_no_name_and_is_gone_once_closed(tmp_path):
    scratch = Scratch(tmp_path)
    scratch.put(torch.zeros(1000))
    assert list(tmp_path.iterdir()) == []
    descriptor = scratch._file.fileno()
    scratch.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_disk_without_room_for_it_stops_safely(tmp_path, monkeypatch):
    kinds = ["sliding_attention", "full_attention"]
    source = build_gemma4(tmp_path / "model", num_hidden_layers=4, layer_types=kinds * 2, num_kv_shared_layers=2)
    monkeypatch.setattr(Budget, "activation_bytes", lambda self, plan: 0)
    monkeypatch.setattr(quantize_run, "budget_of", lambda *given: Budget(1 << 33, torch.float32, 64))

    def full_for_scratch(call):
        def filling(descriptor, *given):
            if os.fstat(descriptor).st_nlink == 0:
                raise OSError(28, "No space left on device")
            return call(descriptor, *given)

        return filling

    for name in ("posix_fallocate", "pwrite", "preadv"):
        call = getattr(os, name)
        monkeypatch.setattr(scratch_room.os, name, full_for_scratch(call))
        with pytest.raises(StoppedSafely):
            run_job(source, tmp_path / "out")
        monkeypatch.setattr(scratch_room.os, name, call)
        assert not (tmp_path / "out").exists()
    assert run_job(source, tmp_path / "out").seal
