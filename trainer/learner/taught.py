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

    @property
    def counters(self) -> Mapping[str, float]:
        """What it has counted so far, such as `retried` requests."""
        ...

    def logprobs(self, rows: Sequence[TrainRow]) -> Sequence[npt.NDArray[np.float32] | None]:
        """log pi_teacher of each row's response tokens, under the distribution that the row was drawn from: its
        temperature, grammar and biases. In nats. None for a row that it could not score."""
        ...


class TaughtLearner(LearnerAround):
    """A learner whose rows carry what a teacher says of their tokens, for losses with `kl_to = "teacher"`."""

    def __init__(self, inner: Learner, teacher: Teacher) -> None:
        super().__init__(inner)
        self._teacher = teacher

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As `Learner.update`, once the teacher has scored the rows; `unscored` is how many it could not score, which
        are left out."""
        scores = self._teacher.logprobs(rows)
        scored = [
            msgspec.structs.replace(row, reference=tuple(found.tolist()))
            for row, found in zip(rows, scores, strict=True)
            if found is not None
        ]
        figures = self.inner.update(policy, scored, lr_scale=lr_scale)
        return {**figures, "unscored": float(len(rows) - len(scored))}
