"""Who answers the application's calls in a search: its own provider, or policies of this process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from cotune.episodes.workflows import Workflow
from cotune.recording.recorder import Responder
from cotune.sampling.protocol import SamplingParams, at_temperature
from cotune.trainer.prompting.options import ImproveOptions


@contextlib.asynccontextmanager
async def answering(
    workflow: Workflow, options: ImproveOptions, say: Callable[[str], None]
) -> AsyncIterator[Responder | None]:
    """None for the application's own provider. Raises RunError, AdapterError, ConfigError, SyncError."""
    if options.run is None and options.model is None:
        yield None
        return
    from cotune.integrations.models.folder.folder import locate_model
    from cotune.trainer.evaluation.policies import EvaluatedPolicies, open_evaluated_policies

    if options.run is not None:
        evaluated = open_evaluated_policies(options.run)
        evaluated.check_bases()
    else:
        evaluated = EvaluatedPolicies(str(locate_model(options.model or "")), ())
    async with evaluated.responder(
        say=say,
        scorers=workflow.scorers,
        defaults=SamplingParams(max_tokens=options.max_tokens),
        override=at_temperature(options.temperature),
        seed=options.seed,
        stream="prompts",
    ) as responder:
        yield responder
