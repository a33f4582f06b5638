"""Runs whose rewards are not named alike everywhere: by task, or where a scorer gives a bonus."""

import pytest

from cotune.errors import ConfigError
from tests.trainer.tiny_app import application, converse, letters

SMALL = {"policies": "shared", "steps": 1, "tasks_per_step": 2}


async def two_kinds(task):
    outcome = (await converse(task))["team"]
    return {"solved" if task["letter"] == "a" else "correct": outcome}


def with_bonus(candidate, call, task):
    found = {"local": letters(candidate, call, task)}
    return {**found, "bonus": 1.0} if candidate.index == 0 else found


def test_tasks_with_outcomes_of_other_names_are_all_trained_on(trainer):
    trainer(application(two_kinds), **SMALL)
    line = trainer.metrics()[0]
    assert (line["episodes"], line["failed"], line["candidates"]) == (8, 0, 16)
    assert "missing_reward" not in line["left_out"]
    assert line["rows"] + sum(line["left_out"].get(name, 0) for name in ("no_signal", "zero_advantage")) == 16


@pytest.mark.parametrize(
    ("settings", "text", "remedy"),
    [
        (
            {"rewards": {"weights": {"first/formt": 2.0}}},
            "rewards.weights = 'formt' is not a reward",
            "Did you mean format?",
        ),
        ({"recipe": "afm_rl"}, "recipe = 'afm_rl' has 'format' in `gates`, which is not a", "Did you mean formatt?"),
        ({"recipe": "cpmobius"}, "recipe = 'cpmobius' has 'player' in `mean_range_roles`", "Name the role so, or list"),
    ],
)
def test_names_of_no_reward_or_role_are_refused_before_the_first_step(trainer, settings, text, remedy):
    async def run(task):
        return {**await converse(task), "format" if "rewards" in settings else "formatt": 1.0}

    with pytest.raises(ConfigError, match=text) as caught:
        trainer(application(run), **settings)
    assert caught.value.remedy.startswith(remedy)


def test_a_gate_that_nothing_carries_is_told(trainer):
    trainer(application(converse), steps=1, recipe="afm_rl")
    assert "gates names 'format', a reward that no episode had so far" in " ".join(trainer.said.split())


def test_a_weight_of_success_is_told_as_one_of_a_metric(trainer):
    """It was taken in silence, and the roles learned from the other names alone."""

    async def run(task):
        return {"success": 1.0, "minutes": (await converse(task))["team"]}

    trainer(application(run), steps=1, rewards={"weights": {"success": 1.0, "minutes": -0.5}})
    said = " ".join(trainer.said.split())
    assert "weights names 'success', a reward that no episode had so far: it changes nothing there; `suc" in said


def test_a_bonus_of_one_candidate_costs_its_group_unless_absent_says_what_it_counts(trainer):
    trainer(application(first=with_bonus), rewards={"absent": 0}, **SMALL)
    line = trainer.metrics()[0]
    assert "missing_reward" not in line["left_out"]
    assert line["roles"]["first"]["kept"] == 8
    trainer(application(first=with_bonus), to="strict", **SMALL)
    line = trainer.metrics("strict")[0]
    assert (line["left_out"]["missing_reward"], line["left_out"]["group_of_one"]) == (6, 2)
    assert any("they lack 'bonus'" in note and "absent = 0" in note for note in line["notes"])
