"""A Hub for one test on this machine: what `gemq push` calls, with checked hashes, cut connections and refused tokens."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

WRITER, READER = "hf_writerWRITERwriter", "hf_readerREADERreader"
Files = dict[str, tuple[str, bytes]]  # path -> ("lfs" or "regular", content)


@dataclass
class Repository:
    private: bool
    commits: dict[str, Files] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, files: Files) -> str:
        listed = sorted((path, hashlib.sha256(content).hexdigest()) for path, (_, content) in files.items())
        oid = hashlib.sha1(json.dumps([len(self.commits), listed]).encode()).hexdigest()
        self.commits[oid] = files
        self.branches[branch] = oid
        return oid

    def files(self, revision: str) -> Files:
        return self.commits[self.branches.get(revision, revision)]


class HubStandIn:
    """`cut_uploads`: so many uploads lose their connection half-way; `cut_after`: so do all after that many; `fail_with`: (part of a path,
    status, message) of POSTs that are refused; `spoil`: what a commit stores instead of what it was given."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.requests: list[str] = []
        self.cut_uploads = 0
        self.cut_after: int | None = None
        self.fail_with: tuple[str, int, str] | None = None
        self.spoil: Any = None
        stand_in = self

        class Bound(_Handler):
            hub = stand_in

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: HubStandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, document: object, **headers: str) -> None:
        raw = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(raw)

    def refuse(self, status: int, why: str, code: str = "") -> None:
        self.answer(status, {"error": why}, **({"X_Error_Code": code} if code else {}), X_Error_Message=why)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def allowed(self, *, write: bool) -> bool:
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token not in (WRITER, READER):
            self.refuse(401, f"Invalid credentials: {token}")
            return False
        if write and token == READER:
            self.refuse(403, f"Forbidden: {token} may only read")
            return False
        return True

    def do_GET(self) -> None:
        path, _, _ = self.path.partition("?")
        self.hub.requests.append(f"GET {path}")
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path)
        if not found or not self.allowed(write=False):
            return None if found else self.refuse(404, "no such page")
        name, what, revision = found.groups()
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        revision = revision or "main"
        if revision not in repository.branches and revision not in repository.commits:
            return self.refuse(404, "Revision not found", "RevisionNotFound")
        if what == "tree":
            return self.answer(200, [self.entry(path, *file) for path, file in sorted(repository.files(revision).items())])
        head = repository.branches.get(revision, revision)
        return self.answer(200, {"id": name, "modelId": name, "private": repository.private, "sha": head, "siblings": [], "tags": []})

    @staticmethod
    def entry(path: str, kind: str, content: bytes) -> dict[str, Any]:
        if kind == "lfs":
            digest = hashlib.sha256(content).hexdigest()
            pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{digest}\nsize {len(content)}\n".encode()
            lfs = {"oid": digest, "size": len(content), "pointerSize": len(pointer)}
            return {"type": "file", "path": path, "size": len(content), "oid": blob_id(pointer), "lfs": lfs}
        return {"type": "file", "path": path, "size": len(content), "oid": blob_id(content)}

    def do_PUT(self) -> None:
        oid, length = self.path.rpartition("/")[2], int(self.headers["Content-Length"])
        self.hub.requests.append(f"PUT {oid}")
        late = self.hub.cut_after is not None and len(self.hub.uploads) >= self.hub.cut_after
        if self.hub.cut_uploads or late:
            self.hub.cut_uploads = max(0, self.hub.cut_uploads - 1)
            self.rfile.read(length // 2)
            return self.cut()
        content = self.rfile.read(length)
        if hashlib.sha256(content).hexdigest() != oid:
            return self.refuse(400, "the content is not what its SHA-256 says")
        self.hub.objects[oid] = content
        self.hub.uploads.append(oid)
        return self.answer(200, {})

    def do_POST(self) -> None:
        path, _, _ = self.path.partition("?")
        self.hub.requests.append(f"POST {path}")
        raw = self.body()
        if self.hub.fail_with and self.hub.fail_with[0] in path:
            return self.refuse(*self.hub.fail_with[1:])
        if not self.allowed(write=True):
            return None
        if path == "/api/repos/create":
            return self.create(json.loads(raw))
        if path == "/api/validate-yaml":  # what huggingface_hub asks of a README.md before it commits
            return self.validate(json.loads(raw)["content"])
        if path.endswith(".git/info/lfs/objects/batch"):
            return self.batch(json.loads(raw))
        found = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(preupload|commit|branch)/([^/]+)", path)
        repository = self.hub.repositories.get(found.group(1)) if found else None
        if found is None or repository is None:
            return self.refuse(404, "Repository not found", "RepoNotFound")
        what, revision = found.group(2), found.group(3)
        if what == "branch":
            if revision in repository.branches:
                return self.refuse(409, "exists")
            repository.branches[revision] = repository.branches["main"]
            return self.answer(200, {})
        if what == "preupload":
            return self.preupload(repository, revision, json.loads(raw))
        return self.commit(repository, found.group(1), revision, [json.loads(line) for line in raw.splitlines()])

    def create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted.get('organization') or 'somebody'}/{wanted['name'].rpartition('/')[2]}"
        if name in self.hub.repositories:
            return self.answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
        self.hub.repositories[name] = Repository(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        self.hub.repositories[name].commit("main", {".gitattributes": ("regular", b"*.safetensors filter=lfs\n")})
        return self.answer(200, {"url": f"{self.hub.url}/{name}", "id": name, "name": name})

    def validate(self, card: str) -> None:
        try:
            errors = [] if isinstance(yaml.safe_load(card.split("---\n")[1]), dict) else ["the metadata is no mapping"]
        except (IndexError, yaml.YAMLError):
            errors = ["there is no metadata in YAML"]
        self.answer(400 if errors else 200, {"errors": [{"message": text} for text in errors], "warnings": []})

    def preupload(self, repository: Repository, revision: str, wanted: dict[str, Any]) -> None:
        files, listed = repository.files(revision), []
        for file in wanted["files"]:
            kind = "lfs" if file["path"].endswith(".safetensors") or file["size"] > 10_000_000 else "regular"
            oid = None
            if file["path"] in files:
                entry = self.entry(file["path"], *files[file["path"]])
                oid = entry["lfs"]["oid"] if "lfs" in entry else entry["oid"]
            listed.append({"path": file["path"], "uploadMode": kind, "shouldIgnore": False, "oid": oid})
        self.answer(200, {"files": listed})

    def batch(self, wanted: dict[str, Any]) -> None:
        objects = []
        for item in wanted["objects"]:
            entry = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                entry["actions"] = {"upload": {"href": f"{self.hub.url}/objects/{item['oid']}"}}
            objects.append(entry)
        self.answer(200, {"transfer": "basic", "objects": objects})

    def commit(self, repository: Repository, name: str, branch: str, lines: list[dict[str, Any]]) -> None:
        header = lines[0]["value"]
        if header.get("parentCommit") not in (None, repository.branches[branch]):
            return self.refuse(412, "A commit has happened since")
        files = dict(repository.files(branch))
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = ("regular", base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    return self.refuse(400, f"no object {value['oid']}")
                files[value["path"]] = ("lfs", self.hub.objects[value["oid"]])
            else:
                del files[value["path"]]
        oid = repository.commit(branch, self.hub.spoil(files) if self.hub.spoil else files)
        return self.answer(200, {"commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None})


def blob_id(raw: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw).hexdigest()
