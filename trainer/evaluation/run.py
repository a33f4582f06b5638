"""One evaluation: a workflow on held-out tasks, with a given policy for each role, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from cotune.recording.recorder import Sink
from cotune.recording.records import Episode, PolicyRef, Task
from cotune.recording.rollout import EpisodeBatch, rollout
from cotune.sampling.protocol import UNSHAPED, ChatFormat, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.evaluation.cost import Prices, Use, total_use
from cotune.trainer.evaluation.sink import Ending, EvaluationSink, RoleStatistics
from cotune.trainer.evaluation.statistics import Interval, mean, share
from cotune.workflows import Workflow


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Results over the tasks, one episode each.

    `success` counts a failed episode as no success; it is None where the workflow reports no `success`. `reward`
    is over the episodes that ended with one. `failed` counts failed episodes by reason.
    """

    label: str
    episodes: int
    success: Interval | None
    reward: Interval | None
    roles: dict[str, RoleStatistics]
    failed: dict[str, int]
    seconds: float
    use: Use
    scorer_errors: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    """Calls by role that has no policy."""
    endings: dict[str, Ending] = {}
    """By task id; what paired comparisons are made of."""

    @property
    def all_failed(self) -> str | None:
        """Why most episodes failed, where all did."""
        if not self.episodes or sum(self.failed.values()) < self.episodes:
            return None
        return max(self.failed, key=self.failed.__getitem__)

    @property
    def rewards(self) -> dict[str, float]:
        """Reward by task, of the episodes that have one."""
        return {task: e.reward for task, e in self.endings.items() if e.reward is not None}

    @property
    def successes(self) -> dict[str, bool]:
        """Success by task; empty where the workflow reports none."""
        return successes(self.endings)


@dataclass(frozen=True, kw_only=True)
class Players:
    """The policies that play the roles, and what generates their tokens.

    `provider_roles` are left to the application's own provider; any role that is in neither is played by `others`, or
    by the provider where that is None.
    """

    sampler: Sampler
    chat: ChatFormat
    roles: Mapping[str, PolicyRef]
    provider_roles: Collection[str] = ()
    others: PolicyRef | None = None


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """How the episodes of an evaluation are run. Records go to `sink`; `timeout` is in seconds for each episode.

    A call at the same place draws the same random numbers in every evaluation of one `seed`. `on_episode` is called
    after each episode.
    """

    concurrency: int = 64
    timeout: float | None = None
    sink: Sink | None = None
    seed: int = 0
    prices: Prices = field(default_factory=dict)
    on_episode: Callable[[Episode], None] | None = None


async def evaluate_episodes(
    workflow: Workflow,
    tasks: Sequence[Task],
    *,
    label: str,
    responder: PolicyResponder | None = None,
    phase: str = "eval",
    options: EvaluationOptions | None = None,
) -> Evaluation:
    """Run each task once, answered by `responder`, or by the application's own provider without one."""
    options = options or EvaluationOptions()
    sink = EvaluationSink(options.sink)
    started = time.perf_counter()
    batch = EpisodeBatch(
        tasks=tasks,
        sink=sink,
        phase=phase,
        concurrency=options.concurrency,
        timeout=options.timeout,
        on_episode=options.on_episode,
    )
    await rollout(workflow, batch, responder)
    found = summarise(label, sink, time.perf_counter() - started, options.prices)
    if responder is None:
        return found
    errors, unlisted = dict(responder.scorer_errors), dict(responder.unlisted)
    return msgspec.structs.replace(found, scorer_errors=errors, unlisted=unlisted)


async def evaluate_policies(
    workflow: Workflow,
    tasks: Sequence[Task],
    players: Players,
    *,
    label: str,
    phase: str = "eval",
    params: SamplingParams | None = None,
    temperature: float | None = None,
    options: EvaluationOptions | None = None,
) -> Evaluation:
    """Run each task once with `players`; every call gets one candidate, and scorers choose nothing.

    `temperature` overrides what the application asks for (0 is greedy), and with it all that shapes the distribution,
    as in training; `params` hold where the application asks for nothing.
    """
    options = options or EvaluationOptions()
    responder = PolicyResponder(
        players.sampler,
        players.chat,
        players.roles,
        scorers=workflow.scorers,
        defaults=params,
        provider_roles=players.provider_roles,
        override=None if temperature is None else {"temperature": temperature, **UNSHAPED},
        others=players.others,
        seed=options.seed,
        stream="eval",
    )
    return await evaluate_episodes(workflow, tasks, label=label, responder=responder, phase=phase, options=options)


def summarise(label: str, sink: EvaluationSink, seconds: float, prices: Prices) -> Evaluation:
    """Intervals and counts of the episodes that a sink has counted."""
    endings = sink.endings
    succeeded = successes(endings)
    return Evaluation(
        label=label,
        episodes=len(endings),
        success=share(sum(succeeded.values()), len(succeeded)),
        reward=mean([e.reward for e in endings.values() if e.reward is not None]),
        roles=sink.roles(),
        failed=dict(Counter(reason for e in endings.values() if (reason := failure(e)))),
        seconds=seconds,
        use=total_use(sink.answered, [e.seconds for e in endings.values() if e.status == "ok"], prices),
        endings=endings,
    )


def successes(endings: Mapping[str, Ending]) -> dict[str, bool]:
    """Success by task. Where some episode reports it, one that fails or does not report it is no success."""
    if all(e.success is None for e in endings.values()):
        return {}
    return {task: e.success is True and e.status == "ok" for task, e in endings.items()}


def failure(ending: Ending) -> str | None:
    """Why an episode counts as failed, in one line; None when it ended well."""
    if ending.status == "ok":
        return None
    return f"{ending.status}: {(ending.error or 'no reason recorded').splitlines()[0]}"
