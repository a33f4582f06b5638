"""Routing by itself: known prefixes first, never at the price of an idle engine; and what an answer must look like."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.integrations.cluster.router.queue import BLOCK_TOKENS, SLACK, choose_engine, prefix_blocks
from cotune.integrations.cluster.router.validate import validate_completions
from cotune.sampling.protocol import Completion


class Option(NamedTuple):
    name: str
    load: int
    idle_since: int


options = st.lists(st.builds(Option, st.uuids().map(str), st.integers(0, 1000), st.integers(0, 99)), min_size=1)


@given(options, st.integers(1, 100), st.lists(st.integers(0, 9)))
def test_the_chosen_engine_knows_the_longest_prefix_of_those_near_the_least_loaded(
    engines: list[Option], cost: int, knowing: list[int]
) -> None:
    homes = {block: engines[number % len(engines)] for block, number in enumerate(knowing)}
    chosen = choose_engine(engines, homes, range(len(knowing) + 1), cost)
    least = min(engine.load for engine in engines)
    near = [block for block, engine in homes.items() if engine.load <= least + SLACK * cost]
    if near:
        assert chosen == homes[near[-1]]
    else:
        assert chosen.load == least


def test_a_tie_goes_to_the_one_that_has_waited_longest() -> None:
    assert choose_engine([Option("a", 0, 5), Option("b", 0, 3), Option("c", 1, 0)], {}, [], 10).name == "b"


@given(st.lists(st.integers(0, 3), max_size=160), st.lists(st.integers(0, 3), max_size=160))
def test_blocks_are_equal_exactly_as_far_as_the_prompts_are(left: list[int], right: list[int]) -> None:
    left, right = left + left, left + right
    a, b = prefix_blocks(left), prefix_blocks(right)
    assert len(a) == len(left) // BLOCK_TOKENS
    common = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    for depth in range(min(len(a), len(b))):
        assert (a[depth] == b[depth]) == ((depth + 1) * BLOCK_TOKENS <= common)


def test_the_same_prompt_of_another_policy_is_another_prefix() -> None:
    prompt = list(range(32))
    assert not set(prefix_blocks(prompt, "a@1")) & set(prefix_blocks(prompt, "a@2"))


class Place:
    """Engines by name with their loads, and the engine that saw each block last."""

    def __init__(self, count: int) -> None:
        self.loads = dict.fromkeys(map(str, range(count)), 0)
        self.given = dict.fromkeys(self.loads, 0)
        self.homes: dict[int, str] = {}

    def give(self, turn: int, prompt: Sequence[int], cost: int) -> str:
        blocks = prefix_blocks(prompt)
        engines = {name: Option(name, load, self.given[name]) for name, load in self.loads.items()}
        homes = {block: engines[name] for block, name in self.homes.items()}
        chosen = choose_engine(list(engines.values()), homes, blocks, cost).name
        self.given[chosen] = turn
        self.homes |= dict.fromkeys(blocks, chosen)
        return chosen


@pytest.mark.parametrize("count", [2, 5])
def test_no_engine_starves_whatever_is_shared(count: int) -> None:
    """All prompts share a prefix: it still spreads, and the load never differs by more than the slack allows."""
    chance, place = random.Random(count), Place(count)
    running: list[tuple[str, int]] = []
    for turn in range(200):
        cost = chance.randint(1, 50)
        chosen = place.give(turn, [1] * 64 + [chance.randrange(9)] * 16, cost)
        assert place.loads[chosen] <= min(place.loads.values()) + SLACK * cost
        place.loads[chosen] += cost
        running.append((chosen, cost))
        if chance.random() < 0.3:
            ended, cost = running.pop(chance.randrange(len(running)))
            place.loads[ended] -= cost
    assert all(place.loads.values())


def test_conversations_stay_where_they_began() -> None:
    """Turns of several conversations, one at a time for each: every one meets the engine of its first turn."""
    chance, place, began = random.Random(0), Place(3), {}
    talks = {i: [i] * 20 for i in range(12)}
    for turn in range(1, 200):
        talk = chance.randrange(12)
        engine = place.give(turn, talks[talk], 100)
        assert began.setdefault(talk, engine) == engine
        talks[talk] += [chance.randrange(100) for _ in range(10)]
    assert len(set(began.values())) == 3


GOOD = Completion((5, 6, 2), (-0.1, -2.0, 0.0), "stop")


def test_an_answer_is_an_answer() -> None:
    assert validate_completions([GOOD, Completion((1,), (1e-6,), "length")], 2, 3, vocabulary=7) is None


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ([], "0 candidates instead of 1"),
        ([GOOD, GOOD], "2 candidates instead of 1"),
        ([Completion((), (), "stop")], "no tokens"),
        ([Completion((1, 2), (-1.0,), "stop")], "2 tokens and 1 log-probabilities"),
        ([Completion((1,) * 5, (-1.0,) * 5, "length")], "5 tokens; at most 4"),
        ([Completion((1, 2), (-1.0, math.nan), "stop")], "not finite"),
        ([Completion((1, 2), (-1.0, -math.inf), "stop")], "not finite"),
        ([Completion((1, 2), (-1.0, 0.01), "stop")], "above 0"),
        ([Completion((1, 7), (-1.0, -1.0), "stop")], "token id 7, outside the vocabulary of 7"),
        ([Completion((-1, 2), (-1.0, -1.0), "stop")], "token id -1"),
        ([Completion((1,), (-1.0,), "error")], "finish reason 'error'"),
        (None, "another form"),
        ([Completion(None, None, "stop")], "no tokens"),
        ([Completion(("a",), (-1.0,), "stop")], "another form"),
    ],
)
def test_garbage_is_named(answer: list[Completion], wrong: str) -> None:
    assert wrong in validate_completions(answer, 1, 4, vocabulary=7)
