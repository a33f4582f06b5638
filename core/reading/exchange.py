"""What an episode was asked and what it answered, as short texts for lists.

Records hold the input of a task as the application got it, in any form, and calls, but no final answer. The question,
the expected answer and the answer are therefore found by the rules below. They are only shown: no figure uses them.
Texts come from the records, so redactors have already changed them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.records.images import content_text
from cotune.storage.protocol import Store
from cotune.tables import snippet
from cotune.terminal import harmless

LISTED = 80
"""Characters of a text that a list of episodes shows."""
LONGEST = 4000
"""Characters that are looked at of a text."""
QUESTION = (
    "question", "problem", "query", "prompt", "instruction", "task", "goal", "topic", "request", "message", "text",
    "input",
)  # fmt: skip
"""Fields of a task's input that hold its question, the first that is there counts."""
EXPECTED = (
    "answer", "expected", "expected_answer", "expected_output", "final_answer", "correct_answer", "reference_answer",
    "reference", "solution", "ground_truth", "gold", "target", "label",
)  # fmt: skip
"""Fields of a task's input that hold the right answer."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The question of an episode, its answer, and the answer that its task expects; empty where unknown. Characters
    that nobody sees are marked."""

    question: str = ""
    answer: str = ""
    expected: str = ""


def exchanges(store: Store, episodes: Iterable[str]) -> dict[str, Exchange]:
    """The exchanges of these episodes, by id. Only their own texts are read."""
    found = {}
    for id, (value, message) in store.figures().inputs_and_answers(episodes).items():
        found[id] = Exchange(question=question_of(value), answer=answer_of(message), expected=expected_of(value))
    return found


def beginning(text: str) -> str:
    """The first characters of a text on one line."""
    return snippet(text, LISTED)


def question_of(value: Any) -> str:
    """The question in a task's input: the text itself, a field named like one, the last message of a user, or the input
    as JSON without its id and its expected answer."""
    if isinstance(value, str) or value is None:
        return _shown(value)
    if isinstance(value, Mapping):
        for name in QUESTION:
            if isinstance(value.get(name), str) and value[name].strip():
                return _shown(value[name])
        if text := _last_of_user(value.get("messages")):
            return _shown(text)
        return _shown({name: one for name, one in value.items() if name != "id" and name not in EXPECTED} or None)
    return _shown(_last_of_user(value) or value)


def expected_of(value: Any) -> str:
    """The right answer in a task's input; empty if no field is named like one."""
    if isinstance(value, Mapping):
        for name in EXPECTED:
            if value.get(name) not in (None, "", [], {}):
                return _shown(value[name])
    return ""


def answer_of(message: Mapping[str, Any] | None) -> str:
    """The text of an assistant message and its tool calls."""
    if message is None:
        return ""
    text = content_text(message.get("content"))
    parts = [text] if text else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping):
            parts.append(f"{function.get('name')}({function.get('arguments', '')})")
    return _shown("\n".join(parts))


def _last_of_user(messages: Any) -> str:
    """The text of the last message of a user among chat messages; empty for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return ""
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return content_text(message.get("content"))
    return ""


def _shown(value: Any) -> str:
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    # Marked before lines are joined: splitting at white space would drop some control characters.
    return harmless(text[:LONGEST]).strip()
