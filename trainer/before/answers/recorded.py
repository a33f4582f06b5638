"""Answers read from a store of recorded calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cotune.errors import ConfigError, WorkflowError
from cotune.recording.recorder import LiveCall
from cotune.storage.protocol import Store
from cotune.trainer.before.answers.responder import Message

NO_RECORD = "The records have no answer"


class RecordedAnswers:
    """The answers of recorded episodes, by role and turn. Run number `run` takes another episode of the task, or of any
    task if the task was not recorded. Raises ConfigError for a store without an answered call."""

    def __init__(self, store: Store) -> None:
        """Read the chosen answer of every answered call, by episode."""
        self.episodes: list[tuple[str, dict[tuple[str, int], Message]]] = []
        """The id of the task, and the chosen messages."""
        for episode in store.episodes():
            messages: dict[tuple[str, int], Message] = {}
            for call in store.calls(episode.id):
                for candidate in call.candidates:
                    if call.status == "ok" and candidate.index == (call.chosen or 0):
                        messages[call.role, call.turn] = candidate.message
            if messages:
                self.episodes.append((episode.task.id, messages))
        if not self.episodes:
            address = f"records:{store.address}"
            raise ConfigError("answers", address, "has no answered call", "Record some: cotune trace")

    def of_run(self, run: int) -> Callable[[LiveCall], Callable[[int], Message]]:
        """The answers of a run: all candidates of a call are the recorded message."""
        return lambda call: partial(self.message, run, call)

    def message(self, run: int, call: LiveCall, index: int) -> Message:
        """The recorded answer to a call, found by its role and turn. All candidates of the call get the same answer.

        Raises WorkflowError if the episode has no answer for it.
        """
        # Episodes of the same task, or of any task if it has none. The runs of a task take them in turn.
        episodes = [messages for task, messages in self.episodes if task == call.task.id]
        if not episodes:
            episodes = [messages for _task, messages in self.episodes]
        messages_of_episode = episodes[run % len(episodes)]
        message = messages_of_episode.get((call.role, call.turn))
        if message is None:
            raise WorkflowError(
                f"{NO_RECORD} for turn {call.turn} of role {call.role!r}.",
                "Record more episodes (cotune trace), or pass other --answers.",
            )
        return message
