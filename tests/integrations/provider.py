"""An outside provider on a local port, scripted by the test."""

from __future__ import annotations

import gzip
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Provider:
    """Answers chat requests like an outside provider. `reply(body, number)` returns (status, content type, chunks);
    `HANG` instead of a chunk waits until the test is over, `CUT` closes the connection."""

    HANG, CUT = object(), object()

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        """The bodies as they came."""
        self.reply: Callable[[dict[str, Any], int], tuple[int, str, list[Any]]] = said
        self.over = threading.Event()
        self.url = ""

    def forget(self) -> None:
        """Keep nothing of the requests so far."""
        self.requests.clear()
        self.headers.clear()
        self.raw.clear()


def said(body: dict[str, Any], number: int = 0) -> tuple[int, str, list[Any]]:
    """Says `re: <last message>` as JSON, or as a stream in several chunks."""
    text = f"re: {body['messages'][-1]['content']}"
    if not body.get("stream"):
        return json_reply(completion({"role": "assistant", "content": text}))
    parts = [{"role": "assistant", "content": ""}, *({"content": c} for c in (text[:2], text[2:]))]
    return 200, "text/event-stream", [*(event(delta) for delta in parts), event({}, "stop"), b"data: [DONE]\n\n"]


def completion(message: dict[str, Any], **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if message.get("tool_calls") else "stop"}
    usage = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
    head = {"id": "c1", "object": "chat.completion", "created": 1, "model": "m"}
    return {**head, "choices": [choice], "usage": usage, **extra}


def event(delta: dict[str, Any], finish: str | None = None, **extra: Any) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, **extra}
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    return f"data: {json.dumps(chunk)}\n\n".encode()


def json_reply(body: Any, status: int = 200) -> tuple[int, str, list[Any]]:
    return status, "application/json", [json.dumps(body).encode()]


def forget_langchain_connections() -> None:
    """Let LangChain open new HTTP clients: it shares one among all models of the process, so a connection that an
    earlier test left open belongs to an event loop that has ended, and closing it fails the next request."""
    clients = sys.modules.get("langchain_openai.chat_models._client_utils")
    if clients is not None:
        clients._cached_async_httpx_client.cache_clear()


@contextmanager
def serving() -> Iterator[Provider]:
    forget_langchain_connections()
    made = Provider()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            made.raw.append(self.rfile.read(int(self.headers["content-length"])))
            packed = self.headers.get("content-encoding") == "gzip"
            body = json.loads(gzip.decompress(made.raw[-1]) if packed else made.raw[-1])
            made.requests.append(body)
            made.headers.append({k.lower(): v for k, v in self.headers.items()})
            status, kind, chunks = made.reply(body, len(made.requests) - 1)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("connection", "close")
            self.end_headers()
            for chunk in chunks:
                if chunk is Provider.HANG:
                    made.over.wait(20)
                elif chunk is Provider.CUT:
                    self.connection.shutdown(2)
                else:
                    self.wfile.write(chunk)
                    self.wfile.flush()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield made
    finally:
        made.over.set()
        server.shutdown()
        thread.join()
        server.server_close()
