"""Full weights from a learner to the workers of an engine over gloo: every bit, or an error in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cotune.integrations.cluster import weight_transfer
from cotune.integrations.cluster.weight_transfer import (
    NcclGroups,
    Offer,
    Receiver,
    Ticket,
    TransferGroup,
    new_ticket,
    send,
)
from cotune.sampling.protocol import Weights, fingerprint
from tests.ports import free_port

CPU = torch.device("cpu")
HOST = "127.0.0.1"

DYING_LEARNER = """
import os, sys, numpy as np, torch
import torch.distributed as dist
from cotune.integrations.cluster import weight_transfer

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
ticket = {"id": "t", "host": "127.0.0.1", "port": store.port, "workers": 1, "backend": "gloo",
          "shapes": {"a": [4], "b": [4]}}
weights = {"a": np.zeros(4, np.float32)}
broadcast = weight_transfer.TransferGroup.broadcast

def broadcast_and_die(group, tensor):
    broadcast(group, tensor)
    os._exit(1)

weight_transfer.TransferGroup.broadcast = broadcast_and_die
weight_transfer.send(weights, ticket, torch.device("cpu"), weight_transfer.NcclGroups())
"""


@pytest.fixture
def weights() -> Weights:
    draw = np.random.default_rng(0)
    shapes = {"z": (3, 5), "a": (7,), "b": (10, 10), "one": (), "layers.10": (2, 2, 2), "layers.2": (2,)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def offer(store: dist.TCPStore, weights: Weights) -> Offer:
    return Offer.of(weights, HOST, store.port, "cpu")


def receive(ticket: Ticket, rank: int) -> tuple[dict[str, np.ndarray], str]:
    receiver = Receiver(ticket, rank, CPU)
    arrays = {name: tensor.numpy() for name, tensor in receiver.tensors()}
    return arrays, receiver.fingerprint()


@contextmanager
def sending(weights: Weights, ticket: Ticket) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        pool.submit(send, weights, ticket, CPU, NcclGroups())
        yield pool


def test_all_workers_receive_every_bit_and_compute_the_fingerprint(offer: Offer, weights: Weights) -> None:
    ticket = new_ticket(offer, 2, "cpu")
    with sending(weights, ticket) as pool:
        both = list(pool.map(receive, [ticket, ticket], [1, 2]))
    for arrays, computed in both:
        assert computed == offer.fingerprint == fingerprint(weights)
        assert list(arrays) == sorted(weights)
        assert all(arrays[name].tobytes() == weights[name].tobytes() for name in weights)
        assert all(arrays[name].shape == weights[name].shape for name in weights)


def test_one_flipped_bit_on_the_way_changes_the_computed_fingerprint(
    offer: Offer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    broadcast = TransferGroup.broadcast

    def flip(group: TransferGroup, tensor: torch.Tensor) -> None:
        broadcast(group, tensor)
        if tensor.shape == (10, 10):
            tensor.view(torch.int32)[3, 4] ^= 1

    monkeypatch.setattr(TransferGroup, "broadcast", flip)
    ticket = new_ticket(offer, 1, "cpu")
    with sending(weights, ticket):
        arrays, computed = receive(ticket, 1)
    assert sum((arrays[name] != weights[name]).sum() for name in weights) == 1
    assert computed == fingerprint(arrays) != offer.fingerprint


def test_a_learner_that_dies_in_the_middle_is_an_error_at_once(tmp_path: Path) -> None:
    learner = subprocess.Popen(
        [sys.executable, "-c", DYING_LEARNER], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    assert learner.stdout is not None
    shapes = {"a": (4,), "b": (4,)}
    ticket = new_ticket(Offer("", 0.0, shapes, HOST, int(learner.stdout.readline()), "cpu"), 1, "cpu")
    ticket["id"] = "t"
    tensors = Receiver(ticket, 1, CPU).tensors()
    assert next(tensors)[0] == "a"
    started = time.monotonic()
    with pytest.raises(RuntimeError):
        next(tensors)
    assert time.monotonic() - started < 10
    assert learner.wait(10) == 1


def test_a_learner_that_does_not_answer_is_an_error_after_the_limit(
    offer: Offer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 1.0)
    with pytest.raises(dist.DistError):
        receive(new_ticket(offer, 1, "cpu"), 1)


def test_a_learner_that_is_gone_is_an_error_after_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_transfer, "CONNECT_SECONDS", 1.0)
    with pytest.raises(dist.DistError):
        receive(new_ticket(Offer("", 0.0, {"a": (1,)}, HOST, free_port(), "cpu"), 1, "cpu"), 1)


def test_a_learner_that_stalls_is_an_error_after_the_limit(
    offer: Offer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 1.0)
    broadcast = TransferGroup.broadcast

    def stall(group: TransferGroup, tensor: torch.Tensor) -> None:
        if tensor.any():  # the sender has values, the receiver has not
            time.sleep(3)
        broadcast(group, tensor)

    monkeypatch.setattr(TransferGroup, "broadcast", stall)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    ticket = new_ticket(offer, 1, "cpu")
    started = time.monotonic()
    with sending(weights, ticket), pytest.raises(RuntimeError):
        try:
            receive(ticket, 1)
        finally:
            assert time.monotonic() - started < 2.5


def test_a_worker_that_fails_ends_the_transfer_of_all(
    offer: Offer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 1.0)
    ticket = new_ticket(offer, 2, "cpu")

    def fails() -> None:
        tensors = Receiver(ticket, 1, CPU).tensors()
        next(tensors)
        tensors.close()  # what an error in the consumer does

    with ThreadPoolExecutor() as pool:
        sender = pool.submit(send, weights, ticket, CPU, NcclGroups())
        other = pool.submit(receive, ticket, 2)
        pool.submit(fails).result(30)
        assert isinstance(sender.exception(30), RuntimeError)
        assert isinstance(other.exception(30), RuntimeError)


def test_a_worker_without_memory_does_not_join_and_no_side_begins(
    offer: Offer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 1.0)
    ticket = new_ticket(offer, 2, "cpu")
    without_memory = Receiver(ticket, 1, CPU)
    monkeypatch.setattr(without_memory, "_allocate", lambda shape: torch.empty(2**60))
    begun: list[Any] = []
    monkeypatch.setattr(dist, "ProcessGroupGloo", lambda *arguments: begun.append(arguments))
    with ThreadPoolExecutor() as pool:
        sender = pool.submit(send, weights, ticket, CPU, NcclGroups())
        other = pool.submit(receive, ticket, 2)
        with pytest.raises(RuntimeError) as raised:
            next(without_memory.tensors())
        assert without_memory.error is raised.value
        for side in (sender, other):
            assert "not all sides of a transfer of weights have joined" in str(side.exception(30))
    assert not begun


def test_a_side_that_has_left_is_seen_by_those_that_join_later(offer: Offer, monkeypatch: pytest.MonkeyPatch) -> None:
    ticket = new_ticket(offer, 2, "cpu")
    stores = [weight_transfer.connect_store(HOST, ticket["port"]) for _ in range(3)]
    begin = weight_transfer._begin_together
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 0.2)
    with pytest.raises(dist.DistStoreError, match="not all sides"):
        begin(stores[1], 1, 3)
    monkeypatch.setattr(weight_transfer, "STALL_SECONDS", 30.0)
    for rank in (2, 0):  # all have joined now, but rank 1 waits no more
        with pytest.raises(dist.DistStoreError, match="not all sides"):
            begin(stores[rank], rank, 3)


def test_an_error_of_the_code_that_takes_tensors_is_not_the_receivers(offer: Offer, weights: Weights) -> None:
    ticket = new_ticket(offer, 1, "cpu")
    receiver = Receiver(ticket, 1, CPU)
    with sending(weights, ticket):
        tensors = receiver.tensors()
        next(tensors)
        tensors.close()
    assert receiver.error is None


def test_nccl_is_used_only_between_gpus_of_their_own(offer: Offer) -> None:
    on_gpu = Offer("", 0.0, {}, HOST, 1, "cuda")
    backends = [new_ticket(of, 1, device)["backend"] for of in (offer, on_gpu) for device in ("cpu", "cuda")]
    assert backends == ["gloo", "gloo", "gloo", "nccl"]


class PretendedNccl:
    """Stands for torch's NCCL group, which a build for CPUs does not have."""

    made: list[PretendedNccl]

    class Options:
        _timeout: Any = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Options) -> None:
        self.blocking = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.timeout = options._timeout.total_seconds()
        self.calls: list[str] = []
        PretendedNccl.made.append(self)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        self.calls.append("broadcast")
        return SimpleNamespace(wait=self.wait)

    def wait(self, limit: Any) -> None:
        self.calls.append(f"wait {limit.total_seconds():.0f}")
        if self.calls.count("broadcast") == 4:  # of the start and three tensors
            raise RuntimeError("NCCL found an error")

    def abort(self) -> None:
        self.calls.append("abort")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


@pytest.mark.parametrize(("tensors", "end"), [(2, ["shutdown"]), (3, ["abort"])])
def test_a_group_of_nccl_waits_with_a_limit_and_is_ended(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, tensors: int, end: list[str]
) -> None:
    PretendedNccl.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", PretendedNccl, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))  # a context without an effect
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    ticket = new_ticket(Offer("", 0.0, dict.fromkeys("abc"[:tensors], (2,)), HOST, store.port, "cuda"), 0, "cuda")
    weights = dict.fromkeys("abc", np.zeros(2, np.float32))
    if end == ["abort"]:
        with pytest.raises(RuntimeError, match="NCCL found an error"):
            send(weights, ticket, CPU, NcclGroups())
    else:
        send(weights, ticket, CPU, NcclGroups())
    (group,) = PretendedNccl.made
    assert (group.blocking, group.timeout) == ("1", weight_transfer.STALL_SECONDS)
    assert group.calls == ["broadcast", "wait 30"] * (1 + tensors) + end
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ


def test_nccl_that_does_not_connect_is_an_error_after_the_limit(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()

    class Unconnected(PretendedNccl):
        def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
            self.calls.append("broadcast")
            released.wait(60)
            return super().broadcast(tensors, options)

    PretendedNccl.made = []
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Unconnected, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: memoryview(b""))
    monkeypatch.setattr(weight_transfer, "START_SECONDS", 0.2)
    ticket = new_ticket(Offer("", 0.0, {"a": (2,)}, HOST, store.port, "cuda"), 0, "cuda")
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"set NCCL_SOCKET_IFNAME in \[cluster.env\]"):
        send({"a": np.zeros(2, np.float32)}, ticket, CPU, NcclGroups())
    assert time.monotonic() - started < 10
    (group,) = PretendedNccl.made
    assert group.calls == ["broadcast"]
    released.set()


def test_groups_made_at_the_same_time_leave_the_environment_as_it_was(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    PretendedNccl.made = []

    class Slow(PretendedNccl):
        def __init__(self, *arguments: Any) -> None:
            time.sleep(0.01)
            super().__init__(*arguments)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", Slow, raising=False)
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "0")
    groups = NcclGroups()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda rank: groups.make(store, rank, 8), range(8)))
    assert [group.blocking for group in PretendedNccl.made] == ["1"] * 8
    assert os.environ["TORCH_NCCL_BLOCKING_WAIT"] == "0"
