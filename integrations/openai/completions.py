"""Chat completions in OpenAI form: an answer as the body a provider would send, and such a body as an answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import starmap
from typing import Any

from cotune.errors import SamplerError
from cotune.recording.answers import MALFORMED, Answer, counts
from cotune.recording.recorder import LiveCall
from cotune.recording.records import Candidate

TokenText = Callable[[int], str] | None


def completion_of(call: LiveCall, answer: Answer, token_text: TokenText = None) -> dict[str, Any]:
    """The body for an answer: the chosen candidate first, then others up to the `n` that the application asked for.

    The model name is the one asked for; `token_text` gives the text of a token in log-probabilities, which show its id
    without it. Raises SamplerError when there are fewer candidates than `n`.
    """
    shown = _choices(call, answer)
    completion = {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [_choice(call, i, candidate, token_text) for i, candidate in enumerate(shown)],
        "usage": _usage(answer, shown),
    }
    if call.params.get("return_token_ids"):
        completion["prompt_token_ids"] = list(answer.prompt_ids)
    return completion


def _choices(call: LiveCall, answer: Answer) -> list[Candidate]:
    """The chosen candidate, then others up to the `n` that was asked for. Raises SamplerError when there are fewer."""
    asked = int(call.params.get("n") or 1)
    if len(answer.candidates) < asked:
        raise SamplerError(
            f"The application asked for n = {asked} choices and {len(answer.candidates)} were sampled.",
            "Ask for fewer choices.",
        )
    others = [c for c in answer.candidates if c.index != answer.candidates[answer.chosen].index]
    return [answer.candidates[answer.chosen], *others][:asked]


def _choice(call: LiveCall, index: int, candidate: Candidate, token_text: TokenText) -> dict[str, Any]:
    message = {"role": "assistant", "content": None, **candidate.message}
    choice = {"index": index, "message": message, "finish_reason": candidate.finish_reason, "logprobs": None}
    if call.params.get("logprobs"):
        pairs = zip(candidate.token_ids, candidate.logprobs, strict=False)
        choice["logprobs"] = {"content": [_token(t, p, token_text) for t, p in pairs], "refusal": None}
    if call.params.get("return_token_ids"):
        choice["token_ids"] = list(candidate.token_ids)
    return choice


def _token(token: int, logprob: float, token_text: TokenText) -> dict[str, Any]:
    text = f"token_id:{token}" if token_text is None else token_text(token)
    shown = None if token_text is None else list(text.encode())
    return {"token": text, "logprob": logprob, "bytes": shown, "top_logprobs": []}


def _usage(answer: Answer, shown: list[Candidate]) -> dict[str, int]:
    """Counts as the application would pay for them: only of the choices it gets."""
    completion = sum(len(c.token_ids) for c in shown) or answer.usage.completion_tokens
    prompt = answer.usage.prompt_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def answer_of(completion: Any) -> Answer:
    """The answer in a provider's body, with token ids and log-probabilities where it has them (as vLLM does).

    What is mistyped in it is left to the recorder. Raises ValueError when the body has no list of choices.
    """
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not choices or not isinstance(choices, list):
        raise ValueError("no choices")
    return Answer(
        candidates=tuple(starmap(_candidate, enumerate(choices))),
        prompt_ids=several(completion.get("prompt_token_ids")),
        usage=counts(completion.get("usage"), "prompt_tokens", "completion_tokens"),
    )


def several(value: Any) -> tuple[Any, ...]:
    """The items of a list; what is none is one item, so that the recorder refuses it."""
    return tuple(value) if isinstance(value, list) else () if value is None else (value,)


def _candidate(index: int, choice: Any) -> Candidate:
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return Candidate(index=index, text="", message={MALFORMED: {"choice": choice}})
    content = message.get("content")
    token_ids = several(choice.get("token_ids"))
    given = choice.get("logprobs") or {}
    items = several(given.get("content")) if isinstance(given, dict) else (given,)
    logprobs: Any = tuple([item.get("logprob") if isinstance(item, dict) else None for item in items])
    return Candidate(
        index=index,
        text=content if isinstance(content, str) else "",
        message={key: value for key, value in message.items() if value is not None or key == "content"},
        token_ids=token_ids,
        logprobs=logprobs if not token_ids or len(token_ids) == len(logprobs) else (),
        finish_reason=choice.get("finish_reason") or "stop",
    )
