"""The objectives of learning from records: learners that train on rows of recorded answers, and measure their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.from_records import Preference, preference_losses
from cotune.algorithms.samples import TrainRow
from cotune.errors import RunError
from cotune.trainer.learner.protocol import Learner, LearnerAround
from cotune.trainer.run.run_folder import write_atomically

_OF_SAMPLING = ("clip_share", "tis_clipped_share", "masked_share", "ratio_", "sampler_")
"""Figures of an update that have no meaning if no sampler has drawn the rows."""


Rows = Callable[[], Mapping[str, Sequence[TrainRow]]]
"""A function that returns rows by policy."""
BETA = 0.1
"""The weight in dpo that keeps the policy close to its initial weights: the usual value in the paper's experiments."""


class Objective(Learner, Protocol):
    """A learner that can also measure its loss on rows without learning from them."""

    def start(self, rows: Rows, file: Path) -> None:
        """Compute the figures of all rows that the objective needs from the initial weights, and write them to
        `file`."""
        ...

    def resume(self, file: Path) -> None:
        """Read the file that `start` has written. Raises RunError."""
        ...

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Return the mean `loss` of the rows under the present weights, and further figures."""
        ...


class Likelihood(LearnerAround):
    """Recipe sft: the mean of -log pi over answer tokens, in nats."""

    def start(self, rows: Rows, file: Path) -> None:
        """Do nothing: this objective needs no initial weights."""

    def resume(self, file: Path) -> None:
        """Do nothing: there is no file."""

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Update as `Learner.update` does. Figures that compare with a sampler are left out."""
        return _without_sampler_figures(self.inner.update(policy, rows, lr_scale=lr_scale))

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Return the mean `loss` over the answer tokens of the rows."""
        answers: list[npt.NDArray[np.float32]] = []
        for row, logprobs in zip(rows, self.inner.logprobs(policy, rows), strict=True):
            answers.append(_counted_values(row, logprobs))
        return {"loss": -float(np.concatenate(answers).mean(dtype=np.float64))}


class PreferenceLearner(LearnerAround):
    """Recipes dpo and sweet_rl: rows come in pairs, the better answer before the worse one (`algorithms.from_records`).

    Each optimizer step first computes the log-probabilities of its rows under the present weights. From them follow the
    advantages of the rows in a plain update.
    """

    def __init__(self, inner: Learner, pairs: int) -> None:
        """`pairs` is the number of pairs of one optimizer step."""
        super().__init__(inner)
        self._pairs = pairs
        self._start: dict[str, float] = {}  # log pi_0 of each answer, by the id of its row

    def start(self, rows: Rows, file: Path) -> None:
        """Compute log pi_0 of all answers, under the initial weights, and write them to `file`."""
        for policy, policy_rows in rows().items():
            logprobs = self._answer_logprobs(policy, policy_rows)
            for row, logprob in zip(policy_rows, logprobs, strict=True):
                self._start[row.id] = logprob
        write_atomically(file, msgspec.json.encode(self._start))

    def resume(self, file: Path) -> None:
        """Read log pi_0 of all answers from `file`. Raises RunError."""
        try:
            self._start = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"{file} cannot be read: {error}.", "Start a new run.") from None

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Update as `Learner.update` does. The figures also have `loss`, `margin` (mean, in nats) and `accuracy`, the
        share of pairs whose better answer has gained more, all from before each optimizer step."""
        figures_of_steps: list[Mapping[str, float]] = []
        rows_per_step = 2 * self._pairs
        for first in range(0, len(rows), rows_per_step):
            step_rows = rows[first : first + rows_per_step]
            preferences = self._preferences(policy, step_rows)
            weighted: list[TrainRow] = []
            for better, worse, preference in zip(step_rows[::2], step_rows[1::2], preferences, strict=True):
                weighted.append(msgspec.structs.replace(better, advantage=preference.advantage))
                weighted.append(msgspec.structs.replace(worse, advantage=-preference.advantage))
            figures = _without_sampler_figures(self.inner.update(policy, weighted, lr_scale=lr_scale))
            figures_of_steps.append({**figures, **_pair_figures(preferences)})
        return _combine_steps(figures_of_steps)

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        """Return `loss`, `margin` and `accuracy` of the pairs under the present weights."""
        return _pair_figures(self._preferences(policy, rows))

    def _preferences(self, policy: str, rows: Sequence[TrainRow]) -> list[Preference]:
        """Compare the gains in log-probability of both answers of each pair."""
        gains: list[float] = []
        for row, logprob in zip(rows, self._answer_logprobs(policy, rows), strict=True):
            gains.append(logprob - self._start[row.id])
        better_gains, worse_gains = gains[::2], gains[1::2]
        return preference_losses(better_gains, worse_gains, BETA)

    def _answer_logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[float]:
        """Return log pi of each whole answer, summed in float64."""
        return [float(logprobs.astype(np.float64).sum()) for logprobs in self.inner.logprobs(policy, rows)]


def _counted_values(row: TrainRow, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the values of the tokens that the row's loss mask keeps. `values` is [tokens of the row]."""
    if not row.loss_mask:
        return values
    return values[np.array(row.loss_mask, np.bool_)]


def _without_sampler_figures(figures: Mapping[str, float]) -> dict[str, float]:
    """Return the figures of an update that have a meaning without a sampler."""
    return {name: value for name, value in figures.items() if not name.rpartition("/")[2].startswith(_OF_SAMPLING)}


def _pair_figures(pairs: Sequence[Preference]) -> dict[str, float]:
    """Return the mean loss and margin of pairs, and the share of pairs whose better answer has gained more."""
    return {
        "loss": float(np.mean([pair.loss for pair in pairs])),
        "margin": float(np.mean([pair.margin for pair in pairs])),
        "accuracy": float(np.mean([pair.margin > 0 for pair in pairs])),
    }


_SUMS = ("steps", "skipped_steps", "idle_steps", "rows", "tokens", "seconds")


def _combine_steps(figures_of_steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the figures of several optimizer steps into the figures of one update: the sums of `_SUMS`, else
    means."""
    values_by_name: dict[str, list[float]] = {}
    for figures in figures_of_steps:
        for name, value in figures.items():
            values_by_name.setdefault(name, []).append(value)
    combined: dict[str, float] = {}
    for name, values in values_by_name.items():
        is_sum = name.rpartition("/")[2] in _SUMS  # the name of a role may come before it
        combined[name] = float(sum(values) if is_sum else np.mean(values))
    return combined
