"""Rollout of episodes of several turns over the in-process sampler, with and without its cache of earlier prompts.

    python -m benchmarks.turns [--model MODEL] [--turns 4] [--k 4] [--episodes 4] [--threads 1]

Each turn draws K candidates, keeps the first, and adds an observation; the episodes run side by side, and their
prompts begin with the same half. One round is greedy, in which the tokens of both ways are compared. Figures are
medians of further rounds, which alternate and use other token ids each, so that nothing is known of them beforehand.
Without `--model`: the model of `benchmarks.tree`. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from transformers import AutoConfig

from benchmarks.tree import LAYERS, build
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams

POLICY = PolicyRef("base")


async def rollout(
    sampler: TransformersSampler, args: argparse.Namespace, vocabulary: int, seed: int, temperature: float
) -> list[tuple[int, ...]]:
    """All candidates of all turns of all episodes."""
    chance = np.random.default_rng(seed)
    common = chance.integers(3, vocabulary, args.prompt // 2).tolist()
    ids = chance.integers(3, vocabulary, (args.episodes, args.turns, max(args.prompt, args.observation))).tolist()

    async def episode(number: int) -> list[tuple[int, ...]]:
        prompt, answer_ids = common + ids[number][0][: args.prompt - len(common)], []
        for turn in range(args.turns):
            how = SamplingParams(max_tokens=args.answer, temperature=temperature, seed=number)
            answers = await sampler.sample(prompt, args.k, how, POLICY)
            answer_ids += [answer.token_ids for answer in answers]
            prompt = [*prompt, *answers[0].token_ids, *ids[number][turn][: args.observation]]
        return answer_ids

    answer_lists = await asyncio.gather(*map(episode, range(args.episodes)))
    return [answer for answers in answer_lists for answer in answers]


async def measure(folder: str, args: argparse.Namespace) -> None:
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    samplers = {
        name: await TransformersSampler.open(
            folder, device="cpu", threads=args.threads, host="thread", end_token_ids=(), prefix_cache=size
        )
        for name, size in {"without": 0, "with": args.cache}.items()
    }
    greedy = [await rollout(sampler, args, vocabulary, 0, 0.0) for sampler in samplers.values()]
    equal = sum(without == other for without, other in zip(*greedy, strict=True))
    wall: dict[str, list[float]] = {name: [] for name in samplers}
    cpu: dict[str, list[float]] = {name: [] for name in samplers}
    for seed in range(1, args.rounds + 1):
        for name, sampler in samplers.items():
            began, busy = time.perf_counter(), time.process_time()
            await rollout(sampler, args, vocabulary, seed, 1.0)
            wall[name].append(time.perf_counter() - began)
            cpu[name].append(time.process_time() - busy)
    for sampler in samplers.values():
        await sampler.aclose()
    print(f"{args.episodes} episodes of {args.turns} turns, K = {args.k}; {equal} of {len(greedy[0])} greedy equal")
    for name in samplers:
        print(f"{name:8} {statistics.median(wall[name]):8.2f} s {statistics.median(cpu[name]):8.2f} s of CPU")
    ratio, cpu_ratio = (
        round(statistics.median(times["without"]) / statistics.median(times["with"]), 2) for times in (wall, cpu)
    )
    print(json.dumps({"ratio": ratio, "cpu_ratio": cpu_ratio, "equal": equal == len(greedy[0])}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, an id, or a file in GGUF form")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model that is measured without --model")
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--observation", type=int, default=256, help="tokens that a turn adds to the answer")
    parser.add_argument("--cache", type=int, default=None, help="bytes that are kept; default: the sampler's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if not args.model:
            build(Path(name), args.layers)
        asyncio.run(measure(str(locate_model(args.model or name)), args))


if __name__ == "__main__":
    main()
