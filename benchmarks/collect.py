"""What collecting from production costs: many processes of a LangGraph application, one collector, one store.

    python -m benchmarks.collect --processes 100 --seconds 60 --store postgresql

Each process runs a graph of two roles over and over, `--rate` episodes a second in all; a model server is faked inside
the process, so that the application's side is what is measured. Every second episode is not recorded: the difference
is what recording adds. The collector and the store run beside them on the same machine.

Prints a table; the last line is JSON: episodes_per_s (recorded and stored), added_ms_p50 and added_ms_p99 (quantiles of
the time of a call that is recorded, less those of one that is not), write_ms_p50, write_ms_p99 and write_cpu_ms (the
sink's writes alone, by the clock and in processor time), app_cpu_ms per call (processor time of the process, recorded
less not recorded), collector_cpu_ms and store_cpu_ms per call, wire_bytes and store_bytes per call, lost (recorded and
not stored), left (waiting in spools at the end).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from cotune.storage.open_store import open_store
from tests.postgres import server

CALLS = 2
"""Calls of an episode."""
PLAN = "You are the planner of a help desk. Say in three steps how the question is to be answered. " * 4
SOLVE = "You are the solver of a help desk. Answer the question by the plan, in two sentences. " * 4


def application(url: str, seconds: float, rate: float, number: int) -> None:
    """One process: warm up, wait for the start, then episodes at a rate; prints what it has measured as JSON."""
    import openai
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    import cotune
    from cotune.collecting.sender import Sender

    def answer(request: httpx.Request) -> httpx.Response:
        said = f"In answer: {json.loads(request.content)['messages'][-1]['content']} " * 3
        choice = {"index": 0, "message": {"role": "assistant", "content": said}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 90, "completion_tokens": 40, "total_tokens": 130}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx.Response(200, json={**head, "choices": [choice], "usage": usage})

    http = httpx.Client(transport=httpx.MockTransport(answer))
    client = openai.OpenAI(api_key="none", http_client=http, max_retries=0)
    model = ChatOpenAI(model="m", api_key="none", root_client=client, client=client.chat.completions)
    times: dict[bool, list[float]] = {True: [], False: []}
    writes: list[float] = []
    writes_cpu: list[float] = []
    recorded = False

    def ask(state: MessagesState, system: str) -> dict[str, Any]:
        begun = time.perf_counter()
        said = model.invoke([("system", system), *state["messages"]])
        times[recorded].append(time.perf_counter() - begun)
        return {"messages": [said]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", lambda state: ask(state, PLAN))
    graph.add_node("solver", lambda state: ask(state, SOLVE))
    for source, target in ((START, "planner"), ("planner", "solver"), ("solver", END)):
        graph.add_edge(source, target)
    app = graph.compile()
    write = Sender.write

    def timed(self: Sender, records: Any) -> None:
        begun, spent = time.perf_counter(), time.thread_time()
        write(self, records)
        writes.append(time.perf_counter() - begun)
        writes_cpu.append(time.thread_time() - spent)

    Sender.write = timed  # type: ignore[method-assign]

    def episode(count: int) -> None:
        question = {"messages": [("user", f"Question {number}.{count}: where does the corridor lead?")]}
        if recorded:
            with cotune.trace(url, app=f"desk-{number % 4}", task=f"{number}.{count}"):
                app.invoke(question)
        else:
            app.invoke(question)

    for kind in (True, False):
        recorded = kind
        episode(-1)
    for some in (*times.values(), writes, writes_cpu):
        some.clear()
    print("ready", flush=True)
    begin = float(sys.stdin.readline())
    time.sleep(max(0.0, begin - time.time() + number % 100 / 100 / rate))
    cpu, done, pause = {True: 0.0, False: 0.0}, {True: 0, False: 0}, 1 / rate
    at = time.monotonic()
    end, count = at + seconds, 0
    while at < end:
        recorded = count % 2 == 0
        spent = time.process_time()
        episode(count)
        done[recorded] += 1
        count += 1
        at += pause / 2  # of the two halves, one is recorded
        if at > time.monotonic():
            time.sleep(at - time.monotonic())
        elif at < time.monotonic() - 5:
            at = time.monotonic()
        cpu[recorded] += time.process_time() - spent
    took = time.monotonic() - (end - seconds)
    found = {"times": {str(kind): values for kind, values in times.items()}, "writes": writes, "spent": writes_cpu}
    print(json.dumps({**found, "cpu": list(cpu.values()), "done": list(done.values()), "took": took}), flush=True)
    sys.stdin.readline()  # the sender goes on until all have finished


@contextlib.contextmanager
def collector(store: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """`cotune collect` in a process."""
    command = [sys.executable, "-m", "cotune", "collect", "--store", store, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.startswith("Collecting at "):
        raise SystemExit(line + process.stdout.read())
    try:
        yield line.split()[2], psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def processor_time(processes: list[psutil.Process]) -> float:
    """Seconds of processor time of some processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def of_postgres(store: str) -> list[psutil.Process]:
    """The processes of the PostgreSQL servers of this machine, where the store is one."""
    return [p for p in psutil.process_iter(["name"]) if p.info["name"] == "postgres"] if "://" in store else []


def metrics(url: str) -> dict[str, float]:
    """The counters of a collector, by name and labels."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def count(store: str) -> int:
    """Episodes in a store; none in one that is not there yet."""
    try:
        with open_store(store, read_only=True) as read:
            return read.counts()[0]
    except Exception:  # noqa: BLE001
        return 0


def size(store: str) -> int:
    """Bytes of a store."""
    if "://" not in store:
        return sum(path.stat().st_size for path in Path(store).parent.glob(Path(store).name + "*"))
    import psycopg

    with psycopg.connect(store) as db:
        (found,) = db.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
    return int(found)


def measure(store: str, processes: int, seconds: float, rate: float, folder: Path) -> Mapping[str, float]:
    environment = {**os.environ, "COTUNE_SPOOL": str(folder / "spool"), "OMP_NUM_THREADS": "1"}
    with collector(store, folder) as (url, server):
        base = [sys.executable, "-m", "benchmarks.collect", "--application", url, "--seconds", str(seconds)]
        started: list[subprocess.Popen[str]] = []
        for number in range(processes):
            command = [*base, "--rate", str(rate / processes), "--number", str(number)]
            started.append(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
            )
        for process in started:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(3)
        before, bytes_before, known = count(store), size(store), metrics(url)
        kept = [server, *of_postgres(store)]
        spent_server, spent_store = processor_time(kept[:1]), processor_time(of_postgres(store))
        begin, found = time.time() + 1, []
        for process in started:
            assert process.stdin is not None
            process.stdin.write(f"{begin}\n")
            process.stdin.flush()
        for process in started:
            assert process.stdout is not None
            found.append(json.loads(process.stdout.readline()))
        for process in started:
            process.communicate("end\n", timeout=120)
        time.sleep(1)
        spent_server = processor_time(kept[:1]) - spent_server
        spent_store = processor_time(of_postgres(store)) - spent_store
        now = metrics(url)
        stored = count(store) - before
        grown = size(store) - bytes_before
    episodes = sum(one["done"][0] for one in found)
    calls = CALLS * episodes
    times = {kind: np.concatenate([one["times"][kind] for one in found]) * 1e3 for kind in ("True", "False")}
    writes = np.concatenate([one["writes"] for one in found]) * 1e3
    added = {q: np.quantile(times["True"], q) - np.quantile(times["False"], q) for q in (0.5, 0.99)}
    cpu = sum(one["cpu"][0] for one in found) / episodes - sum(one["cpu"][1] for one in found) / sum(
        one["done"][1] for one in found
    )
    wire = 'cotune_collect_bytes_total{form="packed"}'
    return {
        "processes": processes,
        "episodes_per_s": round(episodes / max(one["took"] for one in found), 1),
        "added_ms_p50": round(added[0.5], 3),
        "added_ms_p99": round(added[0.99], 3),
        "write_ms_p50": round(np.quantile(writes, 0.5), 3),
        "write_ms_p99": round(np.quantile(writes, 0.99), 3),
        "write_cpu_ms": round(np.mean(np.concatenate([one["spent"] for one in found])) * 1e3, 3),
        "app_cpu_ms": round(1e3 * cpu / CALLS, 3),
        "collector_cpu_ms": round(1e3 * spent_server / calls, 3),
        "store_cpu_ms": round(1e3 * spent_store / calls, 3),
        "wire_bytes": round((now[wire] - known.get(wire, 0)) / calls),
        "store_bytes": round(grown / calls),
        "lost": episodes - stored,
        "left": sum(path.stat().st_size for path in (folder / "spool").rglob("*.frames")),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--store", default="", help="address of the store (default: a records file); postgresql: a server of its own"
    )
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=300.0, help="recorded episodes a second, of all processes")
    parser.add_argument("--application", help=argparse.SUPPRESS)
    parser.add_argument("--number", type=int, default=0, help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.application:
        application(a.application, a.seconds, a.rate, a.number)
        return
    own = server() if a.store == "postgresql" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, own as database:
        store = database.database() if database else a.store or f"{folder}/records.db"
        found = measure(store, a.processes, a.seconds, a.rate, Path(folder))
    for name, value in found.items():
        print(f"{name:18} {value:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
