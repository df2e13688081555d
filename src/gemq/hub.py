"""Fetch a model from the Hugging Face Hub at a known commit, and say what stands in the way in words.

HF_HOME, HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE are huggingface_hub's own and work as it says. Messages are gemq's own: those of the HTTP
libraries can quote a request's headers, and so a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gemq import atomic, output
from gemq.errors import UsageError
from gemq.shard_headers import INDEX_FILE, SINGLE_FILE

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# what a model needs to be read, quantized and served; weights as pickles run code when they are loaded, and are never fetched
WANTED = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*", "NOTICE*"]
# copies for other programs: in folders (onnx/, original/), or one file in Mistral's own layout
UNWANTED = ["*/*", "consolidated*.safetensors"]
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][\w./+@-]*", re.ASCII)
_TIMEOUT_S = 30


def fetch(model: str, revision: str | None = None) -> tuple[Path, str]:
    """The directory of a model's files in the Hub's cache, and the commit that they are of.

    revision: a branch, a tag, or a commit (any unique beginning of it while online); the main branch by default. A commit that is whole in
    the cache needs no network. Raises UsageError, with the next step, for all that can go wrong.
    """
    if revision is not None and not _REVISION.fullmatch(revision):
        raise UsageError(f"--revision {revision!r} is no name of a branch, a tag or a commit",
                         "type one as the Hub shows it: main, v1.0, 40 hex digits")
    from huggingface_hub.constants import is_offline_mode

    pinned = revision is not None and _COMMIT.fullmatch(revision) is not None
    if pinned or is_offline_mode():
        cached = _cached(model, revision)
        missing = [] if cached is None else missing_files(cached)
        if cached is not None and not missing:
            return cached.resolve(), cached.name
        if is_offline_mode():
            wanted = f"{model} at {revision}" if revision else model
            lacks = f"; missing: {', '.join(missing[:5])}" + (", …" if len(missing) > 5 else "") if missing else ""
            raise UsageError(f"{wanted} is not (or not wholly) in the Hub's cache{lacks}, and HF_HUB_OFFLINE forbids to fetch it",
                             "unset HF_HUB_OFFLINE once to fetch it, or point HF_HOME to the cache that holds it")
    _require_cache()
    with _in_words(model, revision):
        directory = _download(model, revision)
    missing = missing_files(directory, tokenizer=False)  # what the Hub doesn't have is not missing here
    if missing:
        raise UsageError(f"{model} at {directory.name[:12]} is not complete: {missing[0]} is on the list of its weights, and is not there",
                         "choose another --revision, or tell the model's owner")
    return directory.resolve(), directory.name


def missing_files(directory: Path, *, tokenizer: bool = True) -> list[str]:
    """Which of the files that every model needs a snapshot lacks: config.json, every shard that its index names, and a tokenizer."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    index = directory / INDEX_FILE
    if index.exists():
        try:
            shards = sorted(set(map(str, json.loads(index.read_bytes())["weight_map"].values())))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            missing.append(f"{INDEX_FILE} that can be read")
            shards = []
        missing += [name for name in shards if not (directory / name).is_file()]
    elif not (directory / SINGLE_FILE).is_file():
        missing.append(f"{SINGLE_FILE} or {INDEX_FILE}")
    if tokenizer and not any((directory / name).is_file() for name in _TOKENIZERS):
        missing.append(f"a tokenizer ({_TOKENIZERS[0]} or {_TOKENIZERS[1]})")
    return missing


def _require_cache() -> None:
    """Raise UsageError where the Hub's cache can't be written into."""
    atomic.make_cache(Path(_cache_directory()), "the Hub's cache", "set HF_HOME to a directory that you may write to, or repair that one")


def _cached(model: str, revision: str | None) -> Path | None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=WANTED, ignore_patterns=UNWANTED, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise _bad_name(model, error) from None
    except OSError as error:
        folder = Path(_cache_directory())
        raise UsageError(f"the Hub's cache {folder} can't be read: {atomic.why_no_directory(folder, error)}",
                         "set HF_HOME to a directory that you may read, or repair that one") from None


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    try:
        info = HfApi().model_info(model, revision=revision, timeout=_TIMEOUT_S, files_metadata=True)
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        raise _no_hub(model) from None
    commit = info.sha or ""
    if not _COMMIT.fullmatch(commit):
        raise _no_hub(model)
    size = _check_files(model, info)
    output.note(f"fetching {model} at {commit[:12]} ({output.human_bytes(size)}, less what is in the Hub's cache)")

    def snapshot(at: str | None) -> Path:
        with atomic.disk_errors(Path(_cache_directory())):
            found = snapshot_download(model, revision=at, allow_patterns=WANTED, ignore_patterns=UNWANTED, tqdm_class=_progress_class())
        return Path(found)

    # by its name first, so that the cache knows the branch or tag when it is offline; by the commit if the branch moved in between
    directory = snapshot(revision)
    return directory if directory.name == commit else snapshot(commit)


def _no_hub(model: str) -> UsageError:
    return UsageError(f"{endpoint()} doesn't answer as a Hugging Face Hub does when asked for {model}",
                      "check HF_ENDPOINT, and whether the network wants you to log in first")


def _check_files(model: str, info: ModelInfo) -> int:
    """The bytes that will be fetched; refuses a repository that gemq can't use before anything is fetched."""
    from huggingface_hub.utils import filter_repo_objects

    sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
    wanted = list(filter_repo_objects(sizes, allow_patterns=WANTED, ignore_patterns=UNWANTED))
    if "config.json" not in wanted:
        raise UsageError(f"{model} on the Hub has no config.json, so it is no model that gemq can read", "check its name")
    if not any(name.endswith(".safetensors") for name in wanted):
        raise UsageError(f"{model} on the Hub has no safetensors, and gemq loads no other weights (pickles can run code)",
                         "choose a model with safetensors, or convert it first and give gemq the directory")
    return sum(sizes[name] for name in wanted)


def _progress_class() -> type[Any]:
    """A progress bar of huggingface_hub's that shows itself on a terminal only and is silent where gemq's output is."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs["disable"] = True if output.mode.quiet else kwargs.get("disable")
            super().__init__(*args, **kwargs)

    return Bar


def _cache_directory() -> str:
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)


def endpoint() -> str:
    """The Hub's address without a user or password that HF_ENDPOINT may hold."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


@contextmanager
def _in_words(model: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub and httpx raise into a UsageError with what to do next."""
    import httpx
    from huggingface_hub import errors

    page = f"{endpoint()}/{model}"
    try:
        yield
    except errors.RevisionNotFoundError:
        raise UsageError(f"{model} on the Hub has no branch, tag or commit {revision!r}{_known_revisions(model)}",
                         f"choose another --revision; {page}/commits/main lists the commits") from None
    except errors.GatedRepoError as error:
        raise UsageError(f"{model} is gated, and {_who(error)} has no access to its files",
                         f"accept its terms at {page} while logged in, and set HF_TOKEN to a token of that account") from None
    except errors.RepositoryNotFoundError as error:
        raise _unknown(model, error) from None
    except errors.HFValidationError as error:
        raise _bad_name(model, error) from None
    except errors.HfHubHTTPError as error:
        raise _refused(model, error) from None
    except (httpx.HTTPError, httpx.InvalidURL, errors.LocalEntryNotFoundError, errors.FileMetadataError) as error:
        raise UsageError(f"{model} can't be fetched: {_transport(error)}",
                         "check the network, HTTPS_PROXY and HF_ENDPOINT; a copy in the Hub's cache is used with HF_HUB_OFFLINE=1, "
                         "one elsewhere by giving its directory as MODEL") from None
    except UnicodeEncodeError:
        raise UsageError("the token in HF_TOKEN (or of `hf auth login`) has characters that no token has", "set HF_TOKEN again") from None


def _bad_name(model: str, error: Exception) -> UsageError:
    return UsageError(f"{model!r} is no valid name of a model on the Hub: {error}", f"MODEL is {_valid()}")


def _valid() -> str:
    from gemq.source import VALID

    return VALID


def _has_token(error: Any) -> bool:
    return "authorization" in error.response.request.headers


def _who(error: Any) -> str:
    """Whose request failed; never with which token."""
    return "the account of your token" if _has_token(error) else "a request without a token"


def _unknown(model: str, error: Any) -> UsageError:
    return UsageError(f"the Hub has no model {model}, or it is private and {_who(error)} has no access to it",
                      "check the name; if it is private, set HF_TOKEN to a token that may read it")


def _refused(model: str, error: Any) -> UsageError:
    status = error.response.status_code
    if status == 401 and not _has_token(error):
        # the Hub's answer for a name that it doesn't know; huggingface_hub recognizes it at https addresses only
        return _unknown(model, error)
    if status in (401, 403):
        return UsageError(f"the Hub refused the request for {model} (HTTP {status}): {_who(error)} is not accepted",
                          "set HF_TOKEN to a valid token that may read the model, or unset it")
    if status == 429:
        return UsageError(f"the Hub answered the request for {model} with HTTP 429, too many requests",
                          "wait some minutes; with HF_TOKEN set the limit is higher")
    return UsageError(f"{endpoint()} answered the request for {model} with HTTP {status}", "try again later; what was fetched is kept")


def _transport(error: BaseException) -> str:
    """Why the Hub could not be reached, from the innermost system error; the libraries' own texts are left out."""
    reason = type(error).__name__
    cause: BaseException | None = error
    seen: set[int] = set()
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if isinstance(cause, OSError) and cause.strerror:
            reason = cause.strerror
        cause = cause.__cause__ or cause.__context__
    return f"no usable answer from {endpoint()} ({reason})"


def _known_revisions(model: str) -> str:
    """The branches and tags of a model, to be added to a message; nothing if the Hub doesn't tell."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        refs = HfApi().list_repo_refs(model)
    except (HfHubHTTPError, httpx.HTTPError):
        return ""
    names = [ref.name for ref in (*refs.branches, *refs.tags)]
    return f" (it has {', '.join(names[:20])}{', …' if len(names) > 20 else ''})"
