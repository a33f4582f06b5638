"""Which engine a request goes to: where its prefix was seen, as long as no other engine is much less loaded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from cotune.integrations.ray.router.replica import Engine

BLOCK_TOKENS = 16
"""Prefixes are compared in blocks of this many tokens."""
REMEMBERED_BLOCKS = 1 << 16
SLACK = 4.0
"""How many requests like the one to place an engine may be ahead of the least loaded one, for a known prefix."""


def choose(engines: Sequence[Engine], matched: Mapping[str, int], cost: int, slack: float = SLACK) -> Engine:
    """The engine for a request that adds `cost` to its load; `matched` is how many leading blocks of it each has seen.

    Only engines that are at most `slack` times the cost above the least loaded one count, so that a prefix that
    everybody shares does not starve the others. Of these: the longest known prefix, then the lowest load, then the one
    that has waited longest.
    """
    least = min(engine.load for engine in engines)
    near = [engine for engine in engines if engine.load <= least + slack * cost]
    return min(near, key=lambda engine: (-matched[engine.name], engine.load, engine.idle_since))


def prefix_blocks(prompt: Sequence[int], size: int, seed: str = "") -> tuple[int, ...]:
    """A hash for each full block of `size` tokens, each over everything before it: equal prefixes, equal hashes."""
    value = hash(seed)
    blocks = []
    for end in range(size, len(prompt) + 1, size):
        value = hash((value, *prompt[end - size : end]))
        blocks.append(value)
    return tuple(blocks)


class PrefixMap:
    """Which engines have seen which blocks; the `capacity` blocks used last are kept."""

    def __init__(self, capacity: int = REMEMBERED_BLOCKS) -> None:
        self.capacity = capacity
        self._seen: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matched(self, blocks: Sequence[int], engines: Iterable[str]) -> Mapping[str, int]:
        """For each engine, how many leading blocks it has seen."""
        going = set(engines)
        found = dict.fromkeys(going, 0)
        for depth, block in enumerate(blocks, start=1):
            going &= self._seen.get(block, set())
            if not going:
                break
            for engine in going:
                found[engine] = depth
        return found

    def add(self, blocks: Sequence[int], engine: str) -> None:
        """`engine` has now seen these blocks. The first blocks of a prompt outlive its last ones."""
        for block in reversed(blocks):
            self._seen.setdefault(block, set()).add(engine)
            self._seen.move_to_end(block)
        while len(self._seen) > self.capacity:
            self._seen.popitem(last=False)

    def forget(self, engine: str) -> None:
        """The engine has lost its cache."""
        for block in [block for block, engines in self._seen.items() if engine in engines]:
            self._seen[block].discard(engine)
            if not self._seen[block]:
                del self._seen[block]
