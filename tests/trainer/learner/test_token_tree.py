"""Sequences as a tree of distinct tokens: its shape, who attends to whom, and where it is cut."""

from __future__ import annotations

import tracemalloc
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cotune.trainer.learner.token_tree import (
    attention_blocks,
    cuts_within,
    even_cuts,
    hidden_keys,
    sort_sequences,
    token_tree,
)

SEQUENCES = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=14)
LONG = st.builds(
    lambda trunk, branches: [trunk, *(trunk[: at % len(trunk) + 1] + rest for at, rest in branches)],
    st.lists(st.integers(0, 9), min_size=20, max_size=60),
    st.lists(st.tuples(st.integers(0, 60), st.lists(st.integers(0, 9), min_size=1, max_size=4)), max_size=8),
)


def prefixes(sequences):
    return {tuple(sequence[:end]) for sequence in sequences for end in range(1, len(sequence) + 1)}


def test_two_turns_of_two_candidates():
    first, second = [7, 8, 1], [7, 8, 2]
    later = [*first, 9, 3]
    tree = token_tree([first, second, later])
    assert tree.tokens.tolist() == [7, 8, 1, 9, 3, 2]
    assert tree.depths.tolist() == [0, 1, 2, 3, 4, 2]
    assert [path.tolist() for path in tree.paths] == [[0, 1, 2], [0, 1, 5], [0, 1, 2, 3, 4]]
    assert [(s.start, s.end, s.ancestors.tolist(), s.trunk) for s in tree.segments] == [
        (0, 5, [], -1),
        (5, 6, [0, 1], 0),
    ]
    trunk, branch = attention_blocks(tree)[::-1]
    if len(trunk.queries[0]) < len(branch.queries[0]):
        trunk, branch = branch, trunk
    assert trunk.spans is None and trunk.queries.tolist() == trunk.keys.tolist() == [[0, 1, 2, 3, 4]]
    assert branch.queries.tolist() == [[5]] and branch.keys.tolist() == [[0, 1, 5]]
    assert hidden_keys(*branch.spans).tolist() == [[[False, False, False]]]


@given(st.one_of(SEQUENCES, LONG))
def test_each_distinct_beginning_is_one_token(sequences):
    tree = token_tree(sequences)
    assert len(tree.tokens) == len(prefixes(sequences))
    for sequence, path in zip(sequences, tree.paths, strict=True):
        assert tree.tokens[path].tolist() == sequence
        assert tree.depths[path].tolist() == list(range(len(sequence)))
    assert sum(segment.end - segment.start for segment in tree.segments) == len(tree.tokens)


@given(st.one_of(SEQUENCES, LONG))
def test_each_token_is_a_query_once_and_sees_its_ancestors_and_itself(sequences):
    tree = token_tree(sequences)
    expected = {}
    for path in tree.paths:
        for at, token in enumerate(path.tolist()):
            expected[token] = set(path[: at + 1].tolist())
    found = {}
    for block in attention_blocks(tree):
        if block.spans is not None:
            allowed = ~hidden_keys(*block.spans)
        else:
            assert block.queries.shape == block.keys.shape
            allowed = np.broadcast_to(
                np.tri(block.keys.shape[1], dtype=bool), (len(block.keys), *block.keys.shape[1:] * 2)
            )
        assert allowed.any(-1).all()  # a query that sees nothing would be not a number
        for number, query in np.argwhere(block.real).tolist():
            token = int(block.queries[number, query])
            assert token not in found
            found[token] = set(block.keys[number][allowed[number, query]].tolist())
    assert found == expected


@given(SEQUENCES)
def test_what_is_below_a_token_follows_it_in_the_walk(sequences):
    tree = token_tree(sequences)
    place, last = tree.places, tree.lasts
    assert sorted(place.tolist()) == list(range(len(tree.tokens)))
    for path in tree.paths:
        for at, token in enumerate(path):
            sees = (place <= place[token]) & (place[token] <= last)
            assert np.flatnonzero(sees).tolist() == sorted(path[: at + 1].tolist())


def test_branches_of_a_long_trunk_attend_together():
    trunk = list(range(1, 65))
    branches = [[*trunk[:at], 99, number] for number, at in enumerate((60, 60, 58))]
    tree = token_tree([trunk, *branches])
    assert [(s.end - s.start, len(s.ancestors), s.trunk) for s in tree.segments] == [
        *[(64, 0, -1), (2, 60, 0), (1, 61, 1), (2, 58, 0)]
    ]
    paired, causal = attention_blocks(tree)
    if paired.spans is None:
        paired, causal = causal, paired
    assert causal.spans is None and causal.queries.shape == (1, 64)
    assert paired.queries.shape == (2, 4) and paired.keys.shape == (2, 64)  # two of 58 and 60, and one of 61
    assert paired.real.sum(1).tolist() == [4, 1]


def sizes(sequences, order, cuts):
    return [len(prefixes([sequences[at] for at in order[start:end]])) for start, end in pairwise(cuts)]


@given(st.one_of(SEQUENCES, LONG), st.integers(1, 80))
def test_cuts_keep_to_the_budget(sequences, budget):
    order, common = sort_sequences(sequences)
    lengths = np.array([len(sequences[at]) for at in order])
    cuts = cuts_within(lengths, common, budget)
    assert cuts[0] == 0 and cuts[-1] == len(sequences) and cuts == sorted(set(cuts))
    for (start, end), size in zip(pairwise(cuts), sizes(sequences, order, cuts), strict=True):
        assert size <= budget or end == start + 1


def test_a_cut_goes_where_least_is_computed_twice():
    one = [[1] * 20 + [number] * 4 for number in range(2, 5)]
    other = [[9] * 20 + [number] * 4 for number in range(2, 5)]
    common = sort_sequences([*one, *other])[1]
    lengths = np.full(6, 24)
    assert cuts_within(lengths, common, 58) == [0, 3, 6]  # four rows would fit in by budget alone: 32 + 24
    assert even_cuts(lengths, common, 2) == [0, 3, 6]
    assert cuts_within(lengths, common, 64) == [0, 6]


def test_the_rows_of_a_large_step_are_cut_in_little_memory():
    lengths, common = np.full(20_000, 100), np.where(np.arange(20_000) % 8, 60, 0)
    tracemalloc.start()
    cuts = even_cuts(lengths, common, 3)
    within = cuts_within(lengths, common, 16_384)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
    assert max(end - start for start, end in pairwise(cuts)) <= 6672
    assert len(within) < 70


@given(SEQUENCES, st.integers(1, 5))
def test_even_cuts_make_the_largest_part_as_small_as_can_be(sequences, parts):
    order, common = sort_sequences(sequences)
    cuts = even_cuts(np.array([len(sequences[at]) for at in order]), common, parts)
    assert len(cuts) == parts + 1 and cuts[0] == 0 and cuts[-1] == len(sequences) and cuts == sorted(cuts)
    largest = max(sizes(sequences, order, cuts))
    assert largest >= len(prefixes(sequences)) / parts
    if parts == 2:
        every = [[0, at, len(sequences)] for at in range(len(sequences) + 1)]
        assert largest == min(max(sizes(sequences, order, one)) for one in every)


def test_a_single_long_row_needs_no_mask():
    """A mask of queries x keys would take 16,384^2 bytes = 268 MB."""
    tracemalloc.start()
    (block,) = attention_blocks(token_tree([range(16_384)]))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert block.spans is None and peak < 8e6
