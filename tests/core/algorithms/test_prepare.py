"""Preparing a step: what is kept, what is left out and why, statistics, warnings, rows."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.filters import REASONS
from cotune.algorithms.prepare import RoleStats, StepContext, prepare, train_rows
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Sample, TrainRow
from cotune.errors import ConfigError, GroupError
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import AverageOfRoles, CentredSiblings, ReturnsOfSiblings

AT_GRPO = recipe("at_grpo")


def sample(id: str, reward: float | None = None, team: float | None = None, **fields) -> Sample:
    call = id.rpartition(".")[0]
    return Sample(
        **{
            "id": id,
            "task": "q",
            "rollout": "e",
            "role": "a",
            "turn": 0,
            "step": 0,
            "branch": call,
            "prompt": call,
            "policy": PolicyRef("a", 2),
            "tokens": 3,
            "rewards": {} if reward is None else {"local": reward},
            "outcome": {} if team is None else {"team": team},
            **fields,
        }
    )


def group(call: str, *rewards: float | None, **fields) -> list[Sample]:
    return [sample(f"{call}.{i}", reward, chosen=i == 0, **fields) for i, reward in enumerate(rewards)]


def test_a_step_of_two_roles():
    samples = [*group("c", 1.0, 0.0), *group("d", 2.0, 2.0), *group("x", 3.0, 1.0, None, role="b"), *group("y", 9.0)]
    prepared = prepare(samples, AT_GRPO)
    assert [s.id for s in prepared.samples] == ["c.0", "c.1", "x.0", "x.1"]
    np.testing.assert_allclose(prepared.advantages, [0.7071, -0.7071, 0.7071, -0.7071], atol=1e-4)
    assert [g.id for g in prepared.groups] == ["c", "x"]
    assert prepared.left_out == {"zero_variance": 2, "missing_reward": 1, "group_of_one": 1}
    assert set(prepared.left_out) <= set(REASONS)
    assert prepared.roles == {
        "a": RoleStats(samples=5, kept=2, reward=2.8, groups=2, group_spread=0.25, zero_variance=0.5),
        "b": RoleStats(samples=3, kept=2, reward=2.0, groups=1, group_spread=1.0, zero_variance=0.0),
    }
    assert prepared.reward == pytest.approx(18 / 7)
    assert prepared.warnings == (
        "1 of 7 candidates (14%) stood alone in their group. Their siblings were left out, for the other reasons that "
        "are counted.",
    )


def test_kept_and_left_out_add_up():
    samples = [*group("c", 1.0, 0.0, None), *group("d", 2.0, 2.0), *group("f", 1.0)]
    prepared = prepare(samples, AT_GRPO)
    assert len(prepared.samples) + sum(prepared.left_out.values()) == len(samples)


@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([None, 0.0, 0.5, 1.0])), max_size=24),
    st.randoms(use_true_random=False),
)
def test_every_sample_is_kept_or_counted_whatever_the_order(rows, random):
    samples = [sample(f"c{call}.{i}", reward, turn=call) for i, (call, reward) in enumerate(rows)]
    prepared = prepare(samples, AT_GRPO)
    assert len(prepared.trained) + sum(prepared.left_out.values()) == len(samples)
    assert [s for g in prepared.groups for s in g.samples] == list(prepared.trained)
    random.shuffle(samples)
    again = prepare(samples, AT_GRPO)
    assert again.left_out == prepared.left_out
    assert by_id(again) == pytest.approx(by_id(prepared))


def by_id(prepared) -> dict[str, float]:
    return {s.id: a for s, a in zip(prepared.samples, prepared.advantages.tolist(), strict=True)}


def test_samples_of_a_group_stay_aligned_with_their_advantages():
    one, two = group("c", 1.0, 0.0), group("d", 0.0, 4.0)
    prepared = prepare([one[0], two[0], one[1], two[1]], CentredSiblings())
    assert by_id(prepared) == {
        "c.0": 0.5,
        "c.1": -0.5,
        "d.0": -2.0,
        "d.1": 2.0,
    }


def test_groups_trained_on_before_are_left_out():
    samples = [*group("c", 1.0, 0.0), *group("d", 1.0, 0.0)]
    prepared = prepare(samples, AT_GRPO, context=StepContext(consumed={"c": 4}))
    assert [g.id for g in prepared.groups] == ["d"]
    assert prepared.left_out == {"consumed": 2}


def test_groups_too_easy_or_too_hard_are_left_out():
    samples = [*group("c", 1.0, 0.0), *group("d", 1.0, 1.0, 1.0, 1.0, 0.0), *group("f", 0.0, 0.0)]
    prepared = prepare(samples, AT_GRPO.replaced(filters=Filters(zero_variance=True, mean_range=(0.2, 0.75))))
    assert [g.id for g in prepared.groups] == ["c"]
    assert prepared.left_out == {"mean_out_of_range": 5, "zero_variance": 2}


@pytest.mark.parametrize(("by", "kept"), [("spread", ["d", "e"]), ("mean", ["c", "e"])])
def test_a_share_of_the_groups_of_each_policy_is_kept(by, kept):
    samples = [*group("c", 0.9, 1.0), *group("d", 0.0, 1.0), *group("e", 0.7, 1.0), *group("f", 0.2, 0.2)]
    filters = Filters(zero_variance=True, keep_groups=0.5, keep_groups_by=by)
    prepared = prepare(samples, AT_GRPO.replaced(filters=filters))
    assert [g.id for g in prepared.groups] == kept
    assert prepared.left_out == {"zero_variance": 2, "not_in_share": 2}  # half of three, rounded up


def test_a_share_of_groups_must_be_a_share():
    with pytest.raises(ConfigError, match=r"keep_groups = 0.0 must be a share above 0 and up to 1"):
        Filters(keep_groups=0.0)


def test_rewards_are_discounted_by_the_calls_that_come_after():
    samples = [
        sample("a0.0", 1.0, step=0, turn=0),
        sample("b0.0", 1.0, step=1, turn=0, role="b"),
        sample("a1.0", 1.0, step=2, turn=1),
        sample("a1.1", 1.0, step=2, turn=1),
        sample("c0.0", 1.0, rollout="other"),
    ]
    step = AT_GRPO.step(samples)
    assert step.discounted(step.rewards(), 0.5).tolist() == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert step.discounted(step.rewards(), 0.5, by="turn").tolist() == [0.5, 1.0, 1.0, 1.0, 1.0]


def test_samples_of_zero_advantage_are_left_out_when_asked():
    drops = prepare(
        group("c", 1.0, 0.0, 0.5), AT_GRPO.replaced(filters=Filters(zero_variance=True, zero_advantage=True))
    )
    assert [s.id for s in drops.samples] == ["c.0", "c.1"]
    assert [[s.id for s in g.samples] for g in drops.groups] == [["c.0", "c.1"]]
    assert drops.advantages.shape == (2,)
    assert drops.left_out == {"zero_advantage": 1}


def test_a_sample_of_zero_advantage_is_in_the_update_for_its_denominators_and_not_trained_on():
    keeps = prepare([*group("c", 0.3, 0.1, 0.2), *group("d", 1.0, 0.0)], AT_GRPO)  # 0.2 less the mean is 3e-17
    assert [s.id for s in keeps.samples] == ["c.0", "c.1", "c.2", "d.0", "d.1"] and keeps.advantages[2] == 0.0
    assert [s.id for s in keeps.trained] == ["c.0", "c.1", "d.0", "d.1"] and keeps.roles["a"].kept == 4
    assert [[s.id for s in g.samples] for g in keeps.groups] == [["c.0", "c.1"], ["d.0", "d.1"]]
    assert keeps.left_out == {"zero_advantage": 1}
    with_own_loss = recipe("at_grpo").replaced(loss=LossSpec(token_loss="my_loss.py:whatever"))
    loss = prepare(group("c", 1.0, 0.0, 0.5), with_own_loss)
    assert loss.trained == loss.samples and loss.left_out == {}


def test_zero_variance_is_kept_with_advantage_zero_where_the_recipe_keeps_it_and_its_policy_has_a_signal():
    ties = [sample(f"{r}.0", team=1.0, rollout=r) for r in "ef"]
    differ = [sample(f"{r}.0", team=float(r == "g"), rollout=r, task="p") for r in "gh"]
    prepared = prepare([*ties, *differ], recipe("grpo"))
    assert prepared.advantages.tolist() == pytest.approx([0.0, 0.0, 0.7071, -0.7071], abs=1e-4)
    assert prepared.left_out == {"zero_advantage": 2} and len(prepared.groups) == 1
    assert prepare(ties, recipe("dapo")).left_out == {"zero_variance": 2}
    assert recipe("dapo").filters == Filters(zero_variance=True)


@pytest.mark.parametrize("name", ["dr_mas", "grpo", "dr_grpo", "rloo", "gspo"])
@pytest.mark.parametrize(
    ("changes", "kept"),
    [({}, 2), ({"kl": 0.1}, 6), ({"entropy": 0.01}, 6)],
)
def test_a_policy_without_a_signal_is_left_out_unless_something_else_moves_it(name, changes, kept):
    """Policy a ties in both tasks; policy b, of the same episodes, is compared over its own task and differs."""
    tied = [sample(f"{r}{t}.0", team=1.0, rollout=r + t, task=t) for t in "pq" for r in "ef"]
    differ = [
        sample(f"{r}.0", team=float(r == "g"), rollout=r, task="r", role="b", policy=PolicyRef("b", 1)) for r in "gh"
    ]
    prepared = prepare([*tied, *differ], recipe(name, **changes))
    assert len(prepared.samples) == len(prepared.advantages) == kept
    assert prepared.left_out == ({"no_signal": 4} if kept == 2 else {})
    assert {s.role for g in prepared.groups for s in g.samples} == ({"b"} if kept == 2 else {"a", "b"})
    assert {role: stats.kept for role, stats in prepared.roles.items()} == {"a": kept - 2, "b": 2}
    assert set(prepared.left_out) <= set(REASONS)


def test_returns_see_turns_whose_group_is_dropped():
    # turn 1 has zero variance and is dropped; its chosen reward still counts for turn 0: 1 + 5 and 0 + 5
    samples = [*group("c", 1.0, 0.0), *group("d", 5.0, 5.0, turn=1)]
    prepared = prepare(samples, ReturnsOfSiblings())
    assert prepared.advantages.tolist() == [0.5, -0.5]
    assert prepared.roles["a"].reward == (6.0 + 5.0 + 5.0 + 5.0) / 4


def test_a_role_without_any_usable_reward_is_named_with_what_it_has():
    samples = [*group("c", 1.0, 0.0), *group("x", 1.0, 0.0, role="b")]
    prepared = prepare(samples, recipe("grpo", weights={"team": 1.0}))
    assert prepared.samples == ()
    assert prepared.left_out == {"missing_reward": 4}
    assert prepared.warnings[0] == (
        "Role 'a' has no reward that the recipe uses. Its candidates carry ['local'], its episodes none. "
        "Add a scorer for it, or name its components in `weights`."
    )
    assert np.isnan(prepared.roles["a"].reward)


def test_one_episode_of_a_task_warns():
    prepared = prepare([sample("e.0", team=1.0)], recipe("dr_mas"))
    assert prepared.left_out == {"group_of_one": 1}
    assert "If a role seldom acts, run more episodes of each task (plan.k)." in prepared.warnings[0]


def test_nothing_in_nothing_out():
    prepared = prepare([], AT_GRPO)
    assert (prepared.samples, prepared.groups, prepared.left_out, prepared.roles) == ((), (), {}, {})
    assert prepared.advantages.shape == (0,)


def test_different_prompts_in_a_group_stop_the_step():
    samples = [sample("c.0", 1.0, branch="e"), sample("d.0", 0.0, branch="e")]
    with pytest.raises(GroupError, match="2 different prompts"):
        prepare(samples, AT_GRPO)


def test_ema_state_goes_on_from_step_to_step():
    spiral = AverageOfRoles()
    first = prepare([sample("e.0", team=4.0)], spiral)
    second = prepare([sample("f.0", team=4.0)], spiral, first.state)
    assert (first.advantages.tolist(), second.advantages.tolist()) == ([2.0], [1.0])


def test_rows_carry_how_much_their_episode_is_to_be_explored(book):
    for name, outcome in (("e", {"team": 1.0, "exploration": 2.0}), ("f", {"team": 0.0})):
        book.episode(name, outcome=outcome)
        book.call(f"c{name}", name)
    collected = collect(book.store, book.store.episodes(), plan="independent")
    chosen = recipe("dr_mas", weights={"team": 1.0}).replaced(loss=LossSpec(entropy_by="exploration"))
    rows = train_rows(prepare(collected.samples, chosen), collected, book.store, lambda policy: chosen.loss.entropy_by)
    assert [row.exploration for row in rows["a"]] == [2.0, 1.0]


def test_rows_carry_tokens_and_logprobs_as_recorded(book):
    book.episode("e")
    candidates = [
        book.candidate(0, token_ids=(7, 8), logprobs=(-0.1, -0.2)),
        book.candidate(1, token_ids=(9,), logprobs=(-0.3,)),
    ]
    book.call("c", "e", rewards=[1.0, 0.0], prompt=(1, 2, 3), candidates=candidates, sampling={"temperature": 0.8})
    book.call("x", "e", role="b", rewards=[0.0, 1.0], prompt=(4,))
    collected = collect(book.store, book.store.episodes())
    rows = train_rows(prepare(collected.samples, CentredSiblings()), collected, book.store)
    assert rows["a"] == [
        TrainRow(
            id="c.0",
            role="a",
            prompt_ids=(1, 2, 3),
            response_ids=(7, 8),
            logprobs=(-0.1, -0.2),
            advantage=0.5,
            temperature=0.8,
            version=3,
            trajectory="e",
        ),
        TrainRow(
            id="c.1",
            role="a",
            prompt_ids=(1, 2, 3),
            response_ids=(9,),
            logprobs=(-0.3,),
            advantage=-0.5,
            temperature=0.8,
            version=3,
            trajectory="e",
        ),
    ]
    assert [(r.id, r.prompt_ids, r.advantage, r.temperature) for r in rows["b"]] == [
        ("x.0", (4,), -0.5, 1.0),
        ("x.1", (4,), 0.5, 1.0),
    ]


def test_rows_read_each_prompt_once_and_no_call_again(book):
    book.episode("e")
    for turn in range(3):
        book.call(f"c{turn}", "e", turn=turn, rewards=[float(k) for k in range(8)], prompt=(turn,))
    collected = collect(book.store, book.store.episodes())
    prepared = prepare(collected.samples, AT_GRPO)
    book.store.reads = 0
    assert len(train_rows(prepared, collected, book.store)["a"]) == 24
    assert book.store.reads == 3


def test_an_image_is_read_once_however_many_calls_show_it(book):
    book.episode("e")
    book.store.images = {"h0": b"first", "h1": b"second"}
    shown = (["h0"], ["h0", "h1"], ["h1", "h0"])
    for turn, images in enumerate(shown):
        book.call(f"c{turn}", "e", turn=turn, rewards=[0.0, 1.0], sampling={"images": images})
    collected = collect(book.store, book.store.episodes())
    rows = train_rows(prepare(collected.samples, AT_GRPO), collected, book.store)["a"]
    assert [row.images for row in rows[::2]] == [(b"first",), (b"first", b"second"), (b"second", b"first")]
    assert book.store.reads == 1 + 1 + 2 + 3  # calls, rewards, images, prompts


@pytest.mark.parametrize("name", ["at_grpo", "dr_mas", "grpo"])
def test_five_thousand_samples_take_little(name):
    chosen = recipe(name)
    samples = [
        sample(f"c{i}.{k}", float(k), team=float(k), task=f"q{i % 64}", role="ab"[i % 2], rollout=f"e{i}")
        for i in range(625)
        for k in range(8)
    ]
    assert min(_seconds(lambda: prepare(samples, chosen)) for _ in range(2)) < 1.0


def _seconds(work) -> float:
    start = time.thread_time()
    work()
    return time.thread_time() - start


def test_truncated_and_timed_out_samples_are_in_the_baseline_but_not_trained_on_when_asked():
    """Rewards 1, 0, 0, 0, the second cut: mean 1/4 with it, 1/3 without."""
    samples = [sample(f"c.{i}", float(i == 0), truncated=i == 1, timed_out=i == 2) for i in range(4)]
    plain = prepare(samples, CentredSiblings())
    assert plain.advantages.tolist() == [0.75, -0.25, -0.25, -0.25]
    assert plain.roles["a"].truncated == 0.25
    dropped = prepare(
        samples,
        CentredSiblings().replaced(filters=Filters(zero_variance=True, drop_truncated=True, drop_timed_out=True)),
    )
    assert [s.id for s in dropped.samples] == ["c.0", "c.3"]
    assert dropped.advantages.tolist() == [0.75, -0.25]
    assert dropped.left_out == {"truncated": 1, "timed_out_episode": 1}
    shaped = prepare(samples, CentredSiblings().replaced(attribution=Attribution(overlong_penalty=1.0)))
    assert shaped.advantages.tolist() == [1.0, -1.0, 0.0, 0.0]  # rewards 1, -1, 0, 0
    assert (shaped.roles["a"].reward, shaped.roles["a"].overlong) == (0.0, 0.25)


def test_what_a_branch_goes_on_to_say_has_the_advantage_of_its_candidate():
    """A fork of three with outcomes 1, 0, 0.5, and one whose outcomes are equal; their branches go on."""
    replay = recipe("c3", drop_truncated=True)
    fork = [sample(f"f{i}.0", team=r, rollout=f"e{i}", branch="f", prompt="f") for i, r in enumerate((1.0, 0.0, 0.5))]
    flat = [sample(f"g{i}.0", team=1.0, rollout=e, branch="g", prompt="g") for i, e in enumerate(("e0", "e8"))]
    more = [
        sample("h1.0", team=0.0, rollout="e1", role="b", continues=True),
        sample("h2.0", team=0.0, rollout="e1", role="b", turn=1, continues=True, truncated=True),
        sample("h3.0", team=0.5, rollout="e2", continues=True),
        sample("h4.0", team=1.0, rollout="e8", continues=True),
    ]
    prepared = prepare([*fork, *flat, *more], replay)
    # leave-one-out: 1 - (0 + 0.5) / 2, 0 - (1 + 0.5) / 2, 0.5 - (1 + 0) / 2; a call after it shares its branch's
    found = {s.id: a for s, a in zip(prepared.samples, prepared.advantages.tolist(), strict=True)}
    assert found == {"f0.0": 0.75, "f1.0": -0.75, "f2.0": 0.0, "h1.0": -0.75, "h3.0": 0.0}
    assert [(g.id, len(g.samples)) for g in prepared.groups] == [("f", 2)]
    assert prepared.left_out == {"zero_variance": 2, "continuation": 1, "truncated": 1, "zero_advantage": 2}
    assert set(prepared.left_out) <= set(REASONS)
    assert prepared.roles["b"].kept == 1 and prepared.roles["a"].groups == 2


def test_weighed_rewards_that_training_cannot_hold_are_refused_by_role_and_component():
    heavy = recipe("at_grpo", weights={"local": 1e10})
    text = r"Role 'a' has a reward of 3e\+40 on task 'q' \(local 3e\+30, before weights\), which the 32-bit"
    with pytest.raises(GroupError, match=text):
        prepare(group("c", 1.0, 3e30), heavy)
    assert np.isfinite(prepare(group("c", 1.0, 3e30), AT_GRPO).advantages.astype(np.float32)).all()


def failing(id: str, role: str, **fields) -> Sample:
    return sample(id, role=role, policy=PolicyRef(role, 2), rollout=id, failure="lowest", **fields)


def test_a_role_that_only_failed_in_a_step_counts_the_lowest_of_the_other_roles():
    """Its crashes counted 0 where all others had less: the best reward of the step, in groups over roles too."""
    ended = [sample(f"e{i}.0", team=value, rollout=f"e{i}") for i, value in enumerate((-1.0, -3.0))]
    prepared = prepare([*ended, failing("f0.0", "rare"), failing("f1.0", "rare")], recipe("grpo"))
    assert prepared.roles["rare"].reward == -3.0
    assert dict(zip((s.id for s in prepared.samples), np.sign(prepared.advantages), strict=True)) == {
        "e0.0": 1.0, "e1.0": -1.0, "f0.0": -1.0, "f1.0": -1.0,
    }  # fmt: skip


def test_a_step_in_which_all_failed_has_no_reward_to_show():
    """The lowest of nothing is no 0: a guard and a reader would take it for the best step of a run that loses."""
    prepared = prepare([failing(f"f{i}.0", "a") for i in range(2)], recipe("dr_mas"))
    assert np.isnan(prepared.roles["a"].reward)
    assert (prepared.reward, prepared.left_out, prepared.reached) == (None, {"no_signal": 2}, {"a": "no signal"})
