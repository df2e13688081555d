"""The way of tensors to the disk and from it beside a walk: read ahead in order, written in threads, recorded once the disk has them."""

from __future__ import annotations

import concurrent.futures
import threading
import time

import pytest
import torch
from tests.quantize.small_jobs import make_job, run_job

from gemq import shards as shards_room
from gemq.positioned import begin_writeback
from gemq.quantize import run as quantize_run
from gemq.quantize import writing as under_test
from gemq.quantize.journal import open_journal
from gemq.quantize.phases import Phases
from gemq.quantize.seal import sha256_of
from gemq.quantize.writing import ReadAhead, Writing
from gemq.recipes.model import parse_recipe
from gemq.shard_headers import TensorSpec
from gemq.shards import ShardWriter


def test_pieces_are_read_ahead_in_their_order_only(gemma3):
    job = make_job(gemma3, gemma3.parent / "never")
    name = "model.layers.0.mlp.up_proj.weight"
    requests = [(name, first, 8) for first in range(0, 64, 8)]
    for threads in (0, 3):
        ahead = ReadAhead(job.reader, requests, Phases(), threads, pinned=False)
        found = torch.cat([ahead.take(*request) for request in requests])
        assert torch.equal(found, job.reader.read(name)[:64])
        ahead.close()
    ahead = ReadAhead(job.reader, requests, Phases(), 2, pinned=False)
    with pytest.raises(AssertionError, match="is next"):
        ahead.take(name, 8, 8)
    ahead.close()


def test_of_two_writes_to_one_tensor_the_later_one_stays(tmp_path):
    shards = ShardWriter(tmp_path / "out" / "checkpoint", [TensorSpec("a", "F32", (1000, 1000))])
    journal = open_journal(tmp_path / "out", {}, "auto")
    shards.allocate()
    writing = Writing(shards, journal, Phases(), 4)
    for value in range(20):
        writing.write("a", torch.full((1000, 1000), float(value)))
    writing.finish("all", ["a"], lambda: None)
    writing.drain()
    assert torch.equal(shards.read("a"), torch.full((1000, 1000), 19.0))
    assert writing.hashes()["model.safetensors"].size == shards.total_bytes
    writing.close()


@pytest.mark.parametrize("first", ["write", "write_rows", "write_columns", "copy"])
@pytest.mark.parametrize("second", ["write", "write_rows", "write_columns"])
@pytest.mark.parametrize("apart", [False, True], ids=["in one part", "in two parts"])
def test_a_write_that_stalls_does_not_win_over_a_later_one(tmp_path, gemma3, monkeypatch, first, second, apart):
    reader = make_job(gemma3, gemma3.parent / "never").reader
    name = "model.layers.0.mlp.up_proj.weight"
    shape = reader.info(name).shape
    shards = ShardWriter(tmp_path / "out" / "checkpoint", [TensorSpec(name, "BF16", shape)])
    journal = open_journal(tmp_path / "out", {}, "auto")
    shards.allocate()
    plain, calls = shards_room.write_at, []

    def stalled(descriptor, offset, view):
        calls.append(offset)
        if len(calls) == 1:
            time.sleep(0.5)
        plain(descriptor, offset, view)

    monkeypatch.setattr(shards_room, "write_at", stalled)
    writing = Writing(shards, journal, Phases(), 4)

    def put(how, value):
        tensor = torch.full(shape, value, dtype=torch.bfloat16)
        if how == "copy":
            writing.copy(reader, name, lambda: None)
        elif how == "write":
            writing.write(name, tensor)
        elif how == "write_rows":
            writing.write_rows(name, 0, tensor)
        else:
            for start in (0, shape[1] // 2):  # as one matrix's columns come: in pieces
                writing.write_columns(name, start, tensor[:, : shape[1] // 2])

    put(first, 1.0)
    if apart:
        writing.finish("first", [name], lambda: None)
    put(second, 2.0)
    writing.finish("all", [name], lambda: None)
    writing.drain()
    written = torch.full(shape, 2.0, dtype=torch.bfloat16)
    assert torch.equal(shards.read(name), written)
    shards.write(name, written)
    assert journal.holds("all", shards, [name])
    if not apart:
        of_disk = sha256_of(shards.tensors[name].path)
        assert not isinstance(of_disk, str)
        assert writing.hashes()["model.safetensors"].sha256 == of_disk.sha256
    writing.close()


def test_a_failed_write_ends_the_run_and_leaves_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(under_test, "_WAITING_BYTES", 1000)
    shards = ShardWriter(tmp_path / "out" / "checkpoint", [TensorSpec("a", "F32", (1000,))])
    journal = open_journal(tmp_path / "out", {}, "auto")
    shards.allocate()

    def full(descriptor, offset, view):
        time.sleep(0.05)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shards_room, "write_at", full)
    writing = Writing(shards, journal, Phases(), 2)

    def keep_writing():
        for _ in range(50):
            writing.write("a", torch.zeros(1000))
        writing.drain()

    with pytest.raises(OSError, match="No space left"):
        keep_writing()
    writing.close()


def test_a_tuned_run_whose_first_writes_stall_has_the_bytes_of_one_at_once(gemma3, tmp_path, monkeypatch):
    recipe = parse_recipe(
        "version: 1\nname: tuned\nsummary: t\nmethod: rtn\ntuning: {iterations: 3, learning_rate: 0.05}\nrules:\n  - match: [decoder]\n"
        "    scheme: {weights: {num_bits: 4, strategy: group, group_size: 32}}\n", "here",
    )  # fmt: skip
    whole = run_job(gemma3, tmp_path / "whole", recipe)
    assert any(unit["layer_tuning"]["kept"] for unit in whole.manifest["units"].values())
    plain, seen, lock = shards_room.write_at, set(), threading.Lock()

    def stalled(descriptor, offset, view):
        with lock:
            first = offset not in seen
            seen.add(offset)
        if first and len(view) < 1 << 20:
            time.sleep(0.02)
        plain(descriptor, offset, view)

    monkeypatch.setattr(shards_room, "write_at", stalled)
    monkeypatch.setattr(quantize_run, "threads_for", lambda device: 4)
    assert run_job(gemma3, tmp_path / "stalled", recipe).seal == whole.seal


def test_a_long_copy_is_sent_to_the_disk_as_it_goes(tmp_path, gemma3, monkeypatch):
    monkeypatch.setattr(under_test, "_PIECE_BYTES", 1 << 12)
    monkeypatch.setattr(under_test, "_LONG_BYTES", 1 << 14)
    reader = make_job(gemma3, gemma3.parent / "never").reader
    name, sent = "model.embed_tokens.weight", []
    begin = shards_room.begin_writeback
    monkeypatch.setattr(shards_room, "begin_writeback", lambda *given: (sent.append(given), begin(*given)))

    def copied(out, sync):
        shards = ShardWriter(out / "checkpoint", [TensorSpec(name, reader.info(name).dtype, reader.info(name).shape)])
        journal = open_journal(out, {}, "auto")
        shards.allocate()
        shards.sync = lambda: sync(shards)
        writing = Writing(shards, journal, Phases(), 2)
        begin_hash = writing._hash_whole
        writing._hash_whole = lambda names: (hashed.append(names), begin_hash(names))
        try:
            writing.copy(reader, name, lambda: None)
            writing.finish("copied", [name], lambda: None)
            writing.drain()
        finally:
            writing.close()
        return shards, journal

    plain, synced, hashed = ShardWriter.sync, [], []
    shards, journal = copied(tmp_path / "good", lambda shards: (synced.append(len(sent)), plain(shards)))
    info = shards.tensors[name]
    assert synced == [len(sent)] == [info.nbytes // (1 << 12)]  # each piece as it was written, all of them before the one wait for the disk
    assert sorted((offset, length) for _, offset, length in sent) == [(info.offset + start, 1 << 12) for start in range(0, info.nbytes, 1 << 12)]
    assert torch.equal(shards.read(name), reader.read(name))
    assert journal.holds("copied", shards, [name])
    assert hashed == [[name], [name]]  # once by itself, before its part is recorded

    def full(shards):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        copied(tmp_path / "full", full)
    assert not open_journal(tmp_path / "full", {}, "required").parts


def test_sending_a_range_to_the_disk_is_no_more_than_a_hint(tmp_path):
    with open(tmp_path / "file", "w+b", buffering=0) as file:
        file.write(bytes(range(256)) * (1 << 13))
        begin_writeback(file.fileno(), 0, 1 << 21)
        begin_writeback(file.fileno(), 1 << 40, 1 << 21)  # where there is nothing
        file.seek(0)
        assert file.read() == bytes(range(256)) * (1 << 13)
    begin_writeback(10**6, 0, 1 << 21)  # no open file: fdatasync is what tells of a failure


def test_a_shard_is_hashed_while_an_earlier_part_still_waits_for_the_disk(tmp_path):
    specs = [TensorSpec(name, "F32", (1000,)) for name in "ab"]
    shards = ShardWriter(tmp_path / "out" / "checkpoint", specs, max_shard_bytes=4000)
    journal = open_journal(tmp_path / "out", {}, "auto")
    shards.allocate()
    slow, plain = threading.Event(), shards.sync
    shards.sync = lambda: (slow.wait(60), plain())
    writing = Writing(shards, journal, Phases(), 2)
    for name in "ab":
        writing.write(name, torch.full((1000,), 1.0))
        writing.finish(name, [name], lambda: None)
    for _ in range(600):
        if len(writing._hashes) == 2 and all(future.done() for future in writing._hashes.values()):
            break
        time.sleep(0.1)
    else:
        pytest.fail("the second shard waits for the first one's part")
    assert not journal.parts
    slow.set()
    writing.drain()
    writing.close()
    assert sorted(journal.parts) == ["a", "b"]


def test_parts_that_wait_for_the_disk_are_recorded_together_up_to_one_that_fails(tmp_path):
    names = [f"t{number}" for number in range(6)]
    shards = ShardWriter(tmp_path / "out" / "checkpoint", [TensorSpec(name, "F32", (100,)) for name in names])
    journal = open_journal(tmp_path / "out", {}, "auto")
    shards.allocate()
    slow, plain, synced, begun, saved = threading.Event(), shards.sync, [], [], []
    shards.sync = lambda: (slow.wait(60), plain(), synced.append(len(journal.parts)))
    save = journal.save
    journal.save = lambda: (save(), saved.append(sorted(journal.parts)))
    finished, write = threading.Event(), shards.write
    shards.write = lambda name, tensor: (name == "t5" and finished.wait(60), write(name, tensor))
    writing = Writing(shards, journal, Phases(), 2)
    for name in names[:5]:
        writing.write(name, torch.full((100,), float(name[1:])))
        writing.finish(name, [name], lambda name=name: begun.append(name))
        while not writing._records[-1].done() and begun != ["t0"]:  # the first one is on its way before the others are finished
            time.sleep(0.01)
    writing.write("t5", torch.zeros(7))  # not as planned
    writing.finish("t5", ["t5"], lambda: begun.append("t5"))
    finished.set()  # else finishing it may tell of the failure already
    concurrent.futures.wait([write for part in list(writing._parts) for write in part.writes])
    slow.set()
    with pytest.raises(ValueError, match="t5 was planned as"):
        writing.drain()
    writing.close()
    assert begun == names[:5]
    assert saved == [["t0"], names[:5]]
    assert synced == [0, 1]
    assert all(open_journal(tmp_path / "out", {}, "required").holds(name, shards, [name]) for name in names[:5])


def test_a_run_that_ends_early_does_not_wait_for_the_source_s_digests(gemma3, tmp_path, monkeypatch):
    job, ended = make_job(gemma3, tmp_path / "out"), []

    def file_hashes(directory, files, *, beside):
        ended.append(beside.wait(60))
        raise concurrent.futures.CancelledError

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(quantize_run, "threads_for", lambda device: 2)
    monkeypatch.setattr(quantize_run, "file_hashes", file_hashes)
    monkeypatch.setattr(quantize_run._Run, "solve", interrupted)
    with pytest.raises(KeyboardInterrupt):
        quantize_run.quantize(job)
    assert ended == [True]
