"""The training settings and the loss of each policy, for opening a learner."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.recipes import LossSpec
from cotune.config.train import TrainConfig
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.config.policy import settings_of


def bounded_loss(loss: LossSpec, max_tokens: int) -> LossSpec:
    """Return the loss with a `constant_length`: its own, or the run's response limit if it has none."""
    return msgspec.structs.replace(loss, constant_length=loss.constant_length or max_tokens)


def trainings_of_tables(config: TrainConfig, recipes: Recipes) -> Mapping[str, PolicyTraining]:
    """Return the settings and the loss of each policy that has a [[policy]] table."""
    trainings: dict[str, PolicyTraining] = {}
    for table in config.policy:
        loss = bounded_loss(recipes.of(table.name).loss, config.sampling.max_tokens)
        trainings[table.name] = PolicyTraining(settings_of(config, table.name).learner, loss)
    return trainings
