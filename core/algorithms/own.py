"""Functions of the user's own in the place of a recipe's advantages or of its loss, named as `module:function` or
`path/to/file.py:function`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cotune.algorithms.recipes import Recipe
from cotune.algorithms.samples import Codes, Floats, Sample
from cotune.errors import ConfigError, GroupError, error_text
from cotune.runtime.user_code import origin
from cotune.user_objects import load_object, takes

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "advantage": ("samples", "rewards"),
    "token_loss": ("tokens",),
    "teacher_sees": ("candidate", "call", "task"),
}
"""What the function of each setting is called with."""


@functools.cache
def own_function(setting: str, spec: str) -> Callable[..., Any]:
    """The function that a setting names. Raises ConfigError where it is not there or takes other arguments."""
    found = load_object(f"overrides.{setting}", spec, f"my_method.py:{setting}")
    arguments = ARGUMENTS[setting]
    if not callable(found) or not takes(found, len(arguments)):
        fault = f"is not a function that takes ({', '.join(arguments)})"
        raise ConfigError(f"overrides.{setting}", spec, fault, "See docs/reference/recipes.md, A method of your own.")
    function: Callable[..., Any] = found
    return function


def check_own(recipe: Recipe) -> None:
    """Load what a recipe names of the user's own. Raises ConfigError."""
    for term in recipe.terms:
        if term.advantage:
            own_function("advantage", term.advantage)
    if recipe.loss.token_loss:
        own_function("token_loss", recipe.loss.token_loss)
    if ":" in recipe.loss.teacher_sees:
        own_function("teacher_sees", recipe.loss.teacher_sees)


def own_advantages(spec: str, samples: Sequence[Sample], reward: Floats, group: Codes) -> Floats:
    """[n] what the function says of each group: of its samples and their rewards. Raises GroupError."""
    function = own_function("advantage", spec)
    total = np.zeros(len(samples))
    for number in range(int(group.max()) + 1):
        (members,) = np.nonzero(group == number)
        try:
            found = np.asarray(function([samples[i] for i in members], reward[members].copy()), np.float64)
        except Exception as error:
            raise GroupError(f"{spec} raised {error_text(error)}{origin(error)}.", "Correct the function.") from error
        if found.shape != members.shape or not np.isfinite(found).all():
            said = f"{spec} returned {found.tolist()} for the rewards {reward[members].tolist()}."
            raise GroupError(said, "Return one finite number for each sample, in their order.")
        total[members] = found
    return total
