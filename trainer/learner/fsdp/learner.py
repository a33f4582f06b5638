"""The learner on a cluster: pools of Ray actors that divide weights and rows among them with FSDP2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, LearnerError, LearnerLost
from cotune.integrations.ray.worker_group import WorkerGroup, WorkersClosed, WorkersLost
from cotune.policies import Policies, PolicySpec
from cotune.sampling.protocol import Weights
from cotune.trainer.config.learner import LearnerSettings, check_loss
from cotune.trainer.learner import files
from cotune.trainer.learner.fsdp.worker import pack_rows
from cotune.trainer.learner.rows import check_rows

T = TypeVar("T")

RANK = "cotune.trainer.learner.fsdp.worker:FsdpWorker"
WAITS_IN = "/torch/distributed/"
PEER_ERRORS = ("gloo", "nccl", "connection", "tcpstore")
"""What torch says where the other side of a connection is gone."""


class Pool:
    """The ranks that train some of the policies together."""

    def __init__(
        self, names: Sequence[str], start: Callable[[], WorkerGroup], opening: Sequence[Any], timeout: float
    ) -> None:
        self.names = tuple(names)
        self._start = start
        self._opening = opening
        self._timeout = timeout
        self.workers: WorkerGroup | None = None

    def open(self) -> None:
        """Start the actors, let them find each other, and load the models."""
        with _as_learner_errors():
            self.workers = self._opened()

    def call(self, method: str, *arguments: Any) -> Any:
        if self.workers is None:
            raise LearnerError(f"The workers of {', '.join(self.names)} are not started.", "Call open first.")
        with _as_learner_errors():
            return self.workers.call(method, *arguments, timeout=self._timeout)

    def restart(self) -> None:
        """Fresh actors in place of lost ones."""
        if self.workers is not None and self.workers.lost is None:
            return
        if self.workers is not None:
            self.workers.close()
        self.open()

    def close(self) -> None:
        if self.workers is not None:
            self.workers.close()

    def _opened(self) -> WorkerGroup:
        workers = self._start()
        try:
            settings: LearnerSettings = self._opening[2]
            port = workers.call_first("listen", workers.host, self._timeout, timeout=self._timeout)
            workers.call("join", workers.host, port, settings.device, self._timeout, timeout=self._timeout)
            workers.call("open", *self._opening, list(self.names), timeout=self._timeout)
        except BaseException:
            workers.close()
            raise
        return workers


@contextmanager
def _as_learner_errors() -> Iterator[None]:
    try:
        yield
    except WorkersLost as error:
        raise LearnerLost(error.cause, "Restart the learner and load the last checkpoint.") from error
    except WorkersClosed as error:
        raise LearnerError(error.cause, "Open a new learner.") from error


class FsdpLearner:
    """The `Learner` protocol over pools of Ray actors. Methods may be called from any thread.

    Calls for policies of one pool run one after the other, those of different pools at once. When a rank dies or
    hangs, the call raises LearnerError within the time-out and names it; the pool stays lost until `restart`. The
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
        *,
        workers: int = 2,
        pools: Literal["shared", "per_policy"] = "shared",
        gpus_per_worker: float = 0,
        cpus_per_worker: float = 1,
        placement: str = "PACK",
        timeout: float = 600,
    ) -> FsdpLearner:
        """Start `workers` actors per pool in this process's Ray and load `model` for every trained policy.

        `pools`: "shared" trains all policies in one pool (adapters of one base share its weights), "per_policy" gives
        each a pool of its own, so that they train at once. `timeout` bounds every call, in seconds. Raises ConfigError
        for what does not fit into the cluster or cannot be trained, LearnerError when a worker fails.
        """
        check_loss(loss, settings)
        if workers < 1:
            raise ConfigError("cluster.learners", workers, "an integer of at least 1")
        specs = [spec for spec in policies.specs.values() if spec.trained]
        names = [spec.name for spec in specs]
        groups = [names] if pools == "shared" else [[name] for name in names]

        def start(group: Sequence[str]) -> WorkerGroup:
            return WorkerGroup.start(
                RANK,
                workers,
                name=f"the learners {', '.join(group)}",
                setting="cluster.learners",
                cpus=cpus_per_worker,
                gpus=gpus_per_worker,
                placement=placement,
                timeout=timeout,
                waits_in=WAITS_IN,
                peer_errors=PEER_ERRORS,
            )

        opening = (model, policies, settings, loss)
        made = [Pool(group, partial(start, group), opening, timeout) for group in groups]
        learner = cls(specs, made)
        try:
            learner._all(Pool.open)
        except BaseException:
            learner._all(Pool.close)
            raise
        return learner

    def update(self, policy: str, rows: Sequence[TrainRow], *, lr_scale: float = 1.0) -> Mapping[str, float]:
        """All epochs and mini-batches of one step, as `LocalLearner.update`, with the same metrics."""
        check_rows(rows)
        metrics: dict[str, float] = self._pool(policy).call("update", policy, pack_rows(rows), lr_scale)
        return metrics

    def logprobs(self, policy: str, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32]]:
        """log pi_train of each row's response tokens at the row's temperature, in nats, without gradients."""
        check_rows(rows)
        return [np.array(part) for part in self._pool(policy).call("logprobs", policy, pack_rows(rows))]

    def weights(self, policy: str) -> Weights:
        """Trainable weights as fp32 arrays, gathered from all ranks: names as of `LocalLearner.weights`."""
        return {name: np.array(array) for name, array in self._pool(policy).call("weights", policy).items()}

    def save(self, folder: Path) -> None:
        """Write weights whole, optimizer states divided (see `learner.files`); all pools at once."""
        files.write_identity(folder, self._specs)
        self._all(lambda pool: pool.call("save", str(folder.absolute())))

    def load(self, folder: Path, new: Collection[str] = ()) -> None:
        """Restore what `save` or a `LocalLearner` wrote, with any number of workers, but for policies that are `new`.
        Raises RunError."""
        files.check_identity(folder, [spec for spec in self._specs if spec.name not in new])
        self._all(lambda pool: pool.call("load", str(folder.absolute()), list(new)))

    def restart(self) -> None:
        """Fresh actors for the pools that lost one; then `load` the last checkpoint, which sets back all pools."""
        self._all(Pool.restart)

    async def aclose(self) -> None:
        """End all actors; calls that still run fail."""
        await asyncio.to_thread(self._all, Pool.close)

    def _pool(self, policy: str) -> Pool:
        if policy not in self._of:
            raise ConfigError("policy", policy, f"a trained policy: {sorted(self._of)}")
        return self._of[policy]

    def _all(self, work: Callable[[Pool], T]) -> list[T]:
        """`work` on every pool at once; the first error, once all are done."""
        if not self._pools:
            return []
        with ThreadPoolExecutor(len(self._pools)) as threads:
            return [done.result() for done in [threads.submit(work, pool) for pool in self._pools]]
