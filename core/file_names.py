"""Names that applications choose, such as roles, as names of files. They may hold anything, and be of any length."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection

LONGEST = 120
"""Most bytes of a file's name without its extension. File systems take 255, and writers add extensions of their own."""


def file_name(name: str) -> str:
    """A name for a file: the name itself if it is plain and short, else what is plain of it, and a digest.

    Different names give different file names, also where the file system ignores case. A name always gives the same.
    """
    plain = re.sub(r"[^\w.@-]+", "_", name).lstrip(".")
    if name and plain == name == name.lower() and len(name.encode()) <= LONGEST:
        return name
    digest = hashlib.blake2b(name.encode("utf-8", "backslashreplace"), digest_size=5).hexdigest()
    return f"{_cut(plain, LONGEST - len(digest) - 1) or 'name'}-{digest}"


def readable_file_name(name: str, taken: Collection[str], default: str = "role") -> str:
    """A name for a file that reads like the name, and is none of those `taken`, in whatever case: it gets a number."""
    stem = _cut(re.sub(r"[^\w.-]+", "_", name).strip("."), LONGEST) or default
    lower = {other.lower() for other in taken}
    candidate, number = stem, 1
    while candidate.lower() in lower:
        number += 1
        candidate = f"{stem}-{number}"
    return candidate


def _cut(text: str, size: int) -> str:
    """The beginning of a text that has at most `size` bytes in UTF-8."""
    return text.encode("utf-8", "replace")[:size].decode("utf-8", "ignore")
