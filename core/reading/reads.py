"""Which answers of an episode each call read: recorded and guessed.

Certain: the recorder recognized the answer among the prompt's assistant messages, or the framework named it
(`CallRecord.parents`). Guessed: the text of the answer occurs in a message that was not in the role's previous turn, or
in the last message,

- as the whole message, of any length;
- anywhere in it as whole words, if the answer has two words and `QUOTED` characters;
- as the rest of a line after its label (`Plan: go left`, `said up`), if the answer has a letter or three digits, and
  each line of the episode with this label holds an earlier answer.

The longest answers are searched first, and each quotation is then removed from the text: a number inside a quoted
answer does not count as a quotation of another answer. Text from the task's input does not count inside a message. A
message cannot quote an answer that was given after the message was sent. Of equal answers the latest count, one for
each occurrence of the text.
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
"""Minimum length of an answer that may be quoted anywhere in a message, in characters."""
LOOK_BACK = 400
"""Number of calls before a page whose answers are searched for."""
_LABEL = re.compile(r"([^:\n]{1,40}:|\S{1,40})[ \t]+(\S.*)")
_TELLING_VALUE = re.compile(r"[^\W\d]|\d{3}")
"""A letter or three digits: a shorter number after a label may be equal to an answer by chance."""
_AROUND = " \t\"'`*_.“”«»"
"""Characters that may surround an answer after its label."""


class Reads(msgspec.Struct, frozen=True):
    """Steps of the calls whose answers a call read."""

    certain: tuple[int, ...] = ()
    guessed: tuple[int, ...] = ()

    @property
    def steps(self) -> tuple[int, ...]:
        """All steps, in order."""
        return tuple(sorted({*self.certain, *self.guessed}))


class _Answer(msgspec.Struct, frozen=True):
    """An answer that the application got."""

    step: int
    text: str
    time: float
    """The time of its arrival."""


class _Line(msgspec.Struct, frozen=True):
    """A line with a label in the new messages of a call. `step` is the step of the answer after the label, if any."""

    call: str
    label: str
    step: int | None


def reads(store: Store, calls: Sequence[CallRecord], earlier: Sequence[CallRecord], task: Any) -> dict[str, Reads]:
    """The answers of earlier calls that each of `calls` read, by call id. `earlier` are the calls of the episode before
    them, `task` is the input of its task."""
    all_calls = [*earlier, *calls]
    quoted, labelled_lines = _search_quotations(store, all_calls, task)

    # In a line such as `Plan: go left`, an answer may follow the label. That is a quotation only if an answer follows
    # in every line of the episode with this label: otherwise the label stands for something else, too.
    labels_without_answer = {line.label for line in labelled_lines if line.step is None}
    for line in labelled_lines:
        if line.step is not None and line.label not in labels_without_answer:
            quoted[line.call].add(line.step)

    # Recorded parents are certain; only further answers are guesses.
    step_of_call = {call.id: call.step for call in all_calls}
    reads_of_call: dict[str, Reads] = {}
    for call in calls:
        certain = {step_of_call[id] for id in call.parents if id in step_of_call}
        reads_of_call[call.id] = Reads(tuple(sorted(certain)), tuple(sorted(quoted[call.id] - certain)))
    return reads_of_call


def _search_quotations(store: Store, calls: Sequence[CallRecord], task: Any) -> tuple[dict[str, set[int]], list[_Line]]:
    """Search the new messages of each call for answers that were there when the message was first sent.

    Returns the steps of the answers that each call quotes, by call id, and the lines with a label in these messages.
    """
    task_text = "\n".join(map(str, leaves(task)))
    answers: list[_Answer] = []
    for call in calls:
        if answer := _answer(call):
            answers.append(answer)

    quoted: dict[str, set[int]] = {}
    labelled_lines: list[_Line] = []
    # Of each message, by id: when it was first sent, and its text.
    first_sent: dict[str, float] = {}
    texts: dict[str, str] = {}
    previous_messages: dict[str, Sequence[str]] = {}  # of the previous call of each role
    for call in calls:
        quoted[call.id] = set()
        earlier_answers = [answer for answer in answers if answer.time <= call.started and answer.step < call.step]
        read_before = set(previous_messages.get(call.role, ()))
        if call.messages:
            read_before.discard(call.messages[-1])  # the last message is the question of this call, even if it repeats
        for id in dict.fromkeys(call.messages):
            first_sent.setdefault(id, call.started)
            if id in read_before:
                continue
            if id not in texts:
                texts[id] = _text(store, id)
            # The message can quote only texts that were there when it was first sent. An equal answer may have come
            # since then; it counts too, and among equal answers the latest.
            possible_texts = {answer.text for answer in earlier_answers if answer.time <= first_sent[id]}
            possible_answers = [answer for answer in earlier_answers if answer.text in possible_texts]

            remaining_text = texts[id]
            if whole_message := _latest_answer(possible_answers, remaining_text):
                quoted[call.id].add(whole_message.step)
                continue
            steps, remaining_text = _cut_out_quotations(remaining_text, possible_answers, task_text)
            quoted[call.id].update(steps)
            labelled_lines += _labelled_lines(remaining_text, possible_answers, call.id)
        previous_messages[call.role] = call.messages
    return quoted, labelled_lines


def _answer(call: CallRecord) -> _Answer | None:
    """The answer that the application got from a call; None without text."""
    for candidate in call.candidates:
        if candidate.index == call.chosen:
            text = (content_text(candidate.message.get("content")) or candidate.text).strip()
            return _Answer(call.step, text, call.started + call.latency) if text else None
    return None


def _text(store: Store, id: str) -> str:
    """The text of a message; empty for one that was lost."""
    try:
        body = store.message(id)
    except RecordError:
        return ""
    return content_text(body.get("content")).strip() if isinstance(body, Mapping) else ""


def _cut_out_quotations(text: str, answers: Sequence[_Answer], task_text: str) -> tuple[set[int], str]:
    """Find answers inside the text of a message, and cut them out.

    Longer answers are looked for first, so that a short answer is not found inside them. Short answers and texts that
    the task itself contains prove nothing. Returns the steps of the answers, and the remaining text.
    """
    answers_by_text: dict[str, list[_Answer]] = defaultdict(list)
    for answer in answers:
        answers_by_text[answer.text].append(answer)

    steps: set[int] = set()
    remaining_text = text
    for quotation in sorted(answers_by_text, key=len, reverse=True):
        is_too_short = len(quotation) < QUOTED or len(quotation.split(maxsplit=1)) < 2
        if is_too_short or quotation not in remaining_text or quotation in task_text:
            continue
        as_whole_words = rf"(?<!\w){re.escape(quotation)}(?!\w)"
        remaining_text, times = re.subn(as_whole_words, "\n", remaining_text)
        if times > 0:
            # Each occurrence stands for one of the equal answers, the latest ones.
            steps.update(answer.step for answer in answers_by_text[quotation][-times:])
    return steps, remaining_text


def _labelled_lines(text: str, answers: Sequence[_Answer], call: str) -> Iterator[_Line]:
    """The lines of a message with a label and a text after it (`Plan: go left`), with the answer that the text is."""
    for line in text.splitlines():
        match = _LABEL.match(line.strip())
        if match is None:
            continue
        label = match[1]
        value = match[2].strip(_AROUND)
        if not value:
            continue
        step = None
        if _TELLING_VALUE.search(value) and (labelled_answer := _latest_answer(answers, value)):
            step = labelled_answer.step
        yield _Line(call, label, step)


def _latest_answer(answers: Sequence[_Answer], text: str) -> _Answer | None:
    """The latest answer with this text. Characters in `_AROUND` at its ends are ignored."""
    bare = text.strip(_AROUND)
    if not bare:
        return None
    return next((answer for answer in reversed(answers) if answer.text.strip(_AROUND) == bare), None)
