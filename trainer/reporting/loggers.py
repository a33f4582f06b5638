"""The steps of a run for experiment trackers, in addition to metrics.jsonl.

Each tool has a separate thread. If a tool is slow, offline or fails, its curve lacks some steps, and the run continues.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import queue
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.versions import VERSIONS
from cotune.config.train import Tool, TrainConfig
from cotune.errors import error_line
from cotune.integrations.exchange.trackers.tracker import KEEP_FILES, Tracker
from cotune.records.structs import Episode
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.run_layout import leaves, read_run_json
from cotune.storage.whole_file import rewriting
from cotune.trainer.config.load import convert
from cotune.trainer.config.withheld import without_variables
from cotune.trainer.run.run_folder import RunFolder, write_atomically

log = logging.getLogger("cotune")

SHOWN_EPISODES = 8
"""The most episodes of a step in its table."""
COLUMNS = ("step", "task", "input", "status", "calls", "metrics", "error")
MAIN_GROUP = "1_main"
"""The group of figures that trackers show first, because they sort by name."""
_PASSWORD = re.compile(r"(\w+://)[^/@\s]+@")
_SECRET = re.compile(r"(?i)(?<=[?&])([\w.-]*(?:password|passwd|token|secret|key)[\w.-]*)=[^&#\s]*")
"""Parameters of an address with a secret, for example the password of PostgreSQL."""
EXPORT_ARTEFACT = "export"
"""The name of the artefact that `cotune export` sends."""
CELL_CHARACTERS = 2000
"""The most characters of a cell of the table."""
_END_SECONDS = 30.0
"""The time to send the remaining steps when the run ends."""


class Loggers:
    """Sends each step of a run, with a table of some of its episodes, to the tools that its configuration names."""

    def __init__(self, config: TrainConfig, folder: RunFolder, done: int, say: Callable[[str], None]) -> None:
        """`done` is the number of steps that the run has done before. Later steps are sent, or sent again."""
        self._episodes: list[Episode] = []
        self._threads = [_Logger(tool, config, folder, done) for tool in config.loggers]
        self._say = say

    def episode(self, episode: Episode) -> None:
        """Add an episode of the present step that has ended. The first ones go into the step's table."""
        if len(self._episodes) < SHOWN_EPISODES:
            self._episodes.append(episode)

    def base(self, held_out: Mapping[str, float]) -> None:
        """Send the evaluation before the first step, as step 0. This does not wait."""
        figures = tracker_figures({"held_out": held_out, "roles": {}})
        for thread in self._threads:
            thread.work.put((0, figures, []))

    def step(self, metrics: StepMetrics) -> None:
        """Send a step, under the number that its line shows. This does not wait."""
        figures = tracker_figures(msgspec.to_builtins(metrics))
        number = metrics.step + 1
        rows = [_table_row(number, episode) for episode in self._episodes]
        self._episodes = []
        for thread in self._threads:
            thread.queued += 1
            thread.work.put((number, figures, rows))

    def close(self) -> None:
        """Wait at most `_END_SECONDS` for steps that are not sent yet. Report the number of steps that are missing."""
        for thread in self._threads:
            thread.work.put(None)
        for thread in self._threads:
            thread.join(_END_SECONDS)
            # A thread that still waits for its tool is left: it is a daemon, and ends with the process.
            if thread.sent < thread.queued:
                why = thread.fault or f"it did not answer within {_END_SECONDS:g} s"
                missing = f"{thread.queued - thread.sent} of {thread.queued} steps did not arrive"
                self._say(f"logger {thread.tool}: {missing} ({why}); metrics.jsonl has all")


class _Logger(threading.Thread):
    """Sends steps to one tool, in order."""

    def __init__(self, tool: Tool, config: TrainConfig, folder: RunFolder, done: int) -> None:
        """Start the thread of a tool. `done` is the number of steps that the run has done before."""
        super().__init__(name=f"cotune-{tool}", daemon=True)
        self.tool = tool
        self.work: queue.SimpleQueue[tuple[int, Mapping[str, float], list[list[Any]]] | None] = queue.SimpleQueue()
        """Steps to send, as number, figures and rows of the table. None ends the thread."""
        self.queued = 0
        self.sent = 0
        self.fault = ""
        """The error of the last step that was not sent."""
        self._open = functools.partial(_open_tracker, tool, config, folder.path, done)
        self.start()

    def run(self) -> None:
        """Send each step to the tracker until None arrives. A step that fails is not sent again."""
        tracker: Tracker | None = None
        while (item := self.work.get()) is not None:
            step, figures, rows = item
            try:
                tracker = tracker or self._open()
                tracker.log(figures, step)
                if rows:
                    tracker.table("episodes", COLUMNS, rows, step)
                if step > 0:  # `queued` does not count the evaluation before the first step
                    self.sent += 1
            except BaseException as error:  # noqa: BLE001  (no error of a tool stops the run)
                # A tool that is down fails at every step: one warning is enough.
                if not self.fault:
                    log.warning(
                        "Logger %s failed: %r. The run continues; metrics.jsonl has its steps.", self.tool, error
                    )
                self.fault = error_line(error)[:300]
        try:
            if tracker is not None:
                tracker.finish()
        except BaseException as error:  # noqa: BLE001
            log.warning("Logger %s failed at its end: %r", self.tool, error)


def tracker_figures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a line of metrics.jsonl, by their names in trackers.

    The most important ones are under `1_main`, which every tool shows first. Counts of the step are under `step`, and
    all others have their path in the line.
    """
    main_figures: dict[str, float | None] = {}
    for name in ("success", "reward"):
        main_figures[f"1_held_out_{name}"] = line["held_out"].get(name)
    for role, figures in line["roles"].items():
        main_figures[f"2_reward/{role}"] = figures.get("reward")
        main_figures[f"3_entropy/{role}"] = figures.get("entropy")
        main_figures[f"4_sampler_gap/{role}"] = figures.get("sampler_gap_mean")

    all_figures: dict[str, float] = {}
    for name, main_figure in main_figures.items():
        if main_figure is not None:
            all_figures[f"{MAIN_GROUP}/{name}"] = main_figure
    for name, value in flatten_numbers(line):
        all_figures[name if "/" in name else f"step/{name}"] = value
    return all_figures


def without_secrets(value: Any) -> Any:
    """Return a setting without private parts, also within lists and tables. A path is reduced to its last part, and an
    address loses passwords and secret parameters."""
    if isinstance(value, Mapping):
        return {name: without_secrets(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if Path(value).is_absolute():
        return Path(value).name
    return _SECRET.sub(r"\1=***", _PASSWORD.sub(r"\1", value))


def flatten_numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the finite numbers in nested mappings, each with its path, for example `roles/planner/reward`. `name` is
    the path of `value`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flatten_numbers(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, bool | int | float) and math.isfinite(value):
        yield name, float(value)


def send_export(run: Path, export: Path, say: Callable[[str], None]) -> None:
    """Store an export as an artefact of its run, in each of the run's tools that store files. `say` gets the result of
    each tool. A tool that fails does not change the export."""
    config = convert(read_run_json(run)["config"])
    for tool in config.loggers:
        if tool not in KEEP_FILES:
            continue
        try:
            tracker = _open_tracker(tool, config, run.absolute(), done=0)
            try:
                tracker.keep(export, EXPORT_ARTEFACT, without=VERSIONS)
            finally:
                tracker.finish()
        except Exception as error:  # noqa: BLE001  (tools raise errors of all kinds)
            say(f"logger {tool}: the export was not stored there ({error_line(error)[:300]})")
        else:
            say(f"stored in {tool} as an artefact of the run")


def _open_tracker(tool: Tool, config: TrainConfig, path: Path, done: int) -> Tracker:
    """Open the run in a tool: continue the tracker's run whose id is in loggers.json, or begin a new one, which gets
    the configuration. `done` is the number of steps that the run has done before."""
    run_json = read_run_json(path)
    file = path / "loggers.json"
    # An id of this run that differs from the ids of other runs in a folder of the same name.
    run_id = hashlib.sha256(f"{run_json['run']} {run_json['created']}".encode()).hexdigest()[:12]
    tracker_id: str | None = None
    if file.is_file():
        tracker_id = json.loads(file.read_text()).get(tool)
    tracker = Tracker(tool, config.project, path, run_id, earlier_id=tracker_id, steps_done=done)
    # trackio shows only the settings of the last part of a run, so it gets them each time.
    if tracker_id is None or tool == "trackio":
        settings: dict[str, bool | int | float | str] = {}
        for name, value in leaves(without_variables(config)):
            setting = without_secrets(value)
            settings[name] = setting if isinstance(setting, bool | int | float | str) else json.dumps(setting)
        tracker.settings(settings)
    if tracker_id is None:
        with rewriting(file):
            ids = json.loads(file.read_text()) if file.is_file() else {}
            write_atomically(file, json.dumps({**ids, tool: tracker.id}).encode())
    return tracker


def _table_row(step: int, episode: Episode) -> list[Any]:
    """Return the cells of an episode in the table of a step, as `COLUMNS` names them."""
    task_input = json.dumps(episode.task.input, default=str)[:CELL_CHARACTERS]
    metrics = json.dumps(dict(episode.metrics))
    error = (episode.error or "")[:CELL_CHARACTERS]
    return [step, episode.task.id, task_input, episode.status, episode.calls, metrics, error]
