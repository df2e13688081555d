"""The log of mixes that were built and measured under one identity, in the order in which they were measured first."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gemq import output
from gemq.atomic import write_file
from gemq.quantize.allocation import Choice
from gemq.quantize.budget import Trial, mix_digest
from gemq.quantize.journal import canonical
from gemq.quantize.looks import MOST_LOOKS
from gemq.quantize.search_state import SearchState, short_digest

_PREFIX = "trials-"


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    identity: dict[str, Any]
    looks: list[str] = []  # digests of mixes, in the order in which they were measured first
    trials: dict[str, Trial] = {}


class Trials:
    """What was measured of the mixes of one search, kept in the search's directory.

    `identity` is all that determines a mix's measurement: the source, the base recipe, the calibration, the data, the device and the
    versions (`search_run.trials_identity`). The looks at the records are counted over all logs of the directory, in its own record: they are
    spent whatever the recipe, and are kept where a log is damaged or discarded.
    """

    def __init__(self, state: SearchState, document: _Document) -> None:
        self._state, self._document = state, document

    @classmethod
    def open(cls, state: SearchState, identity: dict[str, Any]) -> Trials:
        """The log in `state` of exactly this identity, empty where there is none."""
        known = json.loads(canonical(identity))
        document = _read(state, _PREFIX + short_digest(known) + ".json")
        log = cls(state, document if document is not None and document.identity == known else _Document(identity=known))
        state.add_looks(log._records, [log._name(digest) for digest in log._document.looks])
        return log

    @classmethod
    def every(cls, state: SearchState, sensitivities: dict[str, Any]) -> list[Trials]:
        """Every log in `state` of searches that used the sensitivities of this identity."""
        names = sorted(path.name for path in state.directory.glob(f"{_PREFIX}*.json"))
        documents = [document for name in names if (document := _read(state, name)) is not None]
        wanted = short_digest(sensitivities)
        return [cls(state, document) for document in documents if document.identity.get("sensitivities") == wanted]

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the trials."""
        return self._document.identity

    @property
    def digest(self) -> str:
        """A short name of the identity: 12 hexadecimal digits."""
        return short_digest(self._document.identity)

    @property
    def judged_on(self) -> str:
        """The records in words, with the name of the identity: the same data can be judged under several recipes."""
        data = self._document.identity.get("judged on", {})
        return f"{data.get('sha256')}, {data.get('records')} records; {self.digest}"

    @property
    def looks(self) -> int:
        """How many different checkpoints were measured on these records, of every recipe, as far as the directory knows."""
        return len(self._state.looks(self._records))

    @property
    def _records(self) -> str:
        """The name under which looks are counted: of the source and the file of records, of which any number may be read."""
        identity = self._document.identity
        return short_digest({"source": identity.get("job", {}).get("source"), "records": identity.get("judged on", {}).get("sha256")})

    def _name(self, digest: str) -> str:
        return f"{self.digest}/{digest}"

    def all(self) -> list[Trial]:
        """Every trial, in the order of the looks."""
        return [self._document.trials[digest] for digest in self._document.looks if digest in self._document.trials]

    def of(self, mix: Mapping[str, str]) -> Trial | None:
        """The trial of `mix`, None if it was not measured."""
        return self._document.trials.get(mix_digest(dict(mix)))

    def may_look(self, mix: Mapping[str, str]) -> bool:
        """Whether `mix` has been measured on these records, or a further checkpoint may be (`looks.MOST_LOOKS`)."""
        return self.looks < MOST_LOOKS or self._name(mix_digest(dict(mix))) in self._state.looks(self._records)

    def look(self, mix: Mapping[str, str]) -> int:
        """The number of the look at `mix`, from 1: the one that it has, or the next, which is spent by this call."""
        name = self._name(mix_digest(dict(mix)))
        self._state.add_looks(self._records, [name])
        return self._state.looks(self._records).index(name) + 1

    def add(self, trial: Trial) -> None:
        """Keep a trial, on disk too; a second one of the same mix replaces the first."""
        if trial.digest not in self._document.looks:
            self._document.looks.append(trial.digest)
        self._document.trials[trial.digest] = trial
        self._save()

    def discard(self) -> None:
        """Forget what was measured; the looks are kept, since bounds depend on how many there were."""
        if self._document.trials:
            self._document.trials.clear()
            self._save()

    def _save(self) -> None:
        path = self._state.claim(f"{_PREFIX}{self.digest}.json", self.digest)
        write_file(path, canonical(self._document.model_dump(mode="json")))


def possible(trials: Sequence[Trial], choices: Mapping[str, Sequence[Choice]]) -> list[Trial]:
    """Those of `trials` that `choices` allow, with the cost and the harm that `choices` give them."""
    by_label = {name: {choice.label: choice for choice in options} for name, options in choices.items()}
    found = []
    for trial in trials:
        if trial.mix.keys() == by_label.keys() and all(label in by_label[name] for name, label in trial.mix.items()):
            taken = [by_label[name][label] for name, label in trial.mix.items()]
            found.append(replace(trial, cost=math.fsum(one.cost for one in taken), predicted=math.fsum(one.harm for one in taken)))
    return found


def _read(state: SearchState, name: str) -> _Document | None:
    path = state.directory / name
    try:
        return _Document.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        output.warn(f"{path} can't be read ({type(error).__name__}): its mixes are measured again")
        return None


