"""Training policies of two base models with different vocabularies, templates and context lengths in one run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import ConfigError, RunError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.storage.open_store import open_store
from tests.integrations import tiny_models
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application


@pytest.fixture(scope="session")
def other_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base of a larger vocabulary with another chat template than the tiny one's."""
    folder = tmp_path_factory.mktemp("other") / "base"
    tiny_models.build("llama", folder)
    return folder


def team(other: Path, **more: Any) -> list[dict[str, Any]]:
    return [
        {"name": "one", "roles": ["first"], **more},
        {"name": "two", "roles": ["second"], "model": str(other), **more},
    ]


def evens(candidate: Any, call: Any, task: Any) -> float:
    return sum(id % 2 for id in candidate.token_ids) / 4


APP = application(first=evens, second=evens)


def test_each_policy_has_the_tokens_of_its_base(trainer: Trainer, tiny_base: Path, other_base: Path) -> None:
    assert trainer(APP, policy=team(other_base)).finished
    formats = {"first": ChatTemplate.load(tiny_base), "second": ChatTemplate.load(other_base)}
    with open_store(trainer.folder / "run" / "records.db", read_only=True) as store:
        calls = [call for episode in store.episodes() for call in store.calls(episode.id)]
        assert {call.role for call in calls if call.episode} == {"first", "second"}
        for call in calls:
            messages = [store.message(id) for id in call.messages]
            assert call.prompt and list(store.token_ids(call.prompt)) == formats[call.role].render(messages, None)
    for line in trainer.metrics():
        assert line["policies"].keys() == {"one", "two"}
        assert all(of["sampler_gap_max"] < 1e-4 for of in line["policies"].values())


def test_a_run_goes_on_with_bases_that_have_moved(trainer: Trainer, other_base: Path) -> None:
    moving = trainer.folder / "moving"
    shutil.copytree(other_base, moving)
    trainer(APP, policy=team(moving), steps=1)
    held = json.loads((trainer.folder / "run" / "run.json").read_text())["held"]
    assert held["bases"].keys() == {"two"} and held["bases"]["two"] != held["base"]
    moved = trainer.folder / "elsewhere"
    moving.rename(moved)
    with pytest.raises(ConfigError, match=r"policy.model = '.*moving' \(the base of policy 'two'\)"):
        trainer.resume(APP, steps=2)
    assert trainer.resume(APP, steps=2, policy=team(moved)).steps == 2
    tiny_models.build("llama", third := trainer.folder / "third", seed=1)
    with pytest.raises(RunError, match="base model of policy 'two' is not the one"):
        trainer.resume(APP, steps=3, policy=team(third))
