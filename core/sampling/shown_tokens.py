"""The tokens of a reply in the form for an application that asks for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.records.structs import ShownToken
from cotune.sampling.protocol import Completion, TokenBytes

TextOf = Callable[[Sequence[int]], Sequence[TokenBytes]]


def shown_tokens(
    completion: Completion, message: Mapping[str, Any], token_bytes: TextOf, whole: bool = False
) -> tuple[ShownToken, ...]:
    """The tokens in the content of `message`, with texts and log-probabilities, for an application that asks for them.

    `message` was parsed from `completion`, and `token_bytes` returns the bytes of token ids. Reasoning, tool calls and
    the end of the turn are not content; with `whole`, the tokens of the whole reply are shown. Each token has its
    likeliest alternatives, if the sampler returned them.
    """
    texts = token_bytes(completion.token_ids)
    positions = list(range(len(texts))) if whole else _content_positions(texts, message)

    # The bytes of the likeliest tokens at all positions, decoded once.
    text_of: dict[int, TokenBytes] = {}
    if completion.top:
        top_ids: set[int] = set()
        for position in positions:
            top_ids.update(id for id, _ in completion.top[position])
        if top_ids:
            text_of = dict(zip(top_ids, token_bytes(tuple(top_ids)), strict=True))

    shown: list[ShownToken] = []
    for position in positions:
        top: tuple[ShownToken, ...] = ()
        if completion.top:
            top = tuple(_shown_token(text_of[id], logprob) for id, logprob in completion.top[position])
        shown.append(_shown_token(texts[position], completion.logprobs[position], top))
    return tuple(shown)


def _shown_token(text: TokenBytes, logprob: float, top: tuple[ShownToken, ...] = ()) -> ShownToken:
    """A token with its text and its likeliest alternatives."""
    try:
        return ShownToken(text.raw.decode(), logprob, top_logprobs=top)
    except UnicodeDecodeError:  # a part of a character: OpenAI writes \xf0\x9f, and its bytes separately
        return ShownToken(text.raw.decode(errors="backslashreplace"), logprob, tuple(text.raw), top)


def _content_positions(texts: Sequence[TokenBytes], message: Mapping[str, Any]) -> list[int]:
    """The positions of the tokens that make up the content of a reply, whose tokens have these `texts`. If the reply
    does not contain the content literally, all tokens except marks (such as the end of the turn) are taken.
    """
    content = message.get("content")
    if not content:
        return []
    # Marks are replaced with a byte that no text contains, so that the content is not found inside one.
    raws = [b"\xff" * len(text.raw) if text.mark else text.raw for text in texts]
    content_begin, content_end = _content_range(b"".join(raws), str(content).encode(), message)
    if content_begin < 0:
        return [position for position, text in enumerate(texts) if not text.mark]
    positions: list[int] = []
    token_begin = 0
    for position, raw in enumerate(raws):
        token_end = token_begin + len(raw)
        if raw and token_end > content_begin and token_begin < content_end:
            positions.append(position)
        token_begin = token_end
    return positions


def _content_range(reply: bytes, content: bytes, message: Mapping[str, Any]) -> tuple[int, int]:
    """Where a reply has its content, which is after the reasoning and before tool calls: begin and end, in bytes.
    (-1, -1) if the reply does not have it literally."""
    reasoning = str(message.get("reasoning_content") or "").encode()
    if not reasoning:
        begin = reply.find(content)
    else:
        after_reasoning = max(reply.find(reasoning), 0) + len(reasoning)
        if message.get("tool_calls"):  # these follow the content and may repeat it
            begin = reply.find(content, after_reasoning)
        else:  # the content is at the end of the reply
            begin = reply.rfind(content, after_reasoning)
    if begin < 0:
        return -1, -1
    return begin, begin + len(content)
