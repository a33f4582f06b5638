"""The OpenAI Agents SDK: roles by agent, in both of its interfaces, streamed and not, with tools and hand-offs."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from agents import (
    Agent,
    Model,
    ModelResponse,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    add_trace_processor,
    function_tool,
)
from agents.tracing import TracingProcessor, set_tracing_disabled
from agents.usage import Usage
from openai.types.responses import ResponseOutputMessage, ResponseOutputText
from pydantic import BaseModel

import cotune
from cotune.integrations.apps.activation import activate
from cotune.recording.recorder import LiveCall
from tests.integrations.apps.openai.test_edited import RESPONSE
from tests.integrations.edits import NEW, OLD, part, prompts, with_edit
from tests.integrations.provider import Provider, json_reply, said
from tests.integrations.recorded import Recorded, answer, asks, tool_call

activate()
QUIET = RunConfig(tracing_disabled=True)


@pytest.fixture(autouse=True)
def untraced() -> Any:
    """Traces go to OpenAI unless that is switched off."""
    set_tracing_disabled(True)
    yield
    set_tracing_disabled(True)


@pytest.fixture(params=["responses", "chat"])
def model(request: pytest.FixtureRequest) -> Any:
    def made(name: str = "m") -> Model:
        kind = OpenAIResponsesModel if request.param == "responses" else OpenAIChatCompletionsModel
        return kind(model=name, openai_client=openai.AsyncOpenAI())

    return made


async def run(agent: Agent, text: str, streamed: bool) -> Any:
    if not streamed:
        return (await Runner.run(agent, text, run_config=QUIET)).final_output
    result = Runner.run_streamed(agent, text, run_config=QUIET)
    seen = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in seen
    return result.final_output


def team(model: Any) -> Agent:
    """A triage agent that hands off to a writer, which asks a researcher as a tool, which looks things up."""

    @function_tool
    def look(topic: str) -> str:
        return f"{topic} is blue"

    @function_tool
    async def think(topic: str) -> str:
        messages = [{"role": "user", "content": topic}]
        reply = await openai.AsyncOpenAI().chat.completions.create(model="m", messages=messages)
        return str(reply.choices[0].message.content)

    researcher = Agent("researcher", instructions="You research.", model=model(), tools=[look, think])
    ask = researcher.as_tool("ask_researcher", "finds facts")
    writer = Agent("writer", instructions="You write.", model=model(), tools=[ask], handoff_description="writes")
    return Agent("triage", instructions="You triage.", model=model(), handoffs=[writer])


def script(call: LiveCall) -> Any:
    """What the agents of `team` answer, by role and turn."""
    steps: dict[tuple[str, int], Any] = {
        ("triage", 0): asks(tool_call("transfer_to_writer", {})),
        ("writer", 0): asks(tool_call("ask_researcher", {"input": "sky"}, "call_2")),
        ("researcher", 0): asks(tool_call("look", {"topic": "sky"}, "a"), tool_call("think", {"topic": "sky"}, "b")),
        ("researcher/think", 0): "hm",
        ("researcher", 1): "the sky is blue",
        ("writer", 1): "Blue.",
    }
    return steps[call.role, call.turn]


ROLES = ["triage", "writer", "researcher", "researcher/think", "researcher", "writer"]


@pytest.mark.parametrize("streamed", [False, True])
def test_handoffs_and_agents_as_tools(nowhere, record: Recorded, model, streamed: bool) -> None:
    async def solve(task):
        assert await run(team(model), "What colour is the sky?", streamed) == "Blue."
        return 1.0

    record(solve, script)
    calls = record.calls
    assert [call.role for call in calls] == ROLES
    assert {call.integration for call in calls} == {"openai-agents"}
    assert [call.streamed for call in calls if call.role == "writer"] == [streamed] * 2
    by_step = {call.step: call.id for call in calls}
    assert by_step[0] in calls[1].parents and by_step[2] in calls[4].parents and by_step[1] in calls[5].parents


@pytest.mark.parametrize("streamed", [False, True])
def test_a_provider_that_answers_is_recorded(provider: Provider, record: Recorded, streamed: bool) -> None:
    async def solve(task):
        agent = Agent("clerk", model=OpenAIChatCompletionsModel(model="m", openai_client=openai.AsyncOpenAI()))
        assert await run(agent, "hello", streamed) == "re: hello"
        return 1.0

    record(solve)
    assert [(call.role, call.status, call.candidates[0].text) for call in record.calls] == [
        ("clerk", "ok", "re: hello")
    ]


def test_what_is_around_an_agent_is_not_its_own(provider: Provider, record: Recorded) -> None:
    model = OpenAIChatCompletionsModel(model="m", openai_client=openai.AsyncOpenAI())

    async def plain() -> None:
        await openai.AsyncOpenAI().chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])

    async def solve(task):
        await plain()
        first, second = (Agent(name, model=model) for name in ("first", "second"))
        await asyncio.gather(run(first, "a", False), run(second, "b", True), plain())
        await plain()
        with cotune.role("judge"):
            await run(first, "c", False)
        return 1.0

    record(solve)
    assert sorted(record.roles) == ["app", "app", "app", "first", "judge", "second"]
    assert record.roles[0] == record.roles[-2] == "app"


def test_an_agent_is_a_workflow(nowhere, record: Recorded, model) -> None:
    class Colour(BaseModel):
        name: str

    agent = Agent("painter", instructions="Name one.", model=model(), output_type=Colour)
    flow = cotune.workflow(
        agent,
        inputs=lambda task: f"colour {task['q']}",
        reward=lambda found, task: float(found.final_output.name == "red"),
    )
    states = []

    @flow.scorer("painter")
    def colourful(candidate, call, task):
        return 1.0

    def reply(call: LiveCall) -> Any:
        states.append(call.state)
        return answer(json.dumps({"name": "red"}))

    outcome = record(flow, reply)
    assert outcome.rewards == {"team": 1.0}
    assert record.roles == ["painter"] and states[0].agent is agent
    assert "response_format" in record.calls[0].params


def test_the_sync_runner_and_settings(nowhere, record: Recorded, model) -> None:
    def solve(task):
        agent = Agent("clerk", model=model(), model_settings=ModelSettings(temperature=0.25, max_tokens=7))
        assert Runner.run_sync(agent, "hello", run_config=QUIET).final_output == "hi"
        return 1.0

    record(solve, lambda call: "hi")
    (call,) = record.calls
    assert (
        call.role,
        call.params["temperature"],
        call.params.get("max_tokens", call.params.get("max_completion_tokens")),
    ) == (
        "clerk",
        0.25,
        7,
    )


def test_its_tracing_is_left_alone(provider: Provider, record: Recorded) -> None:
    spans: list[str] = []

    class Seen(TracingProcessor):
        def on_trace_start(self, trace): ...
        def on_trace_end(self, trace): ...
        def on_span_start(self, span): ...
        def on_span_end(self, span):
            spans.append(span.span_data.type)

        def shutdown(self): ...
        def force_flush(self): ...

    from agents.tracing import set_trace_processors

    set_trace_processors([])
    add_trace_processor(Seen())
    set_tracing_disabled(False)

    async def once(task):
        model = OpenAIChatCompletionsModel(model="m", openai_client=openai.AsyncOpenAI())
        await Runner.run(Agent("clerk", model=model), "hello")
        return 1.0

    asyncio.run(once(None))
    outside, spans[:] = list(spans), []
    record(once)
    assert spans == outside and "generation" in spans
    assert record.roles == ["clerk"]


class Own(Model):
    """A model that asks nobody."""

    async def get_response(self, *args: Any, **options: Any) -> ModelResponse:
        text = ResponseOutputText(annotations=[], text="own", type="output_text")
        message = ResponseOutputMessage(id="1", content=[text], role="assistant", status="completed", type="message")
        return ModelResponse(output=[message], usage=Usage(), response_id=None)

    def stream_response(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError


def test_a_model_that_is_not_seen_is_counted(record: Recorded) -> None:
    agents: list[Any] = []

    async def solve(task):
        agent = Agent("odd", model=Own())
        agents.append(await run(agent, "x", False))
        return 1.0

    outcome = record(solve)
    assert (agents, record.calls, outcome.live.warnings) == (["own"], [], {"unseen_call": 1})


def test_a_failure_reaches_the_application(provider: Provider, record: Recorded) -> None:
    provider.reply = lambda body, number: (400, "application/json", [b'{"error": {"message": "no"}}'])

    async def solve(task):
        model = OpenAIChatCompletionsModel(model="m", openai_client=openai.AsyncOpenAI())
        with pytest.raises(openai.BadRequestError):
            await run(Agent("clerk", model=model), "x", False)
        provider.reply = said
        assert await run(Agent("clerk", model=model), "x", False) == "re: x"
        return 1.0

    record(solve)
    assert [(call.role, call.status) for call in record.calls] == [("clerk", "error"), ("clerk", "ok")]


@pytest.mark.parametrize("streamed", [False, True])
def test_edited_instructions_go_out_and_the_agent_keeps_its_own(provider: Provider, streamed: bool) -> None:
    model = OpenAIChatCompletionsModel(model="m", openai_client=openai.AsyncOpenAI())
    agent, other = (Agent(name, instructions=OLD, model=model) for name in ("clerk", "other"))

    def asked() -> list[bytes]:
        provider.forget()
        for one in (agent, other):
            assert asyncio.run(run(one, "hello", streamed)) == "re: hello"
        return list(provider.raw)

    before = asked()
    with cotune.trace(prompts=prompts(part(OLD, NEW, role="clerk"))) as traced:
        after = asked()
    assert after == [with_edit(before[0]), before[1]]
    assert agent.instructions == OLD
    assert [(call.role, call.messages[0]["content"]) for call in traced.calls] == [("clerk", OLD), ("other", OLD)]


def test_edited_instructions_go_out_in_responses_too(provider: Provider) -> None:
    provider.reply = lambda body, number: json_reply(RESPONSE)
    agent = Agent("clerk", instructions=OLD, model=OpenAIResponsesModel(model="m", openai_client=openai.AsyncOpenAI()))
    assert asyncio.run(run(agent, "hello", False)) == "yes"
    with cotune.trace(prompts=prompts(part(OLD, NEW, role="clerk"))):
        assert asyncio.run(run(agent, "hello", False)) == "yes"
    assert provider.raw[1] == with_edit(provider.raw[0])
