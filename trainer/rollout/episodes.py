"""Episodes of a run, answered by the policies that it serves now."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.policies import stand_in
from cotune.recording.records import Episode, PolicyRef
from cotune.recording.rollout import EpisodeBatch
from cotune.sampling.plans import Plan
from cotune.sampling.protocol import UNSHAPED, SamplingParams
from cotune.trainer.rollout.protocol import ResponderConfig
from cotune.trainer.run import Run


async def run_episodes(
    run: Run,
    batch: EpisodeBatch,
    *,
    plan: Plan | None,
    stream: str = "",
    policies: Mapping[str, PolicyRef] | None = None,
) -> list[Episode]:
    """Run a batch under the run's own sampling, concurrency and time-out.

    Without a plan every call is one sample. `policies` answer by role; without them those that are served now. `stream`
    names the random numbers, where they are not to be the phase's.
    """
    config = run.config
    responder = ResponderConfig(
        policies=dict(run.served() if policies is None else policies),
        plan=plan,
        attribution=run.recipe.attribution,
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.sampling.timeout),
        override={"temperature": config.sampling.temperature, **UNSHAPED},
        provider_roles=tuple(run.provider_roles),
        others=stand_in(config.other_roles),
        seed=config.seed,
        stream=stream,
    )
    batch = msgspec.structs.replace(batch, concurrency=config.concurrency, timeout=config.episode_timeout)
    return await run.runner.run(batch, responder)
