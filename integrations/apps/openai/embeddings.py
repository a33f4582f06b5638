"""Fixed answers to requests for embeddings, for runs that contact no provider."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.recording.recorder import LiveEpisode

DIMENSIONS = 1536
"""Length of a vector if the request names none; OpenAI's smaller models have the same."""


def count_embeddings(episode: LiveEpisode, address: str) -> None:
    """Count a request for embeddings by the `host:port` that it is meant for."""
    counts: Counter[str] = episode.notes.setdefault("embeddings", Counter())
    counts[address] += 1


def fixed_embeddings(raw: bytes) -> bytes:
    """The answer to a request: the same vector of length 1 for every input.

    Raises ValueError for a body that is not a JSON object.
    """
    body: Any = msgspec.json.decode(raw)
    if not isinstance(body, Mapping):
        raise ValueError("the body is not a JSON object")
    inputs = body.get("input")
    # A list of token ids is one input. A list of texts, or of lists of token ids, is several.
    n_inputs = 1
    if isinstance(inputs, list) and not (inputs and isinstance(inputs[0], int)):
        n_inputs = len(inputs)
    length = int(body.get("dimensions") or DIMENSIONS)
    vector = [length**-0.5] * length
    data = []
    for index in range(n_inputs):
        data.append({"object": "embedding", "index": index, "embedding": vector})
    usage = {"prompt_tokens": 0, "total_tokens": 0}
    return msgspec.json.encode({"object": "list", "data": data, "model": body.get("model") or "", "usage": usage})
