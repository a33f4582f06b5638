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
"""Returns rows by policy."""
BETA = 0.1
"""The weight in dpo that keeps the policy close to its initial weights: the usual value in the paper's experiments."""


class Objective(Learner, Protocol):
    """A learner that can also measure its loss on rows without learning from them."""

    def start(self, rows: Rows, file: Path) -> None:
        """Write to `file` the figures of all rows under the initial weights, as far as the objective needs them."""
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
        answers: list[npt.NDArray[np.float32]] = []
        for row, logprobs in zip(rows, self.inner.logprobs(policy, rows), strict=True):
            answers.append(_counted_values(row, logprobs))
        return {"loss": -float(np.concatenate(answers).mean(dtype=np.float64))}


class PreferenceLearner(LearnerAround):
    """Recipes dpo and sweet_rl: rows come in pairs, the better answer before the worse one (`algorithms.from_records`).

    `pairs` is the number of pairs of one optimizer step. Each step first computes the log-probabilities of its rows
    under the present weights. They decide the weights of the rows in a plain update.
    """

    def __init__(self, inner: Learner, pairs: int) -> None:
        super().__init__(inner)
        self._pairs = pairs
        self._start: dict[str, float] = {}

    def start(self, rows: Rows, file: Path) -> None:
        """Write log pi_0 of all answers."""
        for policy, policy_rows in rows().items():
            logprobs = self._answer_logprobs(policy, policy_rows)
            self._start.update(zip((row.id for row in policy_rows), logprobs, strict=True))
        write_atomically(file, msgspec.json.encode(self._start))

    def resume(self, file: Path) -> None:
        """Read log pi_0 of all answers. Raises RunError."""
        try:
            self._start = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"{file} cannot be read: {error}.", "Start a new run.") from None

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Update as `Learner.update` does, with `loss`, `margin` (mean, in nats) and `accuracy` (share of pairs whose
        better answer has gained more) from before each optimizer step."""
        all_figures: list[Mapping[str, float]] = []
        for first in range(0, len(rows), 2 * self._pairs):
            step_rows = rows[first : first + 2 * self._pairs]
            pairs = self._preferences(policy, step_rows)
            weighed: list[TrainRow] = []
            for number, row in enumerate(step_rows):
                # Rows alternate: the better answer of a pair, then the worse one.
                advantage = pairs[number // 2].advantage
                weighed.append(msgspec.structs.replace(row, advantage=-advantage if number % 2 else advantage))
            figures = _without_sampler_figures(self.inner.update(policy, weighed, lr_scale=lr_scale))
            all_figures.append({**figures, **_pair_figures(pairs)})
        return _one_update(all_figures)

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        return _pair_figures(self._preferences(policy, rows))

    def _preferences(self, policy: str, rows: Sequence[TrainRow]) -> list[Preference]:
        gains: list[float] = []
        for row, logprob in zip(rows, self._answer_logprobs(policy, rows), strict=True):
            gains.append(logprob - self._start[row.id])
        return preference_losses(gains[::2], gains[1::2], BETA)

    def _answer_logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[float]:
        """Return log pi of each whole answer, summed in float64."""
        return [float(logprobs.astype(np.float64).sum()) for logprobs in self.inner.logprobs(policy, rows)]


def _counted_values(row: TrainRow, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the values of the tokens that the loss mask counts."""
    return values[np.array(row.loss_mask, np.bool_)] if row.loss_mask else values


def _without_sampler_figures(figures: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in figures.items() if not name.rpartition("/")[2].startswith(_OF_SAMPLING)}


def _pair_figures(pairs: Sequence[Preference]) -> dict[str, float]:
    return {
        "loss": float(np.mean([pair.loss for pair in pairs])),
        "margin": float(np.mean([pair.margin for pair in pairs])),
        "accuracy": float(np.mean([pair.margin > 0 for pair in pairs])),
    }


_SUMS = ("steps", "skipped_steps", "idle_steps", "rows", "tokens", "seconds")


def _one_update(all_figures: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the figures of several optimizer steps into the figures of one update: sums, or means."""
    values: dict[str, list[float]] = {}
    for figures in all_figures:
        for name, value in figures.items():
            values.setdefault(name, []).append(value)
    combined: dict[str, float] = {}
    for name, of_steps in values.items():
        is_sum = name.rpartition("/")[2] in _SUMS
        combined[name] = float(sum(of_steps) if is_sum else np.mean(of_steps))
    return combined
