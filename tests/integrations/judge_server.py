"""What a judge is asked, read from its request, and answers by a rule."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

from tests.integrations.provider import completion, json_reply

Reply = tuple[int, str, list[Any]]


def entries(body: dict[str, Any]) -> dict[str, str]:
    """What stands under each letter, in the order shown."""
    text = body["messages"][1]["content"]
    return dict(re.findall(r"<<\w{8} ([A-Z]+)>>\n(.*?)\n<<\w{8} end of \1>>", text, re.DOTALL))


def ranking(tiers: list[list[str]], **usage: Any) -> Reply:
    return says(json.dumps({"reason": "so", "ranking": tiers}), **usage)


def says(text: str, **extra: Any) -> Reply:
    return json_reply(completion({"role": "assistant", "content": text}, **extra))


def by(key: Callable[[str], float]) -> Callable[[dict[str, Any], int], Reply]:
    """A judge that ranks by a number of each entry, highest first, equal ones together."""

    def reply(body: dict[str, Any], number: int) -> Reply:
        shown = entries(body)
        marks = sorted({key(text) for text in shown.values()}, reverse=True)
        return ranking([[label for label, text in shown.items() if key(text) == mark] for mark in marks])

    return reply
