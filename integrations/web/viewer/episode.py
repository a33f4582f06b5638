"""The pages of one episode and of one call, with new messages and all candidates, their rewards and advantages."""

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
from cotune.integrations.web.viewer.blame import effects_of
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
    """A candidate with its message, its rewards and their reasons (`feedback`).

    `advantage` is None for a candidate that was not trained on. `idle` ones have the advantage 0, so training on them
    changed nothing.
    """

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
    """A call."""

    record: CallRecord
    reads: Reads
    """Steps of the calls whose answers its prompt contains (see `reading.reads`)."""
    kept: int
    """Number of messages at the beginning of its prompt that the role's previous turn had too."""
    messages: int
    new: tuple[ShownMessage, ...]
    """The messages after the `kept` ones."""
    tools: str
    candidates: tuple[ShownCandidate, ...]
    group: str
    """Id of the group that its candidates were compared in; empty for none."""


def episode_page(viewer: Viewer, request: Request) -> Response:
    """One episode, a page of its calls at a time."""
    run = viewer.run(request)
    id = request.path_params["id"]
    first = start(request)
    # 1. The times of all calls, for the timeline.
    timed_calls = [TimedCall(*call) for call in run.figures.call_times(id)]
    episode = ended_episode(run, id)
    if episode is None and not timed_calls:
        raise RecordError(f"There is no episode {id} in {run.name}.", "")

    # 2. The calls of this page with their messages and answers.
    calls = run.store.calls(id, start=first, limit=PAGE)
    groups = viewer.groups_of(run, episode)
    colouring = viewer.colouring(request, run, episode)
    reads_of_call = _reads_of_calls(run, calls, first, episode)
    shown_calls = show_calls(run, calls, groups, reads_of_call=reads_of_call, colouring=colouring)
    timed_calls = with_reads(timed_calls, shown_calls)
    roles = [*(call.role for call in timed_calls), *(call.record.role for call in shown_calls)]
    unreadable_calls = len(timed_calls[first : first + PAGE]) - len(calls)  # the store leaves out damaged records
    older, newer = run.figures.neighbours(id)
    return viewer.page(
        request,
        "episode.html",
        run,
        id=id,
        episode=episode,
        outcome=run.store.rewards([id])[id],
        feedback=run.store.feedback([id])[id],
        timeline=timeline(timed_calls, used_tools(episode, shown_calls)),
        graph=role_graph(timed_calls),
        effects=effects_of(run, id),
        hues=hues(run, *roles),
        calls=shown_calls,
        groups=groups,
        **of_candidates(request, run, colouring, groups),
        total=len(timed_calls),
        start=first,
        size=PAGE,
        broken=unreadable_calls,
        older=older,
        newer=newer,
    )


def call_page(viewer: Viewer, request: Request) -> Response:
    """The page of one call: its whole prompt, its candidates, and links to the calls before and after it."""
    run = viewer.run(request)
    record = run.figures.call(request.path_params["id"])
    episode = ended_episode(run, record.episode)
    groups = viewer.groups_of(run, episode)
    ids = [id for id, *_ in run.figures.call_times(record.episode)]
    position = ids.index(record.id)
    colouring = viewer.colouring(request, run, episode, record.policy.name if record.policy else "")
    reads_of_call = _reads_of_calls(run, [record], position, episode)
    (call,) = show_calls(run, [record], groups, whole=True, reads_of_call=reads_of_call, colouring=colouring)
    return viewer.page(
        request,
        "call.html",
        run,
        call=call,
        episode=episode,
        earlier=ids[position - 1] if position else "",
        later=ids[position + 1] if position + 1 < len(ids) else "",
        **of_candidates(request, run, colouring, groups),
        tools=message(run, record.tools) if record.tools else None,
        sent=[(position, message(run, id)) for position, id in record.changed.items()],
        sent_tools=message(run, record.sent_tools) if record.sent_tools else None,
        hues=hues(run, record.role),
    )


def ended_episode(run: OpenedRun, id: str) -> Episode | None:
    """The record of an episode; None if it has not ended."""
    return run.store.episode(id) if run.figures.has_episode(id) else None


def of_candidates(request: Request, run: OpenedRun, colouring: Colouring, groups: StepGroups | None) -> dict[str, Any]:
    """Template values of a page with candidates: people's notes, the colouring with its legend, other colourings."""
    other_fields = {name: value for name, value in request.query_params.items() if name != "by"}
    colourings = []
    for name, text in COLOURS.items():
        if name == "advantage" and not groups:  # candidates outside of training have no advantage
            continue
        fields = {**other_fields, "by": name} if name else other_fields
        colourings.append((name, text, "?" + urlencode(fields)))
    return {
        "notes": run.notes,
        "by": colouring.by,
        "legend": LEGENDS.get(colouring.by),
        "colourings": colourings,
        "uncoloured": not colouring.tokens_left,
        "without_figures": colouring.without_figures,
    }


def with_reads(calls: Sequence[TimedCall], shown: Iterable[ShownCall]) -> list[TimedCall]:
    """The calls of an episode. To the `shown` ones, the calls are added that they probably read, by their prompts."""
    id_of_step = {call.step: call.id for call in calls}
    guessed: dict[str, tuple[str, ...]] = {}
    for shown_call in shown:
        guessed[shown_call.record.id] = tuple(id_of_step[step] for step in shown_call.reads.guessed)
    return [msgspec.structs.replace(call, guessed=guessed.get(call.id, ())) for call in calls]


def used_tools(episode: Episode | None, shown: Sequence[ShownCall]) -> list[UsedTool]:
    """The uses of tools in an episode.

    Recorded uses have their times. Without any, uses are derived from the shown calls: a tool ran at some time between
    the call that requested it and the call that got its result.
    """
    if episode is not None and episode.results:
        return [UsedTool(result.name, result.started, result.latency) for result in episode.results]
    used: list[UsedTool] = []
    # Requested uses without a result so far: id of the tool call -> name of the tool, and the end of the request.
    requested: dict[str, tuple[str, float]] = {}
    for call in shown:
        record = call.record
        for message in call.new:
            if message.speaker != "tool":
                continue
            tool_call_id = message.note.rpartition(" ")[2]  # the note of a tool's message ends with the id
            if tool_call_id in requested:
                name, request_end = requested.pop(tool_call_id)
                longest_time = max(0.0, record.started - request_end)
                used.append(UsedTool(name, request_end, longest_time, at_most=True))
        for candidate in record.candidates:
            if candidate.index != record.chosen:
                continue
            for tool in candidate.tool_calls:
                function = tool.get("function") if isinstance(tool, Mapping) else None
                if isinstance(function, Mapping) and tool.get("id"):
                    requested[str(tool["id"])] = (str(function.get("name")), record.started + record.latency)
    return used


def _reads_of_calls(
    run: OpenedRun, calls: Sequence[CallRecord], first: int, episode: Episode | None
) -> Mapping[str, Reads]:
    """The earlier calls whose answers each of these calls has read, by the id of the reading call.

    `calls` follow each other in their episode, where `first` is the position of the first one.
    """
    earlier: Sequence[CallRecord] = []
    if calls and first:
        start = max(0, first - LOOK_BACK)
        earlier = run.store.calls(calls[0].episode, start=start, limit=first - start)
    return reads(run.store, calls, earlier, episode.task.input if episode else None)


def show_calls(
    run: OpenedRun,
    calls: Sequence[CallRecord],
    groups: StepGroups | None,
    *,
    whole: bool = False,
    reads_of_call: Mapping[str, Reads] = MappingProxyType({}),
    colouring: Colouring | None = None,
) -> list[ShownCall]:
    """Prepare calls for a page. With `whole`, all messages of their prompts are shown, not only the new ones.

    `reads_of_call` maps ids of calls to the earlier calls that they read.
    """
    colouring = colouring or Colouring("")
    ids_of_call: dict[str, list[str]] = {}
    for call in calls:
        ids_of_call[call.id] = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    all_ids = list(itertools.chain.from_iterable(ids_of_call.values()))
    rewards = run.store.rewards(all_ids)
    feedback = run.store.feedback(all_ids)

    shown_calls = []
    for call in calls:
        # The messages that an earlier call on the page has shown already are skipped.
        n_skipped = 0 if whole else _unchanged_messages(run, call)
        candidates = []
        group = ""  # the id of the group that training made of the candidates
        for id, candidate in zip(ids_of_call[call.id], call.candidates, strict=True):
            chosen = candidate.index == call.chosen
            candidates.append(_candidate(candidate, id, chosen, rewards[id], feedback[id], groups, colouring))
            if groups is not None and not group:
                group = groups.group_of.get(id, "")
        shown_calls.append(
            ShownCall(
                record=call,
                reads=reads_of_call.get(call.id, Reads()),
                kept=n_skipped,
                messages=len(call.messages),
                new=tuple(message(run, id) for id in call.messages[n_skipped:]),
                tools=call.tools or "",
                candidates=tuple(candidates),
                group=group,
            )
        )
    return shown_calls


def message(run: OpenedRun, id: str) -> ShownMessage:
    """A message of the records; a note if it was lost."""
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
    """A candidate as the page of an episode shows it, with its rewards, advantage and colours.

    `id` is the candidate's id. `groups` are the groups of its training step; None for a candidate that was not sampled
    for training.
    """
    body: Any = candidate.message
    if candidate.text and not body.get("content"):
        body = {**body, "content": candidate.text}
    advantage = None
    is_idle = False
    if groups is not None:
        advantage = groups.advantages.get(id)
        is_idle = id in groups.idle
    return ShownCandidate(
        id=id,
        index=candidate.index,
        message=shown({"role": "assistant", **body}),
        chosen=chosen,
        rewards=rewards,
        feedback=feedback,
        advantage=advantage,
        idle=is_idle,
        tokens=len(candidate.token_ids),
        finish_reason=candidate.finish_reason,
        malformed=candidate.malformed,
        colour=colouring.of_candidate(advantage),
        coloured=colouring.of_tokens(candidate, id),
    )


def _unchanged_messages(run: OpenedRun, call: CallRecord) -> int:
    """Number of messages at the beginning of the prompt that the role's previous turn had too."""
    if call.turn == 0:
        return 0
    previous_messages = run.figures.messages_of(call.episode, call.role, call.turn - 1)
    n_unchanged = 0
    for previous_id, id in zip(previous_messages, call.messages, strict=False):
        if previous_id != id:
            break
        n_unchanged += 1
    # The last message is always shown.
    return min(n_unchanged, len(call.messages) - 1)
