"""Engines that break on command, and an event loop whose clock jumps instead of waiting."""

from __future__ import annotations

import asyncio
import gc
import math
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import numpy as np

from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.models.engine_sampler import BY_FILES
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, Weights, fingerprint

BASE_MARK = 7


class JumpingSelector(selectors.DefaultSelector):
    """Does not wait: what is asked for is added to the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise AssertionError("Everybody waits for something that nobody will do.")
            self.now += timeout
        return ready


class JumpingLoop(asyncio.SelectorEventLoop):
    """Hours pass in milliseconds, in the same order each time."""

    def __init__(self) -> None:
        self.selector = JumpingSelector()
        super().__init__(self.selector)

    def time(self) -> float:
        return self.selector.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        done = self.create_future()
        done.set_result(func(*args))
        return done


def jump(work: Coroutine[Any, Any, Any]) -> Any:
    """Run in a loop with a clock that jumps; nothing may be left running in it."""

    unseen: list[Any] = []

    async def alone() -> Any:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
        result = await work
        await asyncio.sleep(10_000)
        gc.collect()
        left = {task for task in asyncio.all_tasks() - {asyncio.current_task()} if not _foreign(task)}
        assert not left, left
        return result

    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        result = runner.run(alone())
    assert not unseen, unseen
    return result


def _foreign(task: asyncio.Task[Any]) -> bool:
    """HTTP clients that other tests left to the garbage collector close in whatever loop runs."""
    return "httpx" in task.get_coro().cr_code.co_filename


def weights_of(mark: int) -> dict[str, np.ndarray]:
    """Weights by which a fake engine's answers are known."""
    return {"w": np.array([mark], np.float32)}


class FakeEngine:
    """A sampler whose first token is the mark of the weights that it answers with.

    `mode` is "well", "dead", "hung" (answers nothing at all), "stuck" (answers no request), "crash" (a foreign
    exception for each request), "refuses" (a SamplerError for each request), "cancels" or the name of a kind of
    garbage. `pace` is seconds per request.
    """

    def __init__(self, site: Site, name: str) -> None:
        self.site = site
        self.name = name
        self.mode = "well"
        self.pace = site.pace
        self.has: dict[str, tuple[str, int]] = {}
        self.retired: set[str] = set()
        self.running = 0
        self.peak = 0
        self.served: list[PolicyRef] = []
        self.cancelled = 0
        self.closed = False
        self.asleep = False
        self.by_files = 0
        self._end = asyncio.Event()

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self._check()
        if len(prompt_token_ids) > self.site.max_model_len:
            raise RequestRefused(f"The prompt has {len(prompt_token_ids)} tokens.", "Shorten it.")
        key = str(policy)
        if key in self.retired or (key not in self.has and policy.version):
            raise RequestRefused(f"{policy} is not served.", "Publish it.")
        mark = self.has[key][1] if key in self.has else BASE_MARK
        self.served.append(policy)
        self.running += 1
        self.peak = max(self.peak, self.running)
        try:
            await self._work()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return self._answer(mark, n, params.max_tokens)

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        await self._control()
        key, digest = str(policy), fingerprint(weights)
        if key in self.has and self.has[key][0] != digest:
            raise RequestRefused(f"{policy} was published before with other weights.", "Publish a new version.")
        if not all(np.isfinite(array).all() for array in weights.values()):
            raise RequestRefused(f"{policy} is not finite.", "Do not publish it.")
        if self.mode == "alters":
            digest = "f" * 64
        if self.site.one_version:
            self.has.clear()
        await asyncio.sleep(self.site.publish_seconds)
        self.has[key] = (digest, int(weights["w"][0]))
        self.retired.discard(key)
        return digest

    async def retire(self, policy: PolicyRef) -> None:
        await self._control()
        if str(policy) not in self.has:
            if self.site.one_version:
                return
            raise RequestRefused(f"{policy} is not served, so it cannot be retired.", "")
        del self.has[str(policy)]
        self.retired.add(str(policy))

    async def info(self) -> SamplerInfo:
        await self._control()
        served = {key: digest for key, (digest, _) in self.has.items()}
        counters = {BY_FILES: self.by_files}
        return SamplerInfo(name="fake", max_model_len=self.site.max_model_len, served=served, counters=counters)

    async def sleep(self, keep_weights: bool = False) -> None:
        await self._control()
        self.asleep = True

    async def wake(self) -> None:
        await self._control()
        if self.mode == "alters":
            raise SamplerError("It woke with other weights.", "")
        self.asleep = False

    async def aclose(self) -> None:
        self.closed = True
        self._end.set()
        if self.mode == "hung":
            await asyncio.sleep(3.0)

    def break_down(self, mode: str) -> None:
        self.mode = mode
        if mode in ("dead", "crash"):
            self._end.set()

    def _check(self) -> None:
        if self.closed or self.mode == "dead":
            raise SamplerError("The engine is gone.", "")

    async def _control(self) -> None:
        self._check()
        if self.mode == "hung":
            await asyncio.Event().wait()
        await asyncio.sleep(0.001)
        self._check()

    async def _work(self) -> None:
        if self.mode == "cancels":
            raise asyncio.CancelledError
        if self.mode == "refuses":
            raise SamplerError("I would rather not.", "")
        pace = math.inf if self.mode in ("hung", "stuck") else self.pace
        if pace == math.inf:
            await self._end.wait()
        else:
            ending = asyncio.ensure_future(self._end.wait())
            try:
                await asyncio.wait({ending}, timeout=pace)
            finally:
                ending.cancel()
        self._check()
        if self.mode == "crash":
            raise ZeroDivisionError("inside the engine")
        if self.mode == "hung":
            await asyncio.Event().wait()

    def _answer(self, mark: int, n: int, most: int) -> list[Completion]:
        length = max(1, min(4, most))
        ids, logprobs = (mark, *range(1, length)), (-0.5,) * length
        broken: Mapping[str, Completion] = {
            "empty": Completion((), (), "stop"),
            "uneven": Completion(ids, logprobs[1:], "stop"),
            "nan": Completion(ids, (math.nan, *logprobs[1:]), "stop"),
            "infinite": Completion(ids, (-math.inf, *logprobs[1:]), "stop"),
            "positive": Completion(ids, (0.5, *logprobs[1:]), "stop"),
            "long": Completion(ids + (1,) * most, logprobs + (-0.1,) * most, "length"),
            "outside": Completion((1_000_000, *ids[1:]), logprobs, "stop"),
            "reason": Completion(ids, logprobs, "because"),
        }
        if self.mode == "none":
            return []
        good = Completion(ids, logprobs, "length")
        return [good] * (n - 1) + [broken.get(self.mode, good)]


GARBAGE = ("empty", "uneven", "nan", "infinite", "positive", "long", "outside", "reason", "none")


class Site:
    """Where engines are made. `engines[i]` are replica i's, the current one last."""

    def __init__(self, count: int, pace: float = 1.0, max_model_len: int = 512) -> None:
        self.count = count
        self.pace = pace
        self.max_model_len = max_model_len
        self.start_seconds = 5.0
        self.publish_seconds = 0.0
        self.one_version = False
        """Engines hold the weights of the version published last, as vLLM does with full weights."""
        self.failing_starts: dict[int, int] = {}
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None
        self.engines: list[list[FakeEngine]] = [[] for _ in range(count)]

    def makes(self) -> list[Callable[[], Coroutine[Any, Any, FakeEngine]]]:
        return [self._make(index) for index in range(self.count)]

    def now(self, index: int) -> FakeEngine:
        return self.engines[index][-1]

    def all(self) -> list[FakeEngine]:
        return [engine for engines in self.engines for engine in engines]

    def _make(self, index: int) -> Callable[[], Coroutine[Any, Any, FakeEngine]]:
        async def make() -> FakeEngine:
            await asyncio.sleep(self.start_seconds)
            if self.failing_starts.get(index, 0) > 0:
                self.failing_starts[index] -= 1
                raise SamplerError("no memory", "")
            engine = FakeEngine(self, f"engine-{index}")
            self.engines[index].append(engine)
            self.prepare(engine)
            return engine

        return make
