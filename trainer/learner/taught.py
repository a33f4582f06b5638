"""A learner whose policies learn from teachers: other models, or themselves with more in their context."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.trainer.learner.protocol import Learner, LearnerAround, Teacher

SELF: Literal["self"] = "self"
"""Stands for the policy itself as the teacher."""


class TaughtLearner(LearnerAround):
    """A learner whose rows carry what a teacher says of their tokens, for losses with `kl_to` "teacher" or "self".

    `teacher_of` tells the teacher of a policy, None for one that learns from rewards. A teacher reads `TrainRow.hinted`
    in place of the prompt, where there is one. A policy that is its own teacher scores its rows with that prompt and
    the weights from before the update.
    """

    def __init__(self, inner: Learner, teacher_of: Callable[[str], Teacher | Literal["self"] | None]) -> None:
        super().__init__(inner)
        self._teacher_of = teacher_of

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As `Learner.update`, once the teacher has scored the rows; `unscored` is how many it could not score, which
        are left out."""
        teacher = self._teacher_of(policy)
        if teacher is None:
            return self.inner.update(policy, rows, lr_scale=lr_scale)
        read = [msgspec.structs.replace(row, prompt_ids=row.hinted or row.prompt_ids) for row in rows]
        scores = self.inner.logprobs(policy, read) if teacher == SELF else teacher.logprobs(read)
        scored = [
            msgspec.structs.replace(row, reference=tuple(found.tolist()), hinted=())
            for row, found in zip(rows, scores, strict=True)
            if found is not None
        ]
        figures = self.inner.update(policy, scored, lr_scale=lr_scale)
        return {**figures, "unscored": float(len(rows) - len(scored))}
