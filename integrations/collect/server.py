"""`cotune collect`: receives the batches of many applications, and answers when they are committed."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotune.collect.open_sink import open_folder
from cotune.errors import CotuneError, RecordError
from cotune.integrations.collect.apps import Apps
from cotune.integrations.collect.batch import COLLECTOR_HEADER, MEDIA_TYPE, PATH, VERSION, Batch, read_batch
from cotune.integrations.collect.checks import MOST_NAMES, KeyUse, select_valid
from cotune.integrations.collect.counts import Counts
from cotune.integrations.collect.otlp import PATH as SPANS
from cotune.integrations.collect.otlp import PROTOBUF, read_spans, records_of, response_body
from cotune.integrations.web.http.bodies import decoded, inflated
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import (
    BodyRoom,
    RequestError,
    application,
    header,
    invalid_value,
    json_response,
    read_any,
)
from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.recording.rewards import reward_records
from cotune.records.ids import key_target, pack_ids
from cotune.records.structs import CallRecord, Record, Segment
from cotune.storage.open_store import StoreUnavailableError, without_password
from cotune.storage.protocol import Store
from cotune.terminal import suggest

log = logging.getLogger("cotune.collect")

WAITING_BODIES = 4
"""The most bodies of the largest size that may arrive or be stored at once. Others are asked to wait."""
THREADS = 8
"""The number of batches that are read and committed at once."""
SLOW_SECONDS = 5.0
"""How long a commit may take before GET /health reports it, for example while another writer blocks the database."""
OPENING_PAUSE = 2.0
"""Seconds between two attempts to reach the database at the start."""
FEEDBACK = "/v1/feedback"
DROPPED = {"lost": "unstorable", "refused": "trained", "foreign": "foreign"}
"""The reasons for which a store leaves out records, by the store's counters."""


class GiveFeedback(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /v1/feedback: rewards of an episode, given by its id or by the application's key."""

    episode: str = ""
    key: str = ""
    reward: float | bool | dict[str, float | bool] | None = None
    text: str = ""
    app: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The numbers of records of a request that were stored and refused."""

    stored: Counter[str]
    """Stored records by kind, for example `call`."""
    refused: Counter[str]
    """Refused records by reason."""

    def answer(self) -> dict[str, Any]:
        """The answer to the sender of a batch."""
        return {"stored": self.stored.total(), "refused": self.refused.total(), "reasons": dict(self.refused)}


class Collector:
    """A running collector with its store, its applications and its counts."""

    def __init__(self, store: Store, apps: Apps, limits: BodyLimits) -> None:
        """The requests of a collector, which stores records of the applications `apps` in `store`."""
        self.store = store
        self.apps = apps
        self.limits = limits
        self.counts = Counts()
        self.room = BodyRoom(WAITING_BODIES * limits.max_body)
        """The bytes of bodies that arrive or are being stored, before they are unpacked."""
        self.failing = False
        """Whether the last batch could not be stored."""
        self._commits: set[float] = set()
        """The start of each commit that has not ended, by `time.monotonic`."""
        self._work = ThreadPoolExecutor(THREADS, "cotune-collect")

    async def batch(self, request: Request) -> Response:
        """POST /v1/batches: store the records of a batch, and answer how many were stored and why others were not."""
        raw, _ = await self._body(request, MEDIA_TYPE)

        def store() -> Response:
            """Store the batch. It runs on a thread, as decoding and storing would block the event loop."""
            batch = _read(self._unpacked(request, raw))
            app = self.apps.app(request.scope, batch.app)
            records = list(itertools.chain.from_iterable(batch.parts))
            # Records that the sender left out, by reason.
            left_out = {}
            if batch.dropped:
                left_out["dropped"] = batch.dropped
            if batch.sampled:
                left_out["sampled"] = batch.sampled
            outcome = self._commit_records(app, records, left_out)
            self.counts.add("source_dropped_records", batch.dropped, app=app)
            self.counts.add("source_sampled_calls", batch.sampled, app=app)
            return json_response(outcome.answer())

        return await self._on_thread(len(raw), store)

    async def spans(self, request: Request) -> Response:
        """POST /v1/traces: store the LLM calls among spans of OpenTelemetry, and answer how many were not stored."""
        raw, kind = await self._body(request, "application/json", PROTOBUF)

        def store() -> Response:
            """Store the spans as records of episodes. Calls that could not be stored count as rejected spans."""
            spans, service = read_spans(self._unpacked(request, raw), kind, self.limits.max_values)
            left_out: Counter[str] = Counter()
            records = records_of(spans, left_out)
            for reason, count in left_out.items():
                self.counts.add("left_out_spans", count, reason=reason)
            app = self.apps.app(request.scope, "", default=service)
            outcome = self._commit_records(app, records)
            calls = sum(isinstance(record, CallRecord) for record in records)
            rejected_calls = calls - outcome.stored["call"]
            return Response(response_body(kind, rejected_calls, outcome.refused), media_type=kind)

        return await self._on_thread(len(raw), store)

    async def feedback(self, request: Request) -> Response:
        """POST /v1/feedback: reward an episode after its end, by its id or by its key."""
        raw, _ = await self._body(request, "application/json")

        def store() -> Response:
            """Check and store the rewards. A number is the reward `team`; values of null are left out."""
            body = decoded(self._unpacked(request, raw), GiveFeedback, self.limits.max_values)
            app = self.apps.app(request.scope, body.app)
            if bool(body.episode) == bool(body.key):
                text = "Either `episode` or `key` is needed, and not both."
                raise RequestError(400, text, param="episode", code="invalid_value")
            named_values = body.reward if isinstance(body.reward, dict) else {"team": body.reward}
            rewards = {name: float(value) for name, value in named_values.items() if value is not None}
            if len(rewards) > MOST_NAMES:
                text = f"A request has at most {MOST_NAMES} rewards, not {len(rewards)}."
                raise RequestError(400, text, param="reward", code="invalid_value")
            if not rewards and not body.text.strip():
                raise RequestError(400, "A `reward` or a `text` is needed.", param="reward", code="invalid_value")
            target = body.episode or key_target(app, body.key)
            outcome = self._commit_records(app, reward_records(target, rewards, body.text))
            if outcome.refused:
                text = f"{(body.episode or body.key)[:100]!r} cannot be rewarded: {', '.join(outcome.refused)}."
                raise RequestError(400, text, param="episode", code="invalid_value")
            return json_response({"target": target, "rewards": rewards})

        return await self._on_thread(len(raw), store)

    async def _body(self, request: Request, *kinds: str) -> tuple[bytes, str]:
        """The unchanged body of a request, and its type. Raises RequestError, with 429 if too many bodies wait."""
        self.apps.check(request.scope)
        kind = header(request.scope, b"content-type").split(b";")[0].strip().lower().decode("latin-1")
        if kind not in kinds:
            text = f"The body must be sent as Content-Type: {' or '.join(kinds)}."
            raise RequestError(415, text, code="unsupported_media_type")
        self.room.check()
        return await read_any(request.scope, request.receive, self.limits.max_body, self.room), kind

    def _unpacked(self, request: Request, raw: bytes) -> bytes:
        coding = header(request.scope, b"content-encoding").decode("latin-1")
        body = inflated(raw, coding, self.limits.max_body, "--max-body")
        self.counts.add("bytes", len(raw), form="packed")
        self.counts.add("bytes", len(body), form="unpacked")
        return body

    async def _on_thread(self, size: int, work: Callable[[], Response]) -> Response:
        """Do work on a body of `size` bytes in a thread. Meanwhile the body takes up room."""
        self.room.bytes += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._work, work)
        finally:
            self.room.bytes -= size

    def _commit_records(
        self, app: str, records: Sequence[Record], left_out: Mapping[str, int] | None = None
    ) -> Outcome:
        """Check and commit records of an application, and the counts of records that it has left out.

        Raises RequestError (503) if the store fails.
        """
        # 1. Check the records.
        parents = {record.parent for record in records if isinstance(record, Segment) and record.parent is not None}
        stored_parents = self.store.figures().stored_segments(parents)

        def stored_path(segment: str) -> bytes | None:
            if segment not in stored_parents:
                return None
            try:
                return pack_ids(self.store.token_ids(segment))
            except RecordError:
                return None

        refused: Counter[str] = Counter()  # by reason
        keys = KeyUse(records, app, self.store)
        valid_records = select_valid(records, app, stored_path, keys, refused)

        # 2. Commit the valid ones. The store may drop some of them.
        stored_kinds = Counter(map(_kind, valid_records))
        for dropped_of_slice in self._commit_slices(keys.slices(valid_records), left_out):
            for counter, dropped_records in dropped_of_slice.items():
                refused[DROPPED[counter]] += len(dropped_records)
                stored_kinds.subtract(map(_kind, dropped_records))

        # 3. Count what was stored and refused.
        for kind, count in stored_kinds.items():
            self.counts.add("records", count, app=app, kind=kind)
        for reason, count in refused.items():
            self.counts.add("refused_records", count, app=app, reason=reason)
            log.warning("%d records of %r are refused: %s", count, app, reason)
        return Outcome(stored_kinds, refused)

    def _commit_slices(
        self, slices: Iterable[Sequence[Record]], left_out: Mapping[str, int] | None
    ) -> list[Mapping[str, Sequence[Record]]]:
        """Commit the slices of a batch one after the other. `left_out` counts the records that the sender left out.

        Returns, for each slice, the records that the store did not accept, by the name of the counter that counts them
        ("lost", "refused" or "foreign"). Raises RequestError (503) if the store fails.
        """
        start = time.monotonic()
        self._commits.add(start)
        try:
            *earlier_slices, last_slice = slices
            dropped_of_slices = [self.store.commit(earlier_slice) for earlier_slice in earlier_slices]
            # After a failed commit, the batch is sent again, so only the last commit may count the left-out records.
            dropped_of_slices.append(self.store.commit(last_slice, left_out))
        except CotuneError as error:
            self.counts.add("commits", outcome="failed")
            self.failing = True
            log.error("A batch cannot be stored: %s", error)
            text = "The store takes no records now: send the batch again later."
            raise RequestError(503, text, code="store_failed", headers={"retry-after": "5"}) from None
        finally:
            self._commits.discard(start)
        self.counts.add("commits", outcome="ok")
        self.failing = False
        self.counts.add("commit_seconds", time.monotonic() - start)
        return dropped_of_slices

    async def health(self, request: Request) -> Response:
        """GET /health: whether the store works, and how much waits for it."""
        oldest_commit = min(self._commits.copy(), default=math.inf)
        status = "ok"
        if self.failing:
            status = "store_failed"
        elif time.monotonic() - oldest_commit > SLOW_SECONDS:
            status = "store_slow"
        return json_response({"status": status, "lost": self.store.health.lost, "waiting_bytes": self.room.bytes})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics."""
        if self.apps.check(request.scope) is not None:
            text = "The counts are those of all applications: read them with the collector's own --token."
            raise RequestError(403, text, code="wrong_app")
        health = self.store.health
        gauges = {
            "waiting_bytes": ("Bytes of bodies that are being stored.", float(self.room.bytes)),
            "foreign_records": ("Records not stored, as their episodes belong to others.", float(health.foreign)),
            "late_rewards": ("Rewards of episodes that were trained on already.", float(health.refused)),
            "lost_records": ("Records that no store can hold.", float(health.lost)),
        }
        return PlainTextResponse(self.counts.text(gauges), media_type="text/plain; version=0.0.4")

    def app(self) -> ASGIApp:
        """The ASGI application."""
        routes = [
            Route(PATH, self.batch, methods=["POST"]),
            Route(SPANS, self.spans, methods=["POST"]),
            Route(FEEDBACK, self.feedback, methods=["POST"]),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
        ]
        paths = {route.path for route in routes}
        router = application(routes)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            """Answer a request, count it by path and status, and mark the answer as the collector's, so that a sender
            can tell it from a proxy's.
            """

            async def count_and_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    path = scope["path"] if scope["path"] in paths else "other"
                    self.counts.add("requests", path=path, status=str(message["status"]))
                    message["headers"] = [*message.get("headers", ()), (COLLECTOR_HEADER.encode(), b"1")]
                await send(message)

            await router(scope, receive, count_and_send)

        return answer

    def close(self) -> None:
        """Finish all requests that were received."""
        self._work.shutdown()


def _kind(record: Record) -> str:
    return type(record).__name__.removesuffix("Record").lower()


def _read(body: bytes) -> Batch:
    """The batch in a body. Raises RequestError (400) if the body is no batch or has another version."""
    try:
        batch = read_batch(body)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise RequestError(400, f"The body is no batch: {error}.", code="invalid_batch") from None
    if batch.v != VERSION:
        text = f"The batch has version {batch.v}; this collector reads version {VERSION}."
        raise RequestError(400, text, param="v", code="invalid_value")
    return batch


def running_collector(
    address: str, apps: Apps, *, limits: BodyLimits | None = None, host: str = "127.0.0.1", port: int = 0
) -> AbstractContextManager[RunningServer[Collector]]:
    """Run a collector in a background thread. Raises ConfigError, and RunError if it cannot start."""

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, Collector]]:
        with open_folder(address) as store:
            collector = Collector(store, apps, limits or BodyLimits())
            try:
                yield collector.app(), collector
            finally:
                await asyncio.to_thread(collector.close)

    # `running` only checks whether there is a token, which other machines need. `apps` checks the tokens of requests.
    any_token = "the tokens of applications" if apps.needed else None
    return running(
        opening,
        host=host,
        port=port,
        token=any_token,
        name="cotune-collector",
        date_header=False,
    )


def _await_store(address: str, say: Callable[[str], None]) -> None:
    """Wait until the database of `address` answers. Raises all errors of `open_folder` except StoreUnavailableError."""
    has_said = False
    while True:
        try:
            open_folder(address).close()
            return
        except StoreUnavailableError as error:
            if not has_said:
                say(f"Waiting for the store. {error}")
                has_said = True
            time.sleep(OPENING_PAUSE)


def collect(
    address: str, apps: Apps, say: Callable[[str], None], *, limits: BodyLimits | None = None, host: str, port: int
) -> None:
    """Wait for the database, then run a collector until Ctrl-C, SIGTERM or SIGHUP. It commits all received records."""
    with stopped_by_signals(), contextlib.ExitStack() as stack:
        _await_store(address, say)
        server = stack.enter_context(running_collector(address, apps, limits=limits, host=host, port=port))
        say(f"Collecting at {server.url}")
        say(f"Records: {server.opened.store.address}")
        say("Ctrl-C stops it.")
        suggest(
            f"COTUNE_COLLECTOR={server.url} COTUNE_APP=my_app python my_app.py",
            f"cotune show {without_password(address)}",
        )
        server.wait()
