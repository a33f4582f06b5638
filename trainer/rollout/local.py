"""Episodes that run in this process."""

from __future__ import annotations

from collections import Counter

from cotune.recording.records import Episode
from cotune.recording.rollout import EpisodeBatch, rollout
from cotune.sampling.protocol import ChatFormat, Sampler
from cotune.trainer.rollout.protocol import ResponderConfig
from cotune.workflows import Workflow


class LocalRunner:
    """An `EpisodeRunner` in this process."""

    def __init__(self, workflow: Workflow, sampler: Sampler, chat: ChatFormat) -> None:
        self.counters: Counter[str] = Counter()
        self.scorer_errors: Counter[str] = Counter()
        self.unlisted: Counter[str] = Counter()
        self._workflow = workflow
        self._sampler = sampler
        self._chat = chat

    async def run(self, batch: EpisodeBatch, responder: ResponderConfig | None) -> list[Episode]:
        """Run a batch: see `EpisodeRunner`."""
        if responder is None:
            return await rollout(self._workflow, batch)
        answering = responder.responder(self._sampler, self._chat, self._workflow)
        try:
            return await rollout(self._workflow, batch, answering)
        finally:
            self.scorer_errors.update(answering.scorer_errors)
            self.unlisted.update(answering.unlisted)
