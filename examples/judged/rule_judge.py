"""A stand-in for a provider's model: an HTTP server that ranks names as a person might who says them aloud."""

from __future__ import annotations

import itertools
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_ENTRY = re.compile(r"<<\w{8} ([A-Z]+)>>\n(.*?)\n<<\w{8} end of \1>>", re.DOTALL)


def ease(name: str) -> int:
    """Count the changes between vowel and consonant in a name, minus characters that are not letters."""
    sounds = ["v" if letter in "aeiou" else "c" for letter in name if letter.isalpha()]
    turns = sum(first != second for first, second in itertools.pairwise(sounds))
    return turns - sum(not letter.isalpha() for letter in name)


def verdict(body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request to rank names: the easiest to say first."""
    names = dict(_ENTRY.findall(body["messages"][1]["content"]))
    levels = sorted({ease(name) for name in names.values()}, reverse=True)
    tiers = [[label for label, name in names.items() if ease(name) == level] for level in levels]
    return {"reason": "Said aloud, they come in this order.", "ranking": tiers}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        text = json.dumps(verdict(json.loads(raw)))
        message = {"role": "assistant", "content": text}
        usage = {"prompt_tokens": len(raw) // 4, "completion_tokens": len(text) // 4}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": "judge", "usage": usage}
        reply["choices"] = [{"index": 0, "message": message, "finish_reason": "stop"}]
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None: ...


@contextmanager
def judging() -> Iterator[str]:
    """Serve on a free port; yields the base URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
