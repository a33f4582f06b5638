"""A hub of data sets on the loopback interface, with the answers of the Hugging Face hub that a download needs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


@dataclass
class Repo:
    """A repository: its licence, and the files of each commit, oldest first."""

    licence: str | None
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Add a commit, and return its hash."""
        text = json.dumps({path: hashlib.sha256(content).hexdigest() for path, content in files.items()})
        name = hashlib.sha1(text.encode()).hexdigest()
        self.commits[name] = dict(files)
        return name


@dataclass
class Hub:
    """What is served, what was asked for, and how the next answers go wrong."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, path and the header Range of each request."""
    cuts: list[tuple[int, str]] = field(default_factory=list)
    """For each of the next answers with content: after how many bytes it ends, and whether by "close" or "reset"."""
    spoiled: bool = False
    """Whether content differs from what the hub states."""

    def add(self, repo: str, files: Mapping[str, bytes], licence: str | None = "mit") -> str:
        """Add a commit to a repository, and return its hash."""
        return self.repos.setdefault(repo, Repo(licence)).commit(files)

    def ranges(self) -> list[str]:
        """The header Range of each request for content that had one."""
        return [asked for method, path, asked in self.requests if method == "GET" and "/api/" not in path and asked]


def is_large(path: str, content: bytes) -> bool:
    """Whether the hub keeps a file outside of git, and states its SHA-256."""
    return path.endswith(".parquet") or len(content) > 1_000_000


def stated_hash(path: str, content: bytes) -> str:
    """The hash of a file that the hub states."""
    if is_large(path, content):
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def loopback_hub() -> Iterator[Hub]:
    """Serve a hub until the end of the block."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self.answer()

        def do_GET(self) -> None:
            self.answer()

        def answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Range", "")))
            if path.startswith("/api/datasets/"):
                owner, name, *rest = path.removeprefix("/api/datasets/").split("/")
                self.describe(f"{owner}/{name}", rest)
            elif path.startswith("/content/"):
                self.send_content(*path.removeprefix("/content/").split("/", 3))
            else:
                owner, name, _, revision, file = path.removeprefix("/datasets/").split("/", 4)
                self.resolve(owner, name, revision, file)

        def describe(self, repo: str, rest: list[str]) -> None:
            """The answer of dataset_info with files_metadata."""
            if repo not in hub.repos:
                return self.send_json(404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            commits = hub.repos[repo].commits
            revision = rest[1] if rest else "main"
            commit = list(commits)[-1] if revision == "main" else revision
            if commit not in commits:
                return self.send_json(404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"})
            siblings: list[dict[str, Any]] = []
            for path, content in commits[commit].items():
                stated = stated_hash(path, content)
                entry: dict[str, Any] = {"rfilename": path, "size": len(content), "blobId": stated}
                if is_large(path, content):
                    entry["blobId"] = hashlib.sha1(stated.encode()).hexdigest()  # of a pointer, which is in git
                    entry["lfs"] = {"sha256": stated, "size": len(content), "pointerSize": 134}
                siblings.append(entry)
            licence = hub.repos[repo].licence
            card = {} if licence is None else {"license": licence}
            info = {"id": repo, "sha": commit, "cardData": card, "siblings": siblings, "private": False, "tags": []}
            return self.send_json(200, info, {})

        def resolve(self, owner: str, name: str, commit: str, file: str) -> None:
            """Small files come at once. Large ones are elsewhere, and the hub only says where."""
            content = hub.repos[f"{owner}/{name}"].commits[commit][file]
            if not is_large(file, content):
                return self.send_content(owner, name, commit, file)
            self.send_response(302)
            self.send_header("Location", f"{hub.url}/content/{owner}/{name}/{commit}/{file}")
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("X-Linked-ETag", f'"{stated_hash(file, content)}"')
            self.send_header("Content-Length", "0")
            return self.end_headers()

        def send_content(self, owner: str, name: str, commit: str, file: str) -> None:
            """The content, or the range of it that is asked for, unless the answer is to be cut."""
            content = hub.repos[f"{owner}/{name}"].commits[commit][file]
            total = len(content)
            etag = stated_hash(file, content)
            if hub.spoiled:
                content = content[:-1] + b"?"
            asked = self.headers.get("Range")
            start = int(asked.removeprefix("bytes=").partition("-")[0]) if asked else 0
            self.send_response(206 if asked else 200)
            self.send_header("ETag", f'"{etag}"')
            self.send_header("X-Repo-Commit", commit)
            self.send_header("Accept-Ranges", "bytes")
            if asked:
                self.send_header("Content-Range", f"bytes {start}-{total - 1}/{total}")
            self.send_header("Content-Length", str(total - start))
            self.end_headers()
            if self.command == "HEAD":
                return
            if not hub.cuts:
                self.wfile.write(content[start:])
                return
            length, how = hub.cuts.pop(0)
            self.wfile.write(content[start : start + length])
            self.wfile.flush()
            if how == "reset":
                # A socket that is closed with this option, and not shut down before, sends a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                os.close(self.connection.detach())
            self.close_connection = True

        def send_json(self, status: int, value: Any, headers: Mapping[str, str]) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            for name, text in headers.items():
                self.send_header(name, text)
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
