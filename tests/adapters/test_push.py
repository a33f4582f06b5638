"""An export pushed to the Hub: a local server takes the requests of its API and keeps what is uploaded."""

from __future__ import annotations

import base64
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from huggingface_hub import constants

from cotune.adapters.export import TrainedPolicy, write_export
from cotune.adapters.manifest import read_manifest
from cotune.cli.main import main
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder.hub import check_repository, push
from tests.adapters.test_export import write_run

Captured = pytest.CaptureFixture[str]


class Hub(ThreadingHTTPServer):
    """Repositories by name, with their files."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.made: list[dict[str, Any]] = []
        self.refuse = False
        self.breaks_off = ""
        """End of the path at whose request the connection is cut."""
        self.on_request: Callable[[str], None] = lambda path: None


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length") or 0))
        self.server.on_request(self.path)
        if self.server.breaks_off and self.path.endswith(self.server.breaks_off):
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if self.server.refuse:
            return self._answer({"error": "Invalid username or password."}, 401)
        if self.path == "/api/repos/create":
            self.server.made.append(json.loads(raw))
            return self._answer({"url": f"{constants.ENDPOINT}/me/team", "name": "me/team"})
        if self.path == "/api/validate-yaml":
            return self._answer({"errors": [], "warnings": []})
        if self.path.endswith("/preupload/main"):
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(raw)["files"]
            ]
            return self._answer({"files": files})
        assert self.path.endswith("/commit/main"), self.path
        for line in raw.splitlines():
            part = json.loads(line)
            if part["key"] == "file":
                self.server.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])
        url = f"{constants.ENDPOINT}/me/team/commit/abc"
        return self._answer({"success": True, "commitOid": "abc", "commitUrl": url})

    def do_GET(self) -> None:
        self._answer({"id": "me/team", "modelId": "me/team", "siblings": [], "sha": "0" * 40, "xetEnabled": False})

    def _answer(self, body: Any, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *args: object) -> None: ...


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    for module in ("huggingface_hub.constants", "huggingface_hub.hf_api"):
        monkeypatch.setattr(f"{module}.ENDPOINT", f"http://127.0.0.1:{server.server_port}", raising=False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    quick = Mock(wraps=time, sleep=lambda seconds: None)  # between its attempts
    monkeypatch.setattr("huggingface_hub.utils._http.time", quick)
    yield server
    server.shutdown()
    server.server_close()


def test_an_export_is_uploaded_as_it_is_on_disk(
    hub: Hub, tmp_path: Path, base: Path, policies: list[TrainedPolicy], capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", base, policies[0].lora, policies[0].weights)
    to = tmp_path / "out"
    assert main(["export", str(tmp_path / "run"), "--out", str(to)]) == 0
    assert main(["export", str(tmp_path / "run"), "--out", str(to), "--push", "me/team", "--private"]) == 0
    on_disk = {file.relative_to(to): file.read_bytes() for file in to.rglob("*") if file.is_file()}
    earlier = {path for path in on_disk if path.parts[0] == ".versions"}
    assert earlier
    assert hub.files == {str(path): content for path, content in on_disk.items() if path not in earlier}
    assert [(made["name"], made["organization"]) for made in hub.made] == [("team", "me")]
    assert hub.made[0].get("private") or hub.made[0].get("visibility") == "private"
    assert "pushed to " in capsys.readouterr().out


def test_a_refused_upload_leaves_the_export_and_says_so(
    hub: Hub, tmp_path: Path, policies: list[TrainedPolicy]
) -> None:
    write_export(tmp_path / "out", policies)
    hub.refuse = True
    with pytest.raises(AdapterError, match=r"(?s)could not be pushed to me/team.*HF_TOKEN.*The export itself is whole"):
        push(tmp_path / "out", "me/team", private=False, without=".versions")
    assert (tmp_path / "out" / "roles.json").is_file()


@pytest.mark.parametrize(
    ("at", "left"),
    [
        ("/api/repos/create", "me/team may not exist."),
        ("/preupload/main", "me/team exists, but may lack this version."),
        ("/commit/main", "me/team exists, but may lack this version."),
    ],
)
def test_a_push_that_the_network_breaks_off_says_what_is_there_and_how_to_go_on(
    at: str, left: str, hub: Hub, tmp_path: Path, base: Path, policies: list[TrainedPolicy], capsys: Captured
) -> None:
    write_run(tmp_path / "run", base, policies[0].lora, policies[0].weights)
    to, hub.breaks_off = tmp_path / "out", at
    assert main(["export", str(tmp_path / "run"), "--out", str(to), "--push", "me/team"]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"{to} could not be pushed to me/team: " in said
    assert said.endswith(
        f". {left} Check that the Hub can be reached. The export itself is whole: push it again with `hf upload "
        f"me/team {to} --exclude '.versions/*'`.\n"
    )
    assert hub.files == {} and read_manifest(to).policies


def test_a_push_that_is_interrupted_says_what_is_there_and_how_to_go_on(
    hub: Hub, tmp_path: Path, base: Path, policies: list[TrainedPolicy], capsys: Captured
) -> None:
    write_run(tmp_path / "run", base, policies[0].lora, policies[0].weights)
    to = tmp_path / "out"

    def interrupt(path: str) -> None:
        if path.endswith("/preupload/main"):
            os.kill(os.getpid(), signal.SIGINT)
            hub.on_request = lambda path: None

    hub.on_request = interrupt
    assert main(["export", str(tmp_path / "run"), "--out", str(to), "--push", "me/team"]) == 130
    out, err = capsys.readouterr()
    assert err.splitlines()[-1] == "interrupted"
    last = (
        f"{to} is whole, but me/team may lack it: push it again with `hf upload me/team {to} --exclude '.versions/*'`."
    )
    assert out.splitlines()[-1] == last
    assert hub.files == {} and read_manifest(to).policies


@pytest.mark.parametrize("name", ["team", "me/te am", "a/b/c", ""])
def test_what_names_no_repository_is_refused_before_the_export(name: str) -> None:
    with pytest.raises(ConfigError, match="push"):
        check_repository(name)
