"""Recorded episodes of a step that was interrupted: whole ones are used, what lacks records or rewards runs again."""

from __future__ import annotations

from collections.abc import Container

import msgspec

from cotune.algorithms.collect import is_outcome
from cotune.errors import RecordError
from cotune.recording.records import Episode
from cotune.storage.protocol import Store
from cotune.trainer.run import Run


def finished_episodes(run: Run, step: int, tasks: Container[str]) -> tuple[list[Episode], int]:
    """Recorded episodes of `tasks` in a step that came to an outcome, one for each rollout, and how many lack records
    or rewards that a scorer could not give.

    Those are marked as cancelled, so that nothing takes them for whole.
    """
    done: dict[tuple[str, int], Episode] = {}
    cut = []
    for episode in run.store.episodes(phase="train", training_step=step):
        if not is_outcome(episode) or episode.task.id not in tasks:
            continue
        if _is_complete(run.store, episode):
            done[episode.task.id, episode.rollout] = episode
        else:
            cut.append(episode)
    run.store.write(
        [msgspec.structs.replace(e, status="cancelled", error="its records or rewards were lost") for e in cut]
    )
    return list(done.values()), len(cut)


def _is_complete(store: Store, episode: Episode) -> bool:
    """Whether all calls of an episode are on record, the prompts of those that were answered, and their rewards."""
    calls = store.calls(episode.id)
    if any(call.status == "ok" and call.error for call in calls):
        return False
    try:
        for prompt in {call.prompt for call in calls if call.prompt is not None}:
            store.token_ids(prompt)
    except RecordError:
        return False
    return len(calls) == episode.calls
