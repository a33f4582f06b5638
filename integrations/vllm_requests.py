"""A request and its answer in the terms of vLLM's Python interface."""

from __future__ import annotations

from typing import Any

from cotune.errors import SamplerError
from cotune.integrations.loop_sampler import spread
from cotune.sampler import Completion, SamplingParams


def vllm_params(n: int, params: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind

    return VllmParams(
        n=n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        seed=spread(params.seed),
        stop=list(params.stop) or None,
        max_tokens=params.max_tokens,
        logprobs=0,
        detokenize=bool(params.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: Any) -> Completion:
    if output.finish_reason not in ("stop", "length"):
        raise SamplerError(f"vLLM ended a request with {output.finish_reason!r}.", "Read vLLM's log.")
    ids = tuple(output.token_ids)
    logprobs = tuple(float(at[id].logprob) for id, at in zip(ids, output.logprobs, strict=True))
    return Completion(ids, logprobs, output.finish_reason)
