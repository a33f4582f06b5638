"""Checkpoints are judged by what the recipe trains on: its mix of rewards, per policy, in the roles of the export."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.storage.checkpoints import Best, read_best
from tests.trainer.conftest import Trainer
from tests.trainer.run.test_best_checkpoint import held_out
from tests.trainer.tiny_app import application, ask, letters

INDEPENDENT = {"kind": "independent", "k": 2}


def best_of(trainer: Trainer) -> dict[str, Best]:
    return read_best(trainer.folder / "run" / "checkpoints")


def test_the_best_checkpoint_and_patience_go_by_the_weights(trainer: Trainer) -> None:
    """By the plain sum, 2, 5 and 1.5, the second evaluation after the base's is the best, which is the worst."""
    script = [(0.0, 0.0), (1.0, 1.0), (0.0, 5.0), (1.0, 0.5)]

    async def timed(task: Any) -> dict[str, float]:
        correct, minutes = script.pop(0) if task["id"] == "held" else (0.0, float(task["id"] == "a"))
        await ask("first", f"say {task['letter']}")
        return {"correct": correct, "minutes": minutes}

    rewards = {"weights": {"correct": 1.0, "minutes": -0.5}}
    evaluation = held_out(trainer, keep_best=True, patience=2)
    summary = trainer(application(timed), steps=3, evaluation=evaluation, plan=INDEPENDENT, rewards=rewards)
    assert (summary.steps, summary.ended) == (3, "")
    assert best_of(trainer) == {"first": Best("step-000003", 0.75)}
    figures = [line["held_out"] for line in trainer.metrics()]
    assert [(f["reward"], f["outcome"], f["reward/first"]) for f in figures] == [
        (0.5, 2.0, 0.5), (-2.5, 5.0, -2.5), (0.75, 1.5, 0.75),
    ]  # fmt: skip


def test_a_failed_held_out_episode_counts(trainer: Trainer) -> None:
    """The second checkpoint crashes on all held-out tasks but one, on which it is better."""
    played = [0]

    async def crashing(task: Any) -> float:
        await ask("first", f"say {task['letter']}")
        if not task["id"].startswith("held"):
            return float(task["id"] == "a")
        played[0] += 1
        if played[0] > 8 and task["id"] != "held-0":
            raise ValueError("boom")
        return 0.85 if played[0] > 8 else 0.5

    evaluation = held_out(trainer, keep_best=True)
    lines = "".join(json.dumps({"id": f"held-{i}", "letter": "h"}) + "\n" for i in range(4))
    (trainer.folder / "held.jsonl").write_text(lines)
    trainer(application(crashing), evaluation=evaluation, plan=INDEPENDENT, concurrency=1)
    figures = [line["held_out"] for line in trainer.metrics()]
    assert [(f["reward"], f["reward_n"], f["failed"]) for f in figures] == [(0.5, 4, 0), (0.85 / 4, 4, 3)]
    assert best_of(trainer) == {"first": Best("step-000001", 0.5)}


def test_roles_that_play_against_each_other_are_judged_against_the_untrained_model(trainer: Trainer) -> None:
    def letters_in(text: str) -> float:
        return sum(letter in "abcdefgh" for letter in text) / 4

    async def play(task: Any) -> dict[str, float]:
        white = letters_in(await ask("white", f"say {task['letter']}"))
        black = letters_in(await ask("black", f"answer {task['letter']}"))
        return {"white": white - black, "black": black - white}

    evaluation = held_out(trainer, keep_best=True)
    tasks = "".join(json.dumps({"id": letter, "letter": letter}) + "\n" for letter in "hijklm")
    (trainer.folder / "held.jsonl").write_text(tasks)
    settings = {"recipe": "spiral", "policies": "shared", "plan": INDEPENDENT}
    summary = trainer(application(play), evaluation=evaluation, **settings)
    figures = [line["held_out"] for line in trainer.metrics()]
    for found in figures:
        assert not {"reward", "outcome"} & found.keys(), "the sum of both seats is always the same"
        assert found["reward/white"] == -found["reward/black"]
        assert {"against_untrained/white", "against_untrained/black"} <= found.keys()
    won = [(f["against_untrained/white"] + f["against_untrained/black"]) / 2 for f in figures]
    assert best_of(trainer)["shared"].figure == pytest.approx(max(won))
    said = " ".join(trainer.said.split())
    assert "black, white play against each other: their held-out rewards always add up to the same" in said
    shown = f"white against the untrained model {figures[-1]['against_untrained/white']:.3f}"
    assert shown in said, "what chooses the checkpoint is shown"
    (first,) = [c for c in summary.headline.changes if c.name == "held-out reward of white against the untrained model"]
    assert first.last.mean == figures[-1]["against_untrained/white"]
    assert not [change.name for change in summary.headline.changes if "outcome" in change.name]


def test_figures_go_to_the_policies_that_play_in_evaluations(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step lets another policy play a role; the export does not."""
    monkeypatch.setattr("cotune.records.policies.STEPS_BETWEEN_SWAPS", 1)
    routing = {"swap": ["first", "second"]}
    held = {"first": [0.0, 0.9, 0.1], "second": [0.0, 0.1, 0.2]}

    def scripted(role: str) -> Any:
        def scorer(candidate: Any, call: Any, task: Any) -> float:
            return held[role].pop(0) if task["id"] == "held" else letters(candidate, call, task)

        return scorer

    app = application(first=scripted("first"), second=scripted("second"))
    trainer(app, steps=2, policies="full", evaluation=held_out(trainer, keep_best=True), routing=routing)
    assert best_of(trainer) == {"first": Best("step-000001", 0.9), "second": Best("step-000002", 0.2)}


def test_the_export_says_which_policy_has_no_best(trainer: Trainer, capsys: pytest.CaptureFixture[str]) -> None:
    """The second role is never called on held-out tasks."""

    async def alone(task: Any) -> float:
        await ask("first", f"say {task['letter']}")
        if task["id"] != "held":
            await ask("second", f"say {task['letter']}")
        return float(task["id"] in ("a", "held"))

    trainer(application(alone), evaluation=held_out(trainer, keep_best=True), plan=INDEPENDENT)
    assert list(best_of(trainer)) == ["first"]
    assert main(["export", str(trainer.folder / "run"), "--out", str(trainer.folder / "out"), "--step", "best"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "second has no best checkpoint, as no evaluation judged it: this is its newest one" in said


def test_games_without_a_winner_judge_nobody(trainer: Trainer) -> None:
    """The second evaluation has draws alone, which do not tell a game from a team that fails: its 0 is no figure of
    the kind that the first one has, where white loses."""
    played = [0]  # two tasks: of the base, of both roles, and of each role against the untrained model

    async def play(task: Any) -> dict[str, float]:
        await ask("white", f"say {task['letter']}")
        await ask("black", f"answer {task['letter']}")
        white = float(task["id"] == "a")
        if task["id"].startswith("held"):
            white, played[0] = (-1.0 if played[0] < 8 else 0.0), played[0] + 1
        return {"white": white, "black": -white}

    evaluation = held_out(trainer, keep_best=True)
    tasks = "".join(json.dumps({"id": f"held-{i}", "letter": "h"}) + "\n" for i in range(2))
    (trainer.folder / "held.jsonl").write_text(tasks)
    settings = {"recipe": "spiral", "policies": "full", "plan": INDEPENDENT}
    trainer(application(play), evaluation=evaluation, **settings)
    first, second = (line["held_out"] for line in trainer.metrics())
    assert first["against_untrained/white"] == -1.0 and "against_untrained/white" not in second
    assert best_of(trainer) == {"white": Best("step-000001", -1.0), "black": Best("step-000001", 1.0)}
    assert "no held-out game had a winner in this evaluation" in " ".join(trainer.said.split())
