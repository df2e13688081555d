"""What was measured of each decision under each scheme, kept in a JSON file under the identity of all that it depends on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from gemq import output
from gemq.atomic import write_file
from gemq.quantize.journal import canonical


@dataclass(frozen=True)
class Measured:
    """Of one decision, by scheme label, as far as measured.

    kl: nats a token of the whole model with the decision's solved weights. error: relative output error of those weights. nearest: relative
    output error of rounding to nearest.
    """

    kl: dict[str, float] = field(default_factory=dict)
    error: dict[str, float] = field(default_factory=dict)
    nearest: dict[str, float] = field(default_factory=dict)

    def with_kl(self, label: str, value: float) -> Measured:
        """This and one more KL."""
        return replace(self, kl={**self.kl, label: value})

    def with_error(self, label: str, value: float) -> Measured:
        """This and one more error."""
        return replace(self, error={**self.error, label: value})

    def with_nearest(self, values: Mapping[str, float]) -> Measured:
        """This and more errors of rounding to nearest."""
        return replace(self, nearest={**self.nearest, **values})


class _Document(BaseModel):
    model_config = ConfigDict(extra="forbid")
    version: Literal[1] = 1
    identity: dict[str, Any]
    units: dict[str, Measured] = {}
    tokens: float = 0.0


class Measurements:
    """The file at `path`: decision -> `Measured`. `tokens` counts the tokens that went through the whole model for it, over all runs."""

    def __init__(self, path: Path, document: _Document) -> None:
        self.path, self._document = path, document
        self.tokens = document.tokens

    @classmethod
    def open(cls, path: Path, identity: Mapping[str, Any]) -> Measurements:
        """What the file holds of exactly this identity; nothing, with a warning, where it can't be read or is of another one."""
        known = json.loads(canonical(dict(identity)))
        if path.exists():
            found = cls.read(path)
            if found is not None and found.identity == known:
                return found
            output.warn(f"{path} {'can not be read' if found is None else 'is of another source, calibration or version'}: measuring again")
        return cls(path, _Document(identity=known))

    @classmethod
    def read(cls, path: Path) -> Measurements | None:
        """The file, whatever its identity; None where it can't be read."""
        try:
            return cls(path, _Document.model_validate_json(path.read_bytes()))
        except (OSError, ValidationError):
            return None

    @property
    def identity(self) -> dict[str, Any]:
        """What the measurements depend on."""
        return self._document.identity

    @property
    def units(self) -> dict[str, Measured]:
        """Decision -> what was measured of it."""
        return self._document.units

    def of(self, decision: str) -> Measured:
        """What was measured of a decision, empty where nothing was."""
        return self._document.units.get(decision, Measured())

    def add(self, decision: str, measured: Measured) -> None:
        """Record a decision and write the file, in one step."""
        self._document.units[decision] = measured
        self.save()

    def save(self) -> None:
        """Write the file."""
        self._document.tokens = self.tokens
        write_file(self.path, canonical(self._document.model_dump(mode="json")))
