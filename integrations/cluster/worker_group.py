"""A group of Ray actors that compute in step: started together, called together, and ended together if one is lost."""

from __future__ import annotations

import functools
import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cotune.errors import ConfigError, CotuneError, error_line
from cotune.integrations.cluster.process import end_processes, ray_reason, this_node
from cotune.runtime.thread_frames import thread_frame
from cotune.user_objects import load_object

Location = tuple[str, str, int]
"""Node id, address and process id of a worker."""

WATCH = "watch"
"""Ray's concurrency group for calls that ask for an actor's state. They are answered while it works."""
ASIDE = "aside"
"""Ray's concurrency group for other calls that an actor runs while it works."""
ASIDE_THREADS = 8
"""Most of these calls that run at once, such as one for each engine that fetches weights."""

GRACE_SECONDS = 10.0
"""Seconds that the other actors get to fail too, once one has failed."""

PROBE_SECONDS = 5.0
"""Seconds that a hanging actor gets to report the line that it is in."""


class WorkersLost(CotuneError):
    """A worker died, hangs or broke; all workers of its group were ended."""


class WorkersClosed(CotuneError):
    """The group was closed before or during a call."""


class Worker:
    """The actor of one rank. It holds an object, made by a factory from the rank and the size of the group."""

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

    def call_aside(self, method: str, *arguments: Any) -> Any:
        """Call a method of the object that may run beside its other calls."""
        return getattr(self._object, method)(*arguments)

    def location(self) -> Location:
        import ray

        return this_node(), ray.util.get_node_ip_address(), os.getpid()

    def where(self) -> str:
        """Function, file and line of the present call; the innermost one outside of installed packages."""
        frame = thread_frame(self._working)
        if frame is None:
            return "no call"
        stack = list(traceback.extract_stack(frame))
        outside_packages = [entry for entry in stack if "site-packages" not in entry.filename]
        innermost = (outside_packages or stack)[-1]
        return f"{innermost.name} ({Path(innermost.filename).name}:{innermost.lineno})"


class WorkerGroup:
    """Actors of one kind, one per rank. Calls run one at a time, from any thread.

    A call returns rank 0's answer, or raises the CotuneError that the actors raised. If a rank dies, hangs or breaks,
    it raises WorkersLost with that rank. Then all actors are killed: the others may wait for the lost rank forever.
    """

    def __init__(self, name: str, workers: Sequence[Any], placement_group: Any) -> None:
        """A group of started workers, one for each rank, which are called together and end together."""
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

        `name` names the group in errors ("the learners"). `setting` is the field of the configuration that its size
        comes from. The actors are placed on as few machines as possible, because exchanges within one are the fastest.

        Raises ConfigError if the cluster has no room for them, WorkersLost if they do not start.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placement_group = _reserve_resources(size, cpus, gpus, timeout, setting)
        remote: Any = ray.remote
        actor = remote(concurrency_groups={WATCH: 1, ASIDE: ASIDE_THREADS})(Worker)
        workers = []
        for rank in range(size):
            strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_index=rank)
            options = actor.options(num_cpus=cpus, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy)
            workers.append(options.remote(factory, rank, size))
        group = cls(name, workers, placement_group)
        try:
            # The first answer shows that an actor has started.
            refs = [worker.location.options(concurrency_group=WATCH).remote() for worker in workers]
            group._locations = group._collect("start", refs, timeout)
        except BaseException:
            group.close()
            raise
        return group

    @property
    def host(self) -> str:
        """Address of rank 0's machine."""
        return self._locations[0][1]

    @property
    def processes(self) -> list[int]:
        """Process ids by rank."""
        return [pid for _, _, pid in self._locations]

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        """Call `method` of every rank's object at once; returns rank 0's answer."""
        import ray

        with self._lock:
            self._check()
            # Bytes, such as weights, are stored once for all ranks.
            stored = [ray.put(argument) if isinstance(argument, bytes) else argument for argument in arguments]
            refs = [worker.call.remote(method, *stored) for worker in self._workers]
            return self._collect(method, refs, timeout)[0]

    def call_and_store(self, method: str, *arguments: Any, timeout: float) -> tuple[Any, Any]:
        """Call a method of every rank's object that returns a pair on rank 0, of which the first part is large.

        Returns the pair, with a Ray reference in place of the first part. This process owns the reference, so the part
        stays available after the end of the actors. It is in the memory of rank 0's machine.
        """
        with self._lock:
            self._check()
            rank_0, *other_ranks = self._workers
            stored, answer = rank_0.call.options(num_returns=2).remote(method, *arguments)
            others = [worker.call.remote(method, *arguments) for worker in other_ranks]
            return stored, self._collect(method, [answer, *others], timeout)[0]

    def aside(self, method: str) -> Any:
        """A remote function that calls a method of rank 0's object beside its other calls. It can be pickled."""
        return functools.partial(_call_aside, self._workers[0], method)

    def close(self) -> None:
        """Kill all actors, free their resources, and wait until their processes have ended.

        May be called twice, and while a call runs, which then fails.
        """
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
        """Wait for the answers of all ranks to a call, and return them by rank. `refs` are their Ray references.

        After an error of a rank, the others get a few seconds to fail too. Raises the error that explains the others
        best.
        """
        import ray

        deadline = time.monotonic() + timeout
        answers: dict[int, Any] = {}
        errors: dict[int, Exception] = {}
        pending = list(refs)
        while pending:
            done, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
            if not done:
                break  # the time is over
            rank = refs.index(done[0])
            try:
                answers[rank] = ray.get(done[0])
            except Exception as error:  # noqa: BLE001 - any error of an actor, or of Ray about it
                errors[rank] = error
                # The errors of the other ranks may explain this one, but they may also wait for it forever.
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        if not errors and not pending:
            return [answers[rank] for rank in range(len(refs))]
        causes = {rank: _cause_of_error(error) for rank, error in errors.items()}
        # If every rank raised a CotuneError, the actors still agree and can be called again.
        if len(causes) == len(refs) and all(isinstance(cause, CotuneError) for cause in causes.values()):
            raise causes[0]
        if self._closed:
            self._check()  # raises: the group was closed during the call
        self._fail(method, causes, [refs.index(ref) for ref in pending], timeout)

    def _fail(self, method: str, causes: Mapping[int, Exception], pending: Sequence[int], timeout: float) -> NoReturn:
        """Kill the remaining actors, and raise the error that explains the others best.

        `causes` are the errors by rank, in order of arrival; empty if the ranks in `pending` have not answered in time.
        """
        cause: Exception | None = None
        if causes:
            rank = min(causes, key=lambda rank: _explanation_rank(causes[rank]))
            cause = causes[rank]
            self.lost = f"{self._rank_title(rank)} {_describe_cause(cause)} in {method!r}."
        else:
            self.lost = f"{self._title} did not end {method!r} within {timeout:.0f} s: {self._where_they_hang(pending)}"
        self.close()
        if isinstance(cause, CotuneError):
            raise cause
        raise WorkersLost(self.lost, "Start new ones.") from cause

    def _where_they_hang(self, pending: Sequence[int]) -> str:
        """The present line of each rank that has not answered. Ranks that do not report it come first."""
        import ray
        from ray.exceptions import RayError

        refs = {rank: self._workers[rank].where.options(concurrency_group=WATCH).remote() for rank in pending}
        ray.wait(list(refs.values()), num_returns=len(refs), timeout=PROBE_SECONDS)
        silent = []
        reported = []
        for rank, ref in refs.items():
            try:
                reported.append(f"{self._rank_title(rank)} is in {ray.get(ref, timeout=0)}")
            except RayError:
                silent.append(f"{self._rank_title(rank)} does not answer")
        return "; ".join(sorted(silent) + sorted(reported)) + "."

    def _rank_title(self, rank: int) -> str:
        location = f" (process {self._locations[rank][2]} on {self._locations[rank][1]})" if self._locations else ""
        return f"Rank {rank} of {self.name}{location}"

    @property
    def _title(self) -> str:
        return self.name[:1].upper() + self.name[1:]


def _call_aside(worker: Any, method: str, *arguments: Any) -> Any:
    """Start the call, and return Ray's reference to its answer."""
    return worker.call_aside.options(concurrency_group=ASIDE).remote(method, *arguments)


def _reserve_resources(size: int, cpus: float, gpus: float, timeout: float, setting: str) -> Any:
    """Reserve resources for `size` workers, on as few machines as possible, and return Ray's placement group.

    The total of the cluster is checked first: a group that can never be placed would only wait until the time-out.
    `setting` is the configuration's name for the number of workers. Raises an error that names the missing resources.
    """
    import ray

    resources = {"CPU": float(cpus)}
    if gpus:
        resources["GPU"] = float(gpus)
    total = ray.cluster_resources()
    missing = {}
    for kind, amount in resources.items():
        if amount * size > total.get(kind, 0.0):
            missing[kind] = total.get(kind, 0.0)
    if missing:
        raise _no_room(setting, size, resources, f"it has {missing}")
    # An amount of 0 reserves nothing. Ray refuses a bundle without any amount above 0.
    bundle = {kind: amount for kind, amount in resources.items() if amount}
    group = ray.util.placement_group([bundle] * size, strategy="PACK")
    if not group.wait(timeout):
        ray.util.remove_placement_group(group)
        raise _no_room(setting, size, resources, f"{ray.available_resources()} were free after {timeout:.0f} s")
    return group


def _no_room(setting: str, size: int, wanted: Mapping[str, float], why: str) -> ConfigError:
    return ConfigError(
        setting,
        size,
        f"needs {dict(wanted)} each, and the cluster has no room for them ({why})",
        "Ask for fewer of them, or for less of each.",
    )


def _cause_of_error(error: Exception) -> Exception:
    """The error that the actor raised, or Ray's own error about the actor."""
    from ray.exceptions import RayTaskError

    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def _explanation_rank(cause: Exception) -> int:
    """How well an error explains the errors of other ranks; the smallest number explains them best.

    The death of a rank explains any other error. An error of cotune explains a broken connection on another rank.
    """
    from ray.exceptions import RayError

    if isinstance(cause, RayError):
        return 0
    return 1 if isinstance(cause, CotuneError) else 2


def _describe_cause(cause: Exception) -> str:
    from ray.exceptions import RayError

    if isinstance(cause, RayError):
        return f"died ({ray_reason(cause)})"
    return f"failed ({error_line(cause)})"
