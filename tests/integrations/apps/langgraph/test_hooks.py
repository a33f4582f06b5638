"""What LangGraph and LangChain must keep for the integration to work, and what it does to a whole graph."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from langchain_core.callbacks.manager import CallbackManager
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.fake_chat_models import FakeListChatModel
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Command, interrupt

import cotune
from cotune.errors import WorkflowError
from cotune.integrations.apps.langgraph.identity import _runs
from cotune.integrations.apps.langgraph.run_tree import GraphRun, role_of
from cotune.recording.context import current_episode
from cotune.sampling.scoring import OfOne
from tests.integrations.recorded import Recorded, episode

HELLO = {"messages": [HumanMessage("hello")]}
REMEDY = "{} changed: adapt cotune/integrations/apps/{}"
model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)


async def says(state):
    return {"messages": [await model.ainvoke(state["messages"])]}


def graph_of(node=says, **options):
    builder = StateGraph(MessagesState)
    builder.add_node("node", node)
    builder.add_edge(START, "node")
    return builder.compile(**options)


# What upstream must keep


def test_the_managers_of_callbacks_still_tell_node_namespace_and_message_ids(record: Recorded):
    told = {}

    def reply(call):
        told.update(output=call.caller.output, episode=call.episode)
        known = _runs(call.episode)
        told["kinds"] = [(run.kind, run.name, bool(run.space)) for run in known.runs.values()]
        told["handlers"] = CallbackManager.configure().handlers
        return "x"

    async def run(task):
        told["id"] = (await graph_of().ainvoke(HELLO))["messages"][-1].id
        return 1

    record(run, reply)
    remedy = REMEDY.format("LangChain's callback managers", "langgraph/identity.py")
    assert told["kinds"] == [("chain", "LangGraph", False), ("node", "node", True)], remedy
    assert told["id"].startswith(told["output"]), remedy
    assert told["handlers"] == []
    known = _runs(told["episode"])
    assert not known.runs and not known.callers, remedy


@pytest.mark.parametrize("how", ["invoke", "ainvoke"])
def test_runs_that_fail_are_over_too(record: Recorded, how: str):
    seen = []

    @tool
    def broken(text: str) -> str:
        """Breaks."""
        raise ValueError(text)

    def node(state):
        seen.append(current_episode.get())
        assert len(_runs(seen[0]).runs) == 2
        broken.invoke("x")

    async def run(task):
        graph = graph_of(node)
        with pytest.raises(ValueError, match="x"):
            await graph.ainvoke(HELLO) if how == "ainvoke" else graph.invoke(HELLO)
        return 1

    record(run, "x")
    assert not _runs(seen[0]).runs


def test_chat_models_still_have_the_four_methods():
    remedy = REMEDY.format("BaseChatModel", "langchain/models.py")
    assert all(callable(getattr(BaseChatModel, n, None)) for n in ("_generate", "_agenerate", "_stream", "_astream")), (
        remedy
    )
    assert FakeListChatModel(responses=["x"])._get_ls_params(stop=None)["ls_model_type"] == "chat", remedy


@pytest.mark.slow
def test_frameworks_are_hooked_when_an_episode_imports_them_first():
    code = """
import asyncio, sys
from cotune.episodes.episode import run_episode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.episodes.workflows import workflow, workflow_of

assert not {"openai", "langchain_core"} & set(sys.modules)
sys.modules["transformers"] = sys.modules["torch"] = None  # LangChain would load them, at length

@workflow
async def solve(task):
    from langgraph.graph import START, MessagesState, StateGraph
    from langchain_openai import ChatOpenAI
    model = ChatOpenAI(model="m", base_url="http://127.0.0.1:9/v1", api_key="none")
    async def node(state):
        return {"messages": [await model.ainvoke("x")]}
    builder = StateGraph(MessagesState)
    builder.add_node("late", node)
    builder.add_edge(START, "late")
    await builder.compile().ainvoke({"messages": []})
    return 1

class Responder:
    async def respond(self, call):
        print(call.role)
        message = {"role": "assistant", "content": "x"}
        return Answer(candidates=(Candidate(index=0, text="x", message=message),))

class Sink:
    def write(self, records): ...

print(asyncio.run(run_episode(workflow_of(solve), Task(id="1", input=0), sink=Sink(), responder=Responder())).rewards)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "late\n{'team': 1.0}\n", run.stderr


# Whole graphs as workflows


@pytest.mark.usefixtures("nowhere")
def test_a_compiled_graph_is_a_workflow(record: Recorded):
    solve = cotune.workflow(
        graph_of(name="greeter"),
        inputs=lambda task: {"messages": [("user", f"q{task['q']}")]},
        reward=lambda state, task: {"team": len(state["messages"]), "success": task["q"] == 1},
    )

    @solve.scorer("node")
    def polite(candidate, call, task):
        return 1.0

    outcome = record(solve, lambda call: call.messages[0]["content"])
    assert outcome.rewards == {"team": 2.0}
    assert outcome.episode.metrics == {"success": 1.0}
    assert outcome.episode.workflow == "greeter"
    assert record.calls[0].candidates[0].text == "q1"
    assert solve.cotune.scorers == {"node": OfOne(polite)}


@pytest.mark.usefixtures("nowhere")
def test_a_graph_with_a_checkpointer_runs_each_episode_as_a_new_thread(record: Recorded):
    solve = cotune.workflow(
        graph_of(checkpointer=InMemorySaver()), inputs=lambda task: HELLO, reward=lambda s, t: len(s["messages"])
    )
    assert [record(solve, lambda call: "x").rewards for _ in range(2)] == [{"team": 2.0}] * 2


@pytest.mark.usefixtures("nowhere")
def test_a_judge_in_the_reward_of_a_graph_is_not_a_call(record: Recorded):
    from cotune.recording.context import current_episode

    async def judge(state, task):
        return current_episode.get() is None

    assert record(cotune.workflow(graph_of(), inputs=lambda t: HELLO, reward=judge), lambda call: "x").rewards == {
        "team": 1.0
    }


@pytest.mark.usefixtures("nowhere")
def test_sync_nodes_of_many_episodes_wait_for_their_answers_at_once():
    """More of them than asyncio's own pool has threads."""
    count, waiting = 40, []

    def node(state):
        return {"messages": [model.invoke("x")]}

    graph = graph_of(node)

    async def run(task):
        await graph.ainvoke(HELLO)
        return 1

    async def main():
        all_there = asyncio.Event()

        async def reply(call):
            waiting.append(call.id)
            if len(waiting) == count:
                all_there.set()
            await asyncio.wait_for(all_there.wait(), 60)
            return call.role

        return await asyncio.gather(*(episode(run, reply) for _ in range(count)))

    assert [o.rewards for o in asyncio.run(main())] == [{"team": 1.0}] * count


def test_what_a_graph_needs_and_what_is_no_workflow():
    with pytest.raises(WorkflowError, match="reward="):
        cotune.workflow(graph_of())
    with pytest.raises(WorkflowError, match="LangGraph graph"):
        cotune.workflow(StateGraph(MessagesState))


@pytest.mark.usefixtures("nowhere")
def test_interrupt_and_resume_are_one_episode(record: Recorded):
    def ask_human(state):
        first = model.invoke("question")
        answer = interrupt(first.content)
        return {"messages": [model.invoke(answer)]}

    graph = graph_of(ask_human, checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        await graph.ainvoke(HELLO, config)
        await graph.ainvoke(Command(resume="yes"), config)
        return 1

    record(run, lambda call: "x")
    assert [(c.role, c.turn) for c in record.calls] == [("node", 0), ("node", 1), ("node", 2)]


# What stays behind


@pytest.mark.usefixtures("nowhere")
def test_no_run_is_kept_after_it_ended(record: Recorded):
    def breaks(state):
        model.invoke("x")
        raise ValueError("oh")

    async def run(task):
        for node in (says, breaks):
            try:
                await graph_of(node).ainvoke(HELLO)
            except ValueError:
                continue
        return 1

    known = _runs(record(run, lambda call: "x").live)
    assert (known.runs, known.callers) == ({}, {})


@pytest.mark.usefixtures("nowhere")
def test_a_fault_of_the_integration_is_counted_and_the_application_goes_on(
    record: Recorded, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(GraphRun, "chain", lambda *args: 1 / 0)

    async def run(task):
        await graph_of().ainvoke(HELLO)
        return 1

    outcome = record(run, lambda call: "x")
    assert outcome.live.warnings["langgraph"] >= 2
    assert record.roles == ["node"]


def test_roles_from_metadata_alone():
    space = "team:0b9a|1|writer:77aa"
    orphan = GraphRun.model(None, {"langgraph_checkpoint_ns": space, "langgraph_node": "writer"})
    assert role_of(orphan) == "team/writer"
    assert role_of(GraphRun.model(None, {})) == "app"
