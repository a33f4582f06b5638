"""Checks the answers of engines, so that garbage of a broken engine reaches neither an application nor a trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cotune.sampling.protocol import Completion

ROUNDING = 1e-4
"""Highest log-probability that rounding may produce, in nats."""


def validate_completions(
    completions: Sequence[Completion], n: int, max_tokens: int, vocabulary: int | None = None
) -> str | None:
    """Describe the first fault of an answer of `n` candidates with at most `max_tokens` tokens; None if it has none.

    Token ids are checked against the size of the vocabulary, if `vocabulary` is not None.
    """
    try:
        if len(completions) != n:
            return f"{len(completions)} candidates instead of {n}"
        for index, completion in enumerate(completions):
            fault = _completion_fault(completion, max_tokens, vocabulary)
            if fault:
                return f"candidate {index} has {fault}"
    except (TypeError, AttributeError) as error:
        return f"an answer of another form ({error})"
    return None


def _completion_fault(completion: Completion, max_tokens: int, vocabulary: int | None) -> str | None:
    """The fault of a completion, as a phrase for an error; None for a valid one. A faulty engine must not train a
    policy.
    """
    ids = completion.token_ids
    logprobs = completion.logprobs
    if not ids:
        return "no tokens"
    if len(ids) != len(logprobs):
        return f"{len(ids)} tokens and {len(logprobs)} log-probabilities"
    if completion.top and len(completion.top) != len(ids):
        return f"{len(ids)} tokens, and the likeliest ones of {len(completion.top)}"
    if len(ids) > max_tokens:
        return f"{len(ids)} tokens; at most {max_tokens} were asked for"
    if completion.finish_reason not in ("stop", "length"):
        return f"the finish reason {completion.finish_reason!r}"
    if not all(map(math.isfinite, logprobs)):
        return "a log-probability that is not finite"
    if max(logprobs) > ROUNDING:
        return f"the log-probability {max(logprobs):.6g}, which is above 0"
    limit = math.inf if vocabulary is None else vocabulary
    if min(ids) < 0 or max(ids) >= limit:
        outside = next(id for id in ids if not 0 <= id < limit)
        known = "" if vocabulary is None else f", outside the vocabulary of {vocabulary}"
        return f"the token id {outside}{known}"
    return None
