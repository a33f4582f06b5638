"""A workflow whose application is another process: its calls come through the gateway and are answered by policies."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import cotune
from cotune.errors import SamplerError, WorkflowError
from cotune.integrations.web.gateway import server
from cotune.records.structs import ShownToken, Usage
from tests.integrations import loop_time
from tests.integrations.provider import Provider
from tests.integrations.recorded import Recorded, answer

APP = """
import json, sys, urllib.request
def ask(base, **more):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "go"}], **more}).encode()
    request = urllib.request.Request(base + "/chat/completions", body, {"content-type": "application/json"})
    return urllib.request.urlopen(request).read().decode()
print(json.loads(ask(sys.argv[1]))["choices"][0]["message"]["content"])
print("stream" if "[DONE]" in ask(sys.argv[2], stream=True) else "no stream")
"""


async def other_process(*arguments: str) -> list[str]:
    command = [sys.executable, "-c", APP, *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return said.decode().splitlines()


def test_policies_answer_another_process(provider: Provider, record: Recorded) -> None:
    seen: list[str] = []

    async def app(task: Any) -> float:
        with cotune.gateway() as gate:
            seen.extend(await other_process(gate.role_url("planner"), gate.role_url("team/writer")))
        return 1.0

    outcome = record(app, lambda call: answer(f"{call.role} A", f"{call.role} B", chosen=1))
    assert seen == ["planner B", "stream"]
    assert [(c.role, c.status, c.chosen, len(c.candidates)) for c in record.calls] == [
        ("planner", "ok", 1, 2),
        ("team/writer", "ok", 1, 2),
    ]
    assert record.calls[0].policy is not None and record.calls[0].candidates[1].token_ids == (11, 2)
    assert outcome.live.warnings == {"buffered_stream": 1}
    assert provider.requests == []


def test_roles_without_a_policy_go_to_the_provider(provider: Provider, record: Recorded) -> None:
    async def app(task: Any) -> float:
        with cotune.gateway() as gate:
            await other_process(gate.role_url("judge"), gate.url)
        return 1.0

    record(app, lambda call: None)
    assert [(c.role, c.status, c.candidates[0].text, c.policy) for c in record.calls] == [
        ("judge", "ok", "re: go", None),
        ("app", "ok", "re: go", None),
    ]


def test_failures_of_the_responder_reach_the_application(provider: Provider, record: Recorded) -> None:
    answers: list[httpx.Response] = []

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            for body in ({"temperature": "hot"}, {}, {"n": 5}):
                messages = [{"role": "user", "content": "x"}]
                answers.append(httpx.post(f"{gate.url}/chat/completions", json={"messages": messages, **body}))
        return 1.0

    def reply(call: Any) -> Any:
        if call.params.get("n"):
            return answer("only one")
        raise SamplerError("The engine is gone.", "Start it again.")

    record(app, reply)
    assert [a.status_code for a in answers] == [400, 400, 400]
    assert [a.json()["error"]["param"] for a in answers] == ["temperature", None, None]
    assert "The engine is gone." in answers[1].json()["error"]["message"]
    assert {a.headers.get("x-should-retry") for a in answers[1:]} == {"false"}
    assert record.statuses == ["error", "error"]


def test_a_long_answer_of_policies_holds_up_nobody(provider: Provider, record: Recorded, tmp_path: Path) -> None:
    top = tuple(ShownToken(f"word{i}", -float(i)) for i in range(20))
    told = msgspec.structs.replace(
        answer("yes").candidates[0], shown=(ShownToken("yes", -0.5, top_logprobs=top),) * 100
    )
    found = answer("yes")
    candidates = tuple(msgspec.structs.replace(told, index=i, token_ids=(1,) * 100) for i in range(64))
    found = msgspec.structs.replace(found, candidates=candidates, usage=Usage(3, 6400))
    longest = loop_time.Longest(tmp_path / "loop")

    async def watched() -> Callable[[], None]:
        return loop_time.watch(asyncio.get_running_loop(), longest.tell)

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            made = next(found for found in server._gateways.running.values() if found.url == gate.origin).opened
            over = asyncio.run_coroutine_threadsafe(watched(), made.loop).result()
            asked = {"n": 64, "logprobs": True, "top_logprobs": 20, "messages": [{"role": "user", "content": "x"}]}
            for stream in (False, True):
                got = httpx.post(f"{gate.url}/chat/completions", json={**asked, "stream": stream}, timeout=60)
                assert got.text.count("word19") == 6400
            made.loop.call_soon_threadsafe(over)
        return 1.0

    record(app, lambda call: found)
    assert record.statuses == ["ok", "ok"]
    assert longest.seconds < loop_time.MOST


def test_a_late_call_does_not_reach_the_policies(provider: Provider, record: Recorded, tmp_path: Path) -> None:
    urls: list[str] = []

    def app(task: Any) -> float:
        with cotune.gateway() as gate:
            urls.append(gate.url)
        return 1.0

    record(app, lambda call: "policy")
    body = {"messages": [{"role": "user", "content": "late"}]}
    refused = httpx.post(f"{urls[0]}/chat/completions", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "episode_ended")
    assert record.calls == [] and provider.requests == []


def by_client(url: str) -> None:
    httpx.post(f"{url}/chat/completions", json={"messages": [{"role": "user", "content": "x"}]}).raise_for_status()


def by_process(url: str) -> None:
    subprocess.check_output([sys.executable, "-c", APP, url, url])


@pytest.mark.parametrize("ask", [by_client, by_process])
def test_a_loop_that_waits_for_its_own_gateway_is_answered_and_named(
    record: Recorded, ask: Callable[[str], None]
) -> None:
    async def app(task: Any) -> float:
        with cotune.gateway() as gate:
            ask(gate.role_url("planner"))
        return 1.0

    outcome = record(app, lambda call: "policy")
    assert outcome.rewards == {"team": 1.0}
    assert outcome.live.warnings == {"blocked_loop": len(record.calls)} and set(record.statuses) == {"ok"}


def test_outside_an_episode_it_says_what_to_do() -> None:
    with pytest.raises(WorkflowError, match="cotune gateway"), cotune.gateway():
        pass
