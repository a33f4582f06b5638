"""Finds the call that lost a failed episode, by running the episode again from its calls on."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import msgspec
import numpy as np

from cotune.errors import ConfigError, RecordError
from cotune.reading.blame import FORK, FRESH_FORK, CallEffect, LostEpisode
from cotune.records.structs import CallRecord, Episode
from cotune.replay.forks import repeatable
from cotune.replay.script import Script, read_script
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import answer_line
from cotune.trainer.blame.arms import OWN
from cotune.trainer.blame.decisive import CONFIDENCE, FRESH, ForkSearch, loss_interval
from cotune.trainer.blame.estimates import Span
from cotune.trainer.blame.options import FAILED
from cotune.trainer.blame.runs import FinishedFork, Runs
from cotune.trainer.blame.tasks import has_failed, is_cut_off

MOST_EPISODES = 5
"""Failed episodes that are looked at, the worst first."""
NOT_REPEATABLE = "no call can be repeated: a call failed, or a redactor changed its record"


def choose_episodes(runs: Runs, chosen: str) -> tuple[list[Episode], int]:
    """The failed episodes that `chosen` names: `failed`, recorded ones, or an id. With `failed`, also the number of
    failed runs that are left out because they were cut off. Raises ConfigError for an episode that did not fail."""
    span = runs.span()
    if runs.recorded:
        failed = [runs.store.episode(id) for id in runs.recorded]
        return sorted(failed, key=lambda episode: (_outcome(runs, episode, span), episode.id))[:MOST_EPISODES], 0
    if chosen != FAILED:
        episode = runs.store.episode(runs.store.figures().episode_named(chosen))
        if is_cut_off(runs.store, episode):
            fault = "did not run to its end, because of a limit or an interruption"
            raise ConfigError("episodes", chosen, fault, "Pass: failed. Runs that were cut off are made again.")
        if episode.phase != OWN.phase or not has_failed(runs.store, episode, span):
            fault = "is not a failed run of the application as it is"
            raise ConfigError("episodes", chosen, fault, "See them with: cotune show FOLDER. Or pass: failed")
        return [episode], 0

    worst: dict[str, Episode] = {}
    cut_off = 0
    for episode in runs.store.episodes(EpisodeFilters(phase=OWN.phase)):
        if is_cut_off(runs.store, episode):
            cut_off += 1
        elif has_failed(runs.store, episode, span):
            worst.setdefault(episode.task.id, episode)
    ranked = sorted(worst.values(), key=lambda episode: _outcome(runs, episode, span))
    return ranked[:MOST_EPISODES], cut_off


def _outcome(runs: Runs, episode: Episode, span: Span) -> float:
    """The outcome of an episode, from 0 to 1; 0 where the application raised."""
    outcome = runs.outcome_of(episode)
    return 0.0 if outcome is None else span.share(outcome)


async def find_decisive_call(runs: Runs, episode: Episode) -> LostEpisode:
    """Fork an episode until a call is decisive, or none is, or the budget of `runs` whole runs is spent.

    Forks of an earlier command count. Raises BudgetReachedError where the limits of the analysis do not allow more.
    """
    calls = runs.store.calls(episode.id)
    lost = LostEpisode(episode=episode.id, task=episode.task.id, calls=len(calls), call=None, why=NOT_REPEATABLE)
    forkable = [place for place, call in enumerate(calls) if repeatable(calls, call)]
    if not forkable:
        return lost
    try:
        script = read_script(runs.store, episode.id)
    except RecordError:
        return lost
    span = runs.span()
    recorded = _outcome(runs, episode, span)
    # A text as the seed: the same episode is searched in the same way.
    rng = np.random.default_rng(random.Random(f"{episode.id} {runs.options.seed}").getrandbits(32))
    search = ForkSearch(len(calls), runs.options.runs * len(calls), forkable, rng, recorded)
    places = {call.id: place for place, call in enumerate(calls)}
    for fork in runs.forks:
        if fork.trunk == episode.id and fork.phase == FORK:
            search.add(places[fork.call], _value(fork, span))

    # 1. Look for the call.
    while forks := search.next_forks():
        made = await _fork(runs, script, episode, [calls[place].id for place in forks], FORK)
        for place, finished in zip(forks, made, strict=True):
            search.add(place, None if finished is None else _value(finished, span))
    decision = search.decision
    count = sum(search.counts.forks)
    lost = msgspec.structs.replace(lost, effects=_effects(runs, episode, calls, span, recorded))
    if decision.probability < CONFIDENCE:
        why = f"{count} forks do not tell" if count else "no fork came to an outcome"
        return msgspec.structs.replace(lost, why=why, forks=count)
    if decision.call is None:
        return msgspec.structs.replace(lost, why="no single call decides", forks=count)

    # 2. Measure its loss by fresh forks: those that chose it overstate it.
    call = calls[decision.call]
    before = await _fresh(runs, script, episode, call, span)
    after: list[float] | None = None
    if decision.call + 1 < len(calls):
        following = calls[decision.call + 1]
        after = await _fresh(runs, script, episode, following, span) if repeatable(calls, following) else []
    best = _best_fork(runs, episode, call)
    loss = loss_interval(before, after, recorded)
    effects = [one for one in _effects(runs, episode, calls, span, recorded) if one.step != call.step]
    if loss is not None:
        # The forks that chose the call overstate its loss, so only the fresh ones give it.
        effects.append(CallEffect(step=call.step, loss=loss, forks=len(before) + len(after or ())))
    return msgspec.structs.replace(
        lost,
        call=call.step,
        why="",
        role=call.role,
        loss=loss,
        answer="" if call.chosen is None else answer_line(call.candidates[call.chosen]),
        redraw="" if best is None else best.answer,
        redraw_call="" if best is None else best.at,
        forks=count + len(before) + len(after or ()),
        effects=sorted(effects, key=lambda one: one.step),
    )


def _effects(
    runs: Runs, episode: Episode, calls: Sequence[CallRecord], span: Span, recorded: float
) -> list[CallEffect]:
    """The effect of each call with forks at it and at the next one; after the last call stands the recorded outcome."""
    outcomes: dict[str, list[float]] = {call.id: [] for call in calls}
    for fork in runs.forks:
        value = _value(fork, span)
        if fork.trunk == episode.id and value is not None:
            outcomes[fork.call].append(value)
    effects = []
    for place, call in enumerate(calls):
        before = outcomes[call.id]
        after = outcomes[calls[place + 1].id] if place + 1 < len(calls) else None
        loss = loss_interval(before, after, recorded)
        if loss is not None:
            effects.append(CallEffect(step=call.step, loss=loss, forks=len(before) + len(after or ())))
    return effects


async def _fork(
    runs: Runs, script: Script, episode: Episode, calls: Sequence[str], phase: str
) -> list[FinishedFork | None]:
    """Run one fork at each of `calls`, at the same time. `calls` may name a call several times, for as many forks. None
    stands for a fork that did not repeat the episode."""
    results = await asyncio.gather(
        *(runs.fork(script, call, episode.task, phase) for call in calls), return_exceptions=True
    )
    # Forks under way end before the limit of one of them ends the analysis.
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _fresh(runs: Runs, script: Script, episode: Episode, call: CallRecord, span: Span) -> list[float]:
    """The outcomes of the fresh forks at a call, those of an earlier command among them."""

    def values() -> list[float]:
        at_call = [f for f in runs.forks if (f.trunk, f.call, f.phase) == (episode.id, call.id, FRESH_FORK)]
        known = [_value(fork, span) for fork in at_call]
        return [value for value in known if value is not None]

    missing = FRESH - len(values())
    if missing > 0:
        await _fork(runs, script, episode, [call.id] * missing, FRESH_FORK)
    return values()


def _value(fork: FinishedFork, span: Span) -> float | None:
    """The outcome of a fork, from 0 to 1; None where it is not known."""
    if fork.failed:
        return 0.0
    return None if fork.outcome is None else span.share(fork.outcome)


def _best_fork(runs: Runs, episode: Episode, call: CallRecord) -> FinishedFork | None:
    """The fork at the call with the best outcome."""
    at_call = [f for f in runs.forks if (f.trunk, f.call) == (episode.id, call.id) and f.outcome is not None]
    return max(at_call, key=lambda fork: fork.outcome or 0.0, default=None)
