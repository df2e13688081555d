"""What the arenas' packages have in common: the checkpoint and whether an arena takes it, its files, and the numbers that were measured."""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gemq import output
from gemq.config_file import complete_config, read_config, text_config
from gemq.errors import IntegrityError, UsageError
from gemq.quantize import seal
from gemq.quantize.audit import Structure, audit_structure, strict_json
from gemq.quantize.card import is_against, source_digest
from gemq.quantize.content import directory_digest

_COMMIT, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class Taken:
    """A model that an arena takes, told by its config: `architectures`, numbers of its text config, and towers that must be there."""

    model: str
    architectures: tuple[str, ...]
    text: dict[str, int]
    towers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint to package: its directory and what its config, headers, manifest and seal say (`seal_digest` is None without a seal).

    `digest` names its content, sealed or not (quantize.content).
    """

    directory: Path
    config: dict[str, Any]
    structure: Structure
    manifest: dict[str, Any]
    seal_digest: str | None
    digest: str
    files: list[str]

    @property
    def nbytes(self) -> int:
        return sum((self.directory / name).stat().st_size for name in self.files)

    @property
    def source(self) -> str:
        """The model that it was made from, or "" where its manifest names none that others know."""
        named = self.manifest.get("source")
        model = named.get("model") if isinstance(named, dict) else None
        return model if isinstance(model, str) and _HUB_ID.fullmatch(model) else ""

    def schemes(self) -> str:
        """Its schemes in words, the commonest first: int4 g32, int8 channel."""
        count: dict[str, int] = {}
        for unit in self.structure.units.values():
            label = unit.scheme.label().rpartition(" ")[0]
            count[label] = count.get(label, 0) + 1
        return ", ".join(sorted(count, key=lambda label: -count[label])) or "not quantized"


@dataclass(frozen=True)
class Hub:
    """The checkpoint's place on the Hub: a repository at an exact commit."""

    repo: str
    revision: str

    def __post_init__(self) -> None:
        if not _HUB_ID.fullmatch(self.repo):
            raise UsageError(f"--repo is {self.repo!r}; a repository on the Hub, OWNER/NAME, is valid", "give the one that gemq push wrote to")
        require_commit(self.revision, "--revision")


@dataclass(frozen=True)
class Order:
    """What a package is to be: for both arenas, whatever of it they have a place for. Empty texts mean the arena's own choice.

    `profile` is a row of PROFILES, or the file of a tuned one.
    """

    checkpoint: Checkpoint
    hub: Hub | None = None
    measured: Sequence[Measured] = ()
    profile: str = ""
    name: str = ""
    description: str = ""
    force: bool = False


def require_commit(revision: str, what: str) -> None:
    """Refuse what is no full commit hash: a branch or a short hash may mean something else tomorrow."""
    if not _COMMIT.fullmatch(revision):
        raise UsageError(f"{what} is {revision!r}; a commit of 40 lower-case hex digits is valid",
                         "gemq push prints the commit; so does git rev-parse HEAD")


def read_checkpoint(directory: Path) -> Checkpoint:
    """The checkpoint in `directory`, every byte held against its seal; raises IntegrityError where it isn't what was sealed.

    One without a seal is taken with a warning: a source may be packaged too, as the baseline.
    """
    if not directory.is_dir():
        raise UsageError(f"the checkpoint {directory} is no directory", "give the directory that gemq quantize wrote")
    config = read_config(directory)
    seal_digest = None
    if (directory / seal.SEAL_FILE).exists():
        sealed = seal.read_seal(directory)
        seal_digest, listed, content = seal.seal_digest(directory), [file.path for file in sealed], seal.content_digest(sealed)
        differences = [each for each in seal.check_seal(directory) if not each.path.startswith((".cache", ".gitattributes"))]
        if differences:
            raise IntegrityError(f"{directory} is not what was sealed: {differences[0]}", "fetch or quantize it again")
        files = [*listed, seal.SEAL_FILE]
    else:
        output.warn(f"{directory} has no seal: nothing will show later whether its bytes are still these")
        found = (path.relative_to(directory) for path in directory.rglob("*") if path.is_file())
        files = sorted(path.as_posix() for path in found if not any(part.startswith(".") for part in path.parts))
        content = directory_digest(directory)
    structure = audit_structure(directory)
    if structure.differences:
        raise IntegrityError(f"{directory} does not fit together: {structure.differences[0]}", "quantize the source again")
    path = directory / "gemq.json"
    manifest = strict_json(path.read_bytes(), str(path)) if path.is_file() else {}
    return Checkpoint(directory.absolute(), config, structure, manifest if isinstance(manifest, dict) else {}, seal_digest, content, files)


def why_not(checkpoint: Checkpoint, taken: Taken) -> list[str]:
    """The reasons for which `checkpoint` is not the model `taken`; none if it is."""
    config = checkpoint.config
    names = config.get("architectures")
    reasons = []
    if not (isinstance(names, list) and len(names) == 1 and names[0] in taken.architectures):
        reasons.append(f"its architecture is {names}, {taken.model} is a {taken.architectures[0]}")
    text = text_config(complete_config(config))
    for key, value in taken.text.items():
        if text.get(key) != value:
            reasons.append(f"its {key} is {text.get(key)}, {taken.model} has {value}")
    for tower in taken.towers:
        if not any(f"{tower}." in name for name in checkpoint.structure.tensors):
            reasons.append(f"it has no {tower}, and the arena wants every modality intact")
    if checkpoint.source and not checkpoint.source.lower().startswith(taken.model.lower()):
        reasons.append(f"it was made from {checkpoint.source}, not from {taken.model}")
    return reasons


def require_taken(checkpoint: Checkpoint, taken: Taken, arena: str, *, force: bool) -> str:
    """Raise UsageError unless `checkpoint` is what the arena takes; with `force` a warning says what it isn't. Returns what to call the model."""
    reasons = why_not(checkpoint, taken)
    if reasons and not force:
        raise UsageError(f"{arena} takes {taken.model}, and {checkpoint.directory.name} is another model: {'; '.join(reasons)}",
                         "--force packages it all the same, to try it out; the arena would refuse it")
    for reason in reasons:
        output.warn(f"{arena} would refuse {checkpoint.directory.name}: {reason}")
    return checkpoint.source or (checkpoint.directory.name if reasons else taken.model)


def place(directory: Path, names: Sequence[str], target: Path, *, copy: bool) -> str:
    """Put the files `names` of `directory` into `target` as hard links, or as copies if asked or on another file system; returns which, in words.

    A hard link is the same file: it takes no space, and a mode that is changed here changes there too. The weights are never written to.
    """
    how = "copies" if copy else "hard links"
    for name in names:
        source, goal = directory / name, target / name
        goal.parent.mkdir(parents=True, exist_ok=True)
        if how == "hard links":
            try:
                os.link(source.resolve(), goal)
                continue
            except OSError:  # another file system, one without links, or a file of another owner
                how = "copies"
        shutil.copyfile(source, goal)
        shutil.copymode(source, goal)
    return how


@dataclass(frozen=True)
class Measured:
    """A result of `gemq eval-ppl --json` or `eval-kl --json`: rows of (quantity, value, upper bound) and what they were measured on.

    `unbound` where it does not record which weights it is of. `against` is "" where its reference is the checkpoint's source, or where it has none.
    """

    rows: tuple[tuple[str, str, str], ...]
    data: str
    tokens: int
    records: int
    computed: str
    served: bool = field(default=False)
    unbound: bool = field(default=False)
    against: str = field(default="")


_QUANTITIES = {"ppl": "PPL", "reference_ppl": "PPL of {}", "ratio": "PPL ratio to {}", "kl_nats": "KL from {}, nats a token"}


def read_measured(path: Path, checkpoint: Checkpoint) -> Measured:
    """The measurement in `path`; raises UsageError if it is none, or one of another checkpoint."""
    advice = "give what gemq eval-ppl or eval-kl wrote with --output, or printed with --json"
    try:
        document = strict_json(path.read_bytes(), str(path), advice)
    except OSError as error:
        raise UsageError(f"--measured {path} can't be read: {error.strerror}", advice) from None
    except IntegrityError as error:
        raise UsageError(error.message, advice) from None
    if not isinstance(document, dict) or document.get("kind") not in ("ppl", "kl"):
        raise UsageError(f"--measured {path} is no measurement of PPL or KL", advice)
    try:
        of_source = is_against(document, source_digest(checkpoint.manifest))
        named = {key: text.format("the source" if of_source else "another reference") for key, text in _QUANTITIES.items()}
        rows = tuple((named[key], _number(document[key]["value"]), _number(document[key]["upper_95"]))
                     for key in _QUANTITIES if document.get(key) is not None)
        target, tokens, records = str(document["target"]), int(document["tokens"]), int(document["records"])
        data = f"{Path(document['data']).name} (sha256 {document['data_sha256'][:12]}…)"
        computed, reference_digest = str(document["dtype"]), document.get("reference_digest")
        if reference_digest is not None and not (isinstance(reference_digest, str) and _SHA256.fullmatch(reference_digest)):
            raise ValueError(f"its reference_digest is {str(reference_digest)[:80]!r}, not a SHA-256")
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"--measured {path} is not whole: {error!r}", advice) from None
    digest = document.get("target_digest")
    if digest is None:
        output.warn(f"--measured {path} does not record which weights it measured: the README lists it as unbound")
    elif digest != checkpoint.digest:
        raise UsageError(f"--measured {path} was measured on other weights (content digest {str(digest)[:16]}…), and {checkpoint.directory} has "
                         f"{checkpoint.digest[:16]}…", "measure this checkpoint")  # fmt: skip
    against = "" if of_source or document.get("reference") is None else _other_reference(reference_digest)
    if against:
        output.warn(f"--measured {path} is not against the source that the checkpoint was made from: the README names {against}")
    return Measured(rows, data, tokens, records, computed, target.startswith(("http://", "https://")), digest is None, against)


def _other_reference(digest: str | None) -> str:
    return "a reference whose weights are not recorded" if digest is None else f"a reference with the content digest `{digest}`"


def _number(value: object) -> str:
    if value is None:
        return "–"
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return f"{value:.5g}"


def measured_section(measured: Sequence[Measured]) -> str:
    """A README's section of numbers: what was measured of this checkpoint, and apart from that what is unbound."""
    if not measured:
        return "## Measured\n\nNothing was measured for this package.\n"
    bound, unbound = [one for one in measured if not one.unbound], [one for one in measured if one.unbound]
    lines = ["## Measured", ""] + (_measured_table(bound) if bound else ["Nothing was measured for this package."])
    if unbound:
        lines += ["", "### Unbound", "", "Not shown to be of these weights: these measurements do not record which weights they were made on.", "",
                  *_measured_table(unbound)]  # fmt: skip
    return "\n".join(lines) + "\n"


def _measured_table(measured: Sequence[Measured]) -> list[str]:
    lines = ["| | value | 95% upper bound | tokens | records | on | computed |", "|---|---|---|---|---|---|---|"]
    for one in measured:
        how = "through the endpoint" if one.served else f"locally in {one.computed}"
        lines += [f"| {name} | {value} | {upper} | {one.tokens} | {one.records} | {one.data} | {how} |" for name, value, upper in one.rows]
    others = dict.fromkeys(one.against for one in measured if one.against)
    if others:
        lines += ["", "Another reference is not shown to be the source of this checkpoint:", "", *(f"- {one}" for one in others)]
    return lines


def checkpoint_section(checkpoint: Checkpoint, where: str) -> str:
    """A README's section on the checkpoint: where it is, what it was made from and how, and its seal."""
    recipe = checkpoint.manifest.get("recipe")
    rows = [("where", where), ("made from", checkpoint.source or "a local directory"),
            ("recipe", f"`{recipe}`" if isinstance(recipe, str) else "none on record"), ("schemes", checkpoint.schemes()),
            ("size", output.human_bytes(checkpoint.nbytes)),
            ("seal", f"sha256:{checkpoint.seal_digest}" if checkpoint.seal_digest else "none")]  # fmt: skip
    return "## The checkpoint\n\n| | |\n|---|---|\n" + "".join(f"| {key} | {value} |\n" for key, value in rows)
