"""A stronger clerk behind an OpenAI-compatible address, as a provider would be: scripted, and now and then wrong.

python -m examples.tool_agent.provider --port 8100
"""

from __future__ import annotations

import argparse
import json
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from examples.tool_agent.shop import PRICE_OF, asked_for

Answers = Callable[[Sequence[Mapping[str, Any]]], dict[str, Any]]
"""Returns the next message of a conversation."""
ERRING = 0.05
"""Share of conversations with a search for the wrong item."""


def next_message(messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the clerk's next message: search for the item, multiply its price, say the number."""
    question = next(m["content"] for m in messages if m["role"] == "user")
    results = [str(m["content"]) for m in messages if m["role"] == "tool"]
    count, item = asked_for(question)
    if not results:
        chance = random.Random(question)
        return _call("search", query=chance.choice(sorted(PRICE_OF)) if chance.random() < ERRING else item)
    if len(results) == 1:
        return _call("calculator", expression=f"{count} * {results[0].split()[-1]}")
    return {"role": "assistant", "content": results[-1]}


def _call(tool: str, **arguments: str) -> dict[str, Any]:
    call = {"id": tool, "type": "function", "function": {"name": tool, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def completion(body: Mapping[str, Any], answers: Answers) -> dict[str, Any]:
    """The answer to a chat request; tokens are counted as words."""
    message = answers(body["messages"])
    finish = "tool_calls" if message.get("tool_calls") else "stop"
    prompt_tokens = len(json.dumps(body["messages"]).split())
    answer_tokens = len(json.dumps(message).split())
    return {
        "id": "chat",
        "object": "chat.completion",
        "created": 0,
        "model": body["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": finish}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": prompt_tokens + answer_tokens,
        },
    }


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, answers: Answers, *args: Any) -> None:
        self.answers = answers
        super().__init__(*args)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        content = json.dumps(completion(body, self.answers)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def serving(port: int = 0, answers: Answers = next_message) -> Iterator[str]:
    """Serve `answers` on this machine; yields the address for OPENAI_BASE_URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), partial(_Handler, answers))
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Serve until it is interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--port", type=int, default=8100)
    with serving(parser.parse_args().port) as url:
        print(f"OPENAI_BASE_URL={url}")
        threading.Event().wait()


if __name__ == "__main__":
    main()
