"""Overlapping calls across frameworks, threads, tasks and nested frameworks: is each on its own role, episode, turn and
candidate? Every prompt says whose it is, every answer says which it is; the records must agree with both.

    python -m benchmarks.stress --calls 100000

Last line: {"calls", "wrong"}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.update(
    CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true", LANGSMITH_TRACING="false"
)
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-stress")

import openai
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import DiGraphBuilder, GraphFlow, RoundRobinGroupChat
from autogen_agentchat.tools import AgentTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool as crew_tool
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send
from rich.console import Console
from rich.progress import Progress

import cotune
from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Candidate, PolicyRef
from cotune.records.structs import Task as Given
from cotune.storage.sqlite_store import SqliteStore

NOWHERE = {"base_url": "http://127.0.0.1:9/v1", "api_key": "none", "max_retries": 0}
DELAY = 0.03
"""Seconds that an answer takes at most."""
PATIENCE = 120.0
"""Seconds without a call after which something hangs: every thread's stack is printed, and the script ends."""
AT_ONCE = 32
WHOSE = re.compile(r"WHOSE=(\w+)\|([\w-]+)")
WHICH = re.compile(r"<<\S+?>>")
Received = list[tuple[str, str]]
"""The answers that an application received: their texts, by role."""

chat = ChatOpenAI(model="m", **NOWHERE)
abilities = {"vision": False, "function_calling": True, "json_output": True, "structured_output": True}
team_client = OpenAIChatCompletionClient(model="m", model_info={**abilities, "family": "unknown"}, **NOWHERE)
crew_llm = LLM(model="openai/gpt-4o-mini", **NOWHERE)
sdk, async_sdk = openai.OpenAI(**NOWHERE), openai.AsyncOpenAI(**NOWHERE)


def whose(role: str, episode: str, *uses: str) -> str:
    """The system text of a role: names it, and the tools that its first answer calls."""
    return " ".join([f"WHOSE={role}|{episode}", *(f"USES={name}" for name in uses)])


def asked(role: str, episode: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": whose(role, episode)}, {"role": "user", "content": "go"}]


def by_sdk(role: str, episode: str) -> str:
    return sdk.chat.completions.create(model="m", messages=asked(role, episode)).choices[0].message.content


async def by_async_sdk(role: str, episode: str) -> str:
    stream = await async_sdk.chat.completions.create(model="m", messages=asked(role, episode), stream=True)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices])


async def graph_of_tasks(episode: str) -> Received:
    """LangGraph in asyncio: a Send fan-out, streams, and the plain SDK inside a node."""
    got: Received = []

    async def planner(state: MessagesState) -> dict[str, Any]:
        reply = await chat.ainvoke(asked("planner", episode))
        got.append(("planner", reply.content))
        return {"messages": [reply]}

    async def worker(state: dict[str, Any]) -> dict[str, Any]:
        parts = [part async for part in chat.astream(asked("worker", episode))]
        got.append(("worker", "".join(part.content for part in parts)))
        return {"messages": []}

    async def raw(state: MessagesState) -> dict[str, Any]:
        got.extend([("raw", text) for text in await asyncio.gather(*(by_async_sdk("raw", episode) for _ in range(3)))])
        return {"messages": []}

    graph = StateGraph(MessagesState)
    for name, node in {"planner": planner, "worker": worker, "raw": raw}.items():
        graph.add_node(name, node)
    graph.add_edge(START, "planner")
    graph.add_conditional_edges("planner", lambda state: [Send("worker", {"n": n}) for n in range(4)], ["worker"])
    graph.add_edge("worker", "raw")
    await graph.compile().ainvoke({"messages": [("user", "go")]})
    return got


def graph_of_threads(episode: str) -> Received:
    """LangGraph without asyncio: nodes that call from thread pools and threads of their own."""
    got: Received = []

    def pool(state: MessagesState) -> dict[str, Any]:
        with ThreadPoolExecutor(3) as threads:
            got.extend([("pool", text) for text in threads.map(lambda _: by_sdk("pool", episode), range(3))])
        return {"messages": []}

    def thread(state: MessagesState) -> dict[str, Any]:
        def call() -> None:
            got.append(("thread", chat.invoke(asked("thread", episode)).content))

        def call_async() -> None:
            got.append(("thread", asyncio.run(by_async_sdk("thread", episode))))

        threads = [threading.Thread(target=target) for target in (call, call_async)]
        for started in threads:
            started.start()
        for started in threads:
            started.join()
        return {"messages": []}

    graph = StateGraph(MessagesState)
    graph.add_node("pool", pool)
    graph.add_node("thread", thread)
    graph.add_edge(START, "pool")
    graph.add_edge(START, "thread")
    graph.compile().invoke({"messages": [("user", "go")]})
    return got


def assistant(name: str, episode: str, *uses: str, **options: Any) -> AssistantAgent:
    about = whose(name, episode, *uses)
    return AssistantAgent(name, team_client, description=name, system_message=about, **options)


async def team(episode: str) -> Received:
    """AutoGen: a round robin of agents that stream, an agent as a tool, and a LangGraph agent inside a tool."""
    got: Received = []

    async def ask_graph(x: str) -> str:
        """Ask a graph."""
        agent = create_agent(chat, [], system_prompt=whose("nested", episode), name="nested")
        reply = (await agent.ainvoke({"messages": [("user", "go")]}))["messages"][-1].content
        got.append(("nested", reply))
        return "asked"

    inner = AgentTool(assistant("inner", episode))
    agents = [
        assistant("first", episode, "ask_graph", tools=[ask_graph], max_tool_iterations=2),
        assistant("second", episode, model_client_stream=True),
        assistant("third", episode, "inner", tools=[inner], max_tool_iterations=2),
    ]
    result = await RoundRobinGroupChat(agents, max_turns=6).run(task="go")
    return got + [(m.source, m.content) for m in result.messages if m.type == "TextMessage" and m.source != "user"]


async def flow(episode: str) -> Received:
    """AutoGen's GraphFlow: two agents at the same time."""
    first, left, right, last = (assistant(name, episode) for name in ("first", "left", "right", "last"))
    graph = DiGraphBuilder()
    for agent in (first, left, right, last):
        graph.add_node(agent)
    graph.add_edge(first, left).add_edge(first, right).add_edge(left, last).add_edge(right, last)
    result = await GraphFlow([first, left, right, last], graph=graph.build()).run(task="go")
    return [(m.source, m.content) for m in result.messages if m.type == "TextMessage" and m.source in AGENTS]


def member(role: str, episode: str, *uses: str, **options: Any) -> Agent:
    return Agent(role=role, goal="g", backstory=whose(role, episode, *uses), llm=crew_llm, **options)


def crew(episode: str) -> Received:
    """CrewAI: tasks in threads of their own, and a LangGraph agent inside a tool."""
    got: Received = []

    @crew_tool("ask_graph")
    def ask_graph(x: str) -> str:
        """Ask a graph."""
        agent = create_agent(chat, [], system_prompt=whose("nested", episode), name="nested")
        got.append(("nested", agent.invoke({"messages": [("user", "go")]})["messages"][-1].content))
        return "asked"

    lead, left, right = (
        member("Lead", episode, "ask_graph", tools=[ask_graph]),
        *(member(role, episode) for role in ("Left", "Right")),
    )
    first = Task(description="first", expected_output="e", agent=lead)
    aside = [
        Task(description="aside", expected_output="e", agent=agent, context=[first], async_execution=True)
        for agent in (left, right)
    ]
    last = Task(description="last", expected_output="e", agent=lead, context=aside)
    output_of_crew = Crew(agents=[lead, left, right], tasks=[first, *aside, last]).kickoff()
    return got + [(output.agent, output.raw) for output in output_of_crew.tasks_output]


async def mixed(episode: str) -> Received:
    """A crew and a team, each inside a node of one graph, at the same time."""
    got: Received = []

    async def hires(state: MessagesState) -> dict[str, Any]:
        agent = member("Hired", episode)
        output = await Crew(
            agents=[agent], tasks=[Task(description="d", expected_output="e", agent=agent)]
        ).kickoff_async()
        got.append(("Hired", output.raw))
        return {"messages": []}

    async def meets(state: MessagesState) -> dict[str, Any]:
        result = await RoundRobinGroupChat([assistant("met", episode)], max_turns=2).run(task="go")
        got.extend(("met", m.content) for m in result.messages if m.source == "met")
        return {"messages": []}

    graph = StateGraph(MessagesState)
    graph.add_node("hires", hires)
    graph.add_node("meets", meets)
    graph.add_edge(START, "hires")
    graph.add_edge(START, "meets")
    await graph.compile().ainvoke({"messages": [("user", "go")]})
    return got


async def bare(episode: str) -> Received:
    """The plain SDK under explicit roles: tasks, threads, and event loops inside threads."""

    async def task(role: str) -> tuple[str, str]:
        with cotune.role(role):
            return role, await by_async_sdk(role, episode)

    def thread(role: str) -> tuple[str, str]:
        with cotune.role(role):
            return role, by_sdk(role, episode)

    def loop(role: str) -> tuple[str, str]:
        return asyncio.run(task(role))

    work: list[Awaitable[tuple[str, str]]] = [task(f"task{n}") for n in range(3)]
    work += [asyncio.to_thread(thread, f"thread{n}") for n in range(2)] + [asyncio.to_thread(loop, "loop")]
    return [await done for done in asyncio.as_completed(work)]


AGENTS = frozenset({"first", "left", "right", "last"})
APPS: dict[Callable[[str], Any], dict[str, str]] = {
    graph_of_tasks: {},
    graph_of_threads: {},
    team: {},
    flow: {},
    crew: {},
    mixed: {},
    bare: {},
}
"""By application: the recorded name of each of its roles, if it is longer than the role's name."""
SEQUENTIAL = frozenset({"planner", "first", "second", "third", "inner", "last", "met", "Lead", "Hired", "loop"})
"""Roles whose calls never overlap each other, so that their turns have one right order."""


@dataclass
class Check:
    """The answers and their results. `wrong` counts calls by the kind of their error."""

    rng: random.Random
    roles: dict[str, dict[str, str]] = field(default_factory=dict)
    on_call: Callable[[], None] | None = None
    calls: int = 0
    wrong: Counter[str] = field(default_factory=Counter)
    examples: list[str] = field(default_factory=list)
    turns: dict[str, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))

    def fault(self, kind: str, text: str) -> None:
        self.wrong[kind] += 1
        if len(self.examples) < 20:
            self.examples.append(f"{kind}: {text}")

    async def respond(self, call: LiveCall) -> Answer:
        """Answer after a random time, with three candidates; any may be chosen."""
        self.calls += 1
        if self.on_call:
            self.on_call()
        marks = WHOSE.search(json.dumps(call.messages))
        role, episode = marks.groups() if marks else ("?", "?")
        if episode != call.task.id:
            self.fault("episode", f"{role} of {episode} recorded in {call.task.id}")
        expected = self.roles.get(call.task.id, {}).get(role, role)
        if call.role != expected:
            self.fault("role", f"{expected} recorded as {call.role}")
        self.turns[call.task.id][role].append(call.turn)
        await asyncio.sleep(self.rng.random() * DELAY)
        candidates = tuple(self._candidate(i, call, role) for i in range(3))
        return Answer(candidates=candidates, chosen=self.rng.randrange(3), prompt_ids=(1, 2), policy=PolicyRef("p"))

    def _candidate(self, index: int, call: LiveCall, role: str) -> Candidate:
        text = f"<<{role}|{call.id}|{index}>>"
        message: dict[str, Any] = {"role": "assistant", "content": text}
        uses = re.findall(r"USES=(\S+?)[\s\"]", json.dumps(call.messages[0]) + " ")
        offered = {t["function"]["name"] for t in call.tools or []}
        wanted = [name for name in uses if name in offered]
        if wanted and not any(m.get("role") == "tool" for m in call.messages):
            arguments = {"task": "go"} if wanted[0] == "inner" else {"x": "go"}
            function = {"name": wanted[0], "arguments": json.dumps(arguments)}
            message = {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"id": f"call_{call.id}_{index}", "type": "function", "function": function}],
            }
        finish = "tool_calls" if "tool_calls" in message else "stop"
        return Candidate(
            index=index, text=text, message=message, token_ids=(index, 3), logprobs=(-1.0, -1.0), finish_reason=finish
        )

    def compare(self, episode: str, calls: list[CallRecord], received: Received) -> None:
        """Compares the application's answers with the recorded ones, and checks the order of turns."""
        by_answer = {call.candidates[call.chosen or 0].text: call for call in calls if call.candidates}
        for role, text in received:
            marks = WHICH.findall(text)
            call = by_answer.get(marks[-1]) if marks else None
            expected = self.roles.get(episode, {}).get(role, role)
            if call is None:
                self.fault("candidate", f"{role} of {episode} got {text[:80]!r}, which is no chosen candidate of it")
            elif call.role != expected:
                self.fault("answer", f"{role} of {episode} got the answer of {call.role}")
        steps = sorted(call.step for call in calls)
        if steps != list(range(len(calls))):
            self.fault("step", f"steps of {episode}: {steps}")
        for role, turns in self.turns.pop(episode).items():
            ordered = turns if role in SEQUENTIAL else sorted(turns)
            if ordered != list(range(len(turns))):
                self.fault("turn", f"turns of {role} in {episode}: {turns}")


async def stress(calls: int, store: SqliteStore, *, seed: int = 0, on_call: Callable[[], None] | None = None) -> Check:
    """Run applications of every kind, many at once, until `calls` calls were made; compare all at the end."""
    check = Check(random.Random(seed), on_call=on_call)
    received: dict[str, tuple[str, Received]] = {}
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(number: int, app: Callable[[str], Any]) -> None:
        name = f"{app.__name__}-{number}"
        check.roles[name] = APPS[app]
        got: Received = []

        if asyncio.iscoroutinefunction(app):

            async def solve(given: Any) -> float:
                got.extend(await app(name))
                return 0.0
        else:

            def solve(given: Any) -> float:
                got.extend(app(name))
                return 0.0

        outcome = await run_episode(workflow_of(workflow(solve)), Given(id=name, input={}), sink=store, responder=check)
        gate.release()
        if outcome.error is not None:
            check.fault("failed", f"{name}: {outcome.error}")
        received[name] = (outcome.episode.id, got)

    async with asyncio.TaskGroup() as group:
        number = 0
        while check.calls < calls:
            await gate.acquire()
            group.create_task(one(number, list(APPS)[number % len(APPS)]))
            number += 1
    store.flush()
    for name, (episode, got) in received.items():
        check.compare(name, store.calls(episode), got)
    if store.health.lost:
        check.fault("lost", f"{store.health.lost} records")
    return check


class Watch:
    """Ends the script with every thread's stack when nothing has happened for `PATIENCE` seconds."""

    def __init__(self) -> None:
        self._seen = time.monotonic()
        threading.Thread(target=self._run, daemon=True).start()

    def seen(self) -> None:
        self._seen = time.monotonic()

    def _run(self) -> None:
        while time.monotonic() - self._seen < PATIENCE:
            time.sleep(1)
        print(f"No call for {PATIENCE:.0f} s.", file=sys.stderr)
        faulthandler.dump_traceback(all_threads=True)
        os._exit(2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    started = time.perf_counter()
    memory = Path("/dev/shm")
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as crews,
        Progress(console=Console(stderr=True)) as bar,
    ):
        # All crews write into one SQLite file under one file lock: on a slow disk they would wait for nothing else.
        os.environ["CREWAI_STORAGE_DIR"] = crews
        shown = bar.add_task("calls", total=args.calls)
        store = SqliteStore.open(Path(folder) / "records.db")
        watch = Watch()

        def on_call() -> None:
            watch.seen()
            bar.advance(shown)

        with contextlib.closing(store):
            check = asyncio.run(stress(args.calls, store, seed=args.seed, on_call=on_call))
    seconds = time.perf_counter() - started
    print(f"{check.calls:,} calls of {len(check.roles):,} episodes, {AT_ONCE} at once, in {seconds:.0f} s")
    for kind, count in sorted(check.wrong.items()):
        print(f"  wrong {kind}: {count}")
    for example in check.examples:
        print(f"  {example}")
    print(json.dumps({"calls": check.calls, "wrong": sum(check.wrong.values())}))
    return 1 if check.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
