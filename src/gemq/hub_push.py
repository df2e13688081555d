"""Upload a sealed checkpoint to the Hugging Face Hub in one commit, and hold the repository's own hashes against the seal.

One commit, so that no revision ever holds half a checkpoint; large files go up before it one by one, and a file (with Xet, a chunk) that
the Hub has already is not sent again when an interrupted push is repeated. `upload_large_folder` is not used: it commits piece by piece
and writes its bookkeeping into the folder, which a sealed folder does not allow.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gemq import output
from gemq.errors import GemqError, IntegrityError, StoppedSafely, UsageError
from gemq.quantize.audit import audit_structure
from gemq.quantize.provenance import provenance_differences
from gemq.quantize.seal import SEAL_FILE, Difference, SealedFile, check_seal, read_seal, seal_digest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

# the Hub writes this one itself when it makes a repository; it says which files are stored as LFS objects
HUB_FILES = frozenset({".gitattributes"})
_SHOWN = 5


@dataclass(frozen=True)
class Pushed:
    """What a repository holds now: the commit that has exactly this checkpoint."""

    repo: str
    commit: str
    url: str
    seal_digest: str
    files: int
    bytes: int


def sealed_files(checkpoint: Path) -> list[SealedFile]:
    """The files that a push sends, seal included; raises IntegrityError unless the checkpoint verifies, every byte."""
    differences = check_seal(checkpoint)
    if not differences:  # else there may be what no reader should open
        differences = audit_structure(checkpoint).differences + provenance_differences(checkpoint, read_seal(checkpoint))
    if differences:
        raise IntegrityError(f"{checkpoint} is not what its seal says: {differences[0]}" + _and_more(len(differences) - 1),
                             f"see all of it with `gemq verify {checkpoint}`; nothing was sent")
    files = read_seal(checkpoint)
    executable = [file.path for file in files if file.executable]
    if executable:
        raise UsageError(f"{executable[0]} is executable, and the Hub forgets that: no download would verify", "push one without it")
    seal = SealedFile(False, SEAL_FILE, seal_digest(checkpoint), (checkpoint / SEAL_FILE).stat().st_size)
    return sorted([*files, seal], key=lambda file: file.path)


def push_checkpoint(checkpoint: Path, repo: str, *, private: bool = False, branch: str | None = None, replace: bool = False) -> Pushed:
    """Verify `checkpoint`, upload it to the model repository `repo` in one commit, and verify the repository against the seal.

    Without `replace` a branch that holds other files is refused; with it they are deleted in the same commit. Raises UsageError without a
    token or where the Hub refuses, StoppedSafely where the connection fails, IntegrityError where the repository is not the checkpoint.
    """
    files = sealed_files(checkpoint)
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    token = get_token()
    if not token:
        raise UsageError("there is no Hugging Face token to push with", "set HF_TOKEN to a token that may write, or run `hf auth login`")
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT") or None, token=token)
    bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        with hub_errors(repo, token):
            head = _prepare(api, repo, private, branch)
            present = _files_of(api, repo, head)
            others = sorted(set(present) - {file.path for file in files} - HUB_FILES)
            if others and not replace:
                shown = ", ".join(others[:_SHOWN]) + _and_more(len(others) - _SHOWN)
                raise UsageError(f"{repo} holds files that are not this checkpoint's: {shown}",
                                 "push to a new repository or --branch, or let --replace delete them (older commits keep them)")
            additions = [CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=str(checkpoint / file.path)) for file in files]
            _upload(api, repo, branch, additions, files)
            deletions = [CommitOperationDelete(path_in_repo=path) for path in others]
            made = api.create_commit(repo, [*additions, *deletions], commit_message=f"gemq checkpoint {seal_digest(checkpoint)[:16]}",
                                     revision=branch, parent_commit=head)
            commit = made.oid
            differences = repository_differences(api, repo, commit, checkpoint, files)
    finally:
        if bars:
            enable_progress_bars()
    if differences:
        raise IntegrityError(f"{repo} at {commit} is not the checkpoint that was sent: {differences[0]}{_and_more(len(differences) - 1)}",
                             "don't use that commit; push again")
    url = f"{api.endpoint}/{repo}/tree/{commit}"
    return Pushed(repo, commit, url, seal_digest(checkpoint), len(files), sum(file.size for file in files))


def _prepare(api: HfApi, repo: str, private: bool, branch: str | None) -> str:
    """Make the repository and branch where they are not there yet; the commit that the branch stands at."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    if private and not api.repo_info(repo).private:
        raise UsageError(f"{repo} exists and is public, and --private would not change that", "choose another, or make that one private")
    if branch is not None and branch != "main":
        api.create_branch(repo, branch=branch, exist_ok=True)
    head = api.repo_info(repo, revision=branch).sha
    assert head is not None
    return head


def _upload(api: HfApi, repo: str, branch: str | None, additions: list, files: list[SealedFile]) -> None:
    with output.progress(f"pushing to {repo}", sum(file.size for file in files) // 1_000_000, "MB") as advance:
        sent = 0
        for addition, file in zip(additions, files, strict=True):
            api.preupload_lfs_files(repo, [addition], revision=branch, free_memory=False)
            sent, before = sent + file.size, sent
            advance(sent // 1_000_000 - before // 1_000_000, detail=file.path)


def _files_of(api: HfApi, repo: str, revision: str) -> dict[str, object]:
    from huggingface_hub.hf_api import RepoFile

    return {entry.path: entry for entry in api.list_repo_tree(repo, recursive=True, revision=revision) if isinstance(entry, RepoFile)}


def repository_differences(api: HfApi, repo: str, commit: str, checkpoint: Path, files: list[SealedFile]) -> list[Difference]:
    """Where the repository's hashes, as its API states them, are not the seal's: SHA-256 of LFS objects, git's blob ids of small files."""
    present: dict = _files_of(api, repo, commit)
    extra = sorted(set(present) - {file.path for file in files} - HUB_FILES)
    differences = [Difference(path, "is in the repository and not in the seal") for path in extra]
    for file in files:
        entry = present.get(file.path)
        if entry is None:
            differences.append(Difference(file.path, "is not in the repository"))
        elif entry.lfs is not None:
            if (entry.lfs.sha256, entry.lfs.size) != (file.sha256, file.size):
                there = str(entry.lfs.sha256)[:16]
                differences.append(Difference(file.path, f"has the SHA-256 {there}… there, sealed was {file.sha256[:16]}…"))
        else:
            raw = (checkpoint / file.path).read_bytes()
            if hashlib.sha256(raw).hexdigest() != file.sha256:
                differences.append(Difference(file.path, "changed on this disk while it was pushed"))
            elif entry.blob_id != git_blob_id(raw):
                there = str(entry.blob_id)[:16]
                differences.append(Difference(file.path, f"has the git blob id {there}… there, its bytes give {git_blob_id(raw)[:16]}…"))
    return differences


def git_blob_id(raw: bytes) -> str:
    """The id under which git stores a file of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


@contextmanager
def hub_errors(repo: str, token: str) -> Iterator[None]:
    """Turn what the Hub, the network or huggingface_hub raise into gemq's errors, and keep the token out of every text."""
    import httpx
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        yield
    except GemqError:
        raise
    except Exception as error:
        causes = list(_causes(error))
        if any(isinstance(cause, HFValidationError) for cause in causes):
            raise UsageError(f"{repo!r} is no name of a repository", "write it as owner/name") from None
        if any(isinstance(cause, OfflineModeIsEnabled) for cause in causes):
            raise UsageError("HF_HUB_OFFLINE is set, and a push needs the Hub", "unset it and push again") from None
        for cause in causes:
            if isinstance(cause, HfHubHTTPError):
                raise _refusal(repo, cause.response.status_code, str(cause.server_message or ""), token) from None
        if any(isinstance(cause, (httpx.HTTPError, httpx.StreamError, ConnectionError, TimeoutError)) for cause in causes):
            raise StoppedSafely(f"the connection to the Hub failed while pushing to {repo} ({type(causes[-1]).__name__})",
                                "push again with the same command: what arrived is not sent twice") from None
        if isinstance(error, (ValueError, KeyError, TypeError, RuntimeError)):
            text = str(error).replace(token, "…")[:200]
            raise StoppedSafely(f"the Hub gave an answer to the push to {repo} that makes no sense: {text}", "push again later") from None
        raise


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _refusal(repo: str, status: int, said: str, token: str) -> GemqError:
    said = said.replace(token, "…")[:200]
    reason = f" ({said})" if said else ""
    if status == 401:
        return UsageError(f"the Hub does not accept the token{reason}", "set HF_TOKEN to one that may write, or run `hf auth login`")
    if status == 403:
        return UsageError(f"the token may not write to {repo}{reason}", "use a token with write access to that repository")
    if status == 404:
        return UsageError(f"the Hub has no {repo}, or hides it from this token{reason}", "check the name and the token's rights")
    if status == 412:
        return StoppedSafely(f"somebody else committed to {repo} during the push", "look at that commit, then push again")
    if status == 429 or status >= 500:
        return StoppedSafely(f"the Hub answered {status} to the push to {repo}{reason}", "push again later: what arrived is not sent twice")
    return UsageError(f"the Hub refused the push to {repo} with {status}{reason}", "see what it says, and push again")


def _and_more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""
