"""A batch of episodes: a fault that all of them have is one error."""

from __future__ import annotations

import asyncio

import pytest

import cotune
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow_of
from cotune.errors import ConfigError
from cotune.recording.hooks import hooks
from cotune.recording.recorder import Nowhere
from cotune.records.structs import Task


def test_a_framework_that_is_refused_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise ConfigError("openai", "0.1", "is too old", "Install another one.")

    async def solve(task: object) -> float:
        return 1.0

    monkeypatch.setattr(hooks, "activators", [refuse])
    tasks = [Task(id=str(number), input=number) for number in range(3)]
    batch = EpisodeBatch(tasks=tasks, sink=Nowhere(), phase="trace")
    with pytest.raises(ConfigError, match="too old"):
        asyncio.run(rollout(workflow_of(cotune.workflow(solve)), batch))
