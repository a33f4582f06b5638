"""The state of requests in the engine, and of each row of a batch outside the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cotune.integrations.models.chat.grammar import Grammars
from cotune.integrations.models.transformers.draw import LogitChanges, changes_logits, random_streams
from cotune.sampling.protocol import Completion, SamplingParams, TopTokens


class Source(NamedTuple):
    """A prompt to prefill, the id of its adapter (`BASE` for none), and the encoded images for its image tokens."""

    adapter_id: int
    prompt: tuple[int, ...]
    images: tuple[bytes, ...]


@dataclass(eq=False)
class Job:
    """One request in the engine. `limit` is the most tokens per candidate. `top` has
    the likeliest tokens of each place until now by candidate; it is empty if they were not requested. `refused` is a
    drawn token that the grammar has refused, and its position."""

    id: int
    prompt: tuple[int, ...]
    n: int
    params: SamplingParams
    adapter_id: int
    limit: int
    seed: int
    done: list[Completion | None] = field(default_factory=list)
    open: int = 0
    top: list[list[TopTokens]] = field(default_factory=list)
    refused: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Discard all drawn tokens."""
        self.refused = None
        self.top = [[] for _ in range(self.n)] if self.params.top_logprobs else []
        self.done = [None] * self.n
        self.open = self.n

    @property
    def span(self) -> int:
        """The greatest possible length of a candidate with its prompt."""
        return len(self.prompt) + self.limit

    @property
    def source(self) -> Source:
        """The prompt to prefill for this request."""
        return Source(self.adapter_id, self.prompt, self.params.images)


class Rows:
    """State of each row outside the model, in arrays that grow. `count` is the number of drawn tokens."""

    def __init__(self) -> None:
        """A table without rows. Each row is a sequence in progress, and each column an array, so that one step for all
        sequences needs no loop in Python.
        """
        self.columns: dict[str, npt.NDArray[Any]] = {
            "job": np.empty(0, object),
            "candidate": np.empty(0, np.int64),
            "adapter_id": np.empty(0, np.int64),
            "stream": np.empty(0, np.uint64),
            "count": np.empty(0, np.int64),
            "limit": np.empty(0, np.int64),
            "span": np.empty(0, np.int64),
            "alive": np.empty(0, bool),
            "watched": np.empty(0, bool),
            "shaped": np.empty(0, object),
            "temperature": np.empty(0, np.float32),
            "top_k": np.empty(0, np.int64),
            "top_p": np.empty(0, np.float32),
            "min_p": np.empty(0, np.float32),
            "top": np.empty(0, np.int64),
            "token": np.empty((0, 32), np.int64),
            "logprob": np.empty((0, 32), np.float32),
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    def reserve(self, rows: int, tokens: int) -> None:
        """Make space for `rows` rows of `tokens` tokens."""
        for name, old in self.columns.items():
            shape = list(old.shape)
            if rows > shape[0]:
                shape[0] = max(rows, 2 * shape[0])
            if len(shape) == 2 and tokens > shape[1]:
                shape[1] = max(tokens, 2 * shape[1])
            if tuple(shape) != old.shape:
                new = np.zeros(shape, old.dtype)
                new[tuple(slice(0, n) for n in old.shape)] = old
                self.columns[name] = new

    def move(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64]) -> None:
        for column in self.columns.values():
            column[to] = column[source]

    def put(self, at: npt.NDArray[np.int64], job: Job, grammars: Grammars | None) -> None:
        """Start the candidates of a job in these rows."""
        p = job.params
        values = {
            "job": job,
            "candidate": np.arange(job.n),
            "adapter_id": job.adapter_id,
            "stream": random_streams(job.seed, job.n),
            "count": 0,
            "limit": job.limit,
            "span": job.span,
            "alive": True,
            "watched": bool(p.stop or p.stop_token_ids),
            "shaped": [LogitChanges(job.prompt, p, grammars) if changes_logits(p) else None for _ in at],
            "temperature": p.temperature,
            "top_k": p.top_k if p.temperature > 0 else 0,
            "top_p": p.top_p if p.temperature > 0 else 1.0,
            "min_p": p.min_p if p.temperature > 0 else 0.0,
            "top": p.top_logprobs,
        }
        for name, value in values.items():
            self.columns[name][at] = value


def arrange_rows(
    live: npt.NDArray[np.int64], live_adapter_ids: npt.NDArray[np.int64], new_adapter_ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The positions of the live rows and of the new rows in a layout without gaps that is sorted by adapter.

    A live row that is already in the range of its adapter does not move, so few rows move.
    """
    adapter_ids, counts = np.unique(np.concatenate([live_adapter_ids, new_adapter_ids]), return_counts=True)
    slots = np.repeat(adapter_ids, counts)
    total = len(slots)
    if not total:
        return live, live[:0]
    stays = (live < total) & (slots[np.minimum(live, total - 1)] == live_adapter_ids)
    free = np.ones(total, bool)
    free[live[stays]] = False
    # The rows that need a place: live ones first, then new ones. Each gets the next free place of its adapter.
    movers = np.concatenate([np.flatnonzero(~stays), len(live) + np.arange(len(new_adapter_ids))])
    order = np.argsort(np.concatenate([live_adapter_ids, new_adapter_ids])[movers], kind="stable")
    to = np.concatenate([live, np.empty(len(new_adapter_ids), live.dtype)])
    to[movers[order]] = np.flatnonzero(free)
    return to[: len(live)], to[len(live) :]
