"""metrics.jsonl of a run folder: a line for each step."""

from __future__ import annotations

import functools
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from cotune.storage.run_layout import RunLayout
from cotune.storage.typed_json import fault, loaded

log = logging.getLogger("cotune")

Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
Counts = dict[str, Count]


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """A step's figures, one line of the file. `left_out` counts by reason the candidates that were not trained on."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    episodes: Count = 0
    failed: Count = 0
    unknown: Count = 0
    """Episodes that ended well and whose outcome nobody knows."""
    calls: Count
    candidates: Count
    groups: Count
    rows: Count = 0
    path: str = ""
    """The path of `outcome`: `single samples`, or the one that the selection took."""
    outcome: dict[str, float]
    """Mean of each named team reward and metric over the episodes, failed ones too (`outcome_means`)."""
    candidate_reward: float | None = None
    """Mean of the trained reward over all candidates that have one, chosen or not."""
    held_out: dict[str, float] = {}
    """After steps with an evaluation: success and reward of single samples on held-out tasks."""
    roles: dict[str, dict[str, float]] = {}
    policies: dict[str, dict[str, float]] = {}
    left_out: Counts
    staleness: Counts = {}
    """Rows by how many versions their sampler was behind the policy that trained on them; all "0" in mode sync."""
    counters: dict[str, float] = {}
    """Counts of the sampler, the rollout workers, judges and a teacher in this step, such as retried requests and
    restarts; `judge.cost` is money."""
    lr_scale: float = 1.0
    seconds: dict[str, float] = {}
    """By phase. `checkpoint` is the time that saved the steps before this one; `load` and `look` (at the application)
    are in the first line of a process."""
    tokens_per_s: float = 0.0
    """Sampled tokens of trained roles per second of the whole step."""
    rollout_tokens_per_s: float = 0.0
    """The same per second of its rollout."""
    update_tokens_per_s: float = 0.0
    """Tokens that the updates put through the models, per second of the updates."""
    total_tokens: Count = 0
    """Tokens of the rows with their prompts, once for each optimizer step that they are in."""
    distinct_tokens: Count = 0
    """Those of them that went through the model: shared beginnings of a pass's rows, once."""
    updated: bool = True
    """Whether any policy has a new version."""
    stayed: dict[str, str] = {}
    """Trained policies without a new version, and why: `no sample` (its roles had no usable call), `no reward` (its
    samples have none that the recipe uses), `no comparison` (they stood alone in their groups), `no signal` (all its
    advantages are zero), `filtered` (filters left out those that differ), `no gradient` (its rows moved nothing),
    `frozen step` (by its `train`)."""
    silent: Counts = {}
    """Trained roles that have called in no episode of the last steps, and of how many."""
    notes: tuple[str, ...] = ()
    refill: Counts = {}
    """Of a refill: `tasks` that it has drawn, `episodes` of them that are part of the step, and `late` ones, which were
    cancelled because training waited for the step, with their number of tasks (`late_tasks`)."""
    replay: Counts = {}
    """Under a replay plan: calls that were forked, those that could not be as the record cannot repeat the calls before
    (`unrepeatable`), branches, and how many of them diverged; calls of branches that the policies were expected to
    answer (`budget`), did answer (`sampled`), and that were answered from the record (`repeated`)."""


_FIGURES = ("outcome", "held_out", "roles", "policies", "counters", "seconds", "left_out")
"""Fields of figures: every line has them for its readers, without those that are null."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl. Broken ones (a last line cut by a crash, damage) are left out, counted in the log."""
    return _metrics_file(RunLayout(path).metrics.absolute()).lines()


@functools.lru_cache(256)
def _metrics_file(file: Path) -> _MetricsFile:
    return _MetricsFile(file)


class _MetricsFile:
    """A file of lines that is read again and again: where it has only grown, its new lines alone."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        self._inode = self._end = self._number = 0
        self._last = b""
        """The line that ended at `_end`: if it is no longer there, the file was rewritten."""

    def lines(self) -> list[dict[str, Any]]:
        with self._lock:
            try:
                with self._file.open("rb") as file:
                    whole, rest = self._new(file)
            except OSError:
                return []
            broken: list[str] = []
            self._lines += self._parsed(whole, broken)
            self._number += len(whole)
            found = [*self._lines, *self._parsed([rest], broken)]
        if broken:
            many = f"{len(broken)} broken {'line is' if len(broken) == 1 else 'lines are'} left out"
            log.warning("%s: %s (%s)", self._file, many, broken[0])
        return found

    def _new(self, file: BinaryIO) -> tuple[list[bytes], bytes]:
        """The whole lines that are new, and the beginning of one that is not whole."""
        file.seek(max(0, self._end - len(self._last)))
        inode = os.fstat(file.fileno()).st_ino
        if inode != self._inode or file.read(len(self._last)) != self._last:
            self._lines, self._inode, self._end, self._number, self._last = [], inode, 0, 0, b""
            file.seek(0)
        *whole, rest = file.read().split(b"\n")
        if whole:
            self._end, self._last = self._end + sum(map(len, whole)) + len(whole), whole[-1] + b"\n"
        return whole, rest

    def _parsed(self, lines: Sequence[bytes], broken: list[str]) -> Iterator[dict[str, Any]]:
        for number, line in enumerate(lines, self._number + 1):
            try:
                found = loaded(line)
                msgspec.convert(_known(found), StepMetrics)
            except (ValueError, RecursionError) as error:
                if line.strip():
                    broken.append(f"line {number}: {fault(error)}")
            else:
                yield {"rows": 0, **found, **{name: _known(found.get(name, {})) for name in _FIGURES}}


def _known(value: Any) -> Any:
    """The value without nulls in its tables."""
    return {k: _known(v) for k, v in value.items() if v is not None} if isinstance(value, Mapping) else value
