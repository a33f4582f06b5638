"""LangGraph threads in a replay: each branch has its own, also where the application names them alike."""

from __future__ import annotations

import asyncio
import operator
import uuid
import zlib
from pathlib import Path
from typing import Annotated, Any

import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.types import Send

from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.records.structs import Episode, Task
from cotune.replay.script import Replay, read_script
from tests.integrations import replay_apps
from tests.integrations.graphs import chain
from tests.integrations.recorded import Responder
from tests.integrations.replay.test_replay import Lab, reply

pytestmark = pytest.mark.usefixtures("nowhere")


class State(MessagesState):
    notes: Annotated[list[str], operator.add]


RAN: list[str] = []


def speaker(name: str) -> Any:
    async def speak(state: Any) -> Any:
        RAN.append(name)
        said = await replay_apps.model.ainvoke([HumanMessage(f"{name} {state.get('notes')}"), *state["messages"]])
        return {"messages": [said], "notes": [name]}

    return speak


def application(saver: Any) -> Any:
    """A start, two side by side, a graph within the graph, and an end: each reads what was said before."""
    inner = chain(("deep", speaker("deep")), state=State)
    builder = StateGraph(State)
    for name in ("start", "left", "right", "end"):
        builder.add_node(name, speaker(name))
    builder.add_node("inner", inner)
    builder.add_edge(START, "start")
    builder.add_edge("start", "left").add_edge("start", "right")
    builder.add_edge(["left", "right"], "inner").add_edge("inner", "end")
    graph = builder.compile(checkpointer=saver)

    async def solve(task: Any) -> dict[str, float]:
        opening = await replay_apps.model.ainvoke(f"open {task['n']}")
        config = {"configurable": {"thread_id": f"thread {task['n']}"}}
        state = await graph.ainvoke({"messages": [HumanMessage(str(opening.content))], "notes": []}, config)
        kept = (await graph.aget_state(config)).values
        assert [m.content for m in kept["messages"]] == [m.content for m in state["messages"]]
        closing = await replay_apps.model.ainvoke(f"close {state['messages'][-1].content} {state['notes']}")
        return {"team": len(closing.content) / 10, "calls": float(len(state["messages"]))}

    return solve


async def same(call: Any) -> Any:
    """Says the same to the same."""
    return f"{call.role} {zlib.crc32(repr([m['content'] for m in call.messages]).encode())}"


async def run(lab: Lab, replays: Any = None, *, freeze: bool = False) -> list[Episode]:
    batch = EpisodeBatch(
        tasks=[Task(id="1", input={"n": 1})], sink=lab.store, phase="trace", replays=replays or {}, freeze=freeze
    )
    episodes = await rollout(lab.flow, batch, Responder(same if replays else reply))
    lab.store.flush()
    return episodes


def branch(lab: Lab, trunk: Episode, role: str, *, freeze: bool = False) -> tuple[Episode, list[str]]:
    """A branch at a call, and the nodes that ran in it."""
    script = read_script(lab.store, trunk.id)
    RAN.clear()
    replays = {("1", 1): Replay(script=script, fork=lab.call(trunk, role).id)}
    (episode,) = asyncio.run(run(lab, replays, freeze=freeze))
    return episode, list(RAN)


def test_a_branch_does_not_read_the_thread_of_its_trunk(tmp_path: Path):
    """Trunk and branch name their thread alike; a branch that read the trunk's would have twice its notes."""
    lab = Lab(tmp_path, application(InMemorySaver()))
    (trunk,) = asyncio.run(run(lab))
    found, ran = branch(lab, trunk, "end")
    assert found.error is None and sorted(ran) == ["deep", "end", "left", "right", "start"]
    assert trunk.threads == ("thread 1",) and found.threads == (f"thread 1@{found.id}",)
    calls = lab.store.calls(found.id)
    assert [call.replayed is None for call in calls] == [False] * 5 + [True] * 2


def fan(saver: Any) -> Any:
    """Three side by side by `Send`, each on its own, and what joins them; plain functions, a thread without a name."""

    def worker(state: Any) -> Any:
        RAN.append("worker")
        return {"said": [str(replay_apps.model.invoke(f"part {state['part']}").content)]}

    def join(state: Any) -> Any:
        RAN.append("join")
        return {"said": [str(replay_apps.model.invoke(f"join {state['said']}").content)]}

    builder = StateGraph(replay_apps.Parts)
    builder.add_node("worker", worker)
    builder.add_node("join", join)
    builder.add_node("last", join)
    spread = lambda state: [Send("worker", {"part": part}) for part in range(3)]  # noqa: E731
    builder.add_conditional_edges(START, spread, ["worker"])
    builder.add_edge("worker", "join").add_edge("join", "last")
    graph = builder.compile(checkpointer=saver)

    def solve(task: Any) -> float:
        config = {"configurable": {"thread_id": str(uuid.uuid4())}}
        state = graph.invoke({"question": f"q{task['n']} {uuid.uuid4()}", "said": []}, config)
        assert graph.get_state(config).values == state
        return len(state["said"][-1]) / 10

    return solve


def test_plain_functions_and_frozen_threads(tmp_path: Path):
    """The thread's name is the same in all branches: each has a thread of its own nevertheless."""
    lab = Lab(tmp_path, fan(InMemorySaver()))
    (trunk,) = asyncio.run(run(lab, freeze=True))
    for role in ("join", "last"):
        found, ran = branch(lab, trunk, role, freeze=True)
        assert (found.error, len(ran)) == (None, 5)
