"""The tokens of a reply as an application is told of them that asks for log-probabilities."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from cotune.records.structs import ShownToken
from cotune.sampling.protocol import Completion, TokenBytes

TextOf = Callable[[Sequence[int]], Sequence[TokenBytes]]


def shown_tokens(
    completion: Completion, message: Mapping[str, Any], token_bytes: TextOf, whole: bool = False
) -> tuple[ShownToken, ...]:
    """The tokens of the content of `message`, which was read from `completion`; of all the reply if `whole`.

    Reasoning, tool calls and the end of the turn are no content.
    """
    texts = token_bytes(completion.token_ids)
    places = range(len(texts)) if whole else _content(texts, message)
    ids = {id for place in places if completion.top for id, _ in completion.top[place]}
    known = dict(zip(ids, token_bytes(tuple(ids)), strict=True)) if ids else {}
    return tuple(
        _shown(
            texts[place],
            completion.logprobs[place],
            tuple(_shown(known[id], p) for id, p in completion.top[place]) if completion.top else (),
        )
        for place in places
    )


def _shown(text: TokenBytes, logprob: float, top: tuple[ShownToken, ...] = ()) -> ShownToken:
    try:
        return ShownToken(text.raw.decode(), logprob, top_logprobs=top)
    except UnicodeDecodeError:  # a part of a character: OpenAI writes \xf0\x9f, and its bytes beside
        return ShownToken(text.raw.decode(errors="backslashreplace"), logprob, tuple(text.raw), top)


def _content(texts: Sequence[TokenBytes], message: Mapping[str, Any]) -> Iterable[int]:
    """Places of the tokens that wrote the content. Where it cannot be found as it stands, of all that are no marks."""
    content = message.get("content")
    if not content:
        return ()
    # What no text holds stands for a mark, so that the content is not found within one.
    raws = [b"\xff" * len(text.raw) if text.mark else text.raw for text in texts]
    begin, end = _found(b"".join(raws), str(content).encode(), message)
    if begin < 0:
        return [place for place, text in enumerate(texts) if not text.mark]
    ends = list(accumulate(map(len, raws)))
    return [i for i, (to, raw) in enumerate(zip(ends, raws, strict=True)) if raw and to > begin and to - len(raw) < end]


def _found(reply: bytes, content: bytes, message: Mapping[str, Any]) -> tuple[int, int]:
    """Where the content begins and ends in a reply: after the reasoning, and before tool calls; (-1, -1) if nowhere."""
    reasoning = str(message.get("reasoning_content") or "").encode()
    if reasoning:
        after = max(reply.find(reasoning), 0) + len(reasoning)
        begin = reply.find(content, after) if message.get("tool_calls") else reply.rfind(content, after)
    else:
        begin = reply.find(content)
    return (begin, begin + len(content)) if begin >= 0 else (-1, -1)
