"""A vLLM server at a URL as a teacher: its model gives the log-probabilities of tokens that policies have sampled."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.errors import LearnerError, RequestRefused, SamplerError, error_line
from cotune.integrations.models.vllm.client import VllmClient

log = logging.getLogger("cotune")

FIELD = "distill.teacher"
CHUNK = 4096
"""The number of tokens of the vocabulary that one request compares."""
PAUSE = 1.0
"""Seconds until a failed request is repeated. Each further pause is twice as long."""
IMPOSSIBLE = -9999.0
"""The log-probability that vLLM gives for a token with probability 0."""
NOT_OURS = "the answer is not about the tokens that were sent"


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Text(msgspec.Struct):
    prompt: str


class VllmTeacher:
    """A vLLM server as a `Teacher`. `logprobs` may be called from any thread that runs no event loop.

    A whole row is sent as token ids, and the answer has the log-probability of each token (`prompt_logprobs`). vLLM
    computes it at temperature 1, without grammars and biases, so rows that were drawn otherwise are not scored. It
    includes the logits of a padded vocabulary, but trained models give these almost no probability. A server that
    accepts adapters gets one row at a time: vLLM 0.28 on CPUs crashes if it scores two prompts at once with adapters.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        *,
        api_key: str | None = None,
        timeout: float = 120.0,
        concurrency: int = 16,
        retries: int = 2,
    ) -> None:
        """Connect to a server, and check that its model has the run's `tokenizer` and that it gives log-probabilities.

        A request fails after `timeout` seconds and is repeated `retries` times. At most `concurrency` requests run at
        once. Raises ConfigError if the server does not answer, is not a vLLM server or has another tokenizer, and
        UnsupportedVersion.
        """
        self._client = functools.partial(VllmClient, url, FIELD, api_key)
        self._timeout = timeout
        self._retries = retries
        self.concurrency = concurrency
        """The most requests that run at once."""
        self._model = ""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed_rows = 0
        """The number of rows without an answer since the last answer."""
        self._last_failure = ""
        """The latest reason why a row has no answer."""
        self._closed = False
        self._warned: set[str] = set()
        self.url = asyncio.run(self._check(tokenizer))

    @property
    def counters(self) -> Mapping[str, float]:
        """The counts of `requests`, `retried` ones, `timeouts` and `unscored` rows until now."""
        return dict(self._counts)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32] | None]:
        """See `Teacher.logprobs`. Raises LearnerError if the server no longer answers, or scores no row."""

        async def score_all() -> list[npt.NDArray[np.float32] | str]:
            """For each row, its scores or the reason why there are none."""
            limit = asyncio.Semaphore(self.concurrency)
            async with contextlib.aclosing(self._client()) as server:
                return await asyncio.gather(*(self._score_row(server, limit, row) for row in rows))

        with self._lock:  # otherwise each thread would make `concurrency` requests at once
            results = asyncio.run(score_all())
        faults: Counter[str] = Counter()
        scores: list[npt.NDArray[np.float32] | None] = []
        for result in results:
            if isinstance(result, str):
                faults[result] += 1
                scores.append(None)
            else:
                scores.append(result)
        self._counts["unscored"] += faults.total()
        if self._gone or faults.total() == len(rows):
            cause = "no longer answers" if self._gone else f"has scored none of {len(rows)} rows"
            reason = self._last_failure
            if not reason:
                reason, _ = faults.most_common(1)[0]
            raise LearnerError(
                f"The teacher {self.url} {cause}: {reason}.", "Correct that, then continue with --resume."
            )
        for fault in sorted(faults.keys() - self._warned):
            log.warning(
                "The teacher %s has not scored %d rows, which are left out: %s.", self.url, faults[fault], fault
            )
        self._warned |= faults.keys()
        return scores

    def close(self) -> None:
        """Make no further requests."""
        self._closed = True

    @property
    def _gone(self) -> bool:
        return self._closed or self._failed_rows >= self.concurrency

    async def _score_row(
        self, server: VllmClient, limit: asyncio.Semaphore, row: TrainRow
    ) -> npt.NDArray[np.float32] | str:
        """The log-probability of each token of the row's response, [response], or the reason why there are none.

        `limit` bounds the requests that run at once.
        """
        if row.temperature != 1.0 or row.grammar or row.logit_bias:
            return "drawn at another temperature than 1, under a grammar or with biases, which a server does not score"
        if row.images:
            return "drawn with images, which a server is not sent"
        ids = [*row.prompt_ids, *row.response_ids]
        async with limit:
            logprobs = await self._ask_with_retries(server, ids)
        if isinstance(logprobs, str):
            return logprobs  # the reason of the failure
        scores = []
        for position in range(len(row.prompt_ids), len(ids)):
            entry = (logprobs[position] or {}).get(str(ids[position]))
            if entry is None:
                return NOT_OURS
            scores.append(entry.logprob)
        if min(scores) <= IMPOSSIBLE:
            return "the teacher gives a token no probability at all"
        return np.array(scores, np.float32)

    async def _ask_with_retries(self, server: VllmClient, ids: Sequence[int]) -> list[dict[str, _Logprob] | None] | str:
        """The log-probabilities of these tokens, or the reason why there are none after all retries."""
        failure = ""
        for attempt in range(self._retries + 1):
            if self._gone:
                return self._last_failure or "it was closed"
            if attempt:
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
                self._counts["retried"] += 1
            try:
                logprobs = await self._prompt_logprobs(server, ids)
            except SamplerError as error:
                failure = error_line(error)
                if isinstance(error, RequestRefused) or isinstance(error.__cause__, msgspec.DecodeError):
                    self._failed_rows = 0  # the server has answered, and would repeat the same answer
                    return failure
                if "Timeout" in type(error.__cause__).__name__:  # of httpx
                    self._counts["timeouts"] += 1
            else:
                self._failed_rows = 0
                return logprobs
        self._failed_rows += 1
        self._last_failure = failure
        return failure

    async def _prompt_logprobs(
        self, server: VllmClient, ids: Sequence[int], best: int = 0
    ) -> list[dict[str, _Logprob] | None]:
        """The log-probabilities of each token except the first, and of the `best` likeliest tokens at its place.
        Raises SamplerError."""
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 1, "prompt_logprobs": best}
        self._counts["requests"] += 1
        answer: _Answer = await server.post("/v1/completions", body, _Answer, seconds=self._timeout)
        if len(answer.choices) != 1 or len(answer.choices[0].prompt_logprobs) != len(ids):
            raise RequestRefused(NOT_OURS)
        return answer.choices[0].prompt_logprobs

    async def _check(self, tokenizer: Any) -> str:
        """Check the server and return its address. Raises ConfigError if it cannot score the samples of the run."""
        async with contextlib.aclosing(self._client()) as server:
            try:
                cards = await server.open()
                bases = [card.id for card in cards if card.parent is None]
                if not bases:
                    raise server.refused("serves no model", "Start it with: vllm serve MODEL")
                self._model = bases[0]
                # vLLM on CPUs crashes if it scores two prompts at once with adapters.
                has_adapters = len(bases) < len(cards)
                if has_adapters or await server.takes_adapters():
                    self.concurrency = 1
                await self._check_tokenizer(server, tokenizer)
                logprobs = await self._prompt_logprobs(server, [0, 1, 0], best=1)  # of any three tokens
            except SamplerError as error:
                remedy = "Check that it is running, and read its log."
                raise server.refused(f"cannot score tokens ({error_line(error)})", remedy) from None
            # The likeliest of n tokens has a log-probability between -log n and 0, unless the server gives logits.
            lowest = -math.log(len(tokenizer)) - 1.0
            likeliest = [max(entry.logprob for entry in entries.values()) for entries in logprobs if entries]
            if not all(lowest <= logprob <= 1e-3 for logprob in likeliest):
                remedy = "Start it with --logprobs-mode raw_logprobs, which is vLLM's default."
                raise server.refused("does not give log-probabilities", remedy)
            return server.url

    async def _check_tokenizer(self, server: VllmClient, tokenizer: Any) -> None:
        """Raises ConfigError if the server decodes a token id differently from `tokenizer`."""
        for first in range(0, len(tokenizer), CHUNK):
            ids = list(range(first, min(first + CHUNK, len(tokenizer))))
            body = {"model": self._model, "tokens": ids}
            text: _Text = await server.post("/detokenize", body, _Text, seconds=self._timeout)
            if text.prompt != tokenizer.decode(ids):
                raise server.refused(
                    f"has another tokenizer than the run: {self._model} reads the tokens {ids[0]} to {ids[-1]} "
                    "differently",
                    "Serve a larger model of the same family.",
                )
