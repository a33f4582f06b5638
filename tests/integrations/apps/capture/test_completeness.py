"""Recorded is what a server saw: as many calls, with equal bodies, for every example and every kind of application."""

from __future__ import annotations

import asyncio
import functools
import importlib
import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from autogen_ext.models.openai import OpenAIChatCompletionClient
from crewai import LLM
from langchain_openai import ChatOpenAI

from benchmarks import stress
from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import Workflow, load_workflow, workflow, workflow_of
from cotune.records.structs import CallRecord, Message, Task
from tests.examples.applications import imported_again
from tests.integrations.provider import Provider, completion, event, json_reply
from tests.integrations.recorded import Sink

ROOT = Path(__file__).parents[4]
Body = dict[str, Any]


def recorded(sink: Sink) -> Counter[str]:
    """Bodies of the recorded calls, put together from their messages, tools and parameters."""
    stored = {record.id: record.body for record in sink if isinstance(record, Message)}
    return Counter(canonical(_body(call, stored)) for call in sink if isinstance(call, CallRecord))


def _body(call: CallRecord, stored: dict[str, Any]) -> Body:
    body = {**call.params, "model": call.model, "messages": [stored[i] for i in call.messages]}
    if call.tools:
        body["tools"] = stored[call.tools]
    return {**body, "stream": True} if call.streamed else body


def canonical(body: Body) -> str:
    body = {key: value for key, value in body.items() if not (key == "stream" and value is False)}
    return json.dumps(body, sort_keys=True)


def answers(body: Body, number: int, each_tool: bool = False) -> tuple[int, str, list[Any]]:
    """Calls the tools that the system text asks for (or the first there is), once; else says something."""
    offered = [tool["function"]["name"] for tool in body.get("tools") or []]
    wanted = offered[:1] if each_tool else re.findall(r"USES=(\w+)", json.dumps(body["messages"][0]))
    used = any(message.get("role") == "tool" for message in body["messages"])
    names = [name for name in wanted if name in offered and not used]
    message: Body = {"role": "assistant", "content": f"<<{number}>>"}
    if names:
        schema = next(t["function"]["parameters"] for t in body["tools"] if t["function"]["name"] == names[0])
        function = {"name": names[0], "arguments": json.dumps(dict.fromkeys(schema["properties"], "go"))}
        message |= {"content": None, "tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
    if not body.get("stream"):
        return json_reply(completion(message))
    return 200, "text/event-stream", [event(message), event({}, "stop"), b"data: [DONE]\n\n"]


def episodes(flow: Workflow, tasks: list[Task]) -> Sink:
    """Run a workflow on all tasks at once, answered by the provider alone."""
    sink = Sink()

    async def run() -> None:
        for outcome in await asyncio.gather(*(run_episode(flow, task, sink=sink) for task in tasks)):
            assert outcome.error is None
            assert not outcome.live.warnings

    asyncio.run(run())
    return sink


@pytest.mark.parametrize("app", stress.APPS, ids=lambda app: app.__name__)
def test_kinds_of_applications(app: Callable[[str], Any], provider: Provider, monkeypatch: pytest.MonkeyPatch):
    provider.reply = answers
    at = {"base_url": provider.url, "api_key": "none", "max_retries": 0}
    info = {**stress.abilities, "family": "unknown"}
    monkeypatch.setattr(stress, "chat", ChatOpenAI(model="m", **at))
    monkeypatch.setattr(stress, "crew_llm", LLM(model="openai/gpt-4o-mini", **at))
    monkeypatch.setattr(stress, "team_client", OpenAIChatCompletionClient(model="m", model_info=info, **at))
    monkeypatch.setattr(stress, "sdk", openai.OpenAI(**at))
    monkeypatch.setattr(stress, "async_sdk", openai.AsyncOpenAI(**at))

    if asyncio.iscoroutinefunction(app):

        async def solve(given: Any) -> float:
            return float(len(await app(given["id"])))
    else:

        def solve(given: Any) -> float:
            return float(len(app(given["id"])))

    sink = episodes(workflow_of(workflow(solve)), [Task(id=f"e{i}", input={"id": f"e{i}"}) for i in range(3)])
    assert provider.requests
    assert recorded(sink) == Counter(map(canonical, provider.requests))


EXAMPLES = {
    "judged": "judged.products",
    "plan_path": "plan_path.grid",
    "tool_agent": "tool_agent.shop",
    "word_problems": "word_problems.tasks",
    "workloads.code": "workloads.code.tasks",
    "workloads.code_team": "workloads.code_team.tasks",
    "workloads.maths": "workloads.maths.tasks",
    "workloads.pictures": "workloads.pictures.tasks",
    "workloads.plan_path_autogen": "plan_path.grid",
    "workloads.plan_path_checked": "workloads.plan_path_checked.tasks",
    "workloads.plan_path_crewai": "plan_path.grid",
    "workloads.search": "workloads.search.tasks",
    "workloads.sokoban": "workloads.sokoban.tasks",
    "workloads.sudoku": "workloads.sudoku.tasks",
}
"""By example: the module that makes its tasks."""
OTHERS = ("designed_team", "workloads.bfcl", "workloads.self_play")


def some_tasks(name: str) -> list[Any]:
    if name == "designed_team":  # the provider's answers are no designs: only a fixed team gets to its agents
        make_tasks = importlib.import_module("examples.designed_team.tasks").make_tasks
        return [*make_tasks(1, seed=1), *make_tasks(2, seed=1, team="an agent each")]
    if name == "workloads.bfcl":  # whose tasks are those of a benchmark
        return importlib.import_module("examples.workloads.bfcl.tasks").make_tasks("turns")[:3]
    if name == "workloads.self_play":
        return list(
            importlib.import_module("examples.workloads.self_play.tasks").make_tasks(3, seed=1, game="negotiation")
        )
    return list(importlib.import_module(f"examples.{EXAMPLES[name]}").make_tasks(3, seed=1))


@pytest.mark.parametrize("name", [*EXAMPLES, *OTHERS])
def test_examples(name: str, provider: Provider):
    provider.reply = functools.partial(answers, each_tool=True)
    with imported_again("examples."):  # examples make their clients when they are imported
        flow = load_workflow(f"examples.{name}.train:{'negotiation' if name.endswith('self_play') else 'solve'}")
        tasks = some_tasks(name)
        sink = episodes(flow, [Task(id=f"e{i}", input=task) for i, task in enumerate(tasks)])
    assert provider.requests
    assert recorded(sink) == Counter(map(canonical, provider.requests))


def test_no_example_is_missing_here():
    folders = (path.parent.relative_to(ROOT / "examples") for path in (ROOT / "examples").rglob("app.py"))
    assert {".".join(folder.parts) for folder in folders} == {*EXAMPLES, *OTHERS}
