"""CPU that recording adds to an application. Prints a table; the last line is JSON: added_ms_per_call, low, high.

A LangGraph node asks ChatOpenAI, answered instantly in process. Blocks of episodes take turns in three processes: one
never heard of cotune, one has its hooks but records nothing, one records. CPU of all threads, medians of differences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

PROMPT, CALLS_PER_EPISODE = 500, 10
FORKS = 5
BLOCK, WARM_UP = 5, 20
"""Episodes that a process runs before the next has its turn, and before the first turn."""
FORK = multiprocessing.get_context("fork")
Run = Callable[[int], Any]


def application() -> Any:
    """A compiled graph whose one node asks ChatOpenAI ten times in an episode. Nothing here knows of cotune."""
    import httpx
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, StateGraph
    from typing_extensions import TypedDict

    body = {
        "id": "c",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "north"}}],
        "usage": {"prompt_tokens": PROMPT, "completion_tokens": 1, "total_tokens": PROMPT + 1},
    }
    transport = httpx.MockTransport(lambda request: httpx.Response(200, json=body))
    client = httpx.AsyncClient(transport=transport)
    model = ChatOpenAI(model="m", api_key="none", base_url="http://local/v1", http_async_client=client)  # type: ignore

    class State(TypedDict):
        turn: int

    async def navigator(state: State) -> State:
        system = {"role": "system", "content": "You are the navigator. " + "Look around first. " * 90}
        await model.ainvoke([system, {"role": "user", "content": f"Turn {state['turn']}: where to?"}])
        return {"turn": state["turn"] + 1}

    graph = StateGraph(State)
    graph.add_node("navigator", navigator)
    graph.add_edge(START, "navigator")
    graph.add_conditional_edges("navigator", lambda s: "navigator" if s["turn"] < CALLS_PER_EPISODE else END)
    return graph.compile()


def bare(app: Any, folder: str) -> Run:
    async def run(episodes: int) -> None:
        for _ in range(episodes):
            await app.ainvoke({"turn": 0})

    return run


def recorded(app: Any, folder: str) -> Run:
    import cotune
    from cotune.episodes.episode import run_episode
    from cotune.episodes.workflows import workflow_of
    from cotune.records.structs import Task
    from cotune.storage.sqlite_store import SqliteStore

    store = SqliteStore.open(folder)
    flow = workflow_of(cotune.workflow(app, inputs=lambda task: {"turn": 0}, reward=lambda state, task: 1.0))

    async def run(episodes: int) -> None:
        for number in range(episodes):
            outcome = await run_episode(flow, Task(id=f"t{number}", input=number), sink=store)
            if outcome.error or outcome.episode.calls != CALLS_PER_EPISODE or store.health.lost:
                raise SystemExit(f"not recorded: {outcome.error}")
        store.flush()

    return run


def idle(app: Any, folder: str) -> Run:
    """By itself, after cotune has hooked into the frameworks."""
    asyncio.run(recorded(app, folder)(1))
    return bare(app, folder)


def sibling(way: Callable[[Any, str], Run], app: Any, pipe: Any) -> None:
    """Run as many episodes as the pipe says; answer with the milliseconds of CPU per call, of all threads."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        run = way(app, folder)
        while episodes := pipe.recv():
            started = time.process_time()
            runner.run(run(episodes))
            pipe.send((time.process_time() - started) * 1000 / (episodes * CALLS_PER_EPISODE))


def measure(rounds: int) -> list[list[float]]:
    """Milliseconds of CPU per call by itself, with idle hooks, and recorded, in blocks that take turns.

    The three processes are forked from one that has run the application: processes that each started by themselves
    differ by as much as recording costs.
    """
    app = application()
    asyncio.run(bare(app, "")(WARM_UP))
    rows: list[list[float]] = []
    for _ in range(FORKS):
        pipes, processes = [], []
        for way in (bare, idle, recorded):
            parent_end, child_end = FORK.Pipe()
            processes.append(FORK.Process(target=sibling, args=(way, app, child_end), daemon=True))
            processes[-1].start()
            child_end.close()
            pipes.append(parent_end)

        def ask(pipe: Any, episodes: int) -> float:
            pipe.send(episodes)
            return float(pipe.recv())

        for pipe in pipes:
            ask(pipe, WARM_UP)
        for number in range(rounds):
            took = {pipe: ask(pipe, BLOCK) for pipe in (pipes if number % 2 else pipes[::-1])}
            rows.append([took[pipe] for pipe in pipes])
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send(0)
            process.join()
    return rows


def middle(values: list[float]) -> tuple[float, float, float]:
    """The median and its 95% interval, from the order statistics."""
    ordered, half, centre = sorted(values), 0.98 * len(values) ** 0.5, (len(values) - 1) / 2
    low, high = max(0, math.floor(centre - half)), min(len(values) - 1, math.ceil(centre + half))
    return statistics.median(ordered), ordered[low], ordered[high]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=300, help="blocks of 50 calls that each way runs")
    blocks = measure(max(1, parser.parse_args().blocks // FORKS))
    print(f"{'CPU per call, LangGraph + ChatOpenAI':44} {statistics.median(row[0] for row in blocks):9.3f} ms")
    for way, name in ((1, "not recorded, but with the hooks of cotune"), (2, "recorded")):
        added, low, high = middle([row[way] - row[0] for row in blocks])
        total = statistics.median(row[way] for row in blocks)
        print(f"{name:44} {total:9.3f} ms   ({added:+.3f} ms; 95% interval {low:.3f} to {high:.3f})")
    print(json.dumps({"added_ms_per_call": round(added, 4), "low": round(low, 4), "high": round(high, 4)}))


if __name__ == "__main__":
    main()
