"""JSON values changed at random, from a seed: mistyped, missing, doubled, huge and odd fields; bytes cut or flipped."""

from __future__ import annotations

import copy
import json
import random
from typing import Any


def odd_values() -> list[Any]:
    """Values that stand where none of their kind belongs."""
    nest: Any = 0
    for _ in range(60):
        nest = [nest]
    return [
        None, True, False, 0, 5, -1, 12.5, 1e308, float("nan"), float("-inf"), 2**53, 2**70, 10**25, 5_000_000,
        "", "x", "\ud800", "\x00\x1b[31m", "é" * 40, [], {}, [1], ["x"], [None], [[]], {"a": 1}, {"": None}, nest,
        {"index": 5_000_000}, [{"index": 5_000_000, "function": {"name": "f"}}],
    ]  # fmt: skip


ODD = odd_values()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to all that is inside a value."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, item in inside for found in ((*path, key), *places(item, (*path, key)))]


def mutated(rng: random.Random, value: Any) -> Any:
    """A copy of a JSON object with one to three of its fields changed."""
    made = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2, 3))):
        found = places(made)
        if not found:
            break
        *before, last = rng.choice(found)
        parent = made
        for key in before:
            parent = parent[key]
        way = rng.random()
        if way < 0.75:
            parent[last] = copy.deepcopy(rng.choice(ODD))
        elif way < 0.85:
            del parent[last]
        elif isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        else:
            parent[rng.choice(("extra", "", "error", "malformed", "index", "id"))] = copy.deepcopy(rng.choice(ODD))
    return made


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Bytes cut short, flipped, or with others between them."""
    if not raw:
        return raw
    at = rng.randrange(len(raw))
    way = rng.randrange(4)
    if way == 0:
        return raw[:at]
    if way == 1:
        return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]
    if way == 2:
        return raw[:at] + rng.randbytes(3) + raw[at:]
    return raw[:at] + raw[min(len(raw), at + rng.randrange(1, 20)) :]


def as_json(value: Any) -> bytes:
    """As a careless provider writes it: NaN and lone surrogates pass."""
    return json.dumps(value).encode()
