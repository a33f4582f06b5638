"""Finds the call that lost a failed episode, by running the episode again from its calls on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cotune.errors import ConfigError, RecordError
from cotune.intervals import Interval
from cotune.reading.blame import FORK, FRESH_FORK, CallEffect, LostEpisode
from cotune.records.structs import CallRecord, Episode
from cotune.replay.forks import can_repeat_before, parallel_blocks
from cotune.replay.script import Script, read_script
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import answer_line
from cotune.trainer.blame.arms import OWN
from cotune.trainer.blame.decisive import CONFIDENCE, FRESH, ForkSearch, fresh_forks, loss_interval
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
        return sorted(failed, key=lambda episode: (_outcome(runs, episode, span), episode.task.id))[:MOST_EPISODES], 0
    if chosen != FAILED:
        episode = runs.store.episode(runs.store.figures().episode_named(chosen))
        if is_cut_off(runs.store, episode):
            fault = "did not run to its end, because of a limit or an interruption"
            raise ConfigError("episodes", chosen, fault, "Pass: failed. Runs that were cut off are made again.")
        if episode.phase != OWN.phase or not has_failed(episode, runs.outcome_of(episode), span):
            fault = "is not a failed run of the application as it is"
            raise ConfigError("episodes", chosen, fault, "See them with: cotune show FOLDER. Or pass: failed")
        return [episode], 0

    worst: dict[str, Episode] = {}
    cut_off = 0
    for episode in runs.store.episodes(EpisodeFilters(phase=OWN.phase)):
        if is_cut_off(runs.store, episode):
            cut_off += 1
        elif has_failed(episode, runs.outcome_of(episode), span):
            worst.setdefault(episode.task.id, episode)
    ranked = sorted(worst.values(), key=lambda episode: _outcome(runs, episode, span))
    return ranked[:MOST_EPISODES], cut_off


def _outcome(runs: Runs, episode: Episode, span: Span) -> float:
    """The outcome of an episode, from 0 to 1; 0 where the application raised."""
    outcome = runs.outcome_of(episode)
    return 0.0 if outcome is None else span.share(outcome)


async def find_decisive_call(runs: Runs, episode: Episode) -> LostEpisode:
    """Fork an episode until a call is decisive, or none is, or the budget of `runs` whole runs is spent.

    Calls that ran at the same time are one place: no order of them is right, so a fork draws all of them again. Forks
    of an earlier command count. Raises BudgetReachedError where the limits of the analysis do not allow more.
    """
    calls = runs.store.calls(episode.id)
    blocks = parallel_blocks(calls)
    lost = LostEpisode(episode=episode.id, task=episode.task.id, calls=len(calls), call=None, why=NOT_REPEATABLE)
    forkable = [place for place, block in enumerate(blocks) if can_repeat_before(calls, block[0])]
    if not forkable:
        return lost
    try:
        script = read_script(runs.store, episode.id)
    except RecordError:
        return lost
    forking = Forking(runs, episode, script, blocks, runs.span())
    recorded = _outcome(runs, episode, forking.span)
    # Not by the id of the episode, which is new each time: the same records are searched in the same way anywhere.
    seed = f"{episode.task.id} {runs.options.seed}"
    search = ForkSearch(len(blocks), runs.options.runs * len(blocks), forkable, seed, recorded)
    for place, block in enumerate(blocks):
        for fork in forking.forks_at(block):
            value = forking.value(fork)
            if fork.phase == FORK and value is not None:
                search.add(place, value)
            else:
                # Fresh forks say nothing to the search. A fork that failed in an earlier command may succeed now.
                search.add_cost(place)

    # 1. Look for the call.
    while places := search.next_forks():
        made = await forking.fork([blocks[place] for place in places], FORK)
        for place, finished in zip(places, made, strict=True):
            value = None if finished is None else forking.value(finished)
            search.add(place, value, diverged=finished is None)
    decision = search.decision
    count = sum(search.counts.forks)
    lost = msgspec.structs.replace(lost, effects=forking.effects(recorded))
    if decision.probability < CONFIDENCE:
        likely = None if decision.call is None else blocks[decision.call]
        return msgspec.structs.replace(lost, why=_why_undecided(count, likely), forks=count)
    if decision.call is None:
        return msgspec.structs.replace(lost, why="no single call decides", forks=count)

    # 2. Measure its loss by fresh forks: those that chose it overstate it.
    block = blocks[decision.call]
    number = min(forking.fresh_made(decision.call) + fresh_forks(search, decision.call), FRESH)
    before = await forking.fresh(block, number)
    after: list[float] | None = None
    if decision.call + 1 < len(blocks):
        following = blocks[decision.call + 1]
        after = await forking.fresh(following, number) if can_repeat_before(calls, following[0]) else []
    loss = loss_interval(before, after, recorded)
    steps = [call.step for call in block]
    effects = [one for one in forking.effects(recorded) if one.step not in steps]
    if loss is not None:
        # The forks that chose the call overstate its loss, so only the fresh ones give it.
        effects += _effects_of(block, loss, len(before) + len(after or ()))
    call, best = block[0], forking.best_fork(block)
    return msgspec.structs.replace(
        lost,
        call=call.step,
        parallel=tuple(steps[1:]),
        why="",
        role=_roles(block),
        loss=loss,
        answer="" if call.chosen is None else answer_line(call.candidates[call.chosen]),
        redraw="" if best is None else best.answer,
        redraw_call="" if best is None else best.at,
        forks=count + len(before) + len(after or ()),
        effects=sorted(effects, key=lambda one: one.step),
    )


Block = Sequence[CallRecord]
"""Calls of an episode that ran at the same time; usually one."""


def _why_undecided(forks: int, likely: Block | None) -> str:
    """Why no decisive call is claimed after so many forks. `likely` is the block that is most likely to be decisive;
    None if it is most likely that no single call decides."""
    if not forks:
        return "no fork came to an outcome"
    perhaps = "no single call decides" if likely is None else _block_name(likely)
    subject = "1 fork does" if forks == 1 else f"{forks} forks do"
    return f"{subject} not tell, perhaps {perhaps}"


@dataclass
class Forking:
    """Forks of one episode: those that were made, and new ones."""

    runs: Runs
    episode: Episode
    script: Script
    blocks: Sequence[Block]
    span: Span

    def value(self, fork: FinishedFork) -> float | None:
        """The outcome of a fork, from 0 to 1; None where it is not known."""
        if fork.failed:
            return 0.0
        return None if fork.outcome is None else self.span.share(fork.outcome)

    def forks_at(self, block: Block) -> list[FinishedFork]:
        """The forks of the episode at a block."""
        return [fork for fork in self.runs.forks if (fork.trunk, fork.call) == (self.episode.id, block[0].id)]

    async def fork(self, blocks: Sequence[Block], phase: str) -> list[FinishedFork | None]:
        """Run one fork at each of `blocks`, at the same time. A block may be named several times, for as many forks.
        None stands for a fork that did not repeat the episode."""
        work = []
        for block in blocks:
            parallel = tuple(call.id for call in block[1:])
            work.append(self.runs.fork(self.script, block[0].id, self.episode.task, phase, parallel))
        results = await asyncio.gather(*work, return_exceptions=True)
        # Forks under way end before the limit of one of them ends the analysis.
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def fresh(self, block: Block, number: int) -> list[float]:
        """The outcomes of this number of fresh forks at a block. Forks of an earlier command are not made again."""

        missing = number - len(self.fresh_values(block))
        if missing > 0:
            await self.fork([block] * missing, FRESH_FORK)
        return self.fresh_values(block)

    def fresh_values(self, block: Block) -> list[float]:
        """The outcomes of the fresh forks that were made at a block."""
        known = [self.value(fork) for fork in self.forks_at(block) if fork.phase == FRESH_FORK]
        return [value for value in known if value is not None]

    def fresh_made(self, place: int) -> int:
        """How many fresh forks were made both at a block and at the next one. Nothing is forked after the last one."""
        blocks = self.blocks[place : place + 2]
        return min(len(self.fresh_values(block)) for block in blocks)

    def effects(self, recorded: float) -> list[CallEffect]:
        """The effect of each call with forks at its block and at the next one; after the last block stands the recorded
        outcome."""
        outcomes: list[list[float]] = []
        for block in self.blocks:
            known = [self.value(fork) for fork in self.forks_at(block)]
            outcomes.append([value for value in known if value is not None])
        effects = []
        for place, block in enumerate(self.blocks):
            before = outcomes[place]
            after = outcomes[place + 1] if place + 1 < len(self.blocks) else None
            loss = loss_interval(before, after, recorded)
            if loss is not None:
                effects += _effects_of(block, loss, len(before) + len(after or ()))
        return effects

    def best_fork(self, block: Block) -> FinishedFork | None:
        """The fork at the block with the best outcome."""
        known = [fork for fork in self.forks_at(block) if fork.outcome is not None]
        return max(known, key=lambda fork: fork.outcome or 0.0, default=None)


def _roles(block: Block) -> str:
    """The roles of a block, separated by commas."""
    return ", ".join(dict.fromkeys(call.role for call in block))


def _block_name(block: Block) -> str:
    """The steps and roles of a block, for people: `call 2 writer`, or `calls 2, 3 writer, checker (parallel)`."""
    if len(block) == 1:
        return f"call {block[0].step} {block[0].role}"
    return f"calls {', '.join(str(call.step) for call in block)} {_roles(block)} (parallel)"


def _effects_of(block: Block, loss: Interval, forks: int) -> list[CallEffect]:
    """The same effect for each call of a block."""
    return [CallEffect(step=call.step, loss=loss, forks=forks, parallel=len(block)) for call in block]
