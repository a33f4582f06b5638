"""The pages of one episode and of one call: new messages, and all candidates with rewards and advantages."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from cotune.errors import RecordError
from cotune.integrations.web.viewer.chat import ShownMessage, shown
from cotune.integrations.web.viewer.timeline import TimedCall, timeline
from cotune.integrations.web.viewer.tokens import shown_tokens
from cotune.integrations.web.viewer.viewer import Viewer, hues, start
from cotune.reading.groups import StepGroups
from cotune.reading.run import OpenedRun
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode

PAGE = 40
"""Calls of a page."""
QUOTED = 8
"""Characters of an answer that is taken for quoted where it stands in a later prompt."""


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
    has_logprobs: bool


class ShownCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. `reads` are the steps of the calls whose answers it was given, as messages or quoted in new messages.
    `kept` messages of its prompt were in the role's turn before; `new` are those after them. `group` is the
    id of the group that its candidates were compared in, empty for none."""

    record: CallRecord
    reads: tuple[int, ...]
    kept: int
    messages: int
    new: tuple[ShownMessage, ...]
    tools: str
    candidates: tuple[ShownCandidate, ...]
    group: str


def episode_page(viewer: Viewer, request: Request) -> Response:
    """One episode, a page of its calls at a time."""
    run, id, first = viewer.run(request), request.path_params["id"], start(request)
    timed = [TimedCall(*call) for call in run.store.call_times(id)]
    episode = _episode(run, id)
    if episode is None and not timed:
        raise RecordError(f"There is no episode {id} in {run.name}.", "")
    calls = run.store.calls(id, start=first, limit=PAGE)
    groups = viewer.groups_of(run, episode)
    shown = show_calls(run, calls, {call.id: call.step for call in timed}, groups)
    older, newer = run.store.neighbours(id)
    return viewer.page(
        request,
        "episode.html",
        run,
        id=id,
        episode=episode,
        outcome=run.store.rewards([id])[id],
        feedback=run.store.feedback([id])[id],
        timeline=timeline(with_reads(timed, shown)),
        hues=hues(run, *(call.role for call in timed), *(call.record.role for call in shown)),
        calls=shown,
        groups=groups,
        total=len(timed),
        start=first,
        size=PAGE,
        broken=len(timed[first : first + PAGE]) - len(calls),
        older=older,
        newer=newer,
    )


def call_page(viewer: Viewer, request: Request) -> Response:
    """One call with its whole prompt; with `tokens`, its answers token by token."""
    run = viewer.run(request)
    record = run.store.call(request.path_params["id"])
    episode = _episode(run, record.episode)
    groups = viewer.groups_of(run, episode)
    steps = {id: step for id, step, *_ in run.store.call_times(record.episode)}
    (call,) = show_calls(run, [record], steps, groups, whole=True)
    coloured = "tokens" in request.query_params
    own = run.about.base_of(record.policy.name) if record.policy else None
    model = own or str(run.description.get("model") or "")
    return viewer.page(
        request,
        "call.html",
        run,
        call=call,
        episode=episode,
        groups=groups,
        tokens={c.index: shown_tokens(c, model) for c in record.candidates if coloured and _has_logprobs(c)},
        coloured=coloured,
        tools=message(run, record.tools) if record.tools else None,
        sent=[(place, message(run, id)) for place, id in record.changed.items()],
        sent_tools=message(run, record.sent_tools) if record.sent_tools else None,
        hues=hues(run, record.role),
    )


def _episode(run: OpenedRun, id: str) -> Episode | None:
    """The episode; None where it has no end yet."""
    return run.store.episode(id) if run.store.has_episode(id) else None


def with_reads(calls: Sequence[TimedCall], shown: Iterable[ShownCall]) -> list[TimedCall]:
    """The calls of an episode, those that are shown with the parents that were found in their prompts."""
    ids = {call.step: call.id for call in calls}
    found = {one.record.id: tuple(ids[step] for step in one.reads) for one in shown}
    return [msgspec.structs.replace(call, parents=found.get(call.id, call.parents)) for call in calls]


def show_calls(
    run: OpenedRun,
    calls: Sequence[CallRecord],
    steps: Mapping[str, int],
    groups: StepGroups | None,
    *,
    whole: bool = False,
) -> list[ShownCall]:
    """Calls as they are shown. `steps` are those of the episode's calls by id; `whole` keeps prompts whole."""
    targets = [candidate_id(call.id, c.index) for call in calls for c in call.candidates]
    rewards, feedback = run.store.rewards(targets), run.store.feedback(targets)
    found = []
    answers: dict[str, int] = {}
    for call in calls:
        kept = 0 if whole else _kept(run, call)
        members = [candidate_id(call.id, c.index) for c in call.candidates]
        group = next((groups.group_of[id] for id in members if id in groups.group_of), "") if groups else ""
        new = tuple(message(run, id) for id in call.messages[kept:])
        reads = {steps[id] for id in call.parents if id in steps} | set(_quoted(new, answers))
        answers.update(_answer(call))
        found.append(
            ShownCall(
                record=call,
                reads=tuple(sorted(reads)),
                kept=kept,
                messages=len(call.messages),
                new=new,
                tools=call.tools or "",
                candidates=tuple(
                    _candidate(c, id, c.index == call.chosen, rewards[id], feedback[id], groups)
                    for id, c in zip(members, call.candidates, strict=True)
                ),
                group=group,
            )
        )
    return found


def _answer(call: CallRecord) -> Iterator[tuple[str, int]]:
    """The text that the application got, where it is long enough to be known again, and the step of its call."""
    for candidate in call.candidates:
        body: Any = candidate.message
        text = candidate.text or body.get("content")
        if candidate.index == call.chosen and isinstance(text, str) and len(text.strip()) >= QUOTED:
            yield text.strip(), call.step


def _quoted(new: Sequence[ShownMessage], answers: Mapping[str, int]) -> Iterator[int]:
    """Steps of the answers that new messages of a prompt quote word by word."""
    said = "\n".join(part.text for one in new for part in one.parts)
    for text, step in answers.items():
        if text in said and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", said):
            yield step


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
) -> ShownCandidate:
    body: Any = candidate.message
    if candidate.text and not body.get("content"):
        body = {**body, "content": candidate.text}
    return ShownCandidate(
        id=id,
        index=candidate.index,
        message=shown({"role": "assistant", **body}),
        chosen=chosen,
        rewards=rewards,
        feedback=feedback,
        advantage=groups.advantages.get(id) if groups else None,
        idle=groups is not None and id in groups.idle,
        tokens=len(candidate.token_ids),
        finish_reason=candidate.finish_reason,
        malformed=candidate.malformed,
        has_logprobs=_has_logprobs(candidate),
    )


def _kept(run: OpenedRun, call: CallRecord) -> int:
    """How many messages at the beginning of the prompt the role's turn before had as well."""
    if call.turn == 0:
        return 0
    before = run.store.messages_of(call.episode, call.role, call.turn - 1)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, call.messages, strict=False))
    return min(len([*same]), len(call.messages) - 1)


def _has_logprobs(candidate: Candidate) -> bool:
    return bool(candidate.logprobs) and len(candidate.logprobs) == len(candidate.token_ids)
