"""The dry run tells the truth of applications as people write them: all roles, and nothing blocked without a cause."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import pytest
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from pydantic import BaseModel
from typing_extensions import TypedDict

import cotune
from cotune.cli.main import main
from cotune.trainer.before.check.dry_run import check
from cotune.trainer.before.check.report import CheckLimits, CheckReport
from cotune.trainer.config.load import convert

TASKS = [{"id": "t", "question": "q"}]
pytestmark = pytest.mark.usefixtures("provider")


def dry(app: Any, **options: Any) -> CheckReport:
    return check(app, TASKS, convert({"model": "none"}), **options)


def roles(report: CheckReport) -> set[str]:
    return {role.role for role in report.roles}


def idle(report: CheckReport) -> dict[str, bool]:
    return {one.role: one.ran for one in report.idle}


def of(graph: Any) -> Any:
    return cotune.workflow(graph, inputs=lambda task: {"question": task["question"]}, reward=lambda state, task: 1.0)


class State(TypedDict, total=False):
    question: str
    plan: list[str]
    notes: Annotated[list[str], operator.add]
    next: str


class Plan(BaseModel):
    steps: list[str] = []


class Route(BaseModel):
    next: Literal["FINISH", "writer", "critic"]


def node(name: str) -> Any:
    def run(state: State) -> dict[str, Any]:
        return {"notes": [ChatOpenAI(model="m", temperature=0).invoke(name).text]}

    return run


def test_a_scorer_is_missed_by_the_variable_of_a_graph_not_by_the_graphs_name() -> None:
    graph = StateGraph(State).add_node("writer", node("write")).add_node("critic", node("criticize"))
    graph.add_edge(START, "writer").add_edge("writer", "critic")
    solve = of(graph.compile(name="crew"))
    solve.scorer("writer")(lambda candidate, call, task: 1.0)
    remedies = [finding.remedy for finding in dry(solve).findings if finding.about == "critic" and finding.remedy]
    assert remedies == ['Add @solve.scorer("critic"), or use --plan independent.']


def test_a_fan_out_over_a_made_up_list_runs_and_temperature_0_blocks_nothing() -> None:
    def plan(state: State) -> dict[str, Any]:
        return {"plan": ChatOpenAI(model="m", temperature=0).with_structured_output(Plan).invoke("plan").steps}

    def write(state: State) -> dict[str, Any]:
        return {"notes": [state["notes"][0][:3]]} if len(state["plan"]) else {}

    builder = StateGraph(State)
    builder.add_node("plan", plan)
    builder.add_node("work", node("work"))
    builder.add_node("write", write)
    builder.add_node("report", node("report"))
    builder.add_edge(START, "plan")
    builder.add_conditional_edges("plan", lambda s: [Send("work", {"question": step}) for step in s["plan"]], ["work"])
    builder.add_edge("work", "write")
    builder.add_edge("write", "report")
    report = dry(of(builder.compile()))
    assert report.trainable, report.findings
    assert roles(report) == {"plan", "work", "report"}
    assert idle(report) == {"write": True}
    assert {call.params["temperature"] for call in report.calls} == {0.0}
    assert [(g.roles, g.size) for g in report.groups] == [(("plan",), 4), (("work",), 4), (("report",), 4)]


def _team(options: Any = Route) -> Any:
    def supervisor(state: State) -> dict[str, Any]:
        return {"next": ChatOpenAI(model="m").with_structured_output(options).invoke("who is next?").next}

    builder = StateGraph(State)
    builder.add_node("supervisor", supervisor)
    for name in ("writer", "critic", "lawyer"):
        builder.add_node(name, node(name))
        builder.add_edge(name, "supervisor")
    builder.add_edge(START, "supervisor")
    ways = {"writer": "writer", "critic": "critic", "lawyer": "lawyer", "FINISH": END}
    builder.add_conditional_edges("supervisor", lambda state: state["next"], ways)
    return builder.compile()


def test_a_supervisor_takes_every_way_and_ends_and_a_node_that_never_ran_is_named() -> None:
    report = dry(of(_team()))
    assert report.trainable
    assert roles(report) == {"supervisor", "writer", "critic"}
    assert idle(report) == {"lawyer": False}
    (finding,) = [f for f in report.findings if f.about == "lawyer"]
    assert finding.level == "warns"
    assert finding.text.startswith("never ran in these runs (1 node of LangGraph).")


def test_a_scorer_of_a_node_that_never_ran_blocks_nothing() -> None:
    made = of(_team())
    for role in ("supervisor", "lawyer"):
        made.scorer(role)(lambda candidate, call, task: 1.0)
    policy = [{"name": "a", "roles": ["supervisor", "writer", "critic"]}, {"name": "b", "roles": ["lawyer"]}]
    report = check(made, TASKS, convert({"model": "none", "policy": policy}))
    assert report.trainable, report.findings
    assert idle(report) == {"lawyer": False}


def test_a_node_behind_a_later_answer_is_found_in_another_run() -> None:
    class Approved(BaseModel):
        approved: bool

    def judge(state: State) -> dict[str, Any]:
        verdict = ChatOpenAI(model="m").with_structured_output(Approved).invoke("good?").approved
        return {"next": "end" if verdict else "revise"}

    builder = StateGraph(State)
    builder.add_node("judge", judge)
    builder.add_node("revise", node("revise"))
    builder.add_edge(START, "judge")
    builder.add_conditional_edges("judge", lambda state: state["next"], {"end": END, "revise": "revise"})
    builder.add_edge("revise", "judge")
    report = dry(of(builder.compile()))
    assert (roles(report), idle(report)) == ({"judge", "revise"}, {})
    assert [(call.role, call.turn) for call in report.calls] == [("judge", 0), ("revise", 0)]


def test_a_crash_on_a_made_up_answer_says_so_and_leaves_the_verdict_open() -> None:
    def count(state: State) -> dict[str, Any]:
        return {"plan": [ChatOpenAI(model="m").invoke("how many?").text.split("~")[3]]}

    builder = StateGraph(State)
    builder.add_node("count", count)
    builder.add_edge(START, "count")
    report = dry(of(builder.compile()))
    (finding,) = [f for f in report.findings if f.level == "undecided"]
    assert report.verdict == "undecided" and not report.trainable
    assert "IndexError: list index out of range" in finding.text
    assert "Last answer before it: count (turn 0): drawn answer 1." in finding.text
    assert "--answers MODEL" in finding.remedy


def test_a_scorer_that_hangs_leaves_the_verdict_open() -> None:
    @cotune.workflow
    async def solve(task: Any) -> float:
        with cotune.role("first"):
            await ChatOpenAI(model="m").ainvoke("one")
        with cotune.role("second"):
            await ChatOpenAI(model="m").ainvoke("two")
        return 1.0

    @solve.scorer("second")
    async def waits(candidate: Any, call: Any, task: Any) -> float:
        await asyncio.sleep(60)
        return 1.0

    (finding,) = [f for f in dry(solve.cotune, limits=CheckLimits(timeout=2.0)).findings if f.level == "undecided"]
    assert "'second' was open (its scorer was running)" in finding.text
    assert finding.remedy.startswith("Raise --timeout")


def test_scorers_that_train_nobody_are_said() -> None:
    @cotune.workflow
    async def solve(task: Any) -> float:
        with cotune.role("first"):
            await ChatOpenAI(model="m").ainvoke("one")
        return 1.0

    @solve.scorer("first")
    def short(candidate: Any, call: Any, task: Any) -> float:
        return -len(candidate.text)

    def said(plan: str) -> list[str]:
        report = check(solve.cotune, TASKS, convert({"model": "none", "plan": {"kind": plan}}))
        return [f.text for f in report.findings if f.text.startswith("the rewards of the scorers of first")]

    assert (len(said("independent")), len(said("tree"))) == (1, 0)


def test_autogen_members_are_selected_by_name_and_the_team_ends_by_its_word() -> None:
    from autogen_agentchat.conditions import TextMentionTermination
    from autogen_agentchat.teams import SelectorGroupChat

    from tests.integrations.apps.autogen.test_roles import agent
    from tests.integrations.autogen_models import autogen_client

    members = [agent(name) for name in ("planner", "searcher", "analyst")]
    team = SelectorGroupChat(
        members, model_client=autogen_client(), termination_condition=TextMentionTermination("Fin.")
    )
    report = dry(cotune.workflow(team, inputs=lambda task: task["question"], reward=lambda result, task: 1.0))
    assert report.trainable, report.findings
    assert roles(report) == {"SelectorGroupChat/selector", "planner", "searcher", "analyst"} and report.idle == ()
    assert report.unlisted == ()


def test_a_prebuilt_agent_in_a_named_graph_has_its_own_name_whether_or_not_it_is_reached() -> None:
    from langgraph.graph import MessagesState

    model = ChatOpenAI(model="m", api_key="none")
    graph = StateGraph(MessagesState)
    graph.add_node("flights", create_agent(model, [], name="flights"))
    graph.add_node("hotels", create_agent(model, [], name="hotels"))
    graph.add_edge(START, "flights")
    graph.add_conditional_edges("flights", lambda state: END, ["hotels", END])
    travel = graph.compile(name="travel")
    inputs = lambda task: {"messages": [("user", task["question"])]}  # noqa: E731
    report = dry(cotune.workflow(travel, inputs=inputs, reward=lambda result, task: 1.0))
    assert (roles(report), idle(report), report.unlisted) == ({"flights"}, {"hotels": False}, ())


def test_an_autogen_member_that_never_called_is_named() -> None:
    from autogen_agentchat.conditions import MaxMessageTermination
    from autogen_agentchat.teams import RoundRobinGroupChat

    from tests.integrations.apps.autogen.test_roles import agent

    team = RoundRobinGroupChat([agent("first"), agent("second")], termination_condition=MaxMessageTermination(2))
    report = dry(cotune.workflow(team, inputs=lambda task: task["question"], reward=lambda result, task: 1.0))
    assert (roles(report), idle(report)) == ({"first"}, {"second": False})


def test_a_crew_delegates_to_names_that_exist() -> None:
    from crewai import LLM, Agent, Crew, Task

    llm = LLM(model="openai/gpt-4o-mini", api_key="none", max_retries=0)

    def agent(role: str, **options: Any) -> Agent:
        return Agent(role=role, goal="g", backstory="b", llm=llm, **options)

    agents = [agent("Editor", allow_delegation=True), agent("Field Researcher"), agent("Fact Checker")]
    tasks = [Task(description="write", expected_output="an article", agent=agents[0])]
    crew = Crew(agents=agents, tasks=tasks)
    report = dry(cotune.workflow(crew, inputs=lambda task: {}, reward=lambda result, task: 1.0))
    assert report.trainable, report.findings
    assert roles(report) == {"Editor", "Field Researcher", "Fact Checker"} and report.idle == ()
    report = dry(cotune.workflow(crew, inputs=lambda task: {}, reward=lambda result, task: 1.0), call_tools=False)
    assert (roles(report), set(idle(report))) == ({"Editor"}, {"Field Researcher", "Fact Checker"})


def test_an_agent_behind_the_second_of_two_handoffs_is_found() -> None:
    from agents import Agent, Runner, set_tracing_disabled

    set_tracing_disabled(True)
    tutors = [Agent(name, instructions="You teach.") for name in ("maths", "history")]
    triage = Agent("triage", instructions="You triage.", handoffs=tutors)

    async def solve(task: Any) -> float:
        return float(len((await Runner.run(triage, task["question"])).final_output))

    report = dry(cotune.workflow(solve))
    assert (roles(report), report.idle) == ({"triage", "maths", "history"}, ())


LOUD = """
import atexit, os, subprocess, sys
import cotune, openai
print("imported")
atexit.register(print, "goodbye")

@cotune.workflow
def solve(task):
    print("working")
    os.write(1, b"raw")
    subprocess.run([sys.executable, "-c", "print('child')"])
    openai.OpenAI(api_key="none").chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])
    return 1.0
"""


def test_json_is_alone_whatever_the_application_prints(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(LOUD)
    (tmp_path / "tasks.jsonl").write_text('{"id": "q"}\n')
    command = [sys.executable, "-m", "cotune", "check", "app:solve", "--tasks", "tasks.jsonl", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert json.loads(done.stdout)["trainable"], done.stderr
    for word in ("imported", "working", "raw", "child", "goodbye"):
        assert word in done.stderr


def test_json_goes_to_a_file_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "quiet_app.py").write_text(LOUD.replace('atexit.register(print, "goodbye")', ""))
    (tmp_path / "tasks.jsonl").write_text('{"id": "q"}\n')
    app, tasks, file = f"{tmp_path}/quiet_app.py:solve", f"{tmp_path}/tasks.jsonl", tmp_path / "report.json"
    assert main(["check", app, "--tasks", tasks, "--json", str(file)]) == 0
    assert json.loads(file.read_text())["trainable"]
    assert capsys.readouterr().out == ""


def test_two_agents_without_a_name_are_said_to_share_a_role() -> None:
    agents = [create_agent(ChatOpenAI(model="m"), []), create_agent(ChatOpenAI(model="m"), [])]

    @cotune.workflow
    def solve(task: Any) -> float:
        for agent in agents:
            agent.invoke({"messages": [("user", task["question"])]})
        return 1.0

    report = dry(solve)
    assert roles(report) == {"model"}
    (finding,) = [finding for finding in report.findings if finding.about.startswith("shared_role")]
    assert (finding.level, finding.about) == ("warns", "shared_role (1)")
    assert (
        "Several agents without a name share the role 'model', or one agent" in finding.text
        and f"{__file__}:" in finding.text
    )


ASKS = """
import cotune, openai

@cotune.workflow
def solve(task):
    with openai.OpenAI(api_key="none") as client, cotune.role("bot"):
        messages = [{"role": "user", "content": "hi"}]
        reply = client.chat.completions.create(model="m", messages=messages).choices[0].message.content
    if task["ask"]:
        input("Go on? ")
    if len(reply) < 1000:
        raise ValueError("too short")
    return 1.0
"""
WITHOUT_GRAMMARS = "import sys; sys.modules['llguidance'] = None; from cotune.cli.main import main; sys.exit(main())"


@pytest.mark.parametrize(("asks", "status", "verdict"), [(True, 1, "not trainable"), (False, 3, "undecided")])
def test_a_person_is_not_waited_for_and_the_status_is_the_verdict(
    tmp_path: Path, asks: bool, status: int, verdict: str
) -> None:
    """In the base install too, and with a standard input on which nothing comes."""
    (tmp_path / "app.py").write_text(ASKS)
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "q", "ask": asks}) + "\n")
    read, write = os.pipe()
    command = [sys.executable, "-c", WITHOUT_GRAMMARS, "check", "app:solve", "--tasks", "tasks.jsonl", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False, stdin=read)
    os.close(read)
    os.close(write)
    report = json.loads(done.stdout)
    assert (done.returncode, report["verdict"]) == (status, verdict), done.stderr
    told = " ".join(f"{f['text']} {f['remedy']}" for f in report["findings"] if f["level"] in ("blocks", "undecided"))
    line = ASKS.splitlines().index('        input("Go on? ")') + 1
    assert f"it waits for a person: input('Go on? ') at {tmp_path}/app.py:{line} in solve" in told or not asks
    assert "--answers MODEL" in told or asks
