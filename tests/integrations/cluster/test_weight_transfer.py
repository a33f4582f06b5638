"""Full weights that go from a learner to engines over gloo, whole and unchanged; and sides that are lost meanwhile."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cotune.errors import SamplerError
from cotune.integrations.cluster import weight_transfer
from cotune.integrations.cluster.weight_transfer import Incoming, OfferedWeights, WeightServer, buckets
from cotune.sampling.protocol import Weights, fingerprint, norm

CPU = torch.device("cpu")
HOST = "127.0.0.1"


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))


@pytest.fixture
def server(store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightServer]:
    """A server that packs 400 bytes into a bucket."""
    monkeypatch.setattr(weight_transfer, "BUCKET_BYTES", 400)
    server = WeightServer(HOST, store.port, "cpu")
    yield server
    server.close()


@pytest.fixture
def weights() -> Weights:
    """Tensors that share buckets, one of exactly a bucket, one above, and one number."""
    draw = np.random.default_rng(0)
    shapes = {"z": (3, 5), "a": (7,), "b": (10, 10), "c": (101,), "one": (), "last": (2, 2, 2)}
    return {name: draw.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def receive(ticket: dict[str, Any], rank: int) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in Incoming(ticket, rank, CPU).tensors()}


def same(found: Weights, expected: Weights) -> bool:
    return list(found) == list(expected) and all(
        found[name].shape == expected[name].shape and found[name].tobytes() == expected[name].tobytes()
        for name in expected
    )


def test_all_workers_of_an_engine_receive_every_bit(server: WeightServer, weights: Weights) -> None:
    offered = server.offer("p", weights)
    ticket = offered.request(2, "cpu")
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(receive, [ticket, ticket], [1, 2])
    assert same(first, weights)
    assert same(second, weights)


def test_buckets_hold_no_more_than_they_may_unless_a_tensor_is_larger(weights: Weights) -> None:
    divided = [list(bucket) for bucket in buckets({name: array.shape for name, array in weights.items()}, 400)]
    assert divided == [["z", "a"], ["b"], ["c"], ["one", "last"]]


def test_an_offer_has_the_proof_and_fetches_the_arrays_when_one_is_read(
    server: WeightServer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    offered: OfferedWeights = pickle.loads(pickle.dumps(server.offer("p", weights)))
    with monkeypatch.context() as patch:
        patch.setattr(OfferedWeights, "request", lambda *_: pytest.fail("a proof that fetches"))
        assert (fingerprint(offered), norm(offered)) == (fingerprint(weights), norm(weights))
        assert list(offered) == list(weights)
    assert same(offered, weights)
    monkeypatch.setattr(OfferedWeights, "request", lambda *_: pytest.fail("fetched twice"))
    assert same(offered, weights)


def test_the_version_before_the_newest_is_served_until_the_next_update(server: WeightServer, weights: Weights) -> None:
    first, second, third = (server.offer("p", {"a": np.full(3, number, np.float32)}) for number in (1, 2, 3))
    other = server.offer("q", weights)
    assert second["a"].tolist() == [2, 2, 2]
    with pytest.raises(SamplerError, match="the learner has replaced the version p/1"):
        first["a"]
    server.keep("p")
    assert third["a"].tolist() == [3, 3, 3]
    with pytest.raises(SamplerError, match="the learner has replaced the version p/2"):
        server_again(second)["a"]
    assert same(other, weights)


def server_again(offered: OfferedWeights) -> OfferedWeights:
    """The same offer in another process: it has fetched nothing."""
    copy: OfferedWeights = pickle.loads(pickle.dumps(offered))
    return copy


def test_a_worker_that_leaves_in_the_middle_ends_its_own_transfer_only(
    server: WeightServer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "BUCKET_SECONDS", 2.0)
    offered = server.offer("p", weights)
    ticket = offered.request(2, "cpu")
    with ThreadPoolExecutor() as pool:
        leaves = pool.submit(lambda: next(Incoming(ticket, 1, CPU).tensors()))
        stays = pool.submit(receive, ticket, 2)
        leaves.result(30)
        with pytest.raises(RuntimeError):
            stays.result(30)
    assert same(server_again(offered), weights)
    wait_for(lambda: not [one for one in threading.enumerate() if one.name.startswith("cotune-send")])


def test_a_worker_that_never_comes_leaves_an_error_to_the_others(
    server: WeightServer, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "CONNECT_SECONDS", 2.0)
    ticket = server.offer("p", weights).request(2, "cpu")
    with pytest.raises(dist.DistError):
        Incoming(ticket, 1, CPU)


def test_an_altered_bucket_is_refused(server: WeightServer, weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    true_hash = weight_transfer.bucket_hash
    tell = weight_transfer.TransferGroup.tell_hash
    monkeypatch.setattr(
        weight_transfer.TransferGroup, "tell_hash", lambda self, bucket, value: tell(self, bucket, value ^ bucket)
    )
    with pytest.raises(SamplerError, match="bucket 1 has other values than were sent"):
        server.offer("p", weights)["a"]
    assert true_hash(torch.tensor([1.0, 2.0])) != true_hash(torch.tensor([1.0, 2.5]))


def test_a_learner_that_is_gone_is_named(
    store: dist.TCPStore, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_transfer, "CONNECT_SECONDS", 1.0)
    offered = OfferedWeights(HOST, store.port, "p/1", "cpu", "", 0.0, {"a": (1,)})  # nobody serves this store
    with pytest.raises(SamplerError, match=f"the learner at {HOST}:{store.port} does not answer"):
        offered["a"]


def wait_for(condition: Any, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
