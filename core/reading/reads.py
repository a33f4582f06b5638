"""Who read whose answer in an episode: the calls that a call's prompt was made from, recorded ones and guessed ones.

Certain: the recorder found the answer among the prompt's assistant messages, or the framework named it
(`CallRecord.parents`). Guessed: the answer's text stands in a message that the role's turn before did not have, or in
the last one,

- as the whole message, whatever its length;
- anywhere in it, if the answer has two words and `QUOTED` characters, between the ends of words;
- as the rest of a line after its label (`Plan: go left`, `said up`), if the answer has a letter or three digits, and
  each line of the episode with this label held an earlier answer.

A text is searched for the longest answers first, and what was found is taken out: a number inside a quoted answer is no
quotation of another one. Text of the task's input is no quotation inside a message. A message that was sent before
anybody gave the answer quotes it nowhere. Of equal answers the latest count, one for each time that the text stands
there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.json_values import leaves
from cotune.records.images import content_text
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store

QUOTED = 8
"""Characters of an answer that counts as quoted anywhere in a message."""
LOOK_BACK = 400
"""Calls before those of a page whose answers are searched for."""
_LABEL = re.compile(r"([^:\n]{1,40}:|\S{1,40})[ \t]+(\S.*)")
_AROUND = " \t\"'`*_.“”«»"
"""Signs around an answer after its label."""


class Reads(msgspec.Struct, frozen=True):
    """Steps of the calls whose answers a call was given."""

    certain: tuple[int, ...] = ()
    guessed: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """All of them, in order."""
        return tuple(sorted({*self.certain, *self.guessed}))


class _Said(msgspec.Struct, frozen=True):
    """An answer that the application got."""

    step: int
    text: str
    at: float
    """When it was there."""


class _Line(msgspec.Struct, frozen=True):
    """A line with a label, in the new messages of a call; `step` is the answer that its rest is, None for none."""

    call: str
    label: str
    step: int | None


def reads(store: Store, calls: Sequence[CallRecord], earlier: Sequence[CallRecord], task: Any) -> dict[str, Reads]:
    """What each of `calls` read, by its id. `earlier` are the calls of the episode before them, `task` is its input."""
    listed = [*earlier, *calls]
    steps = {call.id: call.step for call in listed}
    given = "\n".join(map(str, leaves(task)))
    said = [one for call in listed if (one := _said(call))]
    quoted: dict[str, set[int]] = {call.id: set() for call in listed}
    lines: list[_Line] = []
    sent: dict[str, float] = {}
    texts: dict[str, str] = {}
    of_role: dict[str, frozenset[str]] = {}
    for call in listed:
        ended = [one for one in said if one.at <= call.started and one.step < call.step]
        before = of_role.get(call.role, frozenset())
        for id in dict.fromkeys(call.messages):
            sent.setdefault(id, call.started)
            if id in before and id != call.messages[-1]:
                continue
            if id not in texts:
                texts[id] = _text(store, id)
            then = {one.text for one in ended if one.at <= sent[id]}
            known = [one for one in ended if one.text in then]
            quoted[call.id].update(_quoted(texts[id], known, given, call.id, lines))
        of_role[call.role] = frozenset(call.messages)
    broken = {line.label for line in lines if line.step is None}
    for line in lines:
        if line.step is not None and line.label not in broken:
            quoted[line.call].add(line.step)
    found = {}
    for call in calls:
        certain = {steps[id] for id in call.parents if id in steps}
        found[call.id] = Reads(tuple(sorted(certain)), tuple(sorted(quoted[call.id] - certain)))
    return found


def _said(call: CallRecord) -> _Said | None:
    """The text that the application got from a call; None where it got none."""
    for candidate in call.candidates:
        if candidate.index == call.chosen:
            text = (content_text(candidate.message.get("content")) or candidate.text).strip()
            return _Said(call.step, text, call.started + call.latency) if text else None
    return None


def _text(store: Store, id: str) -> str:
    """The text of a message; empty for one that was lost."""
    try:
        body = store.message(id)
    except RecordError:
        return ""
    return content_text(body.get("content")).strip() if isinstance(body, Mapping) else ""


def _quoted(text: str, known: Sequence[_Said], given: str, call: str, lines: list[_Line]) -> Iterator[int]:
    """Steps of the answers that a message quotes; its lines with a label are added to `lines`."""
    if whole := _latest(known, text):
        yield whole.step
        return
    by_text: dict[str, list[_Said]] = defaultdict(list)
    for one in known:
        by_text[one.text].append(one)
    for answer in sorted(by_text, key=len, reverse=True):
        if len(answer) < QUOTED or not answer.split(maxsplit=1)[1:] or answer not in text or answer in given:
            continue
        text, times = re.subn(rf"(?<!\w){re.escape(answer)}(?!\w)", "\n", text)
        for one in by_text[answer][-times:] if times else ():
            yield one.step
    for line in text.splitlines():
        if (found := _LABEL.match(line.strip())) and (value := found[2].strip(_AROUND)):
            held = _latest(known, value) if re.search(r"[^\W\d]|\d{3}", value) else None
            lines.append(_Line(call, found[1], held.step if held else None))


def _latest(known: Sequence[_Said], text: str) -> _Said | None:
    """The latest answer with this text, without the signs around it."""
    bare = text.strip(_AROUND)
    return next((one for one in reversed(known) if one.text.strip(_AROUND) == bare), None) if bare else None
