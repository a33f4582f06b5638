"""Token sequences as a tree that branches at their first differences, and the blocks of attention over this tree."""

from __future__ import annotations

from array import array
from bisect import bisect, bisect_left, insort
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

JOINT_BRANCHES = 4
"""Branches of one trunk attend together if all of them together have at most 1 / JOINT_BRANCHES of the tokens of the
path that they share. The keys of this path are then stored once, and about 1 / JOINT_BRANCHES of the scores are
computed without need."""
MOST_PADDING = 1.3
"""Blocks of different sizes attend in one call if it computes at most this many times the scores that are needed ..."""
FREE_SCORES = 4096
"""... or at most this many additional scores per block: a separate call costs about as much."""
PASS_PRICE = 16
"""A further pass is made if it saves at least 1 / PASS_PRICE of a pass's budget in tokens that would be computed
twice."""


class Segment(NamedTuple):
    """A run of tokens of a tree without branches inside: each token is the child of the token before it."""

    start: int
    """The number of the first token."""
    end: int
    """One more than the number of the last token."""
    ancestors: Ints
    """The numbers of the tokens on the path from a root to the segment. The first token is a child of the last of
    them."""
    trunk: int
    """The number of the segment from which this segment branches off; -1 for a root."""


class TokenTree(NamedTuple):
    """The distinct tokens of sequences: equal beginnings are stored once.

    `tokens` and `depths` [T] (int64) have the id and the depth of each token, by its number. `paths` has, for each
    sequence, the numbers of its tokens. `segments` cover all tokens in order, and a branch comes after its trunk.

    `places` [T] is the place of each token in a depth-first walk, and `lasts` [T] is the last place in the subtree
    below it. So token a is an ancestor of token b, or b itself, if places[a] <= places[b] <= lasts[a].
    """

    tokens: Ints
    depths: Ints
    paths: list[Ints]
    segments: list[Segment]
    places: Ints
    lasts: Ints


def sort_sequences(sequences: Sequence[Sequence[int]]) -> tuple[list[int], Ints]:
    """Sort sequences lexicographically, which is the order of a depth-first walk of their tree.

    Returns the numbers of the sequences in this order, and how many first tokens each has in common with the sequence
    before it, [n] (0 for the first).
    """
    return _sort_paths([token_array(sequence) for sequence in sequences])


def token_array(sequence: Sequence[int]) -> npt.NDArray[np.int32]:
    """Return token ids as an array. `array` reads a tuple several times faster than numpy does."""
    return np.frombuffer(array("i", sequence), np.int32)


def _sort_paths(arrays: Sequence[npt.NDArray[np.int32]]) -> tuple[list[int], Ints]:
    """See `sort_sequences`."""
    # Big-endian bytes sort in the order of the ids.
    keys = [tokens.astype(">i4").tobytes() for tokens in arrays]
    order = sorted(range(len(keys)), key=lambda number: keys[number])
    common = [common_length(arrays[first], arrays[second]) for first, second in pairwise(order)]
    return order, np.asarray([0, *common][: len(order)], np.int64)


def common_length(one: npt.NDArray[np.int32], other: npt.NDArray[np.int32]) -> int:
    """Return the number of first tokens that two sequences have in common."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def token_tree(sequences: Sequence[Sequence[int]]) -> TokenTree:
    """Build the tree of sequences, which must not be empty. Shorter sequences branch off longer ones."""
    arrays = [token_array(sequence) for sequence in sequences]
    # `order` has the indices of the sequences in lexicographic order. The rank of a sequence is its position there.
    # `common[rank]` is the number of first tokens that this sequence shares with the one before it in `order`.
    order, common = _sort_paths(arrays)

    # 1. Add one sequence after the other, the longest first: the sequence that a shorter one branches off is then in
    # the tree already.
    paths: list[Ints] = [np.empty(0, np.int64)] * len(order)
    segments: list[Segment] = []
    segment_of_token: list[int] = []
    segment_tokens: list[Ints] = []
    added_ranks: list[int] = []  # sorted
    for rank in sorted(range(len(order)), key=lambda rank: -len(sequences[order[rank]])):
        sequence = order[rank]
        nearest_rank, shared = _nearest_sequence(added_ranks, rank, common)
        ancestors = paths[order[nearest_rank]][:shared]
        new_tokens = arrays[sequence][shared:].astype(np.int64)
        start = len(segment_of_token)
        end = start + len(new_tokens)
        # A sequence that is the beginning of another one, or equal to it, adds no token.
        if len(new_tokens):
            trunk = segment_of_token[ancestors[-1]] if shared else -1
            segment_of_token += [len(segments)] * len(new_tokens)
            segments.append(Segment(start, end, ancestors, trunk))
            segment_tokens.append(new_tokens)
        paths[sequence] = np.concatenate([ancestors, np.arange(start, end)])
        insort(added_ranks, rank)

    # 2. The depth of each token, and its place in the walk.
    depths = []
    for segment in segments:
        depth = len(segment.ancestors)
        depths.append(np.arange(depth, depth + segment.end - segment.start))
    places, lasts = _walk_tree(len(segment_of_token), [paths[number] for number in order], common)
    return TokenTree(np.concatenate(segment_tokens), np.concatenate(depths), paths, segments, places, lasts)


def _walk_tree(tokens: int, paths: Sequence[Ints], common: Ints) -> tuple[Ints, Ints]:
    """Walk a tree of this number of tokens, depth first, and return two numbers of each token, [T] each: its place in
    the walk, and the last place in the subtree below it.

    `paths` has the tokens of each sequence, in the order of the walk. `common` is the number of first tokens that each
    path shares with the path before it.
    """
    places = np.empty(tokens, np.int64)
    lasts = np.empty(tokens, np.int64)
    visited = 0
    for path, shared in zip(paths, common.tolist(), strict=True):
        new = path[shared:]
        places[new] = np.arange(visited, visited + len(new))
        visited += len(new)
        # A later path through the same token overwrites this, so each token keeps the end of the last path through it.
        lasts[path] = visited - 1
    return places, lasts


def _nearest_sequence(added_ranks: Sequence[int], rank: int, common: Ints) -> tuple[int, int]:
    """Find the sequence in the tree that shares most first tokens with the sequence of this rank.

    A rank is the place of a sequence in lexicographic order. `added_ranks` are the ranks of the sequences in the tree,
    sorted. `common` [n] has how many first tokens each sequence shares with the one before it in this order. Returns
    the rank and the number of shared tokens; two zeros if nothing is shared.
    """

    def shared_tokens(earlier: int, later: int) -> int:
        """Return the number of first tokens that the sequences of two ranks share: the least that any two neighbours in
        the order share, from one rank to the other."""
        return int(common[earlier + 1 : later + 1].min())

    # Sequences further away in the order never share more, so the nearest one is the next in the tree, before or after.
    at = bisect(added_ranks, rank)
    candidates = [(0, 0)]  # (shared tokens, rank)
    if at:
        before = added_ranks[at - 1]
        candidates.append((shared_tokens(before, rank), before))
    if at < len(added_ranks):
        after = added_ranks[at]
        candidates.append((shared_tokens(rank, after), after))
    shared, nearest_rank = max(candidates)
    return nearest_rank, shared


class Spans(NamedTuple):
    """The keys that each query sees: a key is seen if first[key] <= place[query] <= last[key].

    `place` [B, q] has the places of the queries in the walk of the tree. `first` and `last` [B, k] have the places of
    the keys and of the ends of their subtrees. All are int32. The mask itself has q x k entries, so it is made from
    these on the learner's device.
    """

    place: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    last: npt.NDArray[np.int32]


def hidden_keys(place: Any, first: Any, last: Any) -> Any:
    """Whether each query does not see each key, [B, q, k]. The arguments are the arrays or tensors of `Spans`."""
    place = place[:, :, None]
    hidden = first[:, None] > place
    hidden |= place > last[:, None]
    return hidden


class Block(NamedTuple):
    """Tokens that attend in one call, as B rows that are padded to the same length.

    `queries` [B, q] and `keys` [B, k] are numbers of tokens, and `real` [B, q] says which queries are not padding.
    `spans` says which keys a query sees. A padded query sees its first key, and no query sees a padded key. Without
    `spans`, each query sees all keys up to its own.
    """

    queries: Ints
    keys: Ints
    real: npt.NDArray[np.bool_]
    spans: Spans | None


def attention_blocks(tree: TokenTree) -> list[Block]:
    """Return the blocks of attention. Each token of the tree is a query in one block, and sees only itself and its
    ancestors.

    A unit is a list of segments that attend together (`_attention_units`), and becomes a row of a block.
    """
    units = _attention_units(tree.segments)
    # Branches come before roots, as only roots need no mask. Within both, the largest come first: neighbours then have
    # similar sizes, and little of a block is padding.
    units.sort(key=lambda unit: (_is_branch(unit), _count_keys(unit), _count_queries(unit)), reverse=True)
    blocks = []
    units_of_block = [units[0]]
    needed = _count_scores(units[0])  # of the present block, without padding
    for unit in units[1:]:
        # A block computes the scores of a rectangle: its rows are padded to the most queries and keys of any row.
        most_queries = max(_count_queries(unit), *(_count_queries(other) for other in units_of_block))
        most_keys = _count_keys(units_of_block[0])
        computed_with_unit = (len(units_of_block) + 1) * most_queries * most_keys
        needed_with_unit = needed + _count_scores(unit)
        # A little padding is cheaper than a call of its own, which costs as much time as FREE_SCORES scores.
        free_scores = FREE_SCORES * len(units_of_block)
        is_cheaper = computed_with_unit <= max(MOST_PADDING * needed_with_unit, needed_with_unit + free_scores)
        is_same_kind = _is_branch(unit) == _is_branch(units_of_block[0])
        if is_same_kind and is_cheaper:
            units_of_block.append(unit)
            needed = needed_with_unit
        else:
            blocks.append(_build_block(units_of_block, tree))
            units_of_block = [unit]
            needed = _count_scores(unit)
    return [*blocks, _build_block(units_of_block, tree)]


def _attention_units(segments: Sequence[Segment]) -> list[list[Segment]]:
    """Divide segments into units that attend together.

    Branches of one trunk may form a unit, with the deepest first: see `JOINT_BRANCHES`. Any other segment is a unit of
    its own.
    """
    units: list[list[Segment]] = []
    for segment in sorted(segments, key=lambda s: (s.trunk, -len(s.ancestors))):
        is_branch_of_same_trunk = units and segment.trunk >= 0 and units[-1][0].trunk == segment.trunk
        if is_branch_of_same_trunk:
            joint_unit = [*units[-1], segment]
            deepest_path = len(joint_unit[0].ancestors)
            shared_path = len(segment.ancestors)
            # The scores of keys that a branch must not see are computed for nothing: the other branches of the unit,
            # and the part of the trunk below the branch's start.
            needless_keys = max(_count_queries(joint_unit), deepest_path - shared_path)
            if JOINT_BRANCHES * needless_keys <= shared_path:
                units[-1] = joint_unit
                continue
        units.append([segment])
    return units


def _is_branch(unit: Sequence[Segment]) -> bool:
    """Whether a unit branches off a trunk. Otherwise it is a root."""
    return len(unit[0].ancestors) > 0


def _count_queries(unit: Sequence[Segment]) -> int:
    return sum(segment.end - segment.start for segment in unit)


def _count_keys(unit: Sequence[Segment]) -> int:
    # The first segment is the deepest, so its ancestors are the ancestors of all.
    return len(unit[0].ancestors) + _count_queries(unit)


def _count_scores(unit: Sequence[Segment]) -> int:
    """Count the products of a query and a key."""
    return _count_queries(unit) * _count_keys(unit)


def _build_block(units: Sequence[Sequence[Segment]], tree: TokenTree) -> Block:
    """Build one block of attention from `units`, lists of segments that attend together. Each unit becomes a row, and
    rows are padded to the longest."""
    rows = len(units)
    most_queries = max(map(_count_queries, units))
    most_keys = max(map(_count_keys, units))
    queries = np.zeros((rows, most_queries), np.int64)
    keys = np.zeros((rows, most_keys), np.int64)
    real = np.zeros(queries.shape, np.bool_)
    # If a unit is a branch, `Spans` says which keys a query sees, by the walk through the tree. Roots see all keys up
    # to their own, so a block of roots needs no spans.
    has_branch = any(map(_is_branch, units))
    query_places = np.zeros(queries.shape, np.int32)
    # A padded key must not be seen: it begins after every query of the tree and ends before it begins.
    key_places = np.full(keys.shape, len(tree.tokens), np.int32)
    key_lasts = np.zeros(keys.shape, np.int32)
    for row, unit in enumerate(units):
        unit_queries = np.concatenate([np.arange(segment.start, segment.end) for segment in unit])
        unit_keys = np.concatenate([unit[0].ancestors, unit_queries])
        queries[row, : len(unit_queries)] = unit_queries
        real[row, : len(unit_queries)] = True
        keys[row, : len(unit_keys)] = unit_keys
        if not has_branch:
            continue
        # Padded queries stand at the row's first key, which they then see: a query without any key would give NaN.
        query_places[row] = tree.places[unit_keys[0]]
        query_places[row, : len(unit_queries)] = tree.places[unit_queries]
        key_places[row, : len(unit_keys)] = tree.places[unit_keys]
        key_lasts[row, : len(unit_keys)] = tree.lasts[unit_keys]
    spans = Spans(place=query_places, first=key_places, last=key_lasts) if has_branch else None
    return Block(queries, keys, real, spans)


def cuts_within(lengths: Ints, common: Ints, budget: int) -> list[int]:
    """Cut sequences into parts of at most `budget` tokens. Tokens that the sequences of a part share count once.

    The cuts are chosen so that few tokens are computed twice and there are few parts. A sequence over the budget is a
    part of its own. The sequences are sorted (`sort_sequences`). `lengths` [n] are their numbers of tokens, and
    `common` [n] are the numbers of first tokens that each has in common with the one before it. Returns the index of
    the first sequence of each part, and, at the end, the number of sequences.
    """
    # Dynamic programming: `best[end]` is the least cost of cutting the first `end` sequences, and `start_of[end]` is
    # the start of their last part. Each part costs `price`, plus the tokens that it computes a second time, because its
    # first sequence has them in common with the last sequence of the part before.
    price = max(1, budget // PASS_PRICE)
    ends, starts = _distinct_token_sums(lengths, common)
    best = np.zeros(len(lengths) + 1, np.int64)
    start_of = [0]
    for end in range(1, len(lengths) + 1):
        # The longest part that ends here and fits begins at `first`: the sequences from start to end have
        # ends[end] - starts[start] tokens. A part has one sequence at least.
        first = min(int(np.searchsorted(starts, ends[end] - budget)), end - 1)
        costs = best[first:end] + common[first:end] + price
        start_of.append(first + int(costs.argmin()))
        best[end] = costs.min()

    # Follow the starts back from the last sequence.
    cuts = [len(lengths)]
    while cuts[-1]:
        cuts.append(start_of[cuts[-1]])
    return cuts[::-1]


def distinct_tokens(lengths: Ints, common: Ints, cuts: Sequence[int]) -> int:
    """Count the tokens that the parts between `cuts` compute. Tokens that the sequences of a part share count once.
    The arguments are as in `cuts_within`."""
    ends, starts = _distinct_token_sums(lengths, common)
    return int(sum(ends[end] - starts[start] for start, end in pairwise(cuts)))


def even_cuts(lengths: Ints, common: Ints, parts: int) -> list[int]:
    """Cut the sequences, in their order, into `parts` parts so that the largest part is as small as possible.

    The size of a part is its number of tokens, with shared tokens counted once. With few sequences, parts may be empty.
    The sequences are sorted: `lengths` and `common` are as in `cuts_within`. Returns the index of the first sequence of
    each part, and, at the end, the number of sequences.
    """
    ends, starts = _distinct_token_sums(lengths, common)

    def cuts_with_largest(most: int) -> list[int]:
        """Cut so that no part has more than `most` tokens. Each part takes as many sequences as fit. If `most` is too
        small, the parts do not reach the last sequence, and the last cut is below the number of sequences."""
        cuts = [0]
        for _ in range(parts):
            start = cuts[-1]
            if start == len(lengths):
                cuts.append(start)  # no sequence is left, so this part is empty
                continue
            # Take the last end with ends[end] - starts[start] <= most, the number of tokens of the part.
            cuts.append(int(np.searchsorted(ends, starts[start] + most, "right")) - 1)
        return cuts

    def reaches_end(most: int) -> bool:
        return cuts_with_largest(most)[-1] == len(lengths)

    # The larger the parts may be, the further they reach. Find the smallest size of parts that reach the end.
    all_tokens = int(ends[-1])
    smallest = bisect_left(range(all_tokens + 1), True, key=reaches_end)
    return cuts_with_largest(smallest)


def _distinct_token_sums(lengths: Ints, common: Ints) -> tuple[Ints, Ints]:
    """Return two arrays, `ends` [n + 1] and `starts` [n], that count the distinct tokens of sorted sequences.

    The sequences from `start` to before `end` have ends[end] - starts[start] distinct tokens. Both arrays ascend. The
    arguments are as in `cuts_within`.
    """
    # Each sequence adds the tokens that it does not share with the one before it. The first sequence of a range adds
    # all its tokens, as the sequence before it is not in the range.
    new_tokens = lengths - common
    ends = np.concatenate([[0], new_tokens.cumsum()])
    starts = ends[:-1] - common
    return ends, starts
