"""Made-up answers: tools are called once, JSON fits its schema, loops are bounded."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.plans import Plan
from cotune.records.structs import Task
from cotune.trainer.before.stub.fitting import Manner
from cotune.trainer.before.stub.stub import StubResponder

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
        },
    }
    for name in ("search", "hand_over")
]


class _Nowhere:
    def write(self, records: Any) -> None: ...


def episode() -> LiveEpisode:
    return LiveEpisode(_Nowhere(), Task(id="t", input=None), workflow="w")


def respond(stub: StubResponder, run: LiveEpisode, role: str = "r", **body: Any) -> Answer:
    call = run.start(CallerContext(role, "test"), {"messages": [{"role": "user", "content": "hi"}], **body})
    return asyncio.run(stub.respond(call))


def called(answer: Answer) -> list[tuple[str, Any]]:
    functions = [tool["function"] for tool in answer.candidates[answer.chosen].tool_calls]
    return [(f["name"], json.loads(f["arguments"])) for f in functions]


def test_each_tool_is_called_once_per_role_and_episode() -> None:
    stub, run = StubResponder(), episode()
    answers = [respond(stub, run, tools=TOOLS) for _ in range(3)]
    assert [called(answer) for answer in answers] == [[("search", {"q": "a"})], [("hand_over", {"q": "a"})], []]
    assert [a.candidates[0].finish_reason for a in answers] == ["tool_calls", "tool_calls", "stop"]
    assert called(respond(stub, run, "other", tools=TOOLS)) == [("search", {"q": "a"})]
    assert called(respond(stub, episode(), tools=TOOLS)) == [("search", {"q": "a"})]


def test_each_variant_begins_with_another_tool() -> None:
    first = [called(respond(StubResponder(variant=n), episode(), tools=TOOLS))[0][0] for n in range(4)]
    assert first == ["search", "hand_over", "hand_over", "search"], "not in step with a boolean"


@pytest.mark.parametrize("choice", ["required", "any"])
def test_a_demanded_call_is_always_made_and_ends_at_the_last_tool(choice: str) -> None:
    stub, run = StubResponder(), episode()
    names = [called(respond(stub, run, tools=TOOLS, tool_choice=choice))[0][0] for _ in range(4)]
    assert names == ["search", "hand_over", "hand_over", "hand_over"]


def test_a_named_tool_is_called_and_none_is_respected() -> None:
    named = {"type": "function", "function": {"name": "hand_over"}}
    stub, run = StubResponder(), episode()
    assert called(respond(stub, run, tools=TOOLS, tool_choice=named)) == [("hand_over", {"q": "a"})]
    assert called(respond(stub, run, tools=TOOLS, tool_choice="none")) == []


def test_tools_can_be_left_alone() -> None:
    assert called(respond(StubResponder(manner=Manner(call_tools=False)), episode(), tools=TOOLS)) == []


def test_hosted_tools_are_not_called() -> None:
    assert called(respond(StubResponder(), episode(), tools=[{"type": "web_search"}])) == []


def test_json_is_answered_by_its_schema() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = respond(StubResponder(answers=["text"]), episode(), response_format=asked)
    assert answer.candidates[0].text == '{"n":1}'
    assert respond(StubResponder(), episode(), response_format={"type": "json_object"}).candidates[0].text == "{}"


def test_a_tree_draws_k_different_candidates_and_the_scorer_chooses() -> None:
    def longest(candidate: Any, call: Any, task: Any) -> float:
        return float(candidate.index == 2)

    stub = StubResponder(plan=Plan(k=3), scorers={"r": longest})
    answer = respond(stub, episode())
    assert [c.text for c in answer.candidates] == ["stub answer 1", "stub answer 2", "stub answer 3"]
    assert answer.chosen == 2 and answer.rewards[2] == {"local": 1.0}
    assert len({c.token_ids for c in answer.candidates}) == 3


def test_provider_roles_get_one_answer_without_policy() -> None:
    stub = StubResponder(plan=Plan(k=3), scorers={"r": lambda c, call, task: 1.0}, provider_roles=["r"])
    answer = respond(stub, episode())
    assert (answer.policy, answer.prompt_ids, len(answer.candidates)) == (None, (), 1)
