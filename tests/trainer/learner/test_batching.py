"""Rows into optimizer steps, steps into passes."""

import msgspec
import torch
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.batching import (
    PassPlan,
    conversation_numbers,
    micro_batches,
    mini_batches,
    pass_tokens,
    tokens_of,
)


def rows_of(shapes):
    """Rows from (prompt number, prompt length, response length)."""
    return [
        TrainRow(
            id=str(i),
            role="r",
            prompt_ids=(p,) * length,
            response_ids=(1,) * tokens,
            logprobs=(0.0,) * tokens,
            advantage=1.0,
        )
        for i, (p, length, tokens) in enumerate(shapes)
    ]


def split(rows, size, seed=0):
    return mini_batches(rows, size, torch.Generator().manual_seed(seed))


@given(
    st.lists(st.tuples(st.integers(0, 6), st.just(3), st.integers(1, 9)), min_size=1, max_size=60), st.integers(1, 20)
)
def test_every_row_is_in_exactly_one_step_of_at_most_its_size(shapes, size):
    batches = split(rows_of(shapes), size)
    assert sorted(i for batch in batches for i in batch) == list(range(len(shapes)))
    assert all(0 < len(batch) <= size for batch in batches)
    assert len(batches) == -(-len(shapes) // size)


def test_steps_are_nearly_equal_instead_of_leaving_a_rest_of_one():
    assert sorted(map(len, split(rows_of([(i, 2, 2) for i in range(65)]), 64))) == [32, 33]


def test_rows_of_a_prompt_stay_in_one_step():
    rows = rows_of([(i // 8, 2, 2) for i in range(64)])
    for batch in split(rows, 16):
        assert len({rows[i].prompt_ids for i in batch}) == 2


def test_the_seed_fixes_the_order():
    rows = rows_of([(i, 2, 2) for i in range(40)])
    assert split(rows, 8, seed=1) == split(rows, 8, seed=1) != split(rows, 8, seed=2)


def test_turns_of_a_conversation_stay_in_one_step():
    """Four conversations of four turns of two candidates; another role's prompt only begins with the same token."""
    rows = [
        row(f"{talk}.{turn}.{index}", (9, talk) + (5, 6) * turn, (5, index))
        for talk in range(4)
        for turn in range(4)
        for index in range(2)
    ]
    rows += [row(f"other.{index}", (9, 30 + index), (1, 2)) for index in range(8)]
    assert conversation_numbers(rows) == [number for number in range(4) for _ in range(8)] + list(range(4, 12))
    for batch in split(rows, 8):
        assert len({conversation_numbers(rows)[i] for i in batch if i < 32}) <= 1
    for batch in split(rows, 4):  # a conversation is too long for a step: its prompts stay whole
        assert all(any(rows[j].prompt_ids == rows[i].prompt_ids for j in batch if j != i) for i in batch if i < 32)


def row(name, prompt, response):
    return TrainRow(
        id=name, role="r", prompt_ids=prompt, response_ids=response, logprobs=(0.0,) * len(response), advantage=1.0
    )


def test_what_rows_have_in_common_counts_once():
    rows = [row(f"{prompt}.{i}", (prompt,) * 100, (10 + i, *[1] * 9)) for prompt in (0, 1) for i in range(4)]
    assert pass_tokens(rows, shared=True) == 2 * (100 + 4 * 9)  # the last token of a response predicts nothing
    assert pass_tokens(rows, shared=False) == 8 * 109
    assert micro_batches(rows, range(8), 136, shared=True) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert micro_batches(rows, range(8), 218, shared=False) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_rows_of_like_length_go_together_and_a_long_one_alone():
    rows = rows_of([(0, 5, 46), (1, 5, 6), (2, 5, 196), (3, 5, 6), (4, 5, 46)])
    assert micro_batches(rows, range(5), 100, shared=False) == [[1, 3], [0, 4], [2]]


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=40),
    st.integers(1, 60),
    st.booleans(),
)
def test_passes_hold_every_row_once_and_keep_to_the_budget(shapes, budget, shared):
    rows = rows_of(shapes)
    batches = micro_batches(rows, range(len(rows)), budget, shared)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        chosen = [rows[i] for i in batch]
        if shared:
            beginnings = {tokens_of(one)[:end] for one in chosen for end in range(1, len(tokens_of(one)) + 1)}
            assert pass_tokens(chosen, shared) == len(beginnings)
        assert pass_tokens(chosen, shared) <= budget or len(batch) == 1
    computed = PassPlan(rows, range(len(rows)), shared).computed(budget)
    assert computed == sum(pass_tokens([rows[i] for i in batch], shared) for batch in batches)


def test_rows_of_one_prompt_are_those_that_see_the_same_images():
    """Prompts of the same ids, each of a picture of its own, and a later turn of the second conversation."""
    rows = [
        msgspec.structs.replace(row, images=(bytes([number // 4]),))
        for number, row in enumerate(rows_of([(7, 5, 3)] * 32))
    ]
    later = msgspec.structs.replace(rows[4], prompt_ids=(7,) * 5 + (1, 2), images=(bytes([1]), b"another"))
    assert conversation_numbers([*rows, later]) == [number // 4 for number in range(32)] + [1]
    for batch in split(rows, 8):
        assert len(batch) == 8 and len({rows[i].images for i in batch}) == 2
