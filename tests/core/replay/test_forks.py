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
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord, Candidate, Fork
from cotune.replay.forks import (
    Budget,
    ForkRule,
    Place,
    budget,
    can_repeat_before,
    choose_forks,
    fork_rule,
    mean_entropy,
    none_decides,
    parallel_blocks,
)


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
    with pytest.raises(ConfigError, match=r"replay.forks = .*all, decisive, first:N, every:N, entropy:N, role:NAME"):
        fork_rule(text)


def test_the_places_that_decided_most_are_forked():
    calls = [call(i, "ab"[i % 2], turn=i // 2) for i in range(6)]
    rule = fork_rule("decisive")

    def chosen(most: int, effects: dict[Place, float]) -> list[int]:
        return [c.step for c in choose_forks(calls, rule, most, 0, effects)]

    known = {("a", 0): 0.0, ("b", 0): 0.3, ("a", 1): 0.1, ("b", 1): 0.2, ("a", 2): 0.0}
    # The last place is not known yet, so it is tried.
    assert chosen(3, known) == [1, 3, 5]
    assert chosen(9, {**known, ("b", 2): 0.0}) == [1, 2, 3]
    # At first no place is known; later perhaps none has an effect.
    assert chosen(2, {}) == [0, 1]
    without_effect = dict.fromkeys([*known, ("b", 2)], 0.0)
    assert len(chosen(4, without_effect)) == 4
    assert none_decides(calls, without_effect) and not none_decides(calls, known) and not none_decides(calls, {})


def test_a_role_may_have_any_name():
    assert fork_rule("role:team/head writer: final") == ForkRule("role", role="team/head writer: final")


def test_budget():
    # forks at steps 1 and 3 of six, 3 branches each: 3 (6 - 1) + 3 (6 - 3) sampled, 3 (1 + 3) from the record
    assert budget(SIX, [SIX[1], SIX[3]], Plan(kind="replay", k=3), {}) == Budget(branches=6, sampled=24, repeated=12)
    assert budget(SIX, [], Plan(kind="replay", k=3), {}) == Budget()
    beside = [call(0), call(1, started=0.2), call(2)]  # 1 began while 0 was answered
    assert budget(beside, [beside[0]], Plan(kind="replay", k=2), {}) == Budget(branches=2, sampled=4, repeated=2)
    own = {SIX[3].role: Plan(kind="replay", k=2)}
    assert budget(SIX, [SIX[3]], Plan(kind="replay", k=5), own).branches == 2


def test_calls_that_overlap_are_one_block():
    # 0 and 1 overlap, 2 overlaps with 1 alone, 3 begins when 2 has ended. Each takes half a second.
    calls = [call(0), call(1, started=0.4), call(2, started=0.8), call(3, started=1.3)]
    assert [[c.step for c in block] for block in parallel_blocks(calls)] == [[0, 1, 2], [3]]
    assert [len(block) for block in parallel_blocks(SIX)] == [1] * 6


def test_what_cannot_be_repeated_stops_later_forks():
    failed = [call(0), call(1, status="error", candidates=(), chosen=None), call(2)]
    assert [can_repeat_before(failed, c) for c in failed] == [True, True, False]
    hidden = [call(0, redacted=True), call(1)]
    assert [can_repeat_before(hidden, c) for c in hidden] == [True, False]


SHORT_IS_RIGHT = 0.5
"""How often the policy gives the right answer at the first call. It ends the episode early; the wrong one does not."""


def record_forks_at_first_call(book: Any, rule: ForkRule, short: int, long: int, tasks: int, k: int = 4) -> int:
    """Record `tasks` episodes, each with K branches if its first call is forked; return how many are forked there."""

    def answer(right: bool) -> list[Candidate]:
        return [book.candidate(0, token_ids=(1 if right else 2, 3), logprobs=(math.log(0.5), math.log(0.5)))]

    forked = 0
    for task in range(tasks):
        rng, trunk = random.Random(f"answers {task}"), f"t{task}"
        right = rng.random() < SHORT_IS_RIGHT
        book.episode(trunk, outcome={"team": float(right)})
        for turn in range(short if right else long):
            book.call(f"{trunk}.{turn}", trunk, turn=turn, prompt=(1, task, turn), candidates=answer(right))
        forks = choose_forks(book.store.calls(trunk), rule, 4, task)
        if not any(fork.step == 0 for fork in forks):
            continue
        forked += 1
        for number in range(k):
            branch, right = f"{trunk}-{number}", rng.random() < SHORT_IS_RIGHT
            at = Fork(trunk=trunk, call=f"{trunk}.0", at=f"{branch}.0")
            book.episode(branch, outcome={"team": float(right)}, fork=at)
            book.call(f"{branch}.0", branch, prompt=(1, task, 0), candidates=answer(right))
    return forked


@pytest.mark.parametrize(("short", "long"), [(3, 20), (5, 20), (5, 40)])
@pytest.mark.parametrize("rule", ["all", "every:2", "role:a", "first:1", "entropy:4"])
def test_the_length_of_an_episode_changes_no_advantage(book: Any, rule: str, short: int, long: int):
    """With rewards 1 and 0 and a policy that draws both answers with 1/2, the gradient of the right answer's logit at
    the first call is p (1 - p) = 1/4, whatever comes after the call and however many calls the rule may fork."""
    forked = record_forks_at_first_call(book, fork_rule(rule), short, long, tasks=1000)
    prepared = prepare(collect(book.store, book.store.episodes(), plan="replay").samples, recipe("c3"))
    right_answers, gradients = [], []
    for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
        right = sample.outcome["team"]
        right_answers.append(right)
        gradients.append(advantage * (right - SHORT_IS_RIGHT))
    compared = 4 * forked - sum(prepared.left_out.values())  # groups of equal rewards have no gradient
    assert forked > 50 and compared == len(prepared.samples)
    error = 3.5 * 0.5 / math.sqrt(4 * forked)
    assert sum(gradients) / (4 * forked) == pytest.approx(0.25, abs=error)
    assert sum(prepared.advantages) / (4 * forked) == pytest.approx(0.0, abs=1e-9)


def test_only_answers_of_branches_are_compared(book: Any):
    forked = record_forks_at_first_call(book, fork_rule("all"), 3, 20, tasks=50)
    collected = collect(book.store, book.store.episodes(), plan="replay")
    assert len(collected.samples) == 4 * forked > 0
    assert all("-" in sample.rollout for sample in collected.samples)
    assert Counter(sample.branch for sample in collected.samples) == {sample.branch: 4 for sample in collected.samples}
    trunk_calls = sum(len(book.store.calls(e.id)) for e in book.store.episodes() if e.fork is None)
    assert collected.left_out == {"trunk": trunk_calls}
