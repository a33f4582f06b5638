"""The HTTP interface to episodes: open, end, reward, and what was counted."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cotune.errors import CotuneError
from cotune.integrations.gateway.episodes import EndEpisode, Episodes, Name, OpenEpisode
from cotune.integrations.gateway.proxy import Proxy
from cotune.integrations.http.requests import Access, RequestError, application, decode_body, json_response, read_body
from cotune.storage.sqlite_store import SqliteStore

T = TypeVar("T")
_TARGET = re.compile(r"([0-9A-HJKMNP-TV-Z]{26})(?:\.(\d{1,4}))?")


class GiveRewards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /cotune/rewards: `target` is an episode id, or a call id and the index of a candidate."""

    target: str
    rewards: Annotated[dict[Name, float], msgspec.Meta(min_length=1)]


def control_app(
    episodes: Episodes, proxy: Proxy, access: Access, store: SqliteStore | None, max_body: int
) -> Starlette:
    """The Starlette application for all that is not an OpenAI interface."""

    async def body(request: Request, kind: type[T]) -> T:
        access.check(request.scope)
        return decode_body(await read_body(request.scope, request.receive, max_body), kind)

    async def open_(request: Request) -> Response:
        episode = episodes.start(await body(request, OpenEpisode))
        base = f"{request.base_url}e/{episode.id}"
        opened = {"id": episode.id, "task": episode.task.id, "base_url": f"{base}/v1", "roles_url": f"{base}/r"}
        return json_response(opened, 201)

    async def end(request: Request) -> Response:
        record = episodes.end(request.path_params["id"], await body(request, EndEpisode))
        return json_response({"id": record.id, "status": record.status, "calls": record.calls})

    async def reward(request: Request) -> Response:
        given = await body(request, GiveRewards)
        await _check_target(given.target, episodes, store)
        episodes.reward(given.target, given.rewards)
        return json_response({"target": given.target, "rewards": given.rewards})

    async def health(request: Request) -> Response:
        access.check_local(request.scope)
        stored = {"lost": store.lost, "refused": store.refused} if store is not None else {}
        counts = {"requests": proxy.counts, "in_flight": proxy.in_flight}
        return json_response({"status": "ok", **counts, **episodes.health(), **stored})

    return application(
        [
            Route("/cotune/episodes", open_, methods=["POST"]),
            Route("/cotune/episodes/{id}/end", end, methods=["POST"]),
            Route("/cotune/rewards", reward, methods=["POST"]),
            Route("/health", health),
        ],
    )


async def _check_target(target: str, episodes: Episodes, store: SqliteStore | None) -> None:
    """Raises RequestError for a target that is not an id (400) or not recorded (404)."""
    found = _TARGET.fullmatch(target)
    if found is None:
        text = "A target is an episode id, or CALL.INDEX for a candidate."
        raise RequestError(400, text, param="target", code="invalid_value")
    if store is None or (found[2] is None and target in episodes.open):
        return
    try:
        known = await asyncio.to_thread(_known, store, found[1], None if found[2] is None else int(found[2]))
    except CotuneError as error:
        raise RequestError(503, f"The records cannot be read: {error}", code="store_failed") from None
    if not known:
        raise RequestError(404, f"Nothing is recorded under {target}.", param="target", code="unknown_target")


def _known(store: SqliteStore, target: str, candidate: int | None) -> bool:
    store.flush()
    if candidate is None:
        return bool(store.rows("SELECT 1 FROM episodes WHERE id = ?", (target,)))
    rows = store.rows("SELECT episode FROM calls WHERE id = ?", (target,))
    calls = [call for (episode,) in rows for call in store.calls(episode) if call.id == target]
    return any(candidate < len(call.candidates) for call in calls)
