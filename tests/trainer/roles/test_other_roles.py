"""A role that has no policy: who answers it, the same in training and evaluation, and where it is said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integrations.provider import Provider, serving
from tests.trainer.conftest import Trainer
from tests.trainer.rewards.test_rewards import calls_of
from tests.trainer.tiny_app import application, ask, converse, letters

TASKS = [{"id": str(i), "letter": letter} for i, letter in enumerate("abcd")]
"""A run looks around with the first three."""


async def late(task: Any) -> dict[str, float]:
    if task["letter"] == "d":
        await ask("critic", "check")
    return await converse(task)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    with serving() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


@pytest.mark.parametrize(("others", "policy", "asked"), [("frozen", "base@0", 0), ("provider", "None", 1)])
def test_a_role_first_seen_late_does_not_fail_its_episode(
    trainer: Trainer, provider: Provider, others: str, policy: str, asked: int
) -> None:
    app = application(late, first=letters)
    trainer(app, TASKS, steps=1, tasks_per_step=4, other_roles=others)
    (line,) = trainer.metrics()
    assert (line["failed"], line["episodes"]) == (0, 4)
    assert [str(c.policy) for c, _ in calls_of(trainer.folder / "run") if c.role == "critic"] == [policy]
    assert len(provider.requests) == asked
    who = {"frozen": "the untrained model", "provider": "its own provider"}[others]
    said = f"role 'critic' has no policy: {who} answers its calls, which are not trained on (other_roles = '{others}')"
    assert trainer.said.splitlines().count(said) == 1


def test_why_episodes_fail_is_said_once_for_each_cause(trainer: Trainer) -> None:
    async def breaks(task: Any) -> dict[str, float]:
        if task["letter"] in "cd":
            raise ValueError(f"no {'rhyme' if task['letter'] == 'c' else 'reason'}")
        return await converse(task)

    trainer(application(breaks, first=letters), TASKS, steps=2, tasks_per_step=4)
    causes = [line for line in trainer.said.splitlines() if line.startswith("an episode of task")]
    assert sorted(line.partition(" raised ")[2].partition(" (")[0] for line in causes) == [
        "ValueError: no reason",
        "ValueError: no rhyme",
    ]
