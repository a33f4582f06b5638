"""What a request asks of the sampler, read strictly."""

import pytest

from cotune.errors import RequestRefused
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.request_params import fixes_form, request_params, template_options, tools_shown

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}


def test_every_parameter_is_taken():
    body = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": -1, "frequency_penalty": 0.5,
        "repetition_penalty": 1.1, "logit_bias": {"7": -100, "3": 2.5}, "stop": ["a", ""], "max_tokens": 5, "seed": 9,
    }  # fmt: skip
    assert request_params(body, SamplingParams()) == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        min_p=0.1,
        presence_penalty=-1.0,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias=((3, 2.5), (7, -100.0)),
        stop=("a",),
        max_tokens=5,
        seed=9,
    )


def test_more_than_any_vocabulary_is_all_of_it():
    assert request_params({"top_k": 2**70}, SamplingParams()).top_k == 2**31 - 1


@pytest.mark.parametrize(
    "body",
    [
        {"presence_penalty": 2.5},
        {"frequency_penalty": "much"},
        {"min_p": -0.1},
        {"top_p": float("nan")},
        {"repetition_penalty": 0},
        {"logit_bias": {"word": 1}},
        {"logit_bias": {"5": 101}},
        {"logit_bias": [5]},
        {"top_k": 1.5},
        {"seed": True},
        {"max_tokens": "ten"},
        {"stop": 5},
        {"stop": ["a", 1]},
        {"stop": {"a": 1}},
    ],
)
def test_what_no_sampler_takes_is_refused_by_name(body):
    with pytest.raises(RequestRefused, match=next(iter(body))):
        request_params(body, SamplingParams())


@pytest.mark.parametrize(
    ("body", "tools", "fixed"),
    [
        ({}, None, False),
        ({"response_format": {"type": "text"}}, [TOOL], False),
        ({"response_format": {"type": "json_object"}}, None, True),
        ({"tool_choice": "auto", "parallel_tool_calls": True}, [TOOL], False),
        ({"tool_choice": "required"}, [TOOL], True),
        ({"tool_choice": "required"}, None, True),
        ({"tool_choice": "none"}, [TOOL], True),
        ({"tool_choice": "none"}, None, False),
        ({"parallel_tool_calls": False}, [TOOL], True),
        ({"parallel_tool_calls": False}, None, False),
        ({}, [TOOL, STRICT], True),
        ({"guided_choice": ["a", "b"]}, None, True),
    ],
)
def test_a_grammar_is_made_only_where_the_form_is_fixed(body, tools, fixed):
    assert fixes_form(body, tools) is fixed


def test_tools_are_hidden_where_they_may_not_be_called():
    assert tools_shown({"tool_choice": "none"}, [TOOL]) is None
    assert tools_shown({"tool_choice": "required"}, [TOOL]) == [TOOL]


def test_template_options():
    assert template_options({"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "low"}) == {
        "enable_thinking": False,
        "reasoning_effort": "low",
    }
    assert template_options({"reasoning": {"effort": "high", "summary": None}}) == {"reasoning_effort": "high"}
    assert template_options({}) == template_options({"reasoning_effort": ""}) == {}
