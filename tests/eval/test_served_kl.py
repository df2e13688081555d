"""KL through prompt_logprobs: by hand, below the KL over the whole vocabulary and equal to it where all is told; recorded, stopped, cheated."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stamina
import stand_in as cheats
import torch
from small import VOCABULARY, plain_model, random_records, write_records
from stand_in import StandIn

from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval.kl import evaluate_kl, record_reference
from gemq.eval.recorded import Recorded
from gemq.eval.served_kl import covered, position_kl, served_kl

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}


@pytest.fixture(autouse=True)
def _retry_at_once() -> Iterator[None]:
    with stamina.set_testing(True, attempts=2):
        yield


@pytest.fixture(scope="module")
def models(source: Path, worse: Path) -> tuple[Any, Any]:
    return plain_model(source), plain_model(worse)


@pytest.fixture(scope="module")
def recorded(source: Path, records_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the source tells of its 20 likeliest tokens."""
    file = tmp_path_factory.mktemp("recorded") / "reference.jsonl"
    assert record_reference(str(source), records_file, file, **CPU) == 12
    return file


def logs(**shares: float) -> dict[int, float]:
    return {int(token[1:]): math.log(share) for token, share in shares.items()}


def test_one_position_by_hand() -> None:
    # common: 1 and 2; the rest 0.2 and 0.3: 0.5 ln(0.5/0.4) + 0.3 ln(0.3/0.3) + 0.2 ln(0.2/0.3)
    p, q = logs(_1=0.5, _2=0.3, _3=0.1), logs(_1=0.4, _2=0.3, _4=0.2)
    assert position_kl(p, q) == pytest.approx(0.5 * math.log(1.25) + 0.2 * math.log(2 / 3))
    assert covered(p, q) == pytest.approx(0.8)
    assert position_kl(logs(_1=0.6, _2=0.4), logs(_1=0.6, _2=0.4)) == pytest.approx(0.0, abs=1e-9)
    with pytest.raises(UsageError, match="different records"):
        served_kl([[p], [p]], [[q]])


def test_it_is_a_lower_bound_and_near() -> None:
    generator = torch.Generator().manual_seed(2)
    found = whole = 0.0
    for _ in range(50):  # as peaked as a language model's: the likeliest token has about 0.6
        p = (8 * torch.randn(400, generator=generator, dtype=torch.float64)).log_softmax(0)
        q = (p + 0.5 * torch.randn(400, generator=generator, dtype=torch.float64)).log_softmax(0)
        exact = float((p.exp() * (p - q)).sum())
        tops = [{int(i): float(side[i]) for i in side.topk(20).indices} for side in (p, q)]
        assert position_kl(tops[0], tops[1]) < exact + 1e-9
        found, whole = found + position_kl(tops[0], tops[1]), whole + exact
    assert found > 0.9 * whole


def test_every_way_to_tell_gives_the_same(models: tuple[Any, Any], source: Path, worse: Path, records_file: Path, recorded: Path) -> None:
    with StandIn(models[0]) as reference, StandIn(models[1]) as target:
        sides = [(target.url, reference.url), (target.url, str(source)), (str(worse), reference.url), (target.url, str(recorded)),
                 (str(worse), str(recorded))]  # fmt: skip
        found = [evaluate_kl(ours, records_file, reference=theirs, records=4, **CPU) for ours, theirs in sides]
        asked = {request["prompt_logprobs"] for request in [*reference.requests, *target.requests]}
        everything = evaluate_kl(target.url, records_file, reference=str(source), top=VOCABULARY, records=4, **CPU)
    assert asked == {20}
    whole = evaluate_kl(str(worse), records_file, reference=str(source), records=4, **CPU)
    assert everything.kl_nats.value == pytest.approx(whole.kl_nats.value, rel=1e-4)
    assert everything.covered == pytest.approx(1.0)
    assert (whole.top, whole.covered) == (None, None)
    for one in found:
        assert one.kl_nats.value == pytest.approx(found[0].kl_nats.value, rel=1e-4)
        assert 0 < one.kl_nats.value < whole.kl_nats.value
        assert one.covered is not None
        assert 0.05 < one.covered < 1
        assert (one.top, one.records, one.dtype) == (20, 4, "served")
    for mine, local in zip(found[0].per_record, whole.per_record, strict=True):
        assert mine.nll_nats == pytest.approx(local.nll_nats, rel=1e-5)
        assert mine.reference_nll_nats == pytest.approx(local.reference_nll_nats, rel=1e-5)
        assert mine.kl_nats < local.kl_nats + 1e-6


def test_an_endpoint_against_itself(models: tuple[Any, Any], records_file: Path) -> None:
    with StandIn(models[0]) as server:
        assert evaluate_kl(server.url, records_file, reference=server.url, records=3).kl_nats.value == pytest.approx(0.0, abs=1e-12)


def test_stopped_and_resumed(models: tuple[Any, Any], source: Path, records_file: Path, recorded: Path, tmp_path: Path) -> None:
    out, kept = tmp_path / "kl.json", tmp_path / "kept.jsonl"
    with StandIn(models[1]) as server:
        runs: list[Callable[[], Any]] = [
            lambda: evaluate_kl(server.url, records_file, reference=str(recorded), output_path=out),
            lambda: record_reference(server.url, records_file, kept),
        ]
        for run in runs:
            server.requests.clear()
            server.cut_after = 5
            with pytest.raises(StoppedSafely, match=r"5 .*records are kept") as stopped:
                run()
            assert stopped.value.exit_code == 75
            server.cut_after = None
            server.requests.clear()
            run()
            assert len(server.requests) == 8  # the last kept one is asked again, to see that nothing changed
        whole = evaluate_kl(server.url, records_file, reference=str(recorded))
    again = evaluate_kl(str(source), records_file, reference=str(kept), **CPU)
    assert again.kl_nats.value > 0
    assert not (tmp_path / "kept.jsonl.partial").exists()
    assert whole.kl_nats.value > 0
    assert Recorded.open(str(kept)).model == "small-gemma"


def test_a_recording_is_not_continued_by_another_model(models: tuple[Any, Any], records_file: Path, tmp_path: Path) -> None:
    with StandIn(models[0]) as server:
        server.cut_after = 4
        with pytest.raises(StoppedSafely):
            record_reference(server.url, records_file, tmp_path / "r.jsonl")
        server.model, server.cut_after = models[1], None
        with pytest.raises(IntegrityError, match="the model has changed"):
            record_reference(server.url, records_file, tmp_path / "r.jsonl")
        with pytest.raises(UsageError, match="another recording"):
            record_reference(server.url, records_file, tmp_path / "r.jsonl", top=5)


@pytest.mark.parametrize("cheat", [cheats.told_too_little, cheats.truncated, cheats.without_target, cheats.too_likely, cheats.not_a_number,
                                   cheats.shifted_in_secret, cheats.without_prompt_logprobs], ids=lambda cheat: cheat.__name__)  # fmt: skip
def test_who_tells_what_was_not_asked_is_caught(models: tuple[Any, Any], records_file: Path, recorded: Path, cheat: cheats.Cheat) -> None:
    with StandIn(models[1], cheat) as server, pytest.raises(IntegrityError):
        evaluate_kl(server.url, records_file, reference=str(recorded), records=2)


def test_bad_input(models: tuple[Any, Any], source: Path, worse: Path, records_file: Path, recorded: Path, text_file: Path, tmp_path: Path) -> None:
    other = write_records(tmp_path / "other.jsonl", random_records(3, seed=9))
    lines = recorded.read_text().splitlines(keepends=True)

    def changed(name: str, *kept: str) -> str:
        (tmp_path / name).write_text("".join(kept))
        return str(tmp_path / name)

    first = json.loads(lines[1])
    first["positions"].pop()
    positive = {**json.loads(lines[1]), "positions": [{"5": 0.5}] * len(first["positions"])}
    with StandIn(models[0], max_model_len=30) as short, StandIn(models[0]) as server:
        cases: list[tuple[type[GemqError], str, str, Path, str, dict[str, Any]]] = [
            (UsageError, "holds nothing on", server.url, other, str(recorded), {}),
            (UsageError, "holds nothing on", server.url, records_file, str(recorded), {"length": 20}),
            (UsageError, "--top 21", server.url, records_file, str(recorded), {"top": 21}),
            (UsageError, "--top 0", server.url, records_file, str(source), {"top": 0}),
            (UsageError, "both are directories", str(worse), records_file, str(source), {"top": 20}),
            (UsageError, "holds no distributions", server.url, records_file, str(records_file), {}),
            (UsageError, "neither a directory nor", server.url, records_file, str(tmp_path / "none.jsonl"), {}),
            (UsageError, "neither a directory nor", str(recorded), records_file, str(source), {}),
            (UsageError, "can't be reached", "http://127.0.0.1:9", records_file, str(recorded), {}),
            (UsageError, "takes 29", short.url, records_file, str(recorded), {}),
            (UsageError, "nothing of its tokenizer", server.url, text_file, server.url, {}),
            (UsageError, "version 2", server.url, records_file, changed("v2.jsonl", lines[0].replace('"version": 1', '"version": 2')), {}),
            (IntegrityError, "11 records of the 12", server.url, records_file, changed("less.jsonl", *lines[:-1]), {}),
            (IntegrityError, "can't be read", server.url, records_file, changed("cut.jsonl", *lines[:-1], lines[-1][:50]), {}),
            (IntegrityError, "does not have 20 tokens", server.url, records_file,
             changed("few.jsonl", lines[0], json.dumps(first) + "\n", *lines[2:]), {}),
            (IntegrityError, "can't be read", server.url, records_file, changed("p.jsonl", lines[0], json.dumps(positive) + "\n", *lines[2:]), {}),
        ]  # fmt: skip
        for kind, word, target, data, reference, more in cases:
            with pytest.raises(kind) as error:
                evaluate_kl(target, data, reference=reference, **{**CPU, **more})
            assert word in error.value.message, error.value.message
            assert error.value.next_step
    with pytest.raises(UsageError, match="exists already"):
        record_reference(str(source), records_file, recorded)
