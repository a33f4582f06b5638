"""One run in an experiment tracker: TensorBoard, W&B, MLflow or Trackio, which accelerate's trackers speak to."""

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
"""Packages of each, one of which must be installed."""

KEEP_FILES: Sequence[Tool] = ("wandb", "mlflow")
"""The tools that also keep files."""


def check_tools(tools: Sequence[Tool]) -> None:
    """Raises ConfigError for a tool that is not installed."""
    for tool in tools:
        if not any(find_spec(package) for package in PACKAGES[tool]):
            raise ConfigError("loggers", tool, "is not installed", f"pip install {PACKAGES[tool][0]}")


class Tracker:
    """A run in one tool. Call all methods from one thread; they raise any error of the tool."""

    def __init__(
        self, tool: Tool, project: str, folder: Path, run: str, *, known: str | None = None, done: int = 0
    ) -> None:
        """Start the run of a run folder, named after it, or continue it.

        `run` is an id of the run for tools that take one; `known` the `id` of this tracker when it was started before,
        after which the run has made `done` steps.
        """
        from accelerate import tracking
        from accelerate.state import PartialState

        PartialState(cpu=True)  # without it accelerate's own log raises
        made: Any
        match tool:
            case "tensorboard":
                made = tracking.TensorBoardTracker(tool, folder, purge_step=done + 1 if known else None)
            case "wandb":
                place = {"id": run, "name": folder.name, "resume": "allow", "dir": str(folder)}
                made = tracking.WandBTracker(project, **place)
            case "mlflow":
                made = tracking.MLflowTracker(project, run_id=known, run_name=folder.name)
            case "trackio":
                made = tracking.TrackioTracker(project, name=f"{folder.name}-{run}", resume="allow")
        made.main_process_only = False
        made.start()
        if tool == "wandb":
            made.tracker.define_metric("*", step_metric="step")
        self.id: str = made.tracker.info.run_id if tool == "mlflow" else run
        self._tool = tool
        self._made = made

    def settings(self, values: Mapping[str, bool | int | float | str]) -> None:
        """Store the configuration."""
        if self._tool == "trackio":  # accelerate's way adds a setting of its own
            self._made.tracker.config.update(values)
        else:
            self._made.store_init_configuration(dict(values))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Store the figures of a step; they name it too, as W&B takes a step once only. Trackio keeps the name."""
        named = {name: value for name, value in figures.items() if name != "step"}
        if self._tool == "mlflow":
            named = {_mlflow_name(name): value for name, value in named.items()}
        if self._tool != "trackio":
            named["step"] = step
        self._made.log(named, **({} if self._tool == "wandb" else {"step": step}))

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], step: int) -> None:
        """Store a table of a step, where the tool can show one."""
        if self._tool == "wandb":
            self._made.log_table(name, columns=list(columns), data=[list(row) for row in rows])
        elif self._tool == "tensorboard":
            lines = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows)
            table = "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))
            self._made.log({name: table}, step=step)
        elif self._tool == "mlflow":
            import mlflow

            by_column = dict(zip(columns, map(list, zip(*rows, strict=True)), strict=True))
            mlflow.log_table(by_column, f"{name}/step-{step:06d}.json")

    def keep(self, folder: Path, name: str, *, without: str) -> None:
        """Store a folder, except `without` in it, as an artefact of the run. Only tools of `KEEP_FILES` can."""
        entries = [entry for entry in sorted(folder.iterdir()) if entry.name != without]
        if self._tool == "wandb":
            import wandb

            artefact = wandb.Artifact(f"{name}-{self.id}", type="model")
            for entry in entries:
                if entry.is_dir():
                    artefact.add_dir(str(entry), name=entry.name)
                else:
                    artefact.add_file(str(entry))
            self._made.tracker.log_artifact(artefact)
        elif self._tool == "mlflow":
            import mlflow

            for entry in entries:
                if entry.is_dir():
                    mlflow.log_artifacts(str(entry), f"{name}/{entry.name}")
                else:
                    mlflow.log_artifact(str(entry), name)

    def finish(self) -> None:
        """End the run's part that was logged here."""
        self._made.finish()


def _mlflow_name(name: str) -> str:
    """A figure's name as MLflow takes it: at most 250 characters, and none of the marks that roles may have.

    Names that had to change end with a digest, so that they stay different.
    """
    plain = re.sub(r"[^\w\-. /]", "_", name)
    if plain == name and len(name) <= 250:
        return name
    return f"{plain[:239]}-{hashlib.blake2b(name.encode(), digest_size=5).hexdigest()}"
