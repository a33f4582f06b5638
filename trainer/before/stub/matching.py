"""Texts that a regular expression matches."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

_parser: Any = importlib.import_module("re._parser")
_CATEGORIES = {"CATEGORY_DIGIT": "1", "CATEGORY_SPACE": " ", "CATEGORY_NOT_WORD": " "}
_WAYS = 8
"""Most ways of a choice that are taken."""


def matching(pattern: str) -> list[str]:
    """Short texts in which `pattern` is found, one for each way of its first choices; none where it asks for more than
    letters, repeats and choices."""
    try:
        parts = _parser.parse(pattern)
        texts = dict.fromkeys("".join(_text(part, way) for part in parts) for way in range(_WAYS))
        return [text for text in texts if text.strip() and re.search(pattern, text, re.S)]
    except (re.error, ValueError, OverflowError):
        return []


def _text(part: tuple[Any, Any], way: int) -> str:
    kind, given = str(part[0]), part[1]
    match kind:
        case "LITERAL":
            return chr(int(given))
        case "CATEGORY":
            return _CATEGORIES.get(str(given), "a")
        case "RANGE":
            return "1" if given[0] == ord("0") else chr(int(given[0]))
        case "IN":
            return "a" if str(given[0][0]) == "NEGATE" else _text(given[0], way)
        case "BRANCH":
            return _texts(given[1][way % len(given[1])], way)
        case "SUBPATTERN":
            return _texts(given[-1], way)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, inner = given
            once = _texts(inner, way)
            return once * int(least if most == 1 or once.isspace() else min(max(least, 1), 50))
        case "AT":
            return ""
    return "a"


def _texts(parts: Iterable[tuple[Any, Any]], way: int) -> str:
    return "".join(_text(part, way) for part in parts)
