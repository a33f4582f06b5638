"""The runs as the reflection model sees them: the calls of one role, as data between marks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cotune.judging.shown import shown_message
from cotune.prompts.chat_texts import map_message
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Reading
from cotune.prompts.wording import Wording
from cotune.recording.rewards import without_middle
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate
from cotune.storage.protocol import Store
from cotune.trainer.prompts.task_result import TaskResult

LONGEST = 2000
"""Most characters of one text that are shown."""
Contrasts = Mapping[str, Sequence[tuple[str, float]]]
"""By call, other answers to its request, each with its result."""


class Fence:
    """Puts data between lines with a mark that the data cannot contain."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.cut = 0
        """Number of characters that are not shown."""

    def __call__(self, text: str) -> str:
        text, left_out = without_middle(text, LONGEST)
        self.cut += left_out
        return f"<<<data {self.mark}\n{text.replace(self.mark, '')}\ndata {self.mark}>>>"


class _RankedCall(NamedTuple):
    """A call with a part of its prompt: its rank, the result of its run, and the values of the part's slots."""

    rank: float
    result: TaskResult
    call: CallRecord
    values: tuple[str, ...]


def examples(
    store: Store,
    part: PromptPart,
    results: Sequence[TaskResult],
    wording: Wording,
    fence: Fence,
    *,
    shown: int,
    contrasts: Contrasts,
) -> list[str]:
    """Return the `shown` worst calls with this part, and one of the best, each as text. They are ranked by the role's
    own scorer, or else by the outcome of the run."""
    calls: list[_RankedCall] = []
    for result in results:
        calls += _ranked_calls(store, part, result)
    ranked = sorted(range(len(calls)), key=lambda index: (calls[index].rank, index))
    chosen = dict.fromkeys([*ranked[:shown], *ranked[-1:]])
    return [_example(store, calls[index], wording, fence, contrasts) for index in chosen]


def slot_values(store: Store, part: PromptPart, results: Iterable[TaskResult]) -> dict[int, list[str]]:
    """Return up to two different values of each slot in these runs."""
    values_of_slot: dict[int, list[str]] = {}
    for result in results:
        for ranked in _ranked_calls(store, part, result):
            for slot, value in enumerate(ranked.values, 1):
                values = values_of_slot.setdefault(slot, [])
                if value not in values and len(values) < 2:
                    values.append(value)
    return values_of_slot


def _ranked_calls(store: Store, part: PromptPart, result: TaskResult) -> list[_RankedCall]:
    """Return the answered calls of a run whose prompt has the part."""
    ranked: list[_RankedCall] = []
    for call in store.calls(result.episode):
        if call.role not in part.roles or call.chosen is None:
            continue
        values = _values(store, part, call)
        if values is None:
            continue
        target = candidate_id(call.id, call.chosen)
        rewards = store.rewards([target]).get(target)
        rank = -1e9 if result.outcome is None else result.outcome
        if rewards:
            rank = sum(rewards.values())
        ranked.append(_RankedCall(rank, result, call, values))
    return ranked


def _values(store: Store, part: PromptPart, call: CallRecord) -> tuple[str, ...] | None:
    """Return the values of the part's slots in this call; None if its prompt does not have the part."""
    if part.kind in ("tool", "format"):
        return ()
    matches: list[tuple[str, ...]] = []

    def look(kind: str, key: str, text: str) -> None:
        values = part.old.match(text) if kind == part.kind else None
        if values is not None and not isinstance(values, Reading):
            matches.append(values)

    for id in call.messages:
        map_message(store.message(id), look)
    return matches[-1] if matches else None


def _example(store: Store, ranked: _RankedCall, wording: Wording, fence: Fence, contrasts: Contrasts) -> str:
    """Return a call with its answer, its scores, comments and errors as text."""
    call, result = ranked.call, ranked.result
    assert call.chosen is not None
    target = candidate_id(call.id, call.chosen)
    lines = [f"{wording.mark(slot)} was:\n{fence(value)}" for slot, value in enumerate(ranked.values, 1)]
    messages = [store.message(id) for id in call.messages]
    others = [message for message in messages if message.get("role") not in ("system", "developer")]
    if others:
        lines.append("Messages after the instructions:")
        lines += [f"[{message.get('role', 'message')}]\n{fence(shown_message(message))}" for message in others]
    lines.append(f"The role answered:\n{fence(_said(call.candidates[call.chosen]))}")
    rewards = store.rewards([target]).get(target)
    if rewards:
        lines.append(f"Scores of this answer: {_numbers(rewards)}")
    outcome = "it failed" if result.outcome is None else f"{result.outcome:g}"
    if result.rewards:
        outcome += f" ({_numbers(result.rewards)})"
    lines.append(f"Outcome of the whole run: {outcome}")
    for comments in store.feedback([target, result.episode]).values():
        lines += [f"Comment on {name}:\n{fence(text)}" for name, text in comments.items()]
    if result.error:
        lines.append(f"Error of the run:\n{fence(result.error)}")
    lines += _contrast(store, call, fence, contrasts.get(call.id, ()))
    return "\n".join(lines)


def _contrast(store: Store, call: CallRecord, fence: Fence, forks: Sequence[tuple[str, float]]) -> list[str]:
    """Return the best and the worst answer to this request, if several answers have a result and the results differ."""
    answers: list[tuple[str, float]] = []  # each with its score
    if len(call.candidates) > 1:
        all_rewards = store.rewards(candidate_id(call.id, candidate.index) for candidate in call.candidates)
        for candidate in call.candidates:
            if rewards := all_rewards.get(candidate_id(call.id, candidate.index)):
                answers.append((_said(candidate), sum(rewards.values())))
    answers += forks
    if len(answers) < 2:
        return []
    worst = min(answers, key=lambda answer: answer[1])
    best = max(answers, key=lambda answer: answer[1])
    if worst[1] == best[1]:
        return []
    return [
        f"Other answers to this very request: one that came to {best[1]:g}\n{fence(best[0])}",
        f"and one that came to {worst[1]:g}\n{fence(worst[0])}",
    ]


def said_by(call: CallRecord) -> str:
    """Return the chosen answer of a call as text; an empty text without one."""
    return "" if call.chosen is None else _said(call.candidates[call.chosen])


def _said(candidate: Candidate) -> str:
    return shown_message(candidate.message or {"content": candidate.text})


def _numbers(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in named.items())
