"""Runs whose rewards are not named alike everywhere: by task, or where a scorer gives a bonus."""

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


def test_a_bonus_of_one_candidate_costs_its_group_unless_absent_says_what_it_counts(trainer):
    trainer(application(first=with_bonus), overrides={"absent": 0}, **SMALL)
    line = trainer.metrics()[0]
    assert "missing_reward" not in line["left_out"]
    assert line["roles"]["first"]["kept"] == 8
    trainer(application(first=with_bonus), to="strict", **SMALL)
    line = trainer.metrics("strict")[0]
    assert (line["left_out"]["missing_reward"], line["left_out"]["group_of_one"]) == (6, 2)
    assert any("they lack 'bonus'" in note and "absent = 0" in note for note in line["notes"])
