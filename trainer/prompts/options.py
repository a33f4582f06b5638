"""The options of `cotune prompts improve`; its flags and the table [prompts] are these fields."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.config.prompts import FORKS, OFF, SearchSettings
from cotune.config.rollouts import SamplingConfig
from cotune.config.train import NO_TASKS, EvaluationConfig
from cotune.errors import ConfigError, RunError, check_bounds, expectation_clause, field_and_fault
from cotune.reading.blame import REPORT
from cotune.records.prices import Prices
from cotune.storage.run_code import FOLDER, FolderOrders
from cotune.storage.run_layout import present_address, whole_address
from cotune.storage.typed_json import read_typed
from cotune.trainer.blame.options import provider_model
from cotune.trainer.config.faults import PAGE
from cotune.trainer.config.load import assign, read_toml
from cotune.trainer.config.removed import removed_setting


class ImproveOptions(SearchSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The table [prompts], and the settings above the tables that a search shares with training runs. Raises
    ConfigError for values that do not fit."""

    prompts_file: str | None = None
    """Prompts to start from, as prompts.json of an earlier search."""
    prices: Prices = msgspec.field(default_factory=dict)
    """Money for a million prompt tokens and a million completion tokens, by model."""
    roles_by: str | None = None
    """How roles are named: caller | model | module:function."""
    redact: str | None = None
    """module:function that removes personal data before anything is recorded, or shown to the reflection model."""
    seed: int = 0
    """Of the search and the split of tasks."""
    concurrency: int = 8
    """Episodes in flight."""
    episode_timeout: float = 600.0
    """Seconds for one episode, and then for the judge of it."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Its `tasks` is the file of held-out tasks, the only ones whose figures count. Without a file, a third of the
    tasks is held out."""
    sampling: SamplingConfig = SamplingConfig()
    """Its `max_tokens` is the most new tokens of answers of `run` and `model` if the application names no limit. The
    temperature is the application's own."""

    def __post_init__(self) -> None:
        """Check values and their combinations. Raises ConfigError."""
        check_bounds(self, "max_calls", "max_cost", "minibatch", "rounds", "concurrency", "episode_timeout")
        if self.run is not None and self.model is not None:
            raise ConfigError("model", self.model, "cannot be used with run", "Leave one of them out.")
        if self.max_cost is not None and not self.prices:
            raise ConfigError(
                "max_cost", self.max_cost, "needs prices", "For example: --price gpt-4o-mini=0.15/0.60 --max-cost 5"
            )
        if self.max_cost is not None and self.reflection is not None and self.reflection not in self.prices:
            raise ConfigError(
                "max_cost",
                self.max_cost,
                f"needs a price of the reflection model {self.reflection}",
                f"For example: --price {self.reflection}=0.25/2.00, or 0/0 for one that costs nothing.",
            )
        model = provider_model(self.blame)
        if self.max_cost is not None and model and model not in self.prices:
            remedy = f"For example: --price {model}=1.25/10"
            raise ConfigError("max_cost", self.max_cost, f"needs a price of the reference {model}", remedy)

    @property
    def held_out_tasks(self) -> str:
        """The file of held-out tasks. Empty if a part of the tasks is held out."""
        return "" if self.evaluation.tasks == NO_TASKS else self.evaluation.tasks


SHARED = tuple(name for name in ImproveOptions.__struct_fields__ if name not in SearchSettings.__struct_fields__)
"""Settings that stand above the tables of a TOML file, where a training run reads them too."""


def named_options(config: str | Path | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that a user sets. They are in the table [prompts] of a TOML file (if any), above its tables,
    and in `settings`, which override the file. Raises ConfigError."""
    table = read_toml(config)
    options = table.get("prompts", {})
    if not isinstance(options, Mapping):
        raise ConfigError("prompts", options, "is not a table [prompts]", "Use prompts_file for a file of prompts.")
    for name in SHARED:
        if name in options:
            fault = "stands above the tables, where training reads it too"
            raise ConfigError(f"prompts.{name}", options[name], fault, f"Write {name} above the first [table].")
    # A run's file may say "" for none, as in prompts_file = "".
    shared = {name: table[name] for name in SHARED if table.get(name, "") != ""}
    all_options = {**shared, **options}
    for name, value in settings.items():
        assign(all_options, name, value)
    return all_options


def load_options(
    config: str | Path | None, settings: Mapping[str, Any], before: Mapping[str, Any] | None = None
) -> ImproveOptions:
    """Load the options that a user sets (`named_options`). They override `before`, the options of a resumed search.
    Raises ConfigError."""
    table = {**(before or {}), **named_options(config, settings)}
    try:
        return msgspec.convert(table, ImproveOptions, strict=True)
    except msgspec.ValidationError as error:
        field, fault = field_and_fault(error)
        if unknown := sorted(set(table) - set(ImproveOptions.__struct_fields__)):
            if removed := removed_setting(f"prompts.{unknown[0]}", table[unknown[0]]):
                raise removed from None
            fault = "is not an option of a search for prompts"
            raise ConfigError(unknown[0], table[unknown[0]], fault, PAGE) from None
        place = field if field.partition(".")[0] in SHARED else f"prompts.{field}"
        raise ConfigError(place, table.get(field), expectation_clause(fault), PAGE) from None


def with_absolute_paths(options: ImproveOptions) -> ImproveOptions:
    """Return the options with absolute paths of existing files, also of the files of functions (`file.py:function`), so
    that a search can be resumed from any folder."""

    def absolute(path: str | None) -> str | None:
        # A Hugging Face id is no existing path, and stays.
        if path and Path(path).expanduser().exists():
            return str(Path(path).expanduser().resolve())
        return path

    names = ["prompts_file", "run", "model"]
    if options.blame not in (FORKS, OFF):
        names.append("blame")
    files: dict[str, Any] = {name: absolute(getattr(options, name)) for name in names}
    evaluation = options.evaluation
    files["evaluation"] = msgspec.structs.replace(evaluation, tasks=absolute(evaluation.tasks) or "")
    functions: dict[str, str | None] = {}
    for name in ("redact", "roles_by"):
        address = getattr(options, name)
        functions[name] = whole_address(address) if address else None
    return msgspec.structs.replace(options, **files, **functions)


LIMITS = frozenset({"max_calls", "max_cost"})
"""Options that limit the spending of a search."""
CHANGEABLE = LIMITS | frozenset(
    {"prices", "rounds", "concurrency", "episode_timeout", "reflection_url", "reflection_key_env"}
)
"""Options that a resumed search may change: none of them changes the results so far."""


def check_changes(before: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Raise ConfigError if the options of a resumed search, as plain data, would make it another search."""
    for name, value in options.items():
        if name not in CHANGEABLE and before.get(name) != value:
            fault = f"was {before.get(name)!r} when the search began, and cannot be changed"
            raise ConfigError(name, value, fault, f"May be changed: {', '.join(sorted(CHANGEABLE))}.")


class PromptRun:
    """The files of a search.

    RUN/improve.json   options, tasks and application
    RUN/records.db     every episode and every request to the reflection model
    RUN/parts.json     the parts of the application's prompts, unchanged
    RUN/prompts.json   the best prompts so far, with their results
    RUN/candidates.json  every candidate of the search
    RUN/blame_report.json  the analysis that chose the role to change
    """

    def __init__(self, path: str | Path) -> None:
        """Name the files of the search in the folder `path`. Nothing is read or written."""
        self.path = Path(path).absolute()
        self.described = self.path / "improve.json"
        self.records = self.path / "records.db"
        self.parts = self.path / "parts.json"
        self.prompts = self.path / "prompts.json"
        self.candidates = self.path / "candidates.json"
        self.blame = self.path / REPORT
        self.lock = self.path / "lock"


class StoredSearch(msgspec.Struct, frozen=True, kw_only=True):
    """improve.json of a search: its application ("" if it was started with an object), the folder in which it was
    started, its tasks and options, and the secret of its marks."""

    app: str
    cwd: str
    tasks: str
    task_ids: list[str]
    options: dict[str, Any]
    secret: str

    def orders_with(self, app: str) -> dict[str, str]:
        """Return the orders of the search, by setting: the code to import, the address to send requests to, and the
        variable with the key for it. `app` is the address of its application."""
        orders: dict[str, str] = {}
        if app:
            orders["workflow"] = app
        for name in ("roles_by", "redact", "reflection_url", "reflection_key_env"):
            value = self.options.get(name)
            # Values without a colon, such as roles_by = "caller", name no code and no address.
            if value and (":" in value or name == "reflection_key_env"):
                orders[name] = value
        if not orders:
            return {}
        return {**orders, FOLDER: self.cwd}  # FOLDER: the code is imported from there


def read_search(path: str | Path) -> StoredSearch:
    """Read the search of a folder, with the present address of its application. Raises RunError."""
    search = _read_stored(path)
    if not search.app:
        return search
    app = present_address(search.app, {"folder": search.cwd}, PromptRun(path).path)
    return msgspec.structs.replace(search, app=app)


def orders_of_search(path: str | Path) -> FolderOrders:
    """Return the code, addresses and key variables that the folder of a search names. Raises RunError."""
    stored = _read_stored(path)
    present = read_search(path)
    return FolderOrders(PromptRun(path).path, present.orders_with(present.app), stored.orders_with(stored.app))


def _read_stored(path: str | Path) -> StoredSearch:
    file = PromptRun(path).described
    if not file.is_file():
        raise RunError(f"{path} holds no search that can be continued.", "Leave out --resume.")
    return read_typed(file, StoredSearch, "Begin a new search, with another --out.")
