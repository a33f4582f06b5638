"""Cost of recording. Prints a table; the last line is JSON: added_ms_per_call, calls_per_s, rss_growth_mb.

added_ms_per_call: CPU time that recording adds to a call that a LangGraph node makes with ChatOpenAI, answered
instantly in process. Pairs of processes, one of which never heard of cotune, take turns; median of the differences.
calls_per_s: calls recorded into a file, flush included, with prompts of 500 tokens that share nothing and are made
beforehand; median of the rounds. rss_growth_mb: the most that the process grew while it recorded 200,000 such calls.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cotune.context import Mark
from cotune.recorder import Answer, LiveEpisode
from cotune.records import Candidate, PolicyRef, Task
from cotune.sqlite_store import SqliteStore

PROMPT, REPLY = 500, 32
CALLS_PER_EPISODE = 10
PAIRS = 5
Tokens = tuple[int, ...]


def token_pool() -> list[int]:
    rng = random.Random(0)
    return [rng.randrange(1000, 150_000) for _ in range(6_000)]


def fresh(pool: list[int], rng: random.Random) -> Iterator[tuple[Tokens, Tokens]]:
    """Prompts that share nothing with each other."""
    for number in range(sys.maxsize):
        at = rng.randrange(len(pool) - PROMPT - REPLY)
        yield (number, *pool[at : at + PROMPT - 1]), tuple(pool[at + PROMPT : at + PROMPT + REPLY])


def growing(pool: list[int], rng: random.Random) -> Iterator[tuple[Tokens, Tokens]]:
    """Conversations of one role that grow to 500 tokens in the ten calls of an episode."""
    for number in range(sys.maxsize):
        at = rng.randrange(len(pool) - PROMPT - REPLY)
        path = (number, *pool[at : at + PROMPT])
        for turn in range(1, CALLS_PER_EPISODE + 1):
            yield path[: turn * 50 - 10], path[turn * 50 - 10 : turn * 50]


def record(store: SqliteStore, calls: int, prompts: Iterator[tuple[Tokens, Tokens]], k: int = 1) -> None:
    """Record episodes of ten calls with `k` candidates each."""
    logprobs = tuple(-random.Random(1).random() for _ in range(REPLY))
    policy = PolicyRef("navigator", 1)
    for number in range(calls // CALLS_PER_EPISODE):
        live = LiveEpisode(store, Task(id=f"task-{number}", input=number), workflow="bench", phase="train")
        for step in range(CALLS_PER_EPISODE):
            system = {"role": "system", "content": "You are the navigator."}
            user = {"role": "user", "content": f"Task {number}, call {step}: where to?"}
            call = live.start(
                Mark("navigator", "bench"), {"model": "m", "messages": [system, user], "temperature": 1.0}
            )
            prompt, reply = next(prompts)
            said = {"role": "assistant", "content": f"north {number} {step}"}
            candidates = tuple(
                Candidate(index=i, text="north", message=said, token_ids=reply, logprobs=logprobs[: len(reply)])
                for i in range(k)
            )
            rewards = tuple({"local": 1.0} for _ in range(k))
            call.finish(Answer(candidates=candidates, prompt_ids=prompt, policy=policy, rewards=rewards))
        live.end("ok", rewards={"team": 1.0})


def throughput(folder: Path, calls: int, rounds: int, prompts: Callable[..., Any], k: int = 1) -> list[float]:
    """Calls per second of each round, every round into a file of its own."""
    pool, found = token_pool(), []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            store = SqliteStore.open(name)
            made = iter(list(itertools.islice(prompts(pool, random.Random(number)), calls)))
            started = time.perf_counter()
            record(store, calls, made, k)
            store.flush()
            found.append(calls / (time.perf_counter() - started))
            lost = store.lost
            store.close()
            if lost:
                raise SystemExit(f"{lost} records were lost")
    return found


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(folder: Path, calls: int) -> dict[str, float]:
    """The most that this process grew, looked at every 2,000 calls, and the size of the file."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        store = SqliteStore.open(name)
        prompts = fresh(token_pool(), random.Random(0))
        record(store, 100, prompts)
        before = resident_mb()
        seen = []
        started = time.perf_counter()
        for _ in range(calls // 2000):
            record(store, 2000, prompts)
            seen.append(resident_mb())
        store.flush()
        seen.append(resident_mb())
        rate = calls / (time.perf_counter() - started)
        store.close()
        size = (Path(name) / "records.db").stat().st_size / 2**20
        return {"growth": max(seen) - before, "end": seen[-1] - before, "file": size, "rate": rate, "lost": store.lost}


def application(recorded: bool, folder: str) -> Callable[[int], Any]:
    """A graph whose one node asks ChatOpenAI ten times in an episode; returns a coroutine function of n episodes."""
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
    compiled = graph.compile()

    async def bare(episodes: int) -> None:
        for _ in range(episodes):
            await compiled.ainvoke({"turn": 0})

    if not recorded:
        return bare
    import cotune
    from cotune.episodes import run_episode
    from cotune.workflow import workflow_of

    store = SqliteStore.open(folder)
    flow = workflow_of(cotune.workflow(compiled, inputs=lambda task: {"turn": 0}, reward=lambda state, task: 1.0))

    async def recording(episodes: int) -> None:
        for number in range(episodes):
            outcome = await run_episode(flow, Task(id=f"t{number}", input=number), sink=store)
            if outcome.error or outcome.episode.calls != CALLS_PER_EPISODE or store.lost:
                raise SystemExit(f"not recorded: {outcome.error}")
        store.flush()

    return recording


def worker(recorded: bool) -> None:
    """Run as many episodes as each line of stdin says; answer with the CPU seconds that the process took."""
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        run = application(recorded, folder)
        for line in sys.stdin:
            started = time.process_time()
            runner.run(run(int(line)))
            print(time.process_time() - started, flush=True)


def added(calls: int, rounds: int) -> tuple[float, float, float, float]:
    """Milliseconds of CPU per call: without recording, with it, the median difference, that of the fastest rounds.

    The rounds are divided among pairs of processes, as each process is a little faster or slower throughout.
    """
    rows = [row for _ in range(PAIRS) for row in _pair(max(1, calls // CALLS_PER_EPISODE), -(-rounds // PAIRS))]
    without, with_it = (statistics.median(column) for column in zip(*rows, strict=True))
    fastest = [min(column) for column in zip(*rows, strict=True)]
    return without, with_it, statistics.median(b - a for a, b in rows), fastest[1] - fastest[0]


def _pair(episodes: int, rounds: int) -> list[tuple[float, ...]]:
    """Milliseconds per call in two processes that take turns, one without recording and one with it."""
    command = [sys.executable, __file__, "--worker"]
    processes = [
        subprocess.Popen([*command, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for kind in ("bare", "recorded")
    ]

    def ask(process: subprocess.Popen[str], episodes: int) -> float:
        assert process.stdin and process.stdout
        process.stdin.write(f"{episodes}\n")
        process.stdin.flush()
        return float(process.stdout.readline()) * 1000 / (episodes * CALLS_PER_EPISODE)

    for process in processes:
        ask(process, 20)
    rows = []
    for number in range(rounds):
        order = processes if number % 2 else processes[::-1]
        took = {process.pid: ask(process, episodes) for process in order}
        rows.append(tuple(took[process.pid] for process in processes))
    for process in processes:
        process.communicate()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, help="calls of the memory part; the others scale with it")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of which the median counts")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="where the files are written (and removed)")
    parser.add_argument("--worker", choices=("bare", "recorded"), help=argparse.SUPPRESS)
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args.worker == "recorded")
    if args.memory:
        return print(json.dumps(memory(args.folder, args.calls)))
    many, few = max(1000, args.calls // 10), max(30, args.calls // 2000)
    without, with_it, difference, least = added(few, 5 * args.rounds)
    print(f"{'CPU per call, LangGraph + ChatOpenAI':44} {without:9.3f} ms")
    print(f"{'the same, recorded':44} {with_it:9.3f} ms   (+{difference:.3f} ms; fastest rounds +{least:.3f} ms)")
    rates = throughput(args.folder, many, args.rounds, fresh)
    spread = f"(slowest round {min(rates):,.0f}, fastest {max(rates):,.0f})"
    print(f"{'recorded, 500-token prompts that share nothing':44} {statistics.median(rates):9,.0f} calls/s   {spread}")
    for what, prompts, k in (
        ("conversations growing to 500 tokens", growing, 1),
        ("500-token prompts, K = 8", fresh, 8),
    ):
        rate = statistics.median(throughput(args.folder, many, 3, prompts, k))
        print(f"{'recorded, ' + what:44} {rate:9,.0f} calls/s")
    command = [sys.executable, __file__, "--memory", "--calls", str(args.calls), "--folder", str(args.folder)]
    grown = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    print(f"{f'memory over {args.calls:,} calls':44} {grown['growth']:+9.1f} MB   ({grown['end']:+.1f} MB at the end)")
    print(f"{'file after them':44} {grown['file']:9.0f} MB   ({grown['rate']:,.0f} calls/s, {grown['lost']} lost)")
    figures = {
        "added_ms_per_call": round(difference, 4),
        "calls_per_s": round(statistics.median(rates)),
        "rss_growth_mb": round(grown["growth"], 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
