"""The page of an analysis of `cotune blame`, and the effects of calls that an episode's timeline shows."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer, hues
from cotune.reading.blame import (
    DECISIVE,
    FORK,
    FRESH_FORK,
    LEAST_TASKS,
    CallEffect,
    LostEpisode,
    loss_points,
    luck_sentence,
    noise_points,
    scoring_sentence,
    shown_money,
    shown_outcome,
    shown_points,
    shown_seconds,
    summed_outcome,
)
from cotune.reading.run import OpenedRun
from cotune.records.structs import Episode, Fork
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import answer_line, plural

EFFECTS = ((0.3, "v0"), (0.1, "v1"), (-0.1, "v2"), (-0.3, "v3"))
"""Colours by the least loss that has them; a larger gain has `v4`."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A fork at the decisive call: its own answer there, and the outcome."""

    episode: str
    step: int
    answer: str
    outcome: float | None
    """None if the application raised an error, or if the outcome is not known."""
    raised: bool


class ShownLoss(msgspec.Struct, frozen=True, kw_only=True):
    """An episode with its decisive call, if any, and the alternatives, the best first."""

    episode: LostEpisode
    loss: str
    alternatives: tuple[Alternative, ...]


class ShownEffect(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of a call, as words and as a colour."""

    text: str
    colour: str


def blame_page(viewer: Viewer, request: Request) -> Response:
    """The verdict, a row per role, and the calls that lost episodes."""
    run = viewer.run(request)
    analysis = run.blame  # None if `cotune blame` has not analysed the run
    return viewer.page(
        request,
        "blame.html",
        run,
        found=analysis,
        luck=luck_sentence(analysis) if analysis else "",
        scoring=scoring_sentence(analysis) if analysis else "",
        points=shown_points,
        noise_points=noise_points,
        outcome=shown_outcome,
        money=shown_money,
        seconds=shown_seconds,
        least_tasks=LEAST_TASKS,
        decisive=DECISIVE,
        lost=show_losses(run, analysis.episodes) if analysis else [],
        hues=hues(run, *(analysis.all_roles if analysis else ())),
    )


def show_losses(run: OpenedRun, episodes: Sequence[LostEpisode]) -> list[ShownLoss]:
    """The lost episodes for the page, each with the forks at its decisive call: other answers to the call, after which
    the episode ran on to an outcome of its own.
    """
    # 1. Find the ids of the decisive calls. The analysis names a call by its step.
    decisive_calls: dict[str, str] = {}  # id of an episode -> id of its decisive call
    for lost in episodes:
        if lost.call is not None:
            calls = run.store.calls(lost.episode, lean=True)
            decisive_calls[lost.episode] = next((call.id for call in calls if call.step == lost.call), "")

    # 2. Collect the forks at these calls.
    alternatives: dict[str, list[Alternative]] = {call_id: [] for call_id in decisive_calls.values()}
    if decisive_calls:
        for phase in (FORK, FRESH_FORK):
            for episode in run.store.episodes(EpisodeFilters(phase=phase)):
                fork = episode.fork
                if fork is not None and fork.call in alternatives and episode.is_outcome:
                    alternatives[fork.call].append(show_alternative(run, episode, fork))

    # 3. Rank the forks of each episode by outcome. Forks without an outcome come last.
    losses = []
    for lost in episodes:
        loss = "" if lost.loss is None else loss_points(lost.loss)
        forks = alternatives.get(decisive_calls.get(lost.episode, ""), [])
        ranked = sorted(forks, key=lambda fork: (fork.outcome is None, -(fork.outcome or 0.0)))
        losses.append(ShownLoss(episode=lost, loss=loss, alternatives=tuple(ranked)))
    return losses


def show_alternative(run: OpenedRun, episode: Episode, fork: Fork) -> Alternative:
    """A row of the page for `episode`, which repeats an analysed episode up to the call at `fork`, answers this call
    anew, and continues to an outcome of its own.
    """
    call = run.figures.call(fork.at)
    answer = ""
    if call.chosen is not None:
        answer = answer_line(call.candidates[call.chosen])
    return Alternative(
        episode=episode.id,
        step=call.step,
        answer=answer,
        outcome=summed_outcome(episode, run.store.rewards([episode.id]).get(episode.id)),
        raised=episode.status == "error",
    )


def effects_of(run: OpenedRun, episode: str) -> dict[int, ShownEffect]:
    """By step, the effects of the calls of an episode that was analysed; empty for any other episode."""
    if run.blame is None:
        return {}
    shown = {}
    for lost in run.blame.episodes:
        if lost.episode == episode:
            shown.update({effect.step: show_effect(effect) for effect in lost.effects})
    return shown


def show_effect(effect: CallEffect) -> ShownEffect:
    """An effect as it is shown."""
    colour = next((name for least, name in EFFECTS if effect.loss.mean >= least), "v4")
    text = f"loses {loss_points(effect.loss)} points, from {effect.forks} forks"
    if effect.parallel > 1:
        text += f", together with {plural(effect.parallel - 1, 'parallel call')}"
    return ShownEffect(text=text, colour=colour)
