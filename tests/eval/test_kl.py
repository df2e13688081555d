"""KL(reference || target) over the whole vocabulary equals an independent computation."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from small import int4_weight, plain_log_softmax, plain_model, plain_scores, random_records

from gemq.errors import Interrupted, UsageError
from gemq.eval import kl as kl_module
from gemq.eval import local
from gemq.eval.kl import evaluate_kl
from gemq.eval.ppl import evaluate_ppl


def independent(reference: object, target: object) -> list[float]:
    sums = []
    for record in random_records(12):
        context, tokens = record["context_token_ids"], record["target_token_ids"]
        p, q = (plain_log_softmax(model, context + tokens)[len(context) - 1 :] for model in (reference, target))
        sums.append((p.exp() * (p - q)).sum().item())
    return sums


def test_agrees_with_an_independent_computation(source: Path, worse: Path, records_file: Path) -> None:
    expected = independent(plain_model(source), plain_model(worse))
    result = evaluate_kl(str(worse), records_file, reference=str(source), device="cpu", dtype="float32")
    assert result.kl_nats.value == pytest.approx(sum(expected) / result.tokens, rel=1e-5)
    assert result.kl_nats.value > 0.01
    for found, sum_nats in zip(result.per_record, expected, strict=True):
        assert found.kl_nats == pytest.approx(sum_nats, rel=1e-4, abs=1e-5)
    assert result.kl_nats.upper_95 is not None
    assert result.kl_nats.upper_95 > result.kl_nats.value
    assert json.loads(json.dumps(result.to_json()))["kl_nats"]["value"] == result.kl_nats.value


def test_direction_is_reference_first(source: Path, worse: Path, records_file: Path) -> None:
    forward = evaluate_kl(str(worse), records_file, reference=str(source), device="cpu", dtype="float32").kl_nats.value
    backward = evaluate_kl(str(source), records_file, reference=str(worse), device="cpu", dtype="float32").kl_nats.value
    assert abs(forward - backward) > 1e-4 * forward


def test_quantized_against_its_source(source: Path, int4: Path, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = sum(independent(plain_model(source), plain_model(source, int4_weight)))
    monkeypatch.setattr(local, "_CHUNK_ELEMENTS", 5 * 320)
    result = evaluate_kl(str(int4), records_file, reference=str(source), device="cpu", dtype="float32")
    assert result.kl_nats.value * result.tokens == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_does_not_diverge_from_itself(source: Path, records_file: Path) -> None:
    result = evaluate_kl(str(source), records_file, reference=str(source), device="cpu", dtype="float32")
    assert result.kl_nats.value == 0.0
    assert result.kl_nats.upper_95 == 0.0


def test_ppl_with_kl_agrees_with_both_alone(source: Path, int4: Path, records_file: Path) -> None:
    def ppl(target: Path, **arguments: object):  # type: ignore[no-untyped-def]
        return evaluate_ppl(str(target), records_file, device="cpu", dtype="float32", **arguments)  # type: ignore[arg-type]

    both = ppl(int4, reference=str(source), with_kl=True)
    paired = ppl(int4, reference=str(source))
    assert both.kl_nats == evaluate_kl(str(int4), records_file, reference=str(source), device="cpu", dtype="float32").kl_nats
    assert paired.kl_nats is None
    for name in ("ppl", "reference_ppl", "ratio"):
        assert getattr(both, name).value == pytest.approx(getattr(paired, name).value, rel=1e-6)
        assert getattr(both, name).upper_95 == pytest.approx(getattr(paired, name).upper_95, rel=1e-5)
    assert both.ratio.value == pytest.approx(ppl(int4).ppl.value / ppl(source).ppl.value, rel=1e-6)


def test_ratio_and_its_bound_by_hand(source: Path, worse: Path, records_file: Path) -> None:
    result = evaluate_ppl(str(worse), records_file, reference=str(source), device="cpu", dtype="float32")
    models = plain_model(worse), plain_model(source)
    rows = [[plain_scores(model, r["context_token_ids"], r["target_token_ids"]) for r in random_records(12)] for model in models]
    difference = [math.fsum(theirs) - math.fsum(ours) for ours, theirs in zip(*rows, strict=True)]
    counts = [len(row) for row in rows[0]]
    mean = math.fsum(difference) / sum(counts)
    left_out = [(math.fsum(difference) - d) / (sum(counts) - n) for d, n in zip(difference, counts, strict=True)]
    error = math.sqrt(11 / 12 * math.fsum((value - mean) ** 2 for value in left_out))
    assert result.ratio is not None
    assert result.ratio.value == pytest.approx(math.exp(mean), rel=1e-6)
    assert result.ratio.standard_error == pytest.approx(math.exp(mean) * error, rel=1e-4)
    assert result.ratio.upper_95 is not None
    assert result.ratio.upper_95 >= math.exp(mean + 1.7958848 * error) * (1 - 1e-6)  # t with 11 degrees of freedom


def test_other_vocabulary_is_refused(source: Path, multimodal: Path, records_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"vocab_size": 321}))
    with pytest.raises(UsageError, match=r"321 tokens, .* 320"):
        evaluate_kl(str(other), records_file, reference=str(source))
    (other / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["!"], vocab["#"] = vocab["#"], vocab["!"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(UsageError, match="differ, first at id"):
        evaluate_ppl(str(other), records_file, reference=str(source))
    (other / "tokenizer.json").write_text(json.dumps(json.loads((source / "tokenizer.json").read_text())))  # other bytes, same tokens
    assert evaluate_ppl(str(other), records_file, reference=str(source), records=2, device="cpu", dtype="float32").ratio is not None


def test_kl_beside_ppl_needs_directories(source: Path, records_file: Path) -> None:
    for target, reference in (("http://127.0.0.1:9", str(source)), (str(source), "http://127.0.0.1:9")):
        with pytest.raises(UsageError, match="both checkpoint directories"):
            evaluate_ppl(target, records_file, reference=reference, with_kl=True)
    with pytest.raises(UsageError, match="both checkpoint directories"):
        evaluate_ppl(str(source), records_file, with_kl=True)


def test_interrupted_and_resumed(source: Path, worse: Path, records_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run():  # type: ignore[no-untyped-def]
        return evaluate_kl(str(worse), records_file, reference=str(source), device="cpu", dtype="float32", output_path=tmp_path / "kl.json")

    real, scored = kl_module._pair_sums, []

    def counted(*arguments):  # type: ignore[no-untyped-def]
        if len(scored) == 5:
            raise KeyboardInterrupt
        scored.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(kl_module, "_pair_sums", counted)
    with pytest.raises(Interrupted, match="5 finished records are kept"):
        run()
    monkeypatch.setattr(kl_module, "_pair_sums", real)
    whole = evaluate_kl(str(worse), records_file, reference=str(source), device="cpu", dtype="float32")
    assert run() == whole


@pytest.mark.slow
def test_killed_within_a_write_and_resumed(source: Path, records_file: Path, tmp_path: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from gemq import atomic
from gemq.eval import finished
from gemq.eval.ppl import evaluate_ppl
finished.SAVE_SECONDS = 0.0
writes = []
def die(name):
    writes.append(name)
    if len(writes) == int(sys.argv[4]):
        os._exit(9)
atomic.on_write_point = die
evaluate_ppl(sys.argv[1], Path(sys.argv[2]), device="cpu", dtype="float32", output_path=Path(sys.argv[3]))
"""
    output = tmp_path / "ppl.json"
    # the fifth write point is a staged file: the third save is lost, the second one is whole
    arguments = [sys.executable, "-c", script, str(source), str(records_file), str(output), "5"]
    done = subprocess.run(arguments, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True)
    assert done.returncode == 9, done.stderr
    assert len(json.loads((tmp_path / "ppl.json.partial").read_text())["scores"]["target"]) == 2
    assert not output.exists()
    whole = evaluate_ppl(str(source), records_file, device="cpu", dtype="float32")
    resumed = evaluate_ppl(str(source), records_file, device="cpu", dtype="float32", output_path=output)
    assert resumed == whole
