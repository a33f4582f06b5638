"""Full weights go from a learner straight to the workers of a vLLM engine, over torch.distributed.

Rank 0 of the learner leaves the gathered weights in Ray's object store, on its machine. The run and the router pass on
`LearnerWeights`: a reference to the weights, and their fingerprint. An engine that publishes them asks rank 0 to send
them to its workers (`send`, `Receiver`). Rank 0 keeps no versions: it can send each one that a reference exists for,
at any time, also to an engine that has restarted.

Each transfer has a process group of its own: rank 0 is the learner, and the other ranks are the workers of one engine.
It uses NCCL if both sides compute on GPUs of their own, and gloo otherwise. Each wait has a limit, so a side that is
lost or cannot be reached is an error on the other sides. The engine then reads the same weights from Ray's
object store and gives them to its workers as files. That needs the machine of rank 0, but not its process.
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypedDict

import msgspec
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from cotune.errors import LearnerLost, error_line
from cotune.sampling.protocol import (
    Fingerprint,
    RemoteWeights,
    Shape,
    Weights,
    fingerprint,
    weight_shapes,
    weights_norm,
)

CONNECT_SECONDS = 10.0
"""How long connecting to rank 0 may take. torch tries twice."""
STALL_SECONDS = 30.0
"""How long joining the group or one tensor may take."""
START_SECONDS = 60.0
"""How long NCCL may take to connect all ranks."""
FETCH_SECONDS = 600.0
"""How long Ray may take to bring weights from the learner's machine to this one."""


class Offer(msgspec.Struct, frozen=True):
    """The facts of weights that rank 0 can send, and the address of its TCPStore. `device` is "cuda" if it can send
    over NCCL."""

    fingerprint: str
    norm: float
    shapes: dict[str, Shape]
    host: str
    port: int
    device: str

    @classmethod
    def of(cls, weights: Weights, host: str, port: int, device: str) -> Offer:
        """Compute the facts of float32 weights."""
        return cls(fingerprint(weights), weights_norm(weights), dict(weight_shapes(weights)), host, port, device)


class Ticket(TypedDict):
    """All that the ranks of one transfer agree on, as plain data for vLLM's calls of its workers."""

    id: str
    host: str
    port: int
    workers: int
    backend: str
    shapes: dict[str, Shape]


class Received(TypedDict):
    """A worker's answer after a transfer, as plain data for vLLM. At most one of its values is not empty."""

    fingerprint: str
    transfer_error: str
    """Why the tensors did not arrive. The worker can load the weights from files."""
    load_error: str
    """Why the model did not take the tensors. What the worker holds is not known."""


def new_ticket(offer: Offer, workers: int, device: str) -> Ticket:
    """Describe a transfer to so many workers, which compute on "cuda" or "cpu"."""
    return {
        "id": uuid.uuid4().hex,
        "host": offer.host,
        "port": offer.port,
        "workers": workers,
        "backend": "nccl" if device == offer.device == "cuda" else "gloo",
        "shapes": offer.shapes,
    }


class LearnerWeights(RemoteWeights):
    """Full weights in Ray's object store, which rank 0 of the learner can also send. Ray can pickle it.

    `stored` is Ray's reference to the arrays. `send` asks rank 0 to send them: it takes `stored` and a ticket, and
    returns Ray's reference to the answer.
    """

    def __init__(self, offer: Offer, stored: Any, send: Callable[[Any, Ticket], Any]) -> None:
        super().__init__(offer.fingerprint, offer.norm, offer.shapes)
        self._offer = offer
        self._stored = stored
        self._send = send
        self._arrays: Weights | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return LearnerWeights, (self._offer, self._stored, self._send)

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        """The array of a weight. The first use brings all arrays from Ray's object store.

        Raises LearnerLost if Ray cannot bring them, because the learner's machine is lost.
        """
        if self._arrays is None:
            import ray

            try:
                self._arrays = ray.get(self._stored, timeout=FETCH_SECONDS)
            except ray.exceptions.RayError as error:
                raise LearnerLost(
                    f"The learner's weights cannot be read from Ray's object store: {error_line(error)}.",
                    "Open a new learner and load the last checkpoint.",
                ) from error
        return self._arrays[name]

    @property
    def address(self) -> str:
        """The address of rank 0. Each learner has another one."""
        return f"{self._offer.host}:{self._offer.port}"

    def ticket(self, workers: int, device: str) -> Ticket:
        """Describe a transfer of these weights: see `new_ticket`."""
        return new_ticket(self._offer, workers, device)

    def send(self, ticket: Ticket) -> Any:
        """Ask rank 0 to send the weights to the workers that join with this ticket. Returns Ray's reference to its
        answer, which is None once all is sent."""
        return self._send(self._stored, ticket)


def send(weights: Weights, ticket: Ticket, device: torch.device, groups: NcclGroups) -> None:
    """Send weights from rank 0. `device` is the GPU to send from over NCCL, and `groups` is one object for all
    transfers of the process. Raises an error if a worker is lost."""
    device = transfer_device(ticket, device)

    def copy(name: str) -> Tensor:
        return torch.tensor(weights[name], dtype=torch.float32, device=device)

    first_name, *other_names = sorted(ticket["shapes"])
    first = copy(first_name)  # the workers need not wait for it once all have joined
    with transfer_group(ticket, 0, device, groups) as group:
        group.broadcast(first)
        del first
        for name in other_names:
            group.broadcast(copy(name))


class Receiver:
    """Receives the weights of a ticket in one worker, `rank` from 1, whose model is on `device`."""

    def __init__(self, ticket: Ticket, rank: int, device: torch.device) -> None:
        self._ticket = ticket
        self._rank = rank
        self._device = transfer_device(ticket, device)
        self._fingerprint = Fingerprint()
        self.error: Exception | None = None
        """The error that ended the transfer, None for an error in the code that takes the tensors."""

    def tensors(self) -> Generator[tuple[str, Tensor], None, None]:
        """Receive the tensors by name, in the order of names. Raises an error if the learner or a worker is lost."""
        try:
            yield from self._receive()
        except Exception as error:
            self.error = error
            raise

    def _receive(self) -> Generator[tuple[str, Tensor], None, None]:
        """Allocate each tensor and receive it, the first one before it joins: without memory it does not join."""
        shapes = sorted(self._ticket["shapes"].items())
        first: Tensor | None = self._allocate(shapes[0][1])
        groups = NcclGroups()  # a worker receives one set of weights at a time
        with transfer_group(self._ticket, self._rank, self._device, groups) as group:
            for name, shape in shapes:
                tensor = self._allocate(shape) if first is None else first
                first = None
                group.broadcast(tensor)
                self._fingerprint.add(name, tensor.cpu().numpy())
                yield name, tensor

    def _allocate(self, shape: Shape) -> Tensor:
        return torch.empty(tuple(shape), dtype=torch.float32, device=self._device)

    def fingerprint(self) -> str:
        """The fingerprint of the tensors that were received."""
        return self._fingerprint.hexdigest()


class TransferGroup:
    """The process group of one transfer.

    The group is not registered in torch.distributed, whose default group belongs to the learner or to vLLM.
    """

    def __init__(self, group: Any) -> None:
        self._group = group

    def broadcast(self, tensor: Tensor) -> None:
        """Send a tensor from rank 0 to all others, in place, and wait until it has arrived. Raises an error if a rank
        is lost or does not take part in time."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = timedelta(seconds=STALL_SECONDS)
        self._group.broadcast([tensor], options).wait(timedelta(seconds=STALL_SECONDS))


class NcclGroups:
    """Makes groups of NCCL whose errors are raised by `wait`.

    By default NCCL's errors are asynchronous: `wait` only orders streams, and a thread of torch that finds an error
    later ends the process. torch reads an environment variable when a group is made, so a process makes one group at a
    time.
    """

    _VARIABLE = "TORCH_NCCL_BLOCKING_WAIT"

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def make(self, store: dist.Store, rank: int, size: int) -> Any:
        """Make the group of a transfer."""
        with self._lock:
            before = os.environ.get(self._VARIABLE)
            os.environ[self._VARIABLE] = "1"
            try:
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = timedelta(seconds=STALL_SECONDS)
                return dist.ProcessGroupNCCL(store, rank, size, options)
            finally:
                if before is None:
                    del os.environ[self._VARIABLE]
                else:
                    os.environ[self._VARIABLE] = before


def transfer_device(ticket: Ticket, device: torch.device) -> torch.device:
    """Where the tensors of a transfer are on a rank that computes on `device`: there for NCCL, in the host's memory for
    gloo."""
    return device if ticket["backend"] == "nccl" else torch.device("cpu")


@contextmanager
def transfer_group(ticket: Ticket, rank: int, device: torch.device, groups: NcclGroups) -> Iterator[TransferGroup]:
    """Join the process group of a transfer, and leave it together with the others. An error on one rank breaks the
    connections of all. `device` is that of `transfer_device`."""
    store = dist.PrefixStore(f"transfer/{ticket['id']}", connect_store(ticket["host"], ticket["port"]))
    size = ticket["workers"] + 1

    def leave_together() -> None:
        store.set(f"done/{rank}", "")
        store.wait([f"done/{other}" for other in range(size)], timedelta(seconds=STALL_SECONDS))

    _begin_together(store, rank, size)
    if ticket["backend"] == "gloo":
        limit = timedelta(seconds=STALL_SECONDS)
        yield TransferGroup(dist.ProcessGroupGloo(store, rank, size, limit))
        leave_together()  # a rank that leaves closes its connections
        return

    # NCCL connects from the thread's current GPU, which is the first one in a new thread.
    with torch.cuda.device(device):
        group = groups.make(store, rank, size)
        try:
            _start_nccl(group, device)
            yield TransferGroup(group)
            leave_together()
        except NcclStartTimeout:
            raise  # `abort` might wait for the start too
        except BaseException:
            group.abort()
            raise
        group.shutdown()


class NcclStartTimeout(TimeoutError):
    """NCCL has not connected all ranks in time."""


def _start_nccl(group: Any, device: torch.device) -> None:
    """Let NCCL connect all ranks, which it does for the first broadcast. Raises NcclStartTimeout, and NCCL's errors.

    NCCL waits without a limit for a rank that it cannot reach, for example because it has chosen another network
    interface than that rank. Nothing ends its wait, so this waits in a thread that is left behind.
    """
    started: Future[None] = Future()

    def connect() -> None:
        try:
            with torch.cuda.device(device):
                TransferGroup(group).broadcast(torch.zeros(1, device=device))
            started.set_result(None)
        except BaseException as error:  # noqa: BLE001
            started.set_exception(error)

    threading.Thread(target=connect, name="start-nccl", daemon=True).start()
    if wait([started], START_SECONDS).not_done:
        raise NcclStartTimeout(
            f"NCCL has not connected the learner with the engine within {START_SECONDS:g} s. Name the network "
            'interface between their machines: set NCCL_SOCKET_IFNAME in [cluster.env]. NCCL_DEBUG = "INFO" there '
            "shows which one NCCL has chosen"
        )
    started.result()


def _begin_together(store: dist.Store, rank: int, size: int) -> None:
    """Wait until all ranks have joined. Raises DistStoreError if one has not joined in time, or has left again.

    NCCL waits for a missing rank without a limit, so either all ranks begin or none. Rank 0 decides "begin" once all
    have joined. A rank whose wait is over decides "leave". The first decision in the store holds for all.
    """
    store.set(f"joined/{rank}", "")
    awaited = ["decision"] if rank else [f"joined/{other}" for other in range(size)]
    decision = "begin"
    try:
        store.wait(awaited, timedelta(seconds=STALL_SECONDS))
    except dist.DistStoreError:
        decision = "leave"
    if store.compare_set("decision", "", decision) != b"begin":
        raise dist.DistStoreError(f"not all sides of a transfer of weights have joined within {STALL_SECONDS:g} s")


def connect_store(host: str, port: int) -> dist.TCPStore:
    """Connect to rank 0's store. Each transfer needs a connection of its own: a wait blocks all other calls."""
    limit = timedelta(seconds=CONNECT_SECONDS)
    store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    store.set_timeout(timedelta(seconds=STALL_SECONDS))  # NCCL's ranks wait in it for rank 0
    return store
