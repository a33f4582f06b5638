"""A request and its answer in the terms of vLLM's Python interface."""

from __future__ import annotations

from typing import Any

from cotune.errors import SamplerError
from cotune.integrations.samplers.base import spread
from cotune.sampling.protocol import Completion, SamplingParams


def vllm_params(n: int, params: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return VllmParams(
        n=n,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=dict(params.logit_bias) or None,
        structured_outputs=StructuredOutputsParams(grammar=params.grammar) if params.grammar else None,
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
