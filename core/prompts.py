"""Prompts of one episode as a tree of token segments: what a prompt shares with an earlier one is stored once."""

from __future__ import annotations

import bisect
import hashlib

from cotune.ids import PackedIds, pack_ids, path_digest, unpack_ids
from cotune.records import Segment

_WIDTH = len(pack_ids((0,)))


class _Path:
    """A known path. That of a reply becomes a segment only when a later prompt goes on from it."""

    __slots__ = ("base", "digest", "id", "packed", "reply")

    def __init__(self, packed: bytes, base: _Path | None, reply: tuple[int, ...] = ()) -> None:
        self.packed = packed
        self.base = base
        self.reply = reply
        self.id = ""
        self.digest: hashlib.blake2b | None = None

    def address(self) -> None:
        """Take `id`, hashing only what this path adds to its base."""
        if self.base is None or self.base.digest is None:
            self.digest = path_digest(self.packed)
        else:
            self.digest = self.base.digest.copy()
            self.digest.update(self.packed[len(self.base.packed) :])
        self.id = self.digest.hexdigest()


class PromptTree:
    """Known token paths by role, longest first. Not thread-safe: the episode's lock guards it."""

    def __init__(self) -> None:
        self._paths: dict[str, list[_Path]] = {}

    def add(self, role: str, prompt_ids: tuple[int, ...], reply_ids: tuple[int, ...]) -> tuple[str, list[Segment]]:
        """Extend the longest known path of `role` that `prompt_ids` starts with; remember the reply that follows.

        Returns the segment id of the whole prompt and the segments that are new. A reply is among them when the
        first prompt extends it: until then its candidate is all that is needed of it.
        """
        known = self._paths.setdefault(role, [])
        packed = pack_ids(prompt_ids)
        segments: list[Segment] = []
        prompt = base = _longest(known, packed)
        if base is not None and not base.id:
            _store(base, base.reply, segments)
        if prompt is None or len(prompt.packed) < len(packed):
            prompt = _Path(packed, base)
            _store(prompt, prompt_ids[len(base.packed) // _WIDTH :] if base else prompt_ids, segments)
            _insert(known, prompt)
        if reply_ids:
            whole = packed + pack_ids(reply_ids)
            if not _holds(known, whole):
                _insert(known, _Path(whole, prompt, reply_ids))
        return prompt.id, segments

    def paths(self, role: str) -> list[tuple[int, ...]]:
        """Token ids of the known paths of `role`, longest first."""
        return [unpack_ids(path.packed) for path in self._paths.get(role, ())]


def _store(path: _Path, added: tuple[int, ...], segments: list[Segment]) -> None:
    path.address()
    start, parent = (len(path.base.packed), path.base.id) if path.base else (0, None)
    segments.append(Segment(path.id, parent, PackedIds.of(added, path.packed[start:])))


def _longest(known: list[_Path], packed: bytes) -> _Path | None:
    for path in known:
        if packed.startswith(path.packed):
            return path
    return None


def _holds(known: list[_Path], packed: bytes) -> bool:
    for path in known:  # noqa: SIM110 - a generator costs more than the comparison
        if path.packed == packed:
            return True
    return False


def _insert(known: list[_Path], path: _Path) -> None:
    bisect.insort_left(known, path, key=_shortness)


def _shortness(path: _Path) -> int:
    return -len(path.packed)
