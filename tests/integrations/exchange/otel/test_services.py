"""The commands of the page for Langfuse, LangSmith and Phoenix, as they stand, against a receiver of OTLP over HTTP."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cotune.cli.main import main
from tests.integrations.exchange.otel.records import SECRET, record
from tests.test_docs import ROOT, blocks

PAGE = ROOT / "docs" / "how-to" / "opentelemetry.md"
KEYS = {"LANGFUSE_PUBLIC_KEY": "pk-lf-1", "LANGFUSE_SECRET_KEY": "sk-lf-" + "2" * 80, "LANGSMITH_API_KEY": "lsv2_3"}


class Receiver(ThreadingHTTPServer):
    """Keeps what is posted: path, headers, and the body as a request of the protocol."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.taken: list[tuple[str, dict[str, str], ExportTraceServiceRequest]] = []


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self.rfile.read(int(headers["content-length"]))
        self.server.taken.append((self.path, headers, ExportTraceServiceRequest.FromString(body)))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with Receiver() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def commands(receiver: Receiver) -> Iterator[list[str]]:
    """The words of each command, with the receiver in the place of the service."""
    (block,) = [text for text in blocks(PAGE, "sh") if "langfuse" in text]
    for line in block.replace("\\\n", " ").splitlines():
        here = re.sub(r"https?://[^/\s]+", f"http://127.0.0.1:{receiver.server_port}", line)
        yield shlex.split(os.path.expandvars(here))


def test_the_commands_of_the_page_deliver_what_the_services_read(
    receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (how,) = re.findall(r"`AUTH` is `([^`]+)`", PAGE.read_text())
    printed = subprocess.run(["bash", "-c", f'printf %s "{how}"'], env={**os.environ, **KEYS}, capture_output=True)
    for name, value in {**KEYS, "AUTH": printed.stdout.decode()}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "r1").mkdir(parents=True)
    record(tmp_path / "runs" / "r1").close()
    for words in commands(receiver):
        assert main(words[1:]) == 0

    langfuse, langsmith, phoenix = receiver.taken
    assert [taken[0] for taken in receiver.taken] == ["/api/public/otel/v1/traces", "/otel/v1/traces", "/v1/traces"]
    pair = f"{KEYS['LANGFUSE_PUBLIC_KEY']}:{KEYS['LANGFUSE_SECRET_KEY']}"
    assert langfuse[1]["authorization"] == f"Basic {base64.b64encode(pair.encode()).decode()}"
    assert (langsmith[1]["x-api-key"], langsmith[1]["langsmith-project"]) == ("lsv2_3", "my-app")
    assert {taken[1]["content-type"] for taken in receiver.taken} == {"application/x-protobuf"}
    assert phoenix[2] == langfuse[2] == langsmith[2]
    spans = phoenix[2].resource_spans[0].scope_spans[0].spans
    assert {(len(span.trace_id), len(span.span_id)) for span in spans} == {(16, 8)}
    chat = next(span for span in spans if span.name == "chat m")
    told = {pair.key: pair.value for pair in chat.attributes}
    assert told["gen_ai.operation.name"].string_value == "chat"
    assert told["gen_ai.request.model"].string_value == "m"
    assert (told["gen_ai.usage.input_tokens"].int_value, told["gen_ai.usage.output_tokens"].int_value) == (3, 2)
    asked = json.loads(told["gen_ai.input.messages"].string_value)
    assert [message["role"] for message in asked] == ["system", "user"] and SECRET in asked[0]["parts"][0]["content"]
