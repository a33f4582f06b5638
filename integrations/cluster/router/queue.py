"""The queue of requests that wait for an engine.

They are placed in order of arrival, as many at once as the engines take, and only while enough engines are healthy. A
request goes to the engine that saw its prefix last, unless another engine is much less loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence

from cotune.errors import EngineLost
from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.replica import Engine, Replica
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams

log = logging.getLogger(__name__)

BLOCK_TOKENS = 16
"""Prefixes are compared in blocks of this many tokens."""
REMEMBERED_BLOCKS = 1 << 16
SLACK = 4.0
"""How much more load than the least loaded engine an engine with a known prefix may have, in costs of the request."""


def choose_engine(engines: Sequence[Engine], homes: Mapping[int, Engine], blocks: Sequence[int], cost: int) -> Engine:
    """Choose the engine for a request whose prompt has these prefix `blocks`, and which adds `cost` to the load.

    `homes` has the engine that saw a block last. The choice is the engine that saw the longest prefix, if its load is
    at most `SLACK` times the cost above the least loaded engine. The limit keeps a prefix that all requests share from
    occupying a single engine. Otherwise it is the least loaded engine; if there are several, the one without a new
    request for the longest time.
    """
    least = min(engines, key=lambda engine: (engine.load, engine.idle_since))
    for block in reversed(blocks):
        home = homes.get(block)
        if home is not None and home in engines and home.load <= least.load + SLACK * cost:
            return home
    return least


def prefix_blocks(prompt: Sequence[int], seed: str = "") -> tuple[int, ...]:
    """A hash for each full block of tokens, which covers all blocks before it: equal prefixes have equal hashes."""
    value = hash(seed)
    blocks = []
    for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
        value = hash((value, *prompt[end - BLOCK_TOKENS : end]))
        blocks.append(value)
    return tuple(blocks)


class Request:
    """One call of `sample`."""

    def __init__(self, prompt: tuple[int, ...], n: int, params: SamplingParams, policy: PolicyRef) -> None:
        """A request for `n` candidates.

        Its `cost` is the most tokens that it may take. Its `blocks` are hashes of the prefixes of its prompt. With them
        it goes to the engine that has these prefixes in its cache.
        """
        self.prompt = prompt
        self.n = n
        self.params = params
        self.policy = policy
        self.blocks = prefix_blocks(prompt, str(policy))
        self.cost = len(prompt) + n * max(params.max_tokens, 1)
        self.tried: set[Engine] = set()
        """Engines that failed the request. A restarted engine is a new object, and so may try again."""
        self.placed: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()


class Queue:
    """Places requests on the engines of `replicas`, while at least `min_healthy` of them are healthy."""

    def __init__(self, replicas: Sequence[Replica], min_healthy: int, counters: Counter[str]) -> None:
        """A queue for the engines of these replicas. Requests wait while fewer than `min_healthy` engines are healthy.
        `counters` counts the requests that have to wait.
        """
        self._replicas = replicas
        self._min_healthy = min_healthy
        self._counters = counters
        self._waiting: deque[Request] = deque()
        self._homes: OrderedDict[int, Engine] = OrderedDict()
        """Hash of a prompt's prefix (`prefix_blocks`) -> the engine that got it last. Only the most recently used ones
        are kept."""
        self._n_placed = 0
        """The number of requests that were given to engines until now."""
        self._enough_healthy: bool | None = None
        """Whether enough engines are healthy; None before they were for the first time."""
        self._changes = asyncio.Event()
        """It is set at the next change of a replica's state."""

    def __len__(self) -> int:
        return len(self._waiting)

    def healthy(self) -> list[Engine]:
        return [r.engine for r in self._replicas if r.state == "healthy" and r.engine is not None]

    async def place(self, request: Request) -> Engine:
        """Wait until the request is given to an engine, and return the engine. Raises EngineLost.

        A request that an engine has failed before goes to the front of the queue.
        """
        placed = asyncio.get_running_loop().create_future()
        request.placed = placed
        is_retry = bool(request.tried)
        if is_retry:
            self._waiting.appendleft(request)
        else:
            self._waiting.append(request)
        self._dispatch()
        if not placed.done() and not is_retry:
            # "queued" counts requests for which all engines are busy, "waited" those that came while too few engines
            # were healthy.
            self._counters["queued" if self._enough_healthy else "waited"] += 1
        try:
            return await placed
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
                raise
            got_engine = placed.done() and not placed.cancelled() and placed.exception() is None
            if got_engine:
                # The engine was chosen just before the caller was cancelled, and counts the request as running.
                self.leave(request, placed.result())
            raise

    def leave(self, request: Request, engine: Engine) -> None:
        """Note that the engine has finished the request."""
        engine.running -= 1
        engine.load -= request.cost
        self._dispatch()

    def on_replica_change(self) -> None:
        """React to a replica's new state: wake the tasks that wait for a change, and give requests to engines if enough
        are healthy.
        """
        n_healthy = len(self.healthy())
        is_enough = n_healthy >= self._min_healthy
        was_enough = self._enough_healthy  # None until enough engines have started for the first time
        if was_enough is not None and is_enough != was_enough:
            log.warning(
                "%d of %d engines are healthy; at least %d are needed. %s.", n_healthy, len(self._replicas),
                self._min_healthy, "Requests continue" if is_enough else "Requests wait until more are back",
            )  # fmt: skip
        if is_enough or was_enough is not None:
            self._enough_healthy = is_enough
        # Setting the event wakes all waiters. They wait for the next change with the new event.
        self._changes.set()
        self._changes = asyncio.Event()
        self._dispatch()

    async def until(self, condition: Callable[[], bool | None]) -> None:
        """Wait for a condition on the replicas. Raises EngineLost."""
        while not condition():
            self.check()
            await self._changes.wait()
        self.check()

    async def wait_for_enough_engines(self) -> None:
        """Wait until at least `min_healthy` engines are healthy. Raises EngineLost."""
        await self.until(lambda: self._enough_healthy)

    def check(self) -> None:
        """Raise EngineLost once so many engines are lost that no request will ever be served again."""
        lost = [replica for replica in self._replicas if replica.state == "lost"]
        n_left = len(self._replicas) - len(lost)
        if n_left < self._min_healthy:
            reasons = "; ".join(f"{replica.name}: {replica.fault}" for replica in lost)
            raise EngineLost(
                f"{n_left} of {len(self._replicas)} engines are left; at least {self._min_healthy} are needed. "
                f"Given up: {reasons}.",
                "Read the engines' messages above, remove the cause, then continue with --resume, which counts "
                "restarts from 0 again.",
            )

    def _dispatch(self) -> None:
        """Give waiting requests to engines, in order, as many as the engines can take."""
        try:
            self.check()
        except EngineLost as lost:
            # Each request gets an error of its own, as a raised error collects tracebacks.
            for request in self._waiting:
                if not request.placed.done():
                    request.placed.set_exception(EngineLost(lost.cause, lost.remedy))
            self._waiting.clear()
        failed_by_free_engines = []
        while self._enough_healthy and self._waiting:
            healthy = self.healthy()
            free = [engine for engine in healthy if engine.running < limits.IN_FLIGHT]
            if not free:
                break
            request = self._waiting.popleft()
            if request.placed.done():
                continue  # it was cancelled just now
            untried = [engine for engine in free if engine not in request.tried]
            all_have_failed_it = request.tried.issuperset(healthy)
            if untried or all_have_failed_it:
                choices = untried or free
                self._give(request, choose_engine(choices, self._homes, request.blocks, request.cost))
            else:
                # The request waits for a busy engine that has not failed it yet.
                failed_by_free_engines.append(request)
        self._waiting.extendleft(reversed(failed_by_free_engines))

    def _give(self, request: Request, engine: Engine) -> None:
        """Assign a waiting request to an engine, and remember the engine for the blocks of the request's prompt."""
        self._n_placed += 1
        engine.idle_since = self._n_placed
        engine.running += 1
        engine.load += request.cost
        # In reverse order, so that the first blocks of a prompt, which more requests share, are forgotten last.
        for block in reversed(request.blocks):
            self._homes[block] = engine
            self._homes.move_to_end(block)
        while len(self._homes) > REMEMBERED_BLOCKS:
            self._homes.popitem(last=False)
        request.placed.set_result(engine)
