"""Requests and answers in the forms of vLLM's two interfaces, Python and HTTP."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from cotune.errors import RequestRefused, SamplerError
from cotune.sampling.protocol import Completion, SamplingParams, TopTokens

_DISTRIBUTION = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
"""All parameters that shape the distribution. vLLM would take a missing one from the model's generation_config."""


def python_params(n: int, params: SamplingParams) -> Any:
    """The sampling parameters in the form of vLLM's Python API. Only final outputs are returned, and text only if there
    are stop strings to find in it.
    """
    from vllm import SamplingParams as VllmParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    return VllmParams(
        **_common_params(n, params),
        logit_bias=dict(params.logit_bias) or None,
        structured_outputs=StructuredOutputsParams(grammar=params.grammar) if params.grammar else None,
        detokenize=bool(params.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


FORBID = -100.0
"""The lowest bias that vLLM's server accepts. It gives a token a probability of about exp(-100)."""


def http_params(n: int, params: SamplingParams, forbidden: Iterable[int] = ()) -> dict[str, Any]:
    """The body of a request that never draws the token ids `forbidden`. Raises RequestRefused for images."""
    if params.images:
        raise RequestRefused(
            "A vLLM server is sent token ids here, and no images.",
            'Let the run start its engines, with engine = "vllm" or "transformers".',
        )
    body = {**_common_params(n, params), "return_token_ids": True, "return_tokens_as_token_ids": True}
    biases = {str(token): value for token, value in params.logit_bias}
    biases |= {str(token): FORBID for token in forbidden}
    if biases:
        body["logit_bias"] = biases
    if params.grammar:
        body["structured_outputs"] = {"grammar": params.grammar}
    return body


def _common_params(n: int, params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters that vLLM's Python API and its server share."""
    distribution = {name: getattr(params, name) for name in _DISTRIBUTION}
    if not distribution["top_p"]:
        distribution["top_p"] = 1e-9  # 0 allows only the likeliest token, but vLLM refuses it
    return {
        "n": n,
        **distribution,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "seed": spread_seed(params.seed),
        "skip_special_tokens": False,  # a reply is read by its special tokens
        "logprobs": params.top_logprobs,
    }


def completion(
    ids: Sequence[int], logprobs: Sequence[float], finish_reason: str, top: Sequence[TopTokens] = ()
) -> Completion:
    """Make a completion. Raises SamplerError if vLLM has not finished the request."""
    if finish_reason not in ("stop", "length"):
        raise SamplerError(f"vLLM ended a request with {finish_reason!r}.", "Read vLLM's log.")
    return Completion(tuple(ids), tuple(logprobs), finish_reason, tuple(top))


def python_completion(output: Any, most: int) -> Completion:
    """One candidate from vLLM's output, with the `most` likeliest tokens at each position. Raises the errors of
    `completion`.
    """
    logprobs: list[float] = []
    top: list[TopTokens] = []
    for drawn_id, entries in zip(output.token_ids, output.logprobs, strict=True):
        logprobs.append(float(entries[drawn_id].logprob))
        if most:
            pairs = [(id, float(entry.logprob)) for id, entry in entries.items()]
            top.append(likeliest(pairs, most))
    return completion(output.token_ids, logprobs, output.finish_reason, top)


def spread_seed(seed: int | None) -> int:
    """Map a seed to a number in [0, 2**62) that is far from the numbers of neighbouring seeds; None to a random one.

    vLLM seeds the candidates of a request with seed, seed + 1, ..., so requests with the seeds 5 and 6 would have equal
    candidates. A random number replaces None because vLLM on CPUs ignores all seeds of a batch if one is missing.
    """
    if seed is None:
        seed = int.from_bytes(os.urandom(8), "little")
    z = (seed + 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    return (z ^ (z >> 31)) >> 2


_NEVER = -9999.0
"""The log-probability that vLLM's server gives for a token that cannot be drawn."""


def likeliest(pairs: Iterable[tuple[int, float]], most: int) -> TopTokens:
    """The `most` likeliest tokens of one place. vLLM lists the sampled token too, even if it is less likely."""
    possible = [pair for pair in pairs if pair[1] > _NEVER]
    return tuple(sorted(possible, key=lambda pair: -pair[1])[:most])
