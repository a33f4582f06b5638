"""The HTTP server over a scripted sampler, through the real OpenAI client: forms, errors, token, cancellation."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import zstandard

from cotune.adapters import chat_endpoint, serving
from cotune.adapters.open_policies import LocalPolicies, ServedModel
from cotune.adapters.serving import Answers, Endpoint, serve, serving_local
from cotune.errors import ConfigError, SamplerError, SampleTimeout
from cotune.integrations.web.http import bodies
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import BodyRoom
from cotune.integrations.web.http.server import check_access
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, TokenBytes, Weights
from tests.integrations.web.http.unfinished import unfinished_bodies

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


class Scripted:
    """Answers `reply 0`, `reply 1`, ... and keeps what it was asked; what a prompt says can make it fail or hang."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], int, SamplingParams, PolicyRef]] = []
        self.hanging = threading.Event()
        self.cancelled = threading.Event()
        self.closed = threading.Event()

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.asked.append((list(prompt_token_ids), n, params, policy))
        said = bytes(prompt_token_ids)
        if b"hang" in said:
            await self._hang()
        if b"slow" in said:
            raise SampleTimeout("It took 9 s.", "Ask for less.")
        if b"broken" in said:
            raise SamplerError("The engine is gone.", "Start it again.")
        reply = b"call add" if b"use a tool" in said else b"reply"
        return [Completion((*reply, 48 + i), (-0.5,) * (len(reply) + 1), "stop") for i in range(n)]

    async def _hang(self) -> None:
        self.hanging.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled.set()

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        raise NotImplementedError

    async def retire(self, policy: PolicyRef) -> None:
        raise NotImplementedError

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="scripted", max_model_len=64)

    async def aclose(self) -> None:
        self.closed.set()


class Bytes:
    """One token per byte of the contents; a reply `call NAME` is a tool call."""

    def images(self, messages: Any) -> tuple[bytes, ...]:
        return ()

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None, **earlier: Any) -> list[int]:
        if messages[0].get("role") == "nobody":
            raise SamplerError("The chat template knows no role 'nobody'.", "Use another.")
        shown = "".join(tool["function"]["name"] for tool in tools or [])
        return list((shown + "".join(message["content"] or "" for message in messages)).encode())

    def grammar(self, asked: Any, tools: Any, prompt: Any) -> str:
        return "start: /[a-z0-9 ]*/"

    def reads(self, option: str) -> bool:
        return False

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        return [TokenBytes(bytes([id])) for id in token_ids]

    def parse(self, token_ids: Sequence[int], stop: Sequence[str] = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        text = bytes(token_ids).decode()
        if not text.startswith("call "):
            return text, {"role": "assistant", "content": text}, "stop"
        call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
        return text, {"role": "assistant", "content": None, "tool_calls": [call]}, "tool_calls"


@contextlib.contextmanager
def scripted(answers: Answers | None = None, **options: Any) -> Iterator[tuple[Endpoint, Scripted]]:
    sampler = Scripted()

    async def opened() -> LocalPolicies:
        served = {
            role: ServedModel(role, PolicyRef(role, 3), "lora", "/models/tiny", "b" * 64, "f" * 64)
            for role in ("planner", "writer")
        }
        return LocalPolicies(sampler, Bytes(), served, [], 64)

    with serving_local(opened, answers, **options) as endpoint:
        yield endpoint, sampler


def test_bodies_that_never_end_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = []

    def room_for(limits: BodyLimits) -> BodyRoom:
        rooms.append(bodies.room_for(limits))
        return rooms[-1]

    monkeypatch.setattr(chat_endpoint, "room_for", room_for)
    with scripted(limits=BodyLimits(max_body=1 << 20)) as (endpoint, _):
        url, path = f"http://127.0.0.1:{endpoint.port}", "/v1/chat/completions"
        assert rooms[0].most == 8 << 20
        with unfinished_bodies(url, path, rooms[0], "application/json", count=40, largest=1 << 20):
            body = {"model": "writer", "messages": HELLO}
            assert httpx.post(url + path, json=body).status_code == 200


def hanging(endpoint: Endpoint) -> socket.socket:
    """A connection whose request is never answered."""
    body = json.dumps({"model": "writer", "messages": [{"role": "user", "content": "hang"}]}).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
    )
    connection = socket.create_connection(("127.0.0.1", endpoint.port))
    connection.sendall("\r\n".join(head).encode() + b"\r\n\r\n" + body)
    return connection


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[Endpoint, Scripted]]:
    with scripted(limits=BodyLimits(4096)) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: tuple[Endpoint, Scripted]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server[0].url, api_key="unused", max_retries=0) as made:
        yield made


def test_an_answer_in_json(client: openai.OpenAI, server: tuple[Endpoint, Scripted]) -> None:
    answer = client.chat.completions.create(
        model="writer", messages=HELLO, n=2, temperature=0.5, top_p=0.9, max_tokens=9, seed=4, stop=["x", "y"]
    )
    assert [choice.message.content for choice in answer.choices] == ["reply0", "reply1"]
    assert [choice.finish_reason for choice in answer.choices] == ["stop", "stop"]
    assert (answer.model, answer.object) == ("writer", "chat.completion")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (5, 12, 17)
    assert server[1].asked[-1] == (
        list(b"hello"),
        2,
        SamplingParams(temperature=0.5, top_p=0.9, max_tokens=9, seed=4, stop=("x", "y")),
        PolicyRef("writer", 3),
    )


def test_defaults_and_limits_of_length(client: openai.OpenAI, server: tuple[Endpoint, Scripted]) -> None:
    client.chat.completions.create(model="writer", messages=HELLO)
    assert server[1].asked[-1][2] == SamplingParams(temperature=1.0, max_tokens=59)
    client.chat.completions.create(model="writer", messages=HELLO, max_completion_tokens=1000)
    assert server[1].asked[-1][2].max_tokens == 59


def test_token_ids_and_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="writer", messages=HELLO, logprobs=True, extra_body={"return_token_ids": True}
    )
    assert answer.prompt_token_ids == list(b"hello")
    assert answer.choices[0].token_ids == list(b"reply0")
    tokens = answer.choices[0].logprobs.content
    assert [(token.token, token.logprob) for token in tokens] == [(letter, -0.5) for letter in "reply0"]


def test_a_stream(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="writer",
            messages=HELLO,
            n=2,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    said = {0: "", 1: ""}
    for chunk in chunks:
        for choice in chunk.choices:
            said[choice.index] += choice.delta.content or ""
    assert said == {0: "reply0", 1: "reply1"}
    assert chunks[0].prompt_token_ids == list(b"hello")
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["stop", "stop"]
    assert (chunks[-1].choices, chunks[-1].usage.total_tokens) == ([], 17)


def test_tool_calls_in_json_and_as_a_stream(client: openai.OpenAI, server: tuple[Endpoint, Scripted]) -> None:
    messages = [{"role": "user", "content": "use a tool"}]
    answer = client.chat.completions.create(model="writer", messages=messages, tools=[TOOL])
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.tool_calls[0].function.name == "add"
    assert server[1].asked[-1][0] == list(b"adduse a tool")
    with client.chat.completions.stream(model="writer", messages=messages, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "add"
    assert final.choices[0].finish_reason == "tool_calls"


def test_forbidden_tools_are_not_shown(client: openai.OpenAI, server: tuple[Endpoint, Scripted]) -> None:
    client.chat.completions.create(model="writer", messages=HELLO, tools=[TOOL], tool_choice="none")
    assert server[1].asked[-1][0] == list(b"hello")


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"top_logprobs": 3}, '"logprobs": true'),
        ({"top_logprobs": 3, "logprobs": False}, '"logprobs": true'),
        ({"top_logprobs": 21, "logprobs": True}, "<= 20"),
    ],
)
def test_log_probabilities_that_cannot_be_told_are_refused(
    client: openai.OpenAI, asked: dict[str, Any], told: str
) -> None:
    with pytest.raises(openai.BadRequestError, match="top_logprobs") as caught:
        client.chat.completions.create(model="writer", messages=HELLO, **asked)
    assert told in str(caught.value)


def test_what_is_not_enforced_is_counted(client: openai.OpenAI, server: tuple[Endpoint, Scripted]) -> None:
    for _ in range(2):
        client.chat.completions.create(model="writer", messages=HELLO, reasoning_effort="low")
    health = httpx.get(server[0].url.replace("/v1", "/health")).json()
    assert health["status"] == "ok"
    assert health["not_enforced"] == {"reasoning_effort": 2}


def test_models_have_policies_versions_fingerprints_and_base(client: openai.OpenAI) -> None:
    models = {model.id: model for model in client.models.list()}
    assert sorted(models) == ["planner", "writer"]
    writer = models["writer"]
    assert (writer.policy, writer.version, writer.fingerprint) == ("writer", 3, "f" * 64)
    assert writer.base == {"model": "/models/tiny", "weights_sha256": "b" * 64}
    assert client.models.retrieve("planner").id == "planner"


@pytest.mark.parametrize(
    ("changes", "status", "param", "code", "says"),
    [
        ({"model": "judge"}, 404, "model", "model_not_found", "the models are: planner, writer"),
        ({"model": None}, 400, "model", "invalid_value", "Expected `str`, got `null`"),
        ({"messages": []}, 400, "messages", "invalid_value", "length >= 1"),
        ({"messages": "hi"}, 400, "messages", "invalid_value", "Expected `array`"),
        ({"messages": [{"role": "nobody"}]}, 400, "messages", "invalid_value", "no role 'nobody'"),
        ({"temperature": "hot"}, 400, "temperature", "invalid_value", "Expected `float | null`, got `str`"),
        ({"temperature": 3}, 400, "temperature", "invalid_value", "<= 2"),
        ({"n": 0}, 400, "n", "invalid_value", ">= 1"),
        ({"max_tokens": 0}, 400, "max_tokens", "invalid_value", ">= 1"),
        ({"stop": [1]}, 400, "stop[0]", "invalid_value", "Expected `str`"),
        ({"messages": [{"role": "user", "content": "x" * 64}]}, 400, "messages", "context_length_exceeded", "64 tok"),
        ({"messages": [{"role": "user", "content": "slow"}]}, 504, None, "timeout", "It took 9 s."),
        ({"messages": [{"role": "user", "content": "broken"}]}, 500, None, "sampler_error", "The engine is gone."),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 413, None, "body_too_large", "larger than 4096"),
    ],
)
def test_errors_name_their_cause(
    server: tuple[Endpoint, Scripted], changes: dict[str, Any], status: int, param: str | None, code: str, says: str
) -> None:
    body = {"model": "writer", "messages": HELLO, **changes}
    answer = httpx.post(f"{server[0].url}/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (status, param, code)
    assert says in error["message"]


def test_a_missing_field_broken_json_and_other_content(server: tuple[Endpoint, Scripted]) -> None:
    url = f"{server[0].url}/chat/completions"
    missing = httpx.post(url, json={"model": "writer"}).json()["error"]
    assert (missing["param"], missing["code"]) == ("messages", "invalid_value")
    broken = httpx.post(url, content=b"{", headers={"content-type": "application/json"})
    assert (broken.status_code, broken.json()["error"]["code"]) == (400, "invalid_json")
    assert httpx.post(url, content=b"{}", headers={"content-type": "text/plain"}).status_code == 415


def test_a_packed_body_is_unpacked_and_an_unknown_coding_refused(server: tuple[Endpoint, Scripted]) -> None:
    raw = json.dumps({"model": "writer", "messages": HELLO}).encode()
    statuses = {}
    for coding, body in (("gzip", gzip.compress(raw)), ("zstd", zstandard.compress(raw)), ("br", raw)):
        headers = {"content-type": "application/json", "content-encoding": coding}
        statuses[coding] = httpx.post(f"{server[0].url}/chat/completions", content=body, headers=headers).status_code
    assert statuses == {"gzip": 200, "zstd": 200, "br": 415}


def test_unknown_paths_and_methods(server: tuple[Endpoint, Scripted]) -> None:
    lost = httpx.get(f"{server[0].url}/nothing")
    assert (lost.status_code, lost.json()["error"]["message"]) == (404, "Not Found: GET /v1/nothing.")
    assert httpx.get(f"{server[0].url}/chat/completions").status_code == 405
    assert httpx.get(f"{server[0].url}/models/judge").json()["error"]["code"] == "model_not_found"


def test_the_responses_interface_is_told_what_to_do(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=r"set_default_openai_api\('chat_completions'\).*cotune.deployed"):
        client.responses.create(model="writer", input="hello")


def test_clients_raise_their_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the models are: planner, writer"):
        client.chat.completions.create(model="judge", messages=HELLO)


def test_a_client_that_goes_away_cancels_its_request(server: tuple[Endpoint, Scripted]) -> None:
    endpoint, sampler = server
    with hanging(endpoint):
        assert sampler.hanging.wait(20)
    assert sampler.cancelled.wait(20)
    health = httpx.get(endpoint.url.replace("/v1", "/health")).json()
    assert health["in_flight"] == 0
    assert health["requests"]["disconnected"] == 1


def test_many_requests_at_once_keep_their_answers() -> None:
    with scripted() as (endpoint, _):

        async def ask(client: openai.AsyncOpenAI, i: int) -> str:
            role = ("planner", "writer")[i % 2]
            answer = await client.chat.completions.create(model=role, messages=[{"role": "user", "content": f"{i}"}])
            return f"{answer.model} {answer.usage.prompt_tokens}"

        async def main() -> list[str]:
            async with openai.AsyncOpenAI(base_url=endpoint.url, api_key="unused") as client:
                return await asyncio.gather(*(ask(client, i) for i in range(64)))

        assert asyncio.run(main()) == [f"{('planner', 'writer')[i % 2]} {len(str(i))}" for i in range(64)]


def test_a_token_is_asked_for_everywhere_but_for_health() -> None:
    with scripted(token="s3cret") as (endpoint, _):
        for given in ("wrong", "s3cre", "s3cret2"):
            client = openai.OpenAI(base_url=endpoint.url, api_key=given, max_retries=0)
            with pytest.raises(openai.AuthenticationError, match="needs its token"):
                client.chat.completions.create(model="writer", messages=HELLO)
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
        assert httpx.get(f"{endpoint.url}/models/writer").status_code == 401
        assert httpx.get(endpoint.url.replace("/v1", "/health")).status_code == 200
        client = openai.OpenAI(base_url=endpoint.url, api_key="s3cret")
        answer = client.chat.completions.create(model="writer", messages=HELLO)
        assert answer.choices[0].message.content == "reply0"


def test_no_access_from_outside_without_a_token() -> None:
    for host in ("0.0.0.0", "::", "192.168.0.1", "example.org"):
        with pytest.raises(ConfigError, match="--token"):
            check_access(host, None)
        check_access(host, "t")
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        check_access(host, None)
    with pytest.raises(ConfigError, match="is empty"):
        check_access("0.0.0.0", " ")


def test_a_port_in_use_is_refused_before_the_model_is_opened() -> None:
    opened: list[str] = []

    async def opening() -> LocalPolicies:
        opened.append("yes")
        raise AssertionError

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*in use"), serving_local(opening, port=port):
            pass
    assert opened == []


def test_what_cannot_be_opened_is_raised_to_the_caller() -> None:
    async def opening() -> LocalPolicies:
        raise ConfigError("model", "/nowhere", "must be a model folder")

    with pytest.raises(ConfigError, match="/nowhere"), serving_local(opening):
        pass


def test_the_sampler_is_closed_with_the_server_also_when_requests_hang() -> None:
    with contextlib.ExitStack() as connections, scripted() as (endpoint, sampler):
        connections.enter_context(hanging(endpoint))
        assert sampler.hanging.wait(20)
    assert sampler.cancelled.is_set()
    assert sampler.closed.is_set()


def test_names_with_an_export_are_refused(export: Any) -> None:
    with pytest.raises(ConfigError, match=r"role = 'extra' cannot be used with an export"):
        serve(export, say=lambda line: None, names=("extra",))


def test_a_role_answers_under_the_names_that_the_application_uses() -> None:
    with scripted(Answers(aliases={"gpt-4o-mini": "planner"})) as (endpoint, sampler):
        with openai.OpenAI(base_url=endpoint.url, api_key="unused", max_retries=0) as client:
            answer = client.chat.completions.create(model="gpt-4o-mini", messages=HELLO)
            listed = {model.id: getattr(model, "policy", "") for model in client.models.list()}
        assert answer.model == "gpt-4o-mini"
        assert sampler.asked[0][3] == PolicyRef("planner", 3)
        assert listed == {"planner": "planner", "writer": "writer", "gpt-4o-mini": "planner"}


@pytest.mark.parametrize(
    ("aliases", "match"),
    [
        ({"gpt": "critic"}, r"aliases = 'gpt=critic' names a role that is not served; the roles are planner, writer"),
        ({"gpt": "planer"}, r"the roles are planner, writer\. Did you mean planner\?"),
        ({"writer": "planner"}, r"writer is the name of a role"),
    ],
)
def test_an_alias_that_cannot_be_is_refused(aliases: dict[str, str], match: str) -> None:
    with pytest.raises(ConfigError, match=match), scripted(Answers(aliases=aliases)):
        pass


def test_a_folder_that_is_not_there_is_no_export_either(tmp_path: Path) -> None:
    allowed = r"is not an export, model folder or GGUF file: there is no such folder"
    with pytest.raises(ConfigError, match=allowed), serving.serving(tmp_path / "nothing"):
        pass


def test_an_alias_is_a_pair(capsys: pytest.CaptureFixture[str]) -> None:
    from cotune.cli.main import main

    assert main(["serve", "nowhere", "--as", "gpt-4o-mini"]) != 0
    assert "as = 'gpt-4o-mini' must be NAME=ROLE" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("headers", [{"host": "evil.example"}, {"origin": "https://evil.example"}, {"origin": "null"}])
def test_a_page_of_elsewhere_is_refused(server: tuple[Endpoint, Scripted], headers: dict[str, str]) -> None:
    body = {"model": "writer", "messages": HELLO}
    answers = [
        httpx.post(f"{server[0].url}/chat/completions", json=body, headers=headers),
        httpx.get(f"{server[0].url}/models", headers=headers),
        httpx.get(f"{server[0].url.removesuffix('/v1')}/health", headers=headers),
    ]
    assert [answer.status_code for answer in answers] == [403] * 3
