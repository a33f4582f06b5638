"""Answers read from a store of recorded calls."""

from __future__ import annotations

from collections.abc import Callable

from cotune.errors import ConfigError, WorkflowError
from cotune.recording.recorder import LiveCall
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store
from cotune.trainer.before.answers.responder import Message

NO_RECORD = "The records have no answer"


class RecordedAnswers:
    """The answers of recorded episodes, by role and turn. Run number `run` takes another episode of the task, or of any
    task if the task was not recorded. Raises ConfigError for a store without an answered call."""

    def __init__(self, store: Store) -> None:
        self.episodes: list[tuple[Episode, dict[tuple[str, int], CallRecord]]] = []
        for episode in store.episodes():
            answered = {}
            for call in store.calls(episode.id):
                if call.status == "ok" and call.candidates:
                    answered[call.role, call.turn] = call
            if answered:
                self.episodes.append((episode, answered))
        if not self.episodes:
            raise ConfigError(
                "answers", f"records:{store.address}", "has no answered call", "Record some: cotune trace"
            )

    def of_run(self, run: int) -> Callable[[LiveCall], Callable[[int], Message]]:
        """The answers of one run."""

        def answers(call: LiveCall) -> Callable[[int], Message]:
            same_task = [calls for episode, calls in self.episodes if episode.task.id == call.task.id]
            recorded = same_task or [calls for _, calls in self.episodes]
            record = recorded[run % len(recorded)].get((call.role, call.turn))
            if record is None:
                raise WorkflowError(
                    f"{NO_RECORD} for turn {call.turn} of role {call.role!r}.",
                    "Record more episodes (cotune trace), or pass other --answers.",
                )
            candidate = record.candidates[0]
            for other in record.candidates:
                if other.index == record.chosen:
                    candidate = other
            return lambda index: candidate.message

        return answers
