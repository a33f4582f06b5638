"""Requests that wait for an engine: in order of arrival, as many at once as the engines take, none below the floor."""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Callable, Sequence

from cotune.errors import EngineLost, SamplerError
from cotune.integrations.ray.router.affinity import Option, PrefixMap, choose, prefix_blocks
from cotune.integrations.ray.router.engine import Engine
from cotune.integrations.ray.router.replica import Replica
from cotune.integrations.ray.router.settings import RouterSettings
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import SamplingParams


class Request:
    """One call of `sample`. `ticket` is its place in the order of arrival, which it keeps when it is retried."""

    def __init__(
        self, ticket: int, prompt: tuple[int, ...], n: int, params: SamplingParams, policy: PolicyRef, block: int
    ) -> None:
        self.ticket = ticket
        self.prompt = prompt
        self.n = n
        self.params = params
        self.policy = policy
        self.blocks = prefix_blocks(prompt, block, str(policy))
        self.cost = len(prompt) + n * max(params.max_tokens, 1)
        self.tried: set[Engine] = set()
        """Engines that failed it; a restarted one is another."""
        self.engine: Engine | None = None
        """The last engine that it was given to, at the loop's time `given`."""
        self.given = 0.0
        self.placed: asyncio.Future[Engine] | None = None
        self.queued = False
        self.paused = False


class Queue:
    """Places requests on the engines of `replicas`. `say` takes texts for people."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        settings: RouterSettings,
        counters: Counter[str],
        say: Callable[[str], None],
    ) -> None:
        self._replicas = replicas
        self._settings = settings
        self._counters = counters
        self._say = say
        self._waiting: list[Request] = []
        self._prefixes = PrefixMap(settings.prefix_blocks)
        self._given = 0
        self._below = True
        self._reached = False
        self._closed = False
        self._changes = asyncio.Event()

    def __len__(self) -> int:
        return len(self._waiting)

    def healthy(self) -> list[Engine]:
        return [r.engine for r in self._replicas if r.healthy and r.engine is not None]

    async def place(self, request: Request) -> Engine:
        """Wait until the request is given to an engine. Raises EngineLost, SamplerError when the router is closed."""
        request.placed = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, request, key=lambda r: r.ticket)
        self.dispatch()
        if not request.placed.done() and not request.paused and not request.queued:
            request.queued = True
            self._counters["queued"] += 1
        try:
            return await request.placed
        except asyncio.CancelledError:
            if request in self._waiting:
                self._waiting.remove(request)
            elif request.placed.done() and not request.placed.cancelled() and request.placed.exception() is None:
                self.leave(request)
            raise

    def leave(self, request: Request) -> None:
        """The request's engine has no more to do with it."""
        request.engine.running -= 1
        request.engine.load -= request.cost
        self.dispatch()

    def changed(self) -> None:
        """A replica has changed its state."""
        self._changes.set()
        self._changes = asyncio.Event()
        for replica in self._replicas:
            if not replica.healthy:
                self._prefixes.forget(replica.name)
        self.dispatch()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition on the replicas. Raises EngineLost, SamplerError when the router is closed."""
        while not condition():
            self.check()
            await self._changes.wait()
        self.check()

    async def floor(self) -> None:
        """Wait until enough engines are healthy."""
        await self.until(lambda: len(self.healthy()) >= self._settings.min_healthy)

    def close(self) -> None:
        self._closed = True
        self.changed()

    def dispatch(self) -> None:
        """Give every waiting request that an engine can take to one, in order."""
        hopeless = self._hopeless()
        if hopeless is not None:
            waiting, self._waiting = self._waiting, []
            for request in waiting:
                if not request.placed.done():
                    request.placed.set_exception(type(hopeless)(hopeless.cause, hopeless.remedy))
            return
        if self._paused():
            return
        placed = []
        for request in self._waiting:
            free = [e for e in self.healthy() if e.healthy and e.running < self._settings.max_in_flight]
            if not free:
                break
            if not request.placed.done() and (engine := self._engine(request, free)):
                self._give(request, engine)
                placed.append(request)
        for request in placed:
            self._waiting.remove(request)

    def _engine(self, request: Request, free: Sequence[Engine]) -> Engine | None:
        """The one that it goes to; None when it should rather wait for an engine that has not failed it yet."""
        untried = [e for e in free if e not in request.tried]
        if not untried:
            if any(e not in request.tried for e in self.healthy()):
                return None
            untried = free
        by_name = {e.name: e for e in untried}
        matched = self._prefixes.matched(request.blocks, by_name)
        options = [Option(e.name, e.load, matched[e.name], e.idle_since) for e in untried]
        return by_name[choose(options, request.cost, self._settings.slack).name]

    def _give(self, request: Request, engine: Engine) -> None:
        self._given += 1
        engine.idle_since = self._given
        engine.running += 1
        engine.load += request.cost
        self._prefixes.add(request.blocks, engine.name)
        request.engine = engine
        request.given = asyncio.get_running_loop().time()
        request.placed.set_result(engine)

    def _paused(self) -> bool:
        """Below the floor; says so when that begins and ends, and counts who waits for it."""
        healthy, floor = len(self.healthy()), self._settings.min_healthy
        below = healthy < floor
        if below != self._below:
            self._below = below
            if self._reached:
                state = "Requests wait until more are back" if below else "Requests go on"
                self._say(f"{healthy} of {len(self._replicas)} engines are healthy, at least {floor} must be. {state}.")
            self._reached = True
        if below:
            for request in self._waiting:
                if not request.paused:
                    request.paused = True
                    self._counters["waited"] += 1
        return below

    def check(self) -> None:
        """Raises EngineLost, or SamplerError when the router is closed."""
        if hopeless := self._hopeless():
            raise hopeless

    def _hopeless(self) -> SamplerError | None:
        """Why no request will ever be served again."""
        if self._closed:
            return SamplerError("The sampler was closed.", "Open a new one.")
        lost = [r for r in self._replicas if r.state == "lost"]
        left = len(self._replicas) - len(lost)
        if left >= self._settings.min_healthy:
            return None
        reasons = "; ".join(f"{r.name}: {r.fault}" for r in lost)
        return EngineLost(
            f"{left} of {len(self._replicas)} engines are left, at least {self._settings.min_healthy} must be. "
            f"Given up: {reasons}.",
            "Read the engines' logs, remove the cause, then resume the run; raise max_restarts if it has passed.",
        )
