"""Episodes of a run: answered by the policies that it serves now, or found on record."""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from cotune.algorithms.collect import is_outcome
from cotune.errors import RecordError
from cotune.policies import stand_in
from cotune.recording.records import Episode, PolicyRef
from cotune.recording.rollout import EpisodeBatch
from cotune.sampling.plans import Plan
from cotune.sampling.protocol import UNSHAPED, SamplingParams
from cotune.storage.protocol import Store
from cotune.trainer.rollout.protocol import ResponderConfig
from cotune.trainer.run import Run


async def run_episodes(
    run: Run,
    batch: EpisodeBatch,
    *,
    plan: Plan | None,
    stream: str = "",
    policies: Mapping[str, PolicyRef] | None = None,
) -> list[Episode]:
    """Run a batch under the run's own sampling, concurrency and time-out.

    Without a plan every call is one sample. `policies` answer by role; without them those that are served now. `stream`
    names the random numbers, where they are not to be the phase's.
    """
    config = run.config
    responder = ResponderConfig(
        policies=dict(run.served() if policies is None else policies),
        plan=plan,
        attribution=run.recipe.attribution,
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.sampling.timeout),
        override={"temperature": config.sampling.temperature, **UNSHAPED},
        provider_roles=tuple(run.provider_roles),
        others=stand_in(config.other_roles),
        seed=config.seed,
        stream=stream,
    )
    batch = msgspec.structs.replace(batch, concurrency=config.concurrency, timeout=config.episode_timeout)
    return await run.runner.run(batch, responder)


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
