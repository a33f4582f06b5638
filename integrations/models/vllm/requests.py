"""A request and its answer in the terms of vLLM's two interfaces, Python and HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from cotune.errors import RequestRefused, SamplerError
from cotune.sampling.protocol import Completion, SamplingParams, TopTokens

_SHAPE = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""All that shapes the distribution is named: a model's own generation_config would fill in the rest."""


def python_params(n: int, params: SamplingParams) -> Any:
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return VllmParams(
        **_common(n, params),
        logit_bias=dict(params.logit_bias) or None,
        structured_outputs=StructuredOutputsParams(grammar=params.grammar) if params.grammar else None,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


FORBID = -100.0
"""The lowest bias that vLLM's server takes. A token with it has a probability of about exp(-100)."""


def http_params(n: int, params: SamplingParams, forbidden: Iterable[int] = ()) -> dict[str, Any]:
    """The body of a request, under which the token ids `forbidden` are not drawn. Raises RequestRefused for images."""
    if params.images:
        raise RequestRefused(
            "A vLLM server is sent token ids here, and no images.",
            'Let the run start its engines, with engine = "vllm" or "transformers".',
        )
    body = {**_common(n, params), "return_token_ids": True, "return_tokens_as_token_ids": True}
    biases = {str(token): value for token, value in params.logit_bias}
    biases |= {str(token): FORBID for token in forbidden}
    if biases:
        body["logit_bias"] = biases
    if params.grammar:
        body["structured_outputs"] = {"grammar": params.grammar}
    return body


def _common(n: int, params: SamplingParams) -> dict[str, Any]:
    shape = {name: getattr(params, name) for name in _SHAPE}
    shape["top_p"] = shape["top_p"] or 1e-9  # vLLM takes no 0, at which the likeliest token alone is drawn
    ends = {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    more = {**ends, "seed": spread(params.seed), "skip_special_tokens": False}
    return {"n": n, **shape, **more, "logprobs": params.top_logprobs}


def completion(
    ids: Sequence[int], logprobs: Sequence[float], finish_reason: str, top: Sequence[TopTokens] = ()
) -> Completion:
    """Raises SamplerError for a request that vLLM ended otherwise than at its end."""
    if finish_reason not in ("stop", "length"):
        raise SamplerError(f"vLLM ended a request with {finish_reason!r}.", "Read vLLM's log.")
    return Completion(tuple(ids), tuple(logprobs), finish_reason, tuple(top))


def python_completion(output: Any, most: int) -> Completion:
    """One candidate of vLLM's, with the `most` likeliest tokens of each place. Raises SamplerError as `completion`."""
    top = []
    if most:
        places = ([(id, float(told.logprob)) for id, told in place.items()] for place in output.logprobs)
        top = [likeliest(place, most) for place in places]
    drawn = [float(place[id].logprob) for id, place in zip(output.token_ids, output.logprobs, strict=True)]
    return completion(output.token_ids, drawn, output.finish_reason, top)


def spread(seed: int | None) -> int:
    """What vLLM is given as a seed: in [0, 2**62) and far from those of neighbouring seeds, or else random.

    vLLM seeds the candidates of a request with seed, seed + 1, ...: unspread, candidates of the seeds 5 and 6 would be
    the same. And on CPUs, it ignores all seeds of a batch in which one request has none.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 2


_NEVER = -9999.0
"""How vLLM's server writes the log-probability of what cannot be drawn."""


def likeliest(found: Iterable[tuple[int, float]], most: int) -> TopTokens:
    """The `most` likeliest tokens of a place, of those that vLLM gives for it: the sampled one is always among them."""
    ordered = sorted((pair for pair in found if pair[1] > _NEVER), key=lambda pair: -pair[1])
    return tuple(ordered[:most])
