"""One episode, and one call: who asked what, what was new in it, and all candidates with rewards and advantages."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.integrations.web.viewer.chat import ShownMessage, shown
from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.integrations.web.viewer.step_groups import StepGroups
from cotune.integrations.web.viewer.timeline import TimedCall
from cotune.records.structs import CallRecord, Candidate, Episode, candidate_id
from cotune.storage.schema import call_from

PAGE = 40
"""Calls of a page."""
QUOTED = 8
"""Characters of an answer that is taken for quoted where it stands in a later prompt."""
_CALL = "SELECT body, candidates, token_ids, logprobs FROM calls"


class ShownCandidate(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate: its message, named rewards, advantage (None where it was not trained on; of `idle` ones it
    is 0, so that they teach nothing), and whether it went on."""

    id: str
    index: int
    message: ShownMessage
    chosen: bool
    rewards: Mapping[str, float]
    advantage: float | None
    idle: bool
    tokens: int
    finish_reason: str
    malformed: bool
    has_logprobs: bool


class ShownCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call. `reads` are the steps of the calls whose answers it was given, as messages or quoted in what is new.
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


def find_episode(run: OpenedRun, id: str) -> Episode | None:
    """The episode; None where it has no end yet. Raises RecordError where there is nothing of that id."""
    if run.store is None:
        raise RecordError(f"{run.name} has no records.", "")
    if run.rows("SELECT 1 FROM episodes WHERE id = ?", (id,)):
        return run.store.episode(id)
    if not run.rows("SELECT 1 FROM calls WHERE episode = ? LIMIT 1", (id,)):
        raise RecordError(f"There is no episode {id} in {run.name}.", "")
    return None


def timed_calls(run: OpenedRun, episode: str) -> list[TimedCall]:
    """All calls of an episode, without what was said."""
    sql = """SELECT id, step, role, turn, status, CAST(coalesce(json_extract(body, '$.started'), 0) AS REAL),
             CAST(coalesce(json_extract(body, '$.latency'), 0) AS REAL),
             iif(json_type(body, '$.parents') = 'array', json_extract(body, '$.parents'), '[]')
             FROM calls WHERE episode = ? ORDER BY step, id"""
    return [
        TimedCall(id, step, role, turn, status, started, latency, tuple(map(str, json.loads(parents))))
        for id, step, role, turn, status, started, latency, parents in run.rows(sql, (episode,))
    ]


def with_reads(calls: Sequence[TimedCall], shown: Iterable[ShownCall]) -> list[TimedCall]:
    """The calls of an episode, those that are shown with the parents that were found in their prompts."""
    ids = {call.step: call.id for call in calls}
    found = {one.record.id: tuple(ids[step] for step in one.reads) for one in shown}
    return [msgspec.structs.replace(call, parents=found.get(call.id, call.parents)) for call in calls]


def page_of_calls(run: OpenedRun, episode: str, start: int) -> tuple[list[CallRecord], int]:
    """The calls from number `start` on, and how many of them are broken."""
    found = run.rows(f"{_CALL} WHERE episode = ? ORDER BY step, id LIMIT ? OFFSET ?", (episode, PAGE, start))
    calls = list(_read(found))
    return calls, len(found) - len(calls)


def find_call(run: OpenedRun, id: str) -> CallRecord:
    """Raises RecordError for an unknown or broken call."""
    for call in _read(run.rows(f"{_CALL} WHERE id = ?", (id,))):
        return call
    raise RecordError(f"There is no call {id} in {run.name} that can be read.", "")


def show_calls(
    run: OpenedRun,
    calls: Sequence[CallRecord],
    steps: Mapping[str, int],
    groups: StepGroups | None,
    *,
    whole: bool = False,
) -> list[ShownCall]:
    """What to show of calls. `steps` are those of the episode's calls by id; `whole` keeps prompts whole."""
    store = run.store
    assert store is not None
    rewards = store.rewards(candidate_id(call.id, c.index) for call in calls for c in call.candidates)
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
                    _candidate(call, c, rewards.get(candidate_id(call.id, c.index), {}), groups)
                    for c in call.candidates
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
    """Steps of the answers that stand word by word in what is new in a prompt."""
    said = "\n".join(part.text for one in new for part in one.parts)
    for text, step in answers.items():
        if text in said and re.search(rf"(?<!\w){re.escape(text)}(?!\w)", said):
            yield step


def message(run: OpenedRun, id: str) -> ShownMessage:
    """A message to show; one that was lost says so."""
    try:
        assert run.store is not None
        return shown(run.store.message(id))
    except RecordError:
        return shown({"role": "lost", "content": "This message is not among the records."})


def _candidate(
    call: CallRecord, candidate: Candidate, rewards: Mapping[str, float], groups: StepGroups | None
) -> ShownCandidate:
    id = candidate_id(call.id, candidate.index)
    body: Any = candidate.message
    if candidate.text and not body.get("content"):
        body = {**body, "content": candidate.text}
    return ShownCandidate(
        id=id,
        index=candidate.index,
        message=shown({"role": "assistant", **body}),
        chosen=candidate.index == call.chosen,
        rewards=rewards,
        advantage=groups.advantages.get(id) if groups else None,
        idle=groups is not None and id in groups.idle,
        tokens=len(candidate.token_ids),
        finish_reason=candidate.finish_reason,
        malformed=candidate.malformed,
        has_logprobs=bool(candidate.logprobs) and len(candidate.logprobs) == len(candidate.token_ids),
    )


def _kept(run: OpenedRun, call: CallRecord) -> int:
    """How many messages at the beginning of the prompt the role's turn before had as well."""
    if call.turn == 0:
        return 0
    sql = "SELECT json_extract(body, '$.messages') FROM calls WHERE episode = ? AND role = ? AND turn = ?"
    for (found,) in run.rows(sql, (call.episode, call.role, call.turn - 1)):
        before = json.loads(found or "[]")
        same = 0
        for one, other in zip(before, call.messages, strict=False):
            if one != other:
                break
            same += 1
        return min(same, len(call.messages) - 1)
    return 0


def _read(rows: Iterable[Sequence[Any]]) -> Iterable[CallRecord]:
    for row in rows:
        try:
            yield call_from(*row)
        except (ValueError, TypeError, struct.error, RecursionError):
            continue
