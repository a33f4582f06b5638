"""The runner of a run's episodes: in this process, or in processes on Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from cotune.algorithms.recipes import Attribution
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import Workflow
from cotune.records.plans import Plan
from cotune.records.structs import Episode, PolicyRef
from cotune.sampling.protocol import ChatFormats, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder


class ResponderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of the `PolicyResponder` that answers the calls of a rollout. They are plain values, which can be
    sent to another process."""

    policies: dict[str, PolicyRef]
    plan: Plan | None = None
    plans: dict[str, Plan] = {}
    attribution: Attribution = Attribution()
    attribution_of_role: dict[str, Attribution] = {}
    defaults: SamplingParams = SamplingParams()
    override: dict[str, Any] | None = None
    sampling_of_role: dict[str, dict[str, Any]] = {}
    provider_roles: tuple[str, ...] = ()
    others: PolicyRef | None = None
    seed: int | None = None
    stream: str = ""

    def responder(self, sampler: Sampler, chats: ChatFormats, workflow: Workflow) -> PolicyResponder:
        """Return the responder, with the scorers of `workflow`."""
        arguments = msgspec.structs.asdict(self)
        return PolicyResponder(sampler, chats.own, chats=chats.others, scorers=workflow.scorers, **arguments)


class EpisodeRunner(Protocol):
    """Runs episodes of one workflow. Several batches may run at once. Counts begin at the start of the run."""

    @property
    def counters(self) -> Mapping[str, int]:
        """Faults of the processes that run the application, by name; empty if it runs in this process."""

    @property
    def scorer_errors(self) -> Mapping[str, int]:
        """Candidates by the error that their scorer raised."""

    @property
    def unlisted(self) -> Mapping[str, int]:
        """Number of calls of each role without a policy."""

    async def run(self, batch: EpisodeBatch, responder: ResponderConfig | None) -> list[Episode]:
        """Run a batch; without a responder the application's own provider answers its calls.

        Returns the episodes, including `batch.done`, sorted by rollout and task. Cancelling this cancels the episodes;
        finished ones are in the sink.
        """


class LocalRunner:
    """An `EpisodeRunner` in this process."""

    def __init__(self, workflow: Workflow, sampler: Sampler, chats: ChatFormats) -> None:
        self.counters: Counter[str] = Counter()
        self.scorer_errors: Counter[str] = Counter()
        self.unlisted: Counter[str] = Counter()
        self._workflow = workflow
        self.sampler = sampler
        self._chats = chats

    async def run(self, batch: EpisodeBatch, responder: ResponderConfig | None) -> list[Episode]:
        """Run a batch: see `EpisodeRunner`."""
        if responder is None:
            return await rollout(self._workflow, batch)
        policy_responder = responder.responder(self.sampler, self._chats, self._workflow)
        try:
            return await rollout(self._workflow, batch, policy_responder)
        finally:
            self.scorer_errors.update(policy_responder.scorer_errors)
            self.unlisted.update(policy_responder.unlisted)
