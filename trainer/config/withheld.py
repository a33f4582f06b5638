"""Environment variables of a configuration: a run folder has only their names, because the values may be secrets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.storage.run_layout import WITHHELD, is_withheld, leaves, without_values
from cotune.trainer.config.load import assign


def without_variables(config: TrainConfig) -> dict[str, Any]:
    """The configuration as a table for the run folder, in which environment variables have no values."""
    table: dict[str, Any] = without_values(msgspec.to_builtins(config))
    return table


def with_values(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in the values of environment variables. A stored configuration has only their names, because values may be
    secrets.

    A value comes from `changes` (dotted names or nested tables), otherwise from this process. Raises ConfigError that
    names the missing ones.
    """
    filled: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(table))  # a deep copy
    changed_values = dict(leaves(changes))
    missing = []
    for name, value in list(leaves(filled)):
        if not is_withheld(name) or value != WITHHELD:
            continue
        variable = name.rpartition(".")[2]
        secret = changed_values.get(name, os.environ.get(variable))
        if secret is None:
            missing.append(variable)
        else:
            assign(filled, name, secret)
    if missing:
        names = ", ".join(missing)
        example = f"export {missing[0]}=..., or pass --set cluster.env.{missing[0]}=..."
        fault = f"is missing: a run folder keeps the names of environment variables, not their values ({names})"
        raise ConfigError("cluster.env", None, fault, f"For each: {example}.")
    return filled
