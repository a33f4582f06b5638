"""People's labels for recorded candidates and episodes: read them, find their records, and write a file to fill in."""

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
"""Number of calls whose candidates people are asked to label. Calls are counted, not pairs of candidates: pairs within
a call depend on each other."""


class Label(msgspec.Struct, frozen=True):
    """A person's score for a candidate (`<call id>.<index>`) or an episode (its id). Higher is better."""

    id: str
    score: float | None
    """None: not labelled yet."""


def load_labels(path: str | Path) -> dict[str, float]:
    """Labels by id, without nulls.

    Raises ConfigError for a missing file, a broken line (with its number) or a repeated id.
    """
    if not Path(path).is_file():
        raise ConfigError("labels", str(path), "is not a file", EXAMPLE)
    labels: dict[str, float] = {}
    for number, line in enumerate(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if not line.strip():
            continue
        try:
            label = msgspec.json.decode(line, type=Label)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(
                "labels", f"{path}, line {number}", f"is not an id with a score ({error})", EXAMPLE
            ) from None
        if label.id in labels:
            raise ConfigError("labels", f"{path}, line {number}", f"repeats the id {label.id}", EXAMPLE)
        if label.score is not None:
            labels[label.id] = label.score
    if not labels:
        raise ConfigError("labels", str(path), "holds no label", EXAMPLE)
    return labels


def write_blanks(run: str | Path, to: str | Path, *, role: str | None = None) -> int:
    """Write a line for each candidate of `CALLS` random calls, with the request and a score to fill in (null).

    Only calls (of `role`) with different candidates are used. Returns the number of lines.
    """
    with open_store(run, read_only=True) as store, Path(to).open("xb") as file:
        usable: list[CallRecord] = []
        for episode in store.episodes():
            for call in store.calls(episode.id):
                has_role = role is None or call.role == role
                answers = {candidate.text or str(candidate.message) for candidate in call.candidates}
                if has_role and len(answers) > 1:
                    usable.append(call)
        lines = 0
        for call in random.Random(0).sample(usable, min(CALLS, len(usable))):
            request = shown_messages(store.message(name) for name in call.messages)
            for candidate in call.candidates:
                line = {
                    "id": candidate_id(call.id, candidate.index),
                    "score": None,
                    "role": call.role,
                    "request": request,
                    "answer": shown_message(candidate.message),
                }
                file.write(msgspec.json.encode(line) + b"\n")
                lines += 1
    return lines


def read_labelled(
    store: Store, labels: Mapping[str, float], source: str
) -> tuple[list[tuple[CallRecord, Task]], list[Episode]]:
    """The calls and the episodes that have labels. Raises ConfigError for ids that are not recorded."""
    labelled_calls = {id.rpartition(".")[0] for id in labels if "." in id}
    calls: list[tuple[CallRecord, Task]] = []
    episodes: list[Episode] = []
    recorded_ids: set[str] = set()
    for episode in store.episodes():
        if episode.id in labels:
            episodes.append(episode)
            recorded_ids.add(episode.id)
        if not labelled_calls:  # only episodes have labels: their calls need not be read
            continue
        for call in store.calls(episode.id):
            if call.id in labelled_calls:
                calls.append((call, episode.task))
                recorded_ids.update(candidate_id(call.id, candidate.index) for candidate in call.candidates)
    unknown = [id for id in labels if id not in recorded_ids]
    if unknown:
        first_ids = ", ".join(unknown[:3])
        if len(unknown) > 3:
            first_ids += ", ..."
        fault = f"has ids that are not on record ({len(unknown)} of {len(labels)}): {first_ids}"
        raise ConfigError("labels", source, fault, EXAMPLE)
    return calls, episodes
