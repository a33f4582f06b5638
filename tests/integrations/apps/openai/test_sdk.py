"""Requests of the OpenAI SDK: recorded in passing, answered by a responder, and untouched outside an episode."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import json
import os
import threading
import time

import openai
import pytest
from openai import _base_client

from cotune import role
from cotune.errors import SamplerError, SampleTimeout, WorkflowError
from cotune.integrations.apps.activation import activate
from cotune.recording.context import recording
from cotune.records.structs import Message
from tests.integrations.provider import Provider, completion, event, json_reply
from tests.integrations.recorded import POLICY, Recorded, answer, asks, episode, tool_call

USER = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]


@functools.cache
def client(kind, url, max_retries, timeout):
    """Made once: a client takes longer to make than a call."""
    return kind(base_url=url, api_key="none", max_retries=max_retries, timeout=timeout)


def create(kind, max_retries=0, timeout=20, **options):
    made = client(kind, os.environ["OPENAI_BASE_URL"], max_retries, timeout)
    return made.chat.completions.create(**{"model": "m", "messages": USER, **options})


def ask(**options):
    return create(openai.OpenAI, **options)


async def aask(**options):
    return await create(openai.AsyncOpenAI, **options)


def swallowing(error, **options):
    """A workflow that asks once and survives `error`."""

    def run(task):
        try:
            ask(**options)
        except error as raised:
            return {"team": 0.0, "metrics": {"status": getattr(raised, "status_code", 0) or 0}}
        raise AssertionError(f"no {error}")

    return run


# What upstream must keep for the hook to work


def test_the_sdk_still_has_the_hooked_methods():
    activate()
    remedy = "openai changed its private client: adapt cotune/integrations/apps/openai/sdk.py"
    for client, waits in ((_base_client.SyncAPIClient, False), (_base_client.AsyncAPIClient, True)):
        send = inspect.unwrap(client._send_request)
        assert list(inspect.signature(send).parameters) == ["self", "request", "stream", "kwargs"], remedy
        assert inspect.iscoroutinefunction(send) == waits, remedy
        assert "self._send_request(" in inspect.getsource(inspect.unwrap(client.request)), remedy
        assert "x-should-retry" in inspect.getsource(client._should_retry), remedy


# Answered by a responder


@pytest.mark.usefixtures("nowhere")
def test_answers_a_sync_and_an_async_client(record: Recorded):
    seen = []

    async def run(task):
        seen.append((await aask()).choices[0].message.content)
        seen.append((await asyncio.to_thread(ask)).choices[0].message.content)
        return 1.0

    record(run, lambda call: f"{call.turn}")
    assert seen == ["0", "1"]
    assert [(c.role, c.step, c.turn, c.policy, c.status) for c in record.calls] == [
        ("app", 0, 0, POLICY, "ok"),
        ("app", 1, 1, POLICY, "ok"),
    ]


@pytest.mark.usefixtures("nowhere")
def test_the_completion_has_what_the_application_asked_for(record: Recorded):
    found = []
    three = answer("a", "b", "c", chosen=1)
    asked = {"model": "gpt-x", "n": 2, "logprobs": True, "extra_body": {"return_token_ids": True}}
    record(lambda task: found.append(ask(**asked)) or 1, lambda call: three)
    got = found[0]
    assert got.model == "gpt-x"
    assert [c.message.content for c in got.choices] == ["b", "a"]
    assert [c.index for c in got.choices] == [0, 1]
    assert [item.logprob for item in got.choices[0].logprobs.content] == [-0.5, -0.25]
    assert got.prompt_token_ids == [5, 6, 7]
    assert got.choices[0].token_ids == [11, 2]
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (3, 4, 7)
    assert record.calls[0].chosen == 1
    assert record.calls[0].params == {"n": 2, "logprobs": True, "return_token_ids": True}


@pytest.mark.usefixtures("nowhere")
def test_too_few_candidates_for_n_is_a_bad_request(record: Recorded):
    outcome = record(swallowing(openai.BadRequestError, n=3), lambda call: "only one")
    assert outcome.episode.metrics == {"status": 400.0}
    assert record.statuses == ["error"]


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("way", ["sync", "async"])
def test_streams_text_and_tool_calls(record: Recorded, way: str):
    message = {**asks(tool_call("add", {"x": 1}), tool_call("add", {"y": 2}, "call_2")), "content": "so"}
    chunks = []

    def run_sync(task):
        chunks.extend(ask(stream=True, tools=TOOLS, stream_options={"include_usage": True}))
        return 1

    async def run_async(task):
        stream = await aask(stream=True, tools=TOOLS, stream_options={"include_usage": True})
        chunks.extend([chunk async for chunk in stream])
        return 1

    record(run_sync if way == "sync" else run_async, lambda call: message)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert "".join(d.content or "" for d in deltas) == "so"
    tools = [tool for d in deltas for tool in d.tool_calls or []]
    assert [(t.index, t.id, t.function.name, t.function.arguments) for t in tools] == [
        (0, "call_1", "add", '{"x": 1}'),
        (1, "call_2", "add", '{"y": 2}'),
    ]
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["tool_calls"]
    assert chunks[-1].usage.total_tokens == 5
    assert record.calls[0].streamed
    assert record.calls[0].candidates[0].message == message


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("error", "seen", "status"),
    [
        (SamplerError("The prompt has 9 tokens, the model takes 8.", "Shorten it."), openai.BadRequestError, "error"),
        (SampleTimeout("No answer in 2 seconds."), openai.InternalServerError, "timeout"),
    ],
)
def test_sampler_errors_reach_the_application_once_and_without_retries(record: Recorded, error, seen, status):
    def fail(call):
        raise error

    outcome = record(swallowing(seen, max_retries=5), fail)
    assert [(c.status, c.attempts) for c in record.calls] == [(status, ())]
    assert error.cause in record.calls[0].error
    assert outcome.live.failures == {status: 1}
    assert outcome.error is None


@pytest.mark.usefixtures("nowhere")
def test_a_fault_of_the_responder_fails_the_episode_even_if_the_application_swallows_it(record: Recorded):
    def fail(call):
        raise WorkflowError("The scorer is broken.", "Fix it.")

    outcome = record.any(swallowing(openai.InternalServerError, max_retries=5), fail)
    assert str(outcome.error) == "The scorer is broken. Fix it."
    assert outcome.episode.status == "error"


@pytest.mark.usefixtures("nowhere")
def test_a_sync_client_on_the_loop_does_not_deadlock(record: Recorded):
    async def run(task):
        return len(ask().choices[0].message.content)

    outcome = record(run, lambda call: "four")
    assert outcome.rewards == {"team": 4.0}
    assert outcome.live.warnings == {"blocked_loop": 1}


class SlowToStart(threading.Thread):
    """A thread on a busy machine: whoever starts it waits until it runs."""

    def _bootstrap(self) -> None:
        time.sleep(0.6)
        super()._bootstrap()  # type: ignore[misc]


@pytest.mark.usefixtures("nowhere")
def test_a_loop_that_only_waits_for_a_thread_to_start_is_not_blocked_by_a_call(record: Recorded):
    async def run(task):
        asking = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, ask)
        SlowToStart(target=int).start()  # meanwhile the thread of the call waits for the loop
        return len((await asking).choices[0].message.content)

    outcome = record(run, lambda call: "four")
    assert (outcome.rewards, outcome.live.warnings) == ({"team": 4.0}, {})


@pytest.mark.usefixtures("nowhere")
def test_an_application_with_its_own_loop_in_a_thread(record: Recorded):
    async def two():
        return await asyncio.gather(aask(), aask())

    outcome = record(lambda task: len(asyncio.run(two())), lambda call: "x")
    assert outcome.rewards == {"team": 2.0}
    assert sorted(c.turn for c in record.calls) == [0, 1]


@pytest.mark.usefixtures("nowhere")
def test_calls_that_the_responder_makes_are_not_part_of_the_episode(record: Recorded):
    from cotune.recording.context import current_episode

    inside = []
    record(lambda task: bool(ask()), lambda call: inside.append(current_episode.get()) or "x")
    assert inside == [None]


@pytest.mark.usefixtures("nowhere")
def test_null_fields_and_forced_tools_are_kept_as_they_are(record: Recorded):
    choice = {"type": "function", "function": {"name": "add"}}
    empty = {"stop": None, "max_tokens": None, "response_format": None}
    record(lambda task: bool(ask(tools=TOOLS, tool_choice=choice, **empty)), lambda call: "x")
    assert record.calls[0].params == {"tool_choice": choice, **empty}


# Roles without a framework


@pytest.mark.usefixtures("nowhere")
def test_roles_overlap_in_tasks_and_in_threads(record: Recorded):
    async def worker(name):
        with role(name):
            return (await aask(messages=[{"role": "user", "content": name}])).choices[0].message.content

    def thread(name, out):
        with role(name):
            out.append(ask(messages=[{"role": "user", "content": name}]).choices[0].message.content)

    async def run(task):
        texts = await asyncio.gather(*(worker(name) for name in ("a", "b", "a", "b")))
        out: list[str] = []
        threads = [threading.Thread(target=thread, args=(name, out)) for name in ("c", "d")]
        for one in threads:
            one.start()
        await asyncio.gather(*(asyncio.to_thread(one.join) for one in threads))
        return {"team": 1, "metrics": {"right": texts == ["a", "b", "a", "b"] and sorted(out) == ["c", "d"]}}

    outcome = record(run, lambda call: asyncio.sleep(0, call.role))
    assert outcome.episode.metrics == {"right": 1.0}
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert all(c.role == bodies[c.messages[0]]["content"] for c in record.calls)
    assert sorted((c.role, c.turn) for c in record.calls) == [
        ("a", 0), ("a", 1), ("b", 0), ("b", 1), ("c", 0), ("d", 0),
    ]  # fmt: skip


@pytest.mark.usefixtures("nowhere")
def test_one_role_twice_at_once_finishing_out_of_order(record: Recorded):
    first_may_end = asyncio.Event()

    async def reply(call):
        if call.turn == 0:
            await first_may_end.wait()
        else:
            first_may_end.set()
        return f"turn {call.turn}"

    async def run(task):
        got = await asyncio.gather(aask(), aask())
        assert [g.choices[0].message.content for g in got] == ["turn 0", "turn 1"]
        return 1

    record(run, reply)
    assert [(c.step, c.turn, c.candidates[0].text) for c in record.calls] == [(0, 0, "turn 0"), (1, 1, "turn 1")]
    assert [r.turn for r in record.sink if hasattr(r, "turn")] == [1, 0]


@pytest.mark.usefixtures("nowhere")
def test_stress_overlapping_calls_from_tasks_and_threads():
    """300 calls of 6 episodes at once: none is credited to another role or episode."""

    async def main():
        async def one(name, delay):
            with role(name):
                await asyncio.sleep(0)
                got = await aask(messages=[{"role": "user", "content": f"{name}:{delay}"}])
            return got.choices[0].message.content

        def in_thread(name, delay):
            with role(name):
                return ask(messages=[{"role": "user", "content": f"{name}:{delay}"}]).choices[0].message.content

        def workflow_of(number):
            async def run(task):
                names = [f"e{number}r{i % 5}" for i in range(50)]
                tasks = [
                    one(name, i) if i % 3 else asyncio.to_thread(in_thread, name, i) for i, name in enumerate(names)
                ]
                got = await asyncio.gather(*tasks)
                return sum(
                    text == f"{name}:{i} by {name}" for i, (text, name) in enumerate(zip(got, names, strict=True))
                )

            return run

        async def reply(call):
            for _ in range(call.step % 7):
                await asyncio.sleep(0)
            return f"{call.messages[0]['content']} by {call.role}"

        sinks = [Recorded() for _ in range(6)]
        outcomes = await asyncio.gather(
            *(episode(workflow_of(n), reply, recorded.sink) for n, recorded in enumerate(sinks))
        )
        return outcomes, sinks

    outcomes, sinks = asyncio.run(main())
    assert [o.rewards for o in outcomes] == [{"team": 50.0}] * 6
    for number, recorded in enumerate(sinks):
        assert [c.step for c in recorded.calls] == list(range(50))
        assert {c.role for c in recorded.calls} == {f"e{number}r{i}" for i in range(5)}
        for name in {c.role for c in recorded.calls}:
            assert [c.turn for c in recorded.calls if c.role == name] == list(range(10))


# Passed through to the provider


@pytest.mark.parametrize("way", ["sync", "async"])
def test_records_what_a_provider_answers(provider: Provider, record: Recorded, way: str):
    async def run_async(task):
        return len((await aask(temperature=0.5)).choices[0].message.content)

    outcome = record(run_async if way == "async" else lambda task: len(ask(temperature=0.5).choices[0].message.content))
    (call,) = record.calls
    assert outcome.rewards == {"team": 9.0}
    assert (call.status, call.policy, call.model, call.params) == ("ok", None, "m", {"temperature": 0.5})
    assert call.candidates[0].message == {"role": "assistant", "content": "re: hello"}
    assert (call.usage.prompt_tokens, call.usage.completion_tokens) == (7, 3)
    assert provider.requests == [{"model": "m", "messages": USER, "temperature": 0.5}]


def test_a_responder_that_returns_none_leaves_the_call_to_the_provider(provider: Provider, record: Recorded):
    outcome = record(lambda task: len(ask().choices[0].message.content), lambda call: None)
    assert outcome.rewards == {"team": 9.0}
    assert record.calls[0].candidates[0].text == "re: hello"


def test_token_ids_and_logprobs_of_an_engine(provider: Provider, record: Recorded):
    body = completion({"role": "assistant", "content": "ab"}, prompt_token_ids=[1, 2])
    body["choices"][0] |= {"token_ids": [3, 4], "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]}}
    provider.reply = lambda request, number: json_reply(body)
    record(lambda task: bool(ask()))
    assert record.calls[0].prompt_tokens == 2
    assert record.calls[0].candidates[0].token_ids == (3, 4)
    assert record.calls[0].candidates[0].logprobs == (-0.1, -0.2)


@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_stream_is_passed_on_as_it_comes_and_recorded_at_its_end(provider: Provider, record: Recorded, way: str):
    tool = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x"'}}
    rest = {"index": 0, "function": {"arguments": ": 1}"}}
    provider.reply = lambda body, number: (
        200,
        "text/event-stream",
        [
            event({"role": "assistant", "content": "ab"}, token_ids=[1], logprobs={"content": [{"logprob": -0.5}]}),
            event({"content": "c", "tool_calls": [tool]}, token_ids=[2], logprobs={"content": [{"logprob": -0.25}]}),
            event({"tool_calls": [rest]}),
            event({}, "tool_calls"),
            b"data: [DONE]\n\n",
        ],
    )
    seen_before_the_end = []

    def run_sync(task):
        for number, _ in enumerate(ask(stream=True)):
            if number == 0:
                seen_before_the_end.extend(record.calls)
        return 1

    async def run_async(task):
        number = 0
        async for _ in await aask(stream=True):
            if number == 0:
                seen_before_the_end.extend(record.calls)
            number += 1
        return 1

    record(run_sync if way == "sync" else run_async)
    (call,) = record.calls
    assert seen_before_the_end == []
    assert (call.status, call.streamed) == ("ok", True)
    assert call.candidates[0].message == {**asks(tool_call("add", {"x": 1})), "content": "abc"}
    assert call.candidates[0].token_ids == (1, 2)
    assert call.candidates[0].logprobs == (-0.5, -0.25)


def test_a_stream_that_the_application_leaves_is_cancelled(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: (200, "text/event-stream", [event({"content": "a"}), Provider.HANG])

    def run(task):
        with ask(stream=True) as stream:
            next(iter(stream))
        return 1

    record(run)
    assert record.statuses == ["cancelled"]
    assert "stopped reading" in record.calls[0].error


def test_a_stream_that_breaks_is_an_error(provider: Provider, record: Recorded):
    broken = b'data: {"error": {"message": "overloaded"}}\n\n'
    provider.reply = lambda body, number: (200, "text/event-stream", [event({"content": "a"}), broken])

    def run(task):
        with pytest.raises(openai.APIError):
            list(ask(stream=True))
        return 1

    record(run)
    assert record.statuses == ["malformed"]
    assert "overloaded" in record.calls[0].error


def test_sdk_retries_are_one_call(provider: Provider, record: Recorded, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(openai.OpenAI, "_calculate_retry_timeout", lambda *args: 0.0)
    ok = provider.reply
    busy = [json_reply({"error": "busy"}, status) for status in (429, 500)]
    provider.reply = lambda body, number: busy[number] if number < 2 else ok(body, 0)
    record(lambda task: bool(ask(max_retries=2)))
    assert [h["x-stainless-retry-count"] for h in provider.headers] == ["0", "1", "2"]
    assert [(c.status, c.attempts) for c in record.calls] == [
        ("ok", ("error: HTTP 429 Too Many Requests", "error: HTTP 500 Internal Server Error"))
    ]


def test_a_call_that_is_cancelled_between_attempts_keeps_the_failed_one(
    provider: Provider, record: Recorded, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(openai.AsyncOpenAI, "_calculate_retry_timeout", lambda *args: 60.0)
    provider.reply = lambda body, number: json_reply({"error": "busy"}, 429)

    async def run(task):
        client = openai.AsyncOpenAI(api_key="none", max_retries=2)
        call = asyncio.create_task(
            client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
        )
        while not provider.headers:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        return 1

    record(run)
    assert [(c.status, c.attempts) for c in record.calls] == [("cancelled", ("error: HTTP 429 Too Many Requests",))]


def test_the_applications_own_retry_is_a_new_call(provider: Provider, record: Recorded):
    ok = provider.reply
    provider.reply = lambda body, number: json_reply({"error": "busy"}, 500) if number == 0 else ok(body, 0)

    def run(task):
        for _ in range(2):
            try:
                return bool(ask())
            except openai.InternalServerError:
                continue

    record(run)
    assert [(c.status, c.turn) for c in record.calls] == [("error", 0), ("ok", 1)]


def test_failures_are_recorded_and_look_to_the_application_as_ever(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({"error": {"message": "no such model"}}, 404)
    outcome = record(swallowing(openai.NotFoundError))
    assert record.statuses == ["error"]
    assert "no such model" in record.calls[0].error
    assert outcome.live.failures == {"error": 1}
    assert outcome.episode.status == "ok"


def test_timeouts_are_recorded(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: (200, "application/json", [Provider.HANG])
    record(swallowing(openai.APITimeoutError, timeout=0.1))
    assert record.statuses == ["timeout"]


def test_an_unreachable_provider_is_recorded(record: Recorded, nowhere: None):
    record(swallowing(openai.APIConnectionError))
    assert record.statuses == ["error"]


def test_malformed_bodies_are_recorded_and_passed_on(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: json_reply({"choices": []} if number else {"oops": 1})
    outcome = record(lambda task: (ask().choices is None) + (ask().choices == []))
    assert outcome.rewards == {"team": 2.0}
    assert record.statuses == ["malformed", "malformed"]


def test_a_request_that_is_cancelled(provider: Provider, record: Recorded):
    provider.reply = lambda body, number: (200, "application/json", [Provider.HANG])

    async def run(task):
        request = asyncio.create_task(aask())
        while not provider.requests:
            await asyncio.to_thread(provider.over.wait, 0.01)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        return 1

    record(run)
    assert record.statuses == ["cancelled"]


def test_a_client_made_before_the_run_and_raw_responses(provider: Provider, record: Recorded):
    with openai.OpenAI(max_retries=0) as made:
        raw = made.chat.completions.with_raw_response
        outcome = record(lambda task: raw.create(model="m", messages=USER).status_code, lambda call: "x")
        record(lambda task: raw.create(model="m", messages=USER).elapsed.total_seconds() == 0, lambda call: "x")
        record(lambda task: raw.create(model="m", messages=USER).status_code)
    assert outcome.rewards == {"team": 200.0}
    texts = [(c.policy, c.candidates[0].text) for c in record.calls]
    assert texts == [(POLICY, "x"), (POLICY, "x"), (None, "re: hello")]


def test_other_interfaces_are_passed_through_and_recorded(provider: Provider, record: Recorded):
    output = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "done"}]}]
    response = {"id": "r", "object": "response", "output": output, "usage": {"input_tokens": 4, "output_tokens": 1}}
    provider.reply = lambda body, number: json_reply(response)

    def run(task):
        made = client(openai.OpenAI, provider.url, 0, 20)
        made.responses.create(model="m", input="hi", instructions="be brief")
        return 1

    record(run, lambda call: None)
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    assert [[bodies[m]["content"] for m in c.messages] for c in record.calls] == [["be brief", "hi"]]
    assert [c.candidates[0].text for c in record.calls] == ["done"]
    assert [c.policy for c in record.calls] == [None]


def test_embeddings_and_other_traffic_are_no_calls(provider: Provider, record: Recorded):
    data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
    provider.reply = lambda body, number: json_reply({"object": "list", "data": data, "model": "m"})

    def run(task):
        made = client(openai.OpenAI, provider.url, 0, 20)
        return made.embeddings.create(model="m", input="x", encoding_format="float").data[0].embedding[0]

    assert record(run, lambda call: "never").rewards == {"team": 0.5}
    assert record.calls == []


# Outside an episode, and after it


def test_outside_an_episode_the_application_behaves_as_before(provider: Provider, record: Recorded):
    record(lambda task: bool(ask()), lambda call: "answered")
    assert provider.requests == []
    assert ask().choices[0].message.content == "re: hello"
    assert "".join(c.choices[0].delta.content or "" for c in ask(stream=True)) == "re: hello"
    assert asyncio.run(aask()).choices[0].message.content == "re: hello"
    assert len(record.calls) == 1


@pytest.mark.usefixtures("nowhere")
def test_calls_still_open_at_the_end_are_cancelled_and_later_ones_refused(record: Recorded):
    leftover = []
    refused = []

    async def never(call):
        await asyncio.Event().wait()

    async def run(task):
        leftover.append(asyncio.create_task(aask()))
        await asyncio.sleep(0)
        while not record_open(task):
            await asyncio.sleep(0)
        return 1

    def record_open(task):
        from cotune.recording.context import current_episode

        return current_episode.get()._open

    async def main():
        outcome = await episode(run, never, record.sink)
        await asyncio.wait(leftover)
        with recording(outcome.live):
            try:
                await aask()
            except openai.ConflictError as error:
                refused.append(error)
        return outcome

    outcome = asyncio.run(main())
    assert record.statuses == ["cancelled"]
    assert outcome.live.failures == {"cancelled": 1}
    assert leftover[0].cancelled()
    assert "has ended" in str(refused[0])


def test_late_calls_of_a_traced_application_pass_unrecorded_and_counted(provider: Provider, record: Recorded):
    outcome = record(lambda task: bool(ask()))
    with recording(outcome.live):
        assert ask().choices[0].message.content == "re: hello"
    assert outcome.live.warnings == {"late_call": 1}
    assert len(record.calls) == 1


def test_a_sink_that_fails_costs_records_not_answers(provider: Provider):
    class Full(list):
        def write(self, records):
            raise OSError("disk full")

    outcome = asyncio.run(episode(lambda task: len(ask().choices[0].message.content), None, Full()))
    assert outcome.rewards == {"team": 9.0}
    assert outcome.live.warnings == {"lost": 2}


def test_a_compressed_stream(provider: Provider, record: Recorded):
    import gzip

    raw = event({"content": "zipped"}) + event({}, "stop") + b"data: [DONE]\n\n"
    provider.reply = lambda body, number: (200, "text/event-stream\r\ncontent-encoding: gzip", [gzip.compress(raw)])
    record(lambda task: bool(list(ask(stream=True))))
    assert record.calls[0].candidates[0].text == "zipped"


def test_structured_output(record: Recorded, nowhere: None):
    from pydantic import BaseModel

    class Point(BaseModel):
        x: int

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            return (
                client.chat.completions.parse(model="m", messages=USER, response_format=Point)
                .choices[0]
                .message.parsed.x
            )

    assert record(run, lambda call: json.dumps({"x": 5})).rewards == {"team": 5.0}
    assert record.calls[0].params["response_format"]["type"] == "json_schema"
