"""Proof that an optimizer trains what it should: each tensor is in exactly one, gets a gradient, and moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch
from torch import nn

from cotune.errors import LearnerError
from cotune.trainer.ranks import Alone, Ranks, shard_of


def check_optimizers(
    trainable: Mapping[str, Mapping[str, nn.Parameter]], optimizers: Mapping[str, torch.optim.Optimizer]
) -> None:
    """Raises LearnerError unless each policy's tensors are in its optimizer, and in no other one.

    `trainable` gives the tensors of each policy by name.
    """
    held = {
        policy: Counter(id(p) for group in optimizer.param_groups for p in group["params"])
        for policy, optimizer in optimizers.items()
    }
    for policy, parameters in trainable.items():
        for name, parameter in parameters.items():
            holders = [owner for owner, ids in held.items() for _ in range(ids[id(parameter)])]
            if holders != [policy]:
                raise LearnerError(
                    f"Tensor {name} of policy {policy!r} is in the optimizers of {holders or 'no policy'}.",
                    "Build one optimizer per policy, after its adapter has been added, over its own tensors only.",
                )


class Movement:
    """Watches a policy's tensors until each has moved once; costs nothing afterwards.

    The entry with the largest gradient, on whichever rank holds it, stands for its tensor. B of a LoRA starts at zero,
    so A has no gradient before the second step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], ranks: Ranks | None = None) -> None:
        self.pending = dict(parameters)
        self.steps = 0
        self._ranks = ranks or Alone()
        self._marks: dict[str, tuple[int, float] | None] = {}

    def before_step(self) -> None:
        """Note where each tensor that has a gradient stands."""
        names = list(self.pending)
        found = [_largest(self.pending[name].grad) for name in names]
        largest = self._ranks.max(torch.tensor([size for _, size in found])).tolist()
        self._marks = {}
        for name, (index, size), peak in zip(names, found, largest, strict=True):
            if peak > 0:
                held = size == peak
                self._marks[name] = (index, _entry(self.pending[name], index)) if held else None

    def after_step(self) -> None:
        """Raises LearnerError when a tensor with a gradient stands where it stood."""
        self.steps += 1
        stood = [mark is not None and _entry(self.pending[n], mark[0]) == mark[1] for n, mark in self._marks.items()]
        for name, still in zip(self._marks, self._ranks.max(torch.tensor(stood, dtype=torch.float32)), strict=True):
            if still:
                raise LearnerError(
                    f"Tensor {name} has a gradient but did not move in its first optimizer step.",
                    "Raise learner.lr: the step is lost to rounding.",
                )
            del self.pending[name]

    def after_update(self, policy: str) -> None:
        """Raises LearnerError when a tensor has had no gradient though it should."""
        late = [name for name in self.pending if self.steps > 1 or ".lora_A." not in name]
        if late and self.steps:
            raise LearnerError(
                f"{len(late)} tensors of policy {policy!r} got no gradient from its first update: {late[:3]}",
                "Check lora.targets: the loss must depend on every target module.",
            )


def _largest(gradient: torch.Tensor | None) -> tuple[int, float]:
    """Where in this rank's part of a gradient its largest entry is, and its size; 0 where there is none."""
    if gradient is None or not (part := shard_of(gradient)).numel():
        return 0, 0.0
    sizes = part.abs().view(-1)
    index = int(sizes.argmax())
    return index, sizes[index].item()


def _entry(parameter: nn.Parameter, index: int) -> float:
    return shard_of(parameter.detach()).view(-1)[index].item()
