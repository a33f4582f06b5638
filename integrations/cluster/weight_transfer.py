"""Full weights go from a learner straight to the workers of an engine, over torch.distributed.

The learner's rank 0 keeps the newest versions and serves them from a thread. An engine asks for a version whenever it
needs one, also after a restart. The learner and the run never wait for an engine, and the run's own process handles
only an address and the proof of the weights (`OfferedWeights`).

Each transfer has its own process group. The learner is rank 0 and the workers of one engine are the other ranks. They
use NCCL if both sides compute on GPUs, and gloo otherwise:

1. The engine writes a request into the learner's TCPStore. The learner answers with the size of its buckets, or with
   the reason why it refuses.
2. Both sides join the group. One number is broadcast, so that a missing connection shows before anything is replaced.
3. Rank 0 broadcasts buckets of packed tensors. Each worker compares the hash of every bucket.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from cotune.errors import SamplerError, error_line
from cotune.sampling.protocol import RemoteWeights, Shape, Weights, fingerprint, norm, shapes_of

log = logging.getLogger("cotune")

BUCKET_BYTES = 256 << 20
"""Tensors are packed into buckets of at most this size. A larger tensor has a bucket of its own."""
CONNECT_SECONDS = 60.0
"""How long the learner may take to answer a request, and all sides to join the group."""
BUCKET_SECONDS = 120.0
"""How long one bucket may take. A side that has died shows after this time at the latest."""
THIS_MACHINE = "127.0.0.1"
KEPT_VERSIONS = 2
"""An engine that restarts during a publication loads the previous version first."""


class OfferedWeights(RemoteWeights):
    """Full weights that a `WeightServer` keeps. Its arrays are fetched over gloo when one of them is read.

    It can be pickled. Reading it raises SamplerError if the learner does not serve these weights any more.
    """

    def __init__(
        self, host: str, port: int, key: str, device: str, digest: str, norm: float, shapes: Mapping[str, Shape]
    ) -> None:
        super().__init__(digest, norm, shapes)
        self._address = (host, port)
        self._key = key
        self._device = device
        self._arrays: Weights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        host, port = self._address
        return OfferedWeights, (host, port, self._key, self._device, self.digest, self.norm, self.shapes)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        if self._arrays is None:
            incoming = Incoming(self.request(1, "cpu"), 1, torch.device("cpu"))
            self._arrays = {name: tensor.numpy() for name, tensor in incoming.tensors()}
        return self._arrays[name]

    def request(self, workers: int, device: str) -> dict[str, Any]:
        """Ask the learner to send these weights to so many workers, which compute on "cuda" or "cpu".

        Returns the ticket with which the workers join, as plain data. Raises SamplerError if the learner refuses or
        does not answer.
        """
        host, port = self._address
        backend = "nccl" if device == self._device == "cuda" else "gloo"
        try:
            store = connect_store(host, port)
            number = store.add("transfers", 1)
            store.set(f"request/{number}", json.dumps({"key": self._key, "workers": workers, "backend": backend}))
            store.wait([f"answer/{number}"], timedelta(seconds=CONNECT_SECONDS))
            answer = json.loads(store.get(f"answer/{number}"))
        except dist.DistError as error:
            raise _lost(f"the learner at {host}:{port} does not answer ({error_line(error)})") from error
        if answer["refusal"]:
            raise _lost(answer["refusal"])
        return {
            "host": host,
            "port": port,
            "number": number,
            "workers": workers,
            "backend": backend,
            "bucket_bytes": answer["bucket_bytes"],
            "digest": self.digest,
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
        }


class WeightServer:
    """Serves the newest weights of each policy from a thread, in the process of the learner's rank 0.

    `host` and `port` belong to a TCPStore that all engines can reach. With `device` "cuda", weights are sent over NCCL
    to engines on GPUs.
    """

    def __init__(self, host: str, port: int, device: str) -> None:
        self._host = host
        self._port = port
        self._device = device
        self._versions: dict[str, dict[str, Weights]] = {}
        """By policy: the kept versions by key, the newest last."""
        self._offers = 0
        self._thread: threading.Thread | None = None

    def offer(self, policy: str, weights: Weights) -> OfferedWeights:
        """Serve these float32 weights of a policy, and forget all but the newest versions."""
        self._offers += 1
        key = f"{policy}/{self._offers}"
        versions = self._versions.setdefault(policy, {})
        versions[key] = weights
        self.keep(policy, KEPT_VERSIONS)
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="cotune-weights", daemon=True)
            self._thread.start()
        proof = (fingerprint(weights), norm(weights), shapes_of(weights))
        return OfferedWeights(self._host, self._port, key, self._device, *proof)

    def keep(self, policy: str, count: int = 1) -> None:
        """Forget all but the newest versions of a policy."""
        versions = self._versions.get(policy, {})
        for key in list(versions)[:-count]:
            del versions[key]

    def close(self) -> None:
        """End the thread, before the store is closed."""
        if self._thread is not None:
            store = connect_store(self._host, self._port)
            store.set(f"request/{store.add('transfers', 1)}", json.dumps(None))
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        """Answer requests in order. Each transfer has a thread, so that a broken one delays no other."""
        store = connect_store(self._host, self._port)
        number = 0
        while True:
            number += 1
            try:
                store.wait([f"request/{number}"], timedelta(days=365))
            except dist.DistNetworkError:
                return  # the store is gone, and the learner with it
            request = json.loads(store.get(f"request/{number}"))
            if request is None:
                return
            weights = self._versions.get(request["key"].rpartition("/")[0], {}).get(request["key"])
            refusal = "" if weights is not None else f"the learner has replaced the version {request['key']}"
            store.set(f"answer/{number}", json.dumps({"refusal": refusal, "bucket_bytes": BUCKET_BYTES}))
            if weights is not None:
                arguments = (number, request, weights)
                threading.Thread(target=self._send, args=arguments, name=f"cotune-send-{number}", daemon=True).start()

    def _send(self, number: int, request: Mapping[str, Any], weights: Weights) -> None:
        """Send weights to the workers of one engine. An error is only logged: the engine notices it too."""
        try:
            started = time.perf_counter()
            backend = request["backend"]
            # A thread begins with the first GPU as its current device.
            device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
            group = TransferGroup(self._host, self._port, number, 0, request["workers"], backend)
            try:
                group.broadcast(torch.zeros(1, device=device))
                send_buckets(group, weights, device)
            finally:
                group.close()
            log.debug("weights sent over %s in %.2f s", backend, time.perf_counter() - started)
        except Exception as error:  # noqa: BLE001
            log.info("Weights were not sent to an engine: %s", error_line(error))


@contextmanager
def serving_here() -> Iterator[WeightServer]:
    """A server for engines on this machine."""
    wait = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(THIS_MACHINE, 0, is_master=True, wait_for_workers=False, timeout=wait)
    server = WeightServer(THIS_MACHINE, store.port, "cpu")
    try:
        yield server
    finally:
        server.close()


class Incoming:
    """The weights of a ticket on their way to one worker, `rank` from 1. Opened, the connection has been tried."""

    def __init__(self, ticket: Mapping[str, Any], rank: int, device: torch.device) -> None:
        self.digest: str = ticket["digest"]
        self._shapes = {name: tuple(shape) for name, shape in ticket["shapes"].items()}
        self._bucket_bytes: int = ticket["bucket_bytes"]
        self._device = device if ticket["backend"] == "nccl" else torch.device("cpu")
        self._group = TransferGroup(
            ticket["host"], ticket["port"], ticket["number"], rank, ticket["workers"], ticket["backend"]
        )
        try:
            self._group.broadcast(torch.zeros(1, device=self._device))
        except BaseException:
            self._group.close()
            raise

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Receive the tensors by name, in the order of the learner. Raises SamplerError if a bucket arrives altered."""
        try:
            for number, bucket in enumerate(buckets(self._shapes, self._bucket_bytes)):
                sizes = [math.prod(shape) for shape in bucket.values()]
                packed = torch.empty(sum(sizes), dtype=torch.float32, device=self._device)
                self._group.broadcast(packed)
                if bucket_hash(packed) != self._group.told_hash(number):
                    raise _lost(f"bucket {number} has other values than were sent")
                for (name, shape), part in zip(bucket.items(), packed.split(sizes), strict=True):
                    yield name, part.view(shape)
        finally:
            self._group.close()


class TransferGroup:
    """The process group of one transfer. Rank 0 sends; `workers` is the number of the others.

    The group is not registered in torch.distributed, whose default group belongs to the learner or to vLLM.
    """

    def __init__(self, host: str, port: int, number: int, rank: int, workers: int, backend: str) -> None:
        self._store = dist.PrefixStore(f"transfer/{number}", connect_store(host, port))
        self._backend = backend
        self._wait_for_all(rank, workers)
        if backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            # Past its own time-out, NCCL's watchdog ends the process. `_finish` gives up much earlier.
            options._timeout = timedelta(days=1)
            self._group: Any = dist.ProcessGroupNCCL(self._store, rank, workers + 1, options)
        else:
            wait = timedelta(seconds=max(CONNECT_SECONDS, BUCKET_SECONDS))
            self._group = dist.ProcessGroupGloo(self._store, rank, workers + 1, wait)

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from rank 0 to all others, in place. Raises RuntimeError, TimeoutError."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        work = self._group.broadcast([tensor], options)
        if self._backend == "gloo":
            work.wait(timedelta(seconds=BUCKET_SECONDS))
            return
        # With NCCL, `wait` only orders streams. The host has to look whether a transfer has ended.
        deadline = time.monotonic() + BUCKET_SECONDS
        while not work.is_completed():
            if time.monotonic() > deadline:
                self._group.abort()
                raise TimeoutError(f"a bucket did not arrive within {BUCKET_SECONDS:.0f} s")
            time.sleep(1e-4)

    def tell_hash(self, bucket: int, value: int) -> None:
        """Tell the workers the hash of a bucket."""
        self._store.set(f"hash/{bucket}", str(value))

    def told_hash(self, bucket: int) -> int:
        """The hash of a bucket as rank 0 told it. Raises RuntimeError if it does not."""
        return int(self._store.get(f"hash/{bucket}"))

    def close(self) -> None:
        if self._backend == "nccl":
            self._group.shutdown()

    def _wait_for_all(self, rank: int, workers: int) -> None:
        """Wait until all ranks are here, because NCCL would wait for a missing one without an end."""
        self._store.set(f"here/{rank}", "")
        self._store.wait([f"here/{other}" for other in range(workers + 1)], timedelta(seconds=CONNECT_SECONDS))


def send_buckets(group: TransferGroup, weights: Weights, device: torch.device) -> None:
    """Send weights from rank 0, one bucket after the other."""
    for number, bucket in enumerate(buckets(shapes_of(weights), BUCKET_BYTES)):
        arrays = [np.ascontiguousarray(weights[name], dtype=np.float32).reshape(-1) for name in bucket]
        packed = torch.from_numpy(np.concatenate(arrays))
        group.tell_hash(number, bucket_hash(packed))
        group.broadcast(packed.to(device))


def buckets(shapes: Mapping[str, Shape], most_bytes: int) -> Iterator[dict[str, Shape]]:
    """Divide float32 tensors into buckets, in order. Sender and receivers do this alike."""
    bucket: dict[str, Shape] = {}
    filled = 0
    for name, shape in shapes.items():
        size = 4 * math.prod(shape)
        if bucket and filled + size > most_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = shape
        filled += size
    if bucket:
        yield bucket


def bucket_hash(packed: Tensor) -> int:
    """A hash of the bits of all values, computed on their device."""
    return int(torch.hash_tensor(packed).item())


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to the learner's store. Each thread needs a connection of its own: a wait blocks all other calls."""
    wait = timedelta(seconds=CONNECT_SECONDS)
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=wait)


def _lost(cause: str) -> SamplerError:
    return SamplerError(f"Weights did not arrive: {cause}.", "Read the learner's log.")
