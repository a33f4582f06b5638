"""Reads the configuration of a run from TOML and flags. Unknown names are refused here."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from cotune.algorithms.catalogue import RECIPES, is_own
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.trainer.config.check import check
from cotune.trainer.config.faults import PAGE, check_names, conversion_error
from cotune.trainer.config.removed import removed_setting


def load_config(path: str | Path | None, flags: Mapping[str, Any]) -> TrainConfig:
    """Read the configuration of a run from a TOML file, if there is one, and from flags, which override the file.

    The keys of `flags` are dotted field names. A value of None means that the flag was not passed. Raises ConfigError,
    which names the field, its value and the allowed values.
    """
    table = read_toml(path)
    refuse_search_options(flags)
    for name, value in flags.items():
        if value is not None:
            assign(table, name, value)
    return convert(table)


def refuse_search_options(flags: Mapping[str, Any]) -> None:
    """Raise ConfigError for a dotted name of the table [prompts].

    A file may have this table, as it serves both commands. A flag is meant for this run.
    """
    for name, value in flags.items():
        if name.startswith("prompts."):
            remedy = "Pass it to cotune prompts improve, then cotune train --prompts FOLDER."
            raise ConfigError(name, value, "is an option of searches for prompts, and a run searches for none", remedy)


def read_toml(path: str | Path | None) -> dict[str, Any]:
    """The table of a TOML file; empty without a `path`. Raises ConfigError."""
    if path is None:
        return {}
    path = Path(path)
    if not path.is_file():
        raise ConfigError("config", str(path), "does not exist", PAGE)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config", str(path), f"is not valid TOML ({error})") from None


def convert(table: Mapping[str, Any]) -> TrainConfig:
    """The configuration of a run from a plain table, as a TOML file or run.json has it.

    Raises ConfigError, which says how to correct a setting, also for settings that earlier versions had.
    """
    complete = _with_short_forms(table)
    if not complete.get("model"):
        missing = "is missing: it is a model folder, a GGUF file or a Hugging Face id"
        raise ConfigError("model", complete.get("model"), missing, "Pass --model.")
    _check_recipe("recipe", complete.get("recipe"))
    policies = complete.get("policy")
    if isinstance(policies, list | tuple):
        for policy in policies:
            if isinstance(policy, Mapping):
                _check_recipe("policy.recipe", policy.get("recipe"), subject=f"of policy {policy.get('name')} ")
    check_names(complete, TrainConfig)
    try:
        config = msgspec.convert(complete, TrainConfig)
    except msgspec.ValidationError as error:
        raise conversion_error(error, complete, TrainConfig) from None
    check(config)
    return config


def _with_short_forms(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with its short forms written out, and without the options of a search for prompts, which may be in the
    same file. Raises ConfigError for `prompts` as a file, which is not its name any more."""
    complete = dict(table)
    if isinstance(table.get("cluster"), Mapping):
        complete["cluster"] = {"address": "local", **table["cluster"]}
    if isinstance(table.get("records"), str | Path):
        complete["records"] = {"path": str(table["records"])}
    prompts = table.get("prompts")
    if isinstance(prompts, str | Path):
        raise ConfigError("prompts", str(prompts), "has another name now", "Use prompts_file for a file of prompts.")
    if isinstance(prompts, Mapping):
        del complete["prompts"]
    return complete


def _check_recipe(field: str, name: object, subject: str = "") -> None:
    """Raise ConfigError if the value of a field is not the name of a recipe. `subject` names the policy in the error.
    Values that are no text are refused later, by their type."""
    if isinstance(name, Mapping):
        remedy = "Settings of the recipe that a run changes are in [rewards] and [loss], such as loss.clip_high."
        raise ConfigError(field, dict(name), f"{subject}is not the name of a recipe", remedy)
    names = {*RECIPES, *FROM_RECORDS}
    if isinstance(name, str) and name not in names and not is_own(name):
        remedy = "For a class of your own, name its file too: my_method.py:Ranked."
        raise ConfigError(field, name, f"{subject}is not one of {', '.join(sorted(names))}", remedy)


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a field of a nested table by its dotted name. Raises ConfigError if a part of the name is no table."""
    *parents, leaf = dotted.split(".")
    if not all((*parents, leaf)):
        raise ConfigError(dotted, value, "is not the name of a field, such as lora.rank", PAGE)
    innermost = table
    for parent in parents:
        if innermost.get(parent) is None:  # a table that is not set, such as rewards.weights
            innermost[parent] = {}
        innermost = innermost[parent]
        if not isinstance(innermost, dict):
            if removed := removed_setting(dotted, value):
                raise removed
            fault = f"is not a field of the configuration: {parent} is no table"
            raise ConfigError(dotted, value, fault, PAGE)
    innermost[leaf] = value
