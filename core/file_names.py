"""File names for names that applications choose, such as roles. Those may hold any characters and have any length."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

LONGEST = 120
"""Maximum bytes of a file's name without its extension. File systems allow 255, and writers add extensions."""


def file_name(name: str) -> str:
    """A name for a file: the name itself if it is plain and short, otherwise its plain characters and a digest.

    Different names give different file names, even if the file system ignores case. The same name always gives the same
    file name.
    """
    safe_part = re.sub(r"[^\w.@-]+", "_", name).lstrip(".")
    if name and safe_part == name == name.lower() and len(name.encode()) <= LONGEST:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "backslashreplace"), digest_size=5).hexdigest()
    return f"{_truncate_bytes(safe_part, LONGEST - len(digest) - 1) or 'name'}-{digest}"


def readable_file_name(name: str, taken: Collection[str], default: str = "role") -> str:
    """A file name that looks like the name. It gets a number if the name is already in `taken`; case is ignored."""
    stem = _truncate_bytes(re.sub(r"[^\w.-]+", "_", name).strip("."), LONGEST) or default
    lower = {other.lower() for other in taken}
    candidate = stem
    number = 1
    while candidate.lower() in lower:
        number += 1
        candidate = f"{stem}-{number}"
    return candidate


def _truncate_bytes(text: str, size: int) -> str:
    """The start of a text, at most `size` bytes in UTF-8."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
