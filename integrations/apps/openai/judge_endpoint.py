"""Requests of a judge to an OpenAI-compatible endpoint, within its budget."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from cotune.errors import JudgeError, check_bounds
from cotune.records.ids import canonical
from cotune.storage.judge_ledger import Ledger

if TYPE_CHECKING:
    import openai

MILLION = 1_000_000
_PAUSE = 1.0
"""Seconds before a request that failed is made again."""


class Passing(Exception):
    """A fault that another try may not meet: a time-out, a lost connection, a server's own error."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a judge may cost. `price` is of a million prompt and completion tokens; `timeout` is in seconds."""

    max_calls: int | None
    max_cost: float | None
    price: tuple[float, float]
    concurrency: int
    timeout: float

    def __post_init__(self) -> None:
        check_bounds(self, "max_calls", "concurrency", least=1, table="Judge.")
        check_bounds(self, "max_cost", "timeout", table="Judge.")


class Endpoint:
    """Sends a judge's requests; usable from several event loops, one after the other or at once."""

    def __init__(self, judge: str, name: str, base_url: str | None, api_key: str | None, limits: Limits) -> None:
        self._judge = judge
        self._name = name
        self._base_url = base_url
        self._api_key = api_key
        self._limits = limits
        self._lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = weakref.WeakKeyDictionary()

    async def ask(self, body: Mapping[str, Any], ledger: Ledger) -> str:
        """The text of the answer to a chat request. Raises Passing, and JudgeError for what no other try would mend."""
        lane = self._lane()
        async with lane.gate:
            request = await self._reserve(body, ledger, lane)
            with lane.asking():
                try:
                    return await self._sent(lane.client, body, ledger, request)
                finally:
                    lane.settled.set()
                    lane.settled = asyncio.Event()

    async def _reserve(self, body: Mapping[str, Any], ledger: Ledger, lane: _Lane) -> int:
        """The number under which the request is entered. Where others that are under way may turn out cheaper than
        their most, it waits for them. Raises JudgeError where it would pass a cap."""
        limits = self._limits
        while True:
            most = self._most(body)
            entered = ledger.reserve(self._judge, most, max_calls=limits.max_calls, max_cost=limits.max_cost)
            if isinstance(entered, int):
                return entered
            if entered == "max_cost" and lane.open:
                await lane.settled.wait()
                continue
            ledger.count(self._judge, "over_budget")
            cap = getattr(limits, entered)
            raise JudgeError(
                f"{self._name} is over its budget: another request would pass {entered} = {cap}.",
                f"Raise {entered} of its cotune.Judge, and go on with --resume.",
            )

    def _most(self, body: Mapping[str, Any]) -> float:
        """The most that a request can cost: a token has at least one byte."""
        prompt, completion = self._limits.price
        written = body.get("max_completion_tokens") or body["max_tokens"]
        return (len(canonical(body)) * prompt + int(written) * completion) / MILLION

    async def _sent(self, client: openai.AsyncOpenAI, body: Mapping[str, Any], ledger: Ledger, request: int) -> str:
        import openai

        try:
            async with asyncio.timeout(self._limits.timeout):
                reply = await client.chat.completions.create(**body)
        except (TimeoutError, openai.APITimeoutError):  # what it cost is unknown: it stays at its most
            ledger.count(self._judge, "timeouts")
            raise Passing(f"no answer within {self._limits.timeout:g} s") from None
        except openai.APIStatusError as error:
            ledger.settle(request, 0, 0, 0.0)
            ledger.count(self._judge, "refused")
            said = f"status {error.status_code}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                await asyncio.sleep(_PAUSE)
                raise Passing(said) from None
            why = " ".join(error.message.split())[:200]
            raise JudgeError(
                f"{self._name} was refused: {said}: {why}.",
                "Check its model, base_url, api_key and params.",
            ) from None
        except openai.APIConnectionError as error:
            ledger.settle(request, 0, 0, 0.0)
            ledger.count(self._judge, "unreachable")
            await asyncio.sleep(_PAUSE)
            raise Passing(f"{client.base_url} cannot be reached ({error.__cause__ or error})") from None
        except (openai.OpenAIError, ValueError, TypeError) as error:
            raise Passing(f"the answer cannot be read ({type(error).__name__})") from None
        return self._read(reply, ledger, request)

    def _read(self, reply: Any, ledger: Ledger, request: int) -> str:
        usage = getattr(reply, "usage", None)
        prompt, written = getattr(usage, "prompt_tokens", None), getattr(usage, "completion_tokens", None)
        if isinstance(prompt, int) and isinstance(written, int):
            price = self._limits.price
            ledger.settle(request, prompt, written, (prompt * price[0] + written * price[1]) / MILLION)
        else:
            ledger.count(self._judge, "uncounted")
        try:
            return str(reply.choices[0].message.content or "")
        except (AttributeError, IndexError, TypeError):
            return ""

    def _lane(self) -> _Lane:
        loop = asyncio.get_running_loop()
        if loop not in self._lanes:
            self._lanes[loop] = _Lane(self._client(), self._limits.concurrency)
        return self._lanes[loop]

    def _client(self) -> openai.AsyncOpenAI:
        try:
            import openai
        except ModuleNotFoundError:
            raise JudgeError(f"{self._name} needs the package openai.", "pip install openai") from None
        try:
            return openai.AsyncOpenAI(base_url=self._base_url, api_key=self._api_key, max_retries=0)
        except openai.OpenAIError as error:
            raise JudgeError(f"{self._name} has no client: {error}", "Pass api_key, or set OPENAI_API_KEY.") from None


class _Lane:
    """What belongs to one event loop."""

    def __init__(self, client: openai.AsyncOpenAI, concurrency: int) -> None:
        self.client = client
        self.gate = asyncio.Semaphore(concurrency)
        self.settled = asyncio.Event()
        """Set, and replaced, whenever a request has ended."""
        self.open = 0

    @contextmanager
    def asking(self) -> Iterator[None]:
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1
