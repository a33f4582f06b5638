"""Every way to use the plain SDK: clients, helpers and interfaces; and every way to call it from threads and loops."""

from __future__ import annotations

import asyncio
import atexit
import contextvars
import functools
import json
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.pool import ThreadPool

import langchain_openai
import openai
import pytest
from openai import _base_client
from pydantic import BaseModel

from cotune import role
from cotune.integrations.apps.openai import sdk as openai_sdk
from cotune.integrations.apps.openai.forms import CHAT, body_of_stream
from cotune.integrations.versions import UnsupportedVersion
from tests.integrations.provider import Provider, event, json_reply
from tests.integrations.recorded import POLICY, Recorded, answer, asks, tool_call

USER = [{"role": "user", "content": "hello"}]
httpx = sys.modules[
    next(c.__module__ for c in openai.DefaultHttpxClient.__mro__ if c.__name__ == "Client").split(".")[0]
]
"""httpx, or httpx2 with openai 3."""

BEFORE = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
ASYNC_BEFORE = openai.AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="none", max_retries=0)
POOL = ThreadPoolExecutor(2)
THREAD_POOL = ThreadPool(2)
atexit.register(THREAD_POOL.terminate)
pytestmark = pytest.mark.usefixtures("nowhere")


def ask(name: str = "hello") -> str:
    got = BEFORE.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
    return got.choices[0].message.content


async def aask(name: str = "hello") -> str:
    async with openai.AsyncOpenAI(max_retries=0) as client:
        got = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": name}])
    return got.choices[0].message.content


def ask_as(name: str) -> str:
    with role(name):
        return ask()


# Threads and loops


def in_thread(fn, name):
    out = []
    thread = threading.Thread(target=lambda: out.append(fn(name)))
    thread.start()
    thread.join()
    return out[0]


def in_timer(fn, name):
    out = []
    timer = threading.Timer(0, lambda: out.append(fn(name)))
    timer.start()
    timer.join()
    return out[0]


def in_subclass(fn, name):
    class Worker(threading.Thread):
        def run(self):
            self.found = fn(name)

    worker = Worker()
    worker.start()
    worker.join()
    return worker.found


def in_new_pool(fn, name):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(fn, name).result()


def in_new_thread_pool(fn, name):
    with ThreadPool(1) as pool:
        return pool.apply(fn, (name,))


def on_another_loop(fn, name):
    """A loop in a thread that was started in no episode."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    contextvars.Context().run(thread.start)

    async def run():
        return await asyncio.to_thread(fn, name)

    try:
        return asyncio.run_coroutine_threadsafe(run(), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _executor(fn, name, pool=None):
    return await asyncio.get_running_loop().run_in_executor(pool, fn, name)


async def _task(fn, name):
    return await asyncio.create_task(asyncio.to_thread(fn, name))


WAYS = {
    "here": lambda fn, name: fn(name),
    "thread": in_thread,
    "timer": in_timer,
    "thread subclass": in_subclass,
    "thread in a thread": lambda fn, name: in_thread(functools.partial(in_thread, fn), name),
    "pool from before": lambda fn, name: POOL.submit(fn, name).result(),
    "pool.map": lambda fn, name: next(iter(POOL.map(fn, [name]))),
    "new pool": in_new_pool,
    "context brought along": lambda fn, name: POOL.submit(contextvars.copy_context().run, fn, name).result(),
    "ThreadPool.apply": lambda fn, name: THREAD_POOL.apply(fn, (name,)),
    "ThreadPool.map": lambda fn, name: THREAD_POOL.map(fn, [name])[0],
    "ThreadPool.starmap": lambda fn, name: THREAD_POOL.starmap(fn, [(name,)])[0],
    "ThreadPool.imap": lambda fn, name: next(THREAD_POOL.imap(fn, [name])),
    "ThreadPool.imap_unordered": lambda fn, name: next(THREAD_POOL.imap_unordered(fn, [name])),
    "new ThreadPool": in_new_thread_pool,
    "run_in_executor": lambda fn, name: asyncio.run(_executor(fn, name)),
    "run_in_executor of a pool": lambda fn, name: asyncio.run(_executor(fn, name, POOL)),
    "task": lambda fn, name: asyncio.run(_task(fn, name)),
    "asyncio.run in a thread": lambda fn, name: in_thread(lambda n: asyncio.run(_task(fn, n)), name),
    "another loop": on_another_loop,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_role_holds_and_overrides_wherever_the_call_is_made(record: Recorded, way: str):
    run_it = WAYS[way]

    def run(task):
        with role("outer"):
            return run_it(ask, "x") + run_it(ask_as, "inner") + run_it(ask, "x") == "outerinnerouter"

    outcome = record(run, lambda call: call.role)
    assert outcome.rewards == {"team": 1.0}
    assert [(c.role, c.turn, c.integration) for c in record.calls] == [
        ("outer", 0, "override"),
        ("inner", 0, "override"),
        ("outer", 1, "override"),
    ]
    assert outcome.live.warnings == {}


def test_workers_of_a_pool_do_not_stay_in_the_episode_that_started_them(record: Recorded, provider: Provider):
    pools = []

    def run(task):
        pools.extend([ThreadPoolExecutor(1), ThreadPool(1)])
        pools[0].submit(ask).result()
        pools[1].apply(ask)
        return 1

    outcome = record(run, lambda call: "x")
    with pools[0] as pool, pools[1] as thread_pool:
        with pytest.raises(openai.APIConnectionError):
            pool.submit(ask).result()
        with pytest.raises(openai.APIConnectionError):
            thread_pool.apply(ask)
    assert len(record.calls) == 2
    assert outcome.live.warnings == {}


def test_one_map_in_many_threads_at_once(record: Recorded):
    together = threading.Barrier(2)

    def one(name):
        together.wait(60)
        return ask_as(name)

    outcome = record(lambda task: "".join(THREAD_POOL.map(one, "ab", chunksize=1)) == "ab", lambda call: call.role)
    assert outcome.rewards == {"team": 1.0}


# Clients


def azure(**options):
    return openai.AzureOpenAI(azure_endpoint="http://127.0.0.1:9", api_version="v", api_key="k", **options)


class OwnRequest(httpx.Request):
    pass


class OwnClient(httpx.Client):
    """An HTTP client of the application's own, with a class of requests of its own."""

    def build_request(self, *args, **options):
        made = super().build_request(*args, **options)
        made.__class__ = OwnRequest
        return made


CLIENTS = {
    "made before": lambda: BEFORE,
    "with_options": lambda: BEFORE.with_options(timeout=3, default_headers={"x": "y"}),
    "copy": lambda: BEFORE.copy(api_key="other"),
    "prefix": lambda: openai.OpenAI(base_url="http://127.0.0.1:9/a/b/openai/v1/", api_key="k", max_retries=0),
    "azure": azure,
    "azure deployment": lambda: azure(azure_deployment="d"),
    "own http client": lambda: openai.OpenAI(http_client=OwnClient(), api_key="k", max_retries=0),
    "module": lambda: openai,
}


@pytest.mark.parametrize("kind", CLIENTS)
def test_every_client_is_answered(record: Recorded, monkeypatch: pytest.MonkeyPatch, kind: str):
    for name in ("_client", "api_key"):  # of a test before, which may have had no key
        monkeypatch.setattr(openai, name, None)

    def run(task):
        client = CLIENTS[kind]()
        chat = client.chat.completions.create(model="m", messages=USER).choices[0].message.content
        streamed = client.chat.completions.create(model="m", messages=USER, stream=True)
        parts = [c.choices[0].delta.content or "" for c in streamed if c.choices]
        return chat + "".join(parts) + client.responses.create(model="m", input="x").output_text == "xxx"

    assert record(run, lambda call: "x").rewards == {"team": 1.0}
    assert [(c.model, c.policy, c.role) for c in record.calls] == [("m", POLICY, "app")] * 3


def test_an_async_client_made_before_the_run_at_module_level(record: Recorded):
    async def run(task):
        asked = (ASYNC_BEFORE.chat.completions.create(model="m", messages=USER) for _ in range(3))
        return len(await asyncio.gather(*asked))

    assert record(run, lambda call: "x").rewards == {"team": 3.0}
    assert sorted(c.turn for c in record.calls) == [0, 1, 2]


# Helpers


class Point(BaseModel):
    x: int


@pytest.mark.parametrize("passed", [False, True])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_raw_and_streaming_responses(record: Recorded, provider: Provider, way: str, passed: bool):
    """Answered by a policy or passed to the provider, the application reads the same."""
    seen = []
    options = {"model": "m", "messages": USER}

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            raw = client.chat.completions.with_raw_response.create(**options)
            seen.append((raw.status_code, raw.parse().choices[0].message.content, raw.retries_taken))
            with client.chat.completions.with_streaming_response.create(**options) as response:
                seen.append(json.loads("".join(response.iter_text()))["choices"][0]["message"]["content"])
            with client.chat.completions.with_streaming_response.create(**options, stream=True) as response:
                seen.append(any("[DONE]" in line for line in response.iter_lines()))
        return 1

    async def arun(task):
        async with openai.AsyncOpenAI(max_retries=0) as client:
            raw = await client.chat.completions.with_raw_response.create(**options)
            seen.append((raw.status_code, raw.parse().choices[0].message.content, raw.retries_taken))
            async with client.chat.completions.with_streaming_response.create(**options) as response:
                text = "".join([part async for part in response.iter_text()])
                seen.append(json.loads(text)["choices"][0]["message"]["content"])
            async with client.chat.completions.with_streaming_response.create(**options, stream=True) as response:
                seen.append(any(["[DONE]" in line async for line in response.iter_lines()]))
        return 1

    record(arun if way == "async" else run, lambda call: None if passed else "re: hello")
    assert seen == [(200, "re: hello", 0), "re: hello", True]
    assert record.statuses == ["ok"] * 3
    assert [c.candidates[0].text for c in record.calls] == ["re: hello"] * 3
    assert len(provider.requests) == 3 * passed


def test_an_answer_that_is_not_read_to_its_end_is_cancelled(record: Recorded, provider: Provider):
    provider.reply = lambda body, number: (200, "application/json", [b'{"choices"', Provider.HANG])

    def run(task):
        with (
            openai.OpenAI(max_retries=0) as client,
            client.chat.completions.with_streaming_response.create(model="m", messages=USER) as response,
        ):
            next(response.iter_bytes())
        return 1

    record(run)
    assert record.statuses == ["cancelled"]
    assert "stopped reading the answer after 10 bytes" in record.calls[0].error


TOOL = {
    "type": "function",
    "function": {"name": "add", "strict": True, "parameters": {"type": "object", "properties": {}}},
}


@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_stream_helper_adds_up_to_what_was_recorded(record: Recorded, way: str):
    message = {**asks(tool_call("add", {"x": 1}, "c1"), tool_call("add", {"x": "é"}, "c2")), "content": "so"}
    final = []
    options = {"model": "m", "messages": USER, "tools": [TOOL]}

    def run(task):
        with openai.OpenAI(max_retries=0) as client, client.chat.completions.stream(**options) as stream:
            kinds = [event.type for event in stream]
            final.append(stream.get_final_completion())
        return kinds.count("tool_calls.function.arguments.done")

    async def arun(task):
        async with openai.AsyncOpenAI(max_retries=0) as client, client.chat.completions.stream(**options) as stream:
            kinds = [event.type async for event in stream]
            final.append(await stream.get_final_completion())
        return kinds.count("tool_calls.function.arguments.done")

    assert record(arun if way == "async" else run, lambda call: message).rewards == {"team": 2.0}
    got = final[0].choices[0]
    assert got.finish_reason == "tool_calls"
    assert got.message.content == "so"
    recorded = record.calls[0].candidates[0]
    assert [(c.id, c.function.name, c.function.arguments) for c in got.message.tool_calls] == [
        (c["id"], c["function"]["name"], c["function"]["arguments"]) for c in recorded.tool_calls
    ]
    assert (recorded.message, recorded.token_ids) == (message, (10, 2))


def test_parsed_output_and_tools(record: Recorded):
    found = []

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            parse = client.chat.completions.parse
            found.append(parse(model="m", messages=USER, response_format=Point).choices[0].message.parsed)
            tools = [openai.pydantic_function_tool(Point)]
            called = parse(model="m", messages=USER, tools=tools).choices[0].message.tool_calls[0]
            found.append(called.function.parsed_arguments)
        return 1

    record(run, lambda call: asks(tool_call("Point", {"x": 5})) if call.tools else '{"x": 5}')
    assert found == [Point(x=5)] * 2


def test_a_malformed_tool_call_is_text_to_the_application(record: Recorded):
    import msgspec

    def broken(call):
        found = answer("<tool_call>{oops</tool_call>")
        candidate = msgspec.structs.replace(found.candidates[0], malformed=True)
        return msgspec.structs.replace(found, candidates=(candidate,))

    got = []
    record(lambda task: got.append(BEFORE.chat.completions.create(model="m", messages=USER, tools=[TOOL])) or 1, broken)
    choice = got[0].choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("<tool_call>{oops</tool_call>", None)
    assert choice.finish_reason == "stop"
    assert record.calls[0].candidates[0].malformed


def test_a_stream_of_the_best_of_several_says_that_it_is_buffered(record: Recorded):
    def run(task):
        return sum(bool(list(BEFORE.chat.completions.create(model="m", messages=USER, stream=True))) for _ in range(2))

    outcome = record(run, lambda call: answer("a", "b", chosen=1))
    assert outcome.live.warnings == {"buffered_stream": 2}
    assert [(len(c.candidates), c.chosen) for c in record.calls] == [(2, 1)] * 2
    assert record(lambda task: bool(ask()), lambda call: answer("a", "b")).live.warnings == {}


# What is no call


def test_other_paths_are_no_calls(record: Recorded, provider: Provider):
    replies = {
        "input": {"object": "list", "data": [], "results": [], "model": "m"},
        "prompt": {"created": 1, "data": []},
    }
    provider.reply = lambda body, number: json_reply(replies["prompt" if "prompt" in body else "input"])

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            client.embeddings.create(model="m", input="x", encoding_format="float")
            client.moderations.create(input="x")
            client.images.generate(model="m", prompt="x")
            client.audio.speech.create(model="m", input="x", voice="v").read()
        return 1

    outcome = record(run, lambda call: "never")
    assert len(provider.requests) == 4
    assert (record.calls, outcome.live.warnings) == ([], {})


def test_a_text_completion_is_counted_and_named(record: Recorded, provider: Provider):
    """LangChain's `OpenAI` class asks for one too: it passes to the provider, and no policy answers it."""
    choice = {"index": 0, "text": "more", "finish_reason": "stop", "logprobs": None}
    body = {"id": "t", "object": "text_completion", "choices": [choice], "usage": {}}
    provider.reply = lambda _, number: json_reply(body)

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            assert client.completions.create(model="m", prompt="once").choices[0].text == "more"
        assert langchain_openai.OpenAI(model="m", max_retries=0).invoke("once") == "more"
        return 1

    outcome = record(run, lambda call: "never")
    assert (record.calls, outcome.live.warnings) == ([], {"unseen_call": 2})
    assert "POST /completions" in outcome.live.explained["unseen_call"]


def test_models_that_answer_out_of_sight_are_counted(record: Recorded, provider: Provider):
    provider.reply = lambda body, number: json_reply({"id": "x", "object": "x", "output": []})

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            client.batches.create(completion_window="24h", endpoint="/v1/responses", input_file_id="f")
            client.responses.connect()
            client.realtime.connect(model="m")
        return 1

    outcome = record(run, lambda call: "never")
    assert (record.calls, outcome.live.warnings) == ([], {"unseen_call": 3})


def test_pieces_of_every_kind_of_field_add_up():
    def delta(**fields):
        return event(fields)

    parts = [
        delta(role="assistant", content="a", details=[{"n": 1}], function_call={"name": "f", "arguments": ""}),
        delta(content="b", details=[{"n": 2}], function_call={"arguments": "{}"}, seen=1),
        delta(tool_calls=[{"id": "c1", "function": {"name": "x", "arguments": "{"}}], seen=2),
        delta(tool_calls=[{"function": {"arguments": "}"}}]),
        delta(tool_calls=[{"id": "c2", "index": None, "function": {"name": "y", "arguments": "{}"}}]),
        b"data: [DONE]\n\n",
    ]
    message = body_of_stream(CHAT, b"".join(parts))["choices"][0]["message"]
    assert message == {
        "role": "assistant",
        "content": "ab",
        "details": [{"n": 1}, {"n": 2}],
        "function_call": {"name": "f", "arguments": "{}"},
        "seen": 2,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "x", "arguments": "{}"}},
            {"id": "c2", "type": "function", "function": {"name": "y", "arguments": "{}"}},
        ],
    }


# What upstream must keep


def test_an_sdk_without_the_hooked_methods_is_refused_by_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(_base_client.AsyncAPIClient, "_send_request")
    with pytest.raises(UnsupportedVersion, match=r"has no AsyncAPIClient\._send_request"):
        openai_sdk.install()
