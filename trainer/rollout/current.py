"""Episodes of a run, with the policies that it serves now: in this process or in its rollout workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cotune.policies import stand_in
from cotune.recording.records import Episode, Task
from cotune.recording.rollout import rollout
from cotune.sampling.plans import Plan
from cotune.sampling.protocol import UNSHAPED, SamplingParams
from cotune.trainer.rollout.wire import ResponderConfig
from cotune.trainer.run import Run


async def run_episodes(
    run: Run, tasks: Sequence[Task], *, plan: Plan | None, stream: str = "", **how: Any
) -> tuple[list[Episode], Mapping[str, int], Mapping[str, int]]:
    """Run `tasks` under the run's own sampling; `how` goes to `rollout`.

    Returns the episodes, the errors of scorers and the calls of roles without a policy, both counted.
    """
    config = run.config
    answering = ResponderConfig(
        policies=run.served(),
        plan=plan,
        attribution=run.recipe.attribution,
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.sampling.timeout),
        override={"temperature": config.sampling.temperature, **UNSHAPED},
        provider_roles=tuple(run.provider_roles),
        others=stand_in(config.other_roles),
        seed=config.seed,
        stream=stream,
    )
    how = {"concurrency": config.concurrency, "timeout": config.episode_timeout, **how}
    if run.workers is None:
        responder = answering.responder(run.sampler, run.chat, run.workflow)
        episodes = await rollout(run.workflow, tasks, responder=responder, **how)
        return episodes, responder.scorer_errors, responder.unlisted
    episodes = await run.workers.rollout(tasks, answering=answering, **how)
    return episodes, run.workers.scorer_errors, run.workers.unlisted
