"""Seconds to read a store of 1,000,000 calls: `cotune show`, the viewer's pages, episodes since the last run, prune.

    python -m benchmarks.stored --store postgresql://localhost/cotune --calls 1000000 --prune
    python -m benchmarks.stored --store postgresql --calls 1000000 --prune

The records are made up: a deployed application answers for 60 days, with three calls of two roles in each episode, a
system prompt that all share, a question of each call's own, and a reward for every second episode. They are written as
a copy of another store is, in pages of 3,000 rows. A store that has records already is read as it is. `--prune` deletes
the older half at the end. `postgresql` is a server of its own. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast
from urllib.parse import quote

import httpx
import psutil
from rich.console import Console
from rich.table import Table

from cotune.cli.printing.overview import show_run
from cotune.integrations.web.viewer.server import viewing
from cotune.reading.recorded_answers import recorded_answers
from cotune.records.ids import address, ulid
from cotune.records.structs import CallRecord, Candidate, Episode, Message, PolicyRef, RewardRecord, Task, Usage
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.schema import WIDTHS, encode
from cotune.storage.sql.store import SqlStore
from cotune.storage.sql.upkeep import load
from tests.postgres import server

DAYS, PAGE, STEPS = 60, 1000, 3
ROLES = ("writer", "critic", "writer")
_WORDS = ("the plan is to read what the tester said and change one line", "at the end of the file that fails")


def _said(number: int, words: int) -> str:
    return " ".join(_WORDS[(number * 7 + i * i) % len(_WORDS)] for i in range(words))


def _page(first: int, episodes: int, began: float, gap: float, step_of: Callable[[int], int | None]) -> Iterator[Any]:
    system = {"role": "system", "content": _said(1, 30)}
    yield Message(address(b"system"), system)
    for number in range(first, first + episodes):
        started = began + number * gap
        at = int(started * 1000) << 80 | number << 8
        id = ulid(at)
        for step in range(STEPS):
            question = Message(
                address(f"{number} {step}".encode()), {"role": "user", "content": _said(number + step, 15)}
            )
            text = _said(number * 3 + step, 10)
            yield question
            yield CallRecord(
                id=ulid(at + step + 1), episode=id, role=ROLES[step], step=step, turn=step // 2,
                messages=(address(b"system"), question.id), model="m", policy=PolicyRef("p", number // 50_000),
                app="desk", started=started + step, latency=0.8, usage=Usage(250, 60), chosen=0,
                candidates=(Candidate(index=0, text=text, message={"role": "assistant", "content": text}),),
            )  # fmt: skip
        yield Episode(
            id=id, task=Task(id=f"t{number % 5000}", input={"question": _said(number, 8)}), workflow="solve",
            app="desk", key=f"order-{number}", started=started, latency=3.0, calls=STEPS,
            training_step=step_of(number), phase="trace" if step_of(number) is None else "train",
            status="error" if number % 50 == 0 else "ok", error="ValueError: no answer" if number % 50 == 0 else None,
        )  # fmt: skip
        if number % 2:
            yield RewardRecord(id, "stars", number % 5 / 4, started + 3600, "desk")


def fill(
    store: SqlStore[Any], calls: int, told: Callable[[str], None], step_of: Callable[[int], int | None] = lambda _: None
) -> float:
    """Write so many calls; return the seconds of processor time that this process took. `step_of` tells the training
    step of each episode, None for one of an application at work."""
    episodes = math.ceil(calls / STEPS)
    began, gap = time.time() - DAYS * 86400, DAYS * 86400 / episodes
    before = sum(os.times()[:2])
    for first in range(0, episodes, PAGE):
        records = list(_page(first, min(PAGE, episodes - first), began, gap, step_of))
        rows, _ = encode(records, ())
        for table in WIDTHS:
            of_table = [row for name, row in rows if name == table]
            if table == "messages":  # used when their calls were made, and the shared one still today
                of_table = [of_table[0], *((*row[:2], began + first * gap) for row in of_table[1:])]
            if of_table and load(store, table, of_table):
                raise RuntimeError(f"rows of {table} were lost")
        if first // PAGE % 20 == 0:
            told(f"{first * STEPS:,} calls")
    return sum(os.times()[:2]) - before


def vacuum(address: str) -> None:
    """The work that PostgreSQL does by itself soon after."""
    import psycopg

    with psycopg.connect(address, autocommit=True) as db:
        db.execute("VACUUM ANALYZE")


def readings(store: Store, where: str, viewer: str) -> dict[str, Callable[[], object]]:
    """The timed functions, by name. `viewer` is the address of the store's pages."""
    newest = EpisodeFilters()
    last = store.figures().episode_ids(newest, 1)[0]
    middle = EpisodeFilters(before=ulid(int((time.time() - DAYS * 43200) * 1000) << 80))
    episodes, rewards = store.figures().marks()
    night = EpisodeFilters(
        app="desk", new=((int(episodes * (1 - 1 / DAYS)), int(rewards * (1 - 1 / DAYS))), (episodes, rewards))
    )

    def learned(filters: EpisodeFilters) -> int:
        return sum(1 for _ in recorded_answers(store, store.episodes(filters), Counter()))

    def page(path: str) -> Callable[[], object]:
        return lambda: httpx.get(f"{viewer}{path}", timeout=600, follow_redirects=True).raise_for_status()

    pages = {"overview": "", "use of calls": "/use", "tasks": "/tasks", "episodes": "/episodes", "calls": "/calls"}
    return {
        **{f"viewer: {name}": page(path) for name, path in pages.items()},
        "show": lambda: show_run(where),
        "show, one episode": lambda: show_run(where, episode=last),
        "list: newest page": lambda: store.figures().episode_lines(newest, 50),
        "list: page in the middle": lambda: store.figures().episode_lines(middle, 50),
        "list: rewarded low": lambda: store.figures().episode_lines(EpisodeFilters(low=0.9), 50),
        "list: count of all": lambda: store.figures().episode_count(newest),
        "list: a role": lambda: store.figures().episode_lines(EpisodeFilters(role="critic"), 50),
        "search of a page": lambda: store.figures().episodes_with_text(
            "tester", store.figures().episode_ids(newest, 500), {}
        ),
        "tokens by role": lambda: store.figures().use(0),
        "tasks": lambda: store.figures().outcomes_by_task("trace", "lowest"),
        "records list": store.figures().apps,
        "records list --by role,day": store.figures().by_day,
        "key to episodes": lambda: store.figures().episodes_with_key("desk", "order-77777"),
        "since last: find the episodes": lambda: sum(1 for _ in store.episodes(night)),
        "since last: read the answers": lambda: learned(night),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the store if it is empty, time each reading twice, and prune."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", required=True, help="records file or postgresql://..., which may be filled")
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--prune", action="store_true", help="delete the older half at the end")
    options = parser.parse_args(arguments)
    console = Console()
    database_server = server(durable=True) if options.store == "postgresql" else contextlib.nullcontext()
    with database_server as database:
        print(
            json.dumps(
                measure(database.database() if database else options.store, options.calls, options.prune, console)
            )
        )


def measure(address: str, calls: int, prune: bool, console: Console) -> dict[str, Any]:
    """Seconds of each reading, twice, and of filling and pruning."""
    figures: dict[str, Any] = {"calls": calls, "store": address.partition(":")[0] if "://" in address else "file"}
    figures["load"] = [round(os.getloadavg()[0], 1)]
    with open_store(address) as opened:
        store = cast(SqlStore[Any], opened)
        if not store.figures().counts()[1]:
            began = time.perf_counter()
            figures["fill_cpu_s"] = round(fill(store, calls, console.print), 1)
            figures["fill_s"] = round(time.perf_counter() - began, 1)
            if "://" in address:
                vacuum(address)
        store.flush()
        table = Table("reading", "first, s", "again, s", title=f"{store.figures().counts()[1]:,} calls")
        with viewing([address]) as pages:
            viewer = f"{pages.url}/run/{quote(pages.opened[0].name, safe='')}"
            for name, read in readings(store, address, viewer).items():
                times = []
                for _ in range(2):
                    began = time.perf_counter()
                    read()
                    times.append(time.perf_counter() - began)
                figures[name] = [round(seconds, 3) for seconds in times]
                table.add_row(name, *(f"{seconds:.2f}" for seconds in times))
        console.print(table)
        if prune:
            began = time.perf_counter()
            counts: Counter[str] = Counter()
            for part in prune(store, time.time() - DAYS * 43200):
                counts.update(part)
            figures["prune_s"] = round(time.perf_counter() - began, 1)
            console.print(f"pruned {dict(counts)} in {figures['prune_s']} s")
    figures["memory_mb"] = round(psutil.Process().memory_info().rss / 2**20)
    figures["load"].append(round(os.getloadavg()[0], 1))
    return figures


if __name__ == "__main__":
    main()
