"""Checks of a whole configuration: settings that cannot be combined, and settings that an engine cannot serve."""

from __future__ import annotations

from collections import Counter

from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.integrations.models.chat.tool_formats import check_tool_format
from cotune.replay.forks import fork_rule
from cotune.storage.outcomes import failure_reward
from cotune.trainer.config.engine import check_engine, engine_shares_gpu
from cotune.trainer.config.from_records import check_records
from cotune.trainer.config.learner import check_one_process
from cotune.trainer.config.policy import check_policies
from cotune.trainer.config.teachers import check_teachers


def check(config: TrainConfig) -> None:
    """Raise ConfigError for settings that cannot be combined, or that no engine can serve."""
    _check_failure(config.on_failure)
    fork_rule(config.replay.forks)
    check_tool_format(config.tool_format)
    check_engine(config.engine, config.cluster)
    if engine_shares_gpu(config) and config.mode != "sync":
        fault = f"must be sync if {config.engine} shares a GPU with the learner, as it sleeps during updates"
        raise ConfigError("mode", config.mode, fault, 'Set engine = "transformers".')
    if config.sampling.repeatable and config.mode == "async":
        fault = "cannot be used in mode async, where timing decides which version of a policy answers"
        raise ConfigError("sampling.repeatable", True, fault, 'Set mode = "sync", or leave it out.')
    check_teachers(config, config.model)
    check_records(config.recipe, config.records, config.learner)
    kinds: set[str] = {policy.kind for policy in config.policy}
    if not config.policy:
        kinds = {config.policies}
    check_one_process(config.learner, config.cluster.on_ray, kinds)
    for name, count in Counter(policy.name for policy in config.policy).items():
        if count > 1:
            raise ConfigError("policy.name", name, "is the name of two policies", "Rename one of them.")
    policies_of_role: Counter[str] = Counter()
    for policy in config.policy:
        policies_of_role.update(policy.roles)
    for role, count in policies_of_role.items():
        if count > 1:
            raise ConfigError("policy.roles", role, "is in two policies", "Remove the role from all but one.")
    check_policies(config.policy, config.specs, config.recipe, config.steps)


def _check_failure(value: str) -> None:
    try:
        failure_reward(value)
    except ValueError:
        raise ConfigError(
            "on_failure", value, "is not lowest, exclude or reward:<number>", "For example: reward:-1"
        ) from None
