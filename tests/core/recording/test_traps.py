"""Ways in which group-relative training on multi-agent records goes wrong without an error, one test each."""

from __future__ import annotations

import numpy as np
import pytest

from cotune.algorithms.catalogue import RECIPES, recipe
from cotune.algorithms.collect import collect
from cotune.algorithms.groups import build_groups
from cotune.algorithms.prepare import prepare, train_rows
from cotune.algorithms.recipes import Attribution
from cotune.errors import GroupError
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef, RewardRecord
from tests.core.algorithms.small_methods import AverageOfRoles, CentredRoles, CentredSiblings, advantages

AT_GRPO = recipe("at_grpo")


def advantages_of(prepared) -> dict[str, float]:
    return dict(zip((s.id for s in prepared.samples), prepared.advantages.tolist(), strict=True))


# --- the traps of the maths -----------------------------------------------------------------------------------------


def test_trap_1_alone_or_all_equal_is_zero_or_dropped_never_the_raw_reward(book):
    book.episode("e")
    book.call("c", "e", rewards=[5.0])
    book.call("d", "e", turn=1, rewards=[5.0, 5.0, 5.0])
    samples = collect(book.store, book.store.episodes()).samples
    assert prepare(samples, AT_GRPO).left_out == {"group_of_one": 1, "zero_variance": 3}
    assert prepare(samples, recipe("at_grpo", zero_variance=False)).left_out == {"group_of_one": 1, "no_signal": 3}
    kept = prepare(samples, recipe("at_grpo", zero_variance=False, entropy=0.01))
    assert advantages_of(kept) == {"d.0": 0.0, "d.1": 0.0, "d.2": 0.0}
    for name in ("grpo", "dr_grpo", "rloo", "dr_mas"):
        alone = recipe(name).replaced(attribution=Attribution())
        assert advantages(samples[:1], alone)[0].tolist() == [0.0]


def test_trap_2_a_tree_group_has_identical_prompt_token_ids(book):
    book.episode("e")
    book.call("c", "e", rewards=[1.0, 0.0], prompt=(1, 2))
    samples = collect(book.store, book.store.episodes()).samples
    assert build_groups(samples, AT_GRPO).groups[0].id == "c"
    book.call("d", "e", rewards=[1.0, 0.0], prompt=(1, 3))
    with pytest.raises(GroupError, match="different prompts"):
        build_groups(collect(book.store, book.store.episodes()).samples, AT_GRPO)


def test_trap_3_every_roles_group_keeps_the_rewards_from_before_the_selection(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e", role="a", rewards=[0.0, 1.0, 0.5], chosen=1)
    book.call("d", "e", role="b", rewards=[0.25, 0.0, 0.75], chosen=2)
    groups = build_groups(collect(book.store, book.store.episodes()).samples, AT_GRPO).groups
    assert [[s.rewards["local"] for s in g.samples] for g in groups] == [[0.0, 1.0, 0.5], [0.25, 0.0, 0.75]]


def test_trap_4_dr_mas_with_one_role_differs_from_grpo_when_step_counts_differ(book):
    for episode, steps, team in (("e", 3, 1.0), ("f", 1, 0.0)):
        book.episode(episode, outcome={"team": team})
        for turn in range(steps):
            book.call(f"{episode}{turn}", episode, turn=turn, prompt=(turn,))
    samples = collect(book.store, book.store.episodes(), plan="independent").samples
    by_step = prepare(samples, CentredRoles())
    by_rollout = prepare(samples, recipe("dr_grpo"))
    assert by_step.advantages.tolist() == [0.25, 0.25, 0.25, -0.75]
    assert by_rollout.advantages.tolist() == [0.5, 0.5, 0.5, -0.5]
    even = [s for s in samples if s.turn == 0]
    np.testing.assert_array_equal(prepare(even, CentredRoles()).advantages, prepare(even, recipe("dr_grpo")).advantages)


def independent(book, turns: int):
    """Four episodes of one task that share the first prompt of the role and nothing after it."""
    for rollout in range(4):
        book.episode(f"e{rollout}", outcome={"team": float(rollout)})
        for turn in range(turns):
            prompt = (0,) if turn == 0 else (turn, rollout)
            book.call(f"e{rollout}t{turn}", f"e{rollout}", turn=turn, prompt=prompt)
    return collect(book.store, book.store.episodes(), plan="independent").samples


def test_trap_5_at_grpo_over_independent_rollouts_warns_with_the_count_and_names_the_plans(book):
    prepared = prepare(independent(book, 2), recipe("at_grpo", plan="independent"))
    assert sorted(s.id for s in prepared.samples) == ["e0t0.0", "e1t0.0", "e2t0.0", "e3t0.0"]
    assert prepared.left_out == {"group_of_one": 4}
    (warning,) = prepared.warnings
    assert warning.startswith("4 of 8 candidates (50%) stood alone in their group.")
    assert "Use the plan `tree`, or" in warning


def test_trap_5_at_grpo_over_independent_rollouts_is_refused_where_most_stand_alone(book):
    with pytest.raises(GroupError, match=r"8 of 12 candidates \(67%\) stood alone .* Use the plan `tree`, or a recipe"):
        prepare(independent(book, 3), recipe("at_grpo", plan="independent"))


def test_trap_6_the_moving_average_is_updated_before_it_is_subtracted(book):
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e")
    samples = collect(book.store, book.store.episodes(), plan="independent").samples
    assert prepare(samples, AverageOfRoles().replaced(decay=0.75)).advantages.tolist() == [0.75]


def test_trap_7_a_reward_may_come_late_twice_or_never(book):
    book.episode("e")
    book.call(
        "c", "e", rewards=[{"local": 0.0, "judge": 1.0}, {"local": 0.0, "judge": 0.0}, {"local": 0.0}, {"local": 0.0}]
    )
    book.store.write([RewardRecord("c.2", "judge", 9.0), RewardRecord("c.2", "judge", 0.5)])
    prepared = prepare(collect(book.store, book.store.episodes()).samples, CentredSiblings())
    assert advantages_of(prepared) == {"c.0": 0.5, "c.1": -0.5, "c.2": 0.0}
    assert prepared.left_out == {"missing_reward": 1, "zero_advantage": 1}


def test_trap_8_every_recipe_corrects_for_the_sampler_and_rows_carry_its_logprobs(book):
    assert {name: r.loss.tis_cap for name, r in RECIPES.items()} == {**dict.fromkeys(RECIPES, 2.0), "dart": 1.0}
    book.episode("e")
    book.call("c", "e", rewards=[1.0, 0.0])
    collected = collect(book.store, book.store.episodes())
    rows = train_rows(prepare(collected.samples, AT_GRPO), collected, book.store)["a"]
    assert [row.logprobs for row in rows] == [(-0.5, -0.25), (-0.5, -0.25)]
    assert [s.entropy for s in collected.samples] == [0.375, 0.375]


# --- mistakes of bookkeeping ----------------------------------------------------------------------------------------


def test_different_tasks_never_share_a_baseline(book):
    """Task ids that look like indices, prefixes or quotients of each other stay apart, under every recipe."""
    names = [str(i) for i in range(24)] + ["1 ", "01", "q1", "q1/0", "q/10"]
    for name in names:
        for rollout in range(2):
            episode = f"{name}-{rollout}"
            book.episode(episode, task=name, outcome={"team": float(rollout)})
            book.call(f"{episode}c", episode, rewards=[0.0, 1.0])
    for plan, key_recipes in (("tree", ["at_grpo", "dapo"]), ("independent", ["grpo", "dr_mas", "rloo", "gspo"])):
        samples = collect(book.store, book.store.episodes(), plan=plan).samples
        for name in key_recipes:
            chosen = recipe(name, plan=plan)
            groups = build_groups(samples, chosen).groups
            assert all(len({s.task for s in g.samples}) == 1 for g in groups)
            assert {s.task for g in groups for s in g.samples} == set(names)
            assert len({g.id for g in groups}) == len(groups) == len(names) * (2 if plan == "tree" else 1)


def test_rewards_follow_the_task_of_their_candidate(book):
    """A shift of one task's rewards moves nothing in another's."""
    for task in "qr":
        book.episode(task, task=task)
    book.call("c", "q", rewards=[1.0, 0.0])
    book.call("d", "r", rewards=[1000.0, 1001.0])
    prepared = prepare(collect(book.store, book.store.episodes()).samples, CentredSiblings())
    assert advantages_of(prepared) == {"c.0": 0.5, "c.1": -0.5, "d.0": -0.5, "d.1": 0.5}


def test_the_second_role_is_scored_on_its_own_candidates(book):
    """The second role's group has the variance of its own candidates, not of copies of the first role's winner."""
    book.episode("e", outcome={"team": 1.0})
    book.call("c", "e", role="first", rewards=[0.0, 1.0], chosen=1, prompt=(1,))
    book.call("d", "e", role="second", rewards=[0.2, 0.6, 0.1], chosen=1, prompt=(1, 10, 11, 2))
    prepared = prepare(collect(book.store, book.store.episodes()).samples, AT_GRPO)
    assert prepared.roles["second"].zero_variance == 0.0
    assert prepared.roles["second"].group_spread > 0.2
    assert {s.rewards["local"] for s in prepared.samples if s.role == "second"} == {0.2, 0.6, 0.1}


def test_a_later_call_of_the_same_role_is_a_group_of_its_own(book):
    """What is chosen in one turn changes neither the rewards nor the prompt of the group it was chosen from."""
    book.episode("e")
    book.call("c", "e", turn=0, rewards=[0.0, 1.0], chosen=1, prompt=(1,))
    before = build_groups(collect(book.store, book.store.episodes()).samples, AT_GRPO).groups[0]
    book.call("d", "e", turn=1, rewards=[7.0, 8.0], chosen=0, prompt=(1, 11, 11, 2))
    after = build_groups(collect(book.store, book.store.episodes()).samples, AT_GRPO).groups
    assert after[0] == before
    assert [g.key for g in after] == [("q", "a", 0, "e"), ("q", "a", 1, "e")]


def test_a_failed_call_is_never_a_sample(book):
    """Not even one that left a candidate, tokens and a reward behind."""
    book.episode("e")
    book.call("c", "e", rewards=[1.0, 0.0])
    for turn, status in enumerate(("error", "timeout", "cancelled", "malformed"), start=1):
        book.call(f"bad{turn}", "e", turn=turn, status=status, error=status, rewards=[1.0, 0.0])
    book.call("none", "e", turn=5, status="error", candidates=[])
    collected = collect(book.store, book.store.episodes())
    assert {s.call for s in collected.samples} == {"c"}
    assert collected.left_out == {"failed_call": 3, "timed_out_call": 2, "cancelled_call": 2, "malformed_call": 2}


def test_a_role_per_policy_gives_as_many_policies_as_roles():
    """Policies of one base model do not collapse into one for want of a name of their own."""
    for layout in ("lora", "full"):
        policies = policies_for(layout, ["a", "b", "c"], LoraSpec())
        assert len({policies.of(role).name for role in "abc"}) == 3


def test_rows_of_two_roles_that_share_a_policy_stay_with_their_role(book):
    book.episode("e")
    book.call("c", "e", role="a", rewards=[1.0, 0.0], policy=PolicyRef("shared", 1))
    book.call("d", "e", role="b", rewards=[1.0, 0.0], policy=PolicyRef("shared", 1))
    collected = collect(book.store, book.store.episodes())
    rows = train_rows(prepare(collected.samples, AT_GRPO), collected, book.store)
    assert {role: [row.id for row in part] for role, part in rows.items()} == {
        "a": ["c.0", "c.1"],
        "b": ["d.0", "d.1"],
    }
