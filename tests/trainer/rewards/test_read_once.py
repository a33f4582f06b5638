"""A step weighs and reports the rewards that its samples were collected with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest

from cotune.storage.sqlite_store import SqliteStore
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters


def test_the_rewards_of_a_step_are_read_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: Counter[str] = Counter()
    rewards = SqliteStore.rewards

    def counted(store: SqliteStore, targets: Iterable[str]) -> Any:
        asked = list(targets)
        read.update(asked)
        return rewards(store, asked)

    monkeypatch.setattr(SqliteStore, "rewards", counted)
    trainer(application(first=letters, second=letters), plan={"k": 2}, steps=1)
    assert set(read.values()) == {1}
