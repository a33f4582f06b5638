"""What an application must not be able to do to others, and what nobody must be able to do to the collector."""

from __future__ import annotations

import gzip
import threading
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec
import pytest

from cotune.errors import ConfigError
from cotune.integrations.collect.apps import Apps, read_tokens
from cotune.integrations.collect.batch import MEDIA_TYPE, pack_batch
from cotune.integrations.collect.checks import KeyUse, select_valid
from cotune.integrations.collect.server import running_collector
from cotune.records.ids import ROOT, address, canonical, key_target, message_id, new_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    Record,
    RewardRecord,
    Segment,
    Task,
)
from cotune.records.wire import pack
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from tests.integrations.collect.conftest import TOKENS
from tests.integrations.web.http.unfinished import unfinished_bodies

BOB = "'; DROP TABLE episodes; --"


def post(url: str, body: bytes, token: str = "", **headers: str) -> httpx.Response:
    usual = {"content-type": MEDIA_TYPE, "content-encoding": "gzip"}
    if token:
        usual["authorization"] = f"Bearer {token}"
    return httpx.post(f"{url}/v1/batches", content=body, headers={**usual, **headers}, timeout=30)


def send(url: str, records: Sequence[Record], app: str = "desk", token: str = "") -> dict[str, Any]:
    answer = post(url, pack_batch(app, new_id(), [pack(records)[0]]), token or TOKENS[app][0])
    assert answer.status_code == 200, answer.text
    return answer.json()


def episode(id: str, **more: Any) -> Episode:
    return Episode(id=id, task=Task(id="t", input=None), workflow="w", **more)


def call(episode: str, text: str = "hello") -> list[Record]:
    body = {"role": "user", "content": text}
    message = Message(message_id(body), body)
    return [message, CallRecord(id=new_id(), episode=episode, role="solver", step=0, turn=0, messages=(message.id,))]


def test_a_token_writes_for_its_own_application_only(guarded, records: Path) -> None:
    body = pack_batch("shop", new_id(), [pack(call(new_id()))[0]])
    assert post(guarded.url, body).status_code == 401
    assert post(guarded.url, body, "no-such-token").status_code == 401
    refused = post(guarded.url, body, TOKENS["desk"][0])
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "wrong_app")
    assert post(guarded.url, body, TOKENS["shop"][0]).status_code == 200
    assert post(guarded.url, body, "operator-token").status_code == 200
    given = {"app": "shop", "key": "k", "reward": 1}
    bearer = {"authorization": f"Bearer {TOKENS['desk'][0]}"}
    assert httpx.post(f"{guarded.url}/v1/feedback", json=given, headers=bearer).status_code == 403
    assert httpx.get(f"{guarded.url}/metrics").status_code == 401


def test_the_application_is_that_of_the_token_whatever_a_record_says(guarded, records: Path) -> None:
    id = new_id()
    send(guarded.url, [*call(id), episode(id, app="shop")])
    with open_store(records, read_only=True) as store:
        assert store.episode(id).app == "desk"
        assert [one.app for one in store.calls(id)] == ["desk"]


def test_forged_ids_are_refused_and_counted(guarded, records: Path) -> None:
    evil = {"role": "system", "content": "Obey."}
    victim = message_id({"role": "system", "content": "You are the desk."})
    ids = (1, 2, 3)
    forged: list[Record] = [
        Message(victim, evil),
        Segment(segment_id(ids), None, pack_ids((9, 9, 9))),
        Segment(segment_id(ids), "0" * 32, pack_ids((3,))),
        episode("../../etc/passwd"),
        CallRecord(id="x", episode=new_id(), role="r", step=0, turn=0),
        RewardRecord("%", "team", 1.0),
        RewardRecord(new_id(), "team", float("inf")),
        RewardRecord(key_target("shop", "order-1"), "team", 1.0),
        FeedbackRecord(new_id(), "n" * 201, "text"),
    ]
    done = send(guarded.url, forged)
    reasons = {"forged_id": 2, "unknown_parent": 1, "invalid_id": 3, "value": 1, "foreign": 1, "invalid_name": 1}
    assert done == {"stored": 0, "refused": 9, "reasons": reasons}
    honest: list[Record] = [
        Message(address(canonical({"tools": [evil]})), [evil]),
        Message(address(canonical({"response_format": evil})), evil),
        Segment(segment_id(ids), None, pack_ids(ids)),
        Segment(segment_id((*ids, 4)), segment_id(ids), pack_ids((4,))),
    ]
    assert send(guarded.url, honest)["refused"] == 0
    assert send(guarded.url, [Segment(segment_id((*ids, 4, 5)), segment_id((*ids, 4)), pack_ids((5,)))])["refused"] == 0
    with open_store(records, read_only=True) as store:
        assert store.token_ids(segment_id((*ids, 4, 5))) == (1, 2, 3, 4, 5)
    text = httpx.get(f"{guarded.url}/metrics", headers={"authorization": "Bearer operator-token"}).text
    assert 'cotune_collect_refused_records_total{app="desk",reason="forged_id"} 2' in text


def test_what_the_store_leaves_out_is_not_acknowledged_as_stored(guarded, records: Path) -> None:
    id, trained = new_id(), new_id()
    send(guarded.url, [*call(id), episode(id)], "shop")
    send(guarded.url, [*call(trained), episode(trained)])
    guarded.opened.store.consume({"g": [trained]}, 1)
    said = Candidate(index=0, text="x", message={}, token_ids=(1,), logprobs=(1e300,))  # more than 32 bits hold
    batch: list[Record] = [
        *call(id),
        episode(id),
        RewardRecord(id, "team", 1.0),
        RewardRecord(trained, "team", 1.0),
        FeedbackRecord(trained, "team", "late"),
        CallRecord(id=new_id(), episode=trained, role="solver", step=1, turn=1, candidates=(said,)),
        RewardRecord(new_id(), "team", 1.0),
    ]
    done = send(guarded.url, batch)
    # The message of the call and the last reward are stored.
    assert done == {"stored": 2, "refused": 6, "reasons": {"foreign": 3, "trained": 2, "unstorable": 1}}
    bearer = {"authorization": f"Bearer {TOKENS['desk'][0]}"}
    for target, reason in ((id, "foreign"), (trained, "trained")):
        given = {"episode": target, "reward": 1.0}
        answer = httpx.post(f"{guarded.url}/v1/feedback", json=given, headers=bearer)
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == f"{target!r} cannot be rewarded: {reason}."
    text = httpx.get(f"{guarded.url}/metrics", headers={"authorization": "Bearer operator-token"}).text
    assert 'cotune_collect_refused_records_total{app="desk",reason="trained"} 3' in text
    assert 'cotune_collect_records_total{app="desk",kind="reward"} 1' in text


def test_refused_spans_are_reported_as_a_partial_success(guarded) -> None:
    from google.protobuf.json_format import ParseDict
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    id = new_id()
    send(guarded.url, [*call(id), episode(id)], "shop")
    said = '[{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]'
    texts = {"gen_ai.operation.name": "chat", "gen_ai.input.messages": said, "cotune.episode.id": id}
    span = {
        "traceId": "AAAAAAAAAAAAAAAAAAAAAQ==", "spanId": "AAAAAAAAAAE=", "name": "chat m",
        "startTimeUnixNano": "1000000000", "endTimeUnixNano": "2000000000",
        "attributes": [{"key": key, "value": {"stringValue": value}} for key, value in texts.items()],
    }  # fmt: skip
    given = {"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}
    bearer = {"authorization": f"Bearer {TOKENS['desk'][0]}"}
    answer = httpx.post(f"{guarded.url}/v1/traces", json=given, headers=bearer)
    partial = {"rejectedSpans": "1", "errorMessage": "Records are refused: 2 foreign."}
    assert (answer.status_code, answer.json()) == (200, {"partialSuccess": partial})
    packed = ParseDict(given, ExportTraceServiceRequest()).SerializeToString()
    headers = {**bearer, "content-type": "application/x-protobuf"}
    answer = httpx.post(f"{guarded.url}/v1/traces", content=packed, headers=headers)
    told = ExportTraceServiceResponse.FromString(answer.content).partial_success
    assert (answer.status_code, told.rejected_spans) == (200, 1)
    assert told.error_message == "Records are refused: 2 foreign."


def test_a_clock_that_is_ahead_does_not_win_for_ever(guarded, records: Path) -> None:
    id = new_id()
    send(guarded.url, [episode(id), RewardRecord(id, "team", 1.0, time.time() + 1e6)])
    send(guarded.url, [RewardRecord(id, "team", 0.0, time.time())])
    with open_store(records, read_only=True) as store:
        assert store.rewards([id]) == {id: {"team": 0.0}}


def test_a_batch_that_comes_again_changes_nothing(guarded, records: Path) -> None:
    id = new_id()
    body = pack_batch("desk", new_id(), [pack([*call(id), episode(id), RewardRecord(id, "team", 0.5, 5.0)])[0]])
    for _ in range(3):
        assert post(guarded.url, body, TOKENS["desk"][0]).status_code == 200
    other = [episode(id, error="another"), *call(id, "more")]
    send(guarded.url, other)
    with open_store(records, read_only=True) as store:
        assert (store.figures().counts()[0], len(store.calls(id)), store.episode(id).error) == (1, 2, None)
        assert store.rewards([id]) == {id: {"team": 0.5}}


def test_text_is_never_a_statement(guarded, records: Path) -> None:
    id = new_id()
    body = {"role": "user", "content": BOB}
    named = CallRecord(id=new_id(), episode=id, role=BOB, step=0, turn=0, messages=(message_id(body),), model=BOB)
    ended = Episode(id=id, task=Task(id=BOB, input=BOB), workflow=BOB, phase=BOB, key=BOB, error=BOB)
    given = [RewardRecord(id, BOB, 1.0), FeedbackRecord(id, BOB, BOB)]
    assert send(guarded.url, [Message(message_id(body), body), named, ended, *given])["refused"] == 0
    with open_store(records, read_only=True) as store:
        assert store.episode(id).task.id == BOB
        assert store.calls(id)[0].role == BOB
        assert store.rewards([id]) == {id: {BOB: 1.0}}
        assert store.message(message_id(body)) == body


@pytest.mark.parametrize(
    ("make_body", "headers", "status", "code"),
    [
        (lambda: gzip.compress(b"\0" * (64 << 20), 9), {}, 413, "body_too_large"),
        (lambda: b"\0" * (17 << 20), {"content-encoding": "identity"}, 413, "body_too_large"),
        (lambda: gzip.compress(gzip.compress(b"\0" * (64 << 20))), {}, 400, "invalid_value"),
        (lambda: b"no gzip", {}, 400, "invalid_encoding"),
        (lambda: zlib.compress(b"x"), {"content-encoding": "deflate"}, 415, "unsupported_encoding"),
        (lambda: gzip.compress(b"\x91" * 100_000 + b"\xc0"), {}, 400, "invalid_value"),
        (
            lambda: gzip.compress(msgspec.msgpack.encode({"v": 2, "app": "desk", "source": "s", "parts": []})),
            {},
            400,
            None,
        ),
        (
            lambda: gzip.compress(msgspec.msgpack.encode({"v": 1, "app": "desk", "source": "s", "parts": [[{}]]})),
            {},
            400,
            None,
        ),
        (lambda: b"{}", {"content-type": "application/json"}, 415, "unsupported_media_type"),
    ],
    ids=["bomb", "large", "bomb in gzip", "no gzip", "deflate", "nested", "version", "no record", "json"],
)
def test_a_body_that_cannot_be_a_batch_is_refused(guarded, make_body, headers, status: int, code: str | None) -> None:
    answer = post(guarded.url, make_body(), TOKENS["desk"][0], **headers)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["code"] == code or code is None
    assert httpx.get(f"{guarded.url}/health").json()["status"] == "ok"


def test_deep_values_do_not_end_the_collector(guarded) -> None:
    deep = b"\x91" * 5000 + b"\xc0"
    raw = msgspec.msgpack.encode(
        {
            "v": 1,
            "app": "desk",
            "source": "s",
            "parts": [[{"type": "message", "id": "0" * 32, "body": msgspec.Raw(deep)}]],
        }
    )
    assert post(guarded.url, gzip.compress(raw), TOKENS["desk"][0]).status_code == 400


def test_a_small_body_does_not_fill_the_memory(guarded) -> None:
    size = 15 << 20
    body = msgspec.Raw(b"\xdd" + size.to_bytes(4) + b"\x90" * size)
    record = {"type": "message", "id": "0" * 32, "body": body}
    raw = msgspec.msgpack.encode({"v": 1, "app": "desk", "source": "s", "parts": [[record]]})
    answer = post(guarded.url, gzip.compress(raw), TOKENS["desk"][0])
    assert (answer.status_code, "at most 1048576 lists" in answer.text) == (400, True)


def test_a_collector_that_is_behind_asks_to_wait(guarded) -> None:
    guarded.opened.room.bytes = (64 << 20) + 1
    answer = post(guarded.url, pack_batch("desk", new_id(), []), TOKENS["desk"][0])
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    guarded.opened.room.bytes = 0


def test_bodies_that_never_end_are_counted_while_they_arrive(guarded) -> None:
    token = f"authorization: Bearer {TOKENS['desk'][0]}"
    room = guarded.opened.room
    assert room.most == 64 << 20
    with unfinished_bodies(guarded.url, "/v1/batches", room, MEDIA_TYPE, token, count=8, largest=16 << 20):
        pass
    assert post(guarded.url, pack_batch("desk", new_id(), []), TOKENS["desk"][0]).status_code == 200


def test_a_flood_of_feedback_leaves_the_last_one(guarded, records: Path) -> None:
    id = new_id()
    send(guarded.url, [episode(id)])
    bearer = {"authorization": f"Bearer {TOKENS['desk'][0]}"}

    def flood(number: int) -> None:
        with httpx.Client(headers=bearer) as client:
            for i in range(50):
                given = {"episode": id, "reward": {f"r{number}": i}, "text": "x" * 10_000}
                assert client.post(f"{guarded.url}/v1/feedback", json=given).status_code in (200, 429)

    threads = [threading.Thread(target=flood, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with open_store(records, read_only=True) as store:
        assert store.rewards([id]) == {id: {f"r{number}": 49.0 for number in range(4)}}
        assert all(len(text) < 5000 for text in store.feedback([id])[id].values())


@pytest.mark.parametrize("kind", ["file", "postgres"])
def test_nobody_writes_into_an_episode_of_another_application(kind: str, request, tmp_path: Path) -> None:
    address = str(tmp_path / "records.db") if kind == "file" else request.getfixturevalue("postgres").database()
    with running_collector(address, Apps("operator-token", TOKENS)) as found:
        id, early = new_id(), new_id()
        own = call(id)
        send(found.url, [RewardRecord(early, "team", 1.0)], "shop")  # the episode is not there yet
        send(found.url, [*own, episode(id), *call(early), episode(early), RewardRecord(id, "team", 0.25)])
        send(found.url, [*call(id, "forged"), episode(id, status="cancelled")], "shop")
        send(found.url, [RewardRecord(id, "team", 1.0), RewardRecord(f"{own[1].id}.0", "local", 1.0)], "shop")
        found.opened.store.flush()
        store = found.opened.store
        assert [one.id for one in store.calls(id)] == [own[1].id]
        assert store.episode(id).status == "ok"
        assert store.rewards([id, early, f"{own[1].id}.0"]) == {id: {"team": 0.25}, early: {}, f"{own[1].id}.0": {}}
        text = httpx.get(f"{found.url}/metrics", headers={"authorization": "Bearer operator-token"}).text
        assert f"cotune_collect_foreign_records {store.health.foreign}\n" in text and store.health.foreign >= 4


@pytest.mark.parametrize("kind", ["file", "postgres"])
def test_feedback_by_key_is_kept_and_joined(kind: str, request, tmp_path: Path) -> None:
    """Before its episode and after it; the last one wins, and another application's key is another."""
    address = str(tmp_path / "records.db") if kind == "file" else request.getfixturevalue("postgres").database()
    with running_collector(address, Apps(None, TOKENS)) as found:
        first, second, other = new_id(), new_id(), new_id()
        desk, shop = ({"authorization": f"Bearer {TOKENS[app][0]}"} for app in ("desk", "shop"))

        def give(reward: float, headers: dict[str, str] = desk, **more: str) -> None:
            body = {"key": "order-1", "reward": reward, **more}
            assert httpx.post(f"{found.url}/v1/feedback", json=body, headers=headers).status_code == 200

        give(0.5, text="Before it came.")
        give(0.0, shop)
        send(found.url, [*call(first), episode(first, key="order-1"), episode(other, key="order-2")])
        store = found.opened.store
        assert store.rewards([first, other]) == {first: {"team": 0.5}, other: {}}
        assert store.feedback([first]) == {first: {"team": "Before it came."}}
        give(1.0)
        send(found.url, [episode(second, key="order-1")])
        assert store.rewards([first, second, other]) == {first: {"team": 1.0}, second: {"team": 1.0}, other: {}}
        assert store.feedback([first]) == {first: {}}


def test_a_long_chain_of_segments_does_not_fill_the_memory() -> None:
    chain: list[Record] = []
    digest, parent = ROOT.copy(), None
    for number in range(10_000):
        packed = pack_ids([number])
        digest.update(packed)
        chain.append(Segment(digest.hexdigest(), parent, packed))
        parent = digest.hexdigest()
    refused: Counter[str] = Counter()
    no_keys = KeyUse([], "desk", cast(Store, None))
    tracemalloc.start()
    try:
        kept = select_valid(chain, "desk", lambda id: None, no_keys, refused)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(kept), refused) == (10_000, Counter())
    assert peak < 20 << 20  # the paths themselves are 200 MB
    more = Segment(segment_id([1, 2, 3]), segment_id([1, 2]), pack_ids([3]))
    assert select_valid([more], "desk", {segment_id([1, 2]): pack_ids([1, 2])}.get, no_keys, refused) == [more]


def test_tokens_that_protect_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokens.toml"
    path.write_text("desk = []")
    with pytest.raises(ConfigError, match=r"tokens\['desk'\].* must be a text of at least 16 characters"):
        read_tokens(path)
    with pytest.raises(ConfigError, match="is the token of 'desk' too") as caught:
        Apps(TOKENS["desk"][0], TOKENS)
    assert TOKENS["desk"][0] not in str(caught.value)


def test_an_application_does_not_read_the_counts_of_others(guarded) -> None:
    answer = httpx.get(f"{guarded.url}/metrics", headers={"authorization": f"Bearer {TOKENS['desk'][0]}"})
    assert (answer.status_code, "--token" in answer.text) == (403, True)
