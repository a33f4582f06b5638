"""The page of an analysis of `cotune blame`, and the effects of calls that an episode's timeline shows."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.integrations.web.viewer.viewer import Viewer, hues
from cotune.reading.blame import (
    FORK,
    FRESH_FORK,
    LEAST_TASKS,
    CallEffect,
    LostEpisode,
    loss_points,
    luck_sentence,
    shown_points,
)
from cotune.reading.run import OpenedRun
from cotune.records.structs import Fork
from cotune.storage.episode_filters import EpisodeFilters
from cotune.tables import answer_line

EFFECTS = ((0.3, "v0"), (0.1, "v1"), (-0.1, "v2"), (-0.3, "v3"))
"""Colours by the least loss that has them; a larger gain has `v4`."""


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A fork at the decisive call: its own answer there, and the outcome."""

    episode: str
    step: int
    answer: str
    outcome: float | None


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
    found = run.blame
    forks = forks_by_call(run) if found is not None and found.episodes else {}
    return viewer.page(
        request,
        "blame.html",
        run,
        found=found,
        luck=luck_sentence(found) if found else "",
        points=shown_points,
        least_tasks=LEAST_TASKS,
        lost=[show_loss(run, one, forks) for one in found.episodes] if found else [],
        hues=hues(run, *(found.all_roles if found else ())),
    )


def forks_by_call(run: OpenedRun) -> dict[tuple[str, str], list[tuple[str, Fork]]]:
    """The forks of an analysis, by the episode and the call that they leave: their ids, and where they do so."""
    forks: dict[tuple[str, str], list[tuple[str, Fork]]] = {}
    for phase in (FORK, FRESH_FORK):
        for episode in run.store.episodes(EpisodeFilters(phase=phase)):
            if episode.fork is not None and episode.is_outcome:
                forks.setdefault((episode.fork.trunk, episode.fork.call), []).append((episode.id, episode.fork))
    return forks


def show_loss(run: OpenedRun, lost: LostEpisode, forks: Mapping[tuple[str, str], list[tuple[str, Fork]]]) -> ShownLoss:
    """A lost episode as it is shown."""
    decisive = ""
    for call in run.store.calls(lost.episode, lean=True) if lost.call is not None else ():
        if call.step == lost.call:
            decisive = call.id
    alternatives = []
    for id, fork in forks.get((lost.episode, decisive), ()):
        rewards = run.store.rewards([id]).get(id)
        call = run.figures.call(fork.at)
        answer = "" if call.chosen is None else answer_line(call.candidates[call.chosen])
        outcome = sum(rewards.values()) if rewards else None
        alternatives.append(Alternative(episode=id, step=call.step, answer=answer, outcome=outcome))
    # Runs without an outcome, in which the application raised, come last.
    alternatives.sort(key=lambda one: (one.outcome is None, -(one.outcome or 0.0)))
    loss = "" if lost.loss is None else loss_points(lost.loss)
    return ShownLoss(episode=lost, loss=loss, alternatives=tuple(alternatives))


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
    return ShownEffect(text=f"loses {loss_points(effect.loss)} points, from {effect.forks} forks", colour=colour)
