"""Labels that people give recorded candidates and episodes: read, looked up, and written to be filled in."""

from __future__ import annotations

import codecs
import random
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cotune.errors import ConfigError
from cotune.judging.shown import shown_message, shown_messages
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Episode, Task
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store

EXAMPLE = (
    'One line for each candidate or episode: {"id": "01J....0", "score": 3}; ids are shown by cotune show --episode.'
)

CALLS = 30
"""Calls whose candidates people are asked to label. Their number counts, not that of pairs, which depend on each other
within a call."""


class Label(msgspec.Struct, frozen=True):
    """A person's score of a candidate (`<call id>.<index>`) or an episode (its id): more is better."""

    id: str
    score: float | None
    """None: not labelled yet."""


def load_labels(path: str | Path) -> dict[str, float]:
    """Labels by id, without those that are null.

    Raises ConfigError for a missing file, a broken line (with its number) or a repeated id.
    """
    if not Path(path).is_file():
        raise ConfigError("labels", str(path), "is not a file", EXAMPLE)
    found: dict[str, float] = {}
    for number, line in enumerate(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        try:
            label = msgspec.json.decode(line, type=Label)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                "labels", f"{path}, line {number}", f"is not an id with a score ({error})", EXAMPLE
            ) from None
        if label.id in found:
            raise ConfigError("labels", f"{path}, line {number}", f"repeats the id {label.id}", EXAMPLE)
        if label.score is not None:
            found[label.id] = label.score
    if not found:
        raise ConfigError("labels", str(path), "holds no label", EXAMPLE)
    return found


def write_blanks(run: str | Path, to: str | Path, *, role: str | None = None) -> int:
    """Write a line for each candidate of `CALLS` calls, at random, with the request and a score to fill in (null).

    Only calls (of `role`) whose candidates differ are taken. Returns the number of lines.
    """
    with open_store(run, read_only=True) as store, Path(to).open("xb") as file:
        found = [
            call
            for episode in store.episodes()
            for call in store.calls(episode.id)
            if role in (None, call.role) and len({c.text or str(c.message) for c in call.candidates}) > 1
        ]
        chosen = random.Random(0).sample(found, min(CALLS, len(found)))
        lines = [
            {
                "id": candidate_id(call.id, candidate.index),
                "score": None,
                "role": call.role,
                "request": shown_messages(store.message(name) for name in call.messages),
                "answer": shown_message(candidate.message),
            }
            for call in chosen
            for candidate in call.candidates
        ]
        file.writelines(msgspec.json.encode(line) + b"\n" for line in lines)
    return len(lines)


def labelled(
    store: Store, labels: Mapping[str, float], source: str
) -> tuple[list[tuple[CallRecord, Task]], list[Episode]]:
    """The calls and the episodes that labels are of. Raises ConfigError for ids that are not on record."""
    wanted = {id.rpartition(".")[0] for id in labels if "." in id}
    listed = list(store.episodes())
    episodes = [episode for episode in listed if episode.id in labels]
    calls = [(c, e.task) for e in listed if wanted for c in store.calls(e.id) if c.id in wanted]
    recorded = {e.id for e in episodes} | {candidate_id(c.id, one.index) for c, _ in calls for one in c.candidates}
    unknown = [id for id in labels if id not in recorded]
    if unknown:
        some = ", ".join(unknown[:3]) + (", ..." if len(unknown) > 3 else "")
        fault = f"has ids that are not on record ({len(unknown)} of {len(labels)}): {some}"
        raise ConfigError("labels", source, fault, EXAMPLE)
    return calls, episodes
