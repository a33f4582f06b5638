"""Settings of one policy: from its [[policy]] table, or else from the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.config.learner import LearnerSettings, ScheduleConfig
from cotune.config.policy import UNSET, PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.chat.tool_formats import AUTO, check_tool_format
from cotune.records.policies import UNTRAINED, PolicySpec
from cotune.records.step_ranges import check_ranges
from cotune.trainer.config.teachers import teacher_of


class PolicySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that one policy is trained with, from its own table or the run's."""

    learner: LearnerSettings
    """The settings of the run's learner, with the learning rate of this policy."""
    schedule: ScheduleConfig
    teacher: str = ""
    """The teacher of the policy; "" if it does not learn from one."""


def _check_tool_formats(policies: Iterable[PolicyConfig], specs: Mapping[str, PolicySpec]) -> None:
    """Check the formats of tool calls that policies set. A format belongs to a base model, so all policies with this
    base must have the same, and a policy with the run's base cannot set it. Raises ConfigError.
    """
    policy_of_model: dict[str, PolicyConfig] = {}
    for policy in policies:
        model = specs[policy.name].model
        if not policy.tool_format:
            continue
        if model is None:
            fault = f"is of a base model, and policy {policy.name} has the run's"
            raise ConfigError("policy.tool_format", policy.tool_format, fault, "Set the run's `tool_format`.")
        check_tool_format(policy.tool_format, "policy.tool_format")
        other = policy_of_model.setdefault(model, policy)
        if other.tool_format != policy.tool_format:
            fault = (
                f"of policy {policy.name} differs from {other.tool_format!r}, the tool_format of policy {other.name}, "
                "which has the same base"
            )
            remedy = f"Set the same tool_format in [[policy]] {other.name} and [[policy]] {policy.name}."
            raise ConfigError("policy.tool_format", policy.tool_format, fault, remedy)


def check_policies(
    policies: Sequence[PolicyConfig], specs: Mapping[str, PolicySpec], recipe: str | None, steps: int
) -> None:
    """Check the settings of [[policy]] tables, and their ranges of steps. Raises ConfigError, also for a setting that
    has no effect on its kind of policy.
    """
    for policy in policies:
        if policy.model and policy.kind == "provider":
            fault = f"is the base of {policy.name}, which the provider answers"
            raise ConfigError("policy.model", policy.model, fault, 'Leave it out, or use kind = "frozen".')
        if policy.model and policy.name == UNTRAINED.name:
            fault = "is the name of the run's own model, untrained, and this policy has another"
            raise ConfigError("policy.name", policy.name, fault, "Rename it.")
        settings_of_training = () if policy.trained else policy.of_training
        for name in settings_of_training:
            fault = f"has no effect: policy {policy.name} is of kind {policy.kind}, which is not trained"
            raise ConfigError(f"policy.{name}", getattr(policy, name), fault, 'Leave it out, or set kind = "lora".')
        for name in ("k", "temperature", "select", "evaluation"):
            value = getattr(policy, name)
            if policy.kind == "provider" and value not in UNSET:
                if name == "evaluation":
                    value = msgspec.structs.asdict(value)
                fault = f"has no effect: the provider answers for policy {policy.name}"
                raise ConfigError(f"policy.{name}", value, fault, "Leave it out.")
        for name in ("recipe", "rewards", "loss", "train", "teacher", "k", "temperature", "select"):
            value = getattr(policy, name)
            if recipe in FROM_RECORDS and value not in UNSET:
                fault = f"cannot be used with recipe {recipe}, which learns from records"
                raise ConfigError(f"policy.{name}", value, fault, f"Leave it out of policy {policy.name}.")
        if policy.recipe in FROM_RECORDS:
            fault = f"of policy {policy.name} learns from records, and so is the recipe of a whole run"
            raise ConfigError("policy.recipe", policy.recipe, fault, f"Set `recipe`, or another one for {policy.name}.")
    _check_tool_formats(policies, specs)
    check_ranges({policy.name: policy.train for policy in policies if policy.trained}, steps)


def settings_of(config: TrainConfig, policy: str) -> PolicySettings:
    """The settings that a policy is trained with: from its [[policy]] table, or else from the run."""
    policy_table = config.policy_table(policy)
    teacher = teacher_of(config, policy_table)
    if policy_table is None:
        return PolicySettings(learner=config.learner, schedule=config.schedule, teacher=teacher)
    lr = config.learner.lr if policy_table.lr is None else policy_table.lr
    learner = msgspec.structs.replace(config.learner, lr=lr)
    return PolicySettings(learner=learner, schedule=policy_table.schedule or config.schedule, teacher=teacher)


def shared_tool_format(config: TrainConfig) -> list[str]:
    """A note if the run's `tool_format` is used for several base models, which may write tool calls in different
    ways."""
    bases_with_own_format = [config.specs[policy.name].model for policy in config.policy if policy.tool_format]
    models = [model for model in config.bases if model not in bases_with_own_format]
    if len(models) < 2 or config.tool_format == AUTO:
        return []
    return [f"tool_format = {config.tool_format!r} is taken for several base models: {', '.join(models)}"]
