"""Agents of LangChain with middleware, and teams of the swarm and supervisor packages."""

from __future__ import annotations

import asyncio
import warnings

import pytest
from langchain.agents import create_agent
from langchain.agents import middleware as mw
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent
from langgraph.types import Command
from langgraph_supervisor import create_supervisor
from langgraph_swarm import create_handoff_tool, create_swarm

from cotune.integrations.apps.langchain.hooks import _WRAPPERS, around
from tests.integrations.graphs import HELLO, asays, chain, look, model, running, scripted
from tests.integrations.provider import Provider, json_reply, said
from tests.integrations.recorded import Recorded, asks, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")
LOOKS = asks(tool_call("look", {"q": "x"}))


def looks_once(call):
    """Calls the tool, then says something."""
    return LOOKS if call.tools and call.messages[-1]["role"] == "user" else "done"


class Judge(mw.AgentMiddleware):
    """Asks the model itself around each model call and each tool."""

    def wrap_model_call(self, request, handler):
        model.invoke("judge the request")
        response = handler(request)
        model.invoke("judge the answer")
        return response

    async def awrap_model_call(self, request, handler):
        await model.ainvoke("judge the request")
        response = await handler(request)
        await asyncio.gather(model.ainvoke("judge the answer"))
        return response

    def wrap_tool_call(self, request, handler):
        model.invoke("judge the tool")
        return handler(request)

    async def awrap_tool_call(self, request, handler):
        await model.ainvoke("judge the tool")
        return await handler(request)


class Hooks(mw.AgentMiddleware):
    async def abefore_agent(self, state, runtime):
        await model.ainvoke("before agent")

    async def aafter_model(self, state, runtime):
        await model.ainvoke("after model")


# Middleware


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "messages", "amessages"])
def test_models_called_around_a_call_or_a_tool_are_the_middlewares(record: Recorded, way: str):
    agent = create_agent(model, [look], name="boss", middleware=[Judge()])
    record(running(agent, way), looks_once)
    assert record.roles == ["boss/Judge", "boss", "boss/Judge", "boss/Judge", "boss/Judge", "boss", "boss/Judge"]
    assert [c.turn for c in record.calls] == [0, 0, 1, 2, 3, 1, 4]


def test_an_agent_without_a_name_as_a_node(record: Recorded):
    agent = create_agent(model, [look], middleware=[Judge()])
    record(running(chain(("draft", agent))), looks_once)
    judge = "draft/Judge"
    assert record.roles == [judge, "draft", judge, judge, judge, "draft", judge]


def test_hooks_of_middleware_before_and_after(record: Recorded):
    agent = create_agent(model, [look], name="boss", middleware=[Hooks(), Judge()])
    record(running(agent, "ainvoke"), looks_once)
    turn = ["boss/Judge", "boss", "boss/Judge", "boss/Hooks"]
    assert record.roles == ["boss/Hooks", *turn, "boss/Judge", *turn]


def test_middleware_made_of_functions(record: Recorded):
    @mw.wrap_model_call
    def shadow(request, handler):
        model.invoke("shadow")
        return handler(request)

    @mw.before_model
    def ahead(state, runtime):
        model.invoke("ahead")

    record(running(create_agent(model, [], name="boss", middleware=[shadow, ahead])), scripted())
    assert record.roles == ["boss/ahead", "boss/shadow", "boss"]


def test_a_middleware_around_another(record: Recorded):
    class Outer(Judge): ...

    record(running(create_agent(model, [], name="boss", middleware=[Outer(), Judge()])), scripted())
    assert record.roles == ["boss/Outer", "boss/Judge", "boss", "boss/Judge", "boss/Outer"]


def test_agents_and_graphs_that_a_middleware_runs(record: Recorded):
    named = create_agent(model, [], name="helper", middleware=[Judge()])
    nameless, graph = create_agent(model, []), chain(("work", asays))

    class Calls(mw.AgentMiddleware):
        async def awrap_model_call(self, request, handler):
            await named.ainvoke(HELLO)
            await nameless.ainvoke(HELLO)
            await graph.ainvoke(HELLO, {"callbacks": []})
            return await handler(request)

    record(running(create_agent(model, [], name="boss", middleware=[Calls()]), "ainvoke"), scripted())
    assert record.roles == ["helper/Judge", "helper", "helper/Judge", "boss/Calls", "boss/Calls/work", "boss"]


def test_an_agent_whose_tool_runs_an_agent_with_middleware(record: Recorded):
    inner = create_agent(model, [], middleware=[Judge()])

    @tool
    def ask(q: str) -> str:
        """Ask somebody."""
        return inner.invoke(HELLO)["messages"][-1].text

    boss = create_agent(model, [ask], name="boss", middleware=[Judge()])
    record(running(boss), lambda c: asks(tool_call("ask", {"q": "x"})) if c.tools and c.turn == 0 else "x")
    inside = ["boss/ask/Judge", "boss/ask", "boss/ask/Judge"]
    around_it = ["boss/Judge", "boss", "boss/Judge"]
    assert record.roles == [*around_it, "boss/Judge", *inside, *around_it]


def test_selectors_and_emulators_are_named_by_what_they_do(record: Recorded):
    @tool
    def other(q: str) -> str:
        """Another tool."""
        return "2"

    chooses = mw.LLMToolSelectorMiddleware(model=model, max_tools=1)
    pretends = mw.LLMToolEmulator(model=model)
    agent = create_agent(model, [look, other], name="boss", middleware=[chooses, pretends])

    def reply(call):
        return '{"tools": ["look"]}' if call.params.get("response_format") else looks_once(call)

    record(running(agent, "ainvoke"), reply)
    assert record.roles[1::3] == ["boss", "boss"]
    # LangChain says what they do from 1.3 on; before, the class names the role.
    assert record.roles[0] in ("boss/tool_selection", "boss/LLMToolSelectorMiddleware")
    assert record.roles[2] in ("boss/tool_emulation", "boss/LLMToolEmulator")
    assert record.roles[3] == record.roles[0]


def test_a_subclass_of_the_summarizer_has_its_own_name(record: Recorded):
    class Shorten(mw.SummarizationMiddleware): ...

    shorten = Shorten(model=model, trigger=("messages", 2), keep=("messages", 1))
    long = {"messages": [("user", "a"), ("ai", "b"), ("user", "c"), ("ai", "d"), ("user", "e")]}
    record(running(create_agent(model, [], name="boss", middleware=[shorten]), given=long), scripted())
    assert record.roles == ["boss/Shorten", "boss"]


def test_retries_and_fallbacks_of_middleware_are_calls_of_the_agent(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({"error": {}}, 500) if number < 3 else said(body)
    first, second = (ChatOpenAI(model=n, base_url=provider.url, max_retries=0) for n in ("first", "second"))
    again = mw.ModelRetryMiddleware(max_retries=1, initial_delay=0, jitter=False, on_failure="error")
    agent = create_agent(first, [], name="boss", middleware=[mw.ModelFallbackMiddleware(second), again])
    record(running(agent))
    assert [(c.role, c.model, c.status) for c in record.calls] == [
        ("boss", "first", "error"),
        ("boss", "first", "error"),
        ("boss", "second", "error"),
        ("boss", "second", "ok"),
    ]
    assert len(provider.requests) == 4


def test_a_tool_that_is_retried(record: Recorded):
    tries = []

    @tool
    def flaky(q: str) -> str:
        """Fails twice."""
        tries.append(model.invoke("in the tool"))
        if len(tries) < 3:
            raise ValueError("no")
        return "yes"

    again = mw.ToolRetryMiddleware(max_retries=2, initial_delay=0, jitter=False)
    agent = create_agent(model, [flaky], name="boss", middleware=[again])
    record(running(agent), scripted(("boss", [asks(tool_call("flaky", {"q": "x"}))])))
    assert record.roles == ["boss", *["boss/flaky"] * 3, "boss"]


def test_limits_lists_and_redaction_leave_roles_alone(record: Recorded):
    others = [
        mw.TodoListMiddleware(),
        mw.PIIMiddleware("email"),
        mw.ContextEditingMiddleware(),
        mw.ModelCallLimitMiddleware(run_limit=5),
        mw.ToolCallLimitMiddleware(run_limit=5),
    ]
    record(running(create_agent(model, [look], name="boss", middleware=others)), looks_once)
    assert record.roles == ["boss", "boss"]


def test_a_human_in_the_loop_is_one_episode_with_its_parents(record: Recorded):
    human = mw.HumanInTheLoopMiddleware(interrupt_on={"look": True})
    agent = create_agent(model, [look], name="boss", middleware=[human], checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        assert (await agent.ainvoke(HELLO, config))["__interrupt__"]
        await agent.ainvoke(Command(resume={"decisions": [{"type": "approve"}]}), config)
        return 1

    record(run, looks_once)
    first, second = record.calls
    assert [c.role for c in (first, second)] == ["boss", "boss"]
    assert second.parents == (first.id,)


def test_nothing_of_a_middleware_is_left_after_a_failure(record: Recorded):
    class Fails(mw.AgentMiddleware):
        def wrap_model_call(self, request, handler):
            raise ValueError("oh")

    agent = create_agent(model, [], name="boss", middleware=[Fails()])

    def run(task):
        with pytest.raises(ValueError, match="oh"):
            agent.invoke(HELLO)
        model.invoke("x")
        return around.get().middleware is None

    assert record(run, scripted()).rewards == {"team": 1.0}
    assert record.roles == ["app"]


def test_middleware_outside_an_episode_is_as_it_was():
    calls = []

    class Counts(mw.AgentMiddleware):
        def wrap_model_call(self, request, handler):
            calls.append(handler.__name__)
            raise KeyError

    with pytest.raises(KeyError):
        create_agent(model, [], middleware=[Counts()]).invoke(HELLO)
    assert calls == ["_execute_model_sync"]


def test_middleware_still_has_the_methods_that_are_wrapped():
    remedy = "AgentMiddleware changed: adapt cotune/integrations/apps/langchain/hooks.py"
    assert all(callable(getattr(mw.AgentMiddleware, name, None)) for name in _WRAPPERS), remedy
    assert hasattr(Judge.wrap_model_call, "__cotune__"), remedy


# Teams


def react(name, *tools):
    with warnings.catch_warnings(action="ignore"):
        return create_react_agent(model, list(tools), name=name)


def swarm(make):
    agents = [
        make("alice", create_handoff_tool(agent_name="bob")),
        make("bob", create_handoff_tool(agent_name="alice")),
    ]
    return create_swarm(agents, default_active_agent="alice")


@pytest.mark.parametrize("make", [react, lambda name, *tools: create_agent(model, list(tools), name=name)])
def test_a_swarm_hands_over_and_remembers_who_is_active(record: Recorded, make):
    team = swarm(make).compile(checkpointer=InMemorySaver())

    async def run(task):
        config = {"configurable": {"thread_id": "1"}}
        await team.ainvoke(HELLO, config)
        await team.ainvoke(HELLO, config)
        return 1

    record(run, scripted(("alice", [asks(tool_call("transfer_to_bob", {}))])))
    assert record.roles == ["alice", "bob", "bob"]
    alice, bob, later = record.calls
    assert (bob.parents, later.parents) == ((alice.id,), (alice.id, bob.id))


def test_a_swarm_is_the_same_as_a_node_of_a_graph(record: Recorded):
    graph = chain(("team", swarm(react).compile()), ("after", asays))
    record(running(graph, "ainvoke"), scripted(("alice", [asks(tool_call("transfer_to_bob", {}))])))
    assert record.roles == ["alice", "bob", "after"]


def test_a_supervisor_and_its_agents(record: Recorded):
    with warnings.catch_warnings(action="ignore"):
        team = create_supervisor([react("alice"), react("bob")], model=model).compile()
    script = [asks(tool_call("transfer_to_alice", {}, "c1")), asks(tool_call("transfer_to_bob", {}, "c2"))]
    record(running(chain(("team", team)), "ainvoke"), scripted(("supervisor", script)))
    assert record.roles == ["supervisor", "alice", "supervisor", "bob", "supervisor"]


def test_a_supervisor_of_supervisors(record: Recorded):
    with warnings.catch_warnings(action="ignore"):
        low = create_supervisor([react("alice")], model=model, supervisor_name="chief").compile(name="team")
        high = create_supervisor([low], model=model, supervisor_name="ceo").compile(name="company")
    script = {"ceo": [asks(tool_call("transfer_to_team", {}))], "chief": [asks(tool_call("transfer_to_alice", {}))]}
    record(running(high), scripted(*script.items()))
    assert record.roles == ["ceo", "chief", "alice", "chief", "ceo"]
