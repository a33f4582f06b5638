"""Which recorded episodes a run learns from: those of an application, a version, a time, or what is new since the last
run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import msgspec

from cotune.config.records import RecordsConfig
from cotune.errors import CotuneError
from cotune.reading.run import OpenedRun
from cotune.records.structs import Episode
from cotune.storage.episode_filters import EpisodeFilters, moment
from cotune.storage.open_store import store_identity
from cotune.storage.protocol import Store
from cotune.storage.run_layout import is_run
from cotune.trainer.run.run_folder import RunFolder

Marks = tuple[int, int]


class _Chosen:
    """A store of which only some episodes are listed."""

    def __init__(self, store: Store, filters: EpisodeFilters) -> None:
        self._store = store
        self._filters = filters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def episodes(self) -> Iterator[Episode]:
        return self._store.episodes(self._filters)


def choose(folder: RunFolder, settings: RecordsConfig, store: Store) -> tuple[Store, str]:
    """The store as the run sees it, and a sentence about it ("" for all of it).

    The run's first start fixes what is new; run.json keeps it, so that it is the same when the run is resumed.
    """
    held = dict(folder.described.get("held") or {})
    if "until" not in held:
        # The address is resolved now: a relative path and a symbolic link may lead elsewhere when a later run asks.
        store_place = store_identity(settings.path)
        before = _last(folder, settings, store_place) if settings.since == "last" else None
        since, name = before if before else ((0, 0), "")
        held |= {"since": since, "until": store.figures().marks(), "after": name, "store": store_place}
        folder.describe_as({**folder.described, "held": held})
    since, until = tuple(held["since"]), tuple(held["until"])
    filters = EpisodeFilters(app=settings.app)
    said = [f"app {settings.app}"] if settings.app else []
    if settings.since == "last":
        filters = msgspec.structs.replace(filters, new=(since, until))
        said.append(f"what is new since {held['after']}" if held["after"] else "everything, as no run came before")
    elif settings.since:
        filters = msgspec.structs.replace(filters, since=moment("records.since", settings.since))
        said.append(f"since {settings.since}")
    if not said:
        return store, ""
    return cast(Store, _Chosen(store, filters)), f"learning from {', '.join(said)}"


def _last(folder: RunFolder, settings: RecordsConfig, store_place: str) -> tuple[Marks, str] | None:
    """Up to where the last run beside this one has learned from the same store, and its name; None without any.

    Runs that failed or were stopped do not count: what they read is still to be learned."""
    found: list[tuple[Marks, str]] = []
    for path in folder.path.parent.iterdir():
        if path == folder.path or not is_run(path):
            continue
        try:
            with OpenedRun(path) as run:
                finished, described = run.state == "finished", run.description
        except CotuneError:
            continue
        asked, held = described.get("config", {}).get("records") or {}, described.get("held") or {}
        same = held.get("store") == store_place and asked.get("app", "") == settings.app
        if same and finished and "until" in held:
            found.append((tuple(held["until"]), path.name))
    return max(found, default=None)
