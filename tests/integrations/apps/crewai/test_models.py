"""CrewAI's models: on the OpenAI SDK, of a provider's own, streaming, with tools, and when they fail."""

from __future__ import annotations

import asyncio
import json
import os

os.environ.update(CREWAI_DISABLE_TELEMETRY="true", CREWAI_TRACING_ENABLED="false", CREWAI_TESTING="true")
os.environ.setdefault("CREWAI_STORAGE_DIR", "cotune-tests")

import openai
import pytest
from crewai import LLM, Agent, BaseLLM, Crew, Task
from crewai.agents.agent_builder.base_agent import BaseAgent
from crewai.flow.runtime import Flow
from crewai.lite_agent import LiteAgent
from crewai.llms.providers.openai.completion import OpenAICompletion
from crewai.memory.unified_memory import Memory
from crewai.tools import tool
from pydantic import BaseModel

from cotune.errors import SamplerError, WorkflowError
from cotune.integrations.apps.activation import activate
from cotune.records.structs import Message
from tests.integrations.provider import Provider, completion, event, json_reply, said
from tests.integrations.recorded import POLICY, Recorded, answer, asks, tool_call

activate()
WAYS = ("kickoff", "akickoff")


class Verdict(BaseModel):
    score: int


class Own(BaseLLM):
    """A provider with a client of its own. Says `own <last message>`; fails on "fail"."""

    def supports_function_calling(self) -> bool:
        return True

    def call(self, messages, tools=None, callbacks=None, available_functions=None, from_task=None, *more, **options):
        last = messages if isinstance(messages, str) else messages[-1]["content"]
        if "fail" in last:
            raise ConnectionError("gone")
        return f"own {len(last) > 0}"

    async def acall(self, messages, *more, **options):
        await asyncio.sleep(0)
        return self.call(messages, *more, **options)


class Router(Own):
    """Hands on to another model, and does not say for whom."""

    def call(self, messages, *more, **options):
        return Own(model="inner").call(messages)


class Wired(Own):
    """Goes over the OpenAI SDK, in a class that nobody knows."""

    def call(self, messages, *more, **options):
        with openai.OpenAI(max_retries=0) as client:
            body = [{"role": "user", "content": "wired"}]
            return client.chat.completions.create(model="w", messages=body).choices[0].message.content


@tool("look")
def look(q: str) -> str:
    """Look something up."""
    return f"found {q}"


def sdk(**options) -> LLM:
    return LLM(**{"model": "openai/gpt-4o-mini", "api_key": "none", "max_retries": 0, **options})


def crew(llm: BaseLLM, description: str = "do", **options) -> Crew:
    fields = {k: options.pop(k) for k in ("tools", "max_retry_limit") if k in options}
    by = Agent(role="Worker", goal="g", backstory="b", llm=llm, **fields)
    return Crew(agents=[by], tasks=[Task(description=description, expected_output="e", agent=by, **options)])


def running(made: Crew, way: str = "kickoff", check=lambda out: 1):
    """A workflow that runs the crew once and returns what `check` makes of its output."""
    if way == "kickoff":
        return lambda _: check(made.kickoff())

    async def run(_):
        return check(await made.akickoff())

    return run


def raw(out) -> int:
    return len(out.raw)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
def test_the_provider_answers_and_all_is_recorded(provider: Provider, record: Recorded, way: str, stream: bool) -> None:
    made = crew(sdk(base_url=provider.url, stream=stream, temperature=0.5))
    assert record(running(made, way, raw)).rewards["team"] > 4
    (call,) = record.calls
    assert (call.role, call.status, call.policy, call.streamed) == ("Worker", "ok", None, stream)
    assert call.model == "gpt-4o-mini" and call.params["temperature"] == 0.5
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert [bodies[i] for i in call.messages] == provider.requests[0]["messages"]
    assert call.candidates[0].text.startswith("re: ")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.usefixtures("nowhere")
def test_one_of_several_candidates_goes_on(record: Recorded, way: str, stream: bool) -> None:
    outs = []
    made = crew(sdk(base_url="http://127.0.0.1:9/v1", stream=stream))
    record(running(made, way, lambda out: outs.append(out.raw) or 1), lambda call: answer("a", "b", "c", chosen=1))
    assert outs == ["b"]
    (call,) = record.calls
    assert [c.text for c in call.candidates] == ["a", "b", "c"] and call.chosen == 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [OpenAICompletion, Own])
@pytest.mark.usefixtures("nowhere")
def test_tools_are_called_as_the_policy_says(record: Recorded, way: str, cls: type[BaseLLM]) -> None:
    seen = []

    def reply(call):
        seen.append([(m["role"], m.get("content")) for m in call.messages[2:]])
        return "done" if call.turn else asks(tool_call("look", {"q": "x"}), tool_call("look", {"q": "y"}, "call_2"))

    llm = cls(model="gpt-4o-mini", api_key="none", base_url="http://127.0.0.1:9/v1")
    record(running(crew(llm, tools=[look]), way, lambda out: out.raw == "done"), reply)
    assert record.roles == ["Worker"] * 2
    assert seen[1][:3] == [("assistant", None), ("tool", "found x"), ("tool", "found y")]
    assert record.calls[1].parents == (record.calls[0].id,)
    assert record.calls[0].tools is not None


@pytest.mark.usefixtures("nowhere")
def test_a_model_that_runs_tools_itself_is_answered_with_their_result(record: Recorded) -> None:
    inner = crew(Own(model="own"))

    def consult(q: str) -> str:
        return f"{q}: {inner.kickoff().raw}"

    def run(_):
        schema = {"type": "function", "function": {"name": "consult", "parameters": {"type": "object"}}}
        got = [
            model.call("hello", tools=[schema], available_functions={"consult": consult})
            for model in (Own(model="own"), sdk(base_url="http://127.0.0.1:9/v1"))
        ]
        assert got == ["x: inner says", "x: inner says"]
        return 1

    wants = asks(tool_call("consult", {"q": "x"}))
    record(run, lambda call: wants if call.role == "app" else "inner says")
    assert record.roles == ["app", "Worker", "app", "Worker"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Own, Router])
def test_other_models_are_recorded_once(record: Recorded, way: str, cls: type[BaseLLM]) -> None:
    made = crew(cls(model="m", temperature=0.2, stop=["END"]))
    assert record(running(made, way, raw)).rewards == {"team": 8.0}
    (call,) = record.calls
    assert (call.role, call.status, call.policy, call.model) == ("Worker", "ok", None, "m")
    assert call.params["temperature"] == 0.2 and "END" in call.params["stop"]
    assert call.candidates[0].message == {"role": "assistant", "content": "own True"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cls", [Own, Router, Wired])
@pytest.mark.usefixtures("nowhere")
def test_other_models_are_answered_once(record: Recorded, way: str, cls: type[BaseLLM]) -> None:
    made = crew(cls(model="m"))
    assert record(running(made, way, raw), lambda call: "from the policy").rewards == {"team": 15.0}
    assert [(call.role, call.policy) for call in record.calls] == [("Worker", POLICY)]


def test_what_another_class_sends_over_the_sdk_is_recorded_as_sent(provider: Provider, record: Recorded) -> None:
    record(running(crew(Wired(model="m"))))
    (call,) = record.calls
    assert (call.role, call.model, call.candidates[0].text) == ("Worker", "w", "re: wired")


@pytest.mark.usefixtures("nowhere")
def test_a_parsed_object_is_what_another_model_returns(record: Recorded) -> None:
    def run(_):
        assert Own(model="m").call("judge", response_model=Verdict) == Verdict(score=4)
        return 1

    record(run, lambda call: '{"score": 4}')
    assert record.calls[0].params["response_format"]["json_schema"]["name"] == "Verdict"


def test_calls_for_tools_of_another_model_are_recorded(record: Recorded) -> None:
    class Calling(Own):
        def call(self, messages, *more, **options):
            return [{"name": "look", "input": {"q": "x"}, "id": "t1"}]

    def run(_):
        Calling(model="m").call("hello")
        return 1

    record(run)
    assert record.calls[0].candidates[0].message["tool_calls"] == [tool_call("look", {"q": "x"}, "t1")]


def test_outside_an_episode_nothing_changes(provider: Provider) -> None:
    assert crew(sdk(base_url=provider.url)).kickoff().raw.startswith("re: ")
    assert crew(Own(model="m")).kickoff().raw == "own True"
    with pytest.raises(ConnectionError, match="gone"):
        Own(model="m").call("fail")


@pytest.mark.parametrize("way", WAYS)
def test_a_failing_model_raises_what_it_raises_and_is_counted(record: Recorded, way: str) -> None:
    outcome = record.any(running(crew(Own(model="m"), "fail", max_retry_limit=1), way))
    assert isinstance(outcome.error, WorkflowError) and isinstance(outcome.error.__cause__, ConnectionError)
    assert record.statuses == ["error"] * 2 and outcome.live.failures == {"error": 2}
    assert record.calls[0].error == "ConnectionError: gone"


def test_a_failure_that_the_application_swallows_is_still_counted(provider: Provider, record: Recorded) -> None:
    provider.reply = lambda body, number: json_reply({"error": {"message": "busy"}}, 500) if number else said(body)
    llm = sdk(base_url=provider.url)

    def run(_):
        crew(llm).kickoff()
        with pytest.raises(openai.InternalServerError):
            crew(llm, max_retry_limit=0).kickoff()
        return 1

    outcome = record(run)
    assert record.statuses == ["ok", "error"] and outcome.live.failures == {"error": 1}


def test_a_time_out_and_retries_of_the_sdk(
    provider: Provider, record: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply(body, number):
        if number == 0:
            return json_reply({"error": {"message": "busy"}}, 500)
        return said(body) if number == 1 else (200, "application/json", [Provider.HANG])

    provider.reply = reply
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0)
    retrying = sdk(base_url=provider.url, max_retries=1)
    hanging = sdk(base_url=provider.url, timeout=0.05)

    def run(_):
        retrying.call("hello")
        with pytest.raises(Exception, match=r"timed out|connect"):
            hanging.call("hello")
        return 1

    record(run)
    assert record.statuses == ["ok", "timeout"]
    assert ["500" in attempt for attempt in record.calls[0].attempts] == [True]


def test_nothing_returned_is_recorded_as_malformed(record: Recorded) -> None:
    class Silent(Own):
        def call(self, messages, *more, **options):
            return None

    def run(_):
        assert Silent(model="m").call("hello") is None
        return 1

    record(run)
    assert record.statuses == ["malformed"]


@pytest.mark.usefixtures("nowhere")
def test_a_sampler_that_fails_is_an_error_of_the_call(record: Recorded) -> None:
    def refuse(call):
        raise SamplerError("no policy", "give it one")

    outcome = record.any(running(crew(Own(model="m"), max_retry_limit=0)), refuse)
    assert outcome.error is not None and "no policy" in str(outcome.error)
    assert record.statuses == ["error"]


def test_a_model_that_answers_without_a_request_is_counted(record: Recorded) -> None:
    class Canned(OpenAICompletion):
        def call(self, messages, *more, **options):
            return "canned"

    outcome = record(running(crew(Canned(model="gpt-4o-mini", api_key="none"))))
    assert record.calls == [] and outcome.live.warnings == {"unseen_call": 1}


def test_the_responses_interface_is_recorded(provider: Provider, record: Recorded) -> None:
    output = [{"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": []}]
    output[0]["content"] = [{"type": "output_text", "text": "hi", "annotations": []}]
    body = {"id": "r1", "object": "response", "created_at": 1, "model": "m", "output": output, "status": "completed"}
    provider.reply = lambda *_: json_reply(
        {**body, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "error": None}
    )
    assert record(running(crew(sdk(base_url=provider.url, api="responses")), check=raw)).rewards == {"team": 2.0}
    assert [(c.role, c.status, c.candidates[0].text) for c in record.calls] == [("Worker", "ok", "hi")]


def test_tools_streamed_by_the_provider_are_recorded(provider: Provider, record: Recorded) -> None:
    def reply(body, number):
        if number:
            return said(body)
        first = {"index": 0, "id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"q":'}}
        rest = {"index": 0, "function": {"arguments": '"x"}'}}
        chunks = [event({"role": "assistant", "tool_calls": [first]}), event({"tool_calls": [rest]})]
        return 200, "text/event-stream", [*chunks, event({}, "tool_calls"), b"data: [DONE]\n\n"]

    provider.reply = reply
    record(running(crew(sdk(base_url=provider.url, stream=True), tools=[look])))
    function = record.calls[0].candidates[0].message["tool_calls"][0]["function"]
    assert (function["name"], json.loads(function["arguments"])) == ("look", {"q": "x"})
    assert len(record.calls) == len(provider.requests) == 2


def test_prompts_go_to_no_provider_to_be_counted_where_policies_answer(
    record: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def count(self, **params):
        asked.append(params)
        raise ConnectionError("unreachable")

    monkeypatch.setattr("openai.resources.responses.input_tokens.InputTokens.count", count)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    record(running(crew(sdk())), lambda call: "ok")
    assert asked == []
    assert sdk().get_input_tokens_count("four five") == 3 and len(asked) == 1


def test_what_is_hooked_exists() -> None:
    """CrewAI's own names that the integration relies on; one that is gone would lose calls or roles."""
    hooked = {
        OpenAICompletion: ("call", "acall", "get_input_tokens_count"),
        BaseLLM: (
            "get_input_tokens_count",
            "call",
            "acall",
            "_handle_tool_execution",
            "summarize_messages",
            "_validate_structured_output",
        ),
        Agent: ("execute_task", "aexecute_task", "kickoff", "kickoff_async", "akickoff"),
        LiteAgent: ("kickoff", "kickoff_async", "akickoff"),
        Task: ("_execute_core", "_aexecute_core"),
        Flow: ("_execute_method",),
        BaseAgent: ("copy",),
        Memory: ("remember", "remember_many", "extract_memories", "recall"),
    }
    missing = [f"{c.__name__}.{n}" for c, names in hooked.items() for n in names if n not in c.__dict__]
    assert missing == [], "this version of crewai has renamed what cotune hooks"
    plain = [
        f"{c.__name__}.{n}"
        for c, names in hooked.items()
        for n in names
        if n not in ("_validate_structured_output", "call", "acall") and not hasattr(c.__dict__[n], "__wrapped__")
    ]
    assert plain == [], "not hooked"
    assert {"_original_role"} <= set(BaseAgent.__private_attributes__)
    assert {"_inputs"} <= set(Crew.__private_attributes__) and {"_state"} <= set(Flow.__private_attributes__)


def test_what_the_memory_asks_is_its_own(record: Recorded, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setenv("CREWAI_STORAGE_DIR", str(tmp_path))
    memory = Memory(llm=Own(model="m"), storage=str(tmp_path / "memory"), embedder=lambda texts: [[0.0] for _ in texts])
    record(lambda _: len(memory.extract_memories("The sky is blue.")), lambda call: '{"memories": ["blue sky"]}')
    assert record.roles == ["memory"]


def test_completion_of_the_provider_is_left_as_it_is(provider: Provider, record: Recorded) -> None:
    provider.reply = lambda *_: json_reply(completion({"role": "assistant", "content": "exact"}, model="other"))
    out = []
    record(running(crew(sdk(base_url=provider.url)), check=lambda o: out.append(o.raw) or 1))
    assert out == ["exact"] and record.calls[0].usage.prompt_tokens == 7


def test_a_request_that_cannot_be_read_goes_its_way_and_is_counted(
    record: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*args):
        raise TypeError("a part that nobody knows")

    monkeypatch.setattr("cotune.integrations.apps.crewai.models.request_of", unreadable)
    outcome = record(lambda task: Own(model="m").call("hello") == "own True")
    assert outcome.rewards == {"team": 1.0}
    assert (record.calls, outcome.live.warnings) == ([], {"unread_call": 1})
