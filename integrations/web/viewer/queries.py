"""What pages show of the records, by SQL: a page at a time, by id, so that none costs more in a long run."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.integrations.web.viewer.opened import OpenedRun
from cotune.storage.episode_filters import COUNTED, EpisodeFilters
from cotune.storage.outcomes import REPORTED
from cotune.tables import first_line

PAGE = 50
"""Episodes of a page."""
SEARCH_SECONDS = 0.6
"""How long one page searches in texts before it says how far it came."""
CHUNK = 200
"""Episodes whose texts are searched at a time."""
_HOLDS = """(body LIKE ? ESCAPE '\\' AND EXISTS (
    SELECT 1 FROM json_tree(body) AS part WHERE part.type = 'text' AND part.atom LIKE ? ESCAPE '\\'
    AND coalesce(part.key, '') NOT IN ('role', 'type', 'id', 'finish_reason', 'status', 'phase')))"""
"""Whether a JSON value holds a text: first as JSON has it, which is quick, then in its values, not in its keys."""


class Filters(EpisodeFilters, frozen=True, kw_only=True):
    """Which episodes; `q` is text that a prompt or an answer holds."""

    q: str = ""

    def query(self, **changes: Any) -> dict[str, str]:
        """As parameters of an address."""
        fields = {**msgspec.structs.asdict(self), **changes}
        return {name: str(value) for name, value in fields.items() if value not in ("", None)}


class EpisodeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the list of episodes. `step` counts from 1, as on every page."""

    id: str
    task: str
    phase: str
    step: int | None
    status: str
    calls: int
    latency: float
    error: str
    success: int | None
    rewards: Mapping[str, float]


class EpisodePage(msgspec.Struct, frozen=True, kw_only=True):
    """One page of episodes, the newest first. `after` leads to the next page; `searched` tells how far texts were
    searched where it is not the end."""

    rows: tuple[EpisodeRow, ...]
    after: str = ""
    searched: int | None = None


_FIELDS = f"""id, task, phase, training_step + 1, status,
    CAST(coalesce(json_extract(body, '$.calls'), 0) AS INTEGER),
    CAST(coalesce(json_extract(body, '$.latency'), 0) AS REAL), CAST(json_extract(body, '$.error') AS TEXT),
    {REPORTED}"""


def episodes(run: OpenedRun, filters: Filters, before: str = "") -> EpisodePage:
    """The page of episodes that begins below the id `before`."""
    if run.store is None:
        return EpisodePage(rows=())
    if filters.q:
        return _searched(run, filters, before)
    found = _select(run, filters, before, PAGE + 1)
    return EpisodePage(rows=_rows(run, found[:PAGE]), after=found[PAGE - 1][0] if len(found) > PAGE else "")


def neighbours(run: OpenedRun, episode: str) -> tuple[str, str]:
    """The ids of the episodes before and after one, empty at the ends."""
    older = run.rows("SELECT max(id) FROM episodes WHERE id < ?", (episode,))
    newer = run.rows("SELECT min(id) FROM episodes WHERE id > ?", (episode,))
    return (older[0][0] or "", newer[0][0] or "") if older else ("", "")


def open_episodes(run: OpenedRun) -> list[tuple[str, int]]:
    """Twenty episodes without an end, the newest first, with their calls: under way, or interrupted."""
    return run.store.open_episodes(20) if run.store else []


def choices(run: OpenedRun) -> dict[str, list[Any]]:
    """What the filters may be set to: phases, roles."""
    phases = run.rows("SELECT DISTINCT phase FROM episodes ORDER BY 1")
    return {"phase": [phase for (phase,) in phases], "role": roles(run)}


def training_steps(run: OpenedRun) -> list[int]:
    """Steps that have episodes of training, from 1, without those that a rollback took back."""
    sql = f"""SELECT DISTINCT training_step + 1 FROM episodes
              WHERE phase = 'train' AND training_step >= 0 AND {COUNTED} ORDER BY 1"""
    return [step for (step,) in run.rows(sql)]


def roles(run: OpenedRun) -> list[str]:
    """Roles of the latest thousand calls, and of the metrics, in the order of their names."""
    found = run.rows("SELECT DISTINCT role FROM (SELECT role FROM calls ORDER BY rowid DESC LIMIT 1000)")
    trained = {role for line in run.metrics[-1:] for role in line["roles"]}
    return sorted({str(role) for (role,) in found} | trained)


def _select(run: OpenedRun, filters: Filters, before: str, limit: int) -> list[Any]:
    where, asked = msgspec.structs.replace(filters, before=before).where()
    return run.rows(f"SELECT {_FIELDS} FROM episodes {where} ORDER BY id DESC LIMIT ?", (*asked, limit))


def _rows(run: OpenedRun, found: list[Any]) -> tuple[EpisodeRow, ...]:
    rewards = run.store.rewards(id for id, *_ in found) if run.store else {}
    return tuple(
        EpisodeRow(
            id=str(id),
            task=str(task),
            phase=str(phase),
            step=step,
            status=str(status),
            calls=calls,
            latency=latency,
            error="" if status == "ok" else first_line(error),
            success=success,
            rewards=rewards.get(id, {}),
        )
        for id, task, phase, step, status, calls, latency, error, success in found
    )


def _searched(run: OpenedRun, filters: Filters, before: str) -> EpisodePage:
    """Episodes in which a message, an answer, an error or the task's input holds the text, a chunk at a time."""
    needles = (f"%{_escaped(json.dumps(filters.q, ensure_ascii=False)[1:-1])}%", f"%{_escaped(filters.q)}%")
    found: list[Any] = []
    verdicts: dict[str, bool] = {}
    deadline, searched, last = time.monotonic() + SEARCH_SECONDS, 0, before
    while True:
        chunk = _select(run, filters, last, CHUNK)
        hits = _holding(run, [row[0] for row in chunk], needles, verdicts)
        for row in chunk:
            searched, last = searched + 1, row[0]
            if row[0] in hits:
                found.append(row)
            if len(found) == PAGE:
                return EpisodePage(rows=_rows(run, found), after=last)
        if len(chunk) < CHUNK:
            return EpisodePage(rows=_rows(run, found))
        if time.monotonic() > deadline:
            return EpisodePage(rows=_rows(run, found), after=last, searched=searched)


def _holding(run: OpenedRun, episodes: list[str], needles: tuple[str, str], verdicts: dict[str, bool]) -> set[str]:
    """Those of some episodes that hold a text, as JSON has it and as it is. `verdicts` says which messages do."""
    if not episodes:
        return set()
    marks = ",".join("?" * len(episodes))
    hits = {
        id for (id,) in run.rows(f"SELECT id FROM episodes WHERE id IN ({marks}) AND {_HOLDS}", (*episodes, *needles))
    }
    said = f"{_HOLDS.replace('body', 'candidates')} OR coalesce(json_extract(body, '$.error'), '') LIKE ? ESCAPE '\\'"
    sql = f"SELECT episode, {said}, json_extract(body, '$.messages') FROM calls WHERE episode IN ({marks})"
    asked: dict[str, set[str]] = {}
    for episode, answered, messages in run.rows(sql, (*needles, needles[1], *episodes)):
        if answered:
            hits.add(episode)
        elif episode not in hits:
            asked.setdefault(episode, set()).update(json.loads(messages or "[]"))
    unknown = list({id for ids in asked.values() for id in ids} - verdicts.keys())
    for start in range(0, len(unknown), 500):
        some = unknown[start : start + 500]
        sql = f"SELECT id FROM messages WHERE id IN ({','.join('?' * len(some))}) AND {_HOLDS}"
        verdicts.update(dict.fromkeys(some, False))
        verdicts.update((id, True) for (id,) in run.rows(sql, (*some, *needles)))
    return hits | {episode for episode, ids in asked.items() if any(verdicts[id] for id in ids)}


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
