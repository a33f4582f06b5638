"""Collecting: which candidates become samples, and the count and reason of every other one."""

from __future__ import annotations

import math
import time

import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect, temperature
from cotune.algorithms.filters import REASONS
from cotune.algorithms.method import Method
from cotune.algorithms.prepare import prepare
from cotune.algorithms.recipes import OUTCOME, Attribution
from cotune.records.ids import segment_id
from cotune.records.structs import Fork, PolicyRef, RewardRecord
from cotune.storage.outcomes import failure_reward
from tests.core.algorithms.small_methods import attribute


def left_out(book, **options):
    collected = collect(book.store, list(book.store.episodes()), **options)
    assert set(collected.left_out) <= set(REASONS)
    return len(collected.samples), dict(collected.left_out)


def test_a_tree_gives_every_candidate_with_its_own_reward(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e", role="b", turn=2, step=5, rewards=[{"team": 0.5, "local": -1.0}, 1.0], chosen=1)
    samples = collect(book.store, book.store.episodes(), plan="tree").samples
    assert [s.id for s in samples] == ["c.0", "c.1"]
    first, second = samples
    assert first.rewards == {"team": 0.5, "local": -1.0}
    assert first.outcome == {"team": 1.0}
    assert (first.chosen, second.chosen) == (False, True)
    assert (first.task, first.rollout, first.branch, first.role, first.turn, first.step) == ("q", "e", "e", "b", 2, 5)
    assert (first.prompt, first.policy, first.tokens) == (segment_id((1, 2)), PolicyRef("b", 3), 2)
    assert (first.call, first.training_step) == ("c", 7)


def test_independent_rollouts_give_the_chosen_candidate_and_branch_by_prompt(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e", rewards=[None, None], chosen=1)
    collected = collect(book.store, book.store.episodes(), plan="independent")
    assert [(s.id, s.branch) for s in collected.samples] == [("c.1", segment_id((1, 2)))]
    assert collected.left_out == {"not_chosen": 1}


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("failed_call", {"status": "error"}),
        ("timed_out_call", {"status": "timeout"}),
        ("cancelled_call", {"status": "cancelled"}),
        ("malformed_call", {"status": "malformed"}),
        ("redacted", {"unknown_prompt": True, "redacted": True}),
        ("failed_call", {"candidates": []}),
        ("no_policy", {"policy": None}),
        ("no_token_ids", {"unknown_prompt": True}),
        ("stale_version", {"policy": PolicyRef("a", 2)}),
        ("stale_version", {"policy": PolicyRef("a", 4)}),
        ("greedy", {"sampling": {"temperature": 0.0}}),
        ("untrained_role", {"role": "judge"}),
    ],
)
def test_calls_left_out(book, reason, fields):
    book.episode("e")
    book.call("c", "e", rewards=[1.0], **fields)
    assert left_out(book, versions={"a": 3}, roles={"a"}) == (0, {reason: 1})


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("empty_response", {"token_ids": (), "logprobs": (), "text": ""}),
        ("no_token_ids", {"token_ids": (), "logprobs": ()}),
        ("no_logprobs", {"logprobs": ()}),
        ("broken_logprobs", {"logprobs": (-1.0,)}),
        ("broken_logprobs", {"logprobs": (-1.0, math.nan)}),
        ("broken_logprobs", {"logprobs": (-1.0, -math.inf)}),
        ("interrupted", {"finish_reason": "content_filter"}),
    ],
)
def test_candidates_left_out(book, reason, fields):
    book.episode("e")
    book.call("c", "e", rewards=[1.0, 0.0], candidates=[book.candidate(0, **fields), book.candidate(1)])
    assert left_out(book) == (1, {reason: 1})


def test_samples_know_their_limit_whether_they_were_cut_and_whether_a_call_timed_out(book):
    for episode, status in (("e", "ok"), ("f", "timeout")):
        book.episode(episode, outcome={"team": 1.0})
        cut = book.candidate(0, finish_reason="length")
        book.call(f"{episode}c", episode, rewards=[1.0], candidates=[cut], sampling={"max_tokens": 7})
        book.call(f"{episode}d", episode, turn=1, status=status, rewards=[1.0])
    samples = collect(book.store, book.store.episodes(), plan="independent").samples
    assert {s.id: (s.limit, s.truncated, s.timed_out) for s in samples} == {
        "ec.0": (7, True, False),
        "ed.0": (None, False, False),
        "fc.0": (7, True, True),
    }
    other = collect(book.store, book.store.episodes(), plan="independent", roles=["b"])
    assert not any(s.timed_out for s in other.samples)


def test_rewards_left_out(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e", rewards=[1.0, None, math.nan, {"team": math.inf}])
    book.call("d", "e", turn=1, rewards=[None, None], error="scorer raised")
    assert left_out(book) == (1, {"missing_reward": 1, "non_finite_reward": 2, "scorer_failed": 2})


def test_the_outcome_will_do_for_independent_rollouts_but_not_for_a_tree(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e")
    assert left_out(book, plan="independent") == (1, {})
    assert left_out(book, plan="tree") == (0, {"missing_reward": 1})


def test_candidates_of_a_failed_episode_are_counted_one_by_one(book):
    book.episode("e", status="error", error="boom")
    book.call("c", "e", rewards=[1.0, 0.0, 0.5])
    book.call("d", "e", turn=1, candidates=[], status="error")
    assert left_out(book, on_failure="exclude") == (0, {"failed_episode": 4})
    assert left_out(book) == (3, {"failed_call": 1})


def test_lag_allows_older_versions(book):
    book.episode("e")
    book.call("c", "e", rewards=[1.0], policy=PolicyRef("a", 2))
    assert left_out(book, versions={"a": 3}, max_lag=1) == (1, {})
    assert left_out(book, versions={"other": 9}) == (1, {})


def test_a_late_reward_is_read_and_the_last_write_wins(book):
    book.episode("e")
    book.call("c", "e", rewards=[None])
    assert left_out(book) == (0, {"missing_reward": 1})
    book.store.write([RewardRecord("c.0", "local", 1.0), RewardRecord("c.0", "local", 2.0)])
    assert collect(book.store, book.store.episodes()).samples[0].rewards == {"local": 2.0}


def test_temperature_is_what_was_used_before_what_was_asked(book):
    book.episode("e")
    assert temperature(book.call("c", "e")) == 1.0
    assert temperature(book.call("c", "e", params={"temperature": 0.0}, sampling={"temperature": 0.7})) == 0.7
    assert temperature(book.call("c", "e", params={"temperature": 0.3}, sampling={"top_p": 1.0})) == 0.3


def test_five_hundred_calls_of_eight_take_little(book):
    for i in range(500):
        book.episode(f"e{i}")
        candidates = [book.candidate(k, token_ids=(1,) * 32, logprobs=(-1.0,) * 32) for k in range(8)]
        book.call(f"c{i}", f"e{i}", candidates=candidates, rewards=[float(k) for k in range(8)])
    episodes = list(book.store.episodes())
    best = min(_seconds(lambda: collect(book.store, episodes)) for _ in range(5))
    assert len(collect(book.store, episodes).samples) == 4000
    assert best < 0.1


def _seconds(work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


@pytest.mark.parametrize(("plan", "rewards"), [("tree", [1.0, 0.0]), ("independent", [])])
def test_a_failed_episode_may_have_a_reward_but_its_failed_calls_never(book, plan, rewards):
    book.episode("good", outcome={"team": 1.0})
    book.call("a", "good", rewards=rewards)
    book.episode("bad", status="error")
    book.call("b", "bad", rewards=rewards)
    book.call("c", "bad", turn=1, status="timeout", rewards=rewards)
    book.episode("stopped", status="cancelled")
    book.call("d", "stopped", rewards=rewards)
    collected = collect(book.store, book.store.episodes(), plan=plan, on_failure=-1.0)
    each = max(1, len(rewards))
    assert [(s.call, s.outcome, s.failure) for s in collected.samples if s.id.endswith(".0")] == [
        ("b", {}, -1.0),
        ("a", {"team": 1.0}, None),
    ]
    assert collected.left_out == {"timed_out_call": each, "failed_episode": each}
    excluded = collect(book.store, book.store.episodes(), plan=plan, on_failure="exclude")
    assert {s.call for s in excluded.samples} == {"a"}
    assert excluded.left_out == {"failed_episode": 3 * each}


def rewards_of(book, attribution, on_failure="lowest"):
    samples = collect(book.store, book.store.episodes(), plan="independent", on_failure=on_failure).samples
    return dict(zip((s.rollout for s in samples), attribute(samples, attribution).tolist(), strict=True))


@pytest.mark.parametrize(("on_failure", "failed"), [("lowest", -1.5), (-4.0, -4.0), (0.25, 0.25)])
def test_a_failed_episode_is_never_better_than_the_lowest_mixed_reward(book, on_failure, failed):
    """right - minutes / 2: 1 - 4/2 = -1, 0 - 3/2 = -1.5, 1 - 1/2 = 0.5; the lowest of each component is 0, and would
    mix to 0, which is better than two of three answers."""
    for name, right, minutes in (("e1", 1.0, 4.0), ("e2", 0.0, 3.0), ("e3", 1.0, 1.0)):
        book.episode(name, outcome={"right": right, "minutes": minutes})
    book.episode("e4", status="error", blame="policy")
    book.episode("e5", status="error", blame="infrastructure")
    for name in ("e1", "e2", "e3", "e4", "e5"):
        book.call(f"c{name}", name)
    weighed = Attribution(own=False, outcome=True, weights={"minutes": -0.5})
    assert rewards_of(book, weighed, on_failure) == {"e1": -1.0, "e2": -1.5, "e3": 0.5, "e4": failed}


def test_the_lowest_mixed_reward_is_one_of_the_step_and_of_the_role_after_gates_and_alpha(book):
    """a: 2 * 3 * gate 1 = 6 and 2 * -1 * gate 0.5 = -1; b, which weighs team by -1: -6 and 1."""
    book.episode("e1", task="p", outcome={"team": 3.0, "format": 1.0})
    book.episode("e2", task="q", outcome={"team": -1.0, "format": 0.5})
    book.episode("e3", task="q", status="error")
    for name in ("e1", "e2", "e3"):
        book.call(f"a{name}", name)
        book.call(f"b{name}", name, role="b", turn=1)
    how = Attribution(own=False, outcome=True, team_weight=2.0, gates=("format",), weights={"b/team": -1.0})
    samples = collect(book.store, book.store.episodes(), plan="independent").samples
    values = dict(zip((s.call for s in samples), attribute(samples, how).tolist(), strict=True))
    assert values == {"ae1": 6.0, "be1": -6.0, "ae2": -1.0, "be2": 1.0, "ae3": -1.0, "be3": -6.0}


def test_by_default_failures_count_zero_where_no_episode_is_worse_or_has_an_outcome(book):
    book.episode("e1", outcome={"right": 0.5})
    book.episode("e2", status="error")
    book.episode("e3", status="error", outcome={"right": 0.25})
    for name in ("e1", "e2", "e3"):
        book.call(f"c{name}", name)
    assert rewards_of(book, OUTCOME) == {"e1": 0.5, "e2": 0.0, "e3": 0.25}
    book.episode("e1", status="error")
    book.store._rewards.clear()
    assert rewards_of(book, OUTCOME) == {"e1": 0.0, "e2": 0.0, "e3": 0.0}


def test_a_failure_leaves_what_a_scorer_gave_and_no_gain_where_a_gate_is_missing(book):
    """own + outcome, gated by the outcome's format: 1 * (2 + 1) = 3, 0 * (2 + 1) = 0; failed: no gain of its own 2."""
    book.episode("e1", outcome={"team": 1.0, "format": 1.0})
    book.episode("e2", outcome={"team": 1.0, "format": 0.0})
    book.episode("e3", status="error")
    for name in ("e1", "e2", "e3"):
        book.call(f"c{name}", name, rewards=[2.0])
    assert rewards_of(book, Attribution(outcome=True, gates=("format",))) == {"e1": 3.0, "e2": 0.0, "e3": 0.0}
    assert rewards_of(book, Attribution(outcome=True, weights={"format": 0.0})) == {"e1": 3.0, "e2": 3.0, "e3": 2.0}
    assert rewards_of(book, Attribution()) == {"e1": 2.0, "e2": 2.0, "e3": 2.0}


@pytest.mark.parametrize("blame", ["policy", "infrastructure"])
def test_an_episode_that_fails_late_keeps_the_groups_of_a_tree(book, blame):
    book.episode("e", status="error", blame=blame)
    book.call("c", "e", rewards=[1.0, 0.0])
    book.call("d", "e", turn=1, rewards=[None, None])
    collected = collect(book.store, book.store.episodes(), plan="tree")
    assert [(s.id, s.rewards["local"]) for s in collected.samples] == [("c.0", 1.0), ("c.1", 0.0)]
    assert collected.left_out == {"missing_reward": 2}


@pytest.mark.parametrize(
    ("text", "reward"), [("exclude", "exclude"), ("lowest", "lowest"), ("reward:-1", -1.0), ("reward:0.5", 0.5)]
)
def test_what_on_failure_means(text, reward):
    assert failure_reward(text) == reward


@pytest.mark.parametrize("text", ["", "reward", "reward:", "reward:much", "reward:nan", "reward:inf", "drop", "-1"])
def test_what_on_failure_cannot_be(text):
    with pytest.raises(ValueError):
        failure_reward(text)


class Joining(Method):
    """A method that adds rewards of other calls, and trains on the candidates of forks alone."""

    to_go = True
    trains_branches = False


class JoiningBranches(Joining):
    """The same, also for later calls of a branch."""

    trains_branches = True


def joined(book, attribution, scope="own", to_go=None, method_of=lambda role: Joining(), **options):
    """The reward of each sample by its id, where those of all calls count."""
    collected = collect(book.store, book.store.episodes(), method_of=method_of, **options)
    every = [*collected.samples, *collected.others]
    rewards = attribute(every, attribution, scope=scope, to_go=to_go)[: len(collected.samples)]
    return dict(zip((s.id for s in collected.samples), rewards.tolist(), strict=True)), dict(collected.left_out)


@pytest.mark.parametrize(("scope", "reward"), [("sum", 1.0 + 10.0 + 100.0), ("mean", 111.0 / 3)])
def test_roles_that_are_not_trained_count_in_the_sum_and_mean_of_the_roles(book, scope, reward):
    """In turn 0 act a, which is trained, b of an untrained policy, c by a provider, and d, which has no reward."""
    book.episode("e")
    book.call("a", "e", rewards=[1.0])
    book.call("b", "e", role="b", rewards=[5.0, 10.0], chosen=1, policy=PolicyRef("b", 1))
    book.call("c", "e", role="c", rewards=[100.0], policy=None, unknown_prompt=True)
    book.call("d", "e", role="d", policy=None, candidates=[book.candidate(0, token_ids=(), logprobs=())])
    book.call("later", "e", role="b", turn=1, rewards=[1000.0])
    book.call("failed", "e", role="b", status="error", candidates=[])
    found, left_out = joined(book, Attribution(), scope, roles={"a": "a", "b": "other"}, versions={"a": 3})
    assert found == {"a.0": pytest.approx(reward)}
    assert left_out == {"untrained_role": 5, "failed_call": 1}


def test_the_leader_of_cory_answers_for_its_observer_too(book):
    """Outcomes by seat, 1 and 2, and the observer is frozen in this step: 1 + 2."""
    book.episode("e", outcome={"pioneer": 1.0, "observer": 2.0})
    book.call("p", "e", role="pioneer")
    book.call("o", "e", role="observer")
    how = recipe("cory").attribution
    assert joined(book, how, "sum", plan="independent", roles=["pioneer"])[0] == {"p.0": 3.0}


def test_the_seat_whose_call_ended_last_failed_the_game_and_the_other_does_not_lose_for_it(book):
    """White failed e1 and gets its lowest, -1; black's move in it says nothing. e2, failed by the engine, says nothing.
    With all samples as those of one outcome both lose, which self_redteam drops as a tie."""
    book.episode("e0", outcome={"white": -1.0, "black": 1.0})
    book.episode("e1", status="error", blame="policy")
    book.episode("e2", status="error", blame="infrastructure")
    book.episode("e3", outcome={"white": 1.0, "black": -1.0})
    for name in ("e0", "e1", "e2", "e3"):
        book.call(f"w{name}", name, role="white")
        book.call(f"b{name}", name, role="black", started=1.0, latency=1.0)
        book.call(f"v{name}", name, role="white", turn=1, started=1.5, latency=2.0)
    spiral, redteam = recipe("spiral"), recipe("self_redteam")
    collected = collect(book.store, book.store.episodes(), plan="independent", method_of=lambda role: spiral)
    found = attribute(collected.samples, spiral.attribution).tolist()
    rewards = dict(zip((s.call for s in collected.samples), found, strict=True))
    assert {call: reward for call, reward in rewards.items() if call[1:] == "e1"} == {"we1": -1.0, "ve1": -1.0}
    assert collected.left_out == {"opponent_failed": 1, "outage": 3}
    prepared = prepare(collected.samples, redteam)
    assert [s.call for s in prepared.samples if s.rollout == "e1"] == ["we1", "ve1"]
    assert prepared.left_out == {}
    before = prepare(collect(book.store, book.store.episodes(), plan="independent").samples, redteam)
    assert before.left_out == {"tie": 3}


def test_a_game_that_its_opponent_failed_is_no_loss_of_the_trained_seat(book):
    book.episode("e1", status="error")
    book.call("w", "e1", role="white")
    book.call("b", "e1", role="black", turn=0, step=1, status="error", candidates=[], policy=PolicyRef("black", 1))
    collected = collect(
        book.store,
        book.store.episodes(),
        plan="independent",
        roles={"white": "white"},
        method_of=lambda role: recipe("spiral"),
    )
    assert (collected.samples, collected.left_out) == ([], {"opponent_failed": 1, "failed_call": 1})
    assert collected.roles == {"white", "black"}


def test_roles_that_share_an_outcome_by_seat_fail_together():
    assert [name for name in ("spiral", "marshal", "self_redteam", "cory", "dr_mas") if recipe(name).by_seat] == [
        "spiral", "marshal", "self_redteam",
    ]  # fmt: skip


def test_later_rewards_of_a_branch_count_from_its_fork_on(book):
    """To go at the fork: 0.25 + 2 + outcome 3 = 5.25, without continuations as well. The first turn, which the branch
    repeats, is before it."""
    book.episode("t", outcome={"team": 1.0})
    book.call("t0", "t", rewards=[40.0])
    book.call("t1", "t", turn=1, rewards=[0.5], prompt=(1, 3))
    book.call("t2", "t", turn=2, rewards=[5.5], prompt=(1, 4))
    book.episode("z", outcome={"team": 3.0}, fork=Fork(trunk="t", call="t1", at="z1"))
    book.call("z0", "z", replayed="t0")
    book.call("z1", "z", turn=1, rewards=[0.25], prompt=(1, 3))
    book.call("z2", "z", turn=2, rewards=[2.0], prompt=(1, 5))
    found, left_out = joined(book, Attribution(), to_go=1.0, plan="replay")
    assert (found, left_out) == ({"z1.0": 5.25}, {"trunk": 3, "not_forked": 1})
    found, left_out = joined(
        book,
        Attribution(),
        to_go=1.0,
        plan="replay",
        method_of=lambda role: JoiningBranches() if role == "a" else Joining(),
    )
    assert (found, left_out) == ({"z1.0": 5.25, "z2.0": 5.0}, {"trunk": 3})


def test_the_answers_of_a_trunk_are_not_compared(book):
    book.episode("t", outcome={"team": 1.0})
    book.call("t0", "t")
    book.call("t1", "t", turn=1)
    for name, at in (("y", "y0"), ("z", "z0")):
        book.episode(name, outcome={"team": 0.0}, fork=Fork(trunk="t", call="t0", at=at))
        book.call(at, name)
    collected = collect(book.store, book.store.episodes(), plan="replay")
    assert [(s.id, s.branch) for s in collected.samples] == [("y0.0", "t0"), ("z0.0", "t0")]
    assert collected.left_out == {"trunk": 2}


def test_what_a_branch_repeats_counts_for_the_roles_of_its_turn(book):
    """The leader's 10 of the turn was answered from the record in the branch: 10 + 2."""
    book.episode("t")
    book.call("lead", "t", role="b", rewards=[10.0])
    book.call("t1", "t", rewards=[1.0], step=1)
    book.episode("z", fork=Fork(trunk="t", call="t1", at="z1"))
    book.call("again", "z", role="b", replayed="lead")
    book.call("z1", "z", rewards=[2.0], step=1)
    assert joined(book, Attribution(), "sum", plan="replay", roles=["a"])[0] == {"z1.0": 12.0}
