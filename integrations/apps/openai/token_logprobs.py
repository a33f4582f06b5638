"""Translates tokens with their log-probabilities to the form of OpenAI's two interfaces, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cotune.records.structs import Candidate, ShownToken


def token_logprobs(candidate: Candidate) -> list[msgspec.Raw]:
    """The tokens of an answer as the application sees them. Tokens without a text, in older records, show their id.

    Each token is encoded at once: the objects of a long answer would take long to encode and free later, in the event
    loop, while other requests wait.
    """
    encoded: list[msgspec.Raw] = []
    if candidate.shown is None:
        for token_id, logprob in zip(candidate.token_ids, candidate.logprobs, strict=False):
            entry = {"token": f"token_id:{token_id}", "logprob": logprob, "bytes": [], "top_logprobs": []}
            encoded.append(msgspec.Raw(_json(entry)))
        return encoded
    for token in candidate.shown:
        entry = {
            **_openai_token(token),
            "top_logprobs": [_openai_token(alternative) for alternative in token.top_logprobs],
        }
        encoded.append(msgspec.Raw(_json(entry)))
    return encoded


_json = msgspec.json.Encoder().encode


def _openai_token(token: ShownToken) -> dict[str, Any]:
    """A token in OpenAI's form, with its bytes: a token may hold only a part of a character."""
    raw = token.token.encode() if token.bytes is None else token.bytes
    return {"token": token.token, "logprob": token.logprob, "bytes": list(raw)}


def shown_of(items: Sequence[Any], token_ids: Sequence[Any] = ()) -> tuple[ShownToken, ...] | None:
    """The tokens of a provider's answer with their texts and log-probabilities; None if there are none, or if they are
    mistyped.

    An answer with token ids needs no texts, so they are kept only if they come with alternatives (`top_logprobs`).
    """
    if not items:
        return None
    first = items[0]
    has_alternatives = isinstance(first, dict) and bool(first.get("top_logprobs"))
    if token_ids and not has_alternatives:
        return None
    try:
        return msgspec.convert(items, tuple[ShownToken, ...])
    except (msgspec.ValidationError, ValueError, OverflowError):
        return None
