"""Roles that a run first sees while it goes on: they get their policies, as configured, before the next step."""

from __future__ import annotations

import asyncio

from cotune.trainer.checkpoint import load_checkpoint
from cotune.trainer.progress import Progress
from cotune.trainer.run import Run


async def take_in(run: Run, progress: Progress) -> None:
    """Give the run's newcomers their policies: adapters or models at version 0, or the shared one as it is.

    The learner is opened again for them and goes on from the last checkpoint, which must have just been written.
    Raises RunError where the run's engines have no room for them.
    """
    roles, run.newcomers = run.newcomers, ()
    before, run.policies = run.policies, run.joined(run.policies, roles)
    new = [name for name in run.policies.specs if name not in before.specs]
    if new:
        saved = load_checkpoint(run.folder.checkpoints)
        assert saved is not None
        await run.reopen_learner()
        await asyncio.to_thread(run.learner.load, saved[1], new)
    for role in roles:
        if (name := run.policies.roles.get(role)) is not None:
            kind = run.policies.specs[name].kind
            own = f"a policy of its own ({kind}, version 0)" if name in new else f"the policy {name}"
            progress.say(f"role {role!r}, first seen in step {run.step}: {own} plays it from step {run.step + 1} on")
