"""Roles by a function, through train, eval, export and `deployed`: on plain SDK applications that name none."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest

import cotune
from cotune.adapters.manifest import read_manifest
from cotune.cli.main import main
from cotune.config.train import TrainConfig
from cotune.episodes.episode import run_episode
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import WorkflowFunction
from cotune.recording.roles import CallRequest
from cotune.records.structs import CallRecord, Record, Task
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.before.answers.drawn import DrawnAnswers
from cotune.trainer.before.answers.responder import CheckResponder
from cotune.trainer.evaluation.evaluate import evaluate
from cotune.trainer.rollout.app_source import app_source
from cotune.trainer.rollout.wire import Setup
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import TASKS, client, letters

ME = "tests.trainer.roles.test_roles_by"


class Sink(list[Record]):
    def write(self, records: Sequence[Record]) -> None:
        self.extend(records)


def _asked(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], "max_tokens": 4}


async def ask_llm(text: str) -> str:
    """The one helper of an application: what calls it is the agent."""
    reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(**_asked(text))
    return reply.choices[0].message.content or ""


async def plan(letter: str) -> str:
    return await ask_llm(f"say {letter}")


async def write(heard: str, letter: str) -> str:
    return await asyncio.create_task(ask_llm(f"after {heard}: {letter}"))


def who(call: CallRequest) -> str:
    """The function that calls the helper."""
    helper, agent = call.callers[:2]
    assert helper == "ask_llm"
    return agent


@cotune.workflow(roles=who)
async def by_function(task: Mapping[str, str]) -> float:
    said = await write(await plan(task["letter"]), task["letter"])
    return said.count(task["letter"]) / 4


class Planner:
    async def plan(self, letter: str) -> str:
        reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(**_asked(f"say {letter}"))
        return reply.choices[0].message.content or ""


async def writer(letter: str) -> str:
    reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(**_asked(f"write {letter}"))
    return reply.choices[0].message.content or ""


@cotune.workflow
async def unnamed(task: Mapping[str, str]) -> float:
    """Its roles are named by the configuration alone."""
    heard, said = await asyncio.gather(Planner().plan(task["letter"]), writer(task["letter"]))
    return (heard + said).count(task["letter"]) / 8


for _role in ("plan", "write"):
    by_function.scorer(_role)(letters)
for _role in ("Planner.plan", "writer"):
    unnamed.scorer(_role)(letters)


class Trained(NamedTuple):
    app: WorkflowFunction
    name: str
    roles: list[str]
    given: Any
    """What `deployed` is told of roles."""
    run: Path
    versions: Mapping[str, int]


@pytest.fixture(scope="module", params=["by_function", "unnamed"])
def trained(request: pytest.FixtureRequest, module_trainer: Trainer) -> Trained:
    named = request.param == "by_function"
    app, settings = (by_function, {}) if named else (unnamed, {"roles_by": "caller"})
    summary = module_trainer(app, steps=1, policies="lora", to=request.param, sampling={"max_tokens": 4}, **settings)
    roles = ["plan", "write"] if named else ["Planner.plan", "writer"]
    given = who if named else "caller"
    return Trained(app, request.param, roles, given, module_trainer.folder / request.param, summary.versions)


def test_each_role_trains_a_policy_of_its_own(trained: Trained) -> None:
    assert trained.versions == dict.fromkeys(trained.roles, 1)
    with SqliteStore.open(trained.run / "records.db", read_only=True) as store:
        played = {
            (c.role, str(c.policy)) for e in store.episodes(EpisodeFilters(phase="train")) for c in store.calls(e.id)
        }
    assert played == {(role, f"{role}@0") for role in trained.roles}


def test_an_evaluation_names_the_roles_as_the_run_did(trained: Trained) -> None:
    found = evaluate(trained.run, trained.app, TASKS, modes=("trained",)).evaluations["trained"]
    assert {role: r.policies for role, r in found.roles.items()} == {r: (f"{r}@1",) for r in trained.roles}
    assert [r.calls for r in found.roles.values()] == [3, 3]


def test_deployed_answers_each_role_by_its_own_policy(trained: Trained, tmp_path: Path) -> None:
    assert main(["export", str(trained.run), "--out", str(tmp_path / "adapters")]) == 0
    assert [entry.role for entry in read_manifest(tmp_path / "adapters").roles] == trained.roles
    deployment = cotune.deployed(tmp_path / "adapters", roles=trained.given)

    async def inside() -> None:
        async with deployment:
            await asyncio.gather(*(trained.app(task) for task in TASKS))

    asyncio.run(inside())
    assert deployment.calls == {(role, "ok"): 3 for role in trained.roles}
    assert not deployment.unlisted and not deployment.passed_through


@pytest.mark.parametrize(
    ("app", "roles_by", "roles"),
    [("by_function", "", ["plan", "write"]), ("unnamed", "caller", ["Planner.plan", "writer"])],
)
def test_a_rollout_worker_names_the_roles_as_the_driver_does(
    app: str, roles_by: str, roles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What crosses is the setup: a worker loads the application from it."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setattr(sys, "path", list(sys.path))
    source = app_source(f"{ME}:{app}", TrainConfig(model="base", roles_by=roles_by))
    setup = msgspec.msgpack.decode(msgspec.msgpack.encode(Setup(app=source)), type=Setup)
    sink = Sink()
    responder = CheckResponder(answers=DrawnAnswers(run=0))
    run_sync(run_episode(setup.app.load(), Task(id="a", input=TASKS[0]), sink=sink, responder=responder))
    assert sorted(record.role for record in sink if isinstance(record, CallRecord)) == roles
