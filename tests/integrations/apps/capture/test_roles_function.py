"""Roles by a function of the user's, on the plain SDK: what it sees, who overrules it, and what a faulty one costs."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

import cotune
from cotune.cli.main import main
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import load_roles, load_workflow
from cotune.errors import ConfigError, WorkflowError
from cotune.recording.roles import CallRequest
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.recorded import Recorded


def ask(text: str, **options: Any) -> str:
    """What an application's own helper looks like: every agent asks through it."""
    messages = [{"role": "system", "content": f"You are {text}."}, {"role": "user", "content": text}]
    reply = openai.OpenAI().chat.completions.create(model=options.pop("model", "m"), messages=messages, **options)
    return str(reply.choices[0].message.content)


class Planner:
    async def plan(self, text: str) -> str:
        reply = await openai.AsyncOpenAI().responses.create(model="m", instructions="Plan.", input=text)
        return reply.output_text

    def outline(self, parts: list[str]) -> list[str]:
        return [openai.OpenAI().chat.completions.create(model="m", messages=[user(p)]).id for p in parts]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_the_caller_names_the_role(nowhere, record: Recorded) -> None:
    @cotune.workflow(roles="caller")
    async def solve(task):
        await Planner().plan("one")
        await asyncio.gather(Planner().plan("two"), Planner().plan("three"))
        await asyncio.to_thread(Planner().outline, ["four"])
        with cotune.role("judge"):
            await asyncio.to_thread(ask, "five")
        return 1.0

    record(solve, lambda call: "done")
    assert record.roles == ["Planner.plan"] * 3 + ["Planner.outline", "judge"]
    assert [call.turn for call in record.calls] == [0, 1, 2, 0, 0]


def test_a_function_sees_the_call(nowhere, record: Recorded) -> None:
    seen: list[CallRequest] = []
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}

    def write() -> str:
        return ask("a writer", model="big", tools=[tool], temperature=0.5)

    def who(call: CallRequest) -> str | None:
        seen.append(call)
        assert (call.caller, call.callers[1]) == ("ask", write.__qualname__)
        return call.messages[0]["content"].split()[-1].strip(".")

    def solve(task):
        write()
        return 1.0

    record(cotune.workflow(solve, roles=who), lambda call: "done")
    assert record.roles == ["writer"]
    (call,) = seen
    assert (call.role, call.model, call.tools, call.params) == ("app", "big", [tool], {"temperature": 0.5})
    assert [message["role"] for message in call.messages] == ["system", "user"]


def test_none_leaves_the_role_of_the_framework(nowhere, record: Recorded) -> None:
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph

    def writer(state: dict[str, Any]) -> dict[str, Any]:
        ChatOpenAI(model=state["model"]).invoke("hello")
        return {}

    graph = StateGraph(dict)
    graph.add_node("writer", writer)
    graph.add_edge(START, "writer")
    graph.add_edge("writer", END)
    made = graph.compile()

    async def solve(task):
        for model in ("small", "judge-1"):
            await made.ainvoke({"model": model})
        return 1.0

    record(cotune.workflow(solve, roles=lambda call: "judge" if "judge" in call.model else None), lambda call: "x")
    assert record.roles == ["writer", "judge"]


def test_a_trace_names_roles(provider) -> None:
    with cotune.trace(roles="caller") as outer:
        ask("one")
        with cotune.trace(roles=lambda call: call.model) as inner:
            ask("two")
        with cotune.trace() as plain:
            ask("three")
    assert [call.role for call in outer.calls] == ["ask"] * 3
    assert [call.role for call in inner.calls] == ["m"]
    assert [call.role for call in plain.calls] == ["ask"]


@pytest.mark.parametrize("returned", ["", "a\nb", 3, "x" * 201, ZeroDivisionError("division")])
def test_a_faulty_function_fails_the_episode_not_the_call(nowhere, record: Recorded, returned: Any) -> None:
    said = []

    def who(call: CallRequest) -> Any:
        if isinstance(returned, Exception):
            raise returned
        return returned

    def solve(task):
        said.append(ask("one"))
        return 1.0

    outcome = record.any(cotune.workflow(solve, roles=who), lambda call: "done")
    assert said == ["done"]
    assert isinstance(outcome.error, WorkflowError) and "The roles function who failed" in str(outcome.error)
    assert (record.roles, outcome.live.warnings) == (["app"], {"unidentified_call": 1})


AGENT = """
import openai

def run():
    openai.OpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
"""


def test_what_the_callers_name_cannot_tell_is_said(provider, tmp_path: Path, monkeypatch) -> None:
    for name in ("first_agent", "second_agent"):
        (tmp_path / f"{name}.py").write_text(AGENT)
    monkeypatch.syspath_prepend(tmp_path)
    import first_agent
    import second_agent

    with cotune.trace(roles="caller") as t:
        first_agent.run()
        second_agent.run()
    assert [call.role for call in t.calls] == ["run", "run"]
    assert t.warnings == {"ambiguous_role": 1}

    with cotune.trace(roles="caller") as t:
        run_sync(openai.AsyncOpenAI().chat.completions.create(model="m", messages=[user("x")]))
    assert [call.role for call in t.calls] == ["app"]
    assert t.warnings == {"unidentified_call": 1}


def test_tasks_and_threads_of_libraries_belong_to_who_started_them(nowhere, record: Recorded) -> None:
    seen = []

    def who(call: CallRequest) -> str | None:
        seen.append([name.rpartition(".")[2] for name in call.callers])
        return call.caller.rpartition(".")[2]

    ask_it = {"model": "m", "messages": [user("x")]}

    async def in_task(task):
        await asyncio.get_running_loop().create_task(openai.AsyncOpenAI().chat.completions.create(**ask_it))

    async def in_thread(task):
        await asyncio.to_thread(openai.OpenAI().chat.completions.create, **ask_it)

    def in_pool(task):
        with ThreadPoolExecutor(2) as pool:
            pool.submit(openai.OpenAI().chat.completions.create, **ask_it).result()

    def in_loop(task):
        asyncio.run(in_task(task))

    for fn in (in_task, in_thread, in_pool, in_loop):

        async def solve(task, fn=fn):
            await found if inspect.isawaitable(found := fn(task)) else found
            return 1.0

        def sync(task, fn=fn):
            fn(task)
            return 1.0

        record(cotune.workflow(sync if fn is in_loop else solve, roles=who), lambda call: "x")
    assert record.roles == ["in_task", "in_thread", "in_pool", "in_task"]
    assert [callers[:2] for callers in seen[:3]] == [["in_task", "solve"], ["in_thread", "solve"], ["in_pool", "solve"]]
    assert seen[3][:3] == ["in_task", "in_loop", "sync"]


@pytest.mark.parametrize("given", ["app:who", 3, lambda: None, Planner.plan])
def test_what_is_no_roles_function_is_refused(given: Any) -> None:
    with pytest.raises(WorkflowError, match="roles"):
        cotune.workflow(lambda task: 1.0, roles=given)


@pytest.mark.parametrize("spec", ["nowhere", "json:nothing", "no_such_module:who", "no/such.py:who"])
def test_what_is_not_there_is_refused_by_name(spec: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_roles(spec)
    assert (caught.value.field, caught.value.value) == ("roles_by", spec)


def test_a_call_costs_no_walk_when_no_function_is_given(nowhere, record: Recorded, monkeypatch) -> None:
    monkeypatch.setattr("cotune.recording.recorder.context_of_role", None)
    monkeypatch.setattr("cotune.runtime.callers.functions_around", None)
    record(lambda task: float(bool(ask("one"))), lambda call: "done")
    assert record.roles == ["app"]


APP = """
    import cotune, openai

    def ask(system, text):
        client = openai.OpenAI()
        messages = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        return client.chat.completions.create(model="m", messages=messages).choices[0].message.content

    def plan(text):
        return ask("You are the planner.", text)

    def write(text):
        return ask("You are the writer.", text)

    def who(call):
        return call.messages[0]["content"].split()[-1].strip(".")

    @cotune.workflow
    def solve(task):
        return float(bool(write(plan(task["q"]))))
"""


def test_the_command_line_takes_it(
    provider, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "told_app.py").write_text(textwrap.dedent(APP))
    (tmp_path / "tasks.jsonl").write_text('{"id": "t", "q": "2 + 2"}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    asked = ["told_app.py:solve", "--tasks", "tasks.jsonl"]
    assert main(["trace", *asked, "--roles-by", "told_app.py:who", "--out", "r"]) == 0
    with SqliteStore.open(tmp_path / "r", read_only=True) as store:
        assert [role for (role,) in store.rows("SELECT role FROM calls ORDER BY step", ())] == ["planner", "writer"]
    capsys.readouterr()
    main(["check", *asked, "--set", "roles_by=told_app:who", "--json"])
    assert {role["role"] for role in json.loads(capsys.readouterr().out)["roles"]} == {"planner", "writer"}
    assert main(["check", *asked, "--set", "roles_by=told_app:whom"]) == 1
    assert "roles_by = 'told_app:whom'" in capsys.readouterr().err


def test_a_workflow_takes_another_by_name(tmp_path: Path) -> None:
    (tmp_path / "named_app.py").write_text(textwrap.dedent(APP))
    flow = load_workflow(f"{tmp_path}/named_app.py:solve")
    assert flow.roles is None
    assert flow.named_by(f"{tmp_path}/named_app.py:who").roles is sys.modules["named_app"].who
    assert flow.named_by("caller").named_by("").roles is flow.named_by("caller").roles
