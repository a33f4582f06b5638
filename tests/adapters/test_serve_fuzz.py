"""Malformed requests at the server of policies: each refused with a named cause, nothing left of them."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.open_policies import LocalPolicies, ServedModel
from cotune.adapters.serving import build_app
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.web.http.limits import BodyLimits
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion
from tests.adapters.test_serve import Scripted, scripted
from tests.integrations.http_fuzz import (
    BROKEN_HTTP,
    MESSAGES,
    WRONG,
    Attack,
    answer_to,
    bad_bodies,
    bad_framing,
    bad_paths,
    besiege,
    mixed,
    raw_answer,
    survive,
)

pytestmark = pytest.mark.slow

LIMIT = 8192
CHAT = {"model": "writer", "messages": MESSAGES}
WRONG_HERE: dict[str, list[Any]] = {
    **WRONG,
    "model": [*WRONG["model"], None, "", "judge", "../writer", "x" * 3000],
    "n": [*WRONG["n"], 0, -1, 129, 10**30],
    "temperature": ["hot", -0.1, 2.1, [], 10**400],
    "top_p": ["x", 0, 1.1, -1, {}],
    "top_k": ["x", -2, 1.5, [], 10**30],
    "max_tokens": ["x", 0, -1, 1.5, 10**30],
    "max_completion_tokens": ["x", 0, -1, [], {}],
    "stop": [1, [1], {}, ["x"] * 17, True],
    "seed": ["x", 1.5, [], 10**30],
    "logprobs": ["x", 1, []],
    "response_format": ["x", 1, []],
    "logit_bias": ["x", {"a": "b"}, {"a": 1}, {"5": 101}, [1]],
    "presence_penalty": ["x", -2.1, [], 10**400],
    "frequency_penalty": ["x", 2.1, {}],
    "repetition_penalty": ["x", 0, -1],
    "min_p": ["x", 1.1],
    "parallel_tool_calls": ["x", 2],
    "chat_template_kwargs": ["x", [1]],
    "reasoning_effort": [1, []],
    "stream_options": ["x", {"include_usage": "x"}, [1]],
    "return_token_ids": ["x", 1],
}
ODD_CONTENTS: list[Any] = [
    None,
    1,
    1.5,
    True,
    [],
    {},
    [1],
    [None],
    [[]],
    ["x"],
    [{}],
    [{"type": "text"}],
    {"a": {"b": 1}},
]
ODD_FIELDS: dict[str, list[Any]] = {
    "role": [None, 1, "", "nobody", [], {}, "x" * 99],
    "tool_calls": [1, "x", [1], [{}], [{"function": 1}], [{"function": {"name": 1, "arguments": "{"}}], {}],
    "tool_call_id": [1, []],
    "name": [1, [], {}],
    "reasoning_content": [1, []],
}
PATHS = [b"/v1/chat/completions", b"/v1/models/planner", b"/v1/models", b"/health"]


class Short(Scripted):
    """Answers one token to anything."""

    async def sample(self, prompt_token_ids: Any, n: int, params: Any, policy: PolicyRef) -> list[Completion]:
        self.asked.append((list(prompt_token_ids), n, params, policy))
        return [Completion((65,), (-0.5,), "stop")] * n


def local(chat: Any) -> LocalPolicies:
    served = {"writer": ServedModel("writer", PolicyRef("writer", 3), "lora", "/models/tiny", "b" * 64, "f" * 64)}
    return LocalPolicies(Short(), chat, served, [], 512)


@pytest.fixture(scope="module")
def template(base: Path) -> ChatTemplate:
    return ChatTemplate.load(base)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_requests_are_refused_with_their_cause(template: ChatTemplate, count: int) -> None:
    made = local(template)
    app = build_app(made, limits=BodyLimits(LIMIT))
    rng = random.Random(5)
    valid = json.dumps(CHAT).encode()
    bodies = bad_bodies(rng, CHAT, WRONG_HERE)
    attacks = mixed(rng, count, bodies, bodies, bad_framing(rng, valid, LIMIT), bad_paths(rng, PATHS))
    statuses = asyncio.run(survive(app, count, attacks, lambda: None))
    assert set(statuses) == {400, 404, 405, 413, 415}
    assert sum(statuses.values()) == count
    assert made.sampler.asked == []  # type: ignore[attr-defined]
    status, body = asyncio.run(answer_to(app, Attack(method="GET", path=b"/health")))
    assert (status, json.loads(body)["in_flight"]) == (200, 0)


@pytest.mark.parametrize("count", [500, pytest.param(10_000, marks=pytest.mark.long)])
def test_odd_messages_are_rendered_or_refused(template: ChatTemplate, count: int) -> None:
    """JSON that has the form of messages, and things in it that a template may not expect."""
    app = build_app(local(template))
    rng = random.Random(6)

    async def main() -> set[int]:
        seen = set()
        for _ in range(count):
            message: dict[str, Any] = {"role": rng.choice(["user", "assistant", "tool", "system"]), "content": "x"}
            for _ in range(rng.randrange(1, 3)):
                name = rng.choice(["content", *ODD_FIELDS])
                message[name] = rng.choice(ODD_CONTENTS if name == "content" else ODD_FIELDS[name])
            if rng.random() < 0.2:
                del message[rng.choice(list(message))]
            tools = rng.choice([None, [], [{}], [{"type": "function", "function": {"name": 1}}], [{"function": []}]])
            body = json.dumps({"model": "writer", "messages": [message], "tools": tools}).encode()
            status, answer = await answer_to(app, Attack(body=body))
            assert status in (200, 400), (body, answer)
            seen.add(status)
        return seen

    assert asyncio.run(main()) == {200, 400}


@pytest.mark.parametrize("count", [30, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_server_under_attack_answers_and_leaves_nothing(base: Path, count: int) -> None:
    rng = random.Random(8)
    bodies = bad_bodies(rng, {**CHAT, "model": base.name}, {k: v for k, v in WRONG_HERE.items() if k != "model"})
    statuses = besiege(["serve", str(base)], mixed(rng, count, bodies, bodies, bad_paths(rng, PATHS)))
    assert set(statuses) <= {0, *range(400, 500)}, statuses
    assert statuses[0] <= count / 50, statuses


def test_what_is_no_http_is_refused_with_its_cause() -> None:
    rng = random.Random(7)
    with scripted() as (endpoint, _):
        for sent in (*BROKEN_HTTP, *(rng.randbytes(60) + b"\r\n\r\n" for _ in range(200))):
            head, _, body = raw_answer(endpoint.port, sent).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 4"), (sent[:80], head)
            assert json.loads(body)["error"]["code"], (sent[:80], body)
