"""Sizes of memory as they stand in a configuration."""

from __future__ import annotations

import re

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_size(text: str) -> int:
    """The bytes of a text such as `6GiB` or `800 MB`. Raises ValueError for any other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", text, re.IGNORECASE)
    if not match:
        raise ValueError(text)
    return int(float(match[1]) * _UNITS[match[2].upper()])
