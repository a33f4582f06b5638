"""Committing a step: writing a checkpoint of the run when one is due."""

from __future__ import annotations

import asyncio

from cotune.errors import RunError
from cotune.storage.run_layout import read_run
from cotune.storage.whole_file import is_full
from cotune.trainer.guard import safe_checkpoint
from cotune.trainer.run.checkpoint import save_checkpoint
from cotune.trainer.run.run import Run


async def commit(run: Run, *, due: bool = False) -> None:
    """Write a checkpoint if one is due: every `checkpoint_every` steps, after the last step, and before new roles get
    their policies. With `due` it is written in any case. Nothing is written if the newest checkpoint has all steps.

    Raises RunError if the checkpoint cannot be written.
    """
    state = run.state
    config = run.config
    if state.steps == run.committed:
        return
    at_interval = state.steps % config.checkpoint_every == 0
    is_last = state.steps == config.steps
    if not (due or at_interval or is_last or state.new_roles):
        return

    described = read_run(run.folder.path)
    state.run = described.id
    state.prompts = described.prompts
    # Keep the checkpoint that the guard would name after a collapse.
    safe = safe_checkpoint(run, pending=state.steps)
    best = run.best if config.evaluation.keep_best else None
    try:
        await asyncio.to_thread(
            save_checkpoint,
            run.folder.checkpoints,
            state,
            run.learner,
            spare={safe} if safe else set(),
            best=best,
        )
    except OSError as error:
        first = "Free some space" if is_full(error) else "Fix this"
        cause = f"The checkpoint after {state.steps} steps cannot be written: {error}."
        raise RunError(cause, f"{first}, then {run.folder.way_on}") from error
    run.committed = state.steps
