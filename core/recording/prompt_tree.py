"""Prompts of one episode as a tree of token segments: what a prompt shares with an earlier one is stored once."""

from __future__ import annotations

import hashlib

from cotune.ids import pack_ids, path_digest, unpack_ids
from cotune.recording.records import Segment


class _Path:
    """A known path in packed form. That of a reply is made, and becomes a segment, when a later prompt goes on from it;
    until then it is among the `replies` of its prompt."""

    __slots__ = ("base", "digest", "id", "packed", "replies")

    def __init__(self, packed: bytes, base: _Path | None) -> None:
        self.packed = packed
        self.base = base
        self.replies: list[tuple[int, ...]] = []
        self.id = ""
        self.digest: hashlib.blake2b | None = None

    def with_replies(self) -> list[bytes]:
        return [self.packed + pack_ids(reply) for reply in self.replies]

    def segment(self) -> Segment:
        """Take `id`, hashing only what this path adds to its base."""
        if self.base is None or self.base.digest is None:
            parent, added, self.digest = None, self.packed, path_digest(self.packed)
        else:
            parent, added, self.digest = self.base.id, self.packed[len(self.base.packed) :], self.base.digest.copy()
            self.digest.update(added)
        self.id = self.digest.hexdigest()
        return Segment(self.id, parent, added)


class PromptTree:
    """Known token paths by role. Not thread-safe: the episode's lock guards it."""

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
            segments.append(base.segment())
        if prompt is None or len(prompt.packed) < len(packed):
            prompt = _Path(packed, base)
            segments.append(prompt.segment())
            known.append(prompt)
        if reply_ids and reply_ids not in prompt.replies:
            prompt.replies.append(reply_ids)
        return prompt.id, segments

    def paths(self, role: str) -> list[tuple[int, ...]]:
        """Token ids of the known paths of `role`, longest first."""
        known = self._paths.get(role, ())
        found = {packed for path in known for packed in (path.packed, *path.with_replies())}
        return [unpack_ids(packed) for packed in sorted(found, key=len, reverse=True)]


def _longest(known: list[_Path], packed: bytes) -> _Path | None:
    longest, most = None, 0
    for path in known:  # replies join it while it is read
        if packed.startswith(path.packed):
            length = len(path.packed)
            if length > most:
                longest, most = path, length
            if path.replies and length < len(packed):
                known.extend([_Path(reply, path) for reply in path.with_replies()])
                path.replies.clear()
    return longest
