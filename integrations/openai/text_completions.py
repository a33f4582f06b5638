"""Legacy text completions: their requests as chat, an answer as a completion or a stream of one, and back."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.integrations.openai.completions import choices_for, several, usage_of
from cotune.integrations.openai.sse import DONE, events, grow, number
from cotune.recording.recorder import Answer, LiveCall
from cotune.recording.records import Candidate
from cotune.recording.validate_answers import MALFORMED, counts


def chat_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """A completion request as a chat request of one user message."""
    prompt = asked.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    rest = {k: v for k, v in asked.items() if k != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": prompt}], "api": "completions"}


def unsupported_reason(asked: Mapping[str, Any], chat: Mapping[str, Any]) -> str:
    """What in a request, given also as chat, only a provider can serve; "" when a policy can answer it."""
    found = [f"the parameter {name}" for name in ("suffix", "echo") if asked.get(name)]
    if int(asked.get("best_of") or 1) > int(asked.get("n") or 1):
        found.append("the parameter best_of")
    if not isinstance(chat["messages"][0]["content"], str):
        found.append("a prompt that is not one text")
    return " and ".join(found)


def completion_of(call: LiveCall, answer: Answer) -> dict[str, Any]:
    """The body for an answer. Raises SamplerError when there are fewer candidates than the application asked for."""
    shown = choices_for(call, answer)
    return {
        "id": f"cmpl-{call.id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [_choice(call, answer, i, candidate) for i, candidate in enumerate(shown)],
        "usage": usage_of(answer, shown),
    }


def _choice(call: LiveCall, answer: Answer, index: int, candidate: Candidate) -> dict[str, Any]:
    finish = "stop" if candidate.tool_calls else candidate.finish_reason
    choice = {"index": index, "text": candidate.text, "finish_reason": finish, "logprobs": None}
    if call.params.get("logprobs") is not None:
        choice["logprobs"] = {
            "tokens": [f"token_id:{token}" for token in candidate.token_ids],
            "token_logprobs": list(candidate.logprobs),
            "text_offset": [],
            "top_logprobs": None,
        }
    if call.params.get("return_token_ids"):
        choice |= {"prompt_token_ids": list(answer.prompt_ids), "token_ids": list(candidate.token_ids)}
    return choice


def to_stream(completion: Mapping[str, Any], *, usage: bool) -> bytes:
    """The events of a text completion; `usage` adds the chunk that `stream_options.include_usage` asks for."""
    base = {k: v for k, v in completion.items() if k not in ("choices", "usage")}
    made = [{**base, "choices": [choice]} for choice in completion["choices"]]
    if usage:
        made.append({**base, "choices": [], "usage": completion["usage"]})
    return b"".join(b"data: " + msgspec.json.encode(event) + b"\n\n" for event in made) + DONE


def answer_of(completion: Any) -> Answer:
    """The answer in a text completion. Raises ValueError when it has no list of choices."""
    choices = completion.get("choices") if isinstance(completion, Mapping) else None
    if not choices or not isinstance(choices, list):
        raise ValueError("no choices")
    first = choices[0] if isinstance(choices[0], Mapping) else {}
    return Answer(
        candidates=tuple(_candidate(i, choice) for i, choice in enumerate(choices)),
        prompt_ids=several(first.get("prompt_token_ids")),
        usage=counts(completion.get("usage"), "prompt_tokens", "completion_tokens"),
    )


def _candidate(index: int, choice: Any) -> Candidate:
    if not isinstance(choice, Mapping):
        return Candidate(index=index, text="", message={MALFORMED: {"choice": choice}})
    text = choice.get("text") or ""
    token_ids = several(choice.get("token_ids"))
    told = choice.get("logprobs") or {}
    logprobs = several(told.get("token_logprobs")) if isinstance(told, Mapping) else (told,)
    if logprobs[:1] == (None,):  # with `echo`: those of the prompt, whose first token has none
        logprobs = ()
    return Candidate(
        index=index,
        text=text,
        message={"role": "assistant", "content": text},
        token_ids=token_ids,
        logprobs=logprobs if not token_ids or len(token_ids) == len(logprobs) else (),
        finish_reason=choice.get("finish_reason") or "stop",
    )


def from_stream(raw: bytes) -> dict[str, Any] | None:
    """The completion that a stream adds up to; None when it was not read to its end.

    Raises ValueError for events that are not JSON, and for an error event.
    """
    completion: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    done = False
    for data in events(raw):
        if data == b"[DONE]":
            done = True
            break
        _take(data, completion, choices)
    if not choices or not (done or all(choice["finish_reason"] for choice in choices.values())):
        return None
    return {**completion, "choices": [choices[index] for index in sorted(choices)]}


def part_of_stream(raw: bytes) -> dict[str, Any] | None:
    """The completion as far as the sound events of a stream tell it; its open choices are `interrupted`."""
    completion: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for data in events(raw[: raw.rfind(b"\n") + 1]):
        try:
            _take(data, completion, choices)
        except (ValueError, TypeError, AttributeError, KeyError):
            continue
    if not any(choice["text"] for choice in choices.values()):
        return None
    found = [choices[index] for index in sorted(choices)]
    return {**completion, "choices": [{**c, "finish_reason": c["finish_reason"] or "interrupted"} for c in found]}


def _take(data: bytes, completion: dict[str, Any], choices: dict[int, dict[str, Any]]) -> None:
    event = msgspec.json.decode(data)
    if event.get("error"):
        raise ValueError(f"error event: {event['error']}")
    if event.get("usage"):
        completion["usage"] = event["usage"]
    for part in event.get("choices") or []:
        choice = choices.setdefault(number(part, "index"), {"text": "", "finish_reason": None})
        grow(choice, "text", part.get("text") or "")
        choice["finish_reason"] = part.get("finish_reason") or choice["finish_reason"]
        if part.get("prompt_token_ids"):
            choice["prompt_token_ids"] = part["prompt_token_ids"]
        if part.get("token_ids"):
            choice.setdefault("token_ids", []).extend(several(part["token_ids"]))
        if part.get("logprobs"):
            found = choice.setdefault("logprobs", {"token_logprobs": []})["token_logprobs"]
            found.extend(several(part["logprobs"].get("token_logprobs")))
