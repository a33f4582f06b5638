"""A learner around another one: it changes what is asked of that one, and hands the rest on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.sampling.protocol import Weights
from cotune.trainer.learner.protocol import Learner


class LearnerAround:
    """The `Learner` protocol by way of `inner`."""

    def __init__(self, inner: Learner) -> None:
        self.inner = inner

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        return self.inner.update(policy, rows, lr_scale=lr_scale)

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        return self.inner.logprobs(policy, rows)

    def weights(self, policy: str) -> Weights:
        return self.inner.weights(policy)

    def adopt(self, policy: str, weights: Weights) -> None:
        self.inner.adopt(policy, weights)

    def save(self, folder: Path) -> None:
        self.inner.save(folder)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        self.inner.load(folder, new)
