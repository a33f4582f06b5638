"""Contents of blocks under edits: the marks up to which a provider caches stay where they were, or just before."""

from __future__ import annotations

from typing import Any

import pytest

from cotune.integrations.apps.edited import edited_blocks

MARK = {"type": "ephemeral"}


def blocks(*texts: str) -> list[dict[str, Any]]:
    """Blocks of these texts; one with a * behind it is marked."""
    return [
        {"type": "text", "text": text.rstrip("*"), **({"cache_control": MARK} if text.endswith("*") else {})}
        for text in texts
    ]


@pytest.mark.parametrize(
    ("asked", "new", "sent"),
    [
        (["A", "B*"], "A", ["A*"]),
        (["A", "B*", "today"], "Atoday", ["A*", "today"]),
        (["A*", "B*", "today"], "Atoday", ["A*", "today"]),
        (["A", "B*", "C"], "AX", ["A", "X*"]),
        (["A", "B*"], "AX", ["A", "X*"]),
        (["A*", "today"], "today", ["today"]),
    ],
)
def test_a_mark_of_a_block_that_is_left_out(asked: list[str], new: str, sent: list[str]) -> None:
    given = blocks(*asked)
    assert edited_blocks(given, "system", lambda kind, key, text: new, "") == blocks(*sent)
    assert given == blocks(*asked)
