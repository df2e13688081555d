r"""Two configurations of a server measured against each other: pairs of runs, the test that decides, greedy ids, and a long prompt scored.

- A run asks the same prompts for the same number of tokens; its speed is tokens a second, over several loads their geometric mean.
- Runs come in pairs, in the order B A, A B, B A ...: a drift of the machine's clock hits both sides alike. With room for two servers both
  stay up; with room for one, each run after the other side's is in a fresh start.
- After the planned pairs `verdict` says whether a candidate is measured further, and in the end whether it is kept.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from gemq import output
from gemq.errors import GemqError, StoppedSafely
from gemq.eval.bench import measure
from gemq.eval.decoded import DecodeRecord
from gemq.eval.endpoint import Endpoint
from gemq.eval.greedy import capture, judge_by_records
from gemq.eval.load import Finished, drive
from gemq.eval.records import Record
from gemq.eval.workloads import Load, Prompt
from gemq.serve.server import Server
from gemq.serve.verdict import Criterion, Divergence, Trial

# what vLLM says of the kernels and backends that it took
_TAKEN = re.compile(r"(?:Using|Selected) (?:AttentionBackendEnum\.)?(\w+LinearKernel|\w+(?= (?:attention )?backend))")


@dataclass(frozen=True)
class Question:
    """What a run asks (loads with their prompts), and what ids and scores are compared on. `pairs` is how many pairs of runs."""

    loads: tuple[Load, ...]
    prompts: dict[str, list[Prompt]]
    pairs: int
    greedy: tuple[Prompt, ...]
    greedy_tokens: int
    scored: tuple[int, ...]


@dataclass
class Running:
    """A server that answers, and what it took."""

    endpoint: Endpoint
    server: Server
    taken: list[str]
    warm: bool = False


class CandidateFailed(Exception):
    """The candidate's own server didn't start, died or refused: why."""


class Servers:
    """At most `room` servers by configuration, started as they are needed or ahead; the one that was used least lately makes room."""

    def __init__(self, room: int, start: Callable[[dict[str, str]], Any]) -> None:
        self.room, self._start = room, start
        self._stacks: dict[str, tuple[ExitStack, Callable[[], Server]]] = {}
        self._running: dict[str, Running] = {}
        self.started: list[dict[str, str]] = []  # the settings of every start so far
        self._failed: dict[str, GemqError] = {}  # while others were measured; whoever asks for one hears of it

    @staticmethod
    def _name(settings: dict[str, str]) -> str:
        return repr(sorted(settings.items()))

    def ahead(self, many: Iterable[dict[str, str]]) -> None:
        """Start as many of them as there is room for, and don't wait."""
        for settings in many:
            if len(self._stacks) < self.room and self._name(settings) not in {*self._stacks, *self._failed}:
                self._launch(settings)

    def settle(self) -> None:
        """Wait until none is starting: a start takes processor time from a server that is measured, a fifth of its speed on eight cores."""
        for name in [name for name in self._stacks if name not in self._running]:
            try:
                self._wait(name)
            except GemqError as error:
                if error.exit_code == 130:
                    raise
                self._failed[name] = error

    def _launch(self, settings: dict[str, str]) -> None:
        stack = ExitStack()
        self.started.append(settings)
        self._stacks[self._name(settings)] = stack, stack.enter_context(self._start(settings))

    def get(self, settings: dict[str, str], keep: Sequence[dict[str, str]] = ()) -> Running:
        """The server of `settings`, started if it isn't up, at the cost of one that is not in `keep`; raises GemqError with why it doesn't start."""
        name = self._name(settings)
        if name in self._failed:
            raise self._failed.pop(name)
        if name not in self._stacks:
            kept = {self._name(each) for each in keep}
            while len(self._stacks) >= self.room:
                others = [each for each in self._stacks if each not in kept] or list(self._stacks)
                self.end(others[0])
            self._launch(settings)
        self._stacks[name] = self._stacks.pop(name)  # the last used is the last to go
        if name not in self._running:
            self._wait(name)
        return self._running[name]

    def _wait(self, name: str) -> None:
        try:
            server = self._stacks[name][1]()
            text = server.log.read_text(encoding="utf-8", errors="replace")
            taken = sorted(set(_TAKEN.findall(text)))
            self._running[name] = Running(Endpoint.open(f"{server.url}#{server.model}"), server, taken)
        except BaseException:
            self.end(name)
            raise

    def reason(self, settings: dict[str, str], error: GemqError) -> str:
        """Why the server of `settings` failed with `error`: the engine's own words where it has ended."""
        running = self._running.get(self._name(settings))
        for _ in range(8 if running and isinstance(error, StoppedSafely) else 0):
            assert running is not None
            try:
                running.server.require_alive()
            except GemqError as better:
                return better.message
            time.sleep(0.25)  # its connections are gone before it is
        return error.message

    def drop(self, settings: dict[str, str]) -> None:
        """End the server of `settings`, if it is up."""
        self.end(self._name(settings))

    def end(self, name: str) -> None:
        """End a server by its name here."""
        self._running.pop(name, None)
        self._failed.pop(name, None)
        if name in self._stacks:
            self._stacks.pop(name)[0].close()

    def close(self) -> None:
        """End all of them, also where ending one is interrupted."""
        with ExitStack() as rest:
            for name in list(self._stacks):
                rest.callback(self.end, name)


def speed(running: Running, question: Question) -> float:
    """Tokens a second of one run; the first on a server is preceded by warm-ups."""
    logs = []
    for load in question.loads:
        warmed = load.model_copy(update={"warmups": 0 if running.warm else max(1, load.warmups)})
        answers: list[Finished] = []
        prompts = question.prompts[load.name]
        drive(running.endpoint, warmed, prompts, range(len(prompts)), answers.append)
        logs.append(math.log(measure(0, answers).tps))
    running.warm = True
    return math.exp(math.fsum(logs) / len(logs))


def reference_ids(running: Running, question: Question) -> list[DecodeRecord]:
    """What the server decodes greedily for each prompt."""
    records: list[DecodeRecord] = []
    with running.endpoint.connected() as connection:
        capture(connection, question.greedy, [question.greedy_tokens] * len(question.greedy), records.append)
    return records


def compare_ids(running: Running, question: Question, reference: Sequence[DecodeRecord]) -> list[Divergence]:
    """Where the server's greedy ids part from `reference`, prompt by prompt, with the margin by its own scores; and a long prompt is scored.

    The margin is how far the worse of the two tokens lies behind the best one: a server that decodes otherwise than it scores has no near-ties.
    Raises as Connection.score does where the server can't score a window any more, as it must for a judge.
    """
    compared = {record.id for record in reference}
    prompts = [prompt for prompt in question.greedy if prompt.id in compared]
    found: list[Divergence] = []
    with running.endpoint.connected() as connection:
        def margin(record: DecodeRecord, position: int, reference_token: int) -> float:
            before = (*record.prompt_token_ids, *record.completion_token_ids[:position])
            return max(connection.gaps(Record(record.id, (*before, token), len(before), f"prompt {record.id}"))[0]
                       for token in (reference_token, record.completion_token_ids[position]))  # fmt: skip

        judge = judge_by_records(reference, margin, 0.0)
        ours: list[DecodeRecord] = []
        capture(connection, prompts, [question.greedy_tokens] * len(prompts), ours.append)
        for record in ours:
            one = judge(record)
            if one.divergence is not None:
                found.append(Divergence(one.id, one.divergence, one.margin_nats))
            elif one.near_ties:  # the same score, another id
                found.append(Divergence(one.id, one.tokens - 1, 0.0))
        connection.score(Record("window", question.scored, 1, f"a window of {len(question.scored)} tokens"))
    return found


def run_trial(trial: Trial, servers: Servers, question: Question, test: Criterion, reference: Sequence[DecodeRecord], same: Sequence[str] = (),
              *, alone: bool = False, in_time: Callable[[], bool] = lambda: True) -> None:  # fmt: skip
    """Fill `trial` in: measure it against its incumbent, and if it is faster, compare its ids and score a window.

    `same` names what vLLM took for the incumbent, where a switch is told by that: one that changes nothing of it, or brings something else than
    its value, is not measured. `alone` leaves no server up beside the one that is measured. A second look, where both stay up, takes pairs while
    `in_time` says so. Raises StoppedSafely where the incumbent's own server fails.
    """
    try:
        _measure(trial, servers, question, test, same, alone, in_time)
        if not trial.failure and test.faster(trial.pairs):
            candidate = _of_candidate(trial, servers, lambda running: running)
            trial.divergences = _of_candidate(trial, servers, lambda running: compare_ids(running, question, reference))
            trial.checked = len(reference)
            trial.taken = candidate.taken
    except CandidateFailed as failure:
        trial.failure = str(failure)
        servers.drop(trial.settings)


def _of_candidate(trial: Trial, servers: Servers, ask: Callable[[Running], Any]) -> Any:
    try:
        return ask(servers.get(trial.settings, keep=[trial.against]))
    except GemqError as error:
        if error.exit_code == 130:
            raise
        raise CandidateFailed(servers.reason(trial.settings, error)) from error


def _measure(trial: Trial, servers: Servers, question: Question, test: Criterion, same: Sequence[str], alone: bool,
             in_time: Callable[[], bool]) -> None:  # fmt: skip
    def of_incumbent() -> float:
        if alone:
            servers.drop(trial.settings)
        try:
            return speed(servers.get(trial.against, keep=[trial.settings]), question)
        except GemqError as error:
            if error.exit_code == 130:
                raise
            raise StoppedSafely(f"the server that candidates are compared with failed: {servers.reason(trial.against, error)}",
                                "run the same command again") from error  # fmt: skip

    def of_candidate() -> float:
        if alone:
            servers.drop(trial.against)
        return float(_of_candidate(trial, servers, lambda running: speed(running, question)))

    trial.taken = _of_candidate(trial, servers, lambda running: running.taken)
    if same and list(same) == trial.taken:
        trial.failure = f"vLLM takes the same as before: {', '.join(same)}"
    elif same and trial.value not in trial.taken:
        trial.failure = f"vLLM takes {', '.join(trial.taken)} in its place"
    if trial.failure:
        return
    servers.settle()
    _pair_up(trial, question.pairs, of_incumbent, of_candidate, test)
    cheap = servers.room > 1 and not alone  # else each run is in a fresh start
    if cheap and test.further(trial.pairs):
        _pair_up(trial, test.furthest, of_incumbent, of_candidate, test, in_time)


def _pair_up(trial: Trial, upto: int, of_incumbent: Callable[[], float], of_candidate: Callable[[], float], test: Criterion,
             in_time: Callable[[], bool] = lambda: True) -> None:  # fmt: skip
    """Measure until there are `upto` pairs, the time is over, or the candidate is given up as slower."""
    already = len(trial.pairs)
    with output.progress(f"{trial.switch} {trial.value}{', further' if already else ''}", upto - already, "pairs") as advance:
        for number in range(already, upto):
            if not in_time():
                return
            if number % 2:
                a = of_incumbent()
                b = of_candidate()
            else:
                b = of_candidate()
                a = of_incumbent()
            trial.pairs.append((a, b))
            advance(1, f"{test.ratio(trial.pairs).ratio:.3f}")
            if test.slower(trial.pairs):
                return
