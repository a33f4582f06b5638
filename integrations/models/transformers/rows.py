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
    """One request in the engine."""

    id: int
    prompt: tuple[int, ...]
    n: int
    params: SamplingParams
    adapter_id: int
    limit: int
    """The most tokens per candidate."""
    seed: int
    done: list[Completion | None] = field(default_factory=list)
    """The completion of each candidate; None until it has ended."""
    open: int = 0
    """The number of candidates that have not ended."""
    top: list[list[TopTokens]] = field(default_factory=list)
    """By candidate, the likeliest tokens of each position until now; empty if they were not requested."""
    refused: tuple[int, int] | None = None
    """A drawn token that the grammar has refused, and its position."""

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
    """State of each row outside the model, in arrays that grow. A row is a candidate that is being decoded."""

    def __init__(self) -> None:
        """A table without rows. Each column is an array, so that one step for all rows needs no loop in Python."""
        self.columns: dict[str, npt.NDArray[Any]] = {
            "job": np.empty(0, object),
            "candidate": np.empty(0, np.int64),  # its number in the job
            "adapter_id": np.empty(0, np.int64),
            "stream": np.empty(0, np.uint64),  # of random numbers
            "count": np.empty(0, np.int64),  # of drawn tokens
            "limit": np.empty(0, np.int64),  # most drawn tokens
            "span": np.empty(0, np.int64),  # most tokens, with the prompt
            "alive": np.empty(0, bool),
            "has_stops": np.empty(0, bool),  # whether stop strings or stop tokens may end it
            "logit_changes": np.empty(0, object),  # `LogitChanges` or None
            "temperature": np.empty(0, np.float32),
            "top_k": np.empty(0, np.int64),
            "top_p": np.empty(0, np.float32),
            "min_p": np.empty(0, np.float32),
            "top": np.empty(0, np.int64),  # number of likeliest tokens to report at each position
            # Of each drawn token, in the order of their drawing. There is space for 32 tokens at first.
            "token": np.empty((0, 32), np.int64),
            "logprob": np.empty((0, 32), np.float32),
        }

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        return self.columns[name]

    def reserve(self, rows: int, tokens: int) -> None:
        """Grow the columns, if needed, to `rows` rows and `tokens` drawn tokens per row. Sizes double, so that columns
        are copied rarely.
        """
        for name, column in self.columns.items():
            shape = list(column.shape)
            if rows > shape[0]:
                shape[0] = max(rows, 2 * shape[0])
            if len(shape) == 2 and tokens > shape[1]:
                shape[1] = max(tokens, 2 * shape[1])
            if tuple(shape) != column.shape:
                larger = np.zeros(shape, column.dtype)
                larger[tuple(slice(0, size) for size in column.shape)] = column
                self.columns[name] = larger

    def move(self, to: npt.NDArray[np.int64], source: npt.NDArray[np.int64]) -> None:
        """Copy the rows `source` to the rows `to`."""
        for column in self.columns.values():
            column[to] = column[source]

    def put(self, at: npt.NDArray[np.int64], job: Job, grammars: Grammars | None) -> None:
        """Start the candidates of a job in the rows `at`, one in each."""
        p = job.params
        truncates = p.temperature > 0  # a greedy candidate gets the likeliest token, whatever is excluded
        values = {
            "job": job,
            "candidate": np.arange(job.n),
            "adapter_id": job.adapter_id,
            "stream": random_streams(job.seed, job.n),
            "count": 0,
            "limit": job.limit,
            "span": job.span,
            "alive": True,
            "has_stops": bool(p.stop or p.stop_token_ids),
            "logit_changes": [LogitChanges(job.prompt, p, grammars) if changes_logits(p) else None for _ in at],
            "temperature": p.temperature,
            "top_k": p.top_k if truncates else 0,
            "top_p": p.top_p if truncates else 1.0,
            "min_p": p.min_p if truncates else 0.0,
            "top": p.top_logprobs,
        }
        for name, value in values.items():
            self.columns[name][at] = value


def arrange_rows(
    live: npt.NDArray[np.int64], live_adapter_ids: npt.NDArray[np.int64], new_adapter_ids: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find positions for the live rows and the new rows in a layout without gaps that is sorted by adapter.

    `live` has the present positions of the live rows, in ascending order. The other arrays have the adapter of each
    row. A live row that is already in the range of its adapter does not move, so few rows move. Returns the positions
    of the live rows, [live], and of the new rows, [new].
    """
    all_adapter_ids = np.concatenate([live_adapter_ids, new_adapter_ids])
    adapter_ids, counts = np.unique(all_adapter_ids, return_counts=True)
    adapter_of_position = np.repeat(adapter_ids, counts)
    total = len(adapter_of_position)
    if not total:
        return live, live[:0]
    in_range_of_adapter = adapter_of_position[np.minimum(live, total - 1)] == live_adapter_ids
    stays = (live < total) & in_range_of_adapter
    free = np.ones(total, bool)
    free[live[stays]] = False
    # The rows that need a position: live ones first, then new ones. Each gets the next free one of its adapter.
    movers = np.concatenate([np.flatnonzero(~stays), len(live) + np.arange(len(new_adapter_ids))])
    movers_by_adapter = movers[np.argsort(all_adapter_ids[movers], kind="stable")]
    positions = np.concatenate([live, np.empty(len(new_adapter_ids), live.dtype)])
    positions[movers_by_adapter] = np.flatnonzero(free)
    return positions[: len(live)], positions[len(live) :]
