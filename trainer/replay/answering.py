"""What answers the calls of a replay that are not in the record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from cotune.adapters.manifest import is_export
from cotune.episodes.workflows import Workflow
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.engines import EngineConfig, open_sampler
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import stand_in
from cotune.sampling.protocol import UNSHAPED, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.checkpoints import newest_checkpoint
from cotune.storage.run_layout import RunLayout, is_run
from cotune.trainer.evaluation.policies import EvaluatedPolicies, open_evaluated_policies


@dataclass(frozen=True)
class Answering:
    """Who answers, in words for people, and how; None for the application's own provider."""

    who: str
    responder: PolicyResponder | None


@contextlib.asynccontextmanager
async def answering(
    run: Path, workflow: Workflow, model: str | None, temperature: float | None, max_tokens: int
) -> AsyncIterator[Answering]:
    """What answers new calls: `model` (a run, an export, or a model, which plays all roles untrained), else the newest
    checkpoint of `run`, else the application's own provider.

    `temperature` replaces what the application asks. Raises RunError, AdapterError, ConfigError, SyncError.
    """
    if model is None and newest_checkpoint(RunLayout(run).checkpoints) is None:
        yield Answering("the application's own provider", None)
        return
    source = model or run
    if model is None or is_export(Path(model)) or is_run(model):
        evaluated, who = open_evaluated_policies(source), f"the policies of {source}"
        _check_base(evaluated)
    else:
        evaluated, who = EvaluatedPolicies(model, ()), f"{model}, untrained"
    base = str(locate_model(evaluated.model))
    async with contextlib.AsyncExitStack() as stack:
        sampler = await open_sampler(EngineConfig(model=base))
        stack.push_async_callback(sampler.aclose)
        await evaluated.publish(sampler)
        responder = PolicyResponder(
            sampler,
            await asyncio.to_thread(ChatTemplate.load, base, evaluated.tool_format),
            evaluated.roles,
            scorers=workflow.scorers,
            defaults=SamplingParams(max_tokens=max_tokens),
            override=None if temperature is None else {"temperature": temperature, **UNSHAPED},
            provider_roles=evaluated.provider_roles,
            others=stand_in(evaluated.other_roles),
            seed=0,
        )
        yield Answering(who, responder)


def _check_base(evaluated: EvaluatedPolicies) -> None:
    try:
        evaluated.check_base()
    except ConfigError as error:
        raise ConfigError(error.field, error.value, error.fault, _PUT_BACK) from None
    except AdapterError as error:
        raise AdapterError(error.cause, _PUT_BACK) from None


_PUT_BACK = (
    "Put the old one back, or name where it is to cotune export RUN --out adapters/ --model, and replay with "
    "--model adapters/."
)
