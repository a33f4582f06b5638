"""Prompts of one episode as a tree of token segments: what a prompt shares with an earlier one is stored once."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from cotune.ids import pack_ids, path_digest
from cotune.records import Segment

_WIDTH = len(pack_ids((0,)))


class _Path(NamedTuple):
    packed: bytes
    id: str
    digest: hashlib.blake2b


class PromptTree:
    """Known token paths by role, longest first. Not thread-safe: the episode's lock guards it."""

    def __init__(self) -> None:
        self._paths: dict[str, list[_Path]] = {}

    def add(self, role: str, prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...]) -> tuple[str, list[Segment]]:
        """Extend the longest known path of `role` that `prompt_ids` starts with, then add the reply that follows.

        Returns the segment id of the whole prompt and the segments that are new.
        """
        known = self._paths.setdefault(role, [])
        packed = pack_ids(prompt_ids)
        prompt = next((path for path in known if packed.startswith(path.packed)), None)
        segments: list[Segment] = []
        if prompt is None or len(prompt.packed) < len(packed):
            base = prompt
            prompt = _extend(base, packed)
            added = prompt_ids[len(base.packed) // _WIDTH :] if base else prompt_ids
            segments.append(Segment(prompt.id, base.id if base else None, added))
            _insert(known, prompt)
        if reply_ids:
            whole = packed + pack_ids(reply_ids)
            if not any(path.packed == whole for path in known):
                tip = _extend(prompt, whole)
                segments.append(Segment(tip.id, prompt.id, reply_ids))
                _insert(known, tip)
        return prompt.id, segments


def _extend(base: _Path | None, packed: bytes) -> _Path:
    """The path `packed`, hashing only what it adds to `base`."""
    if base is None:
        digest = path_digest(packed)
    else:
        digest = base.digest.copy()
        digest.update(packed[len(base.packed) :])
    return _Path(packed, digest.hexdigest(), digest)


def _insert(known: list[_Path], path: _Path) -> None:
    at = next((i for i, other in enumerate(known) if len(other.packed) <= len(path.packed)), len(known))
    known.insert(at, path)
