"""`gemq eval-accuracy`: lm-eval against an endpoint without a hub, its grades, intervals and paired drops by hand, and stops."""

from __future__ import annotations

import importlib.util
import json
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.stub_server import Engine, StubServer
from click.testing import Result

from gemq import atomic
from gemq.commands import accuracy as commands
from gemq.errors import GemqError, IntegrityError, OverBudgetError, StoppedSafely, UsageError
from gemq.eval import accuracy, lm_eval_run
from gemq.eval.accuracy import Graded

Run = Callable[..., Result]


@pytest.fixture
def run(command_line: Callable[..., Run]) -> Run:
    """Call the command."""
    return command_line(commands, "eval-accuracy")


@pytest.fixture
def sums(tmp_path: Path) -> Path:
    """Twenty questions in GSM8K's form; the first four are the examples."""
    path = tmp_path / "sums.jsonl"
    rows = [{"question": f"What is {n} and {n}?", "answer": f"It is <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"} for n in range(500, 520)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


class Pupil(Engine):
    """Adds up, and gets wrong what `wrong` says."""

    max_model_len = 100_000

    def __init__(self, wrong: Callable[[int], bool] = lambda n: False, form: str = " It is so.\n#### {}") -> None:
        super().__init__()
        self.wrong, self.form = wrong, form
        self.asked: list[str] = []

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
        prompt = body["messages"][-1]["content"] if "messages" in body else body["prompt"]
        prompt = prompt[0] if isinstance(prompt, list) else prompt
        self.asked.append(prompt)
        number = int(re.findall(r"What is (\d+) and", prompt)[-1])
        status, document, seconds = super().answer("/v1/completions", {**body, "prompt": "x", "max_tokens": 1})
        said = self.form.format(f"{2 * number + self.wrong(number):,}")
        document["choices"][0] |= {"text": said, "message": {"role": "assistant", "content": said}}
        return status, document, seconds


def measured(result: Result) -> dict[str, Any]:
    assert result.exception is None or isinstance(result.exception, GemqError), result.exception
    return json.loads(result.stdout)


def test_what_is_asked_and_graded(run: Run, sums: Path) -> None:
    pupil = Pupil(wrong=lambda n: n % 4 == 0)
    with StubServer(pupil) as server:
        (domain,) = measured(run(server.url, "--data", sums, "--shots", 4, "--json"))["domains"]
    assert len(pupil.asked) == 16
    rows = [json.loads(line) for line in sums.read_text().splitlines()]
    shown = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in rows[:4])
    assert sorted(pupil.asked)[0] == f"{shown}Question: {rows[4]['question']}\nAnswer:"
    # 504 to 519: 504, 508, 512 and 516 are wrong
    assert [question["grade"] for question in domain["questions"]] == [0.0, 1.0, 1.0, 1.0] * 4
    assert (domain["accuracy"], domain["name"]) == (0.75, "gsm8k")
    assert (domain["low"], domain["high"]) == (pytest.approx(0.5050, abs=1e-4), pytest.approx(0.8982, abs=1e-4))


@pytest.mark.parametrize(("form", "right"), [
    ("#### {}", True), ("It is\n#### {}.", True), ("#### ${}", False), ("The answer is {}", False), ("#### {}0", False), ("", False),
])  # fmt: skip
def test_the_final_number(run: Run, sums: Path, form: str, right: bool) -> None:
    with StubServer(Pupil(form=form)) as server:
        (domain,) = measured(run(server.url, "--data", sums, "--shots", 4, "--limit", 3, "--json"))["domains"]
    assert domain["accuracy"] == float(right)
    assert len(domain["questions"]) == 3


def test_real_questions_through_the_chat_endpoint(run: Run, shared_data: Path) -> None:
    class Parrot(Pupil):
        def answer(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], float]:
            self.asked.append(path)
            status, document, seconds = Engine.answer(self, "/v1/completions", {**body, "prompt": "x", "max_tokens": 1})
            document["choices"][0]["message"] = {"role": "assistant", "content": "She makes 18 dollars.\n#### 18"}
            return status, document, seconds

    parrot = Parrot()
    with StubServer(parrot) as server:
        (domain,) = measured(run(server.url, "--data", shared_data / "gsm8k-test.jsonl", "--limit", 20, "--chat", "--json"))["domains"]
    answers = [json.loads(line)["answer"].rpartition("#### ")[2] for line in (shared_data / "gsm8k-test.jsonl").read_text().splitlines()]
    assert [question["grade"] for question in domain["questions"]] == [float(answer == "18") for answer in answers[8:28]]
    assert set(parrot.asked) == {"/v1/chat/completions"}


def test_the_drop_is_paired(run: Run, sums: Path, tmp_path: Path) -> None:
    with StubServer(Pupil(wrong=lambda n: n in (505, 506, 507))) as ours, StubServer(Pupil(wrong=lambda n: n == 505 or n == 510)) as theirs:
        document = measured(run(ours.url, "--data", sums, "--shots", 4, "--reference", theirs.url, "--json"))
        # kept as a result, the reference is not asked again
        assert run(theirs.url, "--data", sums, "--shots", 4, "--output", tmp_path / "reference.json").exception is None
        assert not (tmp_path / "reference.json.partial").exists()
        again = run(ours.url, "--data", sums, "--shots", 4, "--reference", tmp_path / "reference.json", "--json")
        over = run(ours.url, "--data", sums, "--shots", 4, "--reference", tmp_path / "reference.json", "--budget", 5)
        other = run(ours.url, "--data", sums, "--shots", 3, "--reference", tmp_path / "reference.json")
    drop = document["domains"][0]["drop"]
    # 506 and 507 lost, 510 won, of 16: 1/16 = 6.25 points
    assert (drop["points"], drop["lost"], drop["won"], drop["reference_accuracy"]) == (6.25, 2, 1, 0.875)
    assert document["mean_drop_points"] == 6.25
    # the bound by the equation itself: at delta = U the score is -1.645 (2 lost, 1 won, n = 16)
    u = drop["upper_95_points"] / 100
    b, c = -3 + 31 * u, -u * (1 - u)
    q = (math.sqrt(b * b - 128 * c) - b) / 64
    assert (1 - 16 * u) / math.sqrt(16 * (2 * q + u * (1 - u))) == pytest.approx(-1.644854, abs=1e-6)
    assert 0.0625 < u < 0.3
    assert measured(again)["domains"] == document["domains"]
    assert isinstance(over.exception, OverBudgetError)
    assert over.exception.exit_code == 3
    assert isinstance(other.exception, UsageError)
    assert "other questions" in str(other.exception)


def test_an_endpoint_that_dies_half_way(run: Run, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pupil = Pupil()
    file = tmp_path / "result.json"
    with StubServer(pupil, dies_after=6) as server:
        arguments = [server.url, "--data", sums, "--shots", 4, "--in-flight", 2, "--output", file, "--json"]
        stopped = run(*arguments)
        assert isinstance(stopped.exception, StoppedSafely), stopped.exception
        assert stopped.exception.exit_code == 75
        assert "kept in" in stopped.exception.message
        assert not file.exists()
        other = run(*arguments[:3], "--shots", 3, *arguments[5:])
        assert isinstance(other.exception, UsageError)
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        other = run(*arguments, "--checkpoint", tmp_path / "other")
        assert isinstance(other.exception, UsageError)
        assert "other questions" in str(other.exception)
        server.dies_after = None
        pupil.asked.clear()
        document = measured(run(*arguments))
    assert 0 < len(pupil.asked) <= 11  # at least five of the six answers were kept
    assert document["domains"][0]["accuracy"] == 1.0
    assert json.loads(file.read_text()) == document


def test_answers_of_two_models_at_one_address_are_never_mixed(run: Run, sums: Path, tmp_path: Path) -> None:
    pupil = Pupil()
    with StubServer(pupil, dies_after=6) as server:
        arguments = [server.url, "--data", sums, "--shots", 4, "--in-flight", 2, "--output", tmp_path / "result.json", "--json"]
        assert isinstance(run(*arguments).exception, StoppedSafely)
        server.dies_after = None
        pupil.name = "another"
        other = run(*arguments)
        assert isinstance(other.exception, UsageError)
        assert "other questions" in str(other.exception)
        pupil.name, pupil.wrong = "stub", lambda n: True  # another model under the same name
        for _ in range(2):  # what is kept stays the first model's
            other = run(*arguments)
            assert isinstance(other.exception, IntegrityError), other.exception
            assert not (tmp_path / "result.json").exists()
        pupil.wrong = lambda n: False
        pupil.asked.clear()
        assert measured(run(*arguments))["domains"][0]["accuracy"] == 1.0
    assert 0 < len(pupil.asked) <= 12  # one of them for the second time


def test_a_references_answers_are_checked_too(run: Run, sums: Path, tmp_path: Path) -> None:
    pupil, teacher = Pupil(), Pupil()
    with StubServer(pupil) as server, StubServer(teacher, dies_after=6) as other:
        arguments = [server.url, "--reference", other.url, "--data", sums, "--shots", 4, "--in-flight", 2, "--output", tmp_path / "result.json",
                     "--json"]  # fmt: skip
        assert isinstance(run(*arguments).exception, StoppedSafely)
        other.dies_after = None
        teacher.wrong = lambda n: True
        assert isinstance(run(*arguments).exception, IntegrityError)
        teacher.wrong = lambda n: False
        assert measured(run(*arguments))["domains"][0]["drop"]["points"] == 0


@pytest.mark.parametrize(("kept", "now", "same"), [
    ("7", "7", True), ("7", "9", False), ((-12.0, True), (-12.01, True), True), ((-12.0, True), [-12.01, False], True),
    ((-12.0, True), (-14.0, True), False),
    (-250.0, -250.3, True), (-250.0, -260.0, False), (-1.0, float("nan"), False), ("7", None, False),
])  # fmt: skip
def test_log_likelihoods_may_differ_by_rounding_and_texts_not_at_all(kept: object, now: object, same: bool) -> None:
    assert lm_eval_run.same_answer(kept, now) is same


def test_files_of_the_user_where_answers_are_kept_stay_there(run: Run, sums: Path, tmp_path: Path) -> None:
    kept = tmp_path / "result.json.partial"
    kept.mkdir()
    (kept / "key.json").write_text("my own keys")
    (kept / "thesis.txt").write_text("mine")
    with StubServer(Pupil(), dies_after=6) as server:
        arguments = [server.url, "--data", sums, "--shots", 4, "--in-flight", 2, "--output", tmp_path / "result.json", "--json"]
        refused = run(*arguments)
        assert isinstance(refused.exception, UsageError), refused.exception
        assert {path.name: path.read_text() for path in kept.iterdir()} == {"key.json": "my own keys", "thesis.txt": "mine"}
        kept.rename(tmp_path / "mine")
        assert isinstance(run(*arguments).exception, StoppedSafely)
        (kept / "thesis.txt").write_text("mine")
        server.dies_after = None
        assert run(*arguments).exception is None
    assert (tmp_path / "result.json").is_file()
    assert "thesis.txt" in {path.name for path in kept.iterdir()} <= {"thesis.txt", atomic.RECORD}


def test_bad_input(run: Run, sums: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, content in (("half.jsonl", '{"question": "x"}\n'), ("text.jsonl", "words\n"), ("none.jsonl", '{"question": "x", "answer": "5"}\n'),
                          ("empty.jsonl", "")):  # fmt: skip
        (tmp_path / name).write_text(content)
    (tmp_path / "other.json").write_text('{"kind": "ppl"}')
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    for name, value in offline.items():
        monkeypatch.setenv(name, value)
    from lm_eval.tasks import TaskManager

    whole = TaskManager.__init__  # reading the names of lm-eval's own tasks takes it many seconds
    monkeypatch.setattr(TaskManager, "__init__", lambda self, **_: whole(self, include_defaults=False))
    with StubServer(Pupil()) as server:
        url = server.url
        for arguments, word in (
            ((url,), "--data"), ((url, "--data", sums, "--tasks", "gsm8k"), "twice"), ((url, "--data", tmp_path / "no.jsonl"), "does not exist"),
            ((url, "--data", tmp_path / "half.jsonl"), "line 1"), ((url, "--data", tmp_path / "text.jsonl"), "line 1"),
            ((url, "--data", tmp_path / "none.jsonl"), "####"), ((url, "--data", tmp_path / "empty.jsonl"), "nothing but white space"),
            ((url, "--data", sums, "--shots", 20), "no question"), ((url, "--data", sums, "--shots", 21), "20 questions"),
            ((url, "--data", sums, "--budget", 5), "--reference"), ((url, "--data", sums, "--output", sums), "exists"),
            ((url, "--data", sums, "--reference", tmp_path / "other.json"), "ppl"), (("http://127.0.0.1:1", "--data", sums), "reached"),
            ((tmp_path / "nothing", "--data", sums), "neither"), ((url, "--tasks", "gemq_no_such_task"), "gemq_no_such_task"),
        ):  # fmt: skip
            error = run(*arguments).exception
            assert isinstance(error, UsageError), (arguments, error)
            assert word in error.message + error.next_step, (arguments, error.message)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    error = run("http://127.0.0.1:1", "--data", sums).exception
    assert isinstance(error, UsageError)
    assert "gemq[accuracy]" in error.next_step


# statistics by hand


def test_wilsons_interval() -> None:
    # 8 of 10: centre (0.8 + 0.19207)/1.38415 = 0.71674, reach 1.41598 * sqrt(0.016 + 0.0096036) = 0.22657
    assert accuracy.wilson(8, 10) == (pytest.approx(0.49016, abs=1e-4), pytest.approx(0.94331, abs=1e-4))
    assert accuracy.wilson(0, 10) == (0.0, pytest.approx(0.27754, abs=1e-4))
    assert accuracy.wilson(10, 10)[1] == 1.0
    with pytest.raises(UsageError):
        accuracy.wilson(0, 0)


def graded(grades: list[float]) -> list[Graded]:
    return [Graded(index, str(index), grade, 10) for index, grade in enumerate(grades)]


def test_a_drop_without_differences_still_has_a_bound() -> None:
    drop = accuracy.paired_drop(graded([1.0] * 100), graded([1.0] * 100))
    # z^2 / (n + z^2) = 2.705543 / 102.705543
    assert drop.points == 0
    assert drop.upper_95_points == pytest.approx(2.63427, abs=1e-4)


def test_grades_that_are_shares_take_students_t() -> None:
    drop = accuracy.paired_drop(graded([0.5, 0.5, 0.25]), graded([0.75, 0.5, 0.5]))
    # differences 0.25, 0, 0.25: mean 1/6, s = 0.144338, t(2) = 2.919986
    assert drop.points == pytest.approx(100 / 6)
    assert drop.upper_95_points == pytest.approx(100 * (1 / 6 + 2.919986 * 0.1443376 / math.sqrt(3)), abs=1e-3)


def test_other_questions_are_not_compared() -> None:
    changed = [Graded(0, "other", 1.0, 1), Graded(1, "1", 1.0, 1)]
    for other in (graded([1.0]), graded([1.0] * 3), changed):
        with pytest.raises(UsageError, match="different questions"):
            accuracy.paired_drop(graded([1.0, 1.0]), other)


@pytest.mark.parametrize(("n", "lost", "won"), [(100, 0.05, 0.02), (250, 0.03, 0.03), (40, 0.10, 0.02)])
def test_the_bound_covers(n: int, lost: float, won: float) -> None:
    rng = random.Random(7)
    below = 0
    for _ in range(1500):
        differences = [rng.random() for _ in range(n)]
        theirs = [0.0 if d < won else 1.0 for d in differences]
        ours = [0.0 if won <= d < won + lost else 1.0 for d in differences]
        bound = accuracy.paired_drop(graded(ours), graded(theirs)).upper_95_points
        assert bound is not None
        below += bound < 100 * (lost - won)
    assert below / 1500 < 0.065
