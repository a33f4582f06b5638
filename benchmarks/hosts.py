"""The in-process sampler in a process of its own against a thread of the application's process.

The application is 64 concurrent tasks on one event loop; each call costs it `--burn` milliseconds of Python, which
holds the interpreter lock, and asks for 8 candidates of 4 to 10 tokens after a prompt of 50 to 70. The model is a
Qwen3 of about 0.3M parameters. Rounds alternate. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.small_model import small_qwen
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams

VOCABULARY = 256
POLICY = PolicyRef("base")


class Round(NamedTuple):
    calls_per_s: float
    latency_ms: float
    lag_ms: float


def build(folder: Path) -> None:
    changes = {"intermediate_size": 256, "max_position_embeddings": 512}
    small_qwen(VOCABULARY, **changes, eos_token_id=2, pad_token_id=0).save_pretrained(folder)


def burn(milliseconds: float) -> None:
    """Hold the interpreter for this much CPU time."""
    end = time.thread_time() + milliseconds / 1e3
    while time.thread_time() < end:
        sum(range(200))


async def measure(sampler: TransformersSampler, calls: int, width: int, cost: float) -> Round:
    rng = np.random.default_rng(0)
    latencies: list[float] = []
    lags: list[float] = []

    async def call() -> None:
        prompt = rng.integers(8, VOCABULARY, int(rng.integers(50, 70))).tolist()
        burn(cost / 2)
        start = time.perf_counter()
        await sampler.sample(prompt, 8, SamplingParams(max_tokens=int(rng.integers(4, 11))), POLICY)
        latencies.append(time.perf_counter() - start)
        burn(cost / 2)

    async def task() -> None:
        for _ in range(calls // width):
            await call()

    async def watch() -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.002)
            lags.append(time.perf_counter() - start - 0.002)

    watcher = asyncio.create_task(watch())
    start = time.perf_counter()
    await asyncio.gather(*(task() for _ in range(width)))
    seconds = time.perf_counter() - start
    watcher.cancel()
    return Round(calls / seconds, statistics.median(latencies) * 1e3, statistics.median(lags) * 1e3)


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--burn", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument("--calls", type=int, default=320)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(1)
    rounds: dict[tuple[str, float], list[Round]] = {}
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        samplers = {host: await TransformersSampler.open(Path(folder), host=host) for host in ("thread", "process")}
        for sampler in samplers.values():
            await measure(sampler, args.width, args.width, 0.0)
        for _ in range(args.rounds):
            for cost in args.burn:
                for host, sampler in samplers.items():
                    result = await measure(sampler, args.calls, args.width, cost)
                    rounds.setdefault((host, cost), []).append(result)
        for sampler in samplers.values():
            await sampler.aclose()

    print(f"{args.width} concurrent tasks, {args.calls} calls a round, load {os.getloadavg()[0]:.1f}")
    print(f"{'host':8} {'burn ms':>7} {'calls/s (median)':>17} {'best':>6} {'latency ms':>11} {'loop lag ms':>12}")
    result = {}
    for (host, cost), all_rounds in sorted(rounds.items(), key=lambda item: item[0][1]):
        calls, latency, lag = (statistics.median(column) for column in zip(*all_rounds, strict=True))
        best = max(r.calls_per_s for r in all_rounds)
        print(f"{host:8} {cost:7.0f} {calls:17.0f} {best:6.0f} {latency:11.0f} {lag:12.1f}")
        result[f"{host}_{cost:g}ms_calls_per_s"] = round(calls)
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
