"""A stand-in for the Hugging Face hub on the loopback interface: repositories, branches, commits and files."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Hub(ThreadingHTTPServer):
    """`repositories` maps a name to its branches, each of which is a list of commits (id, files)."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[str, dict[str, list[tuple[str, dict[str, bytes]]]]] = {}
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def commit(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        branches = self.repositories.get(name, {})
        if revision in branches:
            return branches[revision][-1] if branches[revision] else None
        every = [commit for commits in branches.values() for commit in commits]
        return next((commit for commit in every if commit[0] == revision), None)


class Answer(BaseHTTPRequestHandler):
    """Answers one request."""

    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Keeps the log empty."""

    def reply(self, value: Any, status: int = 200, headers: dict[str, str] | None = None, *, body: bool = True) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for key, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(key, text)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def missing(self, code: str) -> None:
        self.reply({"error": code}, 404, {"X-Error-Code": code, "X-Error-Message": code})

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            parts = []
            while size := int(self.rfile.readline().strip(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self) -> None:
        path, data = unquote(urlsplit(self.path).path), self.read()
        self.server.requests.append(f"POST {path}")
        if path == "/api/validate-yaml":
            self.reply({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            about = json.loads(data)
            name = "/".join(filter(None, (about.get("organization"), about["name"])))
            is_new = name not in self.server.repositories
            self.server.repositories.setdefault(name, {"main": [(_digest(b"empty", name), {})]})
            self.reply({"url": f"{self.server.url}/{name}", "name": name}, 200 if is_new else 409)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/(branch|preupload|commit)/(.+)", path):
            self.change(*match.groups(), data)
        else:
            self.missing("EntryNotFound")

    def change(self, name: str, what: str, branch: str, data: bytes) -> None:
        branches = self.server.repositories.get(name)
        if branches is None:
            self.missing("RepoNotFound")
        elif what == "branch":
            is_new = branch not in branches
            branches.setdefault(branch, list(branches["main"][-1:]))
            self.reply({}, 200 if is_new else 409)
        elif what == "preupload":
            files = json.loads(data)["files"]
            regular = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            self.reply({"files": [{"path": file["path"], **regular} for file in files]})
        else:
            files = dict(branches[branch][-1][1]) if branches.get(branch) else {}
            for line in map(json.loads, data.splitlines()):
                if line["key"] == "file":
                    files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            identity = _digest(json.dumps(sorted(files)).encode(), *(_digest(x) for x in files.values()))
            branches[branch].append((identity, files))
            url = f"{self.server.url}/{name}/commit/{identity}"
            self.reply({"success": True, "commitOid": identity, "commitUrl": url, "hookOutput": ""})

    def do_HEAD(self) -> None:
        self.give(body=False)

    def do_GET(self) -> None:
        self.give(body=True)

    def give(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.requests.append(f"{self.command} {path}")
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/(revision|tree)/([^/]+))?", path):
            name, what, revision = match.groups()
            commit = self.server.commit(name, revision or "main")
            if commit is None:
                self.missing("RepoNotFound" if name not in self.server.repositories else "RevisionNotFound")
                return
            identity, files = commit
            listed = [
                {"rfilename": path, "path": path, "type": "file", "size": len(x), "oid": _digest(x)[:40]}
                for path, x in files.items()
            ]
            about = {"_id": "1", "id": name, "modelId": name, "sha": identity, "siblings": listed, "private": False}
            self.reply(listed if what == "tree" else {**about, "tags": [], "downloads": 0, "likes": 0})
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            name, revision, file = match.groups()
            commit = self.server.commit(name, revision)
            if commit is None or file not in commit[1]:
                self.missing("EntryNotFound")
                return
            data = commit[1][file]
            headers = {"ETag": f'"{_digest(data)}"', "X-Repo-Commit": commit[0], "Accept-Ranges": "bytes"}
            self.reply(data, headers=headers, body=body)
        else:
            self.missing("RepoNotFound")


def _digest(*parts: bytes | str) -> str:
    return hashlib.sha1(b"|".join(x if isinstance(x, bytes) else x.encode() for x in parts)).hexdigest()


@contextmanager
def running() -> Iterator[Hub]:
    """The server, while the block runs."""
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
