"""The branches of the replay plan: each recorded episode of a step runs again from some of its calls on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cotune.algorithms.collect import COMPLETE, temperature
from cotune.config.train import TrainConfig
from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import ConfigError
from cotune.records.plans import seed_of
from cotune.records.structs import CallRecord, Episode, PolicyRef
from cotune.replay.forks import Budget, budget, choose_forks, fork_rule, repeatable
from cotune.replay.script import Replay, read_script
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.trainer.judging.step import JudgedStep
from cotune.trainer.rollout.episodes import run_episodes
from cotune.trainer.run.run import RolloutRun


class Forks(NamedTuple):
    """The calls of an episode at which it is forked, how many more could not be, and what their branches take."""

    calls: Sequence[CallRecord]
    unrepeatable: int
    budget: Budget


def forks_of(run: RolloutRun, trunk: Episode) -> Forks:
    """Where an episode of a step is forked: the same whenever it is asked."""
    if not trunk.is_outcome:
        return Forks((), 0, Budget())
    calls, step = run.store.calls(trunk.id), trunk.training_step
    at = run.state.steps if step is None else step
    frozen = run.frozen(at)  # a fork of theirs would train nobody
    roles = {role: name for role, name in run.trained_roles(at).items() if name not in frozen}
    able = [call for call in calls if _trainable(call, roles)]
    forkable = [call for call in able if repeatable(calls, call)]
    config = run.config.replay
    seed = seed_of(run.config.seed, "forks", trunk.training_step, trunk.task.id)
    chosen = choose_forks(forkable, fork_rule(config.forks), config.budget, seed)
    return Forks(chosen, len(able) - len(forkable), budget(calls, chosen, run.plan.k))


async def run_forks(
    run: RolloutRun,
    batch: EpisodeBatch,
    trunks: Sequence[Episode],
    done: Collection[Episode],
    policies: Mapping[str, PolicyRef],
    judged: JudgedStep,
) -> list[Episode]:
    """Run K branches of each fork of a step's episodes (`trunks`), and return all branches.

    The branches of fork number f are the rollouts 1 + f K and following, so that a resumed run finds them: `done` are
    branches from before an interruption, which are not run again. `judged` learns how many episodes each task has.
    """
    k = run.plan.k
    replays: dict[tuple[str, int], Replay] = {}
    for trunk in trunks:
        forks = forks_of(run, trunk).calls
        if not forks:
            continue
        script = read_script(run.store, trunk.id)
        for number, fork in enumerate(forks):
            replay = Replay(script=script, fork=fork.id)
            for branch in range(k):
                replays[trunk.task.id, 1 + number * k + branch] = replay
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


def replay_figures(run: RolloutRun, episodes: Sequence[Episode]) -> dict[str, int]:
    """What the forks of a step were planned to take, and what they took; nothing under another plan."""
    if run.plan.kind != "replay":
        return {}
    found = [forks_of(run, episode) for episode in episodes if episode.rollout == 0]
    planned = sum((forks.budget for forks in found), Budget())
    branches = [episode for episode in episodes if episode.rollout > 0]
    calls = [call for episode in branches for call in run.store.calls(episode.id)]
    repeated = sum(call.replayed is not None for call in calls)
    return {
        "forks": sum(len(forks.calls) for forks in found),
        "unrepeatable": sum(forks.unrepeatable for forks in found),
        "branches": len(branches),
        "diverged": sum(episode.blame == "divergence" for episode in branches),
        "budget": planned.sampled,
        "sampled": len(calls) - repeated,
        "repeated": repeated,
    }


def expected_budget(config: TrainConfig, store: Store, trained: Collection[str], k: int, tasks: int) -> str:
    """A sentence that says what a step takes, going by the episodes of the preflight. Raises ConfigError where the rule
    names a role that is not trained."""
    rule, seen = fork_rule(config.replay.forks), []
    if rule.kind == "role" and rule.role not in {*trained, *config.roles}:
        raise ConfigError(
            "replay.forks", config.replay.forks, f"names no trained role; trained roles: {', '.join(sorted(trained))}"
        )
    for episode in store.episodes(EpisodeFilters(phase="check")):
        calls = store.calls(episode.id)
        able = [call for call in calls if call.role in trained and call.status == "ok" and repeatable(calls, call)]
        forks = choose_forks(able, rule, config.replay.budget, 0)
        seen.append((len(calls), len(forks), budget(calls, forks, k)))
    count = max(1, len(seen))
    calls_mean = sum(calls for calls, _, _ in seen) / count
    forked = sum(forks for _, forks, _ in seen) / count
    total = sum((taken for _, _, taken in seen), Budget())
    per_step = tasks * (calls_mean + total.sampled / count)
    return (
        f"replay: an episode of {calls_mean:.1f} calls is forked at {forked:.1f} of "
        f"them, which makes {total.branches / count:.1f} branches: about {per_step:.0f} calls to policies in a step of "
        f"{tasks} tasks, {per_step * config.steps:.0f} in the run; {tasks * total.repeated / count:.0f} a step are "
        "answered from the record"
    )


def _trainable(call: CallRecord, roles: Mapping[str, str]) -> bool:
    if call.status != "ok" or call.chosen is None or call.prompt is None or call.redacted or call.policy is None:
        return False
    answered = call.candidates[call.chosen].finish_reason in COMPLETE
    return answered and roles.get(call.role) == call.policy.name and temperature(call) > 0.0


def _repeats(branch: Episode, replay: Replay | None) -> bool:
    """Whether a branch that was run before is the one that is planned: of this trunk, at this call."""
    fork = branch.fork
    return replay is not None and fork is not None and (fork.trunk, fork.call) == (replay.script.episode, replay.fork)
