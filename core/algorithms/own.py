"""Call code of the user: functions that a loss names as `module:function` or `path/to/file.py:function`, and methods of
a recipe's class, whose results are checked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cotune.algorithms.method import Method
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step
from cotune.errors import ConfigError, CotuneError, GroupError, error_text
from cotune.runtime.user_code import error_origin
from cotune.user_objects import load_object, takes

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "token_loss": ("tokens",),
    "teacher_sees": ("candidate", "call", "task"),
}
"""The arguments of the function of each setting."""


@functools.cache
def own_function(setting: str, spec: str) -> Callable[..., Any]:
    """The function that a setting names. Raises ConfigError if it does not exist or takes other arguments."""
    function = load_object(f"loss.{setting}", spec, f"my_method.py:{setting}")
    arguments = ARGUMENTS[setting]
    if not callable(function) or not takes(function, len(arguments)):
        fault = f"is not a function that takes ({', '.join(arguments)})"
        raise ConfigError(f"loss.{setting}", spec, fault, "See docs/reference/recipes.md, A method of your own.")
    checked: Callable[..., Any] = function
    return checked


def rewards_of(method: Method, step: Step) -> Floats:
    """[n] `method.rewards(step)`. Raises GroupError if a user's method fails, with its file and line."""
    return _checked_array(method, method.rewards, step)


def advantages_of(method: Method, step: Step, rewards: Floats) -> Floats:
    """[n] `method.advantages(step, rewards)`. Raises GroupError if a user's method fails, with its file and line, and
    for advantages that are not finite numbers."""
    advantages = _checked_array(method, method.advantages, step, rewards.copy())
    for group in step.groups:
        if not np.isfinite(advantages[group]).all():
            raise GroupError(
                f"{method.name} returned the advantages {advantages[group].tolist()} for the rewards "
                f"{rewards[group].tolist()} of a group.",
                "Return a finite number for each sample.",
            )
    return advantages


def _checked_array(method: Method, function: Callable[..., Any], step: Step, *rewards: Floats) -> Floats:
    """The result of `method.rewards(step)` or `method.advantages(step, rewards)`, [n]; `function` is one of the two.

    For a method of the user, errors and arrays of the wrong shape become GroupError, with the place in the user's code.
    """
    if not method.is_own:
        return np.asarray(function(step, *rewards), np.float64)
    name = function.__name__
    try:
        values = np.asarray(function(step, *rewards), np.float64)
    except CotuneError:
        raise
    except Exception as error:
        text = f"{name} of {method.name} raised {error_text(error)}{error_origin(error)}."
        raise GroupError(text, "Correct the method.") from error
    if values.shape != (len(step.samples),):
        raise GroupError(
            f"Method {name} of recipe {method.name} returned an array of shape {values.shape} for "
            f"{len(step.samples)} samples.",
            "Return one number for each of step.samples, in their order.",
        )
    return values
