"""The inputs of a pass that the host computes from its rows: the tree of their tokens and its attention blocks.

The host prepares the next pass while the GPU computes the current one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.batching import lengths_of, pass_tokens, tokens_of
from cotune.trainer.learner.token_tree import Block, TokenTree, attention_blocks, token_tree

Item = TypeVar("Item")
Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class PassInputs:
    """The rows of a pass, and arrays in the host's memory for their N response tokens, rows in order."""

    rows: Sequence[TrainRow]
    targets: npt.NDArray[np.int64]
    """[N] the ids of the response tokens."""
    temperatures: npt.NDArray[np.float32]
    """[N] the temperatures at which they were sampled."""
    tree: TokenTree | None = None
    """The tree of the rows' tokens. Without it, the rows are padded."""
    blocks: Sequence[Block] = ()
    """The tree's blocks of attention. Empty for FlexAttention, which needs none."""
    places: npt.NDArray[np.int64] | None = None
    """[N] the number, in the tree, of the token whose state predicts each response token."""

    @property
    def computed(self) -> int:
        """The number of tokens that go through the network."""
        return pass_tokens(self.rows, shared=False) if self.tree is None else len(self.tree.tokens)


def prepare_pass(rows: Sequence[TrainRow], *, shared: bool, flex: bool) -> PassInputs:
    """Prepare the inputs of a pass over rows.

    With `shared`, common beginnings of rows are computed once, in a tree. `flex` says whether the network attends by
    FlexAttention.
    """
    targets = np.concatenate([np.asarray(row.response_ids, np.int64) for row in rows])
    temperatures = np.repeat([np.float32(row.temperature) for row in rows], lengths_of(rows))
    if not shared:
        return PassInputs(rows, targets, temperatures)
    tree = token_tree([tokens_of(row) for row in rows])
    blocks: list[Block] = [] if flex else attention_blocks(tree)
    # A state predicts the next token: the states of a response begin at the last token of its prompt.
    places = [path[len(row.prompt_ids) - 1 :] for path, row in zip(tree.paths, rows, strict=True)]
    return PassInputs(rows, targets, temperatures, tree, blocks, np.concatenate(places))


def prepared_ahead(prepare: Callable[[Item], Prepared], items: Sequence[Item]) -> Iterator[Prepared]:
    """Prepare all items, in order. A thread prepares the next one while the caller uses the current one."""
    if not items:
        return
    with ThreadPoolExecutor(1, "prepare-pass") as pool:
        pending: Any = pool.submit(prepare, items[0])
        for item in items[1:]:
            prepared = pending.result()
            pending = pool.submit(prepare, item)
            yield prepared
        yield pending.result()
