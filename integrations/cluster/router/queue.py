"""Requests that wait for an engine: in order of arrival, as many at once as the engines take, none below the floor.

A request goes where its prefix was seen, as long as no other engine is much less loaded.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from cotune.errors import EngineLost
from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.replica import Engine, Replica
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams

BLOCK_TOKENS = 16
"""Prefixes are compared in blocks of this many tokens."""
REMEMBERED_BLOCKS = 1 << 16
SLACK = 4.0
"""How many requests like the one to place an engine may be ahead of the least loaded one, for a known prefix."""


def choose(engines: Sequence[Engine], matched: Mapping[str, int], cost: int, slack: float = SLACK) -> Engine:
    """The engine for a request that adds `cost` to its load; `matched` is how many leading blocks of it each has seen.

    Only engines that are at most `slack` times the cost above the least loaded one count, so that a prefix that
    everybody shares does not starve the others. Of these: the longest known prefix, then the lowest load, then the one
    that has waited longest.
    """
    least = min(engine.load for engine in engines)
    near = [engine for engine in engines if engine.load <= least + slack * cost]
    return min(near, key=lambda engine: (-matched[engine.name], engine.load, engine.idle_since))


def prefix_blocks(prompt: Sequence[int], size: int, seed: str = "") -> tuple[int, ...]:
    """A hash for each full block of `size` tokens, each over everything before it: equal prefixes, equal hashes."""
    value = hash(seed)
    blocks = []
    for end in range(size, len(prompt) + 1, size):
        value = hash((value, *prompt[end - size : end]))
        blocks.append(value)
    return tuple(blocks)


class PrefixMap:
    """Which engines have seen which blocks; the `capacity` blocks used last are kept."""

    def __init__(self, capacity: int = REMEMBERED_BLOCKS) -> None:
        self.capacity = capacity
        self._seen: OrderedDict[int, set[str]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def matched(self, blocks: Sequence[int], engines: Iterable[str]) -> Mapping[str, int]:
        """For each engine, how many leading blocks it has seen."""
        going = set(engines)
        found = dict.fromkeys(going, 0)
        for depth, block in enumerate(blocks, start=1):
            going &= self._seen.get(block, set())
            if not going:
                break
            for engine in going:
                found[engine] = depth
        return found

    def add(self, blocks: Sequence[int], engine: str) -> None:
        """`engine` has now seen these blocks. The first blocks of a prompt outlive its last ones."""
        for block in reversed(blocks):
            self._seen.setdefault(block, set()).add(engine)
            self._seen.move_to_end(block)
        while len(self._seen) > self.capacity:
            self._seen.popitem(last=False)

    def forget(self, engine: str) -> None:
        """The engine has lost its cache."""
        for block in [block for block, engines in self._seen.items() if engine in engines]:
            self._seen[block].discard(engine)
            if not self._seen[block]:
                del self._seen[block]


log = logging.getLogger(__name__)


class Request:
    """One call of `sample`."""

    def __init__(self, prompt: tuple[int, ...], n: int, params: SamplingParams, policy: PolicyRef) -> None:
        self.prompt = prompt
        self.n = n
        self.params = params
        self.policy = policy
        self.blocks = prefix_blocks(prompt, BLOCK_TOKENS, str(policy))
        self.cost = len(prompt) + n * max(params.max_tokens, 1)
        self.tried: set[Engine] = set()
        """Engines that failed it; a restarted one is another."""
        self.placed: asyncio.Future[Engine] = asyncio.get_running_loop().create_future()


class Queue:
    """Places requests on the engines of `replicas`, while at least `min_healthy` of them are healthy."""

    def __init__(self, replicas: Sequence[Replica], min_healthy: int, counters: Counter[str]) -> None:
        self._replicas = replicas
        self._min_healthy = min_healthy
        self._counters = counters
        self._waiting: deque[Request] = deque()
        self._prefixes = PrefixMap()
        self._given = 0
        self._enough: bool | None = None
        """Whether enough engines are healthy; None before they were for the first time."""
        self._changes = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def healthy(self) -> list[Engine]:
        return [r.engine for r in self._replicas if r.state == "healthy" and r.engine is not None]

    async def place(self, request: Request) -> Engine:
        """Wait until the request is given to an engine; one that comes again goes before the others.

        Raises EngineLost.
        """
        request.placed = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if request.tried else self._waiting.append)(request)
        self.dispatch()
        if not request.placed.done() and not request.tried:
            self._counters["queued" if self._enough else "waited"] += 1
        try:
            return await request.placed
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.placed.done() and not request.placed.cancelled() and request.placed.exception() is None:
                self.leave(request, request.placed.result())
            raise

    def leave(self, request: Request, engine: Engine) -> None:
        """The engine has no more to do with the request."""
        engine.running -= 1
        engine.load -= request.cost
        self.dispatch()

    def changed(self) -> None:
        """A replica has changed its state."""
        healthy = len(self.healthy())
        enough = healthy >= self._min_healthy
        if self._enough is not None and enough != self._enough:
            log.warning(
                "%d of %d engines are healthy, at least %d must be. %s.", healthy, len(self._replicas),
                self._min_healthy, "Requests go on" if enough else "Requests wait until more are back",
            )  # fmt: skip
        if enough or self._enough is not None:
            self._enough = enough
        for replica in self._replicas:
            if replica.state != "healthy":
                self._prefixes.forget(replica.name)
        self._changes.set()
        self._changes = asyncio.Event()
        self.dispatch()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the replicas. Raises EngineLost."""
        while not condition():
            self.check()
            await self._changes.wait()
        self.check()

    async def floor(self) -> None:
        """Wait until enough engines are healthy."""
        await self.until(lambda: bool(self._enough))

    def dispatch(self) -> None:
        """Give every waiting request that an engine can take to one, in order."""
        hopeless = self._hopeless()
        if hopeless is not None:
            for request in self._waiting:
                if not request.placed.done():
                    request.placed.set_exception(EngineLost(hopeless.cause, hopeless.remedy))
            self._waiting.clear()
            return
        kept = []
        while self._enough and self._waiting:
            free = [engine for engine in self.healthy() if engine.running < limits.IN_FLIGHT]
            if not free:
                break
            request = self._waiting.popleft()
            if request.placed.done():
                continue  # it was cancelled just now
            if engine := self._engine(request, free):
                self._give(request, engine)
            else:
                kept.append(request)
        self._waiting.extendleft(reversed(kept))

    def check(self) -> None:
        """Raises EngineLost."""
        if hopeless := self._hopeless():
            raise hopeless

    def _engine(self, request: Request, free: Sequence[Engine]) -> Engine | None:
        """The one that it goes to; None when it should rather wait for an engine that has not failed it yet."""
        untried = [e for e in free if e not in request.tried]
        if not untried and any(e not in request.tried for e in self.healthy()):
            return None
        engines = untried or free
        matched = self._prefixes.matched(request.blocks, [engine.name for engine in engines])
        return choose(engines, matched, request.cost)

    def _give(self, request: Request, engine: Engine) -> None:
        self._given += 1
        engine.idle_since = self._given
        engine.running += 1
        engine.load += request.cost
        self._prefixes.add(request.blocks, engine.name)
        request.placed.set_result(engine)

    def _hopeless(self) -> EngineLost | None:
        """Why no request will ever be served again."""
        lost = [r for r in self._replicas if r.state == "lost"]
        left = len(self._replicas) - len(lost)
        if left >= self._min_healthy:
            return None
        reasons = "; ".join(f"{r.name}: {r.fault}" for r in lost)
        return EngineLost(
            f"{left} of {len(self._replicas)} engines are left, at least {self._min_healthy} must be. "
            f"Given up: {reasons}.",
            "Read the engines' logs, remove the cause, then resume the run; raise max_restarts if it has passed.",
        )
