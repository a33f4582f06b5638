"""Branches that go on from a checkpoint of their trunk: the same results as by repeating what comes before."""

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

from cotune.algorithms.collect import attributed, collect
from cotune.algorithms.recipes import PROMPT_KEY, Attribution
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.records.structs import Episode, RewardRecord, Task, candidate_id
from cotune.replay.script import Replay, read_script
from tests.integrations import replay_apps
from tests.integrations.apps.replay.test_replay import Lab, reply
from tests.integrations.graphs import chain
from tests.integrations.recorded import Responder

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


def branch(
    lab: Lab, trunk: Episode, role: str, turn: int = 0, *, resume: bool, freeze: bool = False
) -> tuple[Episode, list[str]]:
    """A branch at a call, and the nodes that ran in it."""
    script = read_script(lab.store, trunk.id)
    RAN.clear()
    replays = {("1", 1): Replay(script=script, fork=lab.call(trunk, role, turn).id, resume=resume)}
    (episode,) = asyncio.run(run(lab, replays, freeze=freeze))
    return episode, list(RAN)


def seen(lab: Lab, episode: Episode) -> tuple[Any, ...]:
    """All that a branch is used for; the numbers of calls side by side in threads are chance."""
    records = lab.store.calls(episode.id)
    said = {c.id: (c.role, c.messages) for c in records}
    calls = [
        (c.role, c.messages, c.params, c.prompt, c.candidates, c.replayed, sorted(map(said.get, c.parents)))
        for c in records
    ]
    return sorted(calls, key=str), lab.store.rewards([episode.id])[episode.id], episode.status, len(calls)


def numbered(lab: Lab, episode: Episode) -> list[tuple[int, str, int]]:
    return [(c.step, c.role, c.turn) for c in lab.store.calls(episode.id)]


@pytest.mark.parametrize(
    ("role", "ran", "resumed"),
    [
        ("end", ["end"], True),
        ("left", ["left", "right", "deep", "end"], True),
        ("start", ["start", "left", "right", "deep", "end"], False),
        ("inner/deep", ["start", "left", "right", "deep", "end"], False),
        ("app", ["start", "left", "right", "deep", "end"], False),
    ],
)
def test_a_branch_from_a_checkpoint_is_as_one_from_the_start(tmp_path: Path, role: str, ran: list[str], resumed: bool):
    lab = Lab(tmp_path, application(InMemorySaver()))
    (trunk,) = asyncio.run(run(lab))
    whole, _ = branch(lab, trunk, role, resume=False)
    short, nodes = branch(lab, trunk, role, resume=True)
    assert (whole.error, short.error) == (None, None)
    assert sorted(nodes) == sorted(ran) and (whole.fork.resumed, short.fork.resumed) == (False, resumed)
    assert seen(lab, short) == seen(lab, whole) and numbered(lab, short) == numbered(lab, whole)


@pytest.mark.parametrize("scope", ["sum", "mean"])
def test_all_roles_of_a_turn_count_in_a_branch_from_a_checkpoint(tmp_path: Path, scope: Any):
    """Five roles before the fork gave 1, 2, 4, 8 and 16, the trunk's own call 32, and that of a branch 100."""
    lab = Lab(tmp_path, application(InMemorySaver()))
    (trunk,) = asyncio.run(run(lab))
    turn = [call for call in lab.store.calls(trunk.id) if call.turn == 0]
    before = [call for call in turn if call.role != "end"]
    own = lab.call(trunk, "end")
    lab.store.write([RewardRecord(candidate_id(call.id, 0), "local", 2.0**i) for i, call in enumerate([*before, own])])
    branches = [branch(lab, trunk, "end", resume=resume)[0] for resume in (False, True)]
    assert [one.fork.resumed for one in branches] == [False, True]
    lab.store.write([RewardRecord(candidate_id(one.fork.at, 0), "local", 100.0) for one in branches])
    lab.store.flush()
    collected = collect(lab.store, [trunk, *branches], plan="replay", roles=["end"], others=True)
    found = attributed(collected, Attribution(scope=scope), PROMPT_KEY).tolist()
    assert len(before) == 5 and [sample.rollout for sample in collected.samples] == [
        trunk.id,
        *(b.id for b in branches),
    ]
    divided = {"sum": 1, "mean": 6}[scope]
    assert found == pytest.approx([63 / divided, 131 / divided, 131 / divided])


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
    for role, nodes in (("join", ["join", "join"]), ("last", ["join"])):
        whole, _ = branch(lab, trunk, role, resume=False, freeze=True)
        short, ran = branch(lab, trunk, role, resume=True, freeze=True)
        assert (whole.error, short.error, ran, short.fork.resumed) == (None, None, nodes, True)
        assert seen(lab, short) == seen(lab, whole)


async def once(graph: Any, config: Any, task: Any) -> Any:
    return await graph.ainvoke({"messages": [HumanMessage("one")]}, config)


async def twice(graph: Any, config: Any, task: Any) -> Any:
    await graph.ainvoke({"messages": [HumanMessage("one")]}, config)
    return await graph.ainvoke({"messages": [HumanMessage("two")]}, config)


async def streamed(graph: Any, config: Any, task: Any) -> Any:
    async for part in graph.astream({"messages": [HumanMessage("one")]}, config, stream_mode="values"):
        last = part
    return last


async def beside(graph: Any, config: Any, task: Any) -> Any:
    asked = graph.ainvoke({"messages": [HumanMessage("one")]}, config)
    return (await asyncio.gather(asked, replay_apps.model.ainvoke("beside")))[0]


@pytest.mark.parametrize("way", [twice, streamed, beside, "another saver"])
def test_where_it_cannot_the_application_runs_again(tmp_path: Path, way: Any):
    kept = InMemorySaver()

    async def solve(task: Any) -> float:
        saver = InMemorySaver() if way == "another saver" else kept
        graph = chain(("first", speaker("first")), ("second", speaker("second")), checkpointer=saver)
        config = {"configurable": {"thread_id": str(uuid.uuid4())}}
        state = await (once if way == "another saver" else way)(graph, config, task)
        return len(state["messages"][-1].content) / 10

    lab = Lab(tmp_path, solve)
    (trunk,) = asyncio.run(run(lab))
    turn = 1 if way is twice else 0  # the first of two runs would be as any other
    found, ran = branch(lab, trunk, "second", turn, resume=True)
    assert (found.error, found.fork.resumed) == (None, False) and ran[:2] == ["first", "second"]
    assert seen(lab, found) == seen(lab, branch(lab, trunk, "second", turn, resume=False)[0])
