"""Keys and values of what was sampled from before, by token ids: the next turn of a conversation, and other roles that
begin with the same text, go on from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

Ids = tuple[int, ...]
States = list[Tensor]
"""Keys and values of all layers in turn, each [heads, tokens, width]."""


class Prefix(NamedTuple):
    """What is known of a prompt: the states of its first `length` tokens, in parts."""

    length: int
    parts: tuple[States, ...]


NOTHING = Prefix(0, ())


class _Node:
    """Tokens after those of `parent`, and their states. The children differ in their first token."""

    def __init__(self, tokens: Ids, states: States, parent: _Node | None) -> None:
        self.tokens = tokens
        self.states = states
        self.parent = parent
        self.children: dict[int, _Node] = {}

    @property
    def bytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self.states)


class PrefixCache:
    """Radix trees of token ids, one for each model and adapter. What was used longest ago goes first.

    `computed` and `reused` count tokens of prompts: those that went through the model, and those that were known.
    """

    def __init__(self, limit: int) -> None:
        """`limit` bytes are kept at most; 0 keeps nothing."""
        self.limit = limit
        self.bytes = 0
        self.computed = 0
        self.reused = 0
        self._roots: dict[Hashable, _Node] = {}
        self._used: OrderedDict[_Node, Hashable] = OrderedDict()
        """From the one used longest ago on; a node comes after its children, so the first one has none."""

    def match(self, key: Hashable, prompt: Ids) -> Prefix:
        """The longest known beginning of a prompt, but not all of it: its last token is to be computed."""
        path, length = self._known(key, prompt)
        parts, rest = [], length
        for node in path:
            taken = min(rest, len(node.tokens))
            parts.append([state[:, :taken] for state in node.states])
            rest -= taken
        return Prefix(length, tuple(parts))

    def length(self, key: Hashable, prompt: Ids) -> int:
        """How much of a prompt `match` would find."""
        return self._known(key, prompt)[1]

    def insert(self, key: Hashable, tokens: Ids, read: Callable[[int, int], States]) -> None:
        """Keep the states of these tokens; `read(start, stop)` copies those of tokens[start:stop]."""
        if not self.limit:
            return
        path, length = self._walk(key, tokens)
        if length < len(tokens):
            parent = path[-1] if path else self._roots.setdefault(key, _Node((), [], None))
            kept = sum(len(node.tokens) for node in path)
            if kept > length:
                parent = path[-1] = self._split(parent, len(parent.tokens) - (kept - length), key)
            node = _Node(tokens[length:], read(length, len(tokens)), parent)
            parent.children[node.tokens[0]] = node
            self._used[node] = key
            self.bytes += node.bytes
            path.append(node)
        self._touch(path)
        while self.bytes > self.limit:  # the least recently used goes first
            node, _ = self._used.popitem(last=False)
            assert node.parent is not None and not node.children
            del node.parent.children[node.tokens[0]]
            self.bytes -= node.bytes

    def drop(self, key: Hashable) -> None:
        """Forget one tree."""
        if self._roots.pop(key, None) is None:
            return
        for node in [node for node, of in self._used.items() if of == key]:
            self.bytes -= node.bytes
            del self._used[node]

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._used.clear()
        self.bytes = 0

    def _known(self, key: Hashable, prompt: Ids) -> tuple[list[_Node], int]:
        path, length = self._walk(key, prompt[:-1])
        self._touch(path)
        return path, length

    def _walk(self, key: Hashable, tokens: Ids) -> tuple[list[_Node], int]:
        """The nodes that hold the longest known beginning, and its length, which may end inside the last one."""
        node, path, length = self._roots.get(key), [], 0
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is not None:
                path.append(node)
                shared = common(node.tokens, tokens[length : length + len(node.tokens)])
                length += shared
                if shared < len(node.tokens):
                    break
        return path, length

    def _split(self, node: _Node, at: int, key: Hashable) -> _Node:
        """Cut a node in two; returns the upper one. Both hold copies, so that one can go alone."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], [state[:, :at].clone() for state in node.states], node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens, node.states = node.tokens[at:], [state[:, at:].clone() for state in node.states]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._used[upper] = key
        return upper

    def _touch(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._used.move_to_end(node)


def common(one: Ids, other: Ids) -> int:
    """How many tokens both begin with."""
    if one == other:
        return len(one)
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
