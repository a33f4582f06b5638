"""Processor seconds that the learner's host takes for the rows of an update, besides the work of a GPU. No model.

    python -m benchmarks.host_work [--rows 512] [--prompt 1500] [--answer 500] [--k 8] [--budget 8192] [--profile]

Rows are K answers to one prompt; token ids are random. The work is one update with one epoch: rows are checked,
divided into optimizer steps and passes, and each pass gets its tree of tokens and the calls of its attention. Masks are
left out, because the GPU makes them. `ahead` is the part that a thread prepares while the GPU computes the pass
before; the GPU waits at most for the rest. Seconds are processor time of one thread, in the fastest of three rounds.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner import tree_attention
from cotune.trainer.learner.batching import PassPlan, check_rows, mini_batches, tokens_of
from cotune.trainer.learner.pass_inputs import prepare_pass
from cotune.trainer.learner.tree_attention import TreePass
from cotune.trainer.learner.update_tokens import UpdateTokens

VOCABULARY = 150_000
STEP_ROWS = 64
CPU = torch.device("cpu")
AHEAD = "pass inputs"


def make_rows(args: argparse.Namespace) -> list[TrainRow]:
    """Answers of half to one and a half times `args.answer` tokens."""
    rng = np.random.default_rng(0)
    rows: list[TrainRow] = []
    for group in range(args.rows // args.k):
        prompt = tuple(rng.integers(0, VOCABULARY, args.prompt).tolist())
        for candidate in range(args.k):
            length = int(args.answer * rng.uniform(0.5, 1.5))
            row = TrainRow(
                id=f"{group}.{candidate}",
                role="agent",
                prompt_ids=prompt,
                response_ids=tuple(rng.integers(0, VOCABULARY, length).tolist()),
                logprobs=tuple(rng.normal(size=length).tolist()),
                advantage=float(rng.normal()),
                trajectory=str(group),
            )
            rows.append(row)
    return rows


def host_work(rows: list[TrainRow], budget: int) -> dict[str, float]:
    """Seconds of each part of an update's work on the host."""
    seconds: dict[str, float] = {}

    @contextmanager
    def timed(part: str) -> Iterator[None]:
        start = time.thread_time()
        yield
        seconds[part] = seconds.get(part, 0.0) + time.thread_time() - start

    with timed("check of rows"):
        check_rows(rows)
        max(rows, key=lambda row: len(tokens_of(row)))
    with timed("optimizer steps"):
        batches = mini_batches(rows, STEP_ROWS, torch.Generator())
    with timed("tokens of the update"):
        tokens = UpdateTokens(rows, LossSpec())
        tokens.compare(None)
        lengths = tokens.lengths
        assert len(lengths) == len(rows)
    for batch in batches:
        with timed("passes"):
            plan = PassPlan(rows, batch, shared=True)
            plan.computed(budget)
            plan.computed(2 * budget)
            micros = plan.passes(budget)
        for micro in micros:
            with timed(AHEAD):
                inputs = prepare_pass([rows[i] for i in micro], shared=True, flex=False)
            assert inputs.tree is not None
            with timed("calls of the attention"):
                TreePass(inputs.tree, CPU, blocks=inputs.blocks)
            with timed("places of tokens"):
                at = tokens.indices_of(micro)
                tokens.counted[at].nonzero()
    return seconds


def no_mask(place: torch.Tensor, first: torch.Tensor, last: torch.Tensor) -> Any:
    """In place of `hidden_keys`."""
    return torch.empty(len(place), 1, 1, dtype=torch.bool)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--answer", type=int, default=500)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--budget", type=int, default=8192, help="tokens of a pass")
    parser.add_argument("--profile", action="store_true", help="print the functions that take longest")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = make_rows(args)
    with patch.object(tree_attention, "hidden_keys", no_mask):
        rounds = [host_work(rows, args.budget) for _ in range(3)]
        if args.profile:
            with cProfile.Profile() as profile:
                host_work(rows, args.budget)
            profile.print_stats("tottime")
    fastest = min(rounds, key=lambda seconds: sum(seconds.values()))
    for part, seconds in sorted(fastest.items(), key=lambda item: -item[1]):
        print(f"{part:24}{seconds:8.3f} s")
    total = sum(fastest.values())
    figures = {"rows": len(rows), "seconds": round(total, 3), "ahead": round(fastest[AHEAD], 3)}
    print(json.dumps({**figures, "waited_for": round(total - fastest[AHEAD], 3)}))


if __name__ == "__main__":
    main()
