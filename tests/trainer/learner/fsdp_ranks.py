"""Ranks that outlive a learner, so that tests with different settings share their start; and ranks with faults."""

import time
from typing import Self, TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from cotune.config.cluster import ClusterConfig, DividedCluster
from cotune.trainer.learner.fsdp.learner import FsdpLearner, Ranks
from cotune.trainer.learner.fsdp.worker import FsdpWorker
from cotune.trainer.learner.local import LocalLearner

TIMEOUT = 120.0
FINE_EPS, RUN_EPS = 1e-6, 1e-4
LearnerOfTests = TypeVar("LearnerOfTests", LocalLearner, FsdpLearner)
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

    def set_eps(self, eps: float) -> None:
        with_eps(self._learner, eps)

    def share(self, policy: str) -> float:
        """Numbers of the policy that this rank holds, over all that there are."""
        parameters = self._learner._policies[policy].parameters().values()
        return sum(p.to_local().numel() for p in parameters) / sum(p.numel() for p in parameters)


class FineRank(FsdpWorker):
    """A rank of a run, with the epsilon `RUN_EPS`."""

    def open(self, *arguments, **named) -> None:
        super().open(*arguments, **named)
        with_eps(self._learner, RUN_EPS)


def with_eps(learner: LearnerOfTests, eps: float = FINE_EPS) -> LearnerOfTests:
    """A learner whose AdamW has another epsilon. A large one makes the first steps proportional to the gradient, and
    any that is not tiny keeps them from blowing up rounding errors where a gradient is nearly zero."""
    if isinstance(learner, FsdpLearner):
        learner._ranks.call("set_eps", eps)
        return learner
    for optimizer in learner._optimizers.values():
        for group in optimizer.param_groups:
            group["eps"] = eps
    return learner


def open_learner(*arguments, **cluster) -> FsdpLearner:
    """A learner on such ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotune.trainer.learner.fsdp.learner.RANK", RANK)
        settings = DividedCluster(address="local", **{"learners": 1, **cluster})
        return FsdpLearner.open(*arguments, settings)


class OpenRanks:
    """Workers for learners one after the other."""

    def __init__(self, workers: int) -> None:
        self.cluster = ClusterConfig(address="local", learners=workers)

    def __enter__(self) -> Self:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("cotune.trainer.learner.fsdp.learner.RANK", RANK)
            self.group = Ranks.start(self.cluster, "cpu").workers
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()

    def learner(self, model, policies, settings, loss, own=None, seed=0) -> FsdpLearner:
        """A learner on these ranks; the one before serves no more."""
        specs = [spec for spec in policies.specs.values() if spec.trained]
        ranks = Ranks(self.group, TIMEOUT)
        ranks.call("open", model, policies, settings, loss, own or {}, seed)
        return FsdpLearner(specs, ranks)
