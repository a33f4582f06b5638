"""Continuing from a checkpoint: when a run is resumed, when a learner is lost, and when new roles appear."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import GapError, LearnerLost
from cotune.records.structs import PolicyRef
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import plural
from cotune.trainer.evaluation.best_checkpoint import find_best
from cotune.trainer.opening.warm_start import warm_start
from cotune.trainer.rollout.pipeline import RolloutPipeline
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.step_report import StepReport
from cotune.trainer.updates import publish_version

LOST_WEIGHTS_ERROR = "the weights that answered it are lost"
"""Error of episodes that were cancelled when a run went back to a checkpoint in another precision."""
LEARNER_RESTARTS = 3
"""Number of times that a lost learner continues from the last checkpoint before the run stops."""


async def restore(run: RolloutRun, checkpoint: Checkpoint, path: Path) -> list[str]:
    """Go back to a checkpoint: weights and optimizers, versions at the sampler, and the groups that count as consumed.

    Policies that were added after the checkpoint get their initial state. Returns notes for the user.
    """
    policies = run.state.policies
    new_policies = [name for name in policies.trained if name not in checkpoint.policies.specs]
    await asyncio.to_thread(run.learner.load, path, new_policies)
    # Retire all versions: a publish that was interrupted may or may not have arrived.
    for served in (await run.sampler.info()).served:
        name, _, version = served.rpartition("@")
        await run.sampler.retire(PolicyRef(name, int(version)))
    run.published.clear()
    run.store.release(checkpoint.steps)
    versions = dict(checkpoint.versions)
    run.state = msgspec.structs.replace(checkpoint, policies=policies, versions=versions, new_roles=())
    run.committed = checkpoint.steps
    run.folder.truncate_metrics(checkpoint.steps)
    notes = find_best(run)
    for policy, number in versions.items():
        await publish_version(run, policy, number)
    return notes


async def begin_from(run: RolloutRun, source: str, names: Collection[str] | None = None) -> list[str]:
    """Start policies (all, or the ones in `names`) from the policies of another run or an export, as their first
    version. Returns notes for the user. Raises ConfigError."""
    started, notes = await warm_start(source, run.config.model, run.state.policies, run.learner, names)
    for name in started:
        await publish_version(run, name, run.next_version(name))
    return notes


async def recover(
    run: RolloutRun, rollouts: RolloutPipeline[Any], report: StepReport, error: GapError | LearnerLost
) -> None:
    """Go back to the last checkpoint after an error in a step, so that the run can continue from it.

    A lost learner is opened again. If sampler and learner differ too much in a precision that cotune has chosen, both
    continue in float32. Raises the error if the configuration sets the precision, and LearnerLost if a learner was lost
    too often.
    """
    if isinstance(error, GapError) and run.fall_back is None:
        raise error
    await rollouts.cancel()
    report.restart()

    if isinstance(error, GapError):
        assert run.fall_back is not None
        report.progress.say(f"{error.cause} Continuing in float32 from the last checkpoint.")
        await run.fall_back(error.gap, "")
        await _restore_newest_checkpoint(run, report)
        cancelled = _cancel_answers_of_lost_versions(run)
        if cancelled:
            report.progress.say(
                f"{plural(cancelled, 'episode is', 'episodes are')} run again, as the weights that answered are lost"
            )
        return

    run.learner_restarts += 1
    if run.learner_restarts > LEARNER_RESTARTS:
        raise LearnerLost(
            f"{error.cause} It was restarted {LEARNER_RESTARTS} times before.",
            f"See the cause, then {run.folder.way_on}",
        ) from error
    report.progress.say(
        f"{error.cause} Restarting it from the last checkpoint ({run.learner_restarts} of {LEARNER_RESTARTS})."
    )
    await run.reopen_learner()
    await _restore_newest_checkpoint(run, report)


async def _restore_newest_checkpoint(run: RolloutRun, report: StepReport) -> None:
    """Go back to the newest checkpoint of a run in progress."""
    saved = load_checkpoint(run.folder.checkpoints)
    assert saved is not None  # A run in progress has a checkpoint from its first step on.
    for note in await restore(run, *saved):
        report.progress.say(note)


def _cancel_answers_of_lost_versions(run: RolloutRun) -> int:
    """Cancel the episodes that were answered by policy versions newer than the checkpoint. Returns their number.

    Call this when training continues in another precision: the next versions then have the same numbers as the lost
    ones, but other weights. In the same precision the weights would be the same, and the episodes are used again.
    """
    versions = run.state.versions
    cancelled = []
    for episode in run.store.episodes(EpisodeFilters(phase="train")):
        if episode.status == "cancelled" or (episode.training_step or 0) < run.state.steps:
            continue
        calls = run.store.calls(episode.id, lean=True)
        if any(call.policy and call.policy.version > versions.get(call.policy.name, 0) for call in calls):
            cancelled.append(msgspec.structs.replace(episode, status="cancelled", error=LOST_WEIGHTS_ERROR))
    run.store.write(cancelled)
    run.store.flush()
    return len(cancelled)


async def add_new_roles(run: RolloutRun, report: StepReport) -> None:
    """Give policies to the roles that have appeared in the last step: adapters or models at version 0, or the shared
    policy as it is.

    The learner is opened again for them and continues from the checkpoint that `commit` has just written. Raises
    RunError if the run's engines have no room for them.
    """
    if not run.state.new_roles:
        return
    state = run.state
    roles = state.new_roles
    policies_before = state.policies
    state.policies = run.with_policies_for(policies_before, roles)
    state.new_roles = ()
    new_policies = [name for name in state.policies.specs if name not in policies_before.specs]
    with report.phase("new_roles"):
        if new_policies:
            saved = load_checkpoint(run.folder.checkpoints)
            assert saved is not None  # `commit` has just written it.
            _checkpoint, folder = saved
            await run.reopen_learner()
            await asyncio.to_thread(run.learner.load, folder, new_policies)
            if run.config.init:
                for note in await begin_from(run, run.config.init, new_policies):
                    report.progress.say(note)
    for role in roles:
        policy = state.policies.roles.get(role)
        if policy is None:
            continue  # The role stays without a policy, for example because it has no scorer under plan tree.
        player = f"the policy {policy}"
        if policy in new_policies:
            kind = state.policies.specs[policy].kind
            version = state.versions.get(policy, 0)
            player = f"a policy of its own ({kind}, version {version})"
        report.progress.say(
            f"role {role!r}, first seen in step {state.steps}: {player} plays it from step {state.steps + 1} on"
        )
