"""Groups: who is compared with whom, under which id."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.groups import build_groups, one_prompt
from cotune.algorithms.recipes import USUAL
from cotune.algorithms.samples import Sample
from cotune.errors import GroupError
from cotune.records.structs import PolicyRef

AT_GRPO = recipe("at_grpo")
ROOT = Path(__file__).parents[3]


def sample(id: str, task: str = "q", rollout: str = "e", role: str = "a", turn: int = 0, **fields) -> Sample:
    fields = {"branch": rollout, "prompt": "p", "training_step": 1, **fields}
    return Sample(
        id=id, task=task, rollout=rollout, role=role, turn=turn, step=turn, policy=PolicyRef(role), tokens=1, **fields
    )


def ids(groups) -> list[list[str]]:
    return [[s.id for s in g.samples] for g in groups.groups]


def test_siblings_of_a_call_make_a_group_named_after_it():
    built = build_groups([sample("c.0"), sample("d.0", turn=1), sample("c.1"), sample("d.1", turn=1)], AT_GRPO)
    assert ids(built) == [["c.0", "c.1"], ["d.0", "d.1"]]
    assert [g.id for g in built.groups] == ["c", "d"]
    assert built.groups[0].key == ("q", "a", 0, "e")
    assert built.left_out == {}


def test_task_role_turn_and_episode_each_part_groups():
    parts = [
        *(sample(f"c0.{i}") for i in range(2)),
        *(sample(f"c1.{i}", task="r") for i in range(2)),
        *(sample(f"c2.{i}", role="b") for i in range(2)),
        *(sample(f"c3.{i}", turn=1) for i in range(2)),
        *(sample(f"c4.{i}", rollout="f") for i in range(2)),
    ]
    assert [g.id for g in build_groups(parts, AT_GRPO).groups] == ["c0", "c1", "c2", "c3", "c4"]


def test_alone_is_left_out_and_counted():
    built = build_groups([sample("c.0"), sample("d.0", turn=1), sample("d.1", turn=1)], AT_GRPO)
    assert ids(built) == [["d.0", "d.1"]]
    assert built.left_out == {"group_of_one": 1}


def test_dr_mas_groups_a_role_over_the_episodes_of_a_task_whatever_the_prompts():
    steps = [
        sample("c.0", rollout="e", prompt="p1"),
        sample("d.0", rollout="e", prompt="p2", turn=1),
        sample("x.0", rollout="e", role="b"),
        sample("g.0", rollout="f", prompt="p1"),
        sample("y.0", rollout="f", role="b"),
    ]
    assert ids(build_groups(steps, recipe("dr_mas"))) == [["c.0", "d.0", "g.0"], ["x.0", "y.0"]]
    assert ids(build_groups(steps, recipe("grpo"))) == [["c.0", "d.0", "x.0", "g.0", "y.0"]]


def test_one_episode_is_alone_however_many_calls_it_made():
    calls = [sample("c.0"), sample("d.0", turn=1), sample("f.0", turn=2)]
    assert build_groups(calls, recipe("dr_mas")).left_out == {"group_of_one": 3}


def test_recipes_that_compare_nothing_keep_groups_of_one():
    alone = recipe("distill")
    assert build_groups([sample("c.0")], alone).left_out == {}


def test_ids_depend_on_key_and_step_not_on_members_or_order():
    dr_mas = recipe("dr_mas")
    e, f, g = (sample(f"{r}.0", rollout=r) for r in "efg")
    (first,) = build_groups([e, f, g], dr_mas).groups
    (second,) = build_groups([g, e], dr_mas).groups
    (other_step,) = build_groups(
        [sample("e.0", training_step=2), sample("f.0", rollout="f", training_step=2)], dr_mas
    ).groups
    (other_task,) = build_groups([sample("e.0", task="r"), sample("f.0", task="r", rollout="f")], dr_mas).groups
    assert first.id == second.id == "8784bb8f7c196e1b63150a737ae5bd40"
    assert len({first.id, other_step.id, other_task.id}) == 3


def test_different_prompts_in_one_group_are_refused_and_named():
    with pytest.raises(GroupError, match=r"2 different prompts, from calls \['c', 'd'\]"):
        build_groups([sample("c.0", prompt="p1"), sample("d.0", prompt="p2")], AT_GRPO)


def test_the_pages_say_what_a_group_is_in_each_plan():
    """What the default recipes compare, by their keys, and the sentences that say so."""
    one_prompt_by_plan = {plan: one_prompt(recipe(name)) for plan, name in USUAL.items()}
    assert one_prompt_by_plan == {"tree": True, "independent": False, "replay": True}
    assert recipe("dr_mas").group_by == ("task", "role")
    says = {
        "README.md": "several answers to one prompt; or one role's answers over K runs of a task",
        "docs/explanation/update.md": "all calls of one role in the K episodes of a task",
    }
    for page, sentence in says.items():
        text = " ".join((ROOT / page).read_text().split())
        assert sentence in text, page
        assert "Candidates with identical prompt token ids, of one task, role and turn, form" not in text, page
