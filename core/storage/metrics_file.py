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
    """Episodes that finished without an error and whose outcome is unknown."""
    calls: Count
    candidates: Count
    groups: Count
    rows: Count = 0
    path: str = ""
    """Where the episodes of `outcome` come from: `single samples`, or the candidates that the selection chose."""
    outcome: dict[str, float]
    """Mean of each named team reward and metric over the episodes, failed ones too (`outcome_means`)."""
    outcome_n: Counts = {}
    """By the name of each outcome, the number of episodes that its mean is over."""
    candidate_reward: float | None = None
    """Mean of the trained reward over all candidates that have one, chosen or not."""
    held_out: dict[str, float] = {}
    """After steps with an evaluation: success and reward of single samples on held-out tasks."""
    roles: dict[str, dict[str, float]] = {}
    policies: dict[str, dict[str, float]] = {}
    left_out: Counts
    staleness: Counts = {}
    """Rows by the number of versions that their sampler was behind the policy that trained on them; all "0" in mode
    sync."""
    counters: dict[str, float] = {}
    """Counts of the sampler, the rollout workers, judges and a teacher in this step, such as retried requests and
    restarts; `judge.cost` is money."""
    lr_scale: float = 1.0
    seconds: dict[str, float] = {}
    """Seconds by phase. `checkpoint` is the time to save the steps before this one. Only the first line of a process
    has `load` and `look` (at the application)."""
    tokens_per_s: float = 0.0
    """Sampled tokens of trained roles per second of the whole step."""
    rollout_tokens_per_s: float = 0.0
    """The same per second of its rollout."""
    update_tokens_per_s: float = 0.0
    """Tokens that the updates put through the models, per second of the updates."""
    total_tokens: Count = 0
    """Tokens of the rows with their prompts, once for each optimizer step that they are in."""
    distinct_tokens: Count = 0
    """The part of `total_tokens` that went through the model: a beginning that several rows of a pass share, once."""
    updated: bool = True
    """Whether any policy has a new version."""
    stayed: dict[str, str] = {}
    """Trained policies without a new version, each with the reason: `no sample` (its roles had no usable call), `no
    reward` (its samples have no reward that the recipe uses), `no comparison` (each sample was alone in its group), `no
    signal` (all its advantages are zero), `filtered` (filters left out the samples with an advantage), `no gradient`
    (its rows moved nothing), `frozen step` (by its `train`)."""
    silent: Counts = {}
    """Trained roles that made no call in the last steps, each with the number of these steps."""
    notes: tuple[str, ...] = ()
    refill: Counts = {}
    """Counts of a refill: `tasks` drawn, their `episodes` in the step, and the episodes that were cancelled because
    training waited for the step (`late`, from `late_tasks` tasks)."""
    replay: Counts = {}
    """Counts under a replay plan: forked calls, calls that could not be forked because the record cannot repeat the
    calls before them (`unrepeatable`), branches, and branches that diverged; calls of branches that the policies were
    expected to answer (`budget`), calls that they answered (`sampled`), and calls answered from the record
    (`repeated`)."""


_FIGURES = ("outcome", "held_out", "roles", "policies", "counters", "seconds", "left_out")
"""Fields that hold figures. Readers find them in every line, without nulls."""


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl. Broken lines (cut by a crash, or damaged) are left out and counted in the log."""
    return _metrics_file(RunLayout(path).metrics.absolute()).lines()


@functools.lru_cache(256)
def _metrics_file(file: Path) -> _MetricsFile:
    return _MetricsFile(file)


class _MetricsFile:
    """A metrics.jsonl that is read many times. If the file has only grown, only its new lines are parsed."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._lines: list[dict[str, Any]] = []
        """The valid lines that were read, parsed."""
        self._inode = 0
        """Identifies the file that was read, in case another file takes its name."""
        self._end = 0
        """Where the last complete line ended, in bytes."""
        self._n_complete = 0
        """Number of complete lines so far, with broken ones."""
        self._last_line = b""
        """The line that ended at `_end`: if it is no longer there, the file was rewritten."""

    def lines(self) -> list[dict[str, Any]]:
        """All lines of the file. Only new lines are parsed. Broken lines are left out and logged."""
        with self._lock:
            try:
                with self._file.open("rb") as file:
                    complete, unfinished = self._read_new(file)
            except OSError:
                return []
            broken: list[str] = []
            self._lines += self._parse_lines(complete, broken)
            self._n_complete += len(complete)
            # The unfinished line counts today, but it is parsed again next time: its writer may be in the middle of it.
            lines = [*self._lines, *self._parse_lines([unfinished], broken)]
        if broken:
            count = "1 broken line is" if len(broken) == 1 else f"{len(broken)} broken lines are"
            log.warning("%s: %s left out (%s)", self._file, count, broken[0])
        return lines

    def _read_new(self, file: BinaryIO) -> tuple[list[bytes], bytes]:
        """Read the complete lines that were added since the last time, and the beginning of an unfinished line.

        If the file was replaced or rewritten, everything read before is forgotten, and all lines are new.
        """
        inode = os.fstat(file.fileno()).st_ino
        file.seek(max(0, self._end - len(self._last_line)))
        line_at_its_place = file.read(len(self._last_line))
        has_only_grown = inode == self._inode and line_at_its_place == self._last_line
        if not has_only_grown:
            self._lines = []
            self._inode = inode
            self._end = 0
            self._n_complete = 0
            self._last_line = b""
            file.seek(0)
        # Here the file is at `_end`.
        *complete, unfinished = file.read().split(b"\n")
        if complete:
            self._end += sum(len(line) + 1 for line in complete)
            self._last_line = complete[-1] + b"\n"
        return complete, unfinished

    def _parse_lines(self, lines: Sequence[bytes], broken: list[str]) -> Iterator[dict[str, Any]]:
        """Parse lines that follow the complete lines so far. Yields the valid ones, and adds descriptions of the others
        to `broken`."""
        for number, line in enumerate(lines, self._n_complete + 1):
            try:
                metrics = loaded(line)
                msgspec.convert(_without_nulls(metrics), StepMetrics)
            except (ValueError, RecursionError) as error:
                if line.strip():
                    broken.append(f"line {number}: {fault(error)}")
            else:
                # Fill in the fields that older lines lack, so that readers need not look whether they are there.
                figures = {name: _without_nulls(metrics.get(name, {})) for name in _FIGURES}
                yield {"rows": 0, **metrics, **figures}


def _without_nulls(value: Any) -> Any:
    """The value without nulls in its tables."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_nulls(item) for key, item in value.items() if item is not None}
