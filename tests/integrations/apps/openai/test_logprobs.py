"""Log-probabilities through real clients: what an application is told of tokens, what is recorded and said again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from langchain_openai import ChatOpenAI

from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.integrations.apps.activation import activate
from cotune.integrations.apps.openai.token_logprobs import token_logprobs
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.recording.recorder import Responder
from cotune.records.structs import Candidate, PolicyRef, ShownToken, Task
from cotune.replay.responder import ReplayResponder
from cotune.replay.script import Replay, read_script
from cotune.sampling.responder import PolicyResponder
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import tiny_models
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import Recorded

activate()
pytestmark = pytest.mark.usefixtures("nowhere")
MESSAGES: list[Any] = [{"role": "user", "content": "say it in Português 😀"}]
TOLD: dict[str, Any] = {"logprobs": True, "top_logprobs": 3}
HOW: dict[str, Any] = {"max_tokens": 24, "temperature": 0.7, "seed": 1}
INCLUDE = ["message.output_text.logprobs"]


@pytest.fixture(scope="module")
def responder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model with random weights and a byte-level tokenizer: most of what it says are parts of characters."""
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_models.build_bytes(folder)
    sampler = asyncio.run(TransformersSampler.open(folder, host="thread"))
    yield PolicyResponder(sampler, ChatTemplate.load(folder), {"app": PolicyRef("p", 0)})
    asyncio.run(sampler.aclose())


def solved(run: Callable[[], Any], responder: Responder, store: Any) -> Any:
    """What `run` returns inside an episode."""
    heard = []

    def solve(task: Any) -> float:
        heard.append(run())
        return 1.0

    outcome = asyncio.run(
        run_episode(workflow_of(workflow(solve)), Task(id="t", input={}), sink=store, responder=responder)
    )
    if outcome.error is not None:
        raise outcome.error
    return heard[0]


def plain() -> Any:
    with openai.OpenAI(max_retries=0) as client:
        choice = client.chat.completions.create(model="m", messages=MESSAGES, **TOLD, **HOW).choices[0]
        return choice.message.content, choice.logprobs.model_dump()["content"]


def streamed() -> Any:
    with openai.OpenAI(max_retries=0) as client:
        chunks = list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True, **TOLD, **HOW))
    choices = [choice for chunk in chunks for choice in chunk.choices]
    told = [token.model_dump() for choice in choices if choice.logprobs for token in choice.logprobs.content]
    return "".join(choice.delta.content or "" for choice in choices), told


def responses() -> Any:
    how = {"max_output_tokens": 24, "temperature": 0.7, "extra_body": {"seed": 1}}
    with openai.OpenAI(max_retries=0) as client:
        got = client.responses.create(model="m", input=MESSAGES, include=INCLUDE, top_logprobs=3, **how)
        return got.output_text, [token.model_dump() for token in got.output[0].content[0].logprobs]


def responses_streamed() -> Any:
    how = {"max_output_tokens": 24, "temperature": 0.7, "extra_body": {"seed": 1}, "stream": True}
    with openai.OpenAI(max_retries=0) as client:
        events = list(client.responses.create(model="m", input=MESSAGES, include=INCLUDE, top_logprobs=3, **how))
    (delta,) = [event for event in events if event.type == "response.output_text.delta"]
    got = events[-1].response
    tokens = [token.model_dump() for token in got.output[0].content[0].logprobs]
    assert [(token.token, token.logprob) for token in delta.logprobs] == [(t["token"], t["logprob"]) for t in tokens]
    return got.output_text, tokens


def langchain() -> Any:
    message = ChatOpenAI(model="m", max_retries=0, **TOLD, **HOW).invoke(MESSAGES)
    return message.content, message.response_metadata["logprobs"]["content"]


def langchain_streamed() -> Any:
    chunks = list(ChatOpenAI(model="m", max_retries=0, **TOLD, **HOW).stream(MESSAGES))
    whole = sum(chunks[1:], chunks[0])
    return whole.content, whole.response_metadata["logprobs"]["content"]


async def autogen(stream: bool = False) -> Any:
    from autogen_core.models import UserMessage

    from tests.integrations.autogen_models import autogen_client

    client = autogen_client(max_retries=0)
    asked = {"messages": [UserMessage(content=MESSAGES[0]["content"], source="user")], "extra_create_args": TOLD | HOW}
    if stream:
        parts = [part async for part in client.create_stream(**asked)]
        result = parts[-1]
    else:
        result = await client.create(**asked)
    await client.close()
    # AutoGen's own client reads none from chunks that hold text, whoever sends them.
    return result.content, None if stream else [token.model_dump() for token in result.logprobs]


def crew() -> Any:
    import crewai

    llm = crewai.LLM(model="openai/m", api_key="none", base_url="http://127.0.0.1:9/v1", max_retries=0, **TOLD, **HOW)
    return llm.call(MESSAGES), None


CLIENTS = {
    "openai": plain,
    "openai streamed": streamed,
    "responses": responses,
    "responses streamed": responses_streamed,
    "langchain": langchain,
    "langchain streamed": langchain_streamed,
    "autogen": lambda: asyncio.run(autogen()),
    "autogen streamed": lambda: asyncio.run(autogen(True)),
    "crewai": crew,
}


FRAMEWORK = {"autogen": "autogen_ext", "autogen streamed": "autogen_ext", "crewai": "crewai"}
"""Frameworks that an environment may lack: CrewAI does not install beside openai 3."""


@pytest.mark.parametrize("client", CLIENTS)
def test_clients_are_told_of_the_tokens_of_the_content_and_again_when_it_is_replayed(
    client: str, responder: PolicyResponder, tmp_path: Path
) -> None:
    pytest.importorskip(FRAMEWORK.get(client, "openai"))
    with SqliteStore.open(tmp_path / "records.sqlite") as store:
        content, tokens = solved(CLIENTS[client], responder, store)
        store.flush()
        (episode,) = store.episodes()
        (call,) = store.calls(episode.id)
        again = ReplayResponder(Replay(script=read_script(store, episode.id)))
        assert solved(CLIENTS[client], again, store) == (content, tokens)
        again.require_complete()
    assert call.sampling["top_logprobs"] == 3
    (candidate,) = call.candidates
    assert len(candidate.token_ids) == len(candidate.logprobs) > 8
    assert candidate.shown is not None
    assert [t.logprob for t in candidate.shown] == list(candidate.logprobs[: len(candidate.shown)])
    if tokens is not None:
        assert b"".join(bytes(token["bytes"]) for token in tokens).decode(errors="replace") == content
        assert [token["logprob"] for token in tokens] == [token.logprob for token in candidate.shown]
        assert all(len(token["top_logprobs"]) == 3 for token in tokens)
        for token in tokens:
            best = {bytes(top["bytes"]): top["logprob"] for top in token["top_logprobs"]}
            assert list(best.values()) == sorted(best.values(), reverse=True)
            assert best.get(bytes(token["bytes"]), token["logprob"]) == pytest.approx(token["logprob"], abs=1e-6)
            assert sum(map(math.exp, best.values())) <= 1 + 1e-5


def test_beside_token_ids_stand_all_tokens(responder: PolicyResponder, tmp_path: Path) -> None:
    def ids() -> Any:
        with openai.OpenAI(max_retries=0) as client:
            more = {"extra_body": {"return_token_ids": True}}
            choice = client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True, **HOW, **more).choices[
                0
            ]
            return choice.token_ids, choice.logprobs.content

    with SqliteStore.open(tmp_path / "records.sqlite") as store:
        found, tokens = solved(ids, responder, store)
    chat: Any = responder.chat
    assert [bytes(token.bytes) for token in tokens] == [chat.token_bytes([id])[0].raw for id in found]
    assert [token.top_logprobs for token in tokens] == [[]] * len(found)


def test_an_older_record_shows_ids_and_one_of_tool_calls_alone_shows_nothing() -> None:
    old = Candidate(index=0, text="ab", message={}, token_ids=(7, 2), logprobs=(-0.5, -0.25))
    ids = [("token_id:7", -0.5), ("token_id:2", -0.25)]
    told = [msgspec.json.decode(token) for token in token_logprobs(old)]
    assert [(token["token"], token["logprob"]) for token in told] == ids
    assert token_logprobs(msgspec.structs.replace(old, shown=())) == []


def test_without_log_probabilities_none_are_told_or_kept(responder: PolicyResponder, tmp_path: Path) -> None:
    def silent() -> Any:
        with openai.OpenAI(max_retries=0) as client:
            return client.chat.completions.create(model="m", messages=MESSAGES, **HOW).choices[0].logprobs

    with SqliteStore.open(tmp_path / "records.sqlite") as store:
        assert solved(silent, responder, store) is None
        store.flush()
        (call,) = store.calls(next(iter(store.episodes())).id)
    assert call.candidates[0].shown is None
    assert "top_logprobs" not in call.sampling


@pytest.mark.parametrize(
    ("asked", "told"),
    [({"top_logprobs": 2}, '"logprobs": true'), ({"top_logprobs": 21, "logprobs": True}, "from 0 to 20")],
)
def test_what_cannot_be_told_is_refused(
    responder: PolicyResponder, tmp_path: Path, asked: dict[str, Any], told: str
) -> None:
    def refused() -> Any:
        with openai.OpenAI(max_retries=0) as client:
            client.chat.completions.create(model="m", messages=MESSAGES, **asked)

    with (
        SqliteStore.open(tmp_path / "records.sqlite") as store,
        pytest.raises(Exception, match="top_logprobs") as caught,
    ):
        solved(refused, responder, store)
    assert told in str(caught.value)


@pytest.mark.parametrize("ids", [[], [7, 8]])
def test_what_a_provider_told_is_kept(provider: Provider, record: Recorded, ids: list[int]) -> None:
    yes = {"token": "yes", "logprob": -0.25, "bytes": None, "top_logprobs": []}
    part = {"token": "\\xe2", "logprob": -0.5, "bytes": [226], "top_logprobs": [yes]}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m"}

    def reply(asked: Any, number: int) -> Any:
        content = [[yes, yes], [part, yes]][number]
        return json_reply({**body, "choices": [{**choice, "logprobs": {"content": content}, "token_ids": ids}]})

    def run(task: Any) -> float:
        with openai.OpenAI(max_retries=0, base_url=provider.url) as client:
            for _ in range(2):
                client.chat.completions.create(model="m", messages=MESSAGES, logprobs=True)
        return 1.0

    provider.reply = reply
    record(run)
    plain, best = (call.candidates[0] for call in record.calls)
    told = ShownToken("yes", -0.25)
    assert plain.shown == (None if ids else (told, told))  # ids say as much in less
    assert best.shown == (ShownToken("\\xe2", -0.5, (226,), (told,)), told)
    assert (plain.logprobs, best.logprobs) == ((-0.25, -0.25), (-0.5, -0.25))


@pytest.mark.parametrize("content", [[{"token": 5, "logprob": -1.0}], [{"logprob": -1.0}], ["x"], "x", 3])
def test_what_a_provider_mistypes_is_left_out(provider: Provider, record: Recorded, content: Any) -> None:
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "yes"}}
    provider.reply = lambda asked, number: json_reply({"choices": [{**choice, "logprobs": {"content": content}}]})

    def run(task: Any) -> float:
        with openai.OpenAI(max_retries=0, base_url=provider.url) as client:
            client.chat.completions.with_raw_response.create(model="m", messages=MESSAGES, logprobs=True)
        return 1.0

    record(run)
    assert record.calls[0].candidates[0].shown is None
