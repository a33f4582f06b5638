"""The branches of the replay plan: each recorded episode of a step is forked at some of its calls and runs again from
there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import fmean, variance
from typing import NamedTuple

import msgspec

from cotune.algorithms.attribution import weigh_rewards
from cotune.algorithms.collect import COMPLETE, failure_of, temperature
from cotune.algorithms.samples import Sample
from cotune.config.train import TrainConfig
from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import ConfigError
from cotune.records.plans import Plan, seed_of
from cotune.records.structs import CallRecord, Episode, PolicyRef
from cotune.replay.forks import Budget, Place, budget, can_repeat_before, choose_forks, fork_rule, none_decides
from cotune.replay.script import Replay, read_script
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.outcomes import OnFailure, failure_reward
from cotune.storage.protocol import Store
from cotune.trainer.judging.step import JudgedStep
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run.run import RolloutRun

REMEMBERED_STEPS = 10
"""Steps whose branches say which calls are decisive."""
NONE_DECIDES = (
    'replay.forks = "decisive": in the last steps no place of an episode had an effect on the outcome, so the calls to '
    "fork are drawn at random"
)


class Forks(NamedTuple):
    """The calls of an episode at which it is forked."""

    calls: Sequence[CallRecord]
    unrepeatable: int
    """Further calls of trained roles, at which it could not be forked."""
    budget: Budget
    """The calls that the branches make."""
    none_decides: bool = False
    """Whether `replay.forks = "decisive"` knows all its calls and none has an effect, so that they are drawn at
    random."""


def forks_of(run: RolloutRun, trunk: Episode, effects: Mapping[Place, float]) -> Forks:
    """Choose the calls at which an episode of a step is forked. `effects` are those of `effects_before` the step. The
    choice is always the same for the same episode."""
    if not trunk.is_outcome:
        return Forks((), 0, Budget())
    calls = run.store.calls(trunk.id)
    step = trunk.training_step
    if step is None:
        step = run.state.steps
    frozen = run.frozen(step)  # a fork at a call of a frozen policy would train no policy
    roles = {role: name for role, name in run.trained_roles(step).items() if name not in frozen}
    trainable = [call for call in calls if _trainable(call, roles)]
    forkable = [call for call in trainable if can_repeat_before(calls, call)]
    config = run.config.replay
    seed = seed_of(run.config.seed, "forks", trunk.training_step, trunk.task.id)
    rule = fork_rule(config.forks)
    chosen = choose_forks(forkable, rule, config.budget, seed, effects)
    plans = run.config.plans_of(run.plan, run.trained_roles(step))
    at_random = rule.kind == "decisive" and none_decides(forkable, effects)
    return Forks(chosen, len(trainable) - len(forkable), budget(calls, chosen, run.plan, plans), at_random)


def effects_before(run: RolloutRun, step: int) -> dict[Place, float]:
    """How much the answers at each place decided in the steps before this one, by the branches that were forked there;
    empty unless the plan is `replay` and the rule of forks is `decisive`.

    The outcome of a branch is the reward of its episode for the role of the fork, by the weights of its policy's
    recipe: in a game the roles have different rewards, whose plain sum may always be 0.

    The outcomes of the branches of a fork differ by its own answers and by everything after them. So the effect of a
    place is its spread (the variance of the outcomes of a fork, as a mean over the forks there) less the spread at the
    next place. It is a figure of the last steps: a place that was not forked in them is unknown again.
    """
    if run.plan.kind != "replay" or fork_rule(run.config.replay.forks).kind != "decisive":
        return {}
    # Rollouts that run ahead of training begin before the branches of the step before them have ended.
    newest = step - 1 if run.config.mode == "async" else step
    branches_of: dict[str, dict[str, list[Episode]]] = {}
    for earlier in range(max(0, newest - REMEMBERED_STEPS), newest):
        for branch in run.store.episodes(EpisodeFilters(phase="train", training_step=earlier)):
            if branch.fork is not None and branch.is_outcome:
                branches_of.setdefault(branch.fork.trunk, {}).setdefault(branch.fork.call, []).append(branch)
    forked: list[tuple[CallRecord, list[Episode]]] = []
    for trunk, of_trunk in branches_of.items():
        for call in run.store.calls(trunk, lean=True):
            if len(of_trunk.get(call.id, [])) > 1:
                forked.append((call, of_trunk[call.id]))
    outcomes = _branch_outcomes(run, forked)

    spreads: dict[Place, list[float]] = {}
    steps: dict[Place, list[int]] = {}
    for call, branches in forked:
        known = [outcomes[branch.id] for branch in branches if not math.isnan(outcomes[branch.id])]
        if len(known) > 1:
            place = call.role, call.turn
            spreads.setdefault(place, []).append(variance(known))
            steps.setdefault(place, []).append(call.step)

    in_order = sorted(spreads, key=lambda place: fmean(steps[place]))
    means = [fmean(spreads[place]) for place in in_order]
    effects = {}
    # After the last place nothing is left to differ.
    for place, spread, following in zip(in_order, means, [*means[1:], 0.0], strict=False):
        effects[place] = max(0.0, spread - following)
    return effects


def _branch_outcomes(run: RolloutRun, forked: Sequence[tuple[CallRecord, Sequence[Episode]]]) -> dict[str, float]:
    """The outcome of each branch by its id, as the role of its fork is rewarded for it; NaN if it is not known.

    `forked` are calls with the branches that were forked there.
    """
    rewards = run.store.rewards([branch.id for _, branches in forked for branch in branches])
    on_failure = failure_reward(run.config.on_failure)
    # Each step is weighed by itself, as in training: a failure may get the lowest reward of its step.
    samples: dict[tuple[str, int | None], list[Sample]] = {}
    for call, branches in forked:
        for branch in branches:
            policy = run.trained_roles(branch.training_step or 0).get(call.role, "")
            sample = _outcome_sample(branch, call, policy, rewards.get(branch.id) or {}, on_failure)
            samples.setdefault((policy, branch.training_step), []).append(sample)
    outcomes: dict[str, float] = {}
    for (policy, _), samples_of_step in samples.items():
        attribution = run.recipes.of(policy).attribution
        values = weigh_rewards(samples_of_step, attribution, (), own=False, outcome=True).outcome.tolist()
        for sample, value in zip(samples_of_step, values, strict=True):
            outcomes[sample.rollout] = value
    return outcomes


async def run_forks(
    run: RolloutRun,
    batch: EpisodeBatch,
    trunks: Sequence[Episode],
    done: Collection[Episode],
    policies: Mapping[str, PolicyRef],
    effects: Mapping[Place, float],
    judged: JudgedStep,
    say_once: Callable[[str], None],
) -> list[Episode]:
    """Run K branches of each fork of a step's episodes (`trunks`), and return all branches.

    The rollouts from 1 on are the branches of the first fork, then those of the next one, so that a resumed run finds
    them. `done` are branches from before an interruption, which are not run again. `effects` are those of
    `effects_before` the step. `judged` learns how many episodes each task has. `say_once` prints a line, the first
    time.
    """
    plans = run.config.plans_of(run.plan, {role: policy.name for role, policy in policies.items()})
    replays: dict[tuple[str, int], Replay] = {}
    for trunk in trunks:
        chosen = forks_of(run, trunk, effects)
        forks = chosen.calls
        if not forks:
            continue
        if chosen.none_decides:
            say_once(NONE_DECIDES)
        script = read_script(run.store, trunk.id)
        rollout = 1
        for fork in forks:
            replay = Replay(script=script, fork=fork.id)
            for _ in range(plans.get(fork.role, run.plan).k):
                replays[trunk.task.id, rollout] = replay
                rollout += 1
    finished = [episode for episode in done if _repeats(episode, replays.get((episode.task.id, episode.rollout)))]
    judged.already(finished)

    # A judge compares the branches of a task with each other and with their trunk.
    episodes_of_task = Counter(trunk.task.id for trunk in trunks)
    episodes_of_task.update(task_id for task_id, _ in replays)
    judged.expect(episodes_of_task)

    if not replays:
        return []
    branches = msgspec.structs.replace(batch, replays=replays, done=finished)
    return await run_episodes(run, branches, plan=run.plan, policies=policies)


def replay_figures(run: RolloutRun, episodes: Sequence[Episode], effects: Mapping[Place, float]) -> dict[str, int]:
    """Return the planned and the actual calls of the forks of a step; no figures under another plan. `effects` are
    those by which the forks were chosen."""
    if run.plan.kind != "replay":
        return {}
    trunks = [episode for episode in episodes if episode.rollout == 0]
    all_forks = [forks_of(run, trunk, effects) for trunk in trunks]
    planned = sum((forks.budget for forks in all_forks), Budget())
    branches = [episode for episode in episodes if episode.rollout > 0]
    calls: list[CallRecord] = []
    for branch in branches:
        calls += run.store.calls(branch.id)
    repeated = sum(call.replayed is not None for call in calls)
    return {
        "forks": sum(len(forks.calls) for forks in all_forks),
        "unrepeatable": sum(forks.unrepeatable for forks in all_forks),
        "branches": len(branches),
        "diverged": sum(branch.blame == "divergence" for branch in branches),
        "budget": planned.sampled,
        "sampled": len(calls) - repeated,
        "repeated": repeated,
    }


def expected_budget(config: TrainConfig, store: Store, trained: Mapping[str, str], plan: Plan, tasks: int) -> str:
    """Return a sentence with the calls of a step, estimated from the episodes of the preflight. `trained` has the
    policies of the trained roles.

    Raises ConfigError if the rule of forks names a role that is not trained.
    """
    rule = fork_rule(config.replay.forks)
    plans = config.plans_of(plan, trained)
    if rule.kind == "role" and rule.role not in {*trained, *config.roles}:
        raise ConfigError(
            "replay.forks", config.replay.forks, f"names no trained role; trained roles: {', '.join(sorted(trained))}"
        )
    episodes = total_calls = total_forks = 0
    total = Budget()
    for episode in store.episodes(EpisodeFilters(phase="check")):
        calls = store.calls(episode.id)
        answered = [call for call in calls if call.role in trained and call.status == "ok"]
        forkable = [call for call in answered if can_repeat_before(calls, call)]
        forks = choose_forks(forkable, rule, config.replay.budget, 0)
        episodes += 1
        total_calls += len(calls)
        total_forks += len(forks)
        total += budget(calls, forks, plan, plans)
    count = max(1, episodes)
    mean_calls = total_calls / count
    per_step = tasks * (mean_calls + total.sampled / count)
    return (
        f"replay: an episode of {mean_calls:.1f} calls is forked at {total_forks / count:.1f} of "
        f"them, which makes {total.branches / count:.1f} branches: about {per_step:.0f} calls to policies in a step of "
        f"{tasks} tasks, {per_step * config.steps:.0f} in the run; {tasks * total.repeated / count:.0f} a step are "
        "answered from the record"
    )


def _outcome_sample(
    branch: Episode, fork: CallRecord, policy: str, outcome: Mapping[str, float], on_failure: OnFailure
) -> Sample:
    """A sample that stands for the outcome of a branch, as the role of its fork is rewarded for it."""
    return Sample(
        id=f"{branch.id}.0", task=branch.task.id, rollout=branch.id, role=fork.role, turn=fork.turn, step=fork.step,
        branch=fork.id, prompt=fork.id, policy=PolicyRef(policy), tokens=0, outcome=outcome,
        failure=failure_of(branch, on_failure),
    )  # fmt: skip


def _trainable(call: CallRecord, roles: Mapping[str, str]) -> bool:
    """Return whether a fork at this call trains a policy: a complete answer that a policy of `roles` has sampled."""
    if call.status != "ok" or call.chosen is None or call.prompt is None or call.redacted or call.policy is None:
        return False
    answered = call.candidates[call.chosen].finish_reason in COMPLETE
    return answered and roles.get(call.role) == call.policy.name and temperature(call) > 0.0


def _repeats(branch: Episode, replay: Replay | None) -> bool:
    """Return whether a branch from before an interruption is the planned one: of this trunk, at this call."""
    fork = branch.fork
    return replay is not None and fork is not None and (fork.trunk, fork.call) == (replay.script.episode, replay.fork)
