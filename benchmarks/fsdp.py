"""Seconds per update: the local learner, and FSDP on one and on two workers, same rows, in alternation.

    python -m benchmarks.fsdp --rounds 5

One thread per process and a small model from scratch by default. With GPUs: --gpus 1 --dtype bfloat16 --model DIR.
The last line is JSON.
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
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.config.cluster import DividedCluster
from cotune.integrations.cluster.runtime import open_ray
from cotune.records.policies import LoraSpec, Policies, PolicySpec
from cotune.trainer.learner.fsdp.learner import FsdpLearner
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.protocol import Learner
from tests.trainer.learner.forced import ForcedSettings


def build(folder: Path, args: argparse.Namespace) -> str:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def make_rows(args: argparse.Namespace) -> list[TrainRow]:
    numbers = np.random.default_rng(0)
    rows = []
    for group in range(args.prompts):
        prompt = tuple(numbers.integers(0, 2048, args.prompt).tolist())
        for member in range(args.k):
            ids = tuple(numbers.integers(0, 2048, args.response).tolist())
            rows.append(
                TrainRow(
                    id=f"{group}.{member}",
                    role="a",
                    prompt_ids=prompt,
                    response_ids=ids,
                    logprobs=(-7.6,) * len(ids),
                    advantage=1.0 if member % 2 else -1.0,
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=["lora", "full"], default="full")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--gpus", type=int, default=0, help="GPUs per worker")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--model", help="folder of a model with a vocabulary of 2,048 or more")
    args = parser.parse_args()
    rows = make_rows(args)
    policies = Policies({"a": PolicySpec(name="a", kind=args.kind, lora=LoraSpec())}, {"a": "a"})
    settings = ForcedSettings(
        mini_batch=len(rows), micro_batch_tokens=args.micro_batch_tokens, dtype=args.dtype, threads=1
    )
    loss = recipe("at_grpo").loss
    with tempfile.TemporaryDirectory() as folder, open_ray("local", num_cpus=sum(args.workers)):
        model = args.model or build(Path(folder), args)
        learners: dict[str, Learner] = {"local": LocalLearner.open(model, policies, settings, loss)}
        opening = {}
        for workers in args.workers:
            started = time.perf_counter()
            name = f"{workers} worker{'s' * (workers > 1)}"
            cluster = DividedCluster(address="local", learners=workers, gpus_per_learner=args.gpus)
            learners[name] = FsdpLearner.open(model, policies, settings, loss, cluster)
            opening[name] = time.perf_counter() - started
        seconds = measured(learners, rows, args.rounds)
        for learner in learners.values():
            if isinstance(learner, FsdpLearner):
                asyncio.run(learner.aclose())
    report(args, rows, seconds, opening)


def measured(learners: dict[str, Learner], rows: list[TrainRow], rounds: int) -> dict[str, list[float]]:
    """Seconds of each learner's updates after one that warms up; all must report the same gradient norms."""
    seconds: dict[str, list[float]] = {name: [] for name in learners}
    for turn in range(rounds + 1):
        norms = []
        for name, learner in learners.items():
            started = time.perf_counter()
            norms.append(learner.update("a", rows)["grad_norm"])
            if turn:
                seconds[name].append(time.perf_counter() - started)
        assert max(norms) - min(norms) < 0.02 * max(norms), norms
    return seconds


def report(
    args: argparse.Namespace, rows: list[TrainRow], found: dict[str, list[float]], opening: dict[str, float]
) -> None:
    tokens = sum(len(row.response_ids) for row in rows)
    print(f"{args.kind}, {len(rows)} rows, {tokens:,} response tokens, medians of {args.rounds} updates")
    result = {}
    for name, seconds in found.items():
        median = statistics.median(seconds)
        ready = f", ready in {opening[name]:.0f} s" if name in opening else ""
        print(f"{name:10} {median:7.3f} s per update, {tokens / median:8.0f} response tokens/s{ready}")
        result["seconds_" + name.replace(" ", "_")] = round(median, 3)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
