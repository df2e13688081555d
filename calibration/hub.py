"""Data sets through the `datasets` library: a local directory of data files, or one of the Hub at a known commit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from gemq.calibration.tokenize import short
from gemq.errors import UsageError

HUB_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[^@:]+))?(@(?P<revision>[^@]+))?")


def open_dataset(spec: str, split: str) -> tuple[Any, dict[str, Any]]:
    """A map-style data set and its description: a local directory, or a Hub data set at a commit that is resolved first.

    Left alone, `datasets` takes whatever it has cached when the Hub doesn't answer, also at another revision. Here the revision that was
    loaded is compared with the one that was meant. With HF_HUB_OFFLINE, the cached one is taken, and its commit recorded.
    """
    import datasets
    from huggingface_hub import constants

    path = Path(spec).expanduser()
    config = revision = None
    if path.is_dir():
        name, target = path.resolve().name, str(path)
    else:
        parsed = HUB_ID.fullmatch(spec)
        assert parsed is not None
        name = target = parsed["name"]
        config = parsed["config"]
        revision = _resolve(name, parsed["revision"], offline=constants.HF_HUB_OFFLINE)
    bars = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        builder = datasets.load_dataset_builder(target, config, revision=revision)
        builder.download_and_prepare()
        loaded = None if path.is_dir() else builder.hash
        if revision is not None and loaded != revision:
            raise UsageError(f"data set {name} at {revision} can't be had, only {loaded} is cached", "go online, or name that revision")
        dataset = builder.as_dataset(split=split)
    except UsageError:
        raise
    except datasets.exceptions.DatasetNotFoundError as error:
        raise UsageError(f"data set {name} is not on the Hub or not open to you ({short(error)})",
                         "check the name; set HF_TOKEN for a gated or private one") from error
    except (ConnectionError, OSError) as error:
        raise UsageError(f"data set {name} can't be reached and is not cached ({short(error)})",
                         "go online, or use a local file or --calibration self") from error
    except (ValueError, KeyError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise UsageError(f"data set {name} can't be loaded with split {split!r} ({short(error)})",
                         "check the split, and the config in org/name:config") from error
    finally:
        if not bars:
            datasets.enable_progress_bars()
    return dataset, {"kind": "dataset", "name": name, "config": builder.config.name, "revision": loaded, "split": split}


def _resolve(name: str, revision: str | None, *, offline: bool) -> str | None:
    """The commit of a Hub data set; None offline where no revision was asked for (the cached one is taken then)."""
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    is_commit = revision is not None and re.fullmatch(r"[0-9a-f]{40}", revision) is not None
    if offline:
        if revision is None or is_commit:
            return revision
        raise UsageError(f"HF_HUB_OFFLINE is set, and what {revision!r} means for data set {name} can only be asked online",
                         "name the full commit, or leave the revision away to take what is cached")
    try:
        return HfApi().dataset_info(name, revision=revision, timeout=30).sha
    except RevisionNotFoundError as error:
        raise UsageError(f"data set {name} has no revision {revision!r}", "check the name of the branch, tag or commit") from error
    except (GatedRepoError, RepositoryNotFoundError) as error:
        raise UsageError(f"data set {name} is not on the Hub or not open to you",
                         "check the name; set HF_TOKEN for a gated or private one") from error
    except (httpx.HTTPError, HfHubHTTPError, ConnectionError, OSError) as error:
        raise UsageError(f"data set {name} can't be reached on the Hub ({short(error)})",
                         "go online, set HF_HUB_OFFLINE=1 to take what is cached, or use a local file or --calibration self") from error
