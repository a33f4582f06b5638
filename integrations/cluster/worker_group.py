"""Ray actors that compute in step: started together, called together, and ended together when one is lost."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cotune.errors import ConfigError, CotuneError, error_line
from cotune.integrations.cluster.process import end_processes, ray_reason, this_node
from cotune.user_objects import load_object

Location = tuple[str, str, int]
"""Node id, address and process id of a worker."""

WATCH = "watch"
"""Questions about an actor's state are answered while it works."""

GRACE_SECONDS = 10.0
"""How long the others may take to fail too, once one has."""

PROBE_SECONDS = 5.0
"""How long an actor that hangs has to say where."""


class WorkersLost(CotuneError):
    """A worker died, hangs or broke; all workers of its group are ended."""


class WorkersClosed(CotuneError):
    """The group was closed before or during a call."""


class Worker:
    """What runs in each actor: one object, made by a factory with its rank and the size of the group."""

    def __init__(self, factory: str, rank: int, size: int) -> None:
        self._object = load_object("factory", factory, "my_module:Rank")(rank, size)
        self._rank = rank
        self._working: int | None = None

    def call(self, method: str, *arguments: Any) -> Any:
        """Call the object; only rank 0 sends its answer."""
        self._working = threading.get_ident()
        try:
            answer = getattr(self._object, method)(*arguments)
        finally:
            self._working = None
        return answer if self._rank == 0 else None

    def location(self) -> Location:
        import ray

        return this_node(), ray.util.get_node_ip_address(), os.getpid()

    def where(self) -> str:
        """The innermost line outside of installed packages that the call in hand is in."""
        frame = sys._current_frames().get(self._working or 0)
        if frame is None:
            return "no call"
        stack = traceback.extract_stack(frame)
        own = [at for at in stack if "site-packages" not in at.filename] or list(stack)
        return f"{own[-1].name} ({Path(own[-1].filename).name}:{own[-1].lineno})"


class WorkerGroup:
    """Actors of one kind, one per rank. Calls run one at a time, from any thread.

    A call ends with rank 0's answer, with the CotuneError that the actors raised, or, when a rank dies, hangs or
    breaks, with a WorkersLost that names it; then all actors are killed, as the others may wait for it for ever.
    """

    def __init__(self, name: str, workers: Sequence[Any], placement_group: Any) -> None:
        self.name = name
        self.lost: str | None = None
        self._workers = list(workers)
        self._placement_group = placement_group
        self._locations: list[Location] = []
        self._lock = threading.Lock()
        self._closed = False

    @classmethod
    def start(
        cls,
        factory: str,
        size: int,
        *,
        name: str,
        setting: str,
        cpus: float,
        gpus: float,
        timeout: float,
    ) -> WorkerGroup:
        """Reserve room for all actors at once and start them; `factory` is "module:Class", called with rank and size.

        `name` is what errors call the group ("the learners"), `setting` the field of the configuration that gave its
        size. They are placed on as few machines as possible, as exchanges within one are the fastest.

        Raises ConfigError when the cluster has no room for them, WorkersLost when they do not start.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        group = _reserve(size, cpus, gpus, timeout, setting)
        remote: Any = ray.remote
        actor = remote(concurrency_groups={WATCH: 1})(Worker)
        workers = [
            actor.options(
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            ).remote(factory, rank, size)
            for rank in range(size)
        ]
        started = cls(name, workers, group)
        try:
            refs = [worker.location.options(concurrency_group=WATCH).remote() for worker in workers]
            started._locations = started._collect("start", refs, timeout)
        except BaseException:
            started.close()
            raise
        return started

    @property
    def host(self) -> str:
        """Address of rank 0's machine."""
        return self._locations[0][1]

    @property
    def processes(self) -> list[int]:
        """Process ids by rank."""
        return [pid for _, _, pid in self._locations]

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call `method` of every rank's object at once; returns rank 0's answer. Bytes are sent once for all."""
        import ray

        with self._lock:
            self._check()
            sent = [ray.put(argument) if isinstance(argument, bytes) else argument for argument in arguments]
            return self._collect(method, [worker.call.remote(method, *sent) for worker in self._workers], timeout)[0]

    def close(self) -> None:
        """Kill all actors, give their room back, and wait until their processes are gone. May be called twice, and
        while a call runs, which then fails."""
        import ray

        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        end_processes([pid for node, _, pid in self._locations if node == this_node()])
        ray.util.remove_placement_group(self._placement_group)

    def _check(self) -> None:
        if self.lost is not None:
            raise WorkersLost(self.lost, "Start new ones.")
        if self._closed:
            raise WorkersClosed(f"{self._title} were closed.", "Start new ones.")

    def _collect(self, method: str, refs: Sequence[Any], timeout: float) -> list[Any]:
        """All answers by rank, or the error that says best what happened."""
        import ray

        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        faults: dict[int, Exception] = {}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if not done:
                break
            try:
                answers[refs.index(done[0])] = ray.get(done[0])
            except Exception as error:  # noqa: BLE001 - whatever an actor raised, or Ray about it
                faults[refs.index(done[0])] = error
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not faults and not pending:
            return [answers[rank] for rank in range(len(refs))]
        causes = {rank: _cause(error) for rank, error in faults.items()}
        if len(causes) == len(refs) and all(isinstance(cause, CotuneError) for cause in causes.values()):
            raise causes[0]
        if self._closed:
            self._check()
        self._fail(method, causes, [refs.index(ref) for ref in pending], timeout)
        raise AssertionError

    def _fail(self, method: str, causes: Mapping[int, Exception], pending: Sequence[int], timeout: float) -> None:
        """Kill what is left, and raise the fault that explains the others; `causes` are in the order they came in."""
        if not causes:
            self.lost = f"{self._title} did not end {method!r} within {timeout:.0f} s: {self._hung(pending)}"
        else:
            rank = min(causes, key=lambda rank: _order(causes[rank]))
            self.lost = f"{self._who(rank)} {_describe(causes[rank])} in {method!r}."
        self.close()
        first = causes[rank] if causes else None
        if isinstance(first, CotuneError):
            raise first
        raise WorkersLost(self.lost, "Start new ones.") from first

    def _hung(self, pending: Sequence[int]) -> str:
        """What each rank that is not done is doing; those that do not answer first."""
        import ray
        from ray.exceptions import RayError

        asked = {rank: self._workers[rank].where.options(concurrency_group=WATCH).remote() for rank in pending}
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=PROBE_SECONDS)
        places = []
        for rank, ref in asked.items():
            try:
                places.append((1, f"{self._who(rank)} is in {ray.get(ref, timeout=0)}"))
            except RayError:
                places.append((0, f"{self._who(rank)} does not answer"))
        return "; ".join(text for _, text in sorted(places)) + "."

    def _who(self, rank: int) -> str:
        location = f" (process {self._locations[rank][2]} on {self._locations[rank][1]})" if self._locations else ""
        return f"Rank {rank} of {self.name}{location}"

    @property
    def _title(self) -> str:
        return self.name[:1].upper() + self.name[1:]


def _reserve(size: int, cpus: float, gpus: float, timeout: float, setting: str) -> Any:
    import ray

    wanted = {"CPU": float(cpus), **({"GPU": float(gpus)} if gpus else {})}
    total = ray.cluster_resources()
    short = {kind: total.get(kind, 0.0) for kind, each in wanted.items() if each * size > total.get(kind, 0.0)}
    if short:
        raise _no_room(setting, size, wanted, f"it has {short}")
    group = ray.util.placement_group([{k: v for k, v in wanted.items() if v}] * size, strategy="PACK")
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise _no_room(setting, size, wanted, f"{ray.available_resources()} were free after {timeout:.0f} s")
    return group


def _no_room(setting: str, size: int, wanted: Mapping[str, float], why: str) -> ConfigError:
    return ConfigError(
        setting,
        size,
        f"needs {dict(wanted)} each, and the cluster has no room for them ({why})",
        "Ask for fewer of them, or for less of each.",
    )


def _cause(error: Exception) -> Exception:
    """What was raised in the actor, or Ray's own error about it."""
    from ray.exceptions import RayTaskError

    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error


def _order(cause: Exception) -> int:
    """A dead rank explains what the others say, and an error of cotune's what a broken connection does."""
    from ray.exceptions import RayError

    return 0 if isinstance(cause, RayError) else 1 if isinstance(cause, CotuneError) else 2


def _describe(cause: Exception) -> str:
    from ray.exceptions import RayError

    return f"died ({ray_reason(cause)})" if isinstance(cause, RayError) else f"failed ({error_line(cause)})"
