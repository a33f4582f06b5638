"""Running the episodes of a run, and finding the ones that were finished before an interruption."""

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
    """Run a batch with the sampling, concurrency and limits of the run.

    Without a plan every call gets one sample. `policies` has the policy version of each role; by default these are the
    present ones. `stream` names the random numbers; by default they follow from the phase.
    """
    responder = answering(run, plan, run.served() if policies is None else policies, stream)
    limited = msgspec.structs.replace(
        batch, concurrency=run.config.episodes_at_once, timeout=run.config.episode_timeout, max_calls=run.max_calls
    )
    return await run.runner.run(limited, responder)


def answering(
    run: RolloutRun, plan: Plan | None, policies: Mapping[str, PolicyRef], stream: str = ""
) -> ResponderConfig:
    """Return how `policies` answer calls with the sampling of the run; see `run_episodes` for the arguments."""
    config = run.config
    names = {role: policy.name for role, policy in policies.items()}
    # The policy whose sampling settings each role has: the policy that answers, if it has a [[policy]] table. In an
    # evaluation the untrained model answers, which has none. The role then keeps the settings of its trained policy, so
    # that the two can be compared.
    settings_policy = dict(run.state.policies.roles)
    for role, name in names.items():
        if config.policy_table(name):
            settings_policy[role] = name
    return ResponderConfig(
        policies=dict(policies),
        plan=plan,
        plans={} if plan is None else config.plans_of(plan, names),
        attribution=run.recipes.run.attribution,
        attribution_of_role=run.recipes.attributions(names),
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.request_timeout),
        override=at_temperature(config.sampling.temperature),
        # Only evaluations have no plan.
        sampling_of_role=config.own_sampling(settings_policy, evaluation=plan is None),
        provider_roles=tuple(run.provider_roles),
        others=stand_in(config.other_roles),
        seed=config.seed,
        stream=stream,
    )


def reuse_finished_episodes(run: RolloutRun, step: int, tasks: Container[str]) -> tuple[list[Episode], int]:
    """Find the recorded episodes of `tasks` in a step that have ended and are complete, one for each rollout.

    Episodes that lack records or rewards are marked as cancelled in the store, so that they are run again. Returns the
    complete episodes, and the number of the others.
    """
    done: dict[tuple[str, int], Episode] = {}  # by task and rollout
    incomplete: list[Episode] = []
    for episode in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
        if not episode.is_outcome or episode.task.id not in tasks:
            continue
        if _is_complete(run.store, episode):
            done[episode.task.id, episode.rollout] = episode
        else:
            incomplete.append(episode)

    # If no finished episode has an outcome, the outcomes were lost, unless a judge gives them later.
    has_judge = run.workflow.episode_judge is not None
    without_error = ended_well(done.values())
    if learns_from_outcomes(run) and not has_judge:
        outcomes = run.store.rewards(episode.id for episode in without_error)
        if not any(outcomes.values()):
            incomplete += without_error
            done = {key: episode for key, episode in done.items() if episode.status != "ok"}

    cancelled: list[Episode] = []
    for episode in incomplete:
        cancelled.append(msgspec.structs.replace(episode, status="cancelled", error="its records or rewards were lost"))
    run.store.write(cancelled)
    return list(done.values()), len(incomplete)


def _is_complete(store: Store, episode: Episode) -> bool:
    """Whether the store has all calls of an episode, with the prompts and rewards of the answered ones. Only then can
    the episode be reused after an interruption.
    """
    calls = store.calls(episode.id)
    if any(call.status == "ok" and call.error for call in calls):
        return False
    try:
        for prompt in {call.prompt for call in calls if call.prompt is not None}:
            store.token_ids(prompt)
    except RecordError:
        return False  # a part of a prompt is missing
    return len(calls) == episode.calls
