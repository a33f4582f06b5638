"""`cotune.trace`: any code's calls, as they were sent, with no workflow declared."""

from __future__ import annotations

import asyncio
import os
import threading

import openai
import pytest

import cotune
from cotune.errors import RecordError, RunError, WorkflowError
from cotune.recording.context import current_episode
from cotune.recording.redaction import each_text
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import Recorded

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def ask(provider: Provider):
    client = openai.OpenAI(base_url=provider.url, api_key="none", max_retries=0)

    def ask(text="hello", role="app", **options):
        with cotune.role(role):
            return client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}], **options)

    yield ask
    client.close()


async def aask(text, role):
    async with openai.AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none", max_retries=0) as client:
        with cotune.role(role):
            await client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])


def brief(t):
    return [(c.role, c.turn, c.status, c.messages[-1]["content"], c.text) for c in t.calls]


@pytest.mark.parametrize("where", ["file", "folder", "memory"])
def test_calls_are_shown_as_they_were_sent(ask, provider: Provider, tmp_path, where):
    path = {"file": tmp_path / "records.db", "folder": tmp_path, "memory": None}[where]
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
    with cotune.trace(path, task="sums") as t:
        ask("one", "planner", temperature=0.5, tools=tools)
        assert brief(t) == [("planner", 0, "ok", "one", "re: one")]
        ask("two", "planner")
        ask("three", "coder")
    assert brief(t) == [
        ("planner", 0, "ok", "one", "re: one"),
        ("planner", 1, "ok", "two", "re: two"),
        ("coder", 0, "ok", "three", "re: three"),
    ]
    first = t.calls[0]
    sent = {"model": first.model, "messages": first.messages, **first.params, "tools": first.tools}
    assert sent == provider.requests[0]
    assert first.answer == {"role": "assistant", "content": "re: one"}
    assert current_episode.get() is None
    assert ask().choices[0].message.content == "re: hello"
    assert len(t.calls) == 3


def test_the_file_holds_an_episode_with_rewards_also_late_ones(ask, tmp_path):
    path = tmp_path / "records.db"
    with cotune.trace(path, task={"id": "t7", "q": 1}, name="chat") as t:
        ask()
        t.reward(0.5)
        t.reward(style=1)
    t.reward(0.75)
    assert t.rewards == {"team": 0.75, "style": 1.0}
    with cotune.trace(path) as other:
        ask()
    with SqliteStore.open(path, read_only=True) as store:
        first, second = store.episodes()
        assert (first.id, first.workflow, first.task.id, first.status, first.calls) == (t.id, "chat", "t7", "ok", 1)
        assert second.id == other.id
        assert store.rewards([t.id])[t.id] == {"team": 0.75, "style": 1.0}


def test_a_failure_is_the_applications_own_and_recorded(ask, provider: Provider):
    provider.reply = lambda body, number: json_reply({"error": {"message": "no such model"}}, 404)
    with pytest.raises(openai.NotFoundError), cotune.trace() as t:
        ask("x")
    (call,) = t.calls
    assert (call.status, call.text, call.answer) == ("error", "", None)
    assert "no such model" in call.error


def test_an_exception_ends_the_episode_as_failed(ask, tmp_path):
    with pytest.raises(ZeroDivisionError), cotune.trace(tmp_path) as t:
        ask()
        1 / 0  # noqa: B018
    with SqliteStore.open(tmp_path, read_only=True) as store:
        episode = store.episode(t.id)
        assert (episode.status, episode.error, episode.calls) == ("error", "ZeroDivisionError: division by zero", 1)


def test_a_cancelled_block_is_cancelled(provider: Provider, tmp_path):
    provider.reply = lambda body, number: (200, "application/json", [Provider.HANG])
    made = []

    async def main():
        async with cotune.trace(tmp_path) as t:
            made.append(t)
            await aask("x", "a")

    async def cancelled():
        running = asyncio.create_task(main())
        while not provider.requests:
            await asyncio.to_thread(provider.over.wait, 0.01)
        running.cancel()
        await asyncio.wait([running])

    asyncio.run(cancelled())
    assert [c.status for c in made[0].calls] == ["cancelled"]
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert store.episode(made[0].id).status == "cancelled"


def test_several_at_once_in_tasks_and_threads_share_a_file(ask, provider: Provider, tmp_path):
    traces = {}

    async def in_task(name):
        async with cotune.trace(tmp_path, task=name) as t:
            await asyncio.gather(*(aask(f"{name}{i}", name) for i in range(3)))
            traces[name] = t

    def in_thread(name):
        with cotune.trace(tmp_path, task=name) as t:
            inner = threading.Thread(target=ask, args=(f"{name}0", name))
            inner.start()
            inner.join()
            ask(f"{name}1", name)
            traces[name] = t

    async def main():
        await asyncio.gather(*(in_task(n) for n in ("a", "b")), *(asyncio.to_thread(in_thread, n) for n in ("c", "d")))

    asyncio.run(main())
    for name, count in (("a", 3), ("b", 3), ("c", 2), ("d", 2)):
        assert {(c.role, c.messages[0]["content"]) for c in traces[name].calls} == {
            (name, f"{name}{i}") for i in range(count)
        }
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert sorted(e.task.id for e in store.episodes()) == ["a", "b", "c", "d"]


def test_inside_an_episode_calls_stay_its_own_and_are_shown_here_too(record: Recorded, ask):
    seen = []

    def run(task):
        ask("before", "a")
        with cotune.trace() as t:
            ask("inside", "a", stream=False)
            list(ask("streamed", "b", stream=True))
            with cotune.trace() as deeper:
                ask("deep", "a")
        ask("after", "a")
        seen.extend([t, deeper])
        return 1.0

    outcome = record(run, lambda call: f"policy {call.turn}")
    assert [(c.role, c.step, c.turn, c.episode) for c in record.calls] == [
        ("a", 0, 0, outcome.episode.id),
        ("a", 1, 1, outcome.episode.id),
        ("b", 2, 0, outcome.episode.id),
        ("a", 3, 2, outcome.episode.id),
        ("a", 4, 3, outcome.episode.id),
    ]
    t, deeper = seen
    assert brief(t) == [
        ("a", 0, "ok", "inside", "policy 1"),
        ("b", 0, "ok", "streamed", "policy 0"),
        ("a", 1, "ok", "deep", "policy 2"),
    ]
    assert brief(deeper) == [("a", 0, "ok", "deep", "policy 2")]
    assert [c.id for c in t.calls] != [c.id for c in record.calls[1:4]]


def test_an_inner_block_that_ends_first_leaves_the_call_to_its_episode(record: Recorded, nowhere: None):
    traces = []

    async def run(task):
        started, may_end = task_events
        with cotune.trace() as t:
            traces.append(t)
            asking = asyncio.create_task(aask("x", "a"))
            await started.wait()
        may_end.set()
        await asking
        return 1.0

    async def reply(call):
        started, may_end = task_events
        started.set()
        await may_end.wait()
        return "late"

    task_events = (asyncio.Event(), asyncio.Event())
    record(run, reply)
    assert record.statuses == ["ok"]
    assert [(c.status, c.text) for c in traces[0].calls] == [("cancelled", "")]


def test_in_a_running_loop_and_across_contexts(provider: Provider):
    """As in a notebook: the loop runs already, and begin and end may be in different tasks."""

    async def main():
        with cotune.trace() as t:
            await aask("cell", "a")
        u = cotune.trace()
        await asyncio.create_task(u.__aenter__())
        await asyncio.create_task(u.__aexit__(None, None, None))
        return t

    assert brief(asyncio.run(main())) == [("a", 0, "ok", "cell", "re: cell")]


def test_with_langgraph_and_no_workflow(provider: Provider):
    from langchain_openai import ChatOpenAI
    from langgraph.graph import START, MessagesState, StateGraph

    model = ChatOpenAI(model="m", base_url=provider.url, api_key="none", max_retries=0)
    builder = StateGraph(MessagesState)
    builder.add_node("writer", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_node("editor", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "writer")
    builder.add_edge("writer", "editor")
    graph = builder.compile()
    with cotune.trace() as t:
        graph.invoke({"messages": [{"role": "user", "content": "go"}]})
    writer, editor = t.calls
    assert [c.role for c in t.calls] == ["writer", "editor"]
    assert editor.parents == (writer.id,)


def test_a_redactor_of_its_own_beside_the_episodes(record: Recorded, ask):
    traces = []
    mask = each_text(lambda text: text.replace("secret", "***"))

    def run(task):
        with cotune.trace(redactor=mask) as t:
            ask("a secret plan")
        traces.append(t)
        return 1.0

    record(run)
    assert brief(traces[0]) == [("app", 0, "ok", "a *** plan", "re: a *** plan")]
    assert record.calls[0].candidates[0].text == "re: a secret plan"
    made = cotune.workflow(run)
    made.redactor(each_text(lambda text: text.replace("plan", "+++")))
    record(made)
    assert brief(traces[1]) == [("app", 0, "ok", "a *** +++", "re: a *** +++")]


def test_misuse_says_what_to_do(tmp_path):
    t = cotune.trace()
    with pytest.raises(RecordError, match="has not begun"):
        t.calls  # noqa: B018
    with t:
        pass
    with pytest.raises(WorkflowError, match="has been used"), t:
        pass
    with pytest.raises(WorkflowError, match="not a number"):
        t.reward(team="good")
    (tmp_path / "records.db").write_text("no database")
    with pytest.raises(RunError), cotune.trace(tmp_path):
        pass
    with pytest.raises(WorkflowError, match="one argument"):
        cotune.trace(redactor=lambda: {})
