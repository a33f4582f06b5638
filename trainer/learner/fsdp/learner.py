"""The learner on a cluster: Ray actors that divide weights and rows among them with FSDP2."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.cluster import CPUS, ClusterConfig
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError, LearnerError, LearnerLost
from cotune.integrations.cluster.weight_transfer import LearnerWeights
from cotune.integrations.cluster.worker_group import WorkerGroup, WorkersClosed, WorkersLost
from cotune.records.policies import Policies, PolicySpec
from cotune.sampling.protocol import Weights
from cotune.storage.token_figures import CandidateTokens
from cotune.trainer.config.learner import PolicyTraining, check_losses
from cotune.trainer.learner import files
from cotune.trainer.learner.batching import check_rows
from cotune.trainer.learner.fsdp.worker import pack_rows

RANK = "cotune.trainer.learner.fsdp.worker:FsdpWorker"

HANG_SECONDS = 1800.0
"""The time limit of a start, and of one exchange between ranks. A rank that takes longer counts as hanging. The first
exchange waits for the slowest rank to load its weights."""
CALL_SECONDS = 4 * 3600.0
"""The time limit of one call. If one of several ranks hangs, the others notice it after `HANG_SECONDS`. A single rank
may need longer than that for the update of a whole step."""


class Ranks:
    """The actors that train together, one for each rank."""

    def __init__(self, workers: WorkerGroup, timeout: float = CALL_SECONDS) -> None:
        """`timeout` is the time limit of a call, in seconds."""
        self.workers = workers
        self._timeout = timeout

    @classmethod
    def start(cls, cluster: ClusterConfig, device: str) -> Ranks:
        """Start the actors and let them find each other. Raises ConfigError, LearnerError."""
        with _as_learner_errors():
            workers = WorkerGroup.start(
                RANK,
                cluster.learners,
                name="the learners",
                setting="cluster.learners",
                cpus=CPUS,
                gpus=cluster.gpus_per_learner,
                timeout=HANG_SECONDS,
            )
        ranks = cls(workers)
        # Rank 0 serves a store on its machine, in which the ranks find each other.
        try:
            port = ranks.call("listen", workers.host, HANG_SECONDS)
            ranks.call("join", workers.host, port, device, HANG_SECONDS, cluster.shares_gpu)
        except BaseException:
            workers.close()
            raise
        return ranks

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method on all ranks, and return the answer of rank 0. Raises the errors of the ranks, LearnerLost,
        LearnerError."""
        with _as_learner_errors():
            return self.workers.call(method, *arguments, timeout=self._timeout)

    def offer(self, policy: str) -> LearnerWeights:
        """Gather the full weights of a policy in Ray's object store. Raises the same errors as `call`."""
        with _as_learner_errors():
            stored, offer = self.workers.call_and_store("offer", policy, timeout=self._timeout)
            return LearnerWeights(offer, stored, self.workers.aside("send"))


@contextmanager
def _as_learner_errors() -> Iterator[None]:
    try:
        yield
    except WorkersLost as error:
        raise LearnerLost(error.cause, "Open a new learner and load the last checkpoint.") from error
    except WorkersClosed as error:
        raise LearnerError(error.cause, "Open a new learner.") from error


class FsdpLearner:
    """The `Learner` protocol over Ray actors. Methods may be called from any thread; one runs after the other.

    When a rank dies or hangs, the call raises LearnerLost within the time-out and names it, and so do all later ones.
    The folder of a checkpoint must be visible under one path on all machines.
    """

    def __init__(self, specs: Sequence[PolicySpec], ranks: Ranks) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._ranks = ranks

    @classmethod
    def open(
        cls,
        model: str,
        policies: Policies,
        settings: LearnerSettings,
        loss: LossSpec,
        cluster: ClusterConfig,
        own: Mapping[str, PolicyTraining] = {},
        seed: int = 0,
    ) -> FsdpLearner:
        """Start the actors in this process's Ray and load `model` for every trained policy; those in `own` are trained
        by methods of their own. `seed` decides the adapters' initial weights and the order of rows.

        Raises ConfigError if the cluster is too small or a policy cannot be trained, LearnerError if a worker fails.
        """
        check_losses(loss, *(method.loss for method in own.values()))
        specs = [spec for spec in policies.specs.values() if spec.trained]
        learner = cls(specs, Ranks.start(cluster, settings.device))
        try:
            learner._ranks.call("open", model, policies, settings, loss, dict(own), seed)
        except BaseException:
            learner._ranks.workers.close()
            raise
        return learner

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """All mini-batches of one step, as `LocalLearner.update`, with the same metrics."""
        check_rows(rows)
        self._check(policy)
        metrics: dict[str, float] = self._ranks.call("update", policy, pack_rows(rows), lr_scale)
        return metrics

    def check(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Raises GroupError and LearnerError, as `LocalLearner.check`."""
        check_rows(rows)
        self._ask(policy, "check", pack_rows(rows))

    def has_room(self, tokens: int) -> bool:
        """Whether passes of this number of tokens fit into the memory that is free now, on every rank."""
        fits: bool = self._ranks.call("learner", "has_room", tokens)
        return fits

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        check_rows(rows)
        return [np.array(part) for part in self._ask(policy, "logprobs", pack_rows(rows))]

    def seen(self, policy: str) -> Mapping[str, CandidateTokens]:
        """Return the figures of each token: see `Learner.seen`."""
        figures: Mapping[str, CandidateTokens] = self._ask(policy, "seen")
        return figures

    def weights(self, policy: str) -> Weights:
        """Return the trainable weights as fp32 arrays, gathered from all ranks, by the same names as
        `LocalLearner.weights`.

        The weights of a `full` policy stay on the machine of rank 0 until they are read or sent to a sampler
        (`LearnerWeights`). An adapter's are small and are returned at once.
        """
        self._check(policy)
        if self._specs[policy].kind == "full":
            return self._ranks.offer(policy)
        # Arrays from Ray are read-only views of its store, so they are copied.
        return {name: np.array(array) for name, array in self._ask(policy, "weights").items()}

    def adopt(self, policy: str, weights: Weights) -> None:
        """Continue from these weights: see `LocalLearner.adopt`."""
        self._ask(policy, "adopt", weights)

    def save(self, folder: Path) -> None:
        """Write weights whole, optimizer states divided (see `learner.files`)."""
        files.write_identity(folder, list(self._specs.values()))
        self._ranks.call("save", str(folder.absolute()))

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore a checkpoint of `save` or of a `LocalLearner`, with any number of workers, except for policies that
        are `new`. Raises RunError."""
        files.check_identity(folder, [spec for spec in self._specs.values() if spec.name not in new])
        self._ranks.call("load", str(folder.absolute()), list(new))

    def begin_profile(self) -> None:
        """Start torch's profiler on rank 0."""
        self._ranks.call("begin_profile")

    def end_profile(self, file: Path | None) -> None:
        """Stop the profiler. Rank 0 writes the trace, so `file` must be in a folder that its machine sees."""
        self._ranks.call("end_profile", file and str(file.absolute()))

    async def aclose(self) -> None:
        """End all actors. Calls that are still running fail."""
        await asyncio.to_thread(self._ranks.workers.close)

    def _ask(self, policy: str, method: str, *arguments: Any) -> Any:
        """Call a method of the `LocalLearner` of all ranks, and return the answer of rank 0."""
        self._check(policy)
        return self._ranks.call("learner", method, policy, *arguments)

    def _check(self, policy: str) -> None:
        if policy not in self._specs:
            raise ConfigError("policy", policy, f"is not a trained policy: {sorted(self._specs)}")
