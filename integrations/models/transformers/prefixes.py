"""Keys and values of earlier prompts and replies, by token ids. The next turn of a conversation continues from them,
and so do other roles whose prompts begin with the same text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

from torch import Tensor

Ids = tuple[int, ...]
States = list[Tensor]
"""The keys and values of each layer, in the order of layers, each [heads, tokens, width]."""


class Prefix(NamedTuple):
    """The known beginning of a prompt: the states of its first `length` tokens, in parts."""

    length: int
    parts: tuple[States, ...]


NOTHING = Prefix(0, ())


class _Node:
    """Tokens that follow the tokens of `parent`, and their states. All children differ in their first token."""

    def __init__(self, tokens: Ids, states: States, parent: _Node | None) -> None:
        self.tokens = tokens
        self.states = states
        self.parent = parent
        self.children: dict[int, _Node] = {}

    @property
    def bytes(self) -> int:
        return sum(state.numel() * state.element_size() for state in self.states)


class PrefixCache:
    """Radix trees of token ids, one for each model and adapter. The least recently used nodes are removed first.

    `computed` counts the tokens of prompts that the model has computed, and `reused` the tokens that were known.
    """

    def __init__(self, limit: int) -> None:
        """`limit` is the most bytes that are stored; with 0, nothing is stored."""
        self.limit = limit
        self.bytes = 0
        self.computed = 0
        self.reused = 0
        self._roots: dict[Hashable, _Node] = {}
        self._used: OrderedDict[_Node, Hashable] = OrderedDict()
        """Nodes, the least recently used first. A node comes after its children, so the first node has no children."""

    def match(self, key: Hashable, prompt: Ids) -> Prefix:
        """Find the longest known beginning of a prompt. It never includes the last token, which must be computed."""
        nodes, length = self._walk_prompt(key, prompt)
        parts = []
        remaining = length
        for node in nodes:
            count = min(remaining, len(node.tokens))  # the last node may be known in part only
            parts.append([state[:, :count] for state in node.states])
            remaining -= count
        return Prefix(length, tuple(parts))

    def length(self, key: Hashable, prompt: Ids) -> int:
        """The number of tokens of a prompt that `match` would find."""
        _, length = self._walk_prompt(key, prompt)
        return length

    def insert(self, key: Hashable, tokens: Ids, read: Callable[[int, int], States]) -> None:
        """Store the states of these tokens in the tree of `key`. `read(start, stop)` copies the states of
        tokens[start:stop].

        The nodes with the known beginning of the tokens stay; a new node gets the rest. Beyond the limit, the least
        recently used nodes are removed.
        """
        if not self.limit:
            return
        path, length = self._walk(key, tokens)
        if length < len(tokens):
            parent = path[-1] if path else self._roots.setdefault(key, _Node((), [], None))
            # The known beginning may end inside the last node. Then split this node, and continue from its upper part.
            n_beyond_beginning = sum(len(node.tokens) for node in path) - length
            if n_beyond_beginning:
                parent = self._split_node(parent, len(parent.tokens) - n_beyond_beginning, key)
                path[-1] = parent
            new_node = _Node(tokens[length:], read(length, len(tokens)), parent)
            parent.children[new_node.tokens[0]] = new_node
            self._used[new_node] = key
            self.bytes += new_node.bytes
            path.append(new_node)
        self._mark_used(path)
        while self.bytes > self.limit:
            oldest, _ = self._used.popitem(last=False)
            assert oldest.parent is not None and not oldest.children
            del oldest.parent.children[oldest.tokens[0]]
            self.bytes -= oldest.bytes

    def drop(self, key: Hashable) -> None:
        """Remove one tree."""
        if self._roots.pop(key, None) is None:
            return
        for node in [node for node, node_key in self._used.items() if node_key == key]:
            self.bytes -= node.bytes
            del self._used[node]

    def clear(self) -> None:
        """Remove all trees."""
        self._roots.clear()
        self._used.clear()
        self.bytes = 0

    def _walk_prompt(self, key: Hashable, prompt: Ids) -> tuple[list[_Node], int]:
        """The same as `_walk`, without the prompt's last token. The nodes count as used."""
        path, length = self._walk(key, prompt[:-1])
        self._mark_used(path)
        return path, length

    def _walk(self, key: Hashable, tokens: Ids) -> tuple[list[_Node], int]:
        """The longest known beginning of the tokens in the tree of `key`: its nodes, from the root on, and its length.

        It may end inside the last node.
        """
        node = self._roots.get(key)
        path = []
        length = 0
        while node is not None and length < len(tokens):
            node = node.children.get(tokens[length])
            if node is not None:
                path.append(node)
                shared = common_length(node.tokens, tokens[length : length + len(node.tokens)])
                length += shared
                if shared < len(node.tokens):
                    break
        return path, length

    def _split_node(self, node: _Node, at: int, key: Hashable) -> _Node:
        """Divide a node after `at` tokens; return the upper one. Both have copies, so that each can be freed alone."""
        assert node.parent is not None
        upper = _Node(node.tokens[:at], [state[:, :at].clone() for state in node.states], node.parent)
        node.parent.children[upper.tokens[0]] = upper
        node.tokens = node.tokens[at:]
        node.states = [state[:, at:].clone() for state in node.states]
        node.parent = upper
        upper.children[node.tokens[0]] = node
        self._used[upper] = key
        return upper

    def _mark_used(self, path: Sequence[_Node]) -> None:
        for node in reversed(path):
            self._used.move_to_end(node)


def common_length(one: Ids, other: Ids) -> int:
    """The number of tokens at the beginning that are equal in both."""
    if one == other:
        return len(one)
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return min(len(one), len(other))
