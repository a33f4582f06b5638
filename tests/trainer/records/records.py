"""Records of the tiny application, as a provider's model would have left them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cotune.integrations.models.chat.template import ChatTemplate
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Task
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.records.lessons import Reader, Readers

Messages = list[dict[str, Any]]


def said(text: str, index: int = 0, **more: Any) -> Candidate:
    message = {"role": "assistant", "content": text, **more.pop("message", {})}
    return Candidate(index=index, text=text, message=message, **more)


def reading(chat: ChatTemplate, longest: int = 256) -> Readers:
    """One template for all roles."""
    return lambda role: Reader(chat, longest)


def asked(text: str) -> Messages:
    return [{"role": "user", "content": text}]


def record(
    store: SqliteStore,
    task: str,
    turns: Sequence[tuple[str, Messages, Candidate | Sequence[Candidate]]],
    *,
    rewards: Mapping[str, float] | None = None,
    scores: Callable[[Candidate], Mapping[str, float]] | None = None,
    status: Any = "ok",
    phase: str = "trace",
) -> None:
    """Add an episode: for each turn its role, its messages, and its candidates, of which the first goes on."""
    live = LiveEpisode(store, Task(id=task, input={"letter": task[0]}), workflow="w", phase=phase)
    for role, messages, answers in turns:
        candidates = (answers,) if isinstance(answers, Candidate) else tuple(answers)
        rated = tuple(scores(c) for c in candidates) if scores else ()
        call = live.start(CallerContext(role, "test"), {"messages": messages})
        call.finish(Answer(candidates=candidates, rewards=rated))
    live.end(status, rewards=rewards or {})


def traced(folder: Path, letters: str = "abcdefghijkl", copies: int = 2) -> Path:
    """Two roles that both say the task's letter four times, in `copies` episodes of each of the tasks."""
    with SqliteStore.open(folder) as store:
        for copy in range(copies):
            for letter in letters:
                heard, good = asked(f"say {letter}"), said(4 * letter)
                turns = [("first", heard, good), ("second", asked(f"after {good.text}: {letter}"), good)]
                record(store, letter, turns, rewards={"team": 1.0 - copy})
    return folder
