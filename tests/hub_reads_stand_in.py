"""A Hub to read from, on this machine: the part of its HTTP interface that a download uses; `hub_stand_in` is one to write to.

Written from huggingface_hub's own reading of the answers (`hf_raise_for_status`, `model_info`, `list_repo_tree`, `get_hf_file_metadata`).
Anything that it does not know is HTTP 500 and is kept in `unexpected`, so that a test notices.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.parse import unquote, urlsplit


@dataclass
class Repository:
    """Files by commit, the commits that branches and tags point to, and who may read: `public`, `gated` (files only), or `private`."""

    commits: dict[str, dict[str, bytes]]
    branches: dict[str, str]
    tags: dict[str, str] = field(default_factory=dict)
    access: str = "public"

    def commit(self, revision: str) -> str | None:
        named = self.branches.get(revision) or self.tags.get(revision)
        begun = [commit for commit in self.commits if len(revision) >= 7 and commit.startswith(revision)]
        return named or (begun[0] if len(begun) == 1 else None)


@dataclass
class StandInHub:
    """Repositories by name, tokens that are valid and those that may read gated and private ones, and what was asked of it."""

    repositories: dict[str, Repository]
    valid_tokens: set[str] = field(default_factory=set)
    trusted_tokens: set[str] = field(default_factory=set)
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    failing_with: int | None = None
    portal: bool = False  # answers every request with a page, as a network does that wants a log-in
    cut_file: str | None = None  # its body ends early

    def fetched(self) -> set[str]:
        """The names of the files whose content was asked for."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for method, path in self.requests if method == "GET" and "/resolve/" in path}


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[StandInHub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer_request()

    def do_GET(self) -> None:
        self._answer_request()

    def _answer_request(self) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path))
        authorization = self.headers.get("authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        if self.hub.portal:
            return self._send(200, b"<html>log in</html>", {"Content-Type": "text/html"})
        if self.hub.failing_with:
            return self._refuse(self.hub.failing_with, None, "Internal Error")
        if token is not None and token not in self.hub.valid_tokens:
            return self._refuse(401, None, "Invalid credentials in Authorization header")
        parts = path.strip("/").split("/")
        api = parts[:2] == ["api", "models"]
        if api:
            parts = parts[2:]
        if len(parts) < 2:
            return self._unknown(path)
        name, rest = "/".join(parts[:2]), parts[2:]
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.access == "private" and token not in self.hub.trusted_tokens):
            if token is None:
                return self._refuse(401, None, "Invalid username or password.")
            return self._refuse(404, "RepoNotFound", "Repository not found")
        if api:
            return self._api(name, repository, rest, path)
        if len(rest) >= 3 and rest[0] == "resolve":
            return self._file(name, repository, token, rest[1], "/".join(rest[2:]))
        return self._unknown(path)

    def _api(self, name: str, repository: Repository, rest: list[str], path: str) -> None:
        if rest == ["refs"]:
            refs = {kind: [{"name": ref, "ref": f"refs/{prefix}/{ref}", "targetCommit": commit} for ref, commit in known.items()]
                    for kind, prefix, known in (("branches", "heads", repository.branches), ("tags", "tags", repository.tags))}
            return self._json({**refs, "converts": []})
        verb, revision = (rest[0], "/".join(rest[1:])) if rest else ("revision", "main")
        if verb not in ("revision", "tree"):
            return self._unknown(path)
        commit = repository.commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        files = repository.commits[commit]
        if verb == "tree":
            return self._json([{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                               for file, data in files.items()])
        gated = "manual" if repository.access == "gated" else False
        return self._json({"_id": "0", "id": name, "modelId": name, "sha": commit, "private": False, "gated": gated, "tags": [],
                           "siblings": [{"rfilename": file, "size": len(data)} for file, data in files.items()]})

    def _file(self, name: str, repository: Repository, token: str | None, revision: str, file: str) -> None:
        if repository.access == "gated" and token not in self.hub.trusted_tokens:
            return self._refuse(401 if token is None else 403, "GatedRepo", f"Access to model {name} is restricted.")
        commit = repository.commit(revision)
        if commit is None:
            return self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        data = repository.commits[commit].get(file)
        if data is None:
            return self._refuse(404, "EntryNotFound", "Entry not found")
        etag = f'"{hashlib.sha256(data).hexdigest()}"'
        self._send(200, data, {"ETag": etag, "X-Repo-Commit": commit}, cut=self.command == "GET" and file == self.hub.cut_file)

    def _json(self, content: object) -> None:
        self._send(200, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str | None, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self._send(status, json.dumps({"error": message}).encode(), headers)

    def _unknown(self, path: str) -> None:
        self.hub.unexpected.append(f"{self.command} {path}")
        self._send(500, b"{}", {})

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if cut else body)
        if cut:
            self.close_connection = True


@contextmanager
def serving(hub: StandInHub) -> Iterator[StandInHub]:
    """Serve `hub` at `hub.url` until the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
