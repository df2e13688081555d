"""`gemq bench`: what it sends, what it counts, what it writes, that a stopped run goes on, and that servers that cheat are caught."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stub_server import BOS, Engine, StubServer
from click.testing import Result

from gemq import atomic
from gemq.commands import bench as commands
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.eval import bench
from gemq.eval.endpoint import Endpoint
from gemq.eval.load import Finished
from gemq.eval.workloads import WORKLOADS, Load, find_workload, make_text_prompts, read_prompts

Run = Callable[..., Result]
SUMMARY_KEYS = {
    "tps", "output_tps", "total_tps", "ppl", "completed", "duration_s", "request_throughput_req_s", "mean_e2e_latency_ms",
    "p99_e2e_latency_ms", "max_concurrency", "num_prompts", "output_len", "model", "base_url", "benchmark_jsonl", "benchmark_dependencies",
    "server_dependencies", "job_id", "ppl_num_tokens", "ppl_summary_file", "ppl_results_file",
}  # fmt: skip


@pytest.fixture
def run(command_line: Callable[..., Run]) -> Run:
    """Call the commands; gemq's own client sends the loads unless a test says otherwise."""
    call = command_line(commands)

    def with_client(command: str, *arguments: object) -> Result:
        return call(command, *arguments, *(["--client", "gemq"] if command == "bench" and "--client" not in arguments else []))

    return with_client


def workload_file(path: Path, **load: Any) -> Path:
    """A workload of one small load."""
    path.write_text(json.dumps({"name": "small", "loads": [{"name": "one", "requests": 6, "output_tokens": 12, "warmups": 1, **load}]}))
    return path


def printed(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, GemqError), result.exception
    return json.loads(result.stdout)


# what is asked


def test_the_arenas_workloads() -> None:
    (load,) = WORKLOADS["efficient-gemma"].loads
    assert (load.requests, load.output_tokens, load.in_flight, load.chat, load.streamed, load.warmups, load.seed) == (
        128, 512, 1, True, False, 4, 1)  # fmt: skip
    shape = [(one.requests, one.input_tokens, one.in_flight, one.output_tokens) for one in WORKLOADS["lowbarena"].loads]
    assert shape == [(64, 8192, 32, 512), (32, 1024, 1, 256), (128, 16000, 64, 256)]


def test_scaling() -> None:
    first, second, third = find_workload("lowbarena", 0.03).loads
    assert (first.requests, first.input_tokens, first.in_flight, first.output_tokens) == (2, 246, 1, 15)
    assert (second.requests, second.in_flight) == (1, 1)
    assert third.output_tokens == 8
    for bad in (0, -1, 1.5, float("nan")):
        with pytest.raises(UsageError, match="scale"):
            find_workload("lowbarena", bad)


class Recorder(Engine):
    """Notes what was sent."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[tuple[str, dict[str, Any]]] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        self.bodies.append((path, body))
        return super().answer(path, body)


def test_what_efficient_gemma_sends(run: Run, shared_data: Path) -> None:
    engine = Recorder()
    with StubServer(engine) as server:
        result = run("bench", server.url, "--scale", 0.05, "--no-audit", "--json", "--prompts", shared_data / "eval_prompts_sharegpt.json")
    document = printed(result)
    assert document["loads"][0]["requests"] == 6
    plain = [body for path, body in engine.bodies if path == "/v1/chat/completions" and not body.get("stream")]
    assert len(plain) == 4 + 6
    expected = read_prompts(shared_data / "eval_prompts_sharegpt.json")[:6]
    assert [body["messages"] for body in plain[4:]] == [[{"role": "user", "content": prompt.text}] for prompt in expected]
    for body in plain:
        assert (body["max_tokens"], body["ignore_eos"], body["temperature"], body["seed"]) == (26, True, 0, 1)


def test_prompts_from_a_seed_are_the_same_every_time_and_all_different(run: Run, tmp_path: Path) -> None:
    file = workload_file(tmp_path / "w.yaml", input_tokens=20)
    sent = []
    for _ in range(2):
        engine = Recorder()
        with StubServer(engine) as server:
            assert run("bench", server.url, "--workload", file, "--vocabulary", 300, "--no-audit").exit_code == 0
        sent.append([tuple(body["prompt"]) for _, body in engine.bodies if not body.get("stream")][1:])
    assert sent[0] == sent[1]
    assert len(set(sent[0])) == 6
    assert all(len(prompt) == 20 and prompt[0] == BOS and max(prompt) < 300 for prompt in sent[0])


def test_no_more_requests_in_flight_than_the_load_says(run: Run, tmp_path: Path) -> None:
    class Crowd(Engine):
        def seconds(self, ids: list[int], count: int) -> float:
            return 0.05

    file = workload_file(tmp_path / "w.yaml", input_tokens=8, in_flight=3, requests=9, warmups=0, streamed=True)
    with StubServer(Crowd()) as server:
        document = printed(run("bench", server.url, "--workload", file, "--vocabulary", 300, "--no-audit", "--json"))
    # nine requests of 50 ms, three at a time: 150 ms, where one at a time would be 450
    assert 0.14 < document["loads"][0]["runs"][0]["duration_s"] < 0.44


# what is counted and written


def test_measures_agree_with_the_raw_log(run: Run, tmp_path: Path) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True)
    with StubServer(Engine(tokens_per_second=400)) as server:
        document = printed(run("bench", server.url, "--workload", file, "--output", tmp_path / "out", "--json", "--runs", 3, "--no-audit"))
    lines = [json.loads(line) for line in (tmp_path / "out" / "benchmark.jsonl").read_text().splitlines()]
    tps = []
    for number in range(3):
        own = [line for line in lines[1:] if line["load"] == "one" and line["run"] == number]
        assert len(own) == 6
        wall = max(line["ended_s"] for line in own) - min(line["started_s"] for line in own)
        tps.append(sum(len(line["token_ids"]) for line in own) / wall)
        measured = document["loads"][0]["runs"][number]
        assert measured["tps"] == pytest.approx(tps[-1])
        assert measured["latency_ms"]["mean"] == pytest.approx(1000 * statistics.mean(line["ended_s"] - line["started_s"] for line in own))
        assert measured["latency_ms"]["mean"] > 29  # 12 tokens at 400 a second
    assert 200 < tps[0] < 401
    spread = document["loads"][0]["tps"]
    assert (spread["mean"], spread["deviation"]) == (pytest.approx(statistics.mean(tps)), pytest.approx(statistics.stdev(tps)))
    assert spread["lower_95"] < min(tps)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == document
    assert not (tmp_path / "out.partial").exists()
    probe = document["loads"][0]["streamed_probe"]
    assert probe["first_token_ms"]["mean"] > 2
    assert probe["first_token_ms"]["mean"] + 11 * probe["between_tokens_ms"]["mean"] == pytest.approx(probe["latency_ms"]["mean"], abs=5)


def test_the_summary_has_exactly_the_arenas_keys(run: Run, tmp_path: Path) -> None:
    records = tmp_path / "records.jsonl"
    records.write_text("".join(json.dumps({"id": str(n), "context_token_ids": [2, 9 + n], "target_token_ids": [5, 6, 7]}) + "\n" for n in range(3)))
    file = workload_file(tmp_path / "w.yaml", chat=True)
    with StubServer(Engine()) as server:
        base = f"{server.url}/v1"
        assert run("bench", server.url, "--workload", file, "--output", tmp_path / "out", "--ppl", records).exit_code == 0
        assert run("bench", server.url, "--workload", file, "--output", tmp_path / "bare").exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert (summary["completed"], summary["num_prompts"], summary["output_len"], summary["max_concurrency"]) == (6, 6, 12, 1)
    assert (summary["model"], summary["base_url"], summary["ppl_num_tokens"]) == ("stub", base, 9)
    assert summary["tps"] == summary["output_tps"] == pytest.approx(6 * 12 / summary["duration_s"])
    for key in ("benchmark_jsonl", "ppl_summary_file", "ppl_results_file"):
        assert (tmp_path / "out" / summary[key]).is_file()
    bare = json.loads((tmp_path / "bare" / "summary.json").read_text())
    assert set(bare) == {key for key in SUMMARY_KEYS if not key.startswith("ppl")}


def test_a_runs_measure_by_hand() -> None:
    def answer(index: int, start: float, end: float, segment: int, arrivals: tuple[tuple[float, int], ...] = ()) -> Finished:
        return Finished("one", 0, segment, index, str(index), start, end, 5, None, (7,) * 4, arrivals)

    # two stretches: 0 to 3 s with two requests overlapping, then 0.5 to 1.5 s
    found = bench.measure(0, [answer(0, 0.0, 2.0, 0, ((0.5, 1), (1.5, 2), (2.0, 1))), answer(1, 1.0, 3.0, 0), answer(2, 0.5, 1.5, 1)])
    assert (found.duration_s, found.output_tokens, found.tps, found.total_tps) == (4.0, 12, 3.0, 27 / 4)
    assert (found.latency_ms.mean, found.latency_ms.median) == (pytest.approx(5000 / 3), 2000)
    assert found.first_token_ms is not None
    assert found.first_token_ms.mean == 500
    assert found.between_tokens_ms is not None
    assert found.between_tokens_ms.mean == pytest.approx(500)  # two tokens a second apart from the first, one half a second later
    assert found.interruptions == 1


# a server that dies


def test_a_load_that_does_not_fit_into_the_kv_cache(run: Run, tmp_path: Path) -> None:
    class Small(Engine):
        kv_cache_tokens = 100

    with StubServer(Small()) as server:
        large = run("bench", server.url, "--workload", workload_file(tmp_path / "large.yaml", input_tokens=89)).exception
        assert isinstance(large, UsageError)
        assert "a request of 101 tokens" in large.message
        assert "holds 100" in large.message
        waits = run("bench", server.url, "--workload", workload_file(tmp_path / "waits.yaml", input_tokens=40, in_flight=2), "--vocabulary", 500)
    assert waits.exit_code == 0, waits.exception
    assert "2 requests of 104 tokens in flight" in waits.stderr


def test_a_server_that_dies_half_way(run: Run, tmp_path: Path) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True, warmups=0)
    engine = Recorder()
    with StubServer(engine, dies_after=4) as server:
        url = server.url
        arguments = ["bench", url, "--workload", file, "--output", tmp_path / "out", "--no-audit", "--json"]
        stopped = run(*arguments)
        assert isinstance(stopped.exception, StoppedSafely)
        assert stopped.exception.exit_code == 75
        assert "4 finished requests are kept" in stopped.exception.message
        assert not (tmp_path / "out").exists()
        # half a line, as a kill leaves it
        journal = tmp_path / "out.partial" / "benchmark.jsonl"
        journal.write_bytes(journal.read_bytes() + b'{"kind": "req')
        server.dies_after = None
        engine.bodies.clear()
        document = printed(run(*arguments))
    assert document["loads"][0]["runs"][0]["requests"] == 6
    assert document["loads"][0]["runs"][0]["interruptions"] == 1
    assert len([body for _, body in engine.bodies if not body.get("stream")]) == 3  # what was done is not asked again, but for one to compare


def test_requests_of_two_checkpoints_are_never_mixed(tmp_path: Path) -> None:
    workload = find_workload(str(workload_file(tmp_path / "w.yaml", chat=True, warmups=0)))
    sent = {load.name: make_text_prompts(load.requests, 1) for load in workload.loads}
    with StubServer(Engine(), dies_after=3) as server:
        def measured(digest: str) -> Any:
            with atomic.resumable_directory(tmp_path / "out", bench.JOURNAL) as partial:
                return bench.run_bench(Endpoint.open(server.url), workload, sent, target="model", audited=False, partial=partial,
                                       target_digest=digest)  # fmt: skip

        with pytest.raises(StoppedSafely):
            measured("a" * 64)
        server.dies_after = None
        with pytest.raises(UsageError, match="another benchmark"):
            measured("b" * 64)
        result, _ = measured("a" * 64)
    assert result.to_json()["target_digest"] == "a" * 64
    assert len(result.to_json()["data_sha256"]) == 64


class OtherModel(Engine):
    """Other tokens under the same name."""

    def next_id(self, ids: list[int]) -> int:
        return (super().next_id(ids) + 1) % self.vocabulary


class Wavering(Engine):
    """One model whose first token of two that are as likely depends on the moment; `gap` nats are between them."""

    moment, gap = 0, 0.01

    def decode(self, ids: list[int], count: int) -> list[int]:
        made = super().decode([*ids, (self.next_id(ids) + self.moment) % self.vocabulary], count - 1)
        return [(self.next_id(ids) + self.moment) % self.vocabulary, *made]

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        entries = super().prompt_logprobs(ids)
        for position, entry in enumerate(entries):
            best = self.next_id(ids[:position]) if position else 0
            if entry is not None and ids[position] in (best, (best + 1) % self.vocabulary):
                entry[str(ids[position])] = {"logprob": -0.8 - self.gap * (ids[position] != best), "rank": 1 + (ids[position] != best)}
                entry[str(best)] = {"logprob": -0.8, "rank": 1}
        return entries


@pytest.mark.parametrize("streamed", [False, True])
def test_requests_of_two_models_at_one_address_are_never_mixed(run: Run, tmp_path: Path, streamed: bool) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True, warmups=0, streamed=streamed)
    with StubServer(Engine(), dies_after=3) as server:
        arguments = ["bench", server.url, "--workload", file, "--output", tmp_path / "out", "--no-audit", "--json"]
        assert isinstance(run(*arguments).exception, StoppedSafely)
        journal = tmp_path / "out.partial" / "benchmark.jsonl"
        kept, server.dies_after = journal.read_bytes(), None
        server.engine = OtherModel()
        assert isinstance(run(*arguments).exception, IntegrityError)
        server.engine = OtherModel()
        server.engine.name = "another"
        assert isinstance(run(*arguments).exception, UsageError)
        assert journal.read_bytes() == kept
        server.engine = Engine()
        document = printed(run(*arguments))
    assert document["loads"][0]["runs"][0]["requests"] == 6


@pytest.mark.parametrize(("gap", "same"), [(0.01, True), (3.0, False)])
def test_a_model_that_wavers_between_near_ties_is_the_same_model(run: Run, tmp_path: Path, gap: float, same: bool) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True, warmups=0)
    engine = Wavering()
    engine.gap = gap
    with StubServer(engine, dies_after=3) as server:
        arguments = ["bench", server.url, "--workload", file, "--output", tmp_path / "out", "--no-audit", "--json"]
        engine.moment = 1
        assert isinstance(run(*arguments).exception, StoppedSafely)
        server.dies_after, engine.moment = None, 0
        found = run(*arguments).exception
    assert found is None if same else isinstance(found, IntegrityError)


def test_partial_results_of_another_benchmark(run: Run, tmp_path: Path) -> None:
    with StubServer(Engine(), dies_after=3) as server:
        first = workload_file(tmp_path / "w.yaml", chat=True, warmups=0)
        assert isinstance(run("bench", server.url, "--workload", first, "--output", tmp_path / "out").exception, StoppedSafely)
        other = workload_file(tmp_path / "v.yaml", chat=True, warmups=0, output_tokens=13)
        error = run("bench", server.url, "--workload", other, "--output", tmp_path / "out").exception
        assert isinstance(error, UsageError)
        assert "another benchmark" in str(error)
        (tmp_path / "out.partial" / "benchmark.jsonl").write_text("nonsense\n")
        assert isinstance(run("bench", server.url, "--workload", first, "--output", tmp_path / "out").exception, IntegrityError)


@pytest.mark.parametrize("streamed", [False, True])
def test_nothing_listens_after_the_first_answer(run: Run, tmp_path: Path, streamed: bool) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True, warmups=0, streamed=streamed)
    with StubServer(Engine(), dies_after=0) as server:
        error = run("bench", server.url, "--workload", file).exception
    assert isinstance(error, StoppedSafely)
    assert "nothing is kept without --output" in str(error)


# servers that cheat


class Short(Engine):
    """Makes fewer tokens than asked and says otherwise."""

    def decode(self, ids: list[int], count: int) -> list[int]:
        return super().decode(ids, count - count // 4)

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": asked, "total_tokens": len(prompt) + asked}


class Overcounts(Engine):
    """Makes what was asked and claims more."""

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        return {"prompt_tokens": len(prompt), "completion_tokens": 2 * asked, "total_tokens": len(prompt) + 2 * asked}


class WithoutIds(Engine):
    """Keeps its ids to itself."""

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        return super().answer(path, {**body, "return_token_ids": False})


class Samples(Engine):
    """Draws one token in ten."""

    rng = random.Random(1)

    def decode(self, ids: list[int], count: int) -> list[int]:
        made = list(ids)
        for _ in range(count):
            made.append(self.rng.randrange(4, 260) if self.rng.random() < 0.1 else self.next_id(made))
        return made[len(ids) :]


class OtherScorer(Engine):
    """Scores prompts with another model than it decodes with."""

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        other = Engine()
        other.next_id = lambda ids: (ids[-1] * 17 + 5) % 512  # type: ignore[method-assign]
        return other.prompt_logprobs(ids)


class Store(Engine):
    """Answers prompts that it has seen from a store, at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def seconds(self, ids: list[int], count: int) -> float:
        known = tuple(ids) in self.seen
        self.seen.add(tuple(ids))
        return 0.002 if known else 0.04


class PutsBosBack(Engine):
    """Adds a BOS where it misses one, and hides it."""

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        if ids[0] == BOS:
            return super().prompt_logprobs(ids)
        scored = super().prompt_logprobs([BOS, *ids])
        return [None, *scored[2:]]


class AddsBos(Engine):
    """Adds a BOS to every prompt and counts it."""

    def usage(self, prompt: list[int], made: list[int], asked: int) -> dict[str, int]:
        return {**super().usage(prompt, made, asked), "prompt_tokens": len(prompt) + 1}


class TruncatedScores(Engine):
    """Leaves the last prompt token out of prompt_logprobs."""

    def prompt_logprobs(self, ids: list[int]) -> list[dict[str, Any] | None]:
        return super().prompt_logprobs(ids)[:-1]


@pytest.mark.parametrize(("cheat", "word"), [
    (Short, "made 9 tokens, 12 were asked for; its usage says 12"), (Overcounts, "its usage says 24"), (WithoutIds, "no token ids to count"),
    (Samples, "behind the one that scoring prefers"), (OtherScorer, "behind the one that scoring prefers"),
    (Store, "unseen prompts are as fast"), (PutsBosBack, "no token is added in secret"), (AddsBos, "prompt tokens"),
    (TruncatedScores, "prompt_logprobs of"),
])  # fmt: skip
@pytest.mark.parametrize("form", ["chat", "ids", "streamed"])
def test_servers_that_cheat(run: Run, tmp_path: Path, cheat: type[Engine], word: str, form: str) -> None:
    shape: dict[str, Any] = {"chat": {"chat": True}, "ids": {"input_tokens": 16}, "streamed": {"input_tokens": 16, "streamed": True}}[form]
    file = workload_file(tmp_path / "w.yaml", **shape)
    with StubServer(cheat()) as server:
        error = run("bench", server.url, "--workload", file, "--vocabulary", 300).exception
    assert isinstance(error, IntegrityError), error
    assert error.exit_code == 4
    assert word in error.message


@pytest.mark.parametrize("form", ["chat", "ids", "streamed"])
def test_an_honest_server_is_not_accused(run: Run, tmp_path: Path, form: str) -> None:
    shape: dict[str, Any] = {"chat": {"chat": True}, "ids": {"input_tokens": 16}, "streamed": {"input_tokens": 16, "streamed": True}}[form]
    file = workload_file(tmp_path / "w.yaml", **shape)
    with StubServer(Engine(tokens_per_second=2000)) as server:
        result = run("bench", server.url, "--workload", file, "--vocabulary", 300, "--json")
    assert result.exception is None
    assert [finding["kept"] for finding in printed(result)["loads"][0]["audit"]] == [True] * 3


def test_what_a_cheat_measured_is_written_before_the_verdict(run: Run, tmp_path: Path) -> None:
    file = workload_file(tmp_path / "w.yaml", chat=True)
    with StubServer(Samples()) as server:
        result = run("bench", server.url, "--workload", file, "--output", tmp_path / "out", "--json")
    assert isinstance(result.exception, IntegrityError)
    assert json.loads((tmp_path / "out" / "bench.json").read_text()) == printed(result)


# bad input


@pytest.mark.parametrize(("content", "word"), [
    ("name: x\nloads: []\n", "loads"), ("name: x\nloads:\n- {name: a, requests: 0, output_tokens: 1}\n", "requests"),
    ("name: x\nloads:\n- {name: a, requests: 1, output_tokens: 1, chat: true, input_tokens: 5}\n", "chat"),
    ("name: x\nloads:\n- {name: a, requests: 1, output_tokens: 1, speed: 5}\n", "speed"), ("[1, 2]", "--prompts"), ("name: [", "YAML"),
    ("name: x\nloads:\n- {name: a, requests: 1, output_tokens: 1}\n- {name: a, requests: 1, output_tokens: 1}\n", "same name"), ("", "x"),
])  # fmt: skip
def test_bad_workload_files(tmp_path: Path, content: str, word: str) -> None:
    (tmp_path / "x.yaml").write_text(content)
    with pytest.raises(UsageError) as error:
        find_workload(str(tmp_path / "x.yaml"))
    assert word in error.value.message + error.value.next_step


@pytest.mark.parametrize(("name", "content", "word"), [
    ("p.json", "[]", "no prompts"), ("p.json", "{}", "list"), ("p.json", "[1]", "object"), ("p.txt", "x", "'.txt'"),
    ("p.json", '[{"id": "a", "conversations": []}]', "no prompt"), ("p.jsonl", '{"id": "a", "prompt_token_ids": [1, -2]}', "token ids"),
    ("p.jsonl", '{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "same id"), ("p.jsonl", '{"id": "a", "prompt": "x"}\n{', "JSON"),
    ("p.jsonl", '{"id": "a", "prompt": "  "}', "no prompt"),
])  # fmt: skip
def test_bad_prompt_files(tmp_path: Path, name: str, content: str, word: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UsageError) as error:
        read_prompts(tmp_path / name)
    assert word in error.value.message + error.value.next_step


def test_prompts_that_do_not_fit(run: Run, tmp_path: Path) -> None:
    file = workload_file(tmp_path / "w.yaml", input_tokens=4090, requests=2)
    with StubServer(Engine()) as server:
        error = run("bench", server.url, "--workload", file, "--vocabulary", 300).exception
        assert isinstance(error, UsageError)
        assert "4096" in str(error)
        words = tmp_path / "p.jsonl"
        words.write_text(json.dumps({"id": "long", "prompt": "x" * 5000}))
        refused = run("bench", server.url, "--workload", workload_file(tmp_path / "v.yaml", chat=True), "--prompts", words).exception
        assert isinstance(refused, UsageError)
        assert "maximum context length" in str(refused)
        unknown = run("bench", server.url, "--workload", workload_file(tmp_path / "u.yaml", input_tokens=9)).exception
        assert isinstance(unknown, UsageError)
        assert "--vocabulary" in unknown.next_step


def test_a_server_without_a_chat_template_is_told_from_a_short_window(run: Run, tmp_path: Path) -> None:
    class Base(Engine):
        chat_template = False

    with StubServer(Base()) as server:
        error = run("bench", server.url, "--workload", workload_file(tmp_path / "w.yaml", chat=True)).exception
    assert isinstance(error, UsageError)
    assert "chat template" in error.message
    assert "chat_template.jinja" in error.next_step
    assert "shorter" not in error.next_step


def test_text_where_ids_are_sent_needs_a_tokenizer(run: Run, tmp_path: Path, source: Path) -> None:
    words = tmp_path / "p.jsonl"
    words.write_text("".join(json.dumps({"id": n, "prompt": f"the words of prompt {n}"}) + "\n" for n in range(8)))
    file = workload_file(tmp_path / "w.yaml", input_tokens=20)
    engine = Recorder()
    with StubServer(engine) as server:
        arguments = ["bench", server.url, "--workload", file, "--prompts", words, "--no-audit"]
        error = run(*arguments).exception
        assert isinstance(error, UsageError)
        assert "--tokenizer" in error.next_step
        assert run(*arguments, "--tokenizer", source).exit_code == 0
    assert all(len(body["prompt"]) == 20 for _, body in engine.bodies)
    assert engine.bodies[1][1]["prompt"][0] == BOS


def test_other_bad_input(run: Run, tmp_path: Path) -> None:
    for arguments, word in (
        (["bench", tmp_path / "none"], "neither"), (["bench", "http://127.0.0.1:1"], "reached"), (["bench", tmp_path, "--workload", "fast"], "fast"),
        (["bench", tmp_path, "--prompts", tmp_path / "no.json"], "read"), (["bench", tmp_path, "--scale", 2], "scale"),
        (["bench", tmp_path, "--ppl", tmp_path / "no.jsonl"], "--ppl"),
    ):  # fmt: skip
        error = run(*arguments).exception
        assert isinstance(error, UsageError), (arguments, error)
        assert word in str(error)
    with StubServer(Engine()) as server:
        error = run("bench", server.url, "--output", tmp_path, "--scale", 0.01).exception
    assert isinstance(error, UsageError)
    assert "exists" in str(error)


def test_loads_have_names_that_files_can_have() -> None:
    with pytest.raises(ValueError):
        Load(name="a/b", requests=1, output_tokens=1)
