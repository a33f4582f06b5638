"""The strict reading of a request in OpenAI form: sampling parameters, and the form of the reply."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.errors import RequestRefused
from cotune.records.structs import CallRecord
from cotune.sampling.protocol import MOST_TOP_LOGPROBS, UNSHAPED, SamplingParams

_NUMBERS = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-3, 100.0),
}
_BIAS = 100.0
_MOST_TOP_K = 2**31 - 1
"""Larger than every vocabulary."""
RESTRICTIONS = ("allowed_token_ids", "bad_words", "min_tokens")
"""Fields that restrict the tokens of a reply. A separate grammar enforces each."""
CONTINUE = "continue_final_message"
"""The field with which the reply continues the last message, an assistant's."""
_REFUSED: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "chat_template": None,
    "documents": None,
    "echo": False,
    "ebnf": None,
    "grammar": None,
    "include_stop_str_in_output": False,
    "json_schema": None,
    "length_penalty": 1.0,
    "mirostat": 0,
    "no_repeat_ngram_size": 0,
    "prompt_logprobs": None,
    "regex": None,
    "repeat_penalty": 1.0,
    "suffix": None,
    "tfs_z": 1.0,
    "top_a": 0.0,
    "truncate_prompt_tokens": None,
    "typical_p": 1.0,
    "use_beam_search": False,
    "xtc_probability": 0.0,
}
"""Fields of other servers that change the meaning of a reply and that no sampler here supports, each with its neutral
value."""
_KNOWN = frozenset({
    *_NUMBERS, *RESTRICTIONS, *_REFUSED, CONTINUE,
    # Sampling and the form of a reply.
    "top_k", "seed", "max_tokens", "max_completion_tokens", "max_output_tokens", "n", "stop", "stop_token_ids",
    "ignore_eos", "logit_bias", "logprobs", "top_logprobs", "response_format", "text", "tool_choice", "tools",
    "parallel_tool_calls", "chat_template_kwargs", "reasoning_effort", "reasoning", "thinking", "return_token_ids",
    # Refused by other code, with a reason.
    "guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs", "modalities", "audio",
    "web_search_options", "functions", "function_call", "previous_response_id", "conversation", "background", "prompt",
    # About the request and its transport.
    "model", "messages", "input", "instructions", "api", "stream", "stream_options", "include", "metadata", "user",
    "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "prediction",
    "truncation", "max_tool_calls", "priority", "request_id", "cache_salt", "return_tokens_as_token_ids",
    "skip_special_tokens", "spaces_between_special_tokens", "name", "role", "key",
})  # fmt: skip
GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
"""Fields for the form of a reply that only vLLM has."""


def request_params(
    body: Mapping[str, Any], defaults: SamplingParams, override: Mapping[str, Any] | None = None
) -> SamplingParams:
    """Sampling parameters of a request in OpenAI form. The application's values replace `defaults`, and `override`
    replaces the application's values.

    Raises RequestRefused for an invalid value, with the allowed range.
    """
    requested: dict[str, Any] = {}
    for name, (low, high) in _NUMBERS.items():
        if body.get(name) is not None:
            requested[name] = _number(name, body[name], low, high)
    for name in ("top_k", "seed"):
        if body.get(name) is not None:
            requested[name] = integer(name, body[name])
    if "top_k" in requested:
        requested["top_k"] = min(max(requested["top_k"], 0), _MOST_TOP_K)
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    if limit is not None:
        requested["max_tokens"] = integer("max_tokens", limit)
    if body.get("stop"):
        requested["stop"] = texts_of("stop", body["stop"])
    if body.get("stop_token_ids"):
        requested["stop_token_ids"] = token_ids("stop_token_ids", body["stop_token_ids"])
    if body.get("logit_bias"):
        requested["logit_bias"] = _bias(body["logit_bias"])
    if body.get("top_logprobs"):
        requested["top_logprobs"] = _top_logprobs(body)
    return msgspec.structs.replace(defaults, **{**requested, **(override or {})})


def check_supported(body: Mapping[str, Any]) -> None:
    """Raise RequestRefused for a field that changes the reply and that no policy supports."""
    for name, neutral_value in _REFUSED.items():
        value = body.get(name)
        is_empty = value is None or value in ([], {}, "")
        if is_empty or value == neutral_value:
            continue
        # A reply that continues the last message begins no new one: then this field is false.
        if name == "add_generation_prompt" and body.get(CONTINUE):
            continue
        raise RequestRefused(
            f"The request has {name} = {str(value)[:80]!r}, which no policy can honour.",
            "Leave it out of the request, or give the role a policy of kind provider.",
        )


def unknown_fields(body: Mapping[str, Any]) -> list[str]:
    """Fields of a request that cotune does not know and that have a value."""
    return [name for name, value in body.items() if name not in _KNOWN and value not in (None, False, "", [], {})]


def continues_reply(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a request asks that its reply continues the last message, by `continue_final_message` or by `prefix` in
    that message.

    Raises RequestRefused if the last message is not a text of the assistant.
    """
    last = messages[-1] if messages else {}
    is_of_assistant = last.get("role") == "assistant"
    is_prefix = is_of_assistant and last.get("prefix")
    if not body.get(CONTINUE) and not is_prefix:
        return False
    if not is_of_assistant or last.get("tool_calls") or not last.get("content"):
        raise RequestRefused(
            "The request asks to continue the last message, which is not a text of the assistant.",
            "End the messages with the beginning of the reply, or leave out continue_final_message.",
        )
    return True


def ends_itself(body: Mapping[str, Any], ends: Sequence[int]) -> bool:
    """Whether the model may end its reply with one of the end tokens `ends`."""
    if body.get("ignore_eos"):
        return False
    allowed = body.get("allowed_token_ids")
    return not allowed or not set(ends).isdisjoint(allowed)


RESPONSE_LOGPROBS = "message.output_text.logprobs"
"""The value of `include` with which a request of the Responses API asks for log-probabilities."""


def asks_logprobs(body: Mapping[str, Any]) -> bool:
    """Whether the request asks for tokens and their log-probabilities."""
    included = body.get("include")
    return bool(body.get("logprobs")) or (isinstance(included, list) and RESPONSE_LOGPROBS in included)


def tools_shown(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> Any:
    """The tools that the prompt shows; None without tools, and if the request forbids their use."""
    if not tools or body.get("tool_choice") == "none":
        return None
    return tools


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables of the request for the chat template: `chat_template_kwargs` and `reasoning_effort`."""
    options = dict(body.get("chat_template_kwargs") or {})
    effort = body.get("reasoning_effort") or None
    reasoning = body.get("reasoning")  # the form of the Responses API
    if effort is None and isinstance(reasoning, Mapping):
        effort = reasoning.get("effort")
    if effort is not None:
        options.setdefault("reasoning_effort", effort)
    return options


def fixes_form(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether the request restricts the form of the reply, so that it is sampled with a grammar."""
    if restrictions(body):
        return True
    return fixes_structure(body, tools)


def restrictions(body: Mapping[str, Any]) -> list[str]:
    """The fields of `RESTRICTIONS` in the request."""
    return [name for name in RESTRICTIONS if body.get(name)]


def fixes_structure(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> bool:
    """Whether the request fixes the structure of its reply: JSON, or calls of tools."""
    if form_type(body) != "text":
        return True
    for name in GUIDED:
        if body.get(name) is not None:
            return True
    tool_choice = body.get("tool_choice") or "auto"
    if not tools:
        return tool_choice not in ("auto", "none")
    has_strict_tool = any(function_of(tool).get("strict") for tool in tools)
    has_one_call_at_most = body.get("parallel_tool_calls") is False
    return tool_choice != "auto" or has_strict_tool or has_one_call_at_most


def function_of(tool: Any) -> Mapping[str, Any]:
    """The function of a tool in OpenAI form; empty for another value."""
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def form_type(body: Mapping[str, Any]) -> str:
    """The type of `response_format`; "text" without one."""
    form = body.get("response_format")
    if not isinstance(form, Mapping):
        return "text"
    return str(form.get("type") or "text")


def sentences_about_ignored(calls: Iterable[CallRecord]) -> list[str]:
    """For each parameter that some calls asked for and that training ignored, a sentence with the number of calls.

    Training samples from the policy's unchanged distribution, so it ignores parameters such as `top_p` (`UNSHAPED`).
    """
    counts: Counter[str] = Counter()
    for call in calls:
        for name, neutral_value in UNSHAPED.items():
            requested = call.params.get(name)
            used = call.sampling.get(name, neutral_value)
            if requested is not None and requested != used:
                counts[name] += 1
    return [f"{count} calls asked for {name} and were sampled without it." for name, count in counts.items()]


def _number(name: str, value: Any, low: float, high: float) -> float:
    """A number in a request. Raises RequestRefused unless it lies between `low` and `high`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not low <= value <= high:
        cause = f"The request has {name} = {value!r}, which is not a number from {low:g} to {high:g}."
        raise RequestRefused(cause, "Change it, or leave it out.")
    return float(value)


def integer(name: str, value: Any) -> int:
    """An integer in a request. Raises RequestRefused."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value % 1:
        raise RequestRefused(f"The request has {name} = {value!r}, which is not an integer.", "For example: 16")
    return int(value)


def token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Ids of tokens in a request. Raises RequestRefused."""
    ids = value if isinstance(value, list | tuple) else [value]
    if not all(type(token) is int and token >= 0 for token in ids):
        cause = f"The request has {name} = {str(value)[:80]!r}, which is not a list of token ids."
        raise RequestRefused(cause, "Pass a list of integers, such as [13, 198].")
    return tuple(ids)


def texts_of(name: str, value: Any) -> tuple[str, ...]:
    """Texts in a request: one, or a list of them. Raises RequestRefused."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        cause = f"The request has {name} = {value!r}, which is neither a text nor a list of texts."
        raise RequestRefused(cause, 'For example: ["END"]')
    return tuple(text for text in texts if text)


def _top_logprobs(body: Mapping[str, Any]) -> int:
    """The number of likeliest tokens to return for each token. Raises RequestRefused if the request does not also ask
    for log-probabilities."""
    top = integer("top_logprobs", body["top_logprobs"])
    if not 0 <= top <= MOST_TOP_LOGPROBS:
        cause = f"The request has top_logprobs = {top}, which is not an integer from 0 to {MOST_TOP_LOGPROBS}."
        raise RequestRefused(cause, "Change it, or leave it out.")
    if asks_logprobs(body):
        return top
    field = '"logprobs": true'
    if body.get("api") == "responses":
        field = f'"include": ["{RESPONSE_LOGPROBS}"]'
    cause = f"The request has top_logprobs = {top} but does not ask for log-probabilities."
    raise RequestRefused(cause, f"Ask for them: {field}.")


def _bias(requested: Any) -> tuple[tuple[int, float], ...]:
    """The field `logit_bias` of a request as pairs of a token id and a number, in the order of the ids. Raises
    RequestRefused if it is not a dict of numbers by token id."""
    try:
        pairs = [(int(token), _number("logit_bias", value, -_BIAS, _BIAS)) for token, value in requested.items()]
    except (AttributeError, TypeError, ValueError) as error:
        cause = f"The request has logit_bias = {str(requested)[:80]}, which does not map token ids to numbers."
        raise RequestRefused(cause, f'Pass numbers from {-_BIAS:g} to {_BIAS:g}, such as {{"198": -100}}.') from error
    return tuple(sorted(pairs))
