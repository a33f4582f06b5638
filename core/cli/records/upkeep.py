"""`cotune records list | prune | delete | copy | upgrade`: the content of a store, and its maintenance."""

from __future__ import annotations

import argparse
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, TypeAlias

from cotune.cli.command import RECORDS, Parser, parser_texts
from cotune.errors import ConfigError
from cotune.storage.episode_filters import moment
from cotune.tables import cells, grid, plural
from cotune.terminal import tell, terminal

if TYPE_CHECKING:
    from rich.table import Table

    from cotune.storage.sql.figures import AppCount, CallCount

Forms: TypeAlias = "argparse._SubParsersAction[Parser]"
_BY = ("app", "role", "version", "day")


def add_list(forms: Forms) -> None:
    """Add `cotune records list`."""
    text = "Count episodes and calls by application, role, version and day"
    form = forms.add_parser("list", help=text, **parser_texts(text, "cotune records list runs/r1 --by role,day"))
    form.add_argument("store", metavar="RECORDS", help=RECORDS)
    form.add_argument("--by", metavar="NAMES", help="any of app, role, version, day, separated by commas")
    form.add_argument("--app", default="", help="this application only")
    form.set_defaults(run_subcommand=_list)


def add_changes(forms: Forms) -> None:
    """Add the forms of `cotune records` that delete, copy or rewrite records."""
    text = "Delete episodes that are older than a time, with the messages that nothing else uses"
    example = "cotune records prune postgresql://localhost/cotune --older-than 30d --keep-trained"
    form = forms.add_parser("prune", help=text, **parser_texts(text, example))
    form.add_argument("store", metavar="RECORDS", help=RECORDS)
    form.add_argument(
        "--older-than", required=True, metavar="TIME", help="an age, such as 30d, 12h or 8w, or a day: 2026-11-30"
    )
    form.add_argument("--app", default="", help="this application only")
    form.add_argument("--keep-trained", action="store_true", help="keep episodes that a run was trained on")
    form.set_defaults(run_subcommand=_prune)

    text = "Delete episodes, by id or by the application's own key, with everything that only they use"
    example = "cotune records delete postgresql://localhost/cotune --app desk --key order-7"
    form = forms.add_parser("delete", help=text, **parser_texts(text, example))
    form.add_argument("store", metavar="RECORDS", help=RECORDS)
    chosen = form.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--episode", action="append", metavar="ID", help="an episode; repeat for several")
    chosen.add_argument("--key", help="the application's own key, as in cotune.trace(..., key=KEY)")
    form.add_argument("--app", default="", help="with --key: the application")
    form.set_defaults(run_subcommand=_delete)

    text = "Copy all records of one store into another; run it again to continue where it stopped"
    example = "cotune records copy runs/r1 postgresql://localhost/cotune"
    form = forms.add_parser("copy", help=text, **parser_texts(text, example))
    form.add_argument("store", metavar="FROM", help=RECORDS)
    form.add_argument("target", metavar="TO", help=RECORDS)
    form.set_defaults(run_subcommand=_copy)

    text = "Update the tables of a database that an older cotune created"
    example = "cotune records upgrade postgresql://localhost/cotune"
    form = forms.add_parser("upgrade", help=text, **parser_texts(text, example))
    form.add_argument("store", metavar="ADDRESS", help="postgresql://...")
    form.set_defaults(run_subcommand=_upgrade)


def _list(a: argparse.Namespace) -> int:
    """Print a table of applications, or with --by of calls. Raises ConfigError for an unknown column."""
    from cotune.storage.open_store import open_store

    names = a.by.split(",") if a.by else []
    if unknown := [name for name in names if name not in _BY]:
        raise ConfigError("--by", unknown[0], f"is not one of {', '.join(_BY)}", "For example: --by role,day")
    with open_store(a.store, read_only=True) as store:
        figures = store.figures()
        table = _calls_table(figures.by_day(a.app), names) if names else _apps_table(figures.apps(), a.app)
        terminal().print(table)
    return 0


def _apps_table(rows: Sequence[AppCount], app: str) -> Table:
    """A table of applications with their episodes and calls; with `app`, only of this application."""
    table = grid("app", "episodes>", "ok>", "calls>", "rewarded>", "first", "last")
    for row in rows:
        if app in ("", row.app):
            times = (_time_text(row.first), _time_text(row.last))
            table.add_row(*cells((row.app or "-", row.episodes, row.ok, row.calls, row.rewarded, *times)))
    return table


def _calls_table(rows: Sequence[CallCount], names: Sequence[str]) -> Table:
    """A table of calls and tokens by application, role, version or day. `names` are the columns to count by."""
    sums: defaultdict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    for row in rows:
        version = f"{row.policy}@{row.version}" if row.policy else "-"
        columns = {"app": row.app or "-", "role": row.role, "day": row.day or "-", "version": version}
        counts = sums[tuple(columns[name] for name in names)]
        counts["calls"] += row.calls
        counts["failed"] += row.failed
        counts["prompt tokens"] += row.prompt_tokens
        counts["answer tokens"] += row.answer_tokens
    table = grid(*names, "calls>", "failed>", "prompt tokens>", "answer tokens>")
    for key in sorted(sums):
        counts = sums[key]
        figures = (counts["calls"], counts["failed"], counts["prompt tokens"], counts["answer tokens"])
        table.add_row(*cells((*key, *figures)))
    return table


def _time_text(seconds: float | None) -> str:
    """A Unix time as text, in UTC; `-` without a time."""
    if not seconds:
        return "-"
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):  # the clock of the recording machine was wrong
        return "no date"


def _prune(a: argparse.Namespace) -> int:
    """Delete episodes older than --older-than, and print the numbers of deleted records."""
    from cotune.storage.open_store import open_store
    from cotune.storage.sql.upkeep import prune

    before = moment("--older-than", a.older_than)
    counts: Counter[str] = Counter()
    with open_store(a.store) as store, _progress_bar("episodes", None) as advance:
        for deleted in prune(store, before, app=a.app, keep_trained=a.keep_trained):
            counts.update(deleted)
            advance(count=deleted.get("episodes", 0))
    tell(f"deleted {_deleted_text(counts)}")
    return 0


def _delete(a: argparse.Namespace) -> int:
    """Delete the episodes named by --episode or --key. Exit status: 1 if there were none."""
    from cotune.storage.open_store import open_store
    from cotune.storage.sql.upkeep import delete

    if a.app and a.key is None:
        raise ConfigError("--app", a.app, "has no effect without --key", "Name the key, or leave --app out.")
    with open_store(a.store) as store:
        if a.key is None:
            counts = delete(store, a.episode)
        else:
            counts = delete(store, store.figures().episodes_with_key(a.app, a.key), (a.app, a.key))
    tell(f"deleted {_deleted_text(counts)}")
    return 0 if counts.get("episodes") or counts.get("calls") else 1


def _deleted_text(counts: Mapping[str, int]) -> str:
    """The numbers of deleted records, as `3 episodes, 7 calls`."""
    names = {"episodes": "episode", "calls": "call", "messages": "message", "images": "image", "segments": "segment"}
    texts = [plural(counts[name], singular) for name, singular in names.items() if counts.get(name)]
    return ", ".join(texts) or "nothing"


def _copy(a: argparse.Namespace) -> int:
    """Copy all records into another store. Exit status: 1 if records were lost or refused."""
    from cotune.storage.open_store import open_store
    from cotune.storage.sql.upkeep import COPIED, copy, size

    with open_store(a.store, read_only=True) as source, open_store(a.target) as target:
        total = sum(size(source, table) for table in COPIED)
        with _progress_bar("records", total) as advance:
            copied = copy(source, target, lambda _, rows: advance(count=rows))
    left_out = copied.lost + copied.forged
    others = "the target has the others already"
    if left_out:
        others = "the others were left out, or the target has them already"
    tell(f"copied {plural(copied.stored, 'record')} of {total:,}; {others}")
    if copied.lost:
        tell(f"{plural(copied.lost, 'record')} could not be stored")
    if copied.forged:
        reason = "their ids are not the hashes of their contents"
        if copied.forged == 1:
            reason = "its id is not the hash of its content"
        tell(f"{plural(copied.forged, 'message or image', 'messages or images')} left out: {reason}")
    return 1 if left_out else 0


def _upgrade(a: argparse.Namespace) -> int:
    """Bring the tables of a database to the version of this cotune, which happens when it is opened for writing."""
    from cotune.entry_points import scheme_of
    from cotune.integrations.collect.postgres.tables import VERSION
    from cotune.storage.open_store import POSTGRESQL, is_path, open_store, without_password

    if is_path(a.store):
        raise ConfigError("store", a.store, "is a file; only databases are upgraded", "Name a postgresql:// address.")
    if scheme_of(a.store) not in POSTGRESQL:
        fault = "is not a PostgreSQL database, and cotune upgrades no other store"
        raise ConfigError("store", without_password(a.store), fault, "Name a postgresql:// address.")
    with open_store(a.store) as store:
        tell(f"{store.address} has records of version {VERSION}")
    return 0


def _progress_bar(name: str, total: int | None) -> contextlib.AbstractContextManager[Callable[..., None]]:
    from cotune.trainer.reporting.progress import episode_bar

    return episode_bar(terminal(stderr=True), total, name)
