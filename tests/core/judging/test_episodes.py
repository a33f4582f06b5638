"""Judges of episodes: what the survivors of a task are worth beside the episodes that failed."""

from __future__ import annotations

import asyncio

import pytest

from cotune.algorithms.collect import collect
from cotune.algorithms.recipes import OUTCOME
from cotune.judging.episodes import Ranking, judge_episodes
from tests.core.algorithms.small_methods import attribute


class Shortest(Ranking):
    """Prefers the episode whose id comes first; none for a single one, as `cotune.Judge`."""

    name = "rank"

    async def __call__(self, episodes, task):
        others = len(episodes) - 1
        return [None] if not others else [{"rank": 1.0 - i / others} for i, _ in enumerate(episodes)]


@pytest.mark.parametrize(
    ("states", "ranks"),
    [
        # A survivor beats the 3 that failed, of 3 others.
        ("o---", [1.0, 0.0, 0.0, 0.0]),
        # The better of two beats 1 + 2 of 3 others, the worse 0 + 2 of 3.
        ("oo--", [1.0, 2 / 3, 0.0, 0.0]),
        ("oooo", [1.0, 1 - 1 / 3, 1 - 2 / 3, 0.0]),
        # What the infrastructure failed is nobody's sibling.
        ("oo-x", [1.0, 0.5, 0.0, None]),
        ("oxxx", [None] * 4),
        ("----", [0.0] * 4),
    ],
)
def test_failures_rank_last_below_every_survivor(book, states, ranks):
    kinds = {"o": {}, "-": {"status": "error", "blame": "policy"}, "x": {"status": "error", "blame": "infrastructure"}}
    for i, state in enumerate(states):
        book.episode(f"e{i}", **kinds[state])
        book.call(f"c{i}", f"e{i}")
    episodes = list(book.store.episodes())
    assert asyncio.run(judge_episodes(Shortest(), book.store, episodes)) == {}
    samples = collect(book.store, episodes, plan="independent").samples
    found = attribute(samples, OUTCOME).tolist()
    rewards = dict(zip((s.rollout for s in samples), found, strict=True))
    assert [rewards.get(f"e{i}") for i in range(4)] == ranks


def test_the_numbers_of_a_function_are_its_own(book):
    for name, fields in (("e1", {}), ("e2", {"status": "error"})):
        book.episode(name, **fields)
        book.call(f"c{name}", name)
    asyncio.run(judge_episodes(lambda episodes, task: [0.25] * len(episodes), book.store, book.store.episodes()))
    assert book.store.rewards(["e1", "e2"]) == {"e1": {"team": 0.25}}
