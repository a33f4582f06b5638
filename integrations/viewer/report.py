"""`cotune report`: a run as one HTML file, to send to somebody: figures, curves, episodes before and after."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import msgspec

from cotune.integrations.viewer import episode as episodes_of
from cotune.integrations.viewer.curves import charts
from cotune.integrations.viewer.episode import ShownCall
from cotune.integrations.viewer.opened import OpenedRun, open_runs
from cotune.integrations.viewer.overview import Prices, Totals, ending, facts, prices_of, total_cost, troubles
from cotune.integrations.viewer.queries import roles
from cotune.integrations.viewer.rendering import asset, hues, render
from cotune.recording.records import Episode
from cotune.storage.whole_file import whole_file

EPISODES = 5
MOST_CALLS = 8
"""Calls of an episode that are shown."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An episode of the report."""

    episode: Episode
    rewards: dict[str, float]
    calls: list[ShownCall]
    more: int


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """Two episodes beside each other: of one task where `task` names it."""

    task: str
    before: Told | None
    after: Told | None


def write_report(path: Path | str, out: Path, prices: Prices | None = None) -> None:
    """Write the report of the run or records file at `path` to `out`. Raises RunError when there is nothing there."""
    runs = open_runs([path])
    try:
        page = report(runs[0], prices or {})
        with whole_file(out) as file:
            file.write(page.encode())
    finally:
        for run in runs:
            run.close()


def report(run: OpenedRun, prices: Prices) -> str:
    """The page. Its scripts and styles are in it, and named by their hashes: a browser runs nothing else of it."""
    pairs, how = before_and_after(run)
    scripts, styles = ("uplot.js", "viewer.js"), ("uplot.css", "viewer.css")
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src {' '.join(map(_hash, styles))}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    uses = Totals(run).by_role(prices_of(run, prices))
    return render(
        "report.html",
        run=run,
        state=run.state,
        policy=policy,
        scripts=scripts,
        styles=styles,
        facts=facts(run),
        headline=run.headline.changes,
        troubles=troubles(run),
        ending=ending(run),
        charts=charts([run]),
        pairs=pairs,
        how=how,
        uses=uses,
        total=total_cost(uses),
        hues=hues(roles(run)),
    )


def before_and_after(run: OpenedRun) -> tuple[list[Pair], str]:
    """Episodes of the first and of the last step, and a sentence on how they were chosen; never by their outcome."""
    for phase in ("eval", "train"):
        found = run.rows(
            "SELECT min(training_step), max(training_step) FROM episodes WHERE phase = ? AND status != 'cancelled'",
            (phase,),
        )
        first, last = found[0] if found else (None, None)
        if first is not None and last is not None and first != last:
            return _pairs(run, phase, first, last)
    latest = run.rows("SELECT id FROM episodes WHERE status != 'cancelled' ORDER BY id DESC LIMIT ?", (EPISODES,))
    pairs = [Pair(task="", before=None, after=_told(run, id)) for (id,) in latest]
    return pairs, "The latest episodes."


def _pairs(run: OpenedRun, phase: str, first: int, last: int) -> tuple[list[Pair], str]:
    sql = """SELECT task, min(id) FROM episodes WHERE phase = ? AND training_step = ? AND status != 'cancelled'
             GROUP BY task"""
    before, after = (dict(run.rows(sql, (phase, step))) for step in (first, last))
    what = "held-out tasks" if phase == "eval" else "training tasks"
    ends = (f"step {first + 1}", f"step {last + 1}")
    shared = sorted(before.keys() & after.keys())[:EPISODES]
    if shared:
        pairs = [Pair(task=str(t), before=_told(run, before[t]), after=_told(run, after[t])) for t in shared]
        return (
            pairs,
            f"The same {what} after {ends[0]} and {ends[1]}: the first by their ids, whatever came of them.",
        )
    couples = zip(sorted(before)[:EPISODES], sorted(after)[:EPISODES], strict=False)
    pairs = [Pair(task="", before=_told(run, before[b]), after=_told(run, after[a])) for b, a in couples]
    return (
        pairs,
        f"Of {ends[0]} and of {ends[1]}, which had other {what}: the first by their ids, whatever came of them.",
    )


def _told(run: OpenedRun, id: str) -> Told:
    assert run.store is not None
    found = run.store.episode(id)
    calls, _ = episodes_of.page_of_calls(run, id, 0)
    steps = {call.id: call.step for call in calls}
    shown = episodes_of.show_calls(run, calls[:MOST_CALLS], steps, None)
    more = max(0, found.calls - len(shown))
    return Told(episode=found, rewards=dict(run.store.rewards([id])[id]), calls=shown, more=more)


def _hash(name: str) -> str:
    digest = hashlib.sha256(asset(name).encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
