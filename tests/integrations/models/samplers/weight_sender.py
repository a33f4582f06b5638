"""A learner's rank 0 in an actor, as far as engines see it: it sends full weights, and fails as a test asks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from cotune.integrations.cluster import weight_transfer
from cotune.integrations.cluster.weight_transfer import LearnerWeights, NcclGroups, Offer, Ticket
from cotune.integrations.cluster.worker_group import WorkerGroup
from cotune.sampling.protocol import Weights

HOST = "127.0.0.1"
SECONDS = 60.0


class Altered(dict[str, npt.NDArray[Any]]):
    """Weights of which one value is read with another bit."""

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        array = np.array(super().__getitem__(name))
        if name == max(self):
            array.reshape(-1).view(np.int32)[-1] ^= 1
        return array


class Cut(dict[str, npt.NDArray[Any]]):
    """Weights whose last tensor fails, or ends the process."""

    def __init__(self, weights: Mapping[str, Any], *, dies: bool) -> None:
        super().__init__(weights)
        self.dies = dies

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if name == max(self):
            if self.dies:
                os._exit(1)
            raise ConnectionError("the network is gone")
        return super().__getitem__(name)


class Sender:
    """What a `WorkerGroup` starts."""

    def __init__(self, rank: int, size: int) -> None:
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        self._behaviour = ""

    def offer(self, weights: Weights, behaviour: str) -> tuple[Weights, Offer]:
        self._behaviour = behaviour
        return weights, Offer.of(weights, HOST, self._store.port, "cpu")

    def send(self, weights: Weights, ticket: Ticket) -> None:
        if self._behaviour == "alters":
            weights = Altered(weights)
        elif self._behaviour:
            weights = Cut(weights, dies=self._behaviour == "dies")
        weight_transfer.send(weights, ticket, torch.device("cpu"), NcclGroups())


@contextmanager
def senders() -> Iterator[WorkerGroup]:
    group = WorkerGroup.start(f"{__name__}:Sender", 1, name="the sender", setting="", cpus=1, gpus=0, timeout=SECONDS)
    try:
        yield group
    finally:
        group.close()


def offered(group: WorkerGroup, weights: Weights, behaviour: str = "") -> LearnerWeights:
    """Weights that the sender offers. `behaviour` is a way to fail to send them: "alters", "breaks", "dies"."""
    stored, offer = group.call_and_store("offer", weights, behaviour, timeout=SECONDS)
    return LearnerWeights(offer, stored, group.aside("send"))
