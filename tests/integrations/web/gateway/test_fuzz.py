"""Malformed requests at the gateway: each refused with a named cause, none forwarded, nothing left of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cotune.integrations.web.gateway.server import Gateway, running_gateway
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.http.limits import Limits
from cotune.storage.sqlite_store import SqliteStore
from tests.core.storage.whole_file import copied
from tests.integrations.http_fuzz import (
    BROKEN_HTTP,
    JSON,
    MESSAGES,
    WRONG,
    Attack,
    bad_bodies,
    bad_codings,
    bad_framing,
    bad_paths,
    besiege,
    mixed,
    raw_answer,
    survive,
)

NOWHERE = "http://127.0.0.1:9/v1"
LIMIT = 8192
CHAT = {"model": "m", "messages": MESSAGES}
VALID = json.dumps(CHAT).encode()
PATHS = [
    b"/v1/chat/completions",
    b"/v1/completions",
    b"/v1/responses",
    b"/v1/embeddings",
    b"/v1/models",
    b"/cotune/rewards",
]
WRONG_ROLES = [b"", b" ", b"x" * 201, b"a\x01b", b"\xff", "a\u200eb".encode(), b"\t"]
WRONG_IDS = [b"", b"x", b"../..", b"0" * 25, b"0" * 27, b"\xff", b"01M7YB9088R0RH0NJZ4NFQ65Yi", b"U" * 26]
WRONG_RESPONSES = {"input": [1, [], {}, [1], ["x"], True], "instructions": [1, {}], "model": [1], "tools": ["x", [1]]}
WRONG_CONTROL = {
    "/cotune/episodes": (
        {"task": {"id": "hello"}},
        {"workflow": [1, "", None], "rollout": [-1, "1", 1.5, 2**40], "phase": [[]], "extra": [1], "task_id": ["x"]},
    ),
    "/cotune/episodes/01M7YB9088R0RH0NJZ4NFQ65Y4/end": (
        {"rewards": {"hello": 1.0}},
        {"rewards": [1, {"a": "x"}, {"": 1}, {"a": None}], "status": ["fine", 1], "metrics": [[]], "error": [1]},
    ),
    "/cotune/rewards": (
        {"target": "01M7YB9088R0RH0NJZ4NFQ65Y4", "rewards": {"hello": 1.0}},
        {"target": ["", "x", 1, "0" * 26 + ".x"], "rewards": [{}, 1, {"a": "b"}], "extra": [1]},
    ),
}


def bad_identities(rng: random.Random) -> Iterator[Attack]:
    while True:
        role, episode = rng.choice(WRONG_ROLES), rng.choice(WRONG_IDS)
        headers, path = [JSON], b"/v1/chat/completions"
        match rng.randrange(6):
            case 0:
                headers.append((b"x-cotune-role", role))
            case 1:
                headers.append((b"x-cotune-episode", episode))
            case 2:
                headers.append((b"x-cotune-parents", rng.choice([b"x", b"a,b", b"0" * 26 + b",1", b"\xff"])))
            case 3:
                headers += [(b"x-cotune-role", b"a"), (b"x-cotune-role", b"b")]
            case 4:
                member = rng.choice([b"cotune.role=%ff", b"cotune.role", b"a=1,cotune.episode=x", b"cotune.role=\xff"])
                headers.append((b"baggage", member))
            case _:
                path = (
                    rng.choice([b"/r/%ff", b"/r/", b"/r/%20", b"/e/", b"/e/x", b"/r/%00", b"/e/%ff/r/a", b"/e/a/r/b"])
                    + path
                )
        yield Attack(path=path, headers=headers, body=VALID)


def bad_headers(rng: random.Random) -> Iterator[Attack]:
    while True:
        header = (rng.choice([b"x-a", b"accept", b"user-agent"]), rng.choice([b"\xff", b"a\xc3", b"\xed\xa0\x80"]))
        query = rng.choice([b"a\nb", b"a b", b"\xff", b"\x00"])
        fine = rng.random() < 0.5
        yield Attack(headers=[JSON, *([] if fine else [header])], query=query if fine else b"", body=VALID)


def bad_other_bodies(rng: random.Random) -> Iterator[Attack]:
    """At the other endpoints that take a body."""
    sources = {path: bad_bodies(rng, valid, wrong) for path, (valid, wrong) in WRONG_CONTROL.items()}
    sources["/v1/responses"] = bad_bodies(rng, {"model": "m", "input": "hello"}, WRONG_RESPONSES)
    while True:
        path = rng.choice(list(sources))
        attack = next(sources[path])
        attack.path = path.encode()
        yield attack


def all_attacks(rng: random.Random, count: int) -> Iterator[Attack]:
    return mixed(
        rng,
        count,
        bad_bodies(rng, CHAT, WRONG),
        bad_other_bodies(rng),
        bad_framing(rng, VALID, LIMIT),
        bad_codings(rng, VALID, LIMIT),
        bad_paths(rng, PATHS),
        bad_identities(rng),
        bad_headers(rng),
    )


@pytest.mark.slow
@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_malformed_requests_are_refused_with_their_cause(tmp_path: Path, count: int) -> None:
    async def main() -> None:
        rng = random.Random(5)
        attacks = all_attacks(rng, count)
        gateway = Gateway(GatewayConfig(upstream=NOWHERE, limits=Limits(max_body=LIMIT)), store)

        def nothing_left() -> None:
            assert gateway.proxy.in_flight == 0
            health = gateway.episodes.health()
            assert (health["open_episodes"], health["open_calls"]) == (0, 0)

        statuses = await survive(gateway, count, attacks, nothing_left)
        assert set(statuses) == {400, 404, 405, 413, 415}
        await gateway.close()
        assert sum(statuses.values()) == count

    with SqliteStore.open(tmp_path) as store:
        asyncio.run(main())
        store.flush()
        assert store.health.lost == 0


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_gateway_under_attack_answers_and_leaves_nothing(tmp_path: Path, count: int) -> None:
    rng = random.Random(8)
    attacks = all_attacks(rng, count)
    words = ["gateway", "--upstream", NOWHERE, "--records", str(tmp_path), "--max-body", str(LIMIT)]
    statuses = besiege(words, attacks)
    assert set(statuses) <= {0, *range(400, 500)}, statuses
    assert statuses[0] < count / 50, statuses
    with copied(tmp_path) as store:
        assert list(store.rows("SELECT id FROM calls")) == []


@pytest.mark.parametrize("seed", range(20))
def test_what_is_no_http_is_refused_with_its_cause(seed: int, served: int) -> None:
    rng = random.Random(seed)
    for sent in BROKEN_HTTP if seed == 0 else (rng.randbytes(60) + b"\r\n\r\n" for _ in range(10)):
        got = raw_answer(served, sent)
        head, _, body = got.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 4"), (sent[:80], got[:200])
        assert json.loads(body)["error"]["code"], (sent[:80], body)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with running_gateway(GatewayConfig(upstream=NOWHERE), tmp_path_factory.mktemp("records")) as running:
        yield running.port
        assert running.opened.proxy.in_flight == 0
