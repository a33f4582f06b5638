"""Settings of one policy: those of its [[policy]] table, and the run's where it has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.config.methods import LossSettings, RewardSettings
from cotune.errors import ConfigError, check_bounds
from cotune.integrations.models.chat.tool_formats import check_tool_format
from cotune.records.policies import UNTRAINED, LoraSpec, PolicySpec
from cotune.records.step_ranges import check_ranges
from cotune.storage.run_config import RunPolicy
from cotune.trainer.config.learner import LearnerSettings


class ScheduleConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[schedule] Learning rate over the run, as a factor on `learner.lr`."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    """constant, or decay to zero at the last step: linear | cosine."""
    warmup: int = 0
    """Steps of linear warm-up."""

    def __post_init__(self) -> None:
        check_bounds(self, "warmup", least=0, table="schedule.")


class PolicyConfig(RunPolicy, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """[[policy]] One policy and the roles it plays; replaces the layout in `policies`."""

    lora: LoraSpec = LoraSpec()
    lr: float | None = None
    """Without a value `learner.lr`."""
    schedule: ScheduleConfig | None = None
    """Without a value the run's `schedule`."""

    def __post_init__(self) -> None:
        check_bounds(self, "lr", table="policy.")
        check_bounds(self, "weight_decay", least=0, table="policy.")

    @property
    def of_training(self) -> Iterator[str]:
        """Settings that are given and only mean something to a policy that is trained."""
        for name in ("lr", "schedule", "weight_decay", "recipe", "rewards", "loss", "train", "teacher"):
            if getattr(self, name) not in _UNSET:
                yield name


_UNSET = (None, "", RewardSettings(), LossSettings())
"""Values of fields that a [[policy]] table does not set."""


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one policy is trained with, by its own table or the run's."""

    learner: LearnerSettings
    """With its own rate and weight decay."""
    schedule: ScheduleConfig
    teacher: str = ""
    """Of a policy that learns from one; "" for others."""


def _check_tool_formats(policies: Iterable[PolicyConfig], specs: Mapping[str, PolicySpec]) -> None:
    """Raises ConfigError for a format of tool calls that is unknown, of no base of its own, or not the only one of its
    base."""
    first: dict[str, PolicyConfig] = {}
    for one in policies:
        model = specs[one.name].model
        if not one.tool_format:
            continue
        if model is None:
            fault = f"is of a base model, and policy {one.name} has the run's"
            raise ConfigError("policy.tool_format", one.tool_format, fault, "Set the run's `tool_format`.")
        check_tool_format(one.tool_format, "policy.tool_format")
        if (other := first.setdefault(model, one)).tool_format != one.tool_format:
            fault = f"of policy {one.name} is not that of {other.name}, {other.tool_format!r}, which has the same base"
            raise ConfigError("policy.tool_format", one.tool_format, fault, "Give both the same.")


def first_written(models: Iterable[str]) -> dict[str, str]:
    """Each model as the first of those is written that are the same path: `./base` is `base`."""
    first: dict[Path | str, str] = {}
    found: dict[str, str] = {}
    for model in models:
        path = Path(model).expanduser()
        found[model] = first.setdefault(path.resolve() if path.exists() else model, model)
    return found


def check_policies(
    policies: Sequence[PolicyConfig], specs: Mapping[str, PolicySpec], recipe: str | None, steps: int
) -> None:
    """Raises ConfigError for settings of policies that mean nothing where they stand, and for bad ranges of steps."""
    for one in policies:
        if one.model and one.kind == "provider":
            fault = f"is the base of {one.name}, which the provider answers"
            raise ConfigError("policy.model", one.model, fault, 'Leave it out, or use kind = "frozen".')
        if one.model and one.name == UNTRAINED.name:
            fault = "is the name of the run's own model, untrained, and this policy has another"
            raise ConfigError("policy.name", one.name, fault, "Rename it.")
        for name in () if one.trained else one.of_training:
            fault = f"has no effect: policy {one.name} is of kind {one.kind}, which is not trained"
            raise ConfigError(f"policy.{name}", getattr(one, name), fault, 'Leave it out, or set kind = "lora".')
        for name in ("recipe", "rewards", "loss", "train", "teacher"):
            value = getattr(one, name)
            if recipe in FROM_RECORDS and value not in _UNSET:
                fault = f"cannot be used with recipe {recipe}, which learns from records"
                raise ConfigError(f"policy.{name}", value, fault, f"Leave it out of policy {one.name}.")
        if one.recipe in FROM_RECORDS:
            fault = f"of policy {one.name} learns from records, and so is the recipe of a whole run"
            raise ConfigError("policy.recipe", one.recipe, fault, f"Set `recipe`, or another one for {one.name}.")
    _check_tool_formats(policies, specs)
    check_ranges({one.name: one.train for one in policies if one.trained}, steps)
