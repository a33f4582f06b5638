"""The learner on a cluster: pools of Ray actors that divide weights and rows among them with FSDP2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, LearnerError, LearnerLost
from cotune.integrations.cluster.worker_group import WorkerGroup, WorkersClosed, WorkersLost
from cotune.records.policies import Policies, PolicySpec
from cotune.sampling.protocol import Weights
from cotune.storage.token_figures import Seen
from cotune.trainer.config.cluster import CPUS, ClusterConfig
from cotune.trainer.config.learner import LearnerSettings, Method, check_losses
from cotune.trainer.learner import files
from cotune.trainer.learner.batching import check_rows
from cotune.trainer.learner.fsdp.worker import pack_rows

T = TypeVar("T")

RANK = "cotune.trainer.learner.fsdp.worker:FsdpWorker"


class Pool:
    """The ranks that train the policies `names` together; calls of them take `timeout` seconds at most."""

    def __init__(self, workers: WorkerGroup, names: Sequence[str], timeout: float) -> None:
        self.workers = workers
        self.names = tuple(names)
        self._timeout = timeout

    @classmethod
    def start(cls, names: Sequence[str], cluster: ClusterConfig, device: str) -> Pool:
        """Start the actors and let them find each other. Raises ConfigError, LearnerError."""
        with _as_learner_errors():
            workers = WorkerGroup.start(
                RANK,
                cluster.learners,
                name=f"the learners {', '.join(names)}",
                setting="cluster.learners",
                cpus=CPUS,
                gpus=cluster.gpu_shares[1],
                placement=cluster.placement.upper(),
                timeout=cluster.learner_timeout,
            )
        pool = cls(workers, names, cluster.learner_timeout)
        try:
            port = pool.call("listen", workers.host, cluster.learner_timeout)
            pool.call("join", workers.host, port, device, cluster.learner_timeout)
        except BaseException:
            workers.close()
            raise
        return pool

    def call(self, method: str, *arguments: Any) -> Any:
        """Rank 0's answer. Raises what the ranks raise, LearnerLost, LearnerError."""
        with _as_learner_errors():
            return self.workers.call(method, *arguments, timeout=self._timeout)


@contextmanager
def _as_learner_errors() -> Iterator[None]:
    try:
        yield
    except WorkersLost as error:
        raise LearnerLost(error.cause, "Open a new learner and load the last checkpoint.") from error
    except WorkersClosed as error:
        raise LearnerError(error.cause, "Open a new learner.") from error


class FsdpLearner:
    """The `Learner` protocol over pools of Ray actors. Methods may be called from any thread.

    Calls for policies of one pool run one after the other, those of different pools at once. When a rank dies or
    hangs, the call raises LearnerLost within the time-out and names it, and so do all later ones of its pool. The
    folder of a checkpoint must be visible under one path on all machines.
    """

    def __init__(self, specs: Sequence[PolicySpec], pools: Sequence[Pool]) -> None:
        self._specs = list(specs)
        self._pools = list(pools)
        self._of = {name: pool for pool in pools for name in pool.names}

    @classmethod
    def open(
        cls,
        model: str,
        policies: Policies,
        settings: LearnerSettings,
        loss: LossSpec,
        cluster: ClusterConfig,
        own: Mapping[str, Method] = {},
        seed: int = 0,
    ) -> FsdpLearner:
        """Start the pools of `cluster` in this process's Ray and load `model` for every trained policy; those in `own`
        are trained by methods of their own. `seed` decides the adapters' initial weights and the order of rows.

        Raises ConfigError for what does not fit into the cluster or cannot be trained, LearnerError when a worker
        fails.
        """
        check_losses(loss, *(method.loss for method in own.values()))
        specs = [spec for spec in policies.specs.values() if spec.trained]
        names = [spec.name for spec in specs]
        groups = [names] if cluster.pools == "shared" else [[name] for name in names]
        with ThreadPoolExecutor(max(len(groups), 1)) as threads:
            starting = [threads.submit(Pool.start, group, cluster, settings.device) for group in groups]
        learner = cls(specs, [started.result() for started in starting if started.exception() is None])
        try:
            for started in starting:
                started.result()
            opening = (model, policies, settings, loss)
            learner._all(lambda pool: pool.call("open", *opening, list(pool.names), dict(own), seed))
        except BaseException:
            learner._close()
            raise
        return learner

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """All epochs and mini-batches of one step, as `LocalLearner.update`, with the same metrics."""
        check_rows(rows)
        metrics: dict[str, float] = self._pool(policy).call("update", policy, pack_rows(rows), lr_scale)
        return metrics

    def check(self, policy: str, rows: Sequence[TrainRow]) -> None:
        """Raises GroupError and LearnerError, as `LocalLearner.check`."""
        check_rows(rows)
        self._pool(policy).call("learner", "check", policy, pack_rows(rows))

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        check_rows(rows)
        return [np.array(part) for part in self._pool(policy).call("learner", "logprobs", policy, pack_rows(rows))]

    def seen(self, policy: str) -> Mapping[str, Seen]:
        """As `Learner.seen`."""
        found: Mapping[str, Seen] = self._pool(policy).call("learner", "seen", policy)
        return found

    def weights(self, policy: str) -> Weights:
        """Trainable weights as fp32 arrays, gathered from all ranks: names as of `LocalLearner.weights`."""
        return {name: np.array(array) for name, array in self._pool(policy).call("learner", "weights", policy).items()}

    def adopt(self, policy: str, weights: Weights) -> None:
        """Go on from these weights, as `LocalLearner.adopt`."""
        self._pool(policy).call("learner", "adopt", policy, weights)

    def save(self, folder: Path) -> None:
        """Write weights whole, optimizer states divided (see `learner.files`); all pools at once."""
        files.write_identity(folder, self._specs)
        self._all(lambda pool: pool.call("save", str(folder.absolute())))

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` or a `LocalLearner` wrote, with any number of workers, but for policies that are `new`.
        Raises RunError."""
        files.check_identity(folder, [spec for spec in self._specs if spec.name not in new])
        self._all(lambda pool: pool.call("load", str(folder.absolute()), list(new)))

    def begin_profile(self) -> None:
        """Start torch's profiler on rank 0."""
        self._pools[0].call("begin_profile")

    def end_profile(self, file: Path | None) -> None:
        """Stop it; rank 0 writes the trace. `file` must be in a folder that its machine sees."""
        self._pools[0].call("end_profile", file and str(file.absolute()))

    async def aclose(self) -> None:
        """End all actors; calls that still run fail."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._all(lambda pool: pool.workers.close())

    def _pool(self, policy: str) -> Pool:
        if policy not in self._of:
            raise ConfigError("policy", policy, f"is not a trained policy: {sorted(self._of)}")
        return self._of[policy]

    def _all(self, work: Callable[[Pool], T]) -> list[T]:
        """`work` on every pool at once; the first error, once all are done."""
        with ThreadPoolExecutor(max(len(self._pools), 1)) as threads:
            return [done.result() for done in [threads.submit(work, pool) for pool in self._pools]]
