"""Two candidates as a diff, and two episodes of one task side by side: of two runs, of two policies, of two steps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.viewer.episode import ShownCall, ShownCandidate, ended_episode, show_calls
from cotune.integrations.web.viewer.episodes import EpisodeRow, newest
from cotune.integrations.web.viewer.viewer import Viewer, hues
from cotune.reading.run import OpenedRun
from cotune.records.structs import CallRecord, Episode
from cotune.storage.episode_filters import EpisodeFilters

MOST_WORDS = 20_000
"""Words of a candidate that are compared; longer ones are compared line by line."""
MOST_CALLS = 40
"""Calls of an episode that are shown beside those of another."""
MOST_EPISODES = 60
"""Episodes of a task to choose from, the newest of each run."""
LATEST = 300
"""Latest episodes in which a task is looked for that all runs have."""


class Piece(msgspec.Struct, frozen=True):
    """A stretch of a text; `kind` is same, removed or added."""

    kind: str
    text: str


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An episode beside another. `title` says when it was, or by which policies; `more` calls are not shown."""

    title: str
    episode: Episode
    rewards: dict[str, float]
    calls: list[ShownCall]
    more: int
    run: str = ""


def told_episode(run: OpenedRun, id: str, title: str, most: int) -> Told:
    """An episode with its first calls."""
    found, calls = run.store.episode(id), run.store.calls(id, limit=most)
    shown, rewards = show_calls(run, calls, None), dict(run.store.rewards([id])[id])
    more = max(0, found.calls - len(shown))
    return Told(title=title, episode=found, rewards=rewards, calls=shown, more=more, run=run.name)


def diff_page(viewer: Viewer, request: Request) -> Response:
    """Two candidates: what the second says that the first does not. Without a second one, the chosen one of the same
    call, or another one."""
    run, asked = viewer.run(request), request.query_params
    first = _call_of(run, asked.get("a", ""))
    second = _call_of(run, asked["b"]) if asked.get("b") else first
    calls = {call.id: call for call in (first, second)}
    groups = viewer.groups_of(run, ended_episode(run, first.episode))
    shown = show_calls(run, list(calls.values()), groups, whole=True)
    candidates = {candidate.id: candidate for call in shown for candidate in call.candidates}
    others = [one for one in candidates.values() if one.id != asked["a"]]
    chosen = next((one.id for one in others if one.chosen), others[0].id if others else "")
    pair = [candidates.get(asked["a"]), candidates.get(asked.get("b") or chosen)]
    if pair[0] is None or (asked.get("b") and pair[1] is None):
        raise HTTPException(404, "There is no such candidate.")
    texts = [_text(one) if one else "" for one in pair]
    return viewer.page(
        request,
        "diff.html",
        run,
        pair=pair,
        calls=calls,
        candidates=list(candidates.values()),
        sides=diff(*texts) if pair[1] else ([], []),
        same=texts[0] == texts[1],
    )


def diff(first: str, second: str) -> tuple[list[Piece], list[Piece]]:
    """Two texts in pieces: what both have, what only the first has (removed), and what only the second has (added)."""
    parts: list[list[str]] = [re.findall(r"\w+|\s+|[^\w\s]", text) for text in (first, second)]
    if max(map(len, parts)) > MOST_WORDS:
        parts = [text.splitlines(keepends=True) for text in (first, second)]
    left: list[Piece] = []
    right: list[Piece] = []
    for kind, i, j, k, m in SequenceMatcher(None, parts[0], parts[1], autojunk=len(parts[0]) > 2000).get_opcodes():
        for pieces, name, words in ((left, "removed", parts[0][i:j]), (right, "added", parts[1][k:m])):
            if words:
                pieces.append(Piece("same" if kind == "equal" else name, "".join(words)))
    return left, right


def sides_page(viewer: Viewer, request: Request) -> Response:
    """Two episodes of a task. `left` and `right` are `RUN/EPISODE`; without them the oldest and the newest of the one
    run, of the phase of the newest, or the newest of each of the first two runs."""
    run, shown = viewer.chosen(request)
    asked = request.query_params
    given = [_episode_of(viewer, asked[side]) for side in ("left", "right") if asked.get(side)]
    shown = [*dict.fromkeys([*(of for of, _ in given), *(shown if run or not given or asked.get("run") else [])])]
    task = asked.get("task") or (given[0][1].task.id if given else _common_task(shown))
    filters = EpisodeFilters(task=task, status="counted")
    choices = {f"{of.name}/{row.id}": (of, row) for of in shown for row in newest(of, filters, MOST_EPISODES)}
    titles = {name: _title(*one) for name, one in choices.items()}
    picked = [asked.get("left") or "", asked.get("right") or ""]
    named = list(choices)
    if len(shown) > 1:
        usual = [next((name for name in named if choices[name][0] is of), "") for of in shown[:2]]
    else:
        usual = _oldest_and_newest(choices)
    picked = [name if name in choices else other for name, other in zip(picked, usual, strict=True)]
    listed = [(name, *choices[name]) for name in dict.fromkeys(picked) if name in choices]
    sides = [told_episode(of, row.id, titles[name], MOST_CALLS) for name, of, row in listed]
    return viewer.page(
        request,
        "sides.html",
        run,
        task=task,
        shown=shown,
        choices=titles,
        picked=picked,
        sides=sides,
        hues=hues(shown[0], *(call.record.role for told in sides for call in told.calls)) if shown else {},
    )


def _oldest_and_newest(choices: Mapping[str, tuple[OpenedRun, EpisodeRow]]) -> list[str]:
    named = list(choices)
    alike = [name for name, (_, row) in choices.items() if row.phase == choices[named[0]][1].phase]
    return [(alike if len(alike) > 1 else named)[-1], named[0]] if named else ["", ""]


def _call_of(run: OpenedRun, candidate: str) -> CallRecord:
    try:
        return run.store.call(candidate.rpartition(".")[0])
    except RecordError:
        raise HTTPException(404, f"There is no candidate {candidate[:100]} in {run.name}.") from None


def _text(candidate: ShownCandidate) -> str:
    """All that a candidate says, its reasoning and its tool calls with their names."""
    return "\n".join("\n".join(filter(None, (part.label, part.text))) for part in candidate.message.parts)


def _episode_of(viewer: Viewer, name: str) -> tuple[OpenedRun, Episode]:
    run, _, id = name.rpartition("/")
    found = viewer.named(run)
    if not found.store.has_episode(id):
        raise HTTPException(404, f"There is no episode {id[:100]} in {found.name}.")
    return found, found.store.episode(id)


def _title(run: OpenedRun, row: EpisodeRow) -> str:
    """When an episode was run, by whom, and what came of it."""
    when = f"{row.phase} step {row.step}" if row.step is not None else row.phase
    came = {1: "solved", 0: "not solved", None: ""}[row.success] if row.status == "ok" else row.status
    total = sum(row.rewards.values())
    return " · ".join(filter(None, (run.name, when, came, f"reward {total:.3g}", f"…{row.id[-6:]}")))


def _common_task(runs: Sequence[OpenedRun]) -> str:
    """The task of the latest episode whose task all runs had lately; of the latest one where there is none."""
    tasks = [
        list(dict.fromkeys(str(line[1]) for line in run.store.episode_lines(EpisodeFilters(status="counted"), LATEST)))
        for run in runs
    ]
    listed = tasks[0] if tasks else []
    return next((task for task in listed if all(task in one for one in tasks)), next(iter(listed), ""))
