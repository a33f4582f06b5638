"""Going on from a checkpoint: when a run is resumed, when a learner was lost, and when roles were first seen."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection
from pathlib import Path

import msgspec

from cotune.errors import LearnerLost
from cotune.recording.records import PolicyRef
from cotune.trainer.best import find_best
from cotune.trainer.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.reporting.step_report import StepReport
from cotune.trainer.rollout.episodes import RolloutPipeline
from cotune.trainer.run import Run
from cotune.trainer.updates import publish_version
from cotune.trainer.warm_start import warm_start


async def restore(run: Run, checkpoint: Checkpoint, path: Path) -> list[str]:
    """Go back to a checkpoint: weights and optimizers, versions at the sampler, and what counts as consumed. Policies
    that are younger than it are as they began. Returns what the user should know."""
    policies = run.state.policies
    new = [name for name, spec in policies.specs.items() if spec.trained and name not in checkpoint.policies.specs]
    await asyncio.to_thread(run.learner.load, path, new)
    for served in (await run.sampler.info()).served:  # a publish that broke off may or may not have arrived
        name, _, version = served.rpartition("@")
        await run.sampler.retire(PolicyRef(name, int(version)))
    run.published.clear()
    mark_consumed(run, checkpoint)
    consumed = run.store.consumed().items()
    run.consumed = {group for group, step in consumed if step < checkpoint.steps} | checkpoint.ledger.keys()
    run.state = msgspec.structs.replace(checkpoint, policies=policies, ledger={}, members={}, new_roles=())
    run.committed = checkpoint.steps
    run.folder.truncate_metrics(checkpoint.steps)
    notes = find_best(run)
    for policy, number in checkpoint.versions.items():
        await publish_version(run, policy, number)
    return notes


async def begin_from(run: Run, source: str, names: Collection[str] | None = None) -> list[str]:
    """Start policies (all, or those in `names`) from those of another run or an export, as version 1.

    Returns what the user should know. Raises ConfigError.
    """
    begun, notes = await warm_start(source, run.config.model, run.state.policies, run.learner, names)
    for name in begun:
        await publish_version(run, name, 1)
    return notes


def mark_consumed(run: Run, checkpoint: Checkpoint) -> None:
    """Mark the groups of a checkpoint's ledger as trained: later rewards for them are refused, and counted."""
    for step in sorted(set(checkpoint.ledger.values())):
        groups = [group for group, at in checkpoint.ledger.items() if at == step]
        run.store.consume({group: checkpoint.members.get(group, ()) for group in groups}, step)


@contextlib.asynccontextmanager
async def recovery(run: Run, rollouts: RolloutPipeline, report: StepReport) -> AsyncIterator[None]:
    """Where a learner is lost within, open it again and go back to the last checkpoint. Raises LearnerLost when that
    has happened too often, or there is no checkpoint yet."""
    try:
        yield
    except LearnerLost as error:
        await rollouts.cancel()
        report.restart()
        run.learner_restarts += 1
        limit = run.config.cluster.learner_restarts
        if run.learner_restarts > limit:
            raise LearnerLost(
                f"{error.cause} It was the {run.learner_restarts}th time; cluster.learner_restarts is {limit}.",
                f"See the cause, then go on with: cotune train --resume {run.folder.path}",
            ) from error
        report.progress.say(
            f"{error.cause} Restarting it from the last checkpoint ({run.learner_restarts} of {limit})."
        )
        saved = load_checkpoint(run.folder.checkpoints)
        if saved is None:
            raise
        await run.reopen_learner()
        for note in await restore(run, *saved):
            report.progress.say(note)


async def add_new_roles(run: Run, report: StepReport) -> None:
    """Give roles that the last step has first seen their policies: adapters or models at version 0, or the shared one
    as it is.

    The learner is opened again for them and goes on from the checkpoint that `commit` has just written. Raises RunError
    where the run's engines have no room for them.
    """
    if not run.state.new_roles:
        return
    state, roles, before = run.state, run.state.new_roles, run.state.policies
    state.new_roles, state.policies = (), run.joined(before, roles)
    new = [name for name in state.policies.specs if name not in before.specs]
    with report.phase("new_roles"):
        if new:
            saved = load_checkpoint(run.folder.checkpoints)
            assert saved is not None
            await run.reopen_learner()
            await asyncio.to_thread(run.learner.load, saved[1], new)
            if run.config.init:
                for note in await begin_from(run, run.config.init, new):
                    report.progress.say(note)
    for role in roles:
        if (name := state.policies.roles.get(role)) is not None:
            kind, version = state.policies.specs[name].kind, state.versions.get(name, 0)
            own = f"a policy of its own ({kind}, version {version})" if name in new else f"the policy {name}"
            said = f"role {role!r}, first seen in step {state.steps}: {own} plays it from step {state.steps + 1} on"
            report.progress.say(said)
