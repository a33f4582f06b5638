"""What the reflection model sees of runs: a role's own calls, as data between marks."""

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
from cotune.trainer.prompts.tried import Tried

LONGEST = 2000
"""Characters of one text that are shown."""
Contrasts = Mapping[str, Sequence[tuple[str, float]]]
"""By call, other answers to its request, each with what came of it."""


class Fence:
    """Puts data between lines that nothing in it can hold."""

    def __init__(self, mark: str) -> None:
        self.mark = mark
        self.cut = 0
        """Characters that are not shown."""

    def __call__(self, text: str) -> str:
        text, left_out = without_middle(text, LONGEST)
        self.cut += left_out
        return f"<<<data {self.mark}\n{text.replace(self.mark, '')}\ndata {self.mark}>>>"


class _Seen(NamedTuple):
    rank: float
    tried: Tried
    call: CallRecord
    values: tuple[str, ...]


def examples(
    store: Store,
    part: PromptPart,
    tried: Sequence[Tried],
    wording: Wording,
    fence: Fence,
    *,
    shown: int,
    contrasts: Contrasts,
) -> list[str]:
    """The worst `shown` calls with this part, and one of the best, each as text. The rank is that of the role's own
    scorer, or else the outcome of the run."""
    seen = [one for of in tried for one in _seen(store, part, of)]
    ranked = sorted(range(len(seen)), key=lambda place: (seen[place].rank, place))
    chosen = dict.fromkeys([*ranked[:shown], *ranked[-1:]])
    return [_example(store, seen[place], wording, fence, contrasts) for place in chosen]


def slot_values(store: Store, part: PromptPart, tried: Iterable[Tried]) -> dict[int, list[str]]:
    """By slot, its different values in these runs, at most two."""
    found: dict[int, list[str]] = {}
    for of in tried:
        for one in _seen(store, part, of):
            for slot, value in enumerate(one.values, 1):
                known = found.setdefault(slot, [])
                if value not in known and len(known) < 2:
                    known.append(value)
    return found


def _seen(store: Store, part: PromptPart, tried: Tried) -> list[_Seen]:
    found = []
    for call in store.calls(tried.episode):
        if call.role not in part.roles or call.chosen is None:
            continue
        values = _values(store, part, call)
        if values is None:
            continue
        own = store.rewards([target := candidate_id(call.id, call.chosen)]).get(target)
        rank = sum(own.values()) if own else (-1e9 if tried.outcome is None else tried.outcome)
        found.append(_Seen(rank, tried, call, values))
    return found


def _values(store: Store, part: PromptPart, call: CallRecord) -> tuple[str, ...] | None:
    """The slots' values in this call; None where the part is not in it."""
    if part.kind in ("tool", "format"):
        return ()
    found: list[tuple[str, ...]] = []

    def look(kind: str, key: str, text: str) -> None:
        values = part.old.match(text) if kind == part.kind else None
        if values is not None and not isinstance(values, Reading):
            found.append(values)

    for id in call.messages:
        map_message(store.message(id), look)
    return found[-1] if found else None


def _example(store: Store, seen: _Seen, wording: Wording, fence: Fence, contrasts: Contrasts) -> str:
    call, tried = seen.call, seen.tried
    assert call.chosen is not None
    target = candidate_id(call.id, call.chosen)
    lines = [f"{wording.mark(slot)} was:\n{fence(value)}" for slot, value in enumerate(seen.values, 1)]
    others = [m for id in call.messages if (m := store.message(id)).get("role") not in ("system", "developer")]
    if others:
        lines.append("Messages after the instructions:")
        lines += [f"[{message.get('role', 'message')}]\n{fence(shown_message(message))}" for message in others]
    lines.append(f"The role answered:\n{fence(_said(call.candidates[call.chosen]))}")
    rewards = store.rewards([target]).get(target)
    if rewards:
        lines.append(f"Scores of this answer: {_numbers(rewards)}")
    outcome = "it failed" if tried.outcome is None else f"{tried.outcome:g}"
    lines.append(f"Outcome of the whole run: {outcome}{f' ({_numbers(tried.rewards)})' if tried.rewards else ''}")
    texts = store.feedback([target, tried.episode])
    lines += [f"Comment on {name}:\n{fence(text)}" for of in texts.values() for name, text in of.items()]
    if tried.error:
        lines.append(f"Error of the run:\n{fence(tried.error)}")
    lines += _contrast(store, call, fence, contrasts.get(call.id, ()))
    return "\n".join(lines)


def _contrast(store: Store, call: CallRecord, fence: Fence, forks: Sequence[tuple[str, float]]) -> list[str]:
    """The best and the worst answer to this one request, where several are known and differ."""
    given = store.rewards(candidate_id(call.id, one.index) for one in call.candidates)
    known = [
        (_said(one), sum(rewards.values()))
        for one in call.candidates
        if len(call.candidates) > 1 and (rewards := given.get(candidate_id(call.id, one.index)))
    ]
    known += forks
    if len(known) < 2:
        return []
    worst, best = min(known, key=lambda one: one[1]), max(known, key=lambda one: one[1])
    if worst[1] == best[1]:
        return []
    return [
        f"Other answers to this very request: one that came to {best[1]:g}\n{fence(best[0])}",
        f"and one that came to {worst[1]:g}\n{fence(worst[0])}",
    ]


def said_by(call: CallRecord) -> str:
    """The chosen answer of a call as text; empty without one."""
    return "" if call.chosen is None else _said(call.candidates[call.chosen])


def _said(candidate: Candidate) -> str:
    return shown_message(candidate.message or {"content": candidate.text})


def _numbers(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in named.items())
