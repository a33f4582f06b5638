"""The redactor of a run, in a file named from the folder where it was started, where the run's records are used again
from another folder, or after the project has moved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.train import resume
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS

APP = """
import cotune
from tests.trainer.tiny_app import application, letters

solve = application(first=letters, second=lambda candidate, call, task: cotune.Feedback(1.0, f"after {task['letter']}"))
"""
PRIVACY = """
import cotune
from cotune.methods import C3Branches, centred

class Centred(C3Branches):
    def advantages(self, step, rewards):
        advantages = 0.0 * rewards
        for group in step.groups:
            advantages[group] = centred(rewards[group])
        return advantages


hide = cotune.recording.redaction.each_text(lambda text: text.replace("say", "[hidden]").replace("after", "[hidden]"))
"""


@pytest.fixture(scope="module")
def started(module_trainer: Trainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a project with a run `redacted` of one step, started there by relative names."""
    project = tmp_path_factory.mktemp("projects") / "first"
    project.mkdir()
    (project / "app.py").write_text(APP)
    (project / "privacy.py").write_text(PRIVACY)
    (project / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        settings = {"redact": "privacy.py:hide", "keep_token_ids": True, "plan": {"kind": "replay", "k": 2}}
        settings["recipe"] = "privacy.py:Centred"
        module_trainer("app.py:solve", "tasks.jsonl", steps=1, to=str(project / "redacted"), **settings)
    moved = project.rename(project.with_name("moved"))
    elsewhere = moved.parent / "elsewhere"
    elsewhere.mkdir()
    return moved


def stored(records: Path, phase: str) -> str:
    """All messages and all feedback of a phase."""
    with SqliteStore.open(records, read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase=phase)))
        calls = [call for episode in episodes for call in store.calls(episode.id)]
        asked = [store.message(name) for call in calls for name in call.messages]
        feedback = store.feedback([f"{call.id}.{c.index}" for call in calls for c in call.candidates])
    assert calls
    return json.dumps([asked, list(feedback.values())])


def evaluated(project: Path) -> Path:
    words = [f"{project}/app.py:solve", "--tasks", f"{project}/tasks.jsonl", "--run", f"{project}/redacted"]
    assert main(["eval", *words, "--modes", "trained", "--out", "evaluated"]) == 0
    return Path("evaluated")


def replayed(project: Path) -> Path:
    run = f"{project}/redacted"
    assert main(["replay", run, "--all", "--limit", "2", "--model", run, "--out", "replayed"]) == 0
    return Path("replayed")


def resumed(project: Path) -> Path:
    resume(project / "redacted", changes={"steps": 2})
    return project / "redacted"


@pytest.mark.parametrize(("again", "phase"), [(evaluated, "eval-trained"), (replayed, "replay"), (resumed, "train")])
def test_what_is_recorded_again_passes_the_redactor_of_the_run(
    started: Path, again: Callable[[Path], Path], phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(started.parent / "elsewhere")
    found = stored(again(started), phase)
    assert "[hidden]" in found and "say" not in found and "after" not in found
