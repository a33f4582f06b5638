"""One step of a team on the CPU, phase by phase: seconds, cores in use, and the cost of a token in each kind of plan.

    python -m benchmarks.whole_step [--rounds 3] [--dtype float32]

SmolLM2-135M, two threads. Two roles take three turns each in an episode, and each has a LoRA of rank 16. Under `tree`
K candidates answer each call, and the first is used; under `independent` K episodes run at the same time. Both give
K rows for each role and turn, and one optimizer step for each role. A role's prompt grows by its answer and
`--observation` tokens from turn to turn. The plans take turns in one process, over one sampler in a process of its own;
figures are medians after a warm round. Cores in use are the processor time of both processes over the seconds. The last
line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoConfig

from benchmarks.clock import Clock
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplingParams
from cotune.trainer.learner.local import LocalLearner
from examples.word_problems.demo import pretrained
from tests.trainer.learner.forced import ForcedSettings

ROLES = ("planner", "checker")
TURNS = 3
LORA = LoraSpec(rank=16)
PHASES = ("rollout", "update", "publish", "checkpoint", "whole step")
Ids = tuple[int, ...]


class Team:
    """Sampler and learner of two roles, and a clock for each plan."""

    def __init__(self, args: argparse.Namespace) -> None:
        folder = str(locate_model(pretrained()))
        self.args, self.chance = args, np.random.default_rng(0)
        self.vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        self.runner = asyncio.Runner()
        settings = ForcedSettings(
            lr=1e-4, mini_batch=TURNS * args.k, device="cpu", threads=args.threads, dtype=args.dtype
        )
        opening = TransformersSampler.open(
            folder, device="cpu", threads=args.threads, dtype=settings.precision, end_token_ids=()
        )
        self.sampler = self.runner.run(opening)
        assert self.sampler._host is not None
        self.clocks = {plan: Clock(self.sampler._host._process.pid) for plan in ("tree", "independent")}
        self.learner = LocalLearner.open(folder, policies_for("lora", ROLES, LORA), settings, recipe("at_grpo").loss)
        self.versions = {role: PolicyRef(role, 0) for role in ROLES}
        self.computed: dict[str, list[float]] = defaultdict(list)

    def step(self, plan: str, folder: Path) -> None:
        clock = self.clocks[plan]
        began = at = clock.now()
        rows = self.runner.run(self.tree() if plan == "tree" else self.independent())
        at = clock.add("rollout", at)
        done = [self.learner.update(role, [row for row in rows if row.role == role]) for role in ROLES]
        self.computed[plan].append(sum(metrics["computed_tokens"] for metrics in done))
        at = clock.add("update", at)
        self.runner.run(self.publish())
        at = clock.add("publish", at)
        self.learner.save(folder)
        clock.add("checkpoint", at)
        clock.add("whole step", began)

    async def tree(self) -> list[TrainRow]:
        rows: list[TrainRow] = []
        prompts = {role: self.ids(self.args.prompt) for role in ROLES}
        for turn in range(TURNS):
            for role in ROLES:
                answers = await self.ask(role, prompts[role], self.args.k)
                rows += [self.row(role, turn, i, prompts[role], answer) for i, answer in enumerate(answers)]
                prompts[role] += answers[0].token_ids + self.ids(self.args.observation)
        return rows

    async def independent(self) -> list[TrainRow]:
        opening = {role: self.ids(self.args.prompt) for role in ROLES}

        async def episode(number: int) -> list[TrainRow]:
            rows, prompts = [], dict(opening)
            for turn in range(TURNS):
                for role in ROLES:
                    [answer] = await self.ask(role, prompts[role], 1)
                    rows.append(self.row(role, turn, number, prompts[role], answer))
                    prompts[role] += answer.token_ids + self.ids(self.args.observation)
            return rows

        return [row for rows in await asyncio.gather(*map(episode, range(self.args.k))) for row in rows]

    async def ask(self, role: str, prompt: Ids, count: int) -> Sequence[Completion]:
        return await self.sampler.sample(prompt, count, SamplingParams(max_tokens=self.args.new), self.versions[role])

    async def publish(self) -> None:
        for role, old in list(self.versions.items()):
            self.versions[role] = PolicyRef(role, old.version + 1)
            await self.sampler.publish(self.versions[role], self.learner.weights(role), LORA)
            if old.version:
                await self.sampler.retire(old)

    def ids(self, count: int) -> Ids:
        return tuple(self.chance.integers(3, self.vocabulary, count).tolist())

    def row(self, role: str, turn: int, number: int, prompt: Ids, answer: Completion) -> TrainRow:
        return TrainRow(
            id=f"{role}.{turn}.{number}",
            role=role,
            prompt_ids=prompt,
            response_ids=answer.token_ids,
            logprobs=answer.logprobs,
            advantage=1.0 if number % 2 else -1.0,
        )

    def close(self) -> None:
        self.runner.run(self.sampler.aclose())
        self.runner.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a role's first prompt")
    parser.add_argument("--observation", type=int, default=64, help="tokens that a turn adds to the answer")
    parser.add_argument("--new", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    team = Team(args)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(args.rounds + 1):
            for plan in team.clocks:
                round_folder = Path(folder, f"{plan}{number}")
                round_folder.mkdir()
                team.step(plan, round_folder)
    team.close()
    report(team)


def report(team: Team) -> None:
    args = team.args
    sampled = 2 * TURNS * args.k * args.new
    print(f"{2 * TURNS * args.k} rows, {sampled:,} tokens sampled, {args.threads} threads, dtype {args.dtype}")
    print(f"{'plan':12} {'phase':12} {'seconds':>8} {'cores':>6} {'tokens':>7} {'ms a token':>11}")
    result: dict[str, Any] = {}
    for plan, clock in team.clocks.items():
        computed = team.computed[plan][-1]
        tokens = {"rollout": sampled, "update": computed}
        for phase in PHASES:
            seconds = statistics.median(clock.seconds[phase][1:])
            cores = sum(clock.cpu[phase][1:]) / sum(clock.seconds[phase][1:])
            of = tokens.get(phase)
            each = f"{of:7,.0f} {1000 * seconds / of:11.2f}" if of else f"{'-':>7} {'-':>11}"
            print(f"{plan:12} {phase:12} {seconds:8.2f} {cores:6.2f} {each}")
            result[f"{plan} {phase}"] = {"seconds": round(seconds, 3), "cores": round(cores, 2), "tokens": of}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
