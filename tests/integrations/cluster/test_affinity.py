"""Routing by itself: known prefixes first, never at the price of an idle engine; and what an answer must look like."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.integrations.cluster.router.queue import PrefixMap, choose, prefix_blocks
from cotune.integrations.cluster.router.validate import validate_completions
from cotune.sampling.protocol import Completion


class Option(NamedTuple):
    name: str
    load: int
    matched: int
    idle_since: int


def chosen_of(engines: list[Option], cost: int, slack: float) -> Option:
    return choose(engines, {engine.name: engine.matched for engine in engines}, cost, slack)


options = st.lists(
    st.builds(Option, st.uuids().map(str), st.integers(0, 1000), st.integers(0, 9), st.integers(0, 99)), min_size=1
)


@given(options, st.integers(1, 100), st.floats(0, 10))
def test_the_chosen_engine_is_near_the_least_loaded_and_knows_most_of_those(
    engines: list[Option], cost: int, slack: float
) -> None:
    chosen = chosen_of(engines, cost, slack)
    bound = min(e.load for e in engines) + slack * cost
    assert chosen.load <= bound
    near = [e for e in engines if e.load <= bound]
    assert chosen.matched == max(e.matched for e in near)
    assert chosen.load == min(e.load for e in near if e.matched == chosen.matched)


def test_a_tie_goes_to_the_one_that_has_waited_longest() -> None:
    assert chosen_of([Option("a", 0, 0, 5), Option("b", 0, 0, 3), Option("c", 1, 0, 0)], 10, 1.0).name == "b"


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_blocks_are_equal_exactly_as_far_as_the_prompts_are(left: list[int], right: list[int], size: int) -> None:
    a, b = prefix_blocks(left, size), prefix_blocks(right, size)
    assert len(a) == len(left) // size
    common = next((i for i, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    for depth in range(min(len(a), len(b))):
        assert (a[depth] == b[depth]) == ((depth + 1) * size <= common)


def test_the_same_prompt_of_another_policy_is_another_prefix() -> None:
    prompt = list(range(32))
    assert not set(prefix_blocks(prompt, 16, "a@1")) & set(prefix_blocks(prompt, 16, "a@2"))


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=20), st.sampled_from("abc"))), st.integers(1, 30))
def test_the_map_is_bounded_and_matches_what_it_was_told_last(told: list[tuple[list[int], str]], capacity: int) -> None:
    prefixes = PrefixMap(capacity)
    for prompt, engine in told:
        blocks = prefix_blocks(prompt, 2)
        prefixes.add(blocks, engine)
        assert len(prefixes) <= capacity
        matched = prefixes.matched(blocks, "abc")
        assert matched[engine] == min(len(blocks), capacity)
        assert all(0 <= count <= len(blocks) for count in matched.values())
    for engine in "abc":
        prefixes.forget(engine)
    assert len(prefixes) == 0


def test_old_prefixes_go_first_and_their_ends_before_their_beginnings() -> None:
    prefixes = PrefixMap(4)
    old, new = prefix_blocks(range(6), 2), prefix_blocks(range(50, 54), 2)
    prefixes.add(old, "a")
    prefixes.add(new, "b")
    assert prefixes.matched(old, "ab") == {"a": 2, "b": 0}
    assert prefixes.matched(new, "ab") == {"a": 0, "b": 2}


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("slack", [0.0, 1.0, 6.0])
def test_no_engine_starves_whatever_is_shared(count: int, slack: float) -> None:
    """All prompts share a prefix: it still spreads, and the load never differs by more than the slack allows."""
    chance = random.Random(count)
    prefixes, loads = PrefixMap(1000), dict.fromkeys(map(str, range(count)), 0)
    running: list[tuple[str, int]] = []
    for turn in range(200):
        blocks = prefix_blocks([1] * 64 + [chance.randrange(9)] * 8, 8)
        matched = prefixes.matched(blocks, loads)
        cost = chance.randint(1, 50)
        chosen = chosen_of([Option(n, load, matched[n], turn) for n, load in loads.items()], cost, slack).name
        assert loads[chosen] <= min(loads.values()) + slack * cost
        prefixes.add(blocks, chosen)
        loads[chosen] += cost
        running.append((chosen, cost))
        if chance.random() < 0.3:
            ended, cost = running.pop(chance.randrange(len(running)))
            loads[ended] -= cost
    assert all(loads.values())


def test_conversations_stay_where_they_began() -> None:
    """Turns of several conversations, one at a time for each: every one meets the engine of its first turn."""
    prefixes, homes = PrefixMap(10_000), {}
    chance = random.Random(0)
    talks = {i: [i] * 20 for i in range(12)}
    given_at = {"a": 0, "b": 0, "c": 0}
    for turn in range(1, 200):
        talk = chance.randrange(12)
        blocks = prefix_blocks(talks[talk], 16)
        matched = prefixes.matched(blocks, given_at)
        engine = chosen_of([Option(n, 0, matched[n], given_at[n]) for n in given_at], 100, 4.0).name
        given_at[engine] = turn
        assert homes.setdefault(talk, engine) == engine
        prefixes.add(blocks, engine)
        talks[talk] += [chance.randrange(100) for _ in range(10)]
    assert len(set(homes.values())) == 3


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
