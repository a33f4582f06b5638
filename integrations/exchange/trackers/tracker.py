"""Logs a run to an experiment tracker (TensorBoard, W&B, MLflow or Trackio), by accelerate's trackers."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from cotune.config.train import Tool
from cotune.errors import ConfigError

PACKAGES: Mapping[Tool, Sequence[str]] = {
    "tensorboard": ("tensorboard", "tensorboardX"),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
    "trackio": ("trackio",),
}
"""Tool -> its packages. One of them must be installed."""

KEEP_FILES: Sequence[Tool] = ("wandb", "mlflow")
"""The tools that can also store files."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Raise ConfigError for a tool that is not installed."""
    for tool in tools:
        if not any(find_spec(package) for package in PACKAGES[tool]):
            raise ConfigError("loggers", tool, "is not installed", f"pip install {PACKAGES[tool][0]}")


class Tracker:
    """A run in one tool. Call all methods from one thread; they raise any error of the tool."""

    def __init__(
        self, tool: Tool, project: str, folder: Path, run: str, *, earlier_id: str | None = None, steps_done: int = 0
    ) -> None:
        """Start a run in the tool, named after the run folder `folder`, or continue it.

        `run` is an id for the run, for tools that accept one. To continue a run, `earlier_id` is the `id` of its
        earlier tracker, and `steps_done` the number of steps that the run has made.
        """
        from accelerate import tracking
        from accelerate.state import PartialState

        PartialState(cpu=True)  # without it, accelerate's own logger raises an error
        tracker: Any
        match tool:
            case "tensorboard":
                # An interrupted run may have logged steps after the one that it continues from.
                purge_step = steps_done + 1 if earlier_id else None
                tracker = tracking.TensorBoardTracker(tool, folder, purge_step=purge_step)
            case "wandb":
                options = {"id": run, "name": folder.name, "resume": "allow", "dir": str(folder)}
                tracker = tracking.WandBTracker(project, **options)
            case "mlflow":
                tracker = tracking.MLflowTracker(project, run_id=earlier_id, run_name=folder.name)
            case "trackio":
                tracker = tracking.TrackioTracker(project, name=f"{folder.name}-{run}", resume="allow")
        tracker.main_process_only = False
        tracker.start()
        if tool == "wandb":
            tracker.tracker.define_metric("*", step_metric="step")
        self.id: str = tracker.tracker.info.run_id if tool == "mlflow" else run
        self._tool = tool
        self._tracker = tracker

    def settings(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Store the configuration."""
        if self._tool == "trackio":  # accelerate's own method would add a setting
            self._tracker.tracker.config.update(values)
        else:
            self._tracker.store_init_configuration(dict(values))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Store the figures of a step."""
        values = {name: value for name, value in figures.items() if name != "step"}
        if self._tool == "mlflow":
            values = {_mlflow_name(name): value for name, value in values.items()}
        # W&B accepts each step of its own counter only once, so the step is logged as a figure, and not passed. Trackio
        # reserves the name `step`.
        if self._tool != "trackio":
            values["step"] = step
        if self._tool == "wandb":
            self._tracker.log(values)
        else:
            self._tracker.log(values, step=step)

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Store a table of a step, if the tool can show one."""
        if self._tool == "wandb":
            self._tracker.log_table(name, columns=list(columns), data=[list(row) for row in rows])
        elif self._tool == "tensorboard":
            # TensorBoard shows texts as Markdown.
            lines = [f"| {' | '.join(columns)} |", f"| {' | '.join(['---'] * len(columns))} |"]
            for row in rows:
                cells = [str(cell).replace("|", "\\|").replace("\n", " ") for cell in row]
                lines.append(f"| {' | '.join(cells)} |")
            self._tracker.log({name: "\n".join(lines)}, step=step)
        elif self._tool == "mlflow":
            import mlflow

            by_column = {}
            for position, column in enumerate(columns):
                by_column[column] = [row[position] for row in rows]
            mlflow.log_table(by_column, f"{name}/step-{step:06d}.json")

    def keep(self, folder: Path, name: str, *, without: str) -> None:
        """Store a folder as an artefact of the run, except for `without` in it. Only tools in `KEEP_FILES` can
        do this.
        """
        entries = [entry for entry in sorted(folder.iterdir()) if entry.name != without]
        if self._tool == "wandb":
            import wandb

            artefact = wandb.Artifact(f"{name}-{self.id}", type="model")
            for entry in entries:
                if entry.is_dir():
                    artefact.add_dir(str(entry), name=entry.name)
                else:
                    artefact.add_file(str(entry))
            self._tracker.tracker.log_artifact(artefact)
        elif self._tool == "mlflow":
            import mlflow

            for entry in entries:
                if entry.is_dir():
                    mlflow.log_artifacts(str(entry), f"{name}/{entry.name}")
                else:
                    mlflow.log_artifact(str(entry), name)

    def finish(self) -> None:
        """End this part of the run in the tool."""
        self._tracker.finish()


def _mlflow_name(name: str) -> str:
    """A figure's name for MLflow: at most 250 characters, without the special characters that roles may have.

    A changed name ends with a digest, so that different names stay different.
    """
    plain = re.sub(r"[^\w\-. /]", "_", name)
    if plain == name and len(name) <= 250:
        return name
    return f"{plain[:239]}-{hashlib.blake2b(name.encode(), digest_size=5).hexdigest()}"
