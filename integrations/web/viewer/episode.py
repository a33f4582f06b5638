"""The pages of one episode and of one call: new messages, and all candidates with rewards and advantages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import urlencode

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.viewer.chat import ShownMessage, shown
from cotune.integrations.web.viewer.timeline import TimedCall, UsedTool, role_graph, timeline
from cotune.integrations.web.viewer.tokens import COLOURS, LEGENDS, ColouredTokens, Colouring
from cotune.integrations.web.viewer.viewer import Viewer, hues, start
from cotune.reading.groups import StepGroups
from cotune.reading.reads import LOOK_BACK, Reads, reads
from cotune.reading.run import OpenedRun
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode

PAGE = 40
"""Calls of a page."""


class ShownCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: its message, named rewards and the texts beside them, and whether it was chosen. `advantage` is None
    where it was not trained on; of `idle` ones it is 0, so that they teach nothing."""

    id: str
    index: int
    message: ShownMessage
    chosen: bool
    rewards: Mapping[str, float]
    feedback: Mapping[str, str]
    advantage: float | None
    idle: bool
    tokens: int
    finish_reason: str
    malformed: bool
    colour: str
    coloured: ColouredTokens | None


class ShownCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. `reads` are the steps of the calls whose answers it was given (see `reading.reads`).
    `kept` messages of its prompt were in the role's turn before; `new` are those after them. `group` is the
    id of the group that its candidates were compared in, empty for none."""

    record: CallRecord
    reads: Reads
    kept: int
    messages: int
    new: tuple[ShownMessage, ...]
    tools: str
    candidates: tuple[ShownCandidate, ...]
    group: str


def episode_page(viewer: Viewer, request: Request) -> Response:
    """One episode, a page of its calls at a time."""
    run, id, first = viewer.run(request), request.path_params["id"], start(request)
    timed = [TimedCall(*call) for call in run.figures.call_times(id)]
    episode = ended_episode(run, id)
    if episode is None and not timed:
        raise RecordError(f"There is no episode {id} in {run.name}.", "")
    calls = run.store.calls(id, start=first, limit=PAGE)
    groups = viewer.groups_of(run, episode)
    colouring = viewer.colouring(request, run, episode)
    shown = show_calls(run, calls, groups, found=_reads(run, calls, first, episode), colouring=colouring)
    timed = with_reads(timed, shown)
    older, newer = run.figures.neighbours(id)
    return viewer.page(
        request,
        "episode.html",
        run,
        id=id,
        episode=episode,
        outcome=run.store.rewards([id])[id],
        feedback=run.store.feedback([id])[id],
        timeline=timeline(timed, used_tools(episode, shown)),
        graph=role_graph(timed),
        hues=hues(run, *(call.role for call in timed), *(call.record.role for call in shown)),
        calls=shown,
        groups=groups,
        **of_candidates(request, run, colouring, groups),
        total=len(timed),
        start=first,
        size=PAGE,
        broken=len(timed[first : first + PAGE]) - len(calls),
        older=older,
        newer=newer,
    )


def call_page(viewer: Viewer, request: Request) -> Response:
    """One call with its whole prompt."""
    run = viewer.run(request)
    record = run.figures.call(request.path_params["id"])
    episode = ended_episode(run, record.episode)
    groups = viewer.groups_of(run, episode)
    beside = [id for id, *_ in run.figures.call_times(record.episode)]
    place = beside.index(record.id)
    colouring = viewer.colouring(request, run, episode, record.policy.name if record.policy else "")
    found = _reads(run, [record], place, episode)
    (call,) = show_calls(run, [record], groups, whole=True, found=found, colouring=colouring)
    return viewer.page(
        request,
        "call.html",
        run,
        call=call,
        episode=episode,
        earlier=beside[place - 1] if place else "",
        later=beside[place + 1] if place + 1 < len(beside) else "",
        **of_candidates(request, run, colouring, groups),
        tools=message(run, record.tools) if record.tools else None,
        sent=[(place, message(run, id)) for place, id in record.changed.items()],
        sent_tools=message(run, record.sent_tools) if record.sent_tools else None,
        hues=hues(run, record.role),
    )


def ended_episode(run: OpenedRun, id: str) -> Episode | None:
    """The episode; None where it has no end yet."""
    return run.store.episode(id) if run.figures.has_episode(id) else None


def of_candidates(request: Request, run: OpenedRun, colouring: Colouring, groups: StepGroups | None) -> dict[str, Any]:
    """What a page with candidates says of them: people's notes; the colours, their legend, the others' addresses."""
    asked = {name: value for name, value in request.query_params.items() if name != "by"}
    return {
        "notes": run.notes,
        "by": colouring.by,
        "legend": LEGENDS.get(colouring.by),
        "colourings": [
            (name, text, "?" + urlencode({**asked, "by": name} if name else asked))
            for name, text in COLOURS.items()
            if name != "advantage" or groups
        ],
        "uncoloured": not colouring.left,
        "without_figures": colouring.without_figures,
    }


def with_reads(calls: Sequence[TimedCall], shown: Iterable[ShownCall]) -> list[TimedCall]:
    """The calls of an episode, those that are shown with the parents that are guessed from their prompts."""
    ids = {call.step: call.id for call in calls}
    found = {one.record.id: tuple(ids[step] for step in one.reads.guessed) for one in shown}
    return [msgspec.structs.replace(call, guessed=found.get(call.id, ())) for call in calls]


def used_tools(episode: Episode | None, shown: Sequence[ShownCall]) -> list[UsedTool]:
    """The uses of tools in an episode: those that are on record with their times, else those that the shown calls asked
    for, each between the call that asked and the one that got its result."""
    if episode is not None and episode.results:
        return [UsedTool(one.name, one.started, one.latency) for one in episode.results]
    found, asked = [], dict[str, tuple[str, float]]()
    for call in shown:
        record = call.record
        for message in call.new:
            id = message.note.rpartition(" ")[2] if message.speaker == "tool" else ""
            if id in asked:
                name, ended = asked.pop(id)
                found.append(UsedTool(name, ended, max(0.0, record.started - ended), at_most=True))
        for candidate in record.candidates:
            for tool in candidate.tool_calls if candidate.index == record.chosen else ():
                function = tool.get("function") if isinstance(tool, Mapping) else None
                if isinstance(function, Mapping) and tool.get("id"):
                    asked[str(tool["id"])] = (str(function.get("name")), record.started + record.latency)
    return found


def _reads(run: OpenedRun, calls: Sequence[CallRecord], first: int, episode: Episode | None) -> Mapping[str, Reads]:
    """What each of these calls read, of which the first is the one in place `first` of its episode."""
    start = max(0, first - LOOK_BACK)
    earlier = run.store.calls(calls[0].episode, start=start, limit=first - start) if calls and first else []
    return reads(run.store, calls, earlier, episode.task.input if episode else None)


def show_calls(
    run: OpenedRun,
    calls: Sequence[CallRecord],
    groups: StepGroups | None,
    *,
    whole: bool = False,
    found: Mapping[str, Reads] = MappingProxyType({}),
    colouring: Colouring | None = None,
) -> list[ShownCall]:
    """Calls as they are shown. `whole` keeps prompts whole; `found` is what the calls read, by id."""
    colouring = colouring or Colouring("")
    targets = [candidate_id(call.id, c.index) for call in calls for c in call.candidates]
    rewards, feedback = run.store.rewards(targets), run.store.feedback(targets)
    listed = []
    for call in calls:
        kept = 0 if whole else _kept(run, call)
        members = [candidate_id(call.id, c.index) for c in call.candidates]
        group = next((groups.group_of[id] for id in members if id in groups.group_of), "") if groups else ""
        new = tuple(message(run, id) for id in call.messages[kept:])
        listed.append(
            ShownCall(
                record=call,
                reads=found.get(call.id, Reads()),
                kept=kept,
                messages=len(call.messages),
                new=new,
                tools=call.tools or "",
                candidates=tuple(
                    _candidate(c, id, c.index == call.chosen, rewards[id], feedback[id], groups, colouring)
                    for id, c in zip(members, call.candidates, strict=True)
                ),
                group=group,
            )
        )
    return listed


def message(run: OpenedRun, id: str) -> ShownMessage:
    """A message to show; one that was lost says so."""
    try:
        return shown(run.store.message(id))
    except RecordError:
        return shown({"role": "lost", "content": "This message is not among the records."})


def _candidate(
    candidate: Candidate,
    id: str,
    chosen: bool,
    rewards: Mapping[str, float],
    feedback: Mapping[str, str],
    groups: StepGroups | None,
    colouring: Colouring,
) -> ShownCandidate:
    body: Any = candidate.message
    advantage = groups.advantages.get(id) if groups else None
    if candidate.text and not body.get("content"):
        body = {**body, "content": candidate.text}
    return ShownCandidate(
        id=id,
        index=candidate.index,
        message=shown({"role": "assistant", **body}),
        chosen=chosen,
        rewards=rewards,
        feedback=feedback,
        advantage=advantage,
        idle=groups is not None and id in groups.idle,
        tokens=len(candidate.token_ids),
        finish_reason=candidate.finish_reason,
        malformed=candidate.malformed,
        colour=colouring.of_candidate(advantage),
        coloured=colouring.of_tokens(candidate, id),
    )


def _kept(run: OpenedRun, call: CallRecord) -> int:
    """How many messages at the beginning of the prompt the role's turn before had as well."""
    if call.turn == 0:
        return 0
    before = run.figures.messages_of(call.episode, call.role, call.turn - 1)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, call.messages, strict=False))
    return min(len([*same]), len(call.messages) - 1)
