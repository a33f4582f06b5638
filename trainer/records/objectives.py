"""What learning from records minimises: learners that take rows of recorded answers, and measure their loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.from_records import Preference, preferences
from cotune.algorithms.samples import TrainRow
from cotune.errors import RunError
from cotune.trainer.learner.protocol import Learner, LearnerAround
from cotune.trainer.run.run_folder import write_atomically

_OF_SAMPLING = ("clip_share", "tis_clipped_share", "masked_share", "ratio_", "sampler_")
"""Figures of an update that say nothing where no sampler has drawn the rows."""


Rows = Callable[[], Mapping[str, Sequence[TrainRow]]]
"""Gives rows by policy."""
BETA = 0.1
"""How strongly dpo holds the policy to the one that it starts from: the usual value of the paper's experiments."""


class Objective(Learner, Protocol):
    """A learner that knows its loss on rows without learning from them."""

    def start(self, rows: Rows, file: Path) -> None:
        """Take note in `file` of what the weights that the run starts from say of all its rows."""
        ...

    def go_on(self, file: Path) -> None:
        """Remember what `start` has noted. Raises RunError."""
        ...

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        """The mean `loss` of the rows under the present weights, and what else is known of them."""
        ...


class Likelihood(LearnerAround):
    """Recipe sft: the mean of -log pi over answer tokens, in nats."""

    def start(self, rows: Rows, file: Path) -> None:
        """Nothing is compared with the first weights."""

    def go_on(self, file: Path) -> None:
        """Nothing was noted."""

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As `Learner.update`, without what compares with a sampler."""
        return _likely(self.inner.update(policy, rows, lr_scale=lr_scale))

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        pairs = zip(rows, self.inner.logprobs(policy, rows), strict=True)
        counted = np.concatenate([_counted(row, values) for row, values in pairs])
        return {"loss": -float(counted.mean(dtype=np.float64))}


class PreferenceLearner(LearnerAround):
    """Recipe dpo: rows come in pairs, the better answer before the worse one (`algorithms.from_records`).

    `pairs` is how many make one optimizer step. Each step takes the log-probabilities of its rows under the present
    weights first, which weigh the rows of a plain update.
    """

    def __init__(self, inner: Learner, pairs: int) -> None:
        super().__init__(inner)
        self._pairs = pairs
        self._start: dict[str, float] = {}

    def start(self, rows: Rows, file: Path) -> None:
        """Note log pi_0 of all answers."""
        for policy, its_rows in rows().items():
            found = self._answers(policy, its_rows)
            self._start |= {row.id: value for row, value in zip(its_rows, found, strict=True)}
        write_atomically(file, msgspec.json.encode(self._start))

    def go_on(self, file: Path) -> None:
        """Remember log pi_0 of all answers. Raises RunError."""
        try:
            self._start = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"{file} cannot be read: {error}.", "Start a new run.") from None

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """As `Learner.update`, with `loss`, `margin` (mean, in nats) and `accuracy` (share of pairs whose better answer
        has gained more) from before each optimizer step."""
        done: list[Mapping[str, float]] = []
        for first in range(0, len(rows), 2 * self._pairs):
            part = rows[first : first + 2 * self._pairs]
            found = self._preferences(policy, part)
            signed = [value for pair in found for value in (pair.advantage, -pair.advantage)]
            weighed = [msgspec.structs.replace(row, advantage=a) for row, a in zip(part, signed, strict=True)]
            figures = _likely(self.inner.update(policy, weighed, lr_scale=lr_scale))
            done.append({**figures, **_told(found)})
        return _joined(done)

    def loss(self, policy: str, rows: Sequence[TrainRow]) -> dict[str, float]:
        return _told(self._preferences(policy, rows))

    def _preferences(self, policy: str, rows: Sequence[TrainRow]) -> list[Preference]:
        gained = [now - self._start[row.id] for row, now in zip(rows, self._answers(policy, rows), strict=True)]
        return preferences(gained[::2], gained[1::2], BETA)

    def _answers(self, policy: str, rows: Sequence[TrainRow]) -> list[float]:
        """log pi of each whole answer."""
        found = [values.astype(np.float64) for values in self.inner.logprobs(policy, rows)]
        return [float(values.sum()) for values in found]


def _counted(row: TrainRow, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return values[np.array(row.loss_mask, np.bool_)] if row.loss_mask else values


def _likely(figures: Mapping[str, float]) -> dict[str, float]:
    return {k: v for k, v in figures.items() if not k.rpartition("/")[2].startswith(_OF_SAMPLING)}


def _told(found: Sequence[Preference]) -> dict[str, float]:
    return {
        "loss": float(np.mean([pair.loss for pair in found])),
        "margin": float(np.mean([pair.margin for pair in found])),
        "accuracy": float(np.mean([pair.margin > 0 for pair in found])),
    }


_SUMS = ("steps", "skipped_steps", "idle_steps", "rows", "tokens", "seconds")


def _joined(done: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of several optimizer steps as those of one update."""
    names = {name: None for figures in done for name in figures}
    values = {name: [figures[name] for figures in done if name in figures] for name in names}
    return {
        name: float(sum(found) if name.rpartition("/")[2] in _SUMS else np.mean(found))
        for name, found in values.items()
    }
