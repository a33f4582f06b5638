"""Cost of recording. Prints a table; the last line is JSON: added_ms_per_call, calls_per_s, rss_growth_mb.

added_ms_per_call: the result of capture_cpu.py.
calls_per_s: calls recorded into a file, flush included, with prompts of 500 tokens that share nothing and are made
beforehand; median of the rounds. rss_growth_mb: the most that the process grew while it recorded 200,000 such calls.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.sqlite_store import SqliteStore

PROMPT, REPLY = 500, 32
CALLS_PER_EPISODE = 10
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
                CallerContext("navigator", "bench"), {"model": "m", "messages": [system, user], "temperature": 1.0}
            )
            prompt, reply = next(prompts)
            message = {"role": "assistant", "content": f"north {number} {step}"}
            candidates = tuple(
                Candidate(index=i, text="north", message=message, token_ids=reply, logprobs=logprobs[: len(reply)])
                for i in range(k)
            )
            rewards = tuple({"local": 1.0} for _ in range(k))
            call.finish(Answer(candidates=candidates, prompt_ids=prompt, policy=policy, rewards=rewards))
        live.end("ok", rewards={"team": 1.0})


def throughput(folder: Path, calls: int, rounds: int, prompts: Callable[..., Any], k: int = 1) -> list[float]:
    """Calls per second of each round, every round into a file of its own."""
    pool, rates = token_pool(), []
    for number in range(rounds):
        with tempfile.TemporaryDirectory(dir=folder) as name:
            store = SqliteStore.open(name)
            prompt_pairs = iter(list(itertools.islice(prompts(pool, random.Random(number)), calls)))
            started = time.perf_counter()
            record(store, calls, prompt_pairs, k)
            store.flush()
            rates.append(calls / (time.perf_counter() - started))
            lost = store.health.lost
            store.close()
            if lost:
                raise SystemExit(f"{lost} records were lost")
    return rates


def resident_mb() -> float:
    return psutil.Process().memory_info().rss / 2**20


def memory(folder: Path, calls: int) -> dict[str, float]:
    """The most that this process grew, looked at every 2,000 calls, and the size of the file."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        store = SqliteStore.open(name)
        prompts = fresh(token_pool(), random.Random(0))
        record(store, 100, prompts)
        before = resident_mb()
        sizes = []
        started = time.perf_counter()
        for _ in range(calls // 2000):
            record(store, 2000, prompts)
            sizes.append(resident_mb())
        store.flush()
        sizes.append(resident_mb())
        rate = calls / (time.perf_counter() - started)
        store.close()
        size = (Path(name) / "records.db").stat().st_size / 2**20
        return {
            "growth": max(sizes) - before,
            "end": sizes[-1] - before,
            "file": size,
            "rate": rate,
            "lost": store.health.lost,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=200_000, help="calls of the memory part; the others scale with it")
    parser.add_argument("--rounds", type=int, default=9, help="rounds; the median counts")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="folder of the files, removed afterwards")
    parser.add_argument("--memory", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory:
        return print(json.dumps(memory(args.folder, args.calls)))
    many = max(1000, args.calls // 10)
    command = [sys.executable, str(Path(__file__).with_name("capture_cpu.py")), "--blocks", str(35 * args.rounds)]
    table, _, cpu = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout[:-1].rpartition("\n")
    print(table)
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
        "added_ms_per_call": json.loads(cpu)["added_ms_per_call"],
        "calls_per_s": round(statistics.median(rates)),
        "rss_growth_mb": round(grown["growth"], 1),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
