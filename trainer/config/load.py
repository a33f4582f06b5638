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
    """Read TOML (if any) and apply flags over it; keys of `flags` are dotted field names, None means not given.

    Raises ConfigError naming the field, its value and what is allowed.
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
    """What a TOML file says; nothing where there is no `path`. Raises ConfigError."""
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
    if isinstance(table.get("cluster"), Mapping):
        table = {**table, "cluster": {"address": "local", **table["cluster"]}}
    if isinstance(table.get("records"), str | Path):
        table = {**table, "records": {"path": str(table["records"])}}
    if isinstance(prompts := table.get("prompts"), str | Path):
        raise ConfigError("prompts", str(prompts), "has another name now", "Use prompts_file for a file of prompts.")
    if isinstance(prompts, Mapping):  # options of cotune prompts improve, which may share the file
        table = {name: value for name, value in table.items() if name != "prompts"}
    if not table.get("model"):
        missing = "is missing: it is a model folder, a GGUF file or a Hugging Face id"
        raise ConfigError("model", table.get("model"), missing, "Pass --model.")
    # The recipes of the run and of single policies: field, subject of the error, name.
    recipes = [("recipe", "", table.get("recipe"))]
    policies = table.get("policy")
    for policy in policies if isinstance(policies, list | tuple) else ():
        if isinstance(policy, Mapping):
            recipes.append(("policy.recipe", f"of policy {policy.get('name')} ", policy.get("recipe")))
    for field, subject, name in recipes:
        if isinstance(name, Mapping):
            remedy = "What a run changes of it is in [rewards] and [loss], such as loss.clip_high."
            raise ConfigError(field, dict(name), f"{subject}is not the name of a recipe", remedy)
        known = {*RECIPES, *FROM_RECORDS}
        if isinstance(name, str) and name not in known and not is_own(name):
            remedy = "For a class of your own, name its file too: my_method.py:Ranked."
            raise ConfigError(field, name, f"{subject}is not one of {', '.join(sorted(known))}", remedy)
    check_names(table, TrainConfig)
    try:
        config = msgspec.convert(table, TrainConfig)
    except msgspec.ValidationError as error:
        raise conversion_error(error, table, TrainConfig) from None
    check(config)
    return config


def assign(table: dict[str, Any], dotted: str, value: Any) -> None:
    """Set a field by its dotted name. Raises ConfigError where a part of the name is no table."""
    *parents, leaf = dotted.split(".")
    if not all((*parents, leaf)):
        raise ConfigError(dotted, value, "is not the name of a field, such as lora.rank", PAGE)
    for parent in parents:
        if table.get(parent) is None:  # a table that is not set, such as rewards.weights
            table[parent] = {}
        table = table[parent]
        if not isinstance(table, dict):
            if removed := removed_setting(dotted, value):
                raise removed
            fault = f"is not a field of the configuration: {parent} is no table"
            raise ConfigError(dotted, value, fault, PAGE)
    table[leaf] = value
