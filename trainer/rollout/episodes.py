"""Episodes of a run: answered by the policies that it serves now, or found on record."""

from __future__ import annotations

from collections.abc import Container, Mapping

import msgspec

from cotune.episodes.rollout import EpisodeBatch
from cotune.errors import RecordError
from cotune.records.plans import Plan
from cotune.records.policies import stand_in
from cotune.records.structs import Episode, PolicyRef
from cotune.sampling.protocol import SamplingParams, at_temperature
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.trainer.batch import ended_well, learns_from_outcomes
from cotune.trainer.run.episode_runner import ResponderConfig
from cotune.trainer.run.run import RolloutRun


async def run_episodes(
    run: RolloutRun,
    batch: EpisodeBatch,
    *,
    plan: Plan | None,
    stream: str = "",
    policies: Mapping[str, PolicyRef] | None = None,
) -> list[Episode]:
    """Run a batch under the run's own sampling, concurrency and limits.

    Without a plan every call is one sample. `policies` answer by role; without them those that are served now. `stream`
    names the random numbers, where they are not to be the phase's.
    """
    responder = answering(run, plan, run.served() if policies is None else policies, stream)
    batch = msgspec.structs.replace(
        batch, concurrency=run.config.episodes_at_once, timeout=run.config.episode_timeout, max_calls=run.max_calls
    )
    return await run.runner.run(batch, responder)


def answering(
    run: RolloutRun, plan: Plan | None, policies: Mapping[str, PolicyRef], stream: str = ""
) -> ResponderConfig:
    """How `policies` answer calls under the run's own sampling; the rest as for `run_episodes`."""
    config = run.config
    return ResponderConfig(
        policies=dict(policies),
        plan=plan,
        attribution=run.recipes.run.attribution,
        own=run.recipes.attributions({role: one.name for role, one in policies.items()}),
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.request_timeout),
        override=at_temperature(config.sampling.temperature),
        provider_roles=tuple(run.provider_roles),
        others=stand_in(config.other_roles),
        seed=config.seed,
        stream=stream,
    )


def finished_episodes(run: RolloutRun, step: int, tasks: Container[str]) -> tuple[list[Episode], int]:
    """Recorded episodes of `tasks` in a step that came to an outcome, one for each rollout, and how many lack records
    or rewards: those that a scorer could not give, and the outcomes where nobody knows any of the step.

    Those are marked as cancelled, so that nothing takes them for whole.
    """
    done: dict[tuple[str, int], Episode] = {}
    cut = []
    for episode in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
        if not episode.is_outcome or episode.task.id not in tasks:
            continue
        if _is_complete(run.store, episode):
            done[episode.task.id, episode.rollout] = episode
        else:
            cut.append(episode)
    judged = run.workflow.episode_judge is not None  # which is still to be asked
    well = ended_well(done.values())
    if learns_from_outcomes(run) and not judged and not any(run.store.rewards(e.id for e in well).values()):
        cut += well
        done = {place: episode for place, episode in done.items() if episode.status != "ok"}
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
