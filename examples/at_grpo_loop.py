"""AT-GRPO as one script, for researchers who want to change the method. It is the method of `cotune train`, without
checkpoints, resuming, metrics files, Ray and late roles.

An unmodified LangGraph application, the navigator and the driver of plan_path/, trains one LoRA per role. In each step
every call of the application draws K candidates from one prompt, a scorer of its role rewards each, and the application
continues with the best. Candidates of one call are compared with each other; each role's policy trains separately.

    python -m examples.at_grpo_loop                      # warms up a base model first, for about a minute
    python -m examples.at_grpo_loop --model runs/at_grpo_loop/base --steps 30
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import Collected, collect
from cotune.algorithms.groups import build_groups
from cotune.algorithms.samples import Sample, TrainRow
from cotune.config.learner import LearnerSettings
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import workflow_of
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.plans import Plan
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import Episode, PolicyRef, Task
from cotune.records.tasks import as_tasks
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.trainer.learner.local import LocalLearner
from examples.plan_path.base import build
from examples.plan_path.grid import make_tasks
from examples.plan_path.train import solve

ROLES = ("navigator", "driver")
LORA = LoraSpec(rank=16, alpha=32.0)
METHOD = recipe("at_grpo", clip_high=0.28, entropy=0.03)
"""Settings of the loss and the names that groups and rewards go by; the advantages are computed below."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a run."""

    model: str
    out: Path
    steps: int = 16
    tasks_per_step: int = 32
    held_out: int = 96
    k: int = 8
    lr: float = 3e-3


class StepResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a step: mean reward of the candidates of each role, success of the new policies on held-out tasks,
    and the largest mean gap between the sampler's and the learner's log-probabilities, in nats per token."""

    reward: Mapping[str, float]
    success: float
    gap: float


async def train(options: Options) -> list[StepResult]:
    """Run the loop; one result per step."""
    options.out.mkdir(parents=True, exist_ok=True)
    workflow = workflow_of(solve)
    tasks = as_tasks(make_tasks(options.steps * options.tasks_per_step, seed=0))
    held_out = as_tasks(make_tasks(options.held_out, seed=1))
    store = open_store(options.out / "records.db")
    chat = ChatTemplate.load(options.model)
    sampler = await TransformersSampler.open(options.model)
    policies = policies_for("lora", ROLES, LORA)
    settings = LearnerSettings(lr=options.lr, betas=(0.9, 0.95))
    learner = LocalLearner.open(options.model, policies, settings, METHOD.loss)
    served = {role: PolicyRef(role, version=0) for role in ROLES}  # version 0 is the base model

    async def roll_out(tasks: Sequence[Task], phase: str, step: int, plan: Plan | None) -> list[Episode]:
        """Run the application on tasks; the policies answer its calls. Without a plan each call is one sample."""
        responder = PolicyResponder(
            sampler,
            chat,
            served,
            plan=plan,
            scorers=workflow.scorers,
            attribution=METHOD.attribution,
            defaults=SamplingParams(max_tokens=8),
            seed=step if plan else 0,
        )
        batch = EpisodeBatch(tasks=tasks, sink=store, phase=phase, training_step=step, concurrency=48)
        episodes = await rollout(workflow, batch, responder)
        store.flush()
        return episodes

    results = []
    for step in range(options.steps):
        # Roll out: every call is a tree node with k candidates. The application continues with the best one.
        chosen = tasks[step * options.tasks_per_step : (step + 1) * options.tasks_per_step]
        episodes = await roll_out(chosen, "train", step, Plan(kind="tree", k=options.k))

        # Collect one sample per candidate; group the candidates of one prompt; weigh each against its group.
        versions = {role: ref.version for role, ref in served.items()}
        collected = collect(store, episodes, plan="tree", roles=ROLES, versions=versions)
        rows: dict[str, list[TrainRow]] = {role: [] for role in ROLES}
        for group in build_groups(collected.samples, METHOD).groups:
            rewards = np.array([reward(sample) for sample in group.samples])
            if np.ptp(rewards) == 0.0:
                continue  # nothing to learn from
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for sample, advantage in zip(group.samples, advantages.tolist(), strict=True):
                rows[sample.role].append(train_row(sample, advantage, collected, store))

        # Update each role's policy, and publish its weights as the next version.
        gap = 0.0
        for role in (role for role in ROLES if rows[role]):
            metrics = learner.update(role, rows[role], lr_scale=1.0 - step / options.steps)
            gap = max(gap, metrics["sampler_gap_mean"])
            old, served[role] = served[role], PolicyRef(role, served[role].version + 1)
            await sampler.publish(served[role], learner.weights(role), LORA)
            if old.version:
                await sampler.retire(old)

        # Evaluate single samples on held-out tasks.
        walks = await roll_out(held_out, "eval", step, None)
        success = sum(episode.metrics.get("success", 0.0) for episode in walks) / len(walks)
        means = {role: float(np.mean([reward(s) for s in collected.samples if s.role == role])) for role in ROLES}
        results.append(StepResult(reward=means, success=success, gap=gap))
        rewards_text = "  ".join(f"{role} {mean:+.3f}" for role, mean in means.items())
        line = f"step {step + 1:2}/{options.steps}  success {success:.1%}  reward: {rewards_text}  gap {gap:.1e}"
        print(line, flush=True)
    await sampler.aclose()
    store.close()
    return results


def reward(sample: Sample) -> float:
    """The reward of a candidate, r = team + local: the components that its role's scorer has returned."""
    return sum(sample.rewards.values())


def train_row(sample: Sample, advantage: float, collected: Collected, store: Store) -> TrainRow:
    """Return a candidate as a row for the learner: token ids, the sampler's log-probabilities, and the advantage."""
    call = collected.calls[sample.call]
    candidate = next(c for c in call.candidates if sample.id == f"{call.id}.{c.index}")
    return TrainRow(
        id=sample.id,
        role=sample.role,
        prompt_ids=store.token_ids(sample.prompt),
        response_ids=candidate.token_ids,
        logprobs=candidate.logprobs,
        advantage=advantage,
    )


def main() -> None:
    """Train, with a base model of its own unless one is named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--model", help="folder of a base model (default: warm one up)")
    parser.add_argument("--out", type=Path, default=Path("runs/at_grpo_loop"))
    parser.add_argument("--steps", type=int, default=16)
    options = parser.parse_args()
    model = options.model or str(options.out / "base")
    if options.model is None:
        print("warming up a base model ...", flush=True)
        build(Path(model))
    asyncio.run(train(Options(model=model, out=options.out, steps=options.steps)))


if __name__ == "__main__":
    main()
