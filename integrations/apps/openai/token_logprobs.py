"""Tokens with their log-probabilities in OpenAI's form, of both interfaces, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from cotune.records.structs import Candidate, ShownToken


def token_logprobs(candidate: Candidate) -> list[msgspec.Raw]:
    """The tokens that an application sees, each as JSON: objects of a long answer would hold up the other requests.

    Where an older record has no texts, ids stand in their place.
    """
    if candidate.shown is None:
        pairs = zip(candidate.token_ids, candidate.logprobs, strict=False)
        told = ({"token": f"token_id:{t}", "logprob": p, "bytes": [], "top_logprobs": []} for t, p in pairs)
    else:
        told = ({**_token(token), "top_logprobs": [_token(t) for t in token.top_logprobs]} for token in candidate.shown)
    return [msgspec.Raw(_json(token)) for token in told]


_json = msgspec.json.Encoder().encode


def _token(token: ShownToken) -> dict[str, Any]:
    raw = token.token.encode() if token.bytes is None else token.bytes
    return {"token": token.token, "logprob": token.logprob, "bytes": list(raw)}


def shown_of(items: Sequence[Any], token_ids: Sequence[Any] = ()) -> tuple[ShownToken, ...] | None:
    """What a provider told of tokens; None where that is nothing, or mistyped.

    Beside `token_ids` texts say nothing new, so they are kept only with `top_logprobs`.
    """
    if not items or (token_ids and not (isinstance(items[0], dict) and items[0].get("top_logprobs"))):
        return None
    try:
        return msgspec.convert(items, tuple[ShownToken, ...])
    except (msgspec.ValidationError, ValueError, OverflowError):
        return None
