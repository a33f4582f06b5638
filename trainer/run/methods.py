"""How each policy of a run is trained: the methods that a learner is opened with."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.recipes import LossSpec
from cotune.config.train import TrainConfig
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.config.policy import settings_of


def bounded_loss(loss: LossSpec, max_tokens: int) -> LossSpec:
    """The loss with the run's response limit, where it names none."""
    return msgspec.structs.replace(loss, constant_length=loss.constant_length or max_tokens)


def own_methods(config: TrainConfig, recipes: Recipes) -> Mapping[str, PolicyTraining]:
    """The methods of the policies that have a [[policy]] table."""
    return {
        one.name: PolicyTraining(
            settings_of(config, one.name).learner,
            bounded_loss(recipes.of(one.name).loss, config.sampling.max_tokens),
        )
        for one in config.policy
    }
