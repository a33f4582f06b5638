"""Who makes a call: roles, states and parents in CrewAI applications of every shape."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import openai
import pytest
from crewai import LLM, Agent, Crew, Process, Task
from crewai.flow.flow import Flow, listen, router, start
from crewai.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

import cotune
from cotune.integrations.apps.crewai.scopes import CrewState
from tests.integrations.recorded import Recorded, asks, episode, tool_call

pytestmark = pytest.mark.usefixtures("nowhere")
URL = "http://127.0.0.1:9/v1"
llm = LLM(model="openai/gpt-4o-mini", base_url=URL, api_key="none", max_retries=0)
client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0)


class Verdict(BaseModel):
    score: int
    why: str


def agent(role: str, **options) -> Agent:
    return Agent(role=role, goal="g", backstory="b", llm=options.pop("llm", llm), **options)


def task(description: str, by: Agent | None = None, **options) -> Task:
    return Task(description=description, expected_output="e", agent=by, **options)


def crew(*roles: str, **options) -> Crew:
    """A crew of agents that do one task each, one after the other."""
    agents = [agent(role) for role in roles]
    return Crew(agents=agents, tasks=[task(f"do {a.role.strip()}", a) for a in agents], **options)


def says(call) -> str:
    return f"said by {call.role}"


def parents(record: Recorded) -> list[list[int]]:
    steps = {call.id: call.step for call in record.calls}
    return [sorted(steps[parent] for parent in call.parents) for call in record.calls]


def ran(fn):
    """A workflow that does something and is worth 1."""

    def run(given):
        fn()
        return 1

    async def run_async(given):
        await fn()
        return 1

    return run_async if asyncio.iscoroutinefunction(fn) else run


@tool("look")
def look(q: str) -> str:
    """Look something up."""
    return "42"


WAYS = ("kickoff", "akickoff", "kickoff_async", "kickoff_for_each", "kickoff_for_each_async")


@pytest.mark.parametrize("alone", [False, True])
def test_the_answer_that_an_agent_is_asked_for_at_its_last_iteration_is_read_by_what_follows(
    record: Recorded, alone: bool
) -> None:
    """CrewAI makes that call without naming the agent."""
    by = agent("Worker", tools=[look], max_iter=1)
    second = agent("Reader")

    def both() -> None:
        if alone:
            by.kickoff("look it up")
        else:
            Crew(agents=[by, second], tasks=[task("look it up", by), task("read it", second)]).kickoff()

    def reply(call):
        return asks(tool_call("look", {"q": "?"})) if call.step == 0 else says(call)

    assert record(ran(both), reply).error is None
    assert record.roles == ["Worker", "Worker", "Reader"][: 2 if alone else 3]
    assert parents(record) == [[], [0], [1]][: 2 if alone else 3]


@pytest.mark.parametrize("way", WAYS)
def test_a_sequential_crew_however_it_is_started(record: Recorded, way: str) -> None:
    made, inputs = crew("Researcher", "Writer"), {"topic": "cats"}
    given = {"inputs": [inputs]} if "for_each" in way else {"inputs": inputs}

    def checked(found):
        assert (found[0] if isinstance(found, list) else found).raw == "said by Writer"
        return 1

    async def run_async(_):
        return checked(await getattr(made, way)(**given))

    record(run_async if way.startswith("a") or "async" in way else lambda _: checked(getattr(made, way)(**given)), says)
    assert record.roles == ["Researcher", "Writer"]
    assert [(c.turn, c.status, c.integration) for c in record.calls] == [(0, "ok", "crewai")] * 2
    assert parents(record) == [[], [0]]


def test_the_state_of_a_call_tells_agent_task_and_inputs(record: Recorded) -> None:
    states = []

    def reply(call):
        states.append(call.state)
        return "ok"

    by = agent("Expert on {topic}")
    record(ran(lambda: Crew(agents=[by], tasks=[task("describe {topic}", by)]).kickoff({"topic": "cats"})), reply)
    assert states == [CrewState("Expert on cats", "describe cats", "e", {"topic": "cats"}, {})]


def test_the_role_is_the_template_without_white_space(record: Recorded) -> None:
    made = crew("  Expert on {topic}\n")

    def run(_):
        for topic in ("cats", "dogs"):
            made.kickoff({"topic": topic})
        made.kickoff_for_each([{"topic": "birds"}])
        return 1

    record(run, says)
    assert record.roles == ["Expert on {topic}"] * 3
    assert [call.turn for call in record.calls] == [0, 1, 2]


def test_a_manager_and_the_coworkers_it_delegates_to(record: Recorded) -> None:
    def reply(call):
        if call.role == "Crew Manager" and call.turn == 0:
            return asks(tool_call("delegate_work_to_coworker", {"task": "t", "context": "c", "coworker": "Helper"}))
        return says(call)

    made = Crew(agents=[agent("Helper")], tasks=[task("do it")], process=Process.hierarchical, manager_llm=llm)
    record(ran(made.kickoff), reply)
    assert record.roles == ["Crew Manager", "Helper", "Crew Manager"]
    assert parents(record) == [[], [0], [0, 1]]


def test_planner_and_guardrails_have_roles_of_their_own(record: Recorded) -> None:
    def checked(output):
        return llm.call("is it good?") == "yes", output.raw

    by = agent("Worker")
    tasks = [task("first", by, guardrail="must be good"), task("second", by, guardrail=checked)]

    def reply(call):
        if call.role == "Task Execution Planner":
            plans = ",".join(f'{{"task_number":{n},"task":"t","plan":"p"}}' for n in (1, 2))
            return f'{{"list_of_plans_per_task":[{plans}]}}'
        if call.role == "Guardrail Agent":
            return '{"valid":%s,"feedback":"no"}' % ("true" if call.turn else "false")
        return "yes" if call.role == "guardrail" else says(call)

    record(ran(Crew(agents=[by], tasks=tasks, planning=True, planning_llm=llm).kickoff), reply)
    assert record.roles == [
        "Task Execution Planner",
        "Worker",
        "Guardrail Agent",
        "Worker",
        "Guardrail Agent",
        "Worker",
        "guardrail",
    ]
    assert parents(record) == [[], [], [1], [1, 2], [3], [3], [5]]


@pytest.mark.parametrize("way", ["kickoff", "akickoff"])
def test_retries_of_a_converter_belong_to_the_agent(record: Recorded, way: str) -> None:
    by = agent("Judge")
    made = Crew(agents=[by], tasks=[task("judge", by, output_pydantic=Verdict)])
    found = []

    async def run(_):
        out = await made.akickoff() if way == "akickoff" else await asyncio.to_thread(made.kickoff)
        found.append(out.pydantic)
        return 1

    record(run, lambda call: '{"score": 3, "why": "w"}' if call.turn else "not JSON")
    assert set(record.roles) == {"Judge"} and len(record.calls) > 1
    assert found == [Verdict(score=3, why="w")]


class Steps(Flow):
    suppress_flow_events = True

    @start()
    def direct(self):
        self.state["n"] = 7
        return llm.call("hello")

    @listen(direct)
    async def lite(self, _):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "plain"}])
        return str(await agent("Lite").kickoff_async("hello"))

    @listen(lite)
    def inner(self, _):
        return str(agent("Sync").kickoff("hello")) + str(crew("Inner").kickoff())

    @router(inner)
    async def choose(self):
        await llm.acall("which way?")
        return "done"


@pytest.mark.parametrize("way", ["kickoff", "kickoff_async"])
def test_a_flow_names_calls_by_agent_or_by_its_method(record: Recorded, way: str) -> None:
    states = []

    def reply(call):
        states.append(call.state.flow.get("n"))
        return says(call)

    record(ran(getattr(Steps(), way)), reply)
    assert record.roles == ["direct", "lite", "Lite", "Sync", "Inner", "choose"]
    assert states == [7] * 6


def test_asynchronous_tasks_keep_their_agents_and_their_context(record: Recorded) -> None:
    one, two, join = agent("One"), agent("Two"), agent("Join")
    tasks = [task("1", one, async_execution=True), task("2", two, async_execution=True)]
    made = Crew(agents=[one, two, join], tasks=[*tasks, task("3", join, context=tasks)])
    record(ran(made.kickoff), says)
    assert sorted(record.roles[:2]) == ["One", "Two"] and record.roles[2] == "Join"
    assert parents(record)[2] == [0, 1]


@pytest.mark.parametrize("way", ["kickoff", "akickoff"])
def test_a_crew_in_a_tool_of_an_agent_is_a_stack(record: Recorded, way: str) -> None:
    @tool("consult")
    def consult(q: str) -> str:
        """Ask the others."""
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "within"}])
        inner = crew("Inner").kickoff().raw
        llm.call("after")
        return inner

    by = agent("Outer", tools=[consult])
    made = Crew(agents=[by], tasks=[task("x", by)])
    wants = asks(tool_call("consult", {"q": "?"}))
    record(ran(getattr(made, way)), lambda call: wants if (call.role, call.turn) == ("Outer", 0) else says(call))
    assert record.roles == ["Outer", "Outer", "Inner", "Outer", "Outer"]
    assert [call.integration for call in record.calls] == ["crewai"] * 5
    assert parents(record)[2] == [0] and parents(record)[4] == [0, 2]


def test_agents_made_anew_for_every_task_are_one_role(record: Recorded) -> None:
    def run(_):
        for _i in range(3):
            crew("Same").kickoff()
        return 1

    record(run, says)
    assert [(c.role, c.turn) for c in record.calls] == [("Same", 0), ("Same", 1), ("Same", 2)]


def test_an_explicit_role_comes_first(record: Recorded) -> None:
    def run(_):
        with cotune.role("mine"):
            crew("Agent").kickoff()
        return 1

    record(run, says)
    assert record.roles == ["mine"]


def test_what_a_summary_asks_is_not_the_agents_turn(record: Recorded) -> None:
    @tool("shorten")
    def shorten(q: str) -> str:
        """Shorten a history."""
        history = [{"role": "user", "content": "long"}]
        llm.summarize_messages(history, [], verbose=False)
        return history[0]["content"]

    by = agent("Worker", tools=[shorten])
    wants = asks(tool_call("shorten", {"q": "?"}))
    made = Crew(agents=[by], tasks=[task("x", by)])
    record(ran(made.kickoff), lambda call: wants if (call.role, call.turn) == ("Worker", 0) else says(call))
    assert record.roles == ["Worker", "Worker/summarizer", "Worker"]


def test_many_crews_at_once_with_the_same_names() -> None:
    """Six episodes at a time, each with crews in threads, tasks and pools: every call stays with its own."""

    def one(number: int) -> Crew:
        by = agent("Same {n}")
        return Crew(agents=[by], tasks=[task("number {n}", by)])

    async def run_all():
        records = [Recorded() for _ in range(6)]

        def workflow(number: int):
            async def run(_):
                inputs = {"n": number}
                with ThreadPoolExecutor(1) as pool:
                    pooled = pool.submit(one(number).kickoff, inputs)
                    await asyncio.gather(one(number).kickoff_async(inputs), one(number).akickoff(inputs))
                    pooled.result()
                return 1

            return run

        async def reply(call):
            await asyncio.sleep(0.001 * (call.step % 3))
            return call.messages[0]["content"]

        await asyncio.gather(*(episode(workflow(i), reply, record.sink) for i, record in enumerate(records)))
        return records

    for number, record in enumerate(asyncio.run(run_all())):
        assert record.roles == ["Same {n}"] * 3
        assert sorted(call.turn for call in record.calls) == [0, 1, 2]
        assert all(f"You are Same {number}" in call.candidates[0].text for call in record.calls)


def test_a_crew_itself_is_a_workflow(record: Recorded) -> None:
    made = crew("Writer {q}")
    flow = cotune.workflow(made, inputs=lambda given: {"q": given["q"]}, reward=lambda out, given: len(out.raw))
    assert record(flow, says).rewards == {"team": 18.0}
    assert record(flow, says).rewards == {"team": 18.0}
    assert record.roles == ["Writer {q}"] * 2
    assert made.tasks[0].output is None


@pytest.mark.parametrize("opened", [False, True], ids=["class", "object"])
def test_a_flow_itself_is_a_workflow(record: Recorded, opened: bool) -> None:
    made = Steps() if opened else Steps
    flow = cotune.workflow(made, inputs=lambda given: {}, reward=lambda state, given: state["n"])
    assert flow.cotune.name == ("Steps" if made is Steps else "graph")
    outcome = record(flow, says)
    assert outcome.rewards == {"team": 7.0}
    assert record.roles[0] == "direct"


def test_a_crew_that_streams(record: Recorded) -> None:
    made = crew("Streamer", stream=True)

    def run(_):
        with contextlib.closing(made.kickoff()) as chunks:
            assert "".join(chunk.content for chunk in chunks) == "said by Streamer"
        return 1

    record(run, says)
    assert [(call.role, call.streamed) for call in record.calls] == [("Streamer", True)]


ORDER = """
import asyncio, sys
import crewai
llm = crewai.LLM(model="openai/gpt-4o-mini", base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
by = crewai.Agent(role="Early", goal="g", backstory="b", llm=llm)
made = crewai.Crew(agents=[by], tasks=[crewai.Task(description="d", expected_output="e", agent=by)])
import cotune
from tests.integrations.recorded import Recorded
record = Recorded()
record(cotune.workflow(made, reward=lambda out, task: len(out.raw)), lambda call: "ok")
assert record.roles == ["Early"], record.roles
"""


@pytest.mark.slow
def test_crews_made_before_cotune_was_imported() -> None:
    done = subprocess.run([sys.executable, "-c", ORDER], capture_output=True, text=True, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]


def test_importing_cotune_imports_no_crewai() -> None:
    code = "import sys, cotune.integrations.apps.activation as i; i.activate(); sys.exit('crewai' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_crew_in_a_graphs_node_and_a_graph_in_a_crews_tool(record: Recorded) -> None:
    """LangGraph around CrewAI around LangGraph: a call belongs to the innermost of them."""
    chat = ChatOpenAI(model="m", base_url=URL, api_key="none", max_retries=0)

    def plain(text: str) -> None:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": text}])

    def inner_node(state):
        plain("in the inner node")
        return {"messages": [chat.invoke("inner")]}

    inner = StateGraph(MessagesState)
    inner.add_node("inner", inner_node)
    inner.add_edge(START, "inner")
    inner_graph = inner.compile()

    @tool("research")
    def research(q: str) -> str:
        """Ask a graph."""
        plain("in the tool")
        chat.invoke("in the tool")
        return str(inner_graph.invoke({"messages": [("user", q)]})["messages"][-1].content)

    by = agent("Worker", tools=[research])

    def outer_node(state):
        plain("before")
        Crew(agents=[by], tasks=[task("x", by)]).kickoff()
        plain("after")
        return {"messages": []}

    outer = StateGraph(MessagesState)
    outer.add_node("outer", outer_node)
    outer.add_edge(START, "outer")
    graph = outer.compile()

    wants = asks(tool_call("research", {"q": "?"}))
    record(
        ran(lambda: graph.invoke({"messages": [("user", "hi")]})),
        lambda call: wants if (call.role, call.turn) == ("Worker", 0) else says(call),
    )
    assert record.roles == [
        "outer",
        "Worker",
        "Worker",
        "Worker",
        "outer/inner",
        "outer/inner",
        "Worker",
        "outer",
    ]
