"""What a run says of policies that stay as they are, of roles that only fail, and of evaluations without a figure."""

from __future__ import annotations

import json
from pathlib import Path

from cotune.cli.train import never_updated
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

INDEPENDENT = {"kind": "independent", "k": 2}


async def four_roles(task: dict[str, str]) -> dict[str, float]:
    """One role whose rewards differ, one whose rewards never do, one without a reward, and one that seldom acts."""
    four_roles.ran += 1
    for role in ("learns", "even", "unpaid"):
        await ask(role, f"say {task['letter']}")
    if four_roles.ran % 6 == 1:
        await ask("seldom", "alone")
    return {"team": float(four_roles.ran % 2), "steady": 1.0}


def test_each_policy_that_stays_has_its_own_reason_and_the_run_counts_them(trainer: Trainer) -> None:
    four_roles.ran = 0
    weights = {"learns/team": 1.0, "seldom/team": 1.0, "even/steady": 1.0}
    settings = {
        "rewards": {"weights": weights},
        "plan": INDEPENDENT,
        "concurrency": 1,
        "roles": ["seldom"],
        "steps": 3,
    }
    summary = trainer(application(four_roles), **settings, evaluation={"tasks": "none"})
    lines = trainer.metrics()
    assert [line["stayed"] for line in lines] == [
        {"seldom": "no comparison", "even": "no signal", "unpaid": "no reward"}
    ] * 3
    assert summary.versions == {"learns": 3}
    assert lines[0]["roles"]["even"]["zero_variance"] == 1.0
    assert not {"group_spread", "zero_variance"} & {*lines[0]["roles"]["seldom"], *lines[0]["roles"]["unpaid"]}
    assert summary.stayed == {"seldom": {"no comparison": 3}, "even": {"no signal": 3}, "unpaid": {"no reward": 3}}
    told = never_updated(summary)
    assert told[0] == (
        "never updated: even (no signal in 3 of 3 steps), seldom (no comparison in 3 of 3 steps), unpaid (no reward in "
        "3 of 3 steps)"
    )
    assert told[1].startswith("even: no signal, as all rewards that were compared are equal.")
    assert len(told) == 2


def test_a_game_says_why_it_has_no_held_out_figure(trainer: Trainer) -> None:
    """Before the first step too: there nothing but `no figure` was said."""

    async def game(task: dict[str, str]) -> dict[str, float]:
        first, second = await ask("first", f"say {task['letter']}"), await ask("second", f"say {task['letter']}")
        lead = float(len(set(first)) - len(set(second)))
        return {"first": lead, "second": -lead}

    evaluation = {"tasks": str(write(trainer, [{"id": f"h{n}", "letter": "d"} for n in range(8)]))}
    weights = {"first/first": 1.0, "second/second": 1.0}
    settings = {"recipe": "dr_mas", "rewards": {"weights": weights}, "plan": INDEPENDENT, "steps": 1}
    trainer(application(game), **settings, evaluation=evaluation)
    said = " ".join(trainer.said.split())
    why = "first, second play against each other: their held-out rewards always add up to the same"
    assert f"held-out, single samples: no figure: {why}" in said
    assert said.index(why) < said.index("step 1/1") and said.count(why) == 1
    assert "first against the untrained model" in said


def test_without_an_outcome_of_held_out_tasks_the_reason_is_said(trainer: Trainer) -> None:
    async def unknown(task: dict[str, str]) -> float | None:
        await ask("first", f"say {task['letter']}")
        return None

    app = application(unknown)
    app.judge(lambda episodes, task: [0.0, 1.0])
    evaluation = {"tasks": str(write(trainer, [{"id": "h", "letter": "d"}]))}
    trainer(app, plan=INDEPENDENT, steps=1, evaluation=evaluation)
    said = " ".join(trainer.said.split())
    assert "single samples: no figure: the workflow returned no outcome for 1 episode" in said


def test_a_plain_outcome_is_shown_as_one_that_is_not_trained_on(trainer: Trainer) -> None:
    async def slow(task: dict[str, str]) -> dict[str, float]:
        return {"correct": float("a" in await ask("first", f"say {task['letter']}")), "minutes": 2.0}

    evaluation = {"tasks": str(write(trainer, [{"id": f"h{n}", "letter": "d"} for n in range(4)]))}
    weights = {"correct": 1.0, "minutes": -0.5}
    settings = {"rewards": {"weights": weights}, "plan": INDEPENDENT, "steps": 1, "evaluation": evaluation}
    summary = trainer(application(slow), **settings)
    said = " ".join(trainer.said.split())
    assert said.count("plain outcome (not what is trained on) 2.") == 2, "before the first step, and after it"
    (plain,) = (change for change in summary.headline.changes if "plain" in change.name)
    assert plain.name == "held-out plain outcome (not what is trained on)"


def write(trainer: Trainer, tasks: list[dict[str, str]]) -> Path:
    file = trainer.folder / "held.jsonl"
    file.write_text("".join(json.dumps(task) + "\n" for task in tasks))
    return file
