"""The choice of recorded episodes for a run: episodes of an application, after a time, or new since the last run."""

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
"""A position in a store (`Store.figures().marks()`). Episodes that are recorded later come after it."""


class _FilteredStore:
    """A store that lists only some of its episodes."""

    def __init__(self, store: Store, filters: EpisodeFilters) -> None:
        self._store = store
        self._filters = filters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def episodes(self) -> Iterator[Episode]:
        return self._store.episodes(self._filters)


def choose_episodes(folder: RunFolder, settings: RecordsConfig, store: Store) -> tuple[Store, str]:
    """Return the store with the chosen episodes, and a sentence about the choice, which is empty if all are chosen.

    The first start of the run decides which episodes are new. It writes them to run.json, so that a resumed run learns
    from the same ones.
    """
    # 1. The range of episodes: from the position in the store that the last run has reached, to the present end. It is
    # in the entry "held" of run.json, which has all that a resumed run must not change.
    held = dict(folder.described.get("held") or {})
    if "until" not in held:
        # The address is resolved now: a relative path and a symbolic link may lead elsewhere when a later run asks.
        store_place = store_identity(settings.path)
        first: Marks = (0, 0)
        previous_name = ""
        if settings.since == "last":
            previous = _last_run(folder, settings, store_place)
            if previous is not None:
                first, previous_name = previous
        held |= {"since": first, "until": store.figures().marks(), "after": previous_name, "store": store_place}
        folder.describe_as({**folder.described, "held": held})

    # 2. The filters of the settings, and the sentence about them.
    since = tuple(held["since"])
    until = tuple(held["until"])
    filters = EpisodeFilters(app=settings.app)
    choices: list[str] = []
    if settings.app:
        choices.append(f"app {settings.app}")
    if settings.since == "last":
        filters = msgspec.structs.replace(filters, new=(since, until))
        previous_run = held["after"]
        choices.append(f"all episodes since {previous_run}" if previous_run else "everything, as no run came before")
    elif settings.since:
        filters = msgspec.structs.replace(filters, since=moment("records.since", settings.since))
        choices.append(f"since {settings.since}")
    if not choices:
        return store, ""
    return cast(Store, _FilteredStore(store, filters)), f"learning from {', '.join(choices)}"


def _last_run(folder: RunFolder, settings: RecordsConfig, store_place: str) -> tuple[Marks, str] | None:
    """Find the last finished run next to this one that learned from the same episodes of the same store.

    Returns the position in the store up to which it has learned, and its name; None if no run has. Runs that
    failed or were stopped do not count, because their episodes are still to be learned.
    """
    finished_runs: list[tuple[Marks, str]] = []
    for path in folder.path.parent.iterdir():
        if path == folder.path or not is_run(path):
            continue
        try:
            with OpenedRun(path) as run:
                is_finished = run.state == "finished"
                run_json = run.description
        except CotuneError:
            continue  # a run that cannot be read is not known to be finished
        # `choose_episodes` has written the store, and the position that the run has reached.
        records = run_json.get("config", {}).get("records") or {}
        held = run_json.get("held") or {}
        is_same_choice = held.get("store") == store_place and records.get("app", "") == settings.app
        if is_finished and is_same_choice and "until" in held:
            finished_runs.append((tuple(held["until"]), path.name))
    return max(finished_runs, default=None)
