"""A small run that was really trained, records that are hostile, and a headless Chromium."""

from __future__ import annotations

import functools
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from selenium import webdriver

from benchmarks.viewer import browser as open_browser
from cotune.integrations.web.viewer.server import viewing
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode, FeedbackRecord, Message, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.train import train
from tests.trainer.tiny_app import TASKS, application, ask, build_base, letters

SCRIPT = "<script>document.title = 'taken over'</script><img src=x onerror=\"document.title = 'taken over'\">"
STEPS = 3


async def _talk(task: Any) -> Any:
    """The second role reads what the first said. A task whose letter is c fails in training."""
    heard = await ask("first", f"say {task['letter']}")
    said = await ask("second", f"after {heard}: {task['letter']}")
    if task["letter"] == "c" and len(heard) > 100:
        raise ValueError("never")
    return {"team": said.count("a") / 4, "success": task["letter"] != "c"}


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of a tree plan with two roles and held-out tasks."""
    from cotune.integrations.models.transformers.sampler import TransformersSampler

    folder = tmp_path_factory.mktemp("viewed")
    held_out = folder / "held_out.jsonl"
    held_out.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    settings = {
        "model": str(build_base(folder / "base")),
        "steps": STEPS,
        "tasks_per_step": 3,
        "plan": {"k": 4},
        "learner": {"lr": 3e-3},
        "evaluation": {"tasks": str(held_out), "every": 1},
    }
    with pytest.MonkeyPatch.context() as patch:
        opened = functools.partial(TransformersSampler.open, host="thread", device="cpu")
        patch.setattr("cotune.integrations.models.transformers.sampler.TransformersSampler.open", opened)
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        app = application(_talk, first=letters, second=letters)
        train(app, TASKS, settings, out=folder / "trained", console=Console(file=io.StringIO()))
    return folder / "trained"


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records in which every text is HTML with a script: the names of role and task, messages, tool calls, errors."""
    folder = tmp_path_factory.mktemp("hostile") / "traced"
    folder.mkdir()
    said = {
        "role": "assistant",
        "content": SCRIPT,
        "tool_calls": [{"id": SCRIPT, "function": {"name": SCRIPT, "arguments": json.dumps({"x": SCRIPT})}}],
    }
    asked = {"role": "user", "name": SCRIPT, "content": [{"type": "text", "text": SCRIPT}, {"kind": SCRIPT}]}
    result = {"role": "tool", "tool_call_id": SCRIPT, "content": f"{SCRIPT}\x1b[2J</script><!--"}
    with SqliteStore.open(folder) as store:
        store.write(
            [
                Message("m1", asked),
                Message("m2", result),
                CallRecord(
                    id="call1",
                    episode="episode1",
                    role=SCRIPT,
                    step=0,
                    turn=0,
                    messages=("m1", "m2"),
                    model=SCRIPT,
                    error=SCRIPT,
                    redacted=True,
                    started=1.0,
                    latency=1.0,
                    candidates=(Candidate(index=0, text=SCRIPT, message=said, finish_reason=SCRIPT),),
                    chosen=0,
                ),
                RewardRecord(candidate_id("call1", 0), SCRIPT, 1.0),
                RewardRecord("episode1", SCRIPT, 1.0),
                FeedbackRecord("episode1", SCRIPT, f"why {SCRIPT}"),
                FeedbackRecord(candidate_id("call1", 0), SCRIPT, f"{SCRIPT}\x1b[2J"),
                Episode(
                    id="episode1",
                    task=Task(id=SCRIPT, input=SCRIPT),
                    workflow=SCRIPT,
                    phase=SCRIPT,
                    status="error",
                    error=SCRIPT,
                    calls=1,
                    metrics={SCRIPT: 1.0},
                ),
            ]
        )
    ending = {"status": SCRIPT, "error": SCRIPT, "success": False}
    modes = {name: {"episodes": 1, "failed": {SCRIPT: 1}, "endings": {SCRIPT: ending}} for name in (SCRIPT, "trained")}
    compared = {"label": SCRIPT, "against": "trained", "verdict": SCRIPT}
    about = {"evaluations": modes, "comparisons": [compared], "notes": [SCRIPT], "tasks": SCRIPT}
    (folder / "evaluation.json").write_text(json.dumps(about))
    return folder


@pytest.fixture(scope="session")
def site(run: Path) -> Iterator[str]:
    """Address of the viewer over the trained run."""
    with viewing([run]) as server:
        yield server.url


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """Headless Chromium: `make install` brings it on Debian."""
    opened = open_browser(str(tmp_path_factory.mktemp("profile")))
    opened.set_page_load_timeout(120)
    yield opened
    opened.quit()
