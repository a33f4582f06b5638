"""One evaluation: a workflow on held-out tasks, with a given policy for each role, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from cotune.recording.recorder import Responder, Sink
from cotune.recording.records import Episode, PolicyRef, Task
from cotune.recording.rollout import rollout
from cotune.sampling.protocol import UNSHAPED, ChatFormat, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.evaluation.cost import Prices, Use, use
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


async def evaluate_episodes(
    workflow: Workflow,
    tasks: Sequence[Task],
    *,
    label: str,
    responder: Responder | None = None,
    concurrency: int = 64,
    timeout: float | None = None,
    sink: Sink | None = None,
    phase: str = "eval",
    on_episode: Callable[[Episode], None] | None = None,
    prices: Prices | None = None,
) -> Evaluation:
    """Run each task once, answered by `responder`, or by the application's own provider without one."""
    seen = EvaluationSink(sink)
    started = time.perf_counter()
    await rollout(
        workflow,
        tasks,
        sink=seen,
        responder=responder,
        phase=phase,
        concurrency=concurrency,
        timeout=timeout,
        on_episode=on_episode,
    )
    return summarise(label, seen, time.perf_counter() - started, prices or {})


async def evaluate_policies(
    workflow: Workflow,
    tasks: Sequence[Task],
    *,
    sampler: Sampler,
    chat: ChatFormat,
    policies: Mapping[str, PolicyRef],
    label: str,
    provider_roles: Collection[str] = (),
    others: PolicyRef | None = None,
    params: SamplingParams | None = None,
    temperature: float | None = None,
    concurrency: int = 64,
    timeout: float | None = None,
    sink: Sink | None = None,
    seed: int = 0,
    phase: str = "eval",
    on_episode: Callable[[Episode], None] | None = None,
    prices: Prices | None = None,
) -> Evaluation:
    """Run each task once with `policies` playing the roles; `provider_roles` are left to the application's provider,
    any other role to `others` (to the provider where that is None).

    `temperature` overrides what the application asks for (0 is greedy), and with it all that shapes the distribution,
    as in training. Local rewards are taken but choose
    nothing: every call gets one candidate. Records go to `sink` under `phase`. A call of one place draws the same
    random numbers in every evaluation of one `seed`, whatever its phase.
    """
    responder = PolicyResponder(
        sampler,
        chat,
        policies,
        scorers=workflow.scorers,
        defaults=params,
        provider_roles=provider_roles,
        override=None if temperature is None else {"temperature": temperature, **UNSHAPED},
        others=others,
        seed=seed,
        stream="eval",
    )
    found = await evaluate_episodes(
        workflow,
        tasks,
        label=label,
        responder=responder,
        concurrency=concurrency,
        timeout=timeout,
        sink=sink,
        phase=phase,
        on_episode=on_episode,
        prices=prices,
    )
    return msgspec.structs.replace(
        found, scorer_errors=dict(responder.scorer_errors), unlisted=dict(responder.unlisted)
    )


def summarise(label: str, seen: EvaluationSink, seconds: float, prices: Prices) -> Evaluation:
    """Intervals and counts of what a sink has seen."""
    endings = seen.endings
    told = successes(endings)
    return Evaluation(
        label=label,
        episodes=len(endings),
        success=share(sum(told.values()), len(told)),
        reward=mean([e.reward for e in endings.values() if e.reward is not None]),
        roles=seen.roles(),
        failed=dict(Counter(reason for e in endings.values() if (reason := failure(e)))),
        seconds=seconds,
        use=use(seen.answered, [e.seconds for e in endings.values() if e.status == "ok"], prices),
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
