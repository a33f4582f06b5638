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
    """Choose the failed episodes whose decisive call is searched, the worst first, by the option `episodes`.

    If the analysis is of recorded episodes, these are chosen. Otherwise it is the episode with the id `chosen`, or, if
    `chosen` is "failed", the first failure of each task. Also returns how many failed runs were left out because a
    limit or an interruption cut them off. Raises ConfigError for an episode that did not fail.
    """
    span = runs.span()
    if runs.recorded:
        failed = [runs.store.episode(id) for id in runs.recorded]
        failed.sort(key=lambda episode: (_outcome(runs, episode, span), episode.task.id))
        return failed[:MOST_EPISODES], 0
    if chosen != FAILED:
        return [_failed_episode(runs, chosen, span)], 0

    first_failure_by_task: dict[str, Episode] = {}
    cut_off = 0
    for episode in runs.store.episodes(EpisodeFilters(phase=OWN.phase)):
        if is_cut_off(runs.store, episode):
            cut_off += 1
        elif has_failed(episode, runs.outcome_of(episode), span):
            first_failure_by_task.setdefault(episode.task.id, episode)
    ranked = sorted(first_failure_by_task.values(), key=lambda episode: _outcome(runs, episode, span))
    return ranked[:MOST_EPISODES], cut_off


def _failed_episode(runs: Runs, id: str, span: Span) -> Episode:
    """The episode with this id. Raises ConfigError if it is not a failed run of the application as it is."""
    episode = runs.store.episode(runs.store.figures().episode_named(id))
    if is_cut_off(runs.store, episode):
        fault = "did not run to its end, because of a limit or an interruption"
        raise ConfigError(
            "episodes", id, fault, "Pass `failed` in place of the id: runs that were cut off are made again."
        )
    if episode.phase != OWN.phase or not has_failed(episode, runs.outcome_of(episode), span):
        fault = "is not a failed run of the application as it is"
        raise ConfigError(
            "episodes", id, fault, "See them with: cotune show FOLDER. Or pass `failed` in place of the id."
        )
    return episode


def _outcome(runs: Runs, episode: Episode, span: Span) -> float:
    """The outcome of an episode, from 0 to 1; 0 if the application raised."""
    outcome = runs.outcome_of(episode)
    return 0.0 if outcome is None else span.share(outcome)


Block = Sequence[CallRecord]
"""Calls of an episode that ran at the same time; usually one."""


async def find_decisive_call(runs: Runs, episode: Episode) -> LostEpisode:
    """Fork an episode until a call is decisive, or none is, or the budget of `runs` whole runs is spent.

    Calls that ran at the same time are one block. No order of them is right, so a fork draws all of them again. Forks
    of an earlier command count. Raises BudgetReachedError if the limits of the analysis do not allow more forks.
    """
    calls = runs.store.calls(episode.id)
    blocks = parallel_blocks(calls)
    lost = LostEpisode(episode=episode.id, task=episode.task.id, calls=len(calls), call=None, why=NOT_REPEATABLE)
    forkable = [index for index, block in enumerate(blocks) if can_repeat_before(calls, block[0])]
    if not forkable:
        return lost
    try:
        script = read_script(runs.store, episode.id)
    except RecordError:
        return lost  # Records are missing, so no fork can repeat the episode.
    span = runs.span()
    forking = Forking(runs, episode, script, blocks, recorded=_outcome(runs, episode, span), span=span)
    # The seed has no id of the episode, which is new in each run: the same records are searched in the same way.
    seed = f"{episode.task.id} {runs.options.seed}"
    search = ForkSearch(len(blocks), runs.options.runs * len(blocks), forkable, seed, forking.recorded)
    forking.count_earlier_forks(search)

    # 1. Look for the call.
    while indices := search.next_forks():
        forks = await forking.fork([blocks[index] for index in indices], FORK)
        for index, fork in zip(indices, forks, strict=True):
            value = None if fork is None else forking.value(fork)
            search.add(index, value, diverged=fork is None)
    decision = search.decision
    search_forks = sum(search.counts.forks)
    lost = msgspec.structs.replace(lost, forks=search_forks, effects=forking.effects())
    if decision.probability < CONFIDENCE:
        likely = None if decision.call is None else blocks[decision.call]
        return msgspec.structs.replace(lost, why=_why_undecided(search_forks, likely))
    if decision.call is None:
        return msgspec.structs.replace(lost, why="no single call decides")

    # 2. Measure its loss by fresh forks, as the forks that chose the call overstate it.
    block = blocks[decision.call]
    fresh = min(forking.fresh_made(decision.call) + fresh_forks(search, decision.call), FRESH)
    before, after = await forking.fork_around(decision.call, fresh, calls)
    loss = loss_interval(before, after, forking.recorded)
    measured = len(before) + len(after or ())

    # 3. Describe the call, with the loss from the fresh forks in place of the one from the search.
    steps = [call.step for call in block]
    effects = [effect for effect in forking.effects() if effect.step not in steps]
    if loss is not None:
        effects += _effects_of(block, loss, measured)
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
        forks=search_forks + measured,
        effects=sorted(effects, key=lambda effect: effect.step),
    )


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
    """Makes forks of one episode, and reads the outcomes of all forks that were made of it."""

    runs: Runs
    episode: Episode
    script: Script
    blocks: Sequence[Block]
    recorded: float
    """The outcome of the episode itself, from 0 to 1."""
    span: Span

    def count_earlier_forks(self, search: ForkSearch) -> None:
        """Add the forks that an earlier command made to a search."""
        for index, block in enumerate(self.blocks):
            for fork in self.forks_at(block):
                value = self.value(fork)
                if fork.phase == FORK and value is not None:
                    search.add(index, value)
                else:
                    # The search does not use fresh forks. A fork without an outcome may have one at the next try.
                    search.add_cost(index)

    def value(self, fork: FinishedFork) -> float | None:
        """The outcome of a fork, from 0 to 1; None if it is not known."""
        if fork.failed:
            return 0.0
        return None if fork.outcome is None else self.span.share(fork.outcome)

    def forks_at(self, block: Block) -> list[FinishedFork]:
        """The forks of the episode at a block."""
        return [fork for fork in self.runs.forks if (fork.trunk, fork.call) == (self.episode.id, block[0].id)]

    async def fork(self, blocks: Sequence[Block], phase: str) -> list[FinishedFork | None]:
        """Run one fork at each of `blocks`, all at the same time; a block that is listed twice is forked twice.
        The result has None for a fork that did not repeat the episode."""
        forks = []
        for block in blocks:
            parallel = tuple(call.id for call in block[1:])
            forks.append(self.runs.fork(self.script, block[0].id, self.episode.task, phase, parallel))
        # Errors are returned first and raised below, so that all forks have ended when a limit ends the analysis.
        results = await asyncio.gather(*forks, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def fork_fresh(self, block: Block, forks: int) -> list[float]:
        """Make fresh forks at a block until it has `forks` of them, and return their outcomes. Fresh forks that an
        earlier command made count."""
        missing = forks - len(self.fresh_values(block))
        if missing > 0:
            await self.fork([block] * missing, FRESH_FORK)
        return self.fresh_values(block)

    async def fork_around(
        self, index: int, forks: int, calls: Sequence[CallRecord]
    ) -> tuple[list[float], list[float] | None]:
        """Make fresh forks before and after a block, until there are `forks` of each.

        `index` is the block's place in the episode, whose calls are `calls`. Returns the outcomes of the forks before
        and after the block. The second list is None for the last block of the episode, and empty if the next block
        cannot be repeated.
        """
        before = await self.fork_fresh(self.blocks[index], forks)
        if index + 1 == len(self.blocks):
            return before, None
        next_block = self.blocks[index + 1]
        if not can_repeat_before(calls, next_block[0]):
            return before, []
        return before, await self.fork_fresh(next_block, forks)

    def fresh_values(self, block: Block) -> list[float]:
        """The outcomes of the fresh forks that were made at a block."""
        values = [self.value(fork) for fork in self.forks_at(block) if fork.phase == FRESH_FORK]
        return [value for value in values if value is not None]

    def fresh_made(self, index: int) -> int:
        """The number of fresh forks that both the block at `index` and the next block have. There is no fork after the
        last block, so only its own forks count."""
        block_and_next = self.blocks[index : index + 2]
        return min(len(self.fresh_values(block)) for block in block_and_next)

    def effects(self) -> list[CallEffect]:
        """The effect of each call with forks at its block and at the next one. After the last block, the recorded
        outcome stands in for forks."""
        outcomes: list[list[float]] = []
        for block in self.blocks:
            values = [self.value(fork) for fork in self.forks_at(block)]
            outcomes.append([value for value in values if value is not None])
        effects = []
        for index, block in enumerate(self.blocks):
            before = outcomes[index]
            after = outcomes[index + 1] if index + 1 < len(self.blocks) else None
            loss = loss_interval(before, after, self.recorded)
            if loss is not None:
                effects += _effects_of(block, loss, len(before) + len(after or ()))
        return effects

    def best_fork(self, block: Block) -> FinishedFork | None:
        """The fork at the block with the best outcome."""
        with_outcome = [fork for fork in self.forks_at(block) if fork.outcome is not None]
        return max(with_outcome, key=lambda fork: fork.outcome or 0.0, default=None)


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
