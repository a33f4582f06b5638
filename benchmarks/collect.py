"""The cost of collecting from production: many processes of an application, one collector, one store.

    python -m benchmarks.collect --store postgresql --processes 100 --seconds 60 --plain 20
    python -m benchmarks.collect --store postgresql --processes 20 --rate 10 --beside
    python -m benchmarks.collect --alone

The processes are forks of one that has made the application, as a server with workers has them. Each runs a graph of
two roles over and over, `--rate` episodes a second in all; the model server is faked inside the process, so that the
application's side is measured. The collector and the store run on the same machine. `--framework openai` makes
the same calls without LangGraph. With `--plain` the processes first run without recording, which shows the time the
application takes by itself. With `--beside` every second episode is not recorded: the difference is what recording
adds.

Prints a table; the last line is JSON:

- episodes_per_s (recorded), lost (recorded and not stored), drained_s (seconds until all was sent that waited when the
  last episode ended), left (bytes in spools after that)
- write_ms_p50, write_ms_p99 and write_cpu_ms: the sink's writes, by the clock and in processor time: one a call, one an
  episode
- collector_cpu_ms, store_cpu_ms, wire_bytes and store_bytes, of a call
- load: the machine's, a minute's mean, before and after; cores: how many processors the applications, the collector,
  the store and all other work on the machine keep busy
- with `--plain`: plain_per_s (episodes without recording), plain_cpu_ms and recorded_cpu_ms, an application's processor
  time for a call with its sender
- with `--beside`: added_ms_p50 and added_ms_p99, quantiles of the time of a call that is recorded, less the
  quantiles of one that is not; app_cpu_ms, the same of an application's processor time for a call

With `--alone` the quantiles of a write to nowhere, into the spool while the collector is away, and into a records file,
and the processor time of a call with its recording.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil

from cotune.storage.open_store import open_store
from tests.postgres import server

CALLS = 2
"""Calls of an episode."""
DRAIN = 240.0
"""Seconds that a process waits at the end for its spool to be empty."""
WARM = 10
"""Episodes of a process, recorded and not, before anything is measured."""
EPISODES = 1000
"""With `--alone`."""
PLAN = "You are the planner of a help desk. Say in three steps how the question is to be answered. " * 4
SOLVE = "You are the solver of a help desk. Answer the question by the plan, in two sentences. " * 4


def applications(url: str, a: argparse.Namespace) -> None:
    """Make the application, fork it into processes, and run them from one moment on; print the measurements of each."""
    import multiprocessing

    import cotune
    from cotune.integrations.collect import sender as senders
    from cotune.integrations.collect.sender import Sender

    processes, rate = a.processes, a.rate
    run = of_langgraph() if a.framework == "langgraph" else of_openai()
    context = multiprocessing.get_context("fork")
    ready, begin, end, results = context.Barrier(processes + 1), context.Event(), context.Event(), context.Queue()
    write = Sender.write

    def process(number: int) -> None:
        times: dict[bool, list[float]] = {True: [], False: []}
        writes: list[tuple[float, float]] = []
        cpu, done = {True: 0.0, False: 0.0}, {True: 0, False: 0}

        def timed(self: Sender, records: Any) -> None:
            begun, spent = time.perf_counter(), time.thread_time()
            write(self, records)
            writes.append((time.perf_counter() - begun, time.thread_time() - spent))

        def episode(count: int, recorded: bool) -> None:
            question = f"Question {number}.{count}: where does the corridor lead?"
            if recorded:
                with cotune.trace(url, app=f"desk-{number % 4}", task=f"{number}.{count}"):
                    times[recorded].extend(run(question))
            else:
                times[recorded].extend(run(question))

        for count in range(WARM):
            for kind in (True, False):
                episode(-1 - count, kind)
        for some in (*times.values(), writes):
            some.clear()
        Sender.write = timed  # type: ignore[method-assign]
        ready.wait(300)
        begin.wait()
        time.sleep(number / rate)

        def episodes(seconds: float, kinds: Sequence[bool]) -> float:
            begun = at = time.monotonic()
            count = 0
            while time.monotonic() < begun + seconds:
                recorded, spent = kinds[count % len(kinds)], time.process_time()
                episode(count, recorded)
                done[recorded] += 1
                count += 1
                at = max(at + processes / rate / len(kinds), time.monotonic() - 5)
                time.sleep(max(0.0, at - time.monotonic()))
                cpu[recorded] += time.process_time() - spent
            return time.monotonic() - begun

        plain = episodes(a.plain, (False,)) if a.plain else 0.0
        busy = machine_time()
        took = episodes(a.seconds, (True, False) if a.beside else (True,))
        busy = machine_time() - busy
        measured = {"times": times, "writes": writes, "cpu": cpu, "done": done, "plain": plain, "took": took}
        results.put({**measured, "busy": busy})
        end.wait()
        for one in senders._senders.values():  # a child of multiprocessing runs nothing at its exit
            one.flush(DRAIN)
            one.finish()

    started = [context.Process(target=process, args=(number,)) for number in range(processes)]
    for one in started:
        one.start()
    ready.wait(300)
    print("ready", flush=True)
    sys.stdin.readline()
    begin.set()
    print(json.dumps([results.get() for _ in started]), flush=True)
    end.set()
    for one in started:
        one.join()


def provider() -> httpx.Client:
    """A client whose model server is faked in the process."""

    def answer(request: httpx.Request) -> httpx.Response:
        text = f"In answer: {json.loads(request.content)['messages'][-1]['content']} " * 3
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        usage = {"prompt_tokens": 90, "completion_tokens": 40, "total_tokens": 130}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return httpx.Response(200, json={**head, "choices": [choice], "usage": usage})

    return httpx.Client(transport=httpx.MockTransport(answer))


def of_langgraph() -> Callable[[str], list[float]]:
    """A graph of two roles; the times of its calls."""
    import openai
    from langchain_openai import ChatOpenAI
    from langgraph.graph import END, START, MessagesState, StateGraph

    client = openai.OpenAI(api_key="none", http_client=provider(), max_retries=0)
    model = ChatOpenAI(model="m", api_key="none", root_client=client, client=client.chat.completions)
    took: list[float] = []

    def ask(state: MessagesState, system: str) -> dict[str, Any]:
        begun = time.perf_counter()
        reply = model.invoke([("system", system), *state["messages"]])
        took.append(time.perf_counter() - begun)
        return {"messages": [reply]}

    graph = StateGraph(MessagesState)
    graph.add_node("planner", lambda state: ask(state, PLAN))
    graph.add_node("solver", lambda state: ask(state, SOLVE))
    for source, target in ((START, "planner"), ("planner", "solver"), ("solver", END)):
        graph.add_edge(source, target)
    app = graph.compile()

    def run(question: str) -> list[float]:
        took.clear()
        app.invoke({"messages": [("user", question)]})
        return list(took)

    return run


def of_openai() -> Callable[[str], list[float]]:
    """The same calls by the OpenAI SDK alone."""
    import openai

    import cotune

    client = openai.OpenAI(api_key="none", http_client=provider(), max_retries=0)

    def run(question: str) -> list[float]:
        took, said = [], question
        for role, system in (("planner", PLAN), ("solver", SOLVE)):
            messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": said}]
            begun = time.perf_counter()
            with cotune.role(role):
                said = client.chat.completions.create(model="m", messages=messages).choices[0].message.content or ""
            took.append(time.perf_counter() - begun)
        return took

    return run


def alone(folder: Path) -> Mapping[str, float]:
    """The cost of a write in one process, to nowhere, into the spool, and into a records file, one after another."""
    from cotune.integrations.collect.sender import Sender
    from cotune.recording.call_records import CallerContext
    from cotune.recording.recorder import LiveEpisode, Nowhere, Sink
    from cotune.records.answers import Answer
    from cotune.records.structs import Candidate, Record, Task

    class Timed:
        def __init__(self, sink: Sink) -> None:
            self.sink = sink
            self.times: list[float] = []

        def write(self, records: Sequence[Record]) -> None:
            begun = time.perf_counter()
            self.sink.write(records)
            self.times.append(1e3 * (time.perf_counter() - begun))

    text = "In answer: where does the corridor lead? " * 8
    os.environ["COTUNE_SPOOL"] = str(folder / "spool")
    figures: dict[str, float] = {}
    with open_store(folder / "records.db") as store:
        sinks: dict[str, Sink] = {"nowhere": Nowhere(), "spool": Sender("http://127.0.0.1:9", "bench"), "file": store}
        for name, sink in sinks.items():
            timed, spent = Timed(sink), time.process_time()
            for count in range(EPISODES):
                episode = LiveEpisode(timed, Task(id="t", input=None), workflow="desk")
                for role, system in (("planner", PLAN), ("solver", SOLVE)):
                    messages = [
                        {"role": "system", "content": system},
                        {"role": "user", "content": f"Question {count}?"},
                    ]
                    call = episode.start(CallerContext(role, "bench"), {"messages": messages})
                    message = {"role": "assistant", "content": text}
                    call.finish(Answer(candidates=(Candidate(index=0, text=text, message=message),), chosen=0))
                episode.end("ok")
                time.sleep(0.005)
            middle, high = np.quantile(timed.times, [0.5, 0.99]).round(4).tolist()
            figures |= {f"{name}_ms_p50": middle, f"{name}_ms_p99": high}
            figures[f"{name}_cpu_ms"] = round(1e3 * (time.process_time() - spent) / EPISODES / CALLS, 3)
    return figures


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


def machine_time() -> float:
    """Seconds that the processors of this machine were busy."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)


def processor_time(processes: list[psutil.Process]) -> float:
    """Seconds of processor time of some processes."""
    return sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())


def of_postgres(store: str) -> list[psutil.Process]:
    """The processes of the PostgreSQL servers of this machine, if the store is one."""
    return [p for p in psutil.process_iter(["name"]) if p.info["name"] == "postgres"] if "://" in store else []


def metrics(url: str) -> dict[str, float]:
    """The counters of a collector, by name and labels."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def size(store: str) -> int:
    """Bytes of a store."""
    if "://" not in store:
        return sum(path.stat().st_size for path in Path(store).parent.glob(Path(store).name + "*"))
    import psycopg

    with psycopg.connect(store) as db:
        (byte_count,) = db.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
    return int(byte_count)


def measure(store: str, a: argparse.Namespace, folder: Path) -> Mapping[str, Any]:
    environment = {**os.environ, "COTUNE_SPOOL": str(folder / "spool"), "OMP_NUM_THREADS": "1"}
    with collector(store, folder) as (url, server):
        command = [sys.executable, "-m", "benchmarks.collect", "--applications", url, *sys.argv[1:]]
        started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        assert started.stdout is not None
        assert started.stdout.readline() == "ready\n"
        time.sleep(3)
        bytes_before, counters_before = size(store), metrics(url)
        spent_server, spent_store = processor_time([server]), processor_time(of_postgres(store))
        load = os.getloadavg()[0]
        assert started.stdin is not None
        started.stdin.write("begin\n")
        started.stdin.flush()
        reports = json.loads(started.stdout.readline())
        drained = time.monotonic()
        started.communicate(timeout=DRAIN + 60)
        drained = time.monotonic() - drained
        spent_server = processor_time([server]) - spent_server
        spent_store = processor_time(of_postgres(store)) - spent_store
        counters, grown = metrics(url), size(store) - bytes_before
        with open_store(store, read_only=True) as read:
            stored, stored_calls = read.figures().counts()
    episodes = sum(report["done"]["true"] for report in reports)
    warm = WARM * len(reports)
    calls = CALLS * episodes
    times = {kind: np.concatenate([report["times"][kind] for report in reports]) * 1e3 for kind in ("true", "false")}
    writes = np.concatenate([report["writes"] for report in reports]) * 1e3
    took = max(report["took"] for report in reports)
    cores = {
        "applications": sum(sum(report["cpu"].values()) / (report["took"] + report["plain"]) for report in reports),
        "collector": spent_server / (took + drained),
        "store": spent_store / (took + drained),
    }
    cores["others"] = reports[0]["busy"] / reports[0]["took"] - sum(cores.values())
    wire = 'cotune_collect_bytes_total{form="packed"}'
    result = {
        "processes": a.processes,
        "episodes_per_s": round(episodes / took, 1),
        "write_ms_p50": round(np.quantile(writes[:, 0], 0.5), 3),
        "write_ms_p99": round(np.quantile(writes[:, 0], 0.99), 3),
        "write_cpu_ms": round(np.mean(writes[:, 1]), 3),
        "collector_cpu_ms": round(1e3 * spent_server / calls, 3),
        "store_cpu_ms": round(1e3 * spent_store / calls, 3),
        "wire_bytes": round((counters[wire] - counters_before.get(wire, 0)) / calls),
        "store_bytes": round(grown / calls),
        "lost": episodes + warm - stored + (calls + CALLS * warm - stored_calls),
        "drained_s": round(drained, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cores": {name: round(value, 2) for name, value in cores.items()},
        "left": sum(path.stat().st_size for path in (folder / "spool").rglob("*.frames")),
    }
    spent = {kind: sum(report["cpu"][kind] for report in reports) for kind in ("true", "false")}
    episodes_of = {kind: sum(report["done"][kind] for report in reports) for kind in ("true", "false")}
    if a.plain:
        result |= {
            "plain_per_s": round(episodes_of["false"] / max(report["plain"] for report in reports), 1),
            "plain_cpu_ms": round(1e3 * spent["false"] / episodes_of["false"] / CALLS, 3),
            "recorded_cpu_ms": round(1e3 * spent["true"] / episodes_of["true"] / CALLS, 3),
        }
    if a.beside:
        result |= {
            "added_ms_p50": round(np.quantile(times["true"], 0.5) - np.quantile(times["false"], 0.5), 3),
            "added_ms_p99": round(np.quantile(times["true"], 0.99) - np.quantile(times["false"], 0.99), 3),
            "app_cpu_ms": round(
                1e3 * (spent["true"] / episodes_of["true"] - spent["false"] / episodes_of["false"]) / CALLS, 3
            ),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "address of the store (default: a records file); postgresql: a server of its own"
    parser.add_argument("--store", default="", help=text)
    parser.add_argument("--framework", choices=("langgraph", "openai"), default="langgraph")
    parser.add_argument("--processes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=300.0, help="recorded episodes a second, of all processes")
    parser.add_argument("--plain", type=float, default=0.0, help="seconds without recording before it")
    parser.add_argument("--beside", action="store_true", help="every second episode is not recorded, to compare")
    parser.add_argument("--alone", action="store_true", help="measure the sink's writes in one process alone")
    parser.add_argument("--applications", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.alone:
        with tempfile.TemporaryDirectory() as folder:
            show(alone(Path(folder)))
        return
    if a.applications:
        applications(a.applications, a)
        return
    database_server = server(durable=True) if a.store == "postgresql" else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, database_server as database:
        store = database.database() if database else a.store or f"{folder}/records.db"
        result = measure(store, a, Path(folder))
    show(result)


def show(found: Mapping[str, Any]) -> None:
    for name, value in found.items():
        print(f"{name:18} {value!s:>12}")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
