"""The OpenAI SDK's other two text interfaces, Responses and legacy completions, read as chat for the record.

They are recorded as far as they can be and always answered by the application's own provider.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.recorder import Answer
from cotune.records import Candidate, Usage


def chat_of_responses(body: Mapping[str, Any]) -> dict[str, Any]:
    """A Responses request as a chat request; input items that are no messages are kept as they are."""
    given = body.get("input")
    messages = [{"role": "user", "content": given}] if isinstance(given, str) else list(given or [])
    if body.get("instructions"):
        messages.insert(0, {"role": "system", "content": body["instructions"]})
    rest = {k: v for k, v in body.items() if k not in ("input", "instructions")}
    return {**rest, "messages": messages, "api": "responses"}


def answer_of_responses(response: Any) -> Answer:
    """The answer in a Responses object. Raises ValueError when it has no output."""
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise ValueError("no output")
    texts: list[str] = []
    tools: list[dict[str, Any]] = []
    for item in response["output"]:
        if item.get("type") == "message":
            texts.extend(part.get("text") or "" for part in item.get("content") or [])
        elif item.get("type") == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            tools.append({"id": item.get("call_id"), "type": "function", "function": function})
    text = "".join(texts)
    message: dict[str, Any] = {"role": "assistant", "content": text or None}
    if tools:
        message["tool_calls"] = tools
    usage = response.get("usage") or {}
    finish = "length" if response.get("status") == "incomplete" else "tool_calls" if tools else "stop"
    return Answer(
        candidates=(Candidate(index=0, text=text, message=message, finish_reason=finish),),
        usage=Usage(usage.get("input_tokens") or 0, usage.get("output_tokens") or 0),
    )


def responses_from_stream(raw: bytes) -> dict[str, Any] | None:
    """The response that a stream of events ended with; None when it was not read to its end."""
    for line in reversed(raw.replace(b"\r\n", b"\n").split(b"\n")):
        if line.startswith(b"data:") and b"response" in line:
            event = msgspec.json.decode(line[5:].strip())
            if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
                response: dict[str, Any] = event["response"]
                return response
    return None


def chat_of_text(body: Mapping[str, Any]) -> dict[str, Any]:
    """A legacy completion request as a chat request of one user message."""
    rest = {k: v for k, v in body.items() if k != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": body.get("prompt")}], "api": "completions"}


def answer_of_text(completion: Any) -> Answer:
    """The answer in a legacy completion. Raises ValueError when it has no choices."""
    choices = completion.get("choices") if isinstance(completion, Mapping) else None
    if not choices:
        raise ValueError("no choices")
    usage = completion.get("usage") or {}
    return Answer(
        candidates=tuple(
            Candidate(
                index=i,
                text=choice.get("text") or "",
                message={"role": "assistant", "content": choice.get("text") or ""},
                finish_reason=choice.get("finish_reason") or "stop",
            )
            for i, choice in enumerate(choices)
        ),
        usage=Usage(usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0),
    )


def text_from_stream(raw: bytes) -> dict[str, Any] | None:
    """The legacy completion that a stream adds up to (its first choice); None when not read to its end."""
    text, finish = "", None
    for line in raw.replace(b"\r\n", b"\n").split(b"\n"):
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        for choice in msgspec.json.decode(line[5:].strip()).get("choices") or []:
            if choice.get("index", 0) == 0:
                text += choice.get("text") or ""
                finish = choice.get("finish_reason") or finish
    return {"choices": [{"text": text, "finish_reason": finish}]} if finish else None
