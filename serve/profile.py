"""A tuned profile: the switches that `gemq tune` kept, what they were made for and measured on. serve.py and launch.sh apply it.

A profile carries only arguments and variables of switches.py: it can't switch prefix caching on or an encoder off.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemq import atomic
from gemq.errors import IntegrityError, UsageError
from gemq.serve.serve import PROFILES
from gemq.serve.switches import known_arguments, known_variables

SHIPPED = "profile.json"  # its name inside a package
DRAFTER = "drafter"  # the drafter's folder there
_WORD = re.compile(r"[!-~]+")


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class MadeFor(_Part):
    """vLLM's release and platform, the card, the checkpoint's seal (None: it had none) and its content digest (None: an older gemq's profile)."""

    vllm: str = Field(min_length=1)
    platform: Literal["cuda", "cpu"]
    card: str = Field(min_length=1)
    checkpoint: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None
    content: Annotated[str | None, Field(pattern=r"^[0-9a-f]{64}$")] = None


class Speculation(_Part):
    """A drafter's directory (relative: to the profile's folder) and the tokens that it drafts a step."""

    drafter: str = Field(min_length=1)
    tokens: int = Field(ge=1, le=32)


class Gain(_Part):
    """What was measured: tokens a second without and with the profile, their paired ratio and its lower bound."""

    workload: str
    requests: int
    output_tokens: int
    in_flight: int
    baseline_tps: float
    tuned_tps: float
    ratio: float
    lower_bound: float
    confidence: float
    pairs: int
    confirmed: bool
    date: str


class Profile(_Part):
    """The document; `measured` is None while it is only tried."""

    version: Literal[1] = 1
    kind: Literal["gemq-profile"] = "gemq-profile"
    base: str
    arguments: list[str] = []
    environment: dict[str, str] = {}
    speculation: Speculation | None = None
    made_for: MadeFor
    measured: Gain | None = None

    def text(self) -> str:
        """The file's content."""
        return json.dumps(self.model_dump(mode="json"), indent=2, allow_nan=False) + "\n"

    def write(self, path: Path) -> None:
        """Write it in one step."""
        with atomic.disk_errors(path):
            atomic.write_file(path, self.text())

    def switches(self) -> str:
        """What it switches, in a line."""
        drafted = [f"{self.speculation.tokens} drafted tokens"] if self.speculation else []
        return " ".join([*(f"{name}={value}" for name, value in self.environment.items()), *self.arguments, *drafted]) or "nothing"


def read_profile(path: Path) -> Profile:
    """The profile in `path`; raises UsageError that names what is wrong with it."""
    advice = "give a profile.json that gemq tune wrote"
    try:
        raw = path.read_bytes()
        if len(raw) > 1 << 20:
            raise ValueError(f"{len(raw)} bytes")
        profile = Profile.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path} is no profile: {'.'.join(map(str, first['loc'])) or 'the document'}: {first['msg']}", advice) from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as a profile: {getattr(error, 'strerror', None) or error}", advice) from None
    _require_known(path, profile, advice)
    return profile


def _require_known(path: Path, profile: Profile, advice: str) -> None:
    def refused(what: str, value: str, valid: Any) -> UsageError:
        return UsageError(f"{path}: {what} {value!r} is none that a profile may carry; valid are {', '.join(sorted(valid))}", advice)

    if profile.base not in PROFILES:
        raise refused("the base", profile.base, PROFILES)
    for argument in profile.arguments:
        if argument.startswith("-") and argument not in known_arguments():
            raise refused("the argument", argument, known_arguments())
        if not _WORD.fullmatch(argument):
            raise UsageError(f"{path}: the argument {argument!r} is no word of printable ASCII", advice)
    for name, value in profile.environment.items():
        if name not in known_variables():
            raise refused("the variable", name, known_variables())
        if value and not _WORD.fullmatch(value):
            raise UsageError(f"{path}: {name} is {value!r}; a word of printable ASCII is valid", advice)


def require_profile(name: str) -> str:
    """What GEMQ_PROFILE is set to for `--profile name`: a row of PROFILES, or a tuned profile's absolute path, read; raises UsageError."""
    if name in PROFILES:
        return name
    if not name.endswith(".json"):
        raise UsageError(f"--profile {name!r} is unknown", f"valid are {', '.join(PROFILES)}, or a profile.json that gemq tune wrote")
    read_profile(Path(name))
    return str(Path(name).absolute())


def packaged(name: str, seal: str | None, vllm: str | None, content: str | None = None) -> tuple[str, Profile | None]:
    """What a package's GEMQ_PROFILE is for `--profile name`: a row of PROFILES, or SHIPPED with the profile to put there.

    `seal` and `content` are the checkpoint's digests: the content decides where the profile knows it, so that another card doesn't matter.
    Raises UsageError or IntegrityError on a profile that was measured on another checkpoint, or for another vLLM than the package installs
    (`vllm` None: the arena's).
    """
    if require_profile(name) == name and name in PROFILES:
        return name, None
    path = Path(name)
    profile = read_profile(path)
    _require_packable(profile, path, seal, vllm, content)
    if profile.made_for.checkpoint != seal:  # the same content under another card: the package's own start compares seals
        profile = profile.model_copy(update={"made_for": profile.made_for.model_copy(update={"checkpoint": seal})})
    if profile.speculation is not None:  # its place counts from the profile's own folder
        drafter = (path.parent / profile.speculation.drafter).absolute()
        profile = profile.model_copy(update={"speculation": Speculation(drafter=str(drafter), tokens=profile.speculation.tokens)})
    return SHIPPED, profile


def put(profile: Profile, folder: Path, *, copy: bool) -> None:
    """Write the profile into a package's `folder`, and its drafter beside it, as hard links or copies."""
    if profile.speculation is not None:
        source = Path(profile.speculation.drafter)
        if not (source / "config.json").is_file():
            raise UsageError(f"the profile drafts with {source}, and there is no checkpoint", "bring the drafter back, or tune without one")
        from gemq.serve.package import place

        place(source, sorted(each.relative_to(source).as_posix() for each in source.rglob("*") if each.is_file()), folder / DRAFTER, copy=copy)
        profile = profile.model_copy(update={"speculation": Speculation(drafter=DRAFTER, tokens=profile.speculation.tokens)})
    (folder / SHIPPED).write_text(profile.text(), encoding="utf-8")


def section(profile: Profile | None) -> str:
    """A README's section on a tuned profile; empty without one."""
    if profile is None or profile.measured is None:
        return ""
    gain, made_for = profile.measured, profile.made_for
    return "\n".join([
        "## Tuned", "", "| | |", "|---|---|", f"| switches | `{profile.switches()}` |",
        f"| tuned on | {made_for.card}, vLLM {made_for.vllm}, {gain.date} |",
        f"| tokens a second | {gain.baseline_tps:.2f} before, {gain.tuned_tps:.2f} after |",
        f"| paired ratio | {gain.ratio:.4f}, lower bound {gain.lower_bound:.4f}{'' if gain.confirmed else '; not confirmed in fresh starts'} |",
        f"| on | {gain.workload}: {gain.requests} requests a run, {gain.output_tokens} tokens each, {gain.in_flight} in flight |", "", "",
    ])  # fmt: skip


def _require_packable(profile: Profile, path: Path, seal: str | None, vllm: str | None, content: str | None) -> None:
    if profile.measured is None:
        raise UsageError(f"{path} was never measured", "give the profile.json that gemq tune published")
    if profile.made_for.content is not None:
        if profile.made_for.content != content:
            raise IntegrityError(f"{path} was made for a checkpoint with the content digest {profile.made_for.content[:12]}…, and this one has "
                                 f"{(content or 'none')[:12]}…", "run gemq tune on this checkpoint")  # fmt: skip
    elif profile.made_for.checkpoint != seal:
        made, here = (f"the checkpoint sealed {digest[:12]}…" if digest else "one without a seal" for digest in (profile.made_for.checkpoint, seal))
        raise IntegrityError(f"{path} was made for {made}, and this is {here}", "run gemq tune on this checkpoint")
    if vllm is not None and vllm != profile.made_for.vllm:
        raise UsageError(f"{path} was made for vLLM {profile.made_for.vllm}, and the package installs vLLM {vllm}",
                         f"tune with vLLM {vllm}, or package with --dependency vllm=={profile.made_for.vllm} and what goes with it")
