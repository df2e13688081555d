"""What was measured is named by its content: the same bytes are the same model anywhere, other bytes are another model at the same path."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sealed_checkpoint import replace_file, write_checkpoint
from small import plain_model
from stand_in import StandIn

from gemq.errors import IntegrityError, Interrupted, UsageError
from gemq.eval.finished import FinishedRecords
from gemq.eval.kl import evaluate_kl, record_reference
from gemq.eval.ppl import evaluate_ppl
from gemq.eval.recorded import Recording
from gemq.quantize.content import directory_digest, files_digest
from gemq.quantize.seal import content_digest, read_seal
from gemq.source import file_hashes

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


def put_in_place(checkpoint: Path, of: Path) -> None:
    """Put the bytes of `checkpoint` in the place of `of`; names, sizes and times stay as they were."""
    for path in of.iterdir():
        status = path.stat()
        content = (checkpoint / path.name).read_bytes()
        assert len(content) == status.st_size
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """A function that runs an evaluation and interrupts it after four records."""

    def run(evaluate: Callable[[], Any]) -> None:
        calls, add = [], FinishedRecords.add

        def stop(finished: FinishedRecords, *arguments: Any) -> None:
            calls.append(1)
            if len(calls) == 5:
                raise KeyboardInterrupt
            add(finished, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(FinishedRecords, "add", stop)
            with pytest.raises(Interrupted):
                evaluate()

    return run


# --- the digest


def test_the_same_bytes_have_the_same_digest_and_others_another_with_sizes_and_times_kept(source: Path, worse: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    first = directory_digest(source)
    assert directory_digest(copy) == first == files_digest(file_hashes(source))
    put_in_place(worse, copy)
    assert directory_digest(copy) == directory_digest(worse) != first
    put_in_place(source, copy)
    assert directory_digest(copy) == first


def test_what_no_loader_reads_does_not_count_and_what_one_reads_does(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for name in ("README.md", "ppl.json", "ppl.json.partial", ".hidden.safetensors", "train.py", "training_config.json", "adapter_config.json",
                 "adapter_model.safetensors", "pytorch_model.bin", "tokenizer.py.old", "LICENSE"):  # fmt: skip
        (copy / name).write_text("x")
    assert directory_digest(copy) == directory_digest(source)
    (copy / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "modeling_x.py", "additional_chat_templates/tools.jinja", "other.jinja", "words.tiktoken", "tekken.json"):
        before = directory_digest(copy)
        (copy / name).write_text("x")
        assert directory_digest(copy) != before


def test_weights_under_other_names_count_where_there_are_no_others(source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    for shard in [*copy.glob("*.safetensors"), *copy.glob("*.index.json")]:
        shard.unlink()
    found = {directory_digest(copy)}
    for name in ("pytorch_model.bin", "consolidated.safetensors", "model.gguf"):
        (copy / name).write_text("x")
        found.add(directory_digest(copy))
        (copy / name).write_text("y")
        found.add(directory_digest(copy))
    assert len(found) == 7
    (copy / "model.safetensors.index.json").write_text("{")
    with pytest.raises(IntegrityError):
        directory_digest(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    with pytest.raises(IntegrityError):
        directory_digest(copy)


def test_a_sealed_checkpoint_has_the_digest_on_its_card_and_is_refused_once_it_changed(tmp_path: Path) -> None:
    sealed = write_checkpoint(tmp_path / "sealed")
    assert directory_digest(sealed) == content_digest(read_seal(sealed))
    shard = next(sealed.glob("*.safetensors"))
    raw, status = shard.read_bytes(), shard.stat()
    replace_file(shard, raw[:-1] + bytes([raw[-1] ^ 1]))
    os.utime(shard, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(IntegrityError, match="not what was sealed"):
        directory_digest(sealed)
    replace_file(shard, raw)
    assert directory_digest(sealed) == content_digest(read_seal(sealed))
    (sealed / "adapter_config.json").write_text("{}")
    with pytest.raises(IntegrityError, match="is not in the seal"):
        directory_digest(sealed)
    (sealed / "adapter_config.json").unlink()
    shard.unlink()
    with pytest.raises(IntegrityError, match="is missing"):
        directory_digest(sealed)


def test_a_device_in_a_checkpoints_place_is_refused_and_not_read(tmp_path: Path) -> None:
    sealed = write_checkpoint(tmp_path / "sealed")
    shard = next(sealed.glob("*.safetensors"))
    shard.unlink()
    shard.symlink_to("/dev/zero")
    with pytest.raises(IntegrityError, match="not a regular file"):
        directory_digest(sealed)


# --- results


def test_results_name_both_models_data_device_and_dtype(source: Path, worse: Path, records_file: Path) -> None:
    for result in (evaluate_ppl(str(worse), records_file, reference=str(source), records=2, **CPU).to_json(),
                   evaluate_kl(str(worse), records_file, reference=str(source), records=2, **CPU).to_json()):  # fmt: skip
        assert (result["target_digest"], result["reference_digest"]) == (directory_digest(worse), directory_digest(source))
        assert (result["device"], result["dtype"]) == ("cpu", "float32")
        assert result["data_sha256"] == file_hashes(records_file.parent, [records_file.name])[records_file.name]


def test_an_endpoint_has_no_digest_and_a_recorded_checkpoint_has_its_own(source: Path, worse: Path, records_file: Path, tmp_path: Path) -> None:
    record_reference(str(source), records_file, tmp_path / "recorded.jsonl", records=2, **CPU)
    with StandIn(plain_model(worse)) as server:
        found = evaluate_kl(server.url, records_file, reference=str(tmp_path / "recorded.jsonl"), records=2)
    assert (found.target_digest, found.reference_digest, found.device) == (None, directory_digest(source), None)


def test_a_recording_of_an_older_gemq_stays_readable_and_names_no_weights(source: Path, records_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "recorded.jsonl"
    record_reference(str(source), records_file, path, records=2, **CPU)
    first, _, rest = path.read_text().partition("\n")
    head = {key: value for key, value in json.loads(first).items() if key in ("kind", "version", "model", "data_sha256", "top", "records", "dtype")}
    path.write_text(json.dumps(head) + "\n" + rest)
    assert evaluate_kl(str(source), records_file, reference=str(path), records=2, **CPU).reference_digest is None


def test_a_checkpoint_that_changes_while_it_loads_is_refused(
    source: Path, worse: Path, records_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gemq.eval import local

    copy, load = Path(shutil.copytree(source, tmp_path / "copy")), local._load

    def swapped(*arguments: Any) -> Any:
        put_in_place(worse, copy)
        return load(*arguments)

    monkeypatch.setattr(local, "_load", swapped)
    with pytest.raises(IntegrityError, match="changed while it was measured"):
        evaluate_ppl(str(copy), records_file, records=2, **CPU)


# --- going on


@pytest.mark.parametrize("side", ["target", "reference"])
@pytest.mark.parametrize("with_kl", [False, True])
def test_records_of_two_checkpoints_at_one_path_are_never_mixed(
    source: Path, worse: Path, records_file: Path, tmp_path: Path, interrupted: Callable[[Callable[[], Any]], None], side: str, with_kl: bool
) -> None:
    ours, theirs = (Path(shutil.copytree(source, tmp_path / name)) for name in ("ours", "theirs"))
    changed, out = (ours if side == "target" else theirs), tmp_path / "out.json"

    def evaluate(target: Path = ours, dtype: str = "float32") -> Any:
        return evaluate_ppl(str(target), records_file, reference=str(theirs), with_kl=with_kl, output_path=out, device="cpu", dtype=dtype)

    whole = evaluate_ppl(str(ours), records_file, reference=str(theirs), with_kl=with_kl, **CPU)
    interrupted(evaluate)
    kept = (tmp_path / "out.json.partial").read_bytes()
    put_in_place(worse, changed)
    with pytest.raises(UsageError, match="another evaluation"):
        evaluate()
    put_in_place(source, changed)
    with pytest.raises(UsageError, match="another evaluation"):
        evaluate(dtype="bfloat16")
    assert (tmp_path / "out.json.partial").read_bytes() == kept
    moved = ours.rename(tmp_path / "moved")
    assert evaluate(moved).ppl == whole.ppl


def test_states_kept_of_a_reference_are_of_its_bytes(source: Path, worse: Path, records_file: Path, tmp_path: Path) -> None:
    """A search scores its source once: not another one that was put in its place."""
    reference, kept = Path(shutil.copytree(source, tmp_path / "reference")), tmp_path / "kept"

    def ppl() -> float:
        found = evaluate_ppl(str(worse), records_file, reference=str(reference), records=3, with_kl=True, kept=kept, **CPU).reference_ppl
        assert found is not None
        return found.value

    first = ppl()
    assert ppl() == first
    put_in_place(worse, reference)
    assert ppl() == evaluate_ppl(str(worse), records_file, records=3, **CPU).ppl.value != first


def test_a_recording_goes_on_with_the_same_bytes_alone(
    source: Path, worse: Path, records_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, path = Path(shutil.copytree(source, tmp_path / "copy")), tmp_path / "recorded.jsonl"
    calls, add = [], Recording.add

    def stop(recording: Recording, *arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        add(recording, *arguments)

    monkeypatch.setattr(Recording, "add", stop)
    with pytest.raises(Interrupted):
        record_reference(str(copy), records_file, path, **CPU)
    put_in_place(worse, copy)
    with pytest.raises(UsageError, match="another recording"):
        record_reference(str(copy), records_file, path, **CPU)
    put_in_place(source, copy)
    assert record_reference(str(copy), records_file, path, **CPU) == 12
