"""A store in memory, a short way to write episodes into it, and the wheel in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from cotune.records.ids import candidate_id, pack_ids, segment_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    Message,
    PolicyRef,
    Record,
    RewardRecord,
    Segment,
    Task,
)
from cotune.storage.episode_filters import EVERYTHING, EpisodeFilters
from cotune.storage.protocol import Store, StoreHealth
from tests.core.installed import build_wheel, install


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def base_environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with what `pip install cotune` installs."""
    return install(wheel, tmp_path_factory.mktemp("base") / "venv")


class MemoryStore(Store):
    """A store over dicts, without SQL; counts reads."""

    address = "memory"
    folder = None
    health = StoreHealth()

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._episodes: dict[str, Episode] = {}
        self._calls: dict[str, list[CallRecord]] = {}
        self._segments: dict[str, Segment] = {}
        self._messages: dict[str, Any] = {}
        self._rewards: dict[str, dict[str, float]] = {}
        self._consumed: dict[str, int] = {}
        self.images: dict[str, bytes] = {}
        self.reads = 0

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            if isinstance(record, RewardRecord):
                self._rewards.setdefault(record.target, {})[record.name] = record.value
            elif isinstance(record, CallRecord):
                self._calls.setdefault(record.episode, []).append(record)
            elif isinstance(record, Episode):
                self._episodes[record.id] = record
            elif isinstance(record, Segment):
                self._segments[record.id] = record
            else:
                self._messages[record.id] = record.body

    def commit(
        self, records: Sequence[Record], counts: Mapping[str, int] | None = None
    ) -> Mapping[str, Sequence[Record]]:
        self.write(records)
        return {}

    def flush(self) -> None: ...

    def episodes(self, filters: EpisodeFilters = EVERYTHING) -> Iterator[Episode]:
        for episode in sorted(self._episodes.values(), key=lambda e: e.id):
            fits = (
                filters.phase in ("", episode.phase)
                and filters.training_step in (None, episode.training_step)
                and filters.task in ("", episode.task.id)
                and (filters.ids is None or episode.id in filters.ids)
            )
            if fits:
                yield episode

    def calls(
        self, episode_id: str, *, start: int = 0, limit: int | None = None, lean: bool = False
    ) -> list[CallRecord]:
        self.reads += 1
        calls = sorted(self._calls.get(episode_id, []), key=lambda c: c.step)
        return calls[start:][:limit]

    def bodies(self, ids: Iterable[str]) -> Mapping[str, Any]:
        self.reads += 1
        stored = {**self._messages, **self.images}
        return {id: stored[id] for id in ids if id in stored}

    def token_ids(self, segment_id: str) -> tuple[int, ...]:
        self.reads += 1
        segment = self._segments[segment_id]
        return (*(self.token_ids(segment.parent) if segment.parent else ()), *segment.token_ids)

    def rewards(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, float]]:
        self.reads += 1
        return {target: self._rewards[target] for target in targets if target in self._rewards}

    def feedback(self, targets: Iterable[str]) -> Mapping[str, Mapping[str, str]]:
        return {target: {} for target in targets}

    def counters(self) -> Mapping[str, int]:
        return {}

    def consume(self, groups: Iterable[str] | Mapping[str, Iterable[str]], training_step: int) -> None:
        self._consumed.update(dict.fromkeys(groups, training_step))

    def release(self, training_step: int) -> None:
        self._consumed = {group: step for group, step in self._consumed.items() if step < training_step}

    def consumed(self) -> Mapping[str, int]:
        return self._consumed

    def close(self) -> None: ...


class Book:
    """Writes episodes into a MemoryStore, one short line per call."""

    def __init__(self) -> None:
        self.store = MemoryStore()

    def episode(self, id: str, task: str = "q", outcome: Mapping[str, float] | None = None, **fields: Any) -> Episode:
        record = Episode(id=id, task=Task(id=task, input=task), workflow="w", training_step=7, **fields)
        self.store.write([RewardRecord(id, name, value) for name, value in (outcome or {}).items()])
        self.store.write([record])
        return record

    def call(
        self,
        id: str,
        episode: str,
        role: str = "a",
        turn: int = 0,
        prompt: tuple[int, ...] = (1, 2),
        unknown_prompt: bool = False,
        rewards: Sequence[Any] = (),
        candidates: Sequence[Candidate] | None = None,
        chosen: int = 0,
        **fields: Any,
    ) -> CallRecord:
        """`rewards` has one entry per candidate: a number (`local`), a dict of components, or None."""
        path = segment_id(prompt)
        if candidates is None:
            candidates = [self.candidate(i) for i in range(max(1, len(rewards)))]
        known = None if unknown_prompt else path
        fields = {"policy": PolicyRef(role, 3), "prompt": known, "step": turn, **fields}
        record = CallRecord(
            id=id, episode=episode, role=role, turn=turn, candidates=tuple(candidates), chosen=chosen, **fields
        )
        self.store.write([Segment(path, None, pack_ids(prompt)), Message("m", {}), record])
        for index, value in enumerate(rewards):
            components = value if isinstance(value, Mapping) else {} if value is None else {"local": value}
            self.store.write([RewardRecord(candidate_id(id, index), name, v) for name, v in components.items()])
        return record

    @staticmethod
    def candidate(index: int, **fields: Any) -> Candidate:
        fields = {"token_ids": (10 + index, 11), "logprobs": (-0.5, -0.25), "text": "x", **fields}
        return Candidate(index=index, message={"role": "assistant", "content": "x"}, **fields)


@pytest.fixture
def book() -> Book:
    return Book()
