"""Every recipe trains a tiny team for one step, and moves the policies that it has something to say to."""

from __future__ import annotations

import msgspec
import pytest

from cotune.algorithms.catalogue import ANY_PLAN, RECIPES, recipe
from cotune.algorithms.prepare import prepare
from cotune.algorithms.samples import Sample
from cotune.records.policies import policies_for
from cotune.records.structs import PolicyRef
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.methods import bounded_loss
from tests.trainer.learner.learner_rows import FAST, SMALL, make_rows, on_policy, same, snapshot

PLANS = [(name, method.plan) for name, method in RECIPES.items()]
PLANS += [(name, plan) for name in ANY_PLAN for plan in ("tree", "replay")]
QUICK = ("at_grpo", "dr_mas", "spiral")
"""Trained in the quick suite too."""
CASES = [pytest.param(*pair, marks=() if pair[0] in QUICK else pytest.mark.slow) for pair in PLANS]


def step_of(plan: str, role: str, rewards: list[float]) -> list[Sample]:
    """The answers of a role: to one prompt, or in episodes of one task."""
    samples = []
    for i, reward in enumerate(rewards):
        one_call = plan == "tree"
        samples.append(
            Sample(
                id=f"{role}.{i}" if one_call else f"{role}{i}.0",
                task="q",
                rollout="e" if one_call else f"e{i}",
                role=role,
                turn=0,
                step=0,
                branch="e" if one_call else role,
                prompt=role,
                policy=PolicyRef(role),
                tokens=4,
                observation=role,
                entropy=float(i),
                rewards={"local": reward, "format": 1.0, "judge": reward} if plan != "replay" else {},
                outcome={"white": 0.5, "black": 0.25, "team": 0.5} | {role: reward, "correct": reward, "format": 1.0},
                chosen=i == 0 or not one_call,
                training_step=1,
            )
        )
    return samples


@pytest.mark.parametrize(("name", "plan"), CASES)
def test_a_recipe_moves_the_policy_whose_rewards_differ(base: str, name: str, plan: str) -> None:
    method = recipe(name, plan=plan)
    learner = LocalLearner.open(
        base, policies_for("lora", ["white", "black"], SMALL), FAST, bounded_loss(method.loss, 8)
    )
    rewards = {"white": [1.0, 0.0, 1.0, 0.25], "black": [0.0] * 4}
    samples = [sample for role, values in rewards.items() for sample in step_of(plan, role, values)]
    prepared = prepare(samples, method)
    rows = on_policy(learner, "white", make_rows(groups=1, k=4, response=(4, 4)))

    moved = set()
    for role in rewards:
        taught = []
        for sample, advantage in zip(prepared.samples, prepared.advantages.tolist(), strict=True):
            if sample.role == role:
                row = rows[int(sample.id.strip("whiteblack").partition(".")[0 if plan != "tree" else 2])]
                # A teacher finds every token of white a little likelier; black agrees with it.
                gap = 0.5 if role == "white" else 0.0
                changes = {"advantage": advantage, "trajectory": sample.rollout, "privileged": (2, 3)}
                changes["reference"] = tuple(value + gap for value in row.logprobs)
                taught.append(msgspec.structs.replace(row, id=sample.id, role=role, **changes))
        before = snapshot(learner, role)
        if taught:
            learner.update(role, taught)
        if not same(before, learner.weights(role)):
            moved.add(role)
    # What moves black too: an outcome that roles share, a comparison across roles, a KL penalty, an entropy bonus, a
    # critic, or a moving average.
    shared = method.loss.moves_alone or "role" not in method.group_by or method.joins_roles or method.remembers
    assert moved == {"white"} or (shared and moved == {"white", "black"})
