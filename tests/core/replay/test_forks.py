"""Which calls are forked, by rule, and what that costs."""

from __future__ import annotations

import math
import random
from collections import Counter
from typing import Any

import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.prepare import prepare
from cotune.errors import ConfigError
from cotune.records.structs import CallRecord, Candidate, Fork
from cotune.replay.forks import Budget, ForkRule, budget, choose_forks, fork_rule, mean_entropy, repeatable


def call(step: int, role: str = "a", logprob: float = -0.5, started: float | None = None, **more) -> CallRecord:
    """A call of one second that starts at its step, with an answer of two tokens."""
    said = Candidate(index=0, text="x", message={}, token_ids=(1, 2), logprobs=(logprob, logprob))
    at = float(step) if started is None else started
    made = {"id": f"c{step}", "episode": "e", "turn": 0, "candidates": (said,), "chosen": 0, "latency": 0.5, **more}
    return CallRecord(role=role, step=step, started=at, **made)


SIX = [call(i, "ab"[i % 2], -0.1 * (1 + (i * 7) % 6)) for i in range(6)]
"""Mean entropies 0.1, 0.2, 0.3, 0.4, 0.5, 0.6 of steps 0, 1, 2, 3, 4, 5."""


def steps(rule: str, most: int = 9, seed: int = 0) -> list[int]:
    return [c.step for c in choose_forks(SIX, fork_rule(rule), most, seed)]


def test_rules():
    assert [round(mean_entropy(c), 3) for c in SIX] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert steps("all") == [0, 1, 2, 3, 4, 5]
    assert steps("first:2") == [0, 1] and steps("first:9") == [0, 1, 2, 3, 4, 5]
    assert steps("every:2") == [0, 2, 4] and steps("every:4") == [0, 4]
    assert steps("entropy:2") == [4, 5]
    assert steps("role:b") == [1, 3, 5] and steps("role: b ") == [1, 3, 5] and steps("role:c") == []


def test_at_most_so_many_by_chance_that_the_seed_fixes_or_in_the_rules_own_order():
    assert steps("first:5", 2) == [0, 1]
    assert steps("entropy:5", 2) == [4, 5]
    chosen = {tuple(steps("all", 2, seed)) for seed in range(20)}
    assert steps("all", 2, 3) == steps("all", 2, 3)
    assert len(chosen) > 5 and all(len(pair) == 2 and pair[0] < pair[1] for pair in chosen)


def test_a_call_is_drawn_by_the_inverse_of_the_calls_from_it_on():
    drawn = Counter(step for seed in range(3000) for step in steps("all", 1, seed))
    # weights 1/6, 1/5, 1/4, 1/3, 1/2, 1 of 2.45 in all
    for step, weight in enumerate((0.068, 0.082, 0.102, 0.136, 0.204, 0.408)):
        assert drawn[step] / 3000 == pytest.approx(weight, abs=0.03)
    # of role b, steps 1, 3, 5, by what is left of all calls: 1/5, 1/3, 1 of 1.533
    drawn = Counter(step for seed in range(1000) for step in steps("role:b", 1, seed))
    assert [drawn[step] / 1000 for step in (1, 3, 5)] == pytest.approx([0.130, 0.217, 0.652], abs=0.05)


@pytest.mark.parametrize("text", ["", "some", "first", "first:-1", "every:0", "entropy:x", "role:", "all:2"])
def test_other_rules_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"replay.forks = .*all, first:N, every:N, entropy:N, role:NAME"):
        fork_rule(text)


def test_a_role_may_have_any_name():
    assert fork_rule("role:team/head writer: final") == ForkRule("role", role="team/head writer: final")


def test_budget():
    # forks at steps 1 and 3 of six, 3 branches each: 3 (6 - 1) + 3 (6 - 3) sampled, 3 (1 + 3) from the record
    assert budget(SIX, [SIX[1], SIX[3]], 3) == Budget(branches=6, sampled=24, repeated=12)
    assert budget(SIX, [], 3) == Budget()
    beside = [call(0), call(1, started=0.2), call(2)]  # 1 began while 0 was answered
    assert budget(beside, [beside[0]], 1) == Budget(branches=1, sampled=2, repeated=1)


def test_what_cannot_be_repeated_stops_later_forks():
    failed = [call(0), call(1, status="error", candidates=(), chosen=None), call(2)]
    assert [repeatable(failed, c) for c in failed] == [True, True, False]
    hidden = [call(0, redacted=True), call(1)]
    assert [repeatable(hidden, c) for c in hidden] == [True, False]


def of_trunks(book: Any, rule: ForkRule, tasks: int, k: int = 4, good: float = 0.8, turns: int = 6) -> list[float]:
    """Mean advantage of the trunks' answers at their forks, if they were compared under any rule, and as it is. At each
    turn of an episode the policy gives the common answer with probability `good`, worth 1, or the rare one, worth 0."""
    for task in range(tasks):
        rng, trunk = random.Random(f"answers {task}"), f"t{task}"

        def play(episode: str, said: list[bool], fork: str = "", trunk: str = trunk, rng: Any = rng) -> list[bool]:
            repeated, said = len(said), said + [rng.random() < good for _ in range(turns - len(said))]
            at = Fork(trunk=trunk, call=fork, at=f"{episode}.{repeated}") if fork else None
            book.episode(episode, outcome={"team": float(sum(said))}, fork=at)
            for turn, common in enumerate(said):
                answer = book.candidate(0, logprobs=(math.log(good if common else 1 - good),) * 2)
                more = {"candidates": [answer], "replayed": f"{trunk}.{turn}" if turn < repeated else None}
                book.call(f"{episode}.{turn}", episode, turn=turn, prompt=(1, int(trunk[1:]), *said[:turn]), **more)
            return said

        said = play(trunk, [])
        (fork,) = choose_forks(book.store.calls(trunk), rule, 1, task)
        for branch in range(rule.branches(k)):
            play(f"{trunk}-{branch}", said[: fork.step], fork.id)
    found = []
    for trunks in (True, not rule.by_answer):
        samples = collect(book.store, book.store.episodes(), plan="replay", trunks=trunks).samples
        prepared = prepare(samples, recipe("c3"))
        pairs = zip(prepared.samples, prepared.advantages.tolist(), strict=True)
        found.append(sum(advantage for sample, advantage in pairs if sample.call == sample.branch) / tasks)
    assert len(samples) == k * tasks
    return found


@pytest.mark.parametrize(("rule", "compared"), [("all", 0.0), ("entropy:1", -0.276)])
def test_no_answer_is_compared_with_others_for_being_rare(book: Any, rule: str, compared: float):
    """entropy:1 forks at the first rare answer of an episode. Where there is none, in 0.8 ** 6 = 0.262 of them, it
    forks at the first of six common ones: a trunk has 0.262 (1 + 5 * 0.2) - 0.8 = -0.276 more than its branches."""
    assert of_trunks(book, fork_rule(rule), 400) == pytest.approx([compared, 0.0], abs=0.1)
