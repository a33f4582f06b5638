"""The runs and evaluations of an ablation, read from its configuration."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from cotune.adapters.fingerprint import base_fingerprint
from cotune.errors import ConfigError
from cotune.trainer.config.load import read_toml

TEAM = "team"
Layout = Literal["shared", "lora", "full"]


class Ablation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The configuration file. `train` holds the settings of every run.

    Paths of tasks are relative to the file. So is the path of a model if that folder exists; otherwise `model` is taken
    as in any run: a Hugging Face id, or a path relative to the working directory.
    """

    workflow: str
    """The team, as MODULE:ATTRIBUTE."""
    tasks: str
    held_out: str
    train: dict[str, Any]
    alone: dict[str, str] = {}
    """By role, a workflow of this role alone, which does the whole task. It must use the same role name."""
    alone_tasks: dict[str, str] = {}
    """By role, tasks of the single agent if they differ from the team's tasks."""
    seeds: Sequence[int] = (0, 1, 2, 3, 4)
    layouts: dict[Layout, dict[str, Any]]
    """Ways to give the team policies, each with the settings that override `train`."""


class Training(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one seed."""

    name: str
    workflow: str
    tasks: Path
    settings: dict[str, Any]

    def digest(self, seed: int) -> str:
        """Identify the run by everything that decides its outcome: workflow, tasks, settings, base model and seed."""
        model = Path(str(self.settings.get("model", "")))
        # A base model that was built again in the same folder is another model.
        base = base_fingerprint(model) if model.is_dir() else None
        return digest_of([self.workflow, file_digest(self.tasks), self.settings, base, seed])


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table: a workflow and who plays in it.

    `players` maps roles to names of trainings, `*` stands for all roles. `mode` is a mode of `cotune eval`. `before` is
    the row with the same workflow untrained; empty for an untrained row.
    """

    name: str
    title: str
    workflow: str
    players: dict[str, str]
    before: str = ""
    mode: Literal["base", "trained", "swapped"] = "trained"


def digest_of(parts: Any) -> str:
    """The first 12 digits of the SHA-256 of JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(parts, order="deterministic")).hexdigest()[:12]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_ablation(path: Path) -> Ablation:
    """Raises ConfigError for a file that is missing or has other fields."""
    try:
        ablation = msgspec.convert(read_toml(path), Ablation)
    except msgspec.ValidationError as error:
        fault = f"is no configuration of an ablation: {error}"
        raise ConfigError("config", str(path), fault, "See examples/ablation/plan_path.toml.") from None
    if not ablation.seeds or not ablation.layouts:
        empty = "layouts" if ablation.seeds else "seeds"
        raise ConfigError(empty, "", "names none", "Name at least one.")
    for tasks in (ablation.tasks, ablation.held_out, *ablation.alone_tasks.values()):
        if not (path.parent / tasks).is_file():
            raise ConfigError("tasks", str(path.parent / tasks), "does not exist")
    layouts: dict[Layout, dict[str, Any]] = {}
    for layout, changes in ablation.layouts.items():
        layouts[layout] = _with_model_beside(path.parent, changes)
    return msgspec.structs.replace(ablation, train=_with_model_beside(path.parent, ablation.train), layouts=layouts)


def _with_model_beside(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose model is an absolute path if it names a folder relative to `folder`."""
    model = settings.get("model")
    if isinstance(model, str) and (folder / model).is_dir():
        return {**settings, "model": str((folder / model).resolve())}
    return dict(settings)


def trainings(ablation: Ablation, folder: Path) -> list[Training]:
    """Return the runs of one seed: each single agent, and the team in each layout. `folder` is the folder of the
    configuration."""
    runs = []
    for role, workflow in ablation.alone.items():
        tasks = folder / ablation.alone_tasks.get(role, ablation.tasks)
        runs.append(
            Training(name=f"alone_{role}", workflow=workflow, tasks=tasks, settings=_settings(ablation, "lora"))
        )
    for layout in ablation.layouts:
        settings = _settings(ablation, layout)
        runs.append(
            Training(
                name=f"{TEAM}_{layout}", workflow=ablation.workflow, tasks=folder / ablation.tasks, settings=settings
            )
        )
    return runs


def rows(ablation: Ablation) -> list[Row]:
    """The lines of the table, the untrained team first."""
    team = f"{TEAM}_{next(iter(ablation.layouts))}"  # any run of the team has its untrained model
    table = [
        Row(name="untrained", title="team, untrained", workflow=ablation.workflow, players={"*": team}, mode="base")
    ]

    # 1. Each single agent, before and after; then these policies together in the team.
    for role, workflow in ablation.alone.items():
        alone = f"alone_{role}"
        untrained = Row(
            name=f"{alone}_untrained",
            title=f"{role} alone, untrained",
            workflow=workflow,
            players={"*": alone},
            mode="base",
        )
        trained = Row(
            name=alone,
            title=f"{role} trained alone, evaluated alone",
            workflow=workflow,
            players={"*": alone},
            before=untrained.name,
        )
        table += [untrained, trained]
    if ablation.alone:
        together = Row(
            name="alone_together",
            title="policies trained alone, put together in the team",
            workflow=ablation.workflow,
            players={role: f"alone_{role}" for role in ablation.alone},
            before="untrained",
        )
        table.append(together)

    # 2. The team in each layout, and with its policies exchanged.
    titles = {"shared": "one shared LoRA", "lora": "a LoRA per role", "full": "all weights, a model per role"}
    for layout in ablation.layouts:
        row = Row(
            name=f"{TEAM}_{layout}",
            title=f"team trained together, {titles[layout]}",
            workflow=ablation.workflow,
            players={"*": f"{TEAM}_{layout}"},
            before="untrained",
        )
        table.append(row)
        if layout != "shared":  # a shared policy has nothing to exchange
            title = "the same, policies exchanged between the roles"
            table.append(msgspec.structs.replace(row, name=f"{row.name}_swapped", title=title, mode="swapped"))
    return table


def _settings(ablation: Ablation, layout: Layout) -> dict[str, Any]:
    return merged({**ablation.train, "policies": layout}, ablation.layouts.get(layout, {}))


def merged(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with the fields of `changes` in their place, table by table."""
    result = dict(settings)
    for name, value in changes.items():
        before = result.get(name)
        result[name] = merged(before, value) if isinstance(before, dict) and isinstance(value, Mapping) else value
    return result
