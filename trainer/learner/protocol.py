"""The protocol of learners, which update weights. The local learner and the FSDP learner pass the same tests."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.sampling.protocol import Weights
from cotune.storage.token_figures import CandidateTokens


class Learner(Protocol):
    """Holds the trainable weights of every policy and one optimizer per policy."""

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """Train one policy on its rows (all mini-batches of one step); return metrics by name."""
        ...

    def check(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Raises GroupError for unusable rows, LearnerError for one that does not fit into memory."""
        ...

    def has_room(self, tokens: int) -> bool:
        """Whether passes of this number of tokens fit into the memory that is free now."""
        ...

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        ...

    def seen(self, policy: str) -> Mapping[str, CandidateTokens]:
        """Return the figures of each token from the first pass of the last update, by the id of the row. Rows that no
        pass has computed are left out."""
        ...

    def weights(self, policy: str) -> Weights:
        """Trainable weights as fp32 arrays on the CPU, under the names that `Sampler.publish` expects."""
        ...

    def adopt(self, policy: str, weights: Weights) -> None:
        """Replace the policy's weights by these, whose names are the ones that `Learner.weights` returns. The optimizer
        does not change. Raises RunError if a name is missing or a shape differs."""
        ...

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and RNG state of all policies into an existing folder.

        `weights` of the i-th trained policy (from 0, in the order of `Policies.specs`) go to `i.safetensors`.
        """
        ...

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore a checkpoint of `save`. Policies in `new` are not in the checkpoint, and do not change. Raises
        RunError if the checkpoint does not fit this learner."""
        ...

    def begin_profile(self) -> None:
        """Start torch's profiler in the learner's process, or in the process of rank 0. Raises RuntimeError."""
        ...

    def end_profile(self, file: Path | None) -> None:
        """Stop the profiler and write its trace to `file` (.json.gz); without a file, discard the trace. Raises
        RuntimeError and OSError."""
        ...


class LearnerAround:
    """A base for learners that change some calls of another learner, `inner`. It passes all calls on unchanged."""

    def __init__(self, inner: Learner) -> None:
        self.inner = inner

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        return self.inner.update(policy, rows, lr_scale=lr_scale)

    def check(self, policy: str, rows: Sequence[TrainRow]) -> None:
        self.inner.check(policy, rows)

    def has_room(self, tokens: int) -> bool:
        return self.inner.has_room(tokens)

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        return self.inner.logprobs(policy, rows)

    def seen(self, policy: str) -> Mapping[str, CandidateTokens]:
        return self.inner.seen(policy)

    def weights(self, policy: str) -> Weights:
        return self.inner.weights(policy)

    def adopt(self, policy: str, weights: Weights) -> None:
        self.inner.adopt(policy, weights)

    def save(self, folder: Path) -> None:
        self.inner.save(folder)

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        self.inner.load(folder, new)

    def begin_profile(self) -> None:
        self.inner.begin_profile()

    def end_profile(self, file: Path | None) -> None:
        self.inner.end_profile(file)


class Teacher(Protocol):
    """Scores sampled tokens. It has the same tokenizer as the policies."""

    @property
    def counters(self) -> Mapping[str, float]:
        """The teacher's counts so far, for example of `retried` requests."""
        ...

    def logprobs(self, rows: Sequence[TrainRow]) -> Sequence[npt.NDArray[np.float32] | None]:
        """log pi_teacher of each row's response tokens, under the distribution that the row was drawn from: its
        temperature, grammar and biases. In nats. None for a row that it could not score."""
        ...


SELF: Literal["self"] = "self"
"""Stands for the policy itself as the teacher."""
