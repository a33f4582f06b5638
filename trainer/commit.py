"""Committing a step: a checkpoint of the run, written when one is due."""

from __future__ import annotations

import asyncio

from cotune.errors import RunError
from cotune.storage.run_layout import read_run
from cotune.storage.whole_file import is_full
from cotune.trainer.guard import safe_checkpoint
from cotune.trainer.run.checkpoint import save_checkpoint
from cotune.trainer.run.run import Run


async def commit(run: Run, *, due: bool = False) -> None:
    """Write a checkpoint if one is due: every `checkpoint_every` steps, after the last one, and before new roles get
    their policies. With `due` it is written in any case, unless the newest checkpoint already has all steps.

    Raises RunError if it cannot be written.
    """
    state = run.state
    config = run.config
    due = due or bool(state.new_roles) or state.steps % config.checkpoint_every == 0 or state.steps == config.steps
    if state.steps == run.committed or not due:
        return

    described = read_run(run.folder.path)
    state.run = described.id
    state.prompts = described.prompts
    # The guard's way back from a collapse starts from this checkpoint, so it is kept.
    safe = safe_checkpoint(run, state.steps)
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
