"""Ways to run a graph: streams, events, batches, checkpoints, the functional API, and configurations replaced."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
import warnings

import pytest
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint
from langgraph.func import task as unit
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import create_react_agent
from langgraph.pregel.main import Pregel
from langgraph.types import Command, Send, interrupt

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.integrations.apps.langchain.hooks import around
from cotune.recording import model_calls
from cotune.records.structs import Task
from tests.integrations.graphs import HELLO, asays, chain, model, node_of, running, says, scripted
from tests.integrations.recorded import Recorded, Responder, Sink, asks, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")
MODES = ["values", "updates", "messages", "custom", "debug", "checkpoints", "tasks", ["values", "messages"]]


def react(**options):
    with warnings.catch_warnings(action="ignore"):
        return create_react_agent(model, [], **options)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_episodes_of_a_run_that_share_a_thread_are_told(way):
    def warned(phase, thread):
        config = {"configurable": {"thread_id": thread}}
        flow = workflow_of(workflow(running(graph, way, config=config)))
        options = EpisodeOptions(phase=phase)
        responder = Responder(scripted())
        return asyncio.run(run_episode(flow, Task(id="t", input={}), sink=Sink(), responder=responder, options=options))

    graph = chain(("a", asays if way == "ainvoke" else says), checkpointer=InMemorySaver())
    seen = [warned(*given).live.warnings for given in (("train", "1"), ("train", "2"), ("train", "1"), ("trace", "1"))]
    assert ["shared_thread" in warnings for warnings in seen] == [False, False, True, False]


# Streams, events, batches


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_every_stream_mode_with_subgraphs(record: Recorded, mode):
    graph = chain(("a", asays), ("b", chain(("work", asays))))

    async def run(task):
        [part async for part in graph.astream(HELLO, stream_mode=mode, subgraphs=True)]
        return 1

    def run_sync(task):
        list(chain(("a", says), ("b", chain(("work", says)))).stream(HELLO, stream_mode=mode, subgraphs=True))
        return 1

    record(run, scripted())
    record(run_sync, scripted())
    assert record.roles.count("a") == record.roles.count("b/work") == 2
    assert {c.turn for c in record.calls} == {0}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_events(record: Recorded, version):
    graph = chain(("a", asays), ("b", chain(("work", asays))))
    kinds = set()

    @RunnableLambda
    async def around(given):
        return await graph.ainvoke(given)

    async def run(task):
        with warnings.catch_warnings(action="ignore"):
            for runnable in (graph, around):
                kinds.update([e["event"] async for e in runnable.astream_events(HELLO, version=version)])
        return 1

    record(run, scripted())
    assert record.roles == ["a", "b/work"] * 2
    assert "on_chat_model_end" in kinds


def test_batches_of_graphs(record: Recorded):
    graph = chain(("a", asays), ("b", says))

    async def run(task):
        await graph.abatch([HELLO, HELLO])
        assert len([pair async for pair in graph.abatch_as_completed([HELLO, HELLO])]) == 2
        return 1

    def run_sync(task):
        both = chain(("a", says), ("b", says))
        both.batch([HELLO, HELLO])
        assert len(list(both.batch_as_completed([HELLO, HELLO]))) == 2
        return 1

    for way in (run, run_sync):
        before = len(record.calls)
        record(way, scripted())
        assert sorted(c.role for c in record.calls).count("a") == (before + 8) / 2
    assert sorted({(c.role, c.turn) for c in record.calls}) == [(r, t) for r in "ab" for t in range(4)]
    later = [c for c in record.calls if c.role == "b"]
    assert {len(c.parents) for c in later} == {1}


def test_a_stream_that_is_left_lets_later_calls_be_their_own(record: Recorded):
    graph = chain(("a", asays), ("b", asays))

    async def run(task):
        stream = graph.astream(HELLO, stream_mode="updates")
        await anext(stream)
        await stream.aclose()
        await model.ainvoke("after")
        return around.get().starting_graph is None

    assert record(run, scripted()).rewards == {"team": 1.0}
    assert (record.roles[0], record.roles[-1]) == ("a", "app")


@pytest.mark.parametrize("kind", ["sync nodes", "loops of their own", "chain"])
def test_a_synchronous_run_inside_a_coroutine_is_no_deadlock(record: Recorded, monkeypatch, kind: str):
    """It waits on the episode's own loop for threads whose calls that loop would answer."""
    monkeypatch.setattr(model_calls, "LOOP_CHECK", 0.01)

    def own_loop(state):
        return asyncio.run(asays(state))

    builder = StateGraph(MessagesState)
    for name in ("a", "b"):
        builder.add_node(name, own_loop if kind == "loops of their own" else says)
        builder.add_edge(START, name)
    graph = builder.compile()

    async def run(task):
        if kind == "chain":
            RunnableParallel(a=model, b=model).invoke("x")
        else:
            graph.invoke(HELLO)
        return 1

    outcome = record(run, scripted())
    assert sorted(record.roles) == (["app", "app"] if kind == "chain" else ["a", "b"])
    assert outcome.live.warnings == {"blocked_loop": 2}


def test_a_loop_that_is_only_busy_answers_when_it_is_done(record: Recorded, monkeypatch):
    monkeypatch.setattr(model_calls, "LOOP_CHECK", 0.001)
    loops = []

    async def run(task):
        there = asyncio.create_task(asyncio.to_thread(model.invoke, "x"))
        await asyncio.sleep(0)
        until = time.monotonic() + 0.05
        while time.monotonic() < until:
            pass
        await there
        return asyncio.get_running_loop() is loops[0]

    outcome = record(run, lambda call: loops.append(asyncio.get_running_loop()) or "x")
    assert (outcome.rewards, outcome.live.warnings) == ({"team": 1.0}, {})


# Checkpoints


def test_time_travel_branches_are_turns_of_the_same_roles(record: Recorded):
    graph = chain(("a", asays), ("b", asays), checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        await graph.ainvoke(HELLO, config)
        before_b = next(s for s in graph.get_state_history(config) if s.next == ("b",))
        await graph.ainvoke(None, before_b.config)
        edited = graph.update_state(before_b.config, {"messages": [AIMessage("edited")]}, as_node="a")
        await graph.ainvoke(None, edited)
        return 1

    record(run, scripted())
    a = record.calls[0]
    assert [(c.role, c.turn, c.parents) for c in record.calls] == [
        ("a", 0, ()),
        ("b", 0, (a.id,)),
        ("b", 1, (a.id,)),
        ("b", 2, (a.id,)),
    ]


def test_an_interrupt_inside_a_subgraph_of_a_node(record: Recorded):
    async def ask(state):
        question = await model.ainvoke(state["messages"])
        return {"messages": [await model.ainvoke(interrupt(question.content))]}

    inner = chain(("first", asays), ("ask", ask))
    graph = chain(("team", inner), ("after", asays), checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": str(uuid.uuid4())}}
        await graph.ainvoke(HELLO, config)
        await graph.ainvoke(Command(resume="yes"), config)
        return 1

    record(run, scripted())
    assert record.roles == ["team/first", "team/ask", "team/ask", "team/ask", "after"]


def test_a_subgraph_several_times_in_one_node_with_a_checkpointer(record: Recorded):
    inner = chain(("work", asays))

    async def several(state):
        await inner.ainvoke(HELLO)
        await asyncio.gather(*(inner.ainvoke(HELLO) for _ in range(2)))
        return {}

    graph = chain(several, checkpointer=InMemorySaver())
    record(running(graph, "ainvoke", config={"configurable": {"thread_id": "1"}}), scripted())
    assert record.roles == ["several/work"] * 3


def test_sends_to_subgraphs_and_commands_that_send(record: Recorded):
    builder = StateGraph(MessagesState)
    builder.add_node("plan", lambda state: Command(goto=[Send("team", HELLO)] * 2), destinations=("team",))
    builder.add_node("team", chain(("work", asays)))
    builder.add_edge(START, "plan")
    record(running(builder.compile(), "ainvoke"), scripted())
    assert record.roles == ["team/work"] * 2


# Functional API


def test_entrypoints_and_tasks_of_every_kind(record: Recorded):
    @unit
    async def part(x):
        return (await model.ainvoke(x)).content

    @unit(name="renamed")
    async def other(x):
        return await part(x)

    @entrypoint(checkpointer=InMemorySaver())
    async def whole(x):
        await model.ainvoke("directly")
        await asyncio.gather(part(x), part(x))
        answer = interrupt("go on?")
        return await other(answer)

    async def node(state):
        await whole.ainvoke("q", {"configurable": {"thread_id": "inner"}})

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        await whole.ainvoke("q", config)
        await whole.ainvoke(Command(resume="yes"), config)
        await chain(("node", node)).ainvoke(HELLO)
        return 1

    record(run, scripted())
    assert record.roles == [
        "whole", "whole/part", "whole/part", "whole", "whole/renamed/part",
        "node/whole", "node/whole/part", "node/whole/part",
    ]  # fmt: skip


# What the application configures


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "messages", "amessages"])
def test_the_name_of_a_run_is_not_the_name_of_its_graph(record: Recorded, way: str):
    graphs = [react(name="reacty"), react(), create_agent(model, []), create_agent(model, [], name="named")]
    for number, graph in enumerate(graphs):
        record(running(graph, way, config={"run_name": f"task {number}"}), scripted())
        record(running(graph.with_config(run_name=f"bound {number}"), way), scripted())
    assert [c.role for c in record.sink if hasattr(c, "role")] == [
        name for name in ("reacty", "agent", "model", "named") for _ in range(2)
    ]


def test_a_failed_start_names_no_later_graph(record: Recorded):
    broken = react(name="broken")

    def run(task):
        with pytest.raises(ValueError, match="recursion_limit"):
            broken.invoke(HELLO, {"recursion_limit": 0})
        react().invoke(HELLO)
        return 1

    record(run, scripted())
    assert record.roles == ["agent"]


def test_graphs_still_start_where_their_name_is_taken():
    remedy = "Pregel changed: adapt cotune/integrations/apps/langgraph/graphs.py"
    assert all(hasattr(getattr(Pregel, name, None), "__wrapped__") for name in ("stream", "astream")), remedy


@pytest.mark.parametrize(
    "config",
    [
        {"callbacks": []},
        {"callbacks": [BaseCallbackHandler()]},
        {"callbacks": [BaseCallbackHandler()], "metadata": {"mine": 1}, "tags": ["t"], "run_name": "mine"},
        {"configurable": {"thread_id": "other"}, "callbacks": []},
    ],
    ids=["none", "own", "all", "thread"],
)
def test_a_configuration_that_is_replaced_on_the_way(record: Recorded, config):
    inner, agent = chain(("work", says)), create_agent(model, [], name="named")

    def node():
        model.invoke("x", config)
        (RunnableLambda(lambda x: x) | model).invoke("x", config)
        inner.invoke(HELLO, config)
        agent.invoke(HELLO, config)

    record(node_of(node), scripted())
    assert record.roles == ["node", "node", "node/work", "named"]


def test_methods_that_take_no_configuration_from_around_them(record: Recorded):
    async def node(state):
        model.generate([[HumanMessage("x")], [HumanMessage("y")]])
        await model.agenerate([[HumanMessage("z")]])

    record(running(chain(("node", node)), "ainvoke"), scripted())
    assert record.roles == ["node"] * 3


def test_handlers_and_settings_of_the_application_see_what_they_saw(record: Recorded):
    seen = []

    class Handler(BaseCallbackHandler):
        run_inline = True

        def on_chain_start(self, serialized, inputs, *, name=None, metadata=None, **_):
            seen.append((name, (metadata or {}).get("mine")))

    def run(task):
        config = {"callbacks": [Handler()], "metadata": {"mine": 1}, "run_name": "my run"}
        chain(("a", says)).invoke(HELLO, config)
        return 1

    record(run, scripted())
    assert seen == [("my run", 1), ("a", 1)]
    assert record.roles == ["a"]


def test_graphs_in_threads_loops_and_tasks_of_a_node(record: Recorded):
    inner = chain(("work", asays))

    def in_thread():
        thread = threading.Thread(target=lambda: chain(("work", says)).invoke(HELLO))
        thread.start()
        thread.join()
        asyncio.run(inner.ainvoke(HELLO))

    async def in_task(state):
        await asyncio.create_task(inner.ainvoke(HELLO))

    record(node_of(in_thread), scripted())
    record(running(chain(("node", in_task)), "ainvoke"), scripted())
    assert [c.role for c in record.sink if hasattr(c, "role")] == ["node/work"] * 3


def test_a_retriever_and_a_graph_as_a_tool(record: Recorded):
    class Asks(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document(model.invoke(query).text)]

    def retrieves():
        Asks().invoke("q")

    with warnings.catch_warnings(action="ignore"):
        deep = chain(("deep", says)).as_tool(name="deepen", description="x", arg_types={"messages": list})
    boss = create_agent(model, [deep], name="boss")
    record(node_of(retrieves), scripted())
    record(running(boss), scripted(("boss", [asks(tool_call("deepen", {"messages": ["a"]}))])))
    assert [c.role for c in record.sink if hasattr(c, "role")] == ["node", "boss", "boss/deepen/deep", "boss"]


def test_agents_made_anew_for_each_call_are_one_role(record: Recorded):
    record(node_of(lambda: [create_agent(model, [], name="w").invoke(HELLO) for _ in range(3)]), scripted())
    assert [(c.role, c.turn) for c in record.calls] == [("w", 0), ("w", 1), ("w", 2)]
