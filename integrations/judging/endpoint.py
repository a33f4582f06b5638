"""Requests of a judge to an OpenAI-compatible endpoint, within its budget."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cotune.errors import JudgeError, check_bounds
from cotune.records.ids import canonical
from cotune.records.prices import money
from cotune.storage.judge_ledger import Ledger

if TYPE_CHECKING:
    import openai

_PAUSE = 1.0
"""Seconds before a request that failed is made again."""


class TransientError(Exception):
    """An error that may not happen again: a time-out, a lost connection, an error of the server itself."""


class JudgeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Further settings of a `cotune.Judge`. Raises ConfigError for a bound of 0."""

    name: str = "judge"
    """The name of the reward."""
    passes: int = 1
    """Requests per group: the second shows the siblings in reversed order, and so on in pairs; rewards are their
    mean."""
    seed: int = 0
    """Seed of the order in which siblings are shown."""
    max_calls: int | None = None
    """Most requests of a run."""
    concurrency: int = 8
    """Most requests at once, in each process."""
    timeout: float = 60.0
    """Seconds until a request counts as failed."""
    max_tokens: int = 1024
    """Most tokens of an answer."""
    params: Mapping[str, Any] = {}
    """Further parameters of the request, such as `reasoning_effort`, or a `temperature` other than 0."""
    reason: bool = True
    """Whether the judge gives a reason before it ranks, which helps most models and costs a sentence."""
    structured: bool = True
    """Whether to ask for a JSON schema (`response_format`); some endpoints do not support it."""
    folder: str | Path | None = None
    """Where answers and costs are kept, to share them between runs; without it the run's own folder, or the judge's
    memory outside a run."""

    def __post_init__(self) -> None:
        check_bounds(self, "passes", "max_calls", "concurrency", "max_tokens", least=1, table="Judge.settings.")
        check_bounds(self, "timeout", table="Judge.settings.")


class Endpoint:
    """Sends a judge's requests; usable from several event loops, one after the other or at once."""

    def __init__(
        self,
        judge: str,
        name: str,
        base_url: str | None,
        api_key: str | None,
        price: tuple[float, float],
        max_cost: float | None,
        settings: JudgeSettings,
    ) -> None:
        """The endpoint of a model that judges.

        Args:
            judge: key under which costs and answers are counted.
            name: the judge in messages.
            price: price of a million prompt tokens, and of a million completion tokens.
            max_cost: most that the requests of a run may cost.
        """
        self._judge = judge
        self._name = name
        self._base_url = base_url
        self._api_key = api_key
        self._price = price
        self._max_calls = settings.max_calls
        self._max_cost = max_cost
        self._concurrency = settings.concurrency
        self._timeout = settings.timeout
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopClient] = weakref.WeakKeyDictionary()

    async def ask(self, body: Mapping[str, Any], ledger: Ledger) -> str:
        """Send a chat request to the judge's model, and return the text of its answer.

        At most `concurrency` requests are sent at once, and each reserves its cost before it is sent. Raises
        TransientError if another attempt may succeed, otherwise JudgeError.
        """
        loop_client = self._client_of_loop()
        async with loop_client.gate:
            reservation = await self._reserve(body, ledger, loop_client)
            with loop_client.counting_request():
                return await self._send_request(loop_client.client, body, ledger, reservation)

    async def _reserve(self, body: Mapping[str, Any], ledger: Ledger, loop_client: _LoopClient) -> int:
        """Reserve the highest possible cost of a request in the ledger, and return the number of the reservation.

        If this cost would exceed the cap, it waits for requests in progress, which may cost less than was reserved for
        them. Raises JudgeError for a request over the cap.
        """
        max_tokens = body.get("max_completion_tokens") or body["max_tokens"]
        # A token has at least one byte, so the prompt has at most as many tokens as bytes.
        most_cost = money(self._price, len(canonical(body)), int(max_tokens))
        while True:
            result = ledger.reserve(self._judge, most_cost, max_calls=self._max_calls, max_cost=self._max_cost)
            if isinstance(result, int):
                return result
            exceeded_cap = result
            if exceeded_cap == "max_cost" and loop_client.open_requests:
                await loop_client.request_ended.wait()
                continue
            ledger.count(self._judge, "over_budget")
            cap = self._max_cost if exceeded_cap == "max_cost" else self._max_calls
            raise JudgeError(
                f"{self._name} has used its budget: another request would exceed {exceeded_cap} = {cap}.",
                f"Raise {exceeded_cap} of this cotune.Judge, and continue with --resume.",
            )

    async def _send_request(
        self, client: openai.AsyncOpenAI, body: Mapping[str, Any], ledger: Ledger, reservation: int
    ) -> str:
        """Send one request to the judge and replace its reserved cost in the ledger by the real one. Returns the
        answer's text.

        A request whose cost is unknown keeps the reserved cost. Raises TransientError if another attempt may succeed,
        JudgeError if the judge refuses the request for good.
        """
        import openai

        try:
            async with asyncio.timeout(self._timeout):
                reply = await client.chat.completions.create(**body)
        except (TimeoutError, openai.APITimeoutError):
            ledger.count(self._judge, "timeouts")
            raise TransientError(f"no answer within {self._timeout:g} s") from None
        except openai.APIStatusError as error:
            ledger.settle(reservation, prompt_tokens=0, completion_tokens=0, cost=0.0)
            ledger.count(self._judge, "refused")
            status = f"status {error.status_code}"
            if error.status_code in (408, 409, 429) or error.status_code >= 500:
                await asyncio.sleep(_PAUSE)
                raise TransientError(status) from None
            why = " ".join(error.message.split())[:200]
            raise JudgeError(
                f"{self._name} was refused: {status}: {why}.",
                "Check its model, base_url, api_key and params.",
            ) from None
        except openai.APIConnectionError as error:
            ledger.settle(reservation, prompt_tokens=0, completion_tokens=0, cost=0.0)
            ledger.count(self._judge, "unreachable")
            await asyncio.sleep(_PAUSE)
            raise TransientError(f"{client.base_url} cannot be reached ({error.__cause__ or error})") from None
        except (openai.OpenAIError, ValueError, TypeError) as error:
            raise TransientError(f"the answer cannot be read ({type(error).__name__})") from None

        self._settle_cost(getattr(reply, "usage", None), ledger, reservation)
        try:
            return str(reply.choices[0].message.content or "")
        except (AttributeError, IndexError, TypeError):
            return ""  # an answer without a text cannot be used, so the judge is asked again

    def _settle_cost(self, usage: Any, ledger: Ledger, reservation: int) -> None:
        """Replace the reserved cost of an answered request by the real one, which follows from its tokens.

        `usage` has the numbers of tokens; None from endpoints that do not count them. The reserved cost then stays.
        """
        prompt_tokens = getattr(usage, "prompt_tokens", None)
        completion_tokens = getattr(usage, "completion_tokens", None)
        if isinstance(prompt_tokens, int) and isinstance(completion_tokens, int):
            cost = money(self._price, prompt_tokens, completion_tokens)
            ledger.settle(reservation, prompt_tokens, completion_tokens, cost)
        else:
            ledger.count(self._judge, "uncounted")

    def _client_of_loop(self) -> _LoopClient:
        """The client of this event loop, and its limit of concurrent requests: a client cannot be shared between
        loops.
        """
        loop = asyncio.get_running_loop()
        if loop in self._clients:
            return self._clients[loop]
        try:
            import openai
        except ModuleNotFoundError:
            raise JudgeError(f"{self._name} needs the package openai.", "pip install openai") from None
        try:
            client = openai.AsyncOpenAI(base_url=self._base_url, api_key=self._api_key, max_retries=0)
        except openai.OpenAIError as error:
            raise JudgeError(f"{self._name} has no client: {error}", "Pass api_key, or set OPENAI_API_KEY.") from None
        self._clients[loop] = _LoopClient(client, self._concurrency)
        return self._clients[loop]


class _LoopClient:
    """The client of one event loop, and the limit of its concurrent requests."""

    def __init__(self, client: openai.AsyncOpenAI, concurrency: int) -> None:
        self.client = client
        self.gate = asyncio.Semaphore(concurrency)
        self.request_ended = asyncio.Event()
        """The end of the next request that ends; replaced each time."""
        self.open_requests = 0

    @contextmanager
    def counting_request(self) -> Iterator[None]:
        """Count the block as an open request. Its end wakes the requests that wait because the cost reserved for open
        requests leaves too little of the budget.
        """
        self.open_requests += 1
        try:
            yield
        finally:
            self.open_requests -= 1
            # An event stays set, so requests that wait from now on get a new one.
            self.request_ended.set()
            self.request_ended = asyncio.Event()
