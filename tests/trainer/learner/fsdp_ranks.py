"""Ranks that outlive a learner, so that tests with different settings share their start; and ranks with faults."""

import time
from typing import Self
from unittest import mock

import torch.distributed as dist

from cotune.integrations.ray.worker_group import WorkerGroup
from cotune.trainer.learner.fsdp.learner import PEER_ERRORS, WAITS_IN, FsdpLearner, Pool
from cotune.trainer.learner.fsdp.worker import FsdpWorker

TIMEOUT = 120.0
RANK = "tests.trainer.learner.fsdp_ranks:TestedRank"


class TestedRank(FsdpWorker):
    """A rank that also fails on demand, and counts what it exchanges."""

    __test__ = False

    def hang(self, rank: int) -> None:
        time.sleep(1000) if self._rank == rank else dist.barrier()

    def fail(self, rank: int) -> None:
        if self._rank == rank:
            raise ZeroDivisionError("nothing is left")
        dist.barrier()

    def update_counted(self, policy: str, rows: bytes) -> int:
        """How often gradients are exchanged in an update."""
        name = "torch.distributed.fsdp._fully_shard._fsdp_param_group.foreach_reduce"
        target, function = name.rsplit(".", 1)
        module = __import__(target, fromlist=[function])
        with mock.patch(name, wraps=getattr(module, function)) as exchange:
            self.update(policy, rows, 1.0)
        return exchange.call_count

    def share(self, policy: str) -> float:
        """Numbers of the policy that this rank holds, over all that there are."""
        parameters = self._learner._policies[policy].parameters().values()
        return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)


class OpenRanks:
    """Workers for learners one after the other."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._pool: Pool | None = None

    def __enter__(self) -> Self:
        self.group = WorkerGroup.start(
            RANK,
            self.workers,
            name="the learners under test",
            setting="cluster.learners",
            cpus=1,
            gpus=0,
            placement="PACK",
            timeout=TIMEOUT,
            waits_in=WAITS_IN,
            peer_errors=PEER_ERRORS,
        )
        port = self.group.call_first("listen", self.group.host, TIMEOUT, timeout=TIMEOUT)
        self.group.call("join", self.group.host, port, "cpu", TIMEOUT, timeout=TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()

    def learner(self, model, policies, settings, loss) -> FsdpLearner:
        """A learner on these ranks; the one before has no ranks any more."""
        if self._pool is not None:
            self._pool.workers = None
        specs = [spec for spec in policies.specs.values() if spec.trained]
        self._pool = Pool([spec.name for spec in specs], lambda: self.group, (model, policies, settings, loss), TIMEOUT)
        self._pool.workers = self.group
        self._pool.call("open", model, policies, settings, loss, [spec.name for spec in specs])
        return FsdpLearner(specs, [self._pool])
