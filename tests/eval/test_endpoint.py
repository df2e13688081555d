"""An endpoint is asked as the arenas ask, agrees with the model behind it, and is caught when it breaks the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stamina
import stand_in as cheats
from small import plain_model, random_records, write_records
from stand_in import StandIn

from gemq.errors import IntegrityError, StoppedSafely, UsageError
from gemq.eval.ppl import evaluate_ppl


@pytest.fixture(scope="module")
def model(source: Path) -> Any:
    return plain_model(source)


@pytest.fixture(autouse=True)
def _retry_at_once() -> Iterator[None]:
    with stamina.set_testing(True, attempts=3):
        yield


def test_agrees_with_the_directory_and_keeps_the_contract(model: Any, source: Path, records_file: Path) -> None:
    with StandIn(model) as server:
        served = evaluate_ppl(server.url, records_file)
    local = evaluate_ppl(str(source), records_file, device="cpu", dtype="float32")
    assert served.ppl.value == pytest.approx(local.ppl.value, rel=1e-6)
    assert served.ppl.standard_error == pytest.approx(local.ppl.standard_error, rel=1e-5)
    assert (served.dtype, served.records, served.tokens) == ("served", 12, local.tokens)
    assert len(server.requests) == 12
    for request, record in zip(server.requests, random_records(12), strict=True):
        assert request == {
            "model": "small-gemma", "prompt": record["context_token_ids"] + record["target_token_ids"], "max_tokens": 1, "temperature": 0,
            "prompt_logprobs": 1, "add_special_tokens": False,
        }  # fmt: skip


def test_served_checkpoint_against_a_local_reference(model: Any, worse: Path, records_file: Path) -> None:
    with StandIn(model) as server:
        result = evaluate_ppl(str(worse), records_file, reference=server.url, device="cpu", dtype="float32")
        twin = evaluate_ppl(server.url, records_file, reference=server.url + "/v1/")
    local = evaluate_ppl(str(worse), records_file, device="cpu", dtype="float32")
    assert result.ratio is not None
    assert result.reference_ppl is not None
    assert result.ratio.value == pytest.approx(local.ppl.value / result.reference_ppl.value, rel=1e-9)
    assert result.kl_nats is None
    assert twin.ratio is not None
    assert (twin.ratio.value, twin.ratio.upper_95) == (1.0, 1.0)


def test_text_needs_a_tokenizer(model: Any, source: Path, text_file: Path) -> None:
    with StandIn(model) as server:
        with pytest.raises(UsageError, match="says nothing of its tokenizer"):
            evaluate_ppl(server.url, text_file)
        served = evaluate_ppl(server.url, text_file, tokenizer=source, length=64)
    local = evaluate_ppl(str(source), text_file, length=64, device="cpu", dtype="float32")
    assert served.ppl.value == pytest.approx(local.ppl.value, rel=1e-6)


@pytest.mark.parametrize(
    ("cheat", "message"),
    [
        (cheats.truncated, "entries for"),
        (cheats.shifted, "entries for"),
        (cheats.shifted_in_secret, "prompt tokens"),
        (cheats.without_target, "left the prompt's own token"),
        (cheats.first_not_null, "must be null"),
        (cheats.positive, r"0\.25; it must be finite"),
        (cheats.not_a_number, "nan; it must be finite"),
        (cheats.minus_infinity, "-inf; it must be finite"),
        (cheats.clamped_infinity, "the probability 0"),
        (cheats.textual, "'-1.0'; it must be finite"),
        (cheats.boolean, "False; it must be finite"),
        (cheats.too_likely, "more than 1"),
        (cheats.without_prompt_logprobs, "gave no prompt_logprobs"),
        (cheats.null_entry, "None instead of"),
        (cheats.no_choices, "without choices"),
    ],
)
def test_a_broken_contract_is_caught_and_names_the_record(model: Any, records_file: Path, cheat: cheats.Cheat, message: str) -> None:
    with StandIn(model, cheat) as server, pytest.raises(IntegrityError, match=message) as caught:
        evaluate_ppl(server.url, records_file)
    assert f"{records_file} line 1" in str(caught.value)


def test_a_cheat_on_a_later_record_is_caught(model: Any, records_file: Path) -> None:
    seen = []

    def later(answer: dict[str, Any]) -> dict[str, Any]:
        seen.append(1)
        return cheats.truncated(answer) if len(seen) == 9 else answer

    with StandIn(model, later) as server, pytest.raises(IntegrityError, match="line 9"):
        evaluate_ppl(server.url, records_file)


def test_a_token_beyond_the_vocabulary_names_the_line(model: Any, tmp_path: Path) -> None:
    records = random_records(3)
    records[1]["target_token_ids"][0] = 320
    with StandIn(model) as server, pytest.raises(UsageError, match=r"line 2.*400.*out of vocabulary"):
        evaluate_ppl(server.url, write_records(tmp_path / "r.jsonl", records))


def test_a_reference_directory_tells_the_vocabulary(model: Any, source: Path, tmp_path: Path) -> None:
    records = random_records(3)
    records[1]["target_token_ids"][0] = 320
    with StandIn(model) as server, pytest.raises(UsageError, match="beyond the vocabulary"):
        evaluate_ppl(server.url, write_records(tmp_path / "r.jsonl", records), reference=str(source))
    assert server.requests == []


def test_a_prompt_beyond_the_servers_window(model: Any, records_file: Path) -> None:
    with StandIn(model, max_model_len=40) as server, pytest.raises(UsageError, match=r"takes 39"):
        evaluate_ppl(server.url, records_file)
    assert server.requests == []


def test_a_server_that_refuses_with_its_reason(model: Any, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StandIn(model) as server:
        monkeypatch.setattr(server, "complete", lambda body: (400, {"error": {"message": "prompt_logprobs is disabled"}}))
        with pytest.raises(UsageError, match=r"line 1 \(400\): prompt_logprobs is disabled"):
            evaluate_ppl(server.url, records_file)


def test_choosing_a_model(model: Any, records_file: Path) -> None:
    with StandIn(model) as server:
        with pytest.raises(UsageError, match="does not serve 'other'"):
            evaluate_ppl(server.url + "#other", records_file)
        server.names = ["a", "b"]
        with pytest.raises(UsageError, match="serves 2 models: a, b"):
            evaluate_ppl(server.url, records_file)
        assert evaluate_ppl(server.url + "#b", records_file, records=2).records == 2
    assert {request["model"] for request in server.requests} == {"b"}


def test_unreachable_and_not_an_endpoint(model: Any, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StandIn(model) as server:
        url = server.url
        monkeypatch.setattr(server, "models", lambda: {"hello": "world"})
        with pytest.raises(UsageError, match="no OpenAI-compatible endpoint"):
            evaluate_ppl(url, records_file)
    with pytest.raises(UsageError, match="can't be reached"):
        evaluate_ppl(url, records_file)
    with pytest.raises(UsageError, match="names no host"):
        evaluate_ppl("http://", records_file)
    with pytest.raises(UsageError, match="no URL"):
        evaluate_ppl("http://127.0.0.1:port", records_file)


def test_a_passing_failure_is_tried_again(model: Any, records_file: Path) -> None:
    with StandIn(model) as server:
        plain = evaluate_ppl(server.url, records_file, records=3)
        server.fail_next = 2
        assert evaluate_ppl(server.url, records_file, records=3) == plain
    assert len(server.requests) == 3 + 3 + 2


def test_an_endpoint_that_keeps_failing(model: Any, records_file: Path) -> None:
    with StandIn(model) as server:
        server.fail_next = 99
        with pytest.raises(StoppedSafely, match=r"stopped answering at .* line 1: it answered 500: the engine is busy dying"):
            evaluate_ppl(server.url, records_file)


def test_dies_half_way_and_goes_on(model: Any, records_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    with StandIn(model) as server:
        whole = evaluate_ppl(server.url, records_file)
        server.requests.clear()
        server.cut_after = 7
        with pytest.raises(StoppedSafely, match=r"line 8: .*; 7 finished records are kept in .*result\.json\.partial"):
            evaluate_ppl(server.url, records_file, output_path=output)
        kept = json.loads((tmp_path / "result.json.partial").read_text())
        assert len(kept["scores"]["target"]) == 7
        assert not output.exists()
        server.cut_after = None
        server.requests.clear()
        assert evaluate_ppl(server.url, records_file, output_path=output) == whole
        assert len(server.requests) == 6  # the five that were missing, and the last kept one to compare


def test_without_an_output_it_says_that_nothing_is_kept(model: Any, records_file: Path) -> None:
    with StandIn(model) as server:
        server.cut_after = 2
        with pytest.raises(StoppedSafely, match="nothing is kept without --output"):
            evaluate_ppl(server.url, records_file)


def test_resume_refuses_another_model_and_another_task(model: Any, worse: Path, records_file: Path, tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    with StandIn(model) as server:
        server.cut_after = 5
        with pytest.raises(StoppedSafely):
            evaluate_ppl(server.url, records_file, output_path=output)
        server.cut_after = None
        with pytest.raises(UsageError, match="another evaluation"):
            evaluate_ppl(server.url, records_file, records=4, output_path=output)
        server.model = plain_model(worse)
        with pytest.raises(IntegrityError, match="the model has changed"):
            evaluate_ppl(server.url, records_file, output_path=output)
        server.model = model  # the refusal lost nothing
        server.requests.clear()
        evaluate_ppl(server.url, records_file, output_path=output)
        assert len(server.requests) == 8
    (tmp_path / "result.json.partial").write_text("{")
    with StandIn(model) as server, pytest.raises(IntegrityError, match="can't be read"):
        evaluate_ppl(server.url, records_file, output_path=output)


def test_loopback_goes_past_a_proxy(model: Any, records_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    with StandIn(model) as server:
        assert evaluate_ppl(server.url, records_file, records=1).records == 1
