"""Learners whose samples a teacher scores, token by token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.protocol import Learner, LearnerAround


class Teacher(Protocol):
    """Scores sampled tokens. Its tokenizer is that of the policies."""

    def logprobs(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_teacher of each row's response tokens, under the distribution that the row was drawn from: its
        temperature, grammar and biases. In nats."""
        ...


class TaughtLearner(LearnerAround):
    """A learner whose rows carry what a teacher says of their tokens, for losses with `kl_to = "teacher"`."""

    def __init__(self, inner: Learner, teacher: Teacher) -> None:
        super().__init__(inner)
        self._teacher = teacher

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As `Learner.update`, once the teacher has scored the rows."""
        scores = self._teacher.logprobs(rows)
        scored = [
            msgspec.structs.replace(row, reference=tuple(found.tolist()))
            for row, found in zip(rows, scores, strict=True)
        ]
        return self.inner.update(policy, scored, lr_scale=lr_scale)
