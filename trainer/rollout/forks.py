"""The branches of the replay plan: each recorded episode of a step is forked at some of its calls, and run again from
there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
"""The number of earlier steps whose branches are used to find the decisive calls."""
NONE_DECIDES = (
    'replay.forks = "decisive": in the last steps no place of an episode had an effect on the outcome, so the calls to '
    "fork are drawn at random"
)


class Forks(NamedTuple):
    """The calls of an episode at which it is forked."""

    calls: Sequence[CallRecord] = ()
    unrepeatable: int = 0
    """The number of further calls of trained roles at which the episode cannot be forked."""
    budget: Budget = Budget()
    """The calls that the branches make."""
    none_decides: bool = False
    """Whether the calls were drawn at random although `replay.forks = "decisive"`, because no call has an effect."""


def forks_of(run: RolloutRun, trunk: Episode, effects: Mapping[Place, float]) -> Forks:
    """Choose the calls at which an episode of a step, the trunk, is forked into branches. `effects` is the result of
    `effects_before` the step. The choice is always the same for the same episode."""
    if not trunk.is_outcome:
        return Forks()
    # 1. The calls that can be forked: a fork must train a policy, and the episode must be repeatable up to the call.
    step = run.state.steps if trunk.training_step is None else trunk.training_step
    frozen = run.frozen(step)
    learning_roles = {role: policy for role, policy in run.trained_roles(step).items() if policy not in frozen}
    calls = run.store.calls(trunk.id)
    trainable = [call for call in calls if _is_trainable(call, learning_roles)]
    forkable = [call for call in trainable if can_repeat_before(calls, call)]

    # 2. The choice among them, by the rule and the budget of the configuration.
    rule = fork_rule(run.config.replay.forks)
    seed = seed_of(run.config.seed, "forks", trunk.training_step, trunk.task.id)
    chosen = choose_forks(forkable, rule, run.config.replay.budget, seed, effects)
    plans = run.config.plans_of(run.plan, run.trained_roles(step))
    return Forks(
        calls=chosen,
        unrepeatable=len(trainable) - len(forkable),
        budget=budget(calls, chosen, run.plan, plans),
        none_decides=rule.kind == "decisive" and none_decides(forkable, effects),
    )


def effects_before(run: RolloutRun, step: int) -> dict[Place, float]:
    """Return how much the answers at each place decided the outcome in the steps before this one. A place is a role and
    a turn. The effect is measured by the branches of episodes that were forked there. Empty unless the plan is `replay`
    and the rule of forks is `decisive`.

    The outcome of a branch is the reward of its episode for the role of the fork, by the weights of its policy's
    recipe. The plain sum of rewards would not do: in a game it may always be 0.

    The outcomes of the branches of a fork differ because of the answers at the fork, and because of everything after
    them. So the effect of a place is its spread less the spread at the next place. The spread is the variance of the
    outcomes of a fork, as a mean over the forks at the place. A place without forks in the last steps has no effect
    here.
    """
    if run.plan.kind != "replay" or fork_rule(run.config.replay.forks).kind != "decisive":
        return {}
    # Rollouts that run ahead of training begin before the branches of the step before them have ended.
    newest = step - 1 if run.config.mode == "async" else step
    forks = _read_forks(run, range(max(0, newest - REMEMBERED_STEPS), newest))
    outcomes = _branch_outcomes(run, forks)

    variances: dict[Place, list[float]] = {}
    call_steps: dict[Place, list[int]] = {}
    for fork in forks:
        known = [outcomes[branch.id] for branch in fork.branches if not math.isnan(outcomes[branch.id])]
        if len(known) > 1:
            place = fork.call.role, fork.call.turn
            variances.setdefault(place, []).append(variance(known))
            call_steps.setdefault(place, []).append(fork.call.step)

    effects: dict[Place, float] = {}
    in_order = sorted(variances, key=lambda place: fmean(call_steps[place]))
    next_spread = 0.0  # nothing differs after the last place
    for place in reversed(in_order):
        spread = fmean(variances[place])
        effects[place] = max(0.0, spread - next_spread)
        next_spread = spread
    return effects


class _Fork(NamedTuple):
    """A call of an earlier step, and the branches that were forked at it."""

    call: CallRecord
    branches: Sequence[Episode]


def _read_forks(run: RolloutRun, steps: Iterable[int]) -> list[_Fork]:
    """Read the forks of earlier steps that have several branches with an outcome."""
    branches_of_call: dict[str, list[Episode]] = {}
    trunk_ids: dict[str, None] = {}  # each once, in order
    for step in steps:
        for branch in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
            if branch.fork is not None and branch.is_outcome:
                branches_of_call.setdefault(branch.fork.call, []).append(branch)
                trunk_ids[branch.fork.trunk] = None
    forks: list[_Fork] = []
    for trunk_id in trunk_ids:
        for call in run.store.calls(trunk_id, lean=True):
            branches = branches_of_call.get(call.id, [])
            if len(branches) > 1:
                forks.append(_Fork(call, branches))
    return forks


def _branch_outcomes(run: RolloutRun, forks: Sequence[_Fork]) -> dict[str, float]:
    """Return the reward of each branch for the role of its fork, by the id of the branch; NaN if it is not known."""
    branch_ids: list[str] = []
    for fork in forks:
        branch_ids += [branch.id for branch in fork.branches]
    rewards = run.store.rewards(branch_ids)
    on_failure = failure_reward(run.config.on_failure)

    # The rewards of each step are weighed by themselves, as in training: a failure may get the lowest one of its step.
    samples_of_step: dict[tuple[str, int | None], list[Sample]] = {}  # by policy and step
    for fork in forks:
        for branch in fork.branches:
            policy = run.trained_roles(branch.training_step or 0).get(fork.call.role, "")
            sample = _outcome_sample(branch, fork.call, policy, rewards.get(branch.id) or {}, on_failure)
            samples_of_step.setdefault((policy, branch.training_step), []).append(sample)
    outcomes: dict[str, float] = {}
    for (policy, _), samples in samples_of_step.items():
        # These samples stand for the outcomes of episodes, so the rewards of candidates do not count.
        attribution = run.recipes.of(policy).attribution
        weighed = weigh_rewards(samples, attribution, (), own=False, outcome=True)
        for sample, outcome in zip(samples, weighed.outcome.tolist(), strict=True):
            outcomes[sample.rollout] = outcome
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

    `done` are branches from before an interruption, which are not run again. `effects` is the result of
    `effects_before` the step. `judged` gets the number of episodes of each task. `say_once` prints a line, the first
    time that it is called with it.
    """
    replays = _plan_branches(run, trunks, policies, effects, say_once)
    finished: list[Episode] = []
    for branch in done:
        if _is_planned(branch, replays.get((branch.task.id, branch.rollout))):
            finished.append(branch)
    judged.add_ended(finished)

    # A judge compares the branches of a task with each other and with their trunk.
    episodes_of_task = Counter(trunk.task.id for trunk in trunks)
    episodes_of_task.update(task_id for task_id, _ in replays)
    judged.expect(episodes_of_task)

    if not replays:
        return []
    branches = msgspec.structs.replace(batch, replays=replays, done=finished)
    return await run_episodes(run, branches, plan=run.plan, policies=policies)


def _plan_branches(
    run: RolloutRun,
    trunks: Sequence[Episode],
    policies: Mapping[str, PolicyRef],
    effects: Mapping[Place, float],
    say_once: Callable[[str], None],
) -> dict[tuple[str, int], Replay]:
    """Choose the forks of each trunk. Returns the replay of each branch, by its task and rollout.

    The trunk of a task is its rollout 0. The branches of its first fork follow from 1 on, then the branches of the next
    one. The numbers are always the same, so that a resumed run finds the branches.
    """
    plans = run.config.plans_of(run.plan, {role: policy.name for role, policy in policies.items()})
    replays: dict[tuple[str, int], Replay] = {}
    for trunk in trunks:
        forks = forks_of(run, trunk, effects)
        if not forks.calls:
            continue
        if forks.none_decides:
            say_once(NONE_DECIDES)
        script = read_script(run.store, trunk.id)
        rollout = 1
        for call in forks.calls:
            replay = Replay(script=script, fork=call.id)
            for _ in range(plans.get(call.role, run.plan).k):
                replays[trunk.task.id, rollout] = replay
                rollout += 1
    return replays


def replay_figures(run: RolloutRun, episodes: Sequence[Episode], effects: Mapping[Place, float]) -> dict[str, int]:
    """Return the numbers of forks, branches and calls of a step, planned and actual. Empty under another plan than
    replay. `effects` must be the ones that were used to choose the forks."""
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
    """Return a sentence with the number of calls of a step, estimated from the episodes of the preflight. `trained` has
    the trained roles with their policies.

    Raises ConfigError if the rule of forks names a role that is not trained.
    """
    rule = fork_rule(config.replay.forks)
    plans = config.plans_of(plan, trained)
    if rule.kind == "role" and rule.role not in {*trained, *config.roles}:
        raise ConfigError(
            "replay.forks", config.replay.forks, f"names no trained role; trained roles: {', '.join(sorted(trained))}"
        )
    # Choose the forks of each episode of the preflight, as in training.
    n_episodes = 0
    n_calls = 0
    n_forks = 0
    total = Budget()
    for episode in store.episodes(EpisodeFilters(phase="check")):
        calls = store.calls(episode.id)
        answered = [call for call in calls if call.role in trained and call.status == "ok"]
        forkable = [call for call in answered if can_repeat_before(calls, call)]
        forks = choose_forks(forkable, rule, config.replay.budget, seed=0)
        n_episodes += 1
        n_calls += len(calls)
        n_forks += len(forks)
        total += budget(calls, forks, plan, plans)

    # From the means over these episodes, estimate a step: each task has a trunk, and the calls of its branches.
    divisor = max(1, n_episodes)
    mean_calls = n_calls / divisor
    calls_per_step = tasks * (mean_calls + total.sampled / divisor)
    repeated_per_step = tasks * total.repeated / divisor
    return (
        f"replay: an episode of {mean_calls:.1f} calls is forked at {n_forks / divisor:.1f} of them, which makes "
        f"{total.branches / divisor:.1f} branches: about {calls_per_step:.0f} calls to policies in a step of {tasks} "
        f"tasks, {calls_per_step * config.steps:.0f} in the run; {repeated_per_step:.0f} a step are answered from the "
        "record"
    )


def _outcome_sample(
    branch: Episode, fork: CallRecord, policy: str, outcome: Mapping[str, float], on_failure: OnFailure
) -> Sample:
    """Return a sample without tokens that stands for the outcome of a branch, for `weigh_rewards`. It is of the role of
    the forked call."""
    return Sample(
        id=f"{branch.id}.0",
        task=branch.task.id,
        rollout=branch.id,
        role=fork.role,
        turn=fork.turn,
        step=fork.step,
        branch=fork.id,
        prompt=fork.id,
        policy=PolicyRef(policy),
        tokens=0,
        outcome=outcome,
        failure=failure_of(branch, on_failure),
    )


def _is_trainable(call: CallRecord, roles: Mapping[str, str]) -> bool:
    """Return whether a fork at this call trains a policy: the policy of its role in `roles` has sampled a complete
    answer."""
    if call.status != "ok" or call.chosen is None or call.prompt is None or call.redacted or call.policy is None:
        return False
    is_complete = call.candidates[call.chosen].finish_reason in COMPLETE
    is_sampled = temperature(call) > 0.0
    return is_complete and is_sampled and roles.get(call.role) == call.policy.name


def _is_planned(branch: Episode, replay: Replay | None) -> bool:
    """Return whether a branch from before an interruption is the planned one: of the same trunk, at the same call.
    `replay` is the plan for its task and rollout; None if there is none."""
    if replay is None or branch.fork is None:
        return False
    return branch.fork.trunk == replay.script.episode and branch.fork.call == replay.fork
