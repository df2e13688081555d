"""Questions that a benchmark asks beside the clock, whose answers differ for an endpoint that measures well by not doing the work.

Each returns a `Finding`; none of them can prove an endpoint honest.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gemq.errors import IntegrityError, UsageError
from gemq.eval.endpoint import Connection, Endpoint
from gemq.eval.load import Finished, drive
from gemq.eval.records import Record
from gemq.eval.workloads import Load, Prompt
from gemq.serve.contract import NEAR_TIE_NATS

RESCORED, PAIRS, ROUNDS = 3, 4, 4
SLOWER, SLOWER_SECONDS = 1.5, 0.005  # unseen prompts against known ones; on two busy cores the medians of four differed by 1.4


@dataclass(frozen=True)
class Finding:
    """A question, whether the answer was an honest endpoint's, and what was seen."""

    name: str
    kept: bool
    seen: str


def decoded_greedily(endpoint: Endpoint, answers: Sequence[Finished], rescored: int = RESCORED) -> Finding | None:
    """Whether timed answers are what the same endpoint's prompt_logprobs prefer, up to near-ties; None where the prompts' ids are unknown.

    Sampling, answers of another model, and log-probabilities of another model all show here.
    """
    name = "timed answers are greedy by prompt_logprobs"
    known = [answer for answer in answers if answer.prompt_token_ids][:rescored]
    if not known:
        return None
    tokens = ties = 0
    with endpoint.connected() as connection:
        for answer in known:
            prompt = answer.prompt_token_ids or ()
            room = len(answer.token_ids) if endpoint.max_length is None else endpoint.max_length - len(prompt) - 1
            ids = answer.token_ids[: max(room, 0)]
            if not ids:
                continue
            record = Record(answer.id, (*prompt, *ids), len(prompt), f"the answer to {answer.id}")
            for position, gap in enumerate(connection.gaps(record)):
                if gap > NEAR_TIE_NATS:
                    return Finding(name, False, f"token {position} of {answer.id} is {gap:.2f} nats behind the one that scoring prefers")
                ties += gap > 0
            tokens += len(ids)
    return Finding(name, True, f"{tokens} tokens of {len(known)} answers" + (f", {ties} near-ties" if ties else ""))


def repeats(endpoint: Endpoint, load: Load, prompt: Prompt, kept: Finished) -> bool:
    """Whether `endpoint` still answers `prompt` of `load` with the token ids that were `kept`, or with others that are near-ties by its own scores.

    One model does not always repeat its ids: how many requests are in flight moves the last digits.
    """
    again: list[Finished] = []
    drive(endpoint, load.model_copy(update={"in_flight": 1, "streamed": False, "warmups": 0}), [prompt], [0], again.append)
    if again[0].token_ids == kept.token_ids:
        return True
    try:
        scored = decoded_greedily(endpoint, [kept])
    except (IntegrityError, UsageError):  # a server without prompt_logprobs
        return False
    return scored is not None and scored.kept


def unseen_as_fast(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], pairs: int = PAIRS) -> Finding:
    """Whether prompts that differ from the timed ones in their last word take as long: a store of known prompts makes them slower."""
    single = load.model_copy(update={"in_flight": 1, "streamed": False, "warmups": 0})
    known: list[float] = []
    unseen: list[float] = []
    for number in range(ROUNDS * pairs):
        prompt = prompts[number % min(pairs, len(prompts))]
        for asked, seconds in ((_changed(prompt, number), unseen), (prompt, known)):
            drive(endpoint, single, [asked], [0], lambda answer, into=seconds: into.append(answer.seconds))  # type: ignore[misc]
        if (number + 1) % pairs == 0 and not _slower(unseen, known):
            break  # what else runs on this machine slows some requests, a store of answers speeds up all that it knows, every time
    mine, other = statistics.median(known), statistics.median(unseen)
    return Finding("unseen prompts are as fast", not _slower(unseen, known),
                   f"{1000 * other:.1f} ms against {1000 * mine:.1f} ms for known ones (medians of {len(known)})")  # fmt: skip


def _slower(unseen: Sequence[float], known: Sequence[float]) -> bool:
    """Whether unseen prompts are slower by far, in the median and in the fastest of each."""
    pairs = ((statistics.median(unseen), statistics.median(known)), (min(unseen), min(known)))
    return all(late > SLOWER * early and late - early > SLOWER_SECONDS for late, early in pairs)


def _changed(prompt: Prompt, number: int) -> Prompt:
    """The prompt with another end, so that a cache of prefixes helps both alike."""
    if prompt.text is not None:
        return Prompt(f"{prompt.id}-changed", text=f"{prompt.text} ({time.time_ns() % 9973 + number})")
    tokens = prompt.tokens or ()
    others = [token for token in tokens[1:] if token != tokens[-1]] or [tokens[-1] - 1 if tokens[-1] else 1]  # ids that the model surely knows
    return Prompt(f"{prompt.id}-changed", tokens=(*tokens[:-1], others[number % len(others)]))


def adds_no_token(endpoint: Endpoint, answer: Finished, least: int = 4, most: int = 256) -> Finding | None:
    """Whether scores change when a prompt loses its first token; they don't where the server puts a missing BOS back in secret.

    None where the prompt's ids are unknown or too few.
    """
    prompt = (answer.prompt_token_ids or ())[:most]
    if len(prompt) < least:
        return None
    with endpoint.connected() as connection:
        whole = _scores(connection, prompt, 2)
        without = _scores(connection, prompt[1:], 1)
    equal = max(abs(a - b) for a, b in zip(whole, without, strict=True)) < 1e-6
    return Finding("no token is added in secret", not equal, "a prompt scores the same without its first token" if equal else
                   f"{len(whole)} scores move when the first token goes")  # fmt: skip


def _scores(connection: Connection, tokens: Sequence[int], first: int) -> list[float]:
    return connection.score(Record("probe", tuple(tokens), first, "the probe for added tokens"))


def audit(endpoint: Endpoint, load: Load, prompts: Sequence[Prompt], answers: Sequence[Finished]) -> list[Finding]:
    """Every question that can be asked about a finished load."""
    found = [decoded_greedily(endpoint, answers), adds_no_token(endpoint, answers[0]), unseen_as_fast(endpoint, load, prompts)]
    return [finding for finding in found if finding is not None]
