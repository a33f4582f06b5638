"""The question and the answer of an episode, as short texts for lists.

Records hold the input of a task in the form that the application got, and calls, but no final answer. The rules below
find the question, the expected answer and the answer. Screens show them; no figure uses them. The texts come from the
records, so redactors have already changed them.
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
"""Maximum length of a text in a list of episodes, in characters."""
LONGEST = 4000
"""Maximum length of a text that is read, in characters."""
QUESTION = (
    "question", "problem", "query", "prompt", "instruction", "task", "goal", "topic", "request", "message", "text",
    "input",
)  # fmt: skip
"""Fields of a task's input that may hold its question. The first one in this order counts."""
EXPECTED = (
    "answer", "expected", "expected_answer", "expected_output", "final_answer", "correct_answer", "reference_answer",
    "reference", "solution", "ground_truth", "gold", "target", "label",
)  # fmt: skip
"""Fields of a task's input that hold the right answer."""


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """The question of an episode, its answer, and the answer that its task expects; empty if unknown. Invisible
    characters are marked."""

    question: str = ""
    answer: str = ""
    expected: str = ""


def exchanges(store: Store, episodes: Iterable[str]) -> dict[str, Exchange]:
    """The exchanges of these episodes, by id. Only their own texts are read."""
    by_id = {}
    for id, (value, message) in store.figures().inputs_and_answers(episodes).items():
        by_id[id] = Exchange(question=question_of(value), answer=answer_of(message), expected=expected_of(value))
    return by_id


def first_characters(text: str) -> str:
    """The first characters of a text on one line."""
    return snippet(text, LISTED)


def question_of(value: Any) -> str:
    """The question in the input of a task, as text to show.

    It is the input itself if that is a text, else the first field with a name in QUESTION, else the last message of a
    user, else the input as JSON without its id and its expected answer.
    """
    if isinstance(value, str) or value is None:
        return _exchange_text(value)
    if isinstance(value, Mapping):
        for name in QUESTION:
            if isinstance(value.get(name), str) and value[name].strip():
                return _exchange_text(value[name])
        if text := _last_of_user(value.get("messages")):
            return _exchange_text(text)
        others = {name: field for name, field in value.items() if name != "id" and name not in EXPECTED}
        return _exchange_text(others or None)
    return _exchange_text(_last_of_user(value) or value)


def expected_of(value: Any) -> str:
    """The right answer in a task's input; empty without a field with a name in EXPECTED."""
    if isinstance(value, Mapping):
        for name in EXPECTED:
            if value.get(name) not in (None, "", [], {}):
                return _exchange_text(value[name])
    return ""


def answer_of(message: Mapping[str, Any] | None) -> str:
    """The text of an assistant message and its tool calls."""
    if message is None:
        return ""
    texts: list[str] = []
    content = content_text(message.get("content"))
    if content:
        texts.append(content)
    tool_calls = message.get("tool_calls")
    if isinstance(tool_calls, list):
        for tool_call in tool_calls:
            function = tool_call.get("function") if isinstance(tool_call, Mapping) else None
            if isinstance(function, Mapping):
                texts.append(f"{function.get('name')}({function.get('arguments', '')})")
    return _exchange_text("\n".join(texts))


def _last_of_user(messages: Any) -> str:
    """The text of the last message of a user among chat messages; empty for anything else."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        return ""
    for message in reversed(messages):
        if isinstance(message, Mapping) and message.get("role") == "user":
            return content_text(message.get("content"))
    return ""


def _exchange_text(value: Any) -> str:
    """A value as a text for people: JSON unless it is a text, not longer than `LONGEST`; empty for None."""
    if value is None:
        return ""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    # Marked before lines are joined: splitting at white space would drop some control characters.
    return harmless(text[:LONGEST]).strip()
