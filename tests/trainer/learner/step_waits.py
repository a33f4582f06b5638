"""In which operators of an update the host waits for the GPU: for learners on a pretended or a fake one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.local import LocalLearner

PASS_TOKENS = 12


def check_waits(learner: LocalLearner, policy: str, rows: Sequence[TrainRow], waits: list[str]) -> None:
    """Update a policy in several passes per step: the host waits once in each optimizer step, for the norm of the
    gradients, and in no pass. Outside of steps it waits a few times in an update. `waits` gets the names of operators
    in which it waits."""
    learner._gradient_checks[policy].pending.clear()  # they look at entries until each tensor has changed once
    steps: list[list[str]] = []

    def counted(method: Any) -> Any:
        def call(*args: Any, **more: Any) -> Any:
            before = len(waits)
            result = method(*args, **more)
            steps.append(waits[before:])
            return result

        return call

    learner._backward, learner._step = counted(learner._backward), counted(learner._step)  # type: ignore[method-assign]
    learner._passes[policy]._sizes = dict.fromkeys((False, True), PASS_TOKENS)
    micro_batches = learner._micro_batches
    passes: list[int] = []

    def divided(*args: Any) -> Any:
        found = micro_batches(*args)
        passes.append(len(found))
        return found

    learner._micro_batches = divided  # type: ignore[method-assign]
    learner._passes.choose = lambda: None  # type: ignore[method-assign]
    before_update = len(waits)
    learner.update(policy, rows)
    assert max(passes) > 1, passes
    backward, step = steps[::2], steps[1::2]
    assert backward and not any(backward), backward
    assert all(len(each) == 1 for each in step), step
    # The mean loss, the metrics, the figures of tokens and the norm of the weights.
    most_outside = 4
    loss = learner._methods[policy].loss
    if loss.mask != "none":
        most_outside += 1  # log pi before the update, which the mask compares
    if loss.critic:
        most_outside += 1  # the states that the critic reads
    outside = len(waits) - before_update - len(step)
    assert outside <= most_outside, waits[before_update:]
