"""`cotune view`: serves the pages on loopback, from a thread or until Ctrl-C."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from starlette.types import ASGIApp

from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.integrations.web.viewer.pages import build_app
from cotune.integrations.web.viewer.rendering import address
from cotune.integrations.web.viewer.viewer import KnownField
from cotune.reading.find_runs import FoundRuns
from cotune.reading.run import OpenedRun
from cotune.records.prices import Prices


@contextlib.contextmanager
def viewing(
    paths: Iterable[str | Path],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    prices: Prices | None = None,
    fields: Mapping[str, KnownField] = MappingProxyType({}),
) -> Iterator[RunningServer[list[OpenedRun]]]:
    """Serve the pages of runs from a background thread; port 0 takes a free port.

    Raises RunError if there is no run and no record, ConfigError for an address that cannot be used.
    """
    runs = FoundRuns(paths)

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, list[OpenedRun]]]:
        yield build_app(runs, token, prices, fields), list(runs.opened.values())

    try:
        with running(opening, host=host, port=port, token=token, name="cotune-view") as server:
            yield server
    finally:
        runs.close()


def view(paths: Iterable[str | Path], say: Callable[[str], None], **options: Any) -> None:
    """Serve until Ctrl-C, SIGTERM or SIGHUP. `options` are the arguments of `viewing`; `say` prints a line."""
    with stopped_by_signals(), viewing(paths, **options) as server:
        token = options.get("token")
        fields = {"token": token} if token else {}
        say(f"Open {server.url}{address(**fields)}")
        for run in server.opened:
            say(f"  {run.name}: {run.path} ({run.state})")
        say("Ctrl-C stops it.")
        server.wait()
