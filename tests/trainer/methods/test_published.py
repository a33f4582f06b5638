"""Recipes of published systems by `train`: from what a workflow returns to weights that move."""

from __future__ import annotations

from tests.trainer.tiny_app import application, ask, letters


async def main_and_sub(task):
    """The main agent asks a sub-agent once or twice, by what it says itself."""
    said = await ask("main", f"say {task['letter']}")
    for number in range(1 + ("a" in said)):
        await ask("sub", f"{number}: {said}")
    return {"correct": said.count(task["letter"]) / 4}


def of_sub(candidate, call, task):
    return {"format": 1.0, "judge": letters(candidate, call, task)}


def of_main(candidate, call, task):
    return {"format": 1.0}


async def duel(task):
    """Each player says letters; the share of low ones decides, and the roles' rewards are opposite."""
    said = {role: await ask(role, "say") for role in ("white", "black")}
    low = {role: sum(letter in "abcdefgh" for letter in text) for role, text in said.items()}
    margin = (low["white"] - low["black"]) / 4
    return {"white": margin, "black": -margin}


def test_a_recipe_with_weights_by_role_over_whole_episodes_although_there_are_scorers(trainer):
    trainer(application(main_and_sub, main=of_main, sub=of_sub), recipe="m_grpo", steps=1, policies="full")
    assert "plan independent (k=4), recipe m_grpo" in trainer.said
    (line,) = trainer.metrics()
    assert line["left_out"].get("missing_reward", 0) == 0
    assert all(line["roles"][role]["kept"] > 0 and line["policies"][role]["steps"] > 0 for role in ("main", "sub"))


def test_opposite_rewards_of_two_seats_train_two_policies(trainer):
    trainer(application(duel), recipe="self_redteam", steps=1, policies="lora")
    (line,) = trainer.metrics()
    white, black = (line["roles"][role]["reward"] for role in ("white", "black"))
    assert white == -black
    assert line["left_out"].get("tie", 0) % 2 == 0
    assert all(line["policies"][role]["steps"] > 0 for role in ("white", "black"))
