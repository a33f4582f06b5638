"""Try the user's methods and functions on made-up samples, before a model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from cotune.algorithms.method import Method
from cotune.algorithms.own import own_function
from cotune.algorithms.prepare import prepare
from cotune.algorithms.samples import Sample
from cotune.errors import ConfigError, CotuneError
from cotune.records.structs import PolicyRef


def check_own(method: Method) -> None:
    """Load the user's functions that a method names, and try the method if its class is the user's. Raises
    ConfigError."""
    if method.loss.token_loss:
        own_function("token_loss", method.loss.token_loss)
    if ":" in method.loss.teacher_sees:
        own_function("teacher_sees", method.loss.teacher_sees)
    if not method.is_own:
        return
    try:
        prepare(list(_invented_step(method)), method)
    except CotuneError as error:
        fault = f"fails on made-up samples: {error.cause.rstrip('.')}"
        raise ConfigError("recipe", method.name, fault, error.remedy) from error


def _invented_step(method: Method) -> Iterator[Sample]:
    """Samples of two tasks with three episodes each, in which two roles act twice, with groups that fit the plan."""
    components = [name.rpartition("/")[2] for name in method.attribution.weights] or ["local"]
    is_tree = method.plan == "tree"
    candidates = 3 if is_tree else 1
    reward = 0.0
    for task, episode, role, turn in product(range(2), range(3), ("first", "second"), range(2)):
        rollout = f"e{task}{episode}"
        call = f"{rollout}{role}{turn}"
        shared = f"{task}{role}{turn}"  # the same for calls of other episodes, so that they are compared
        for index in range(candidates):
            reward = (reward + 0.375) % 1.0  # differs from the rewards before it
            yield Sample(
                id=f"{call}.{index}",
                task=f"t{task}",
                rollout=rollout,
                role=role,
                turn=turn,
                step=turn,
                branch=rollout if is_tree else shared,
                prompt=call if is_tree else shared,
                policy=PolicyRef(role),
                tokens=1 + index,
                observation=shared,
                rewards=dict.fromkeys(components, reward),
                outcome={"team": reward, **dict.fromkeys(components, reward)},
                chosen=index == 0,
                training_step=1,
            )
