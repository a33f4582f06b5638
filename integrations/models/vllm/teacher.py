"""A teacher behind a vLLM server, by its URL: what its model says of the tokens that policies have sampled."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, LearnerError, error_line
from cotune.integrations.models.vllm.http import (
    CONNECT_SECONDS,
    CONTROL_SECONDS,
    Models,
    ServerVersion,
    message_of,
)
from cotune.integrations.versions import check

log = logging.getLogger("cotune")

FIELD = "distill.teacher"
CHUNK = 4096
"""Tokens of the vocabulary that are compared in one request."""
PAUSE = 1.0
"""Seconds before a request that failed is made again; twice as long each time."""
IMPOSSIBLE = -9999.0
"""What vLLM gives for a token that has probability 0."""


class _Logprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class _Choice(msgspec.Struct):
    prompt_logprobs: list[dict[str, _Logprob] | None]


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class _Text(msgspec.Struct):
    prompt: str


class _Unscored(Exception):
    """Why a row has no scores; `passing` where another try may give them."""

    def __init__(self, cause: str, *, passing: bool = False) -> None:
        super().__init__(cause)
        self.passing = passing


class VllmTeacher:
    """A vLLM server as a `Teacher`. `logprobs` may be called from any thread.

    A row is sent whole, as token ids, and the answer has the log-probability of each (`prompt_logprobs`), which vLLM
    gives at temperature 1, without grammars and biases: rows that were drawn otherwise are not scored. A server that
    takes adapters is asked one row at a time: vLLM 0.28 on CPUs ends where it scores two prompts at once beside them.
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
        """Connect to a server, and prove that its model has the run's `tokenizer` and gives log-probabilities.

        A request fails after `timeout` seconds and is made again `retries` times; `concurrency` are under way at most.
        Raises ConfigError for a server that does not answer, is none of vLLM's, or has another tokenizer, and
        UnsupportedVersion.
        """
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout, connect=min(timeout, CONNECT_SECONDS)),
            limits=httpx.Limits(max_connections=concurrency),
        )
        self.concurrency = concurrency
        """Most requests at once."""
        self._retries = retries
        self._model = ""
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._failed = 0
        """Rows that got no answer since the last that got one; `_last` is why."""
        self._last = ""
        self._said: set[str] = set()
        try:
            self._check(tokenizer)
        except BaseException:
            self._client.close()
            raise
        self._threads = ThreadPoolExecutor(self.concurrency, thread_name_prefix="cotune-teacher")

    @property
    def counters(self) -> Mapping[str, float]:
        """`requests`, `retried`, `timeouts`, and rows that were not scored (`unscored`), so far."""
        with self._lock:
            return dict(self._counts)

    def logprobs(self, rows: Sequence[TrainRow]) -> list[npt.NDArray[np.float32] | None]:
        """As `Teacher.logprobs`. Raises LearnerError where the server has ceased to answer, or scores no row."""
        found = list(self._threads.map(self._scored, rows))
        faults = Counter(one for one in found if isinstance(one, str))
        self._count("unscored", faults.total())
        if self._gone or faults.total() == len(rows):
            cause = "answers no more" if self._gone else f"has scored none of {len(rows)} rows"
            why = self._last or faults.most_common(1)[0][0]
            raise LearnerError(f"The teacher {self.url} {cause}: {why}.", "Put that right, then go on with --resume.")
        for fault in sorted(faults.keys() - self._said):
            log.warning(
                "The teacher %s has not scored %d rows, which are left out: %s.", self.url, faults[fault], fault
            )
        self._said |= faults.keys()
        return [None if isinstance(one, str) else one for one in found]

    def close(self) -> None:
        """Make no more requests."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._client.close()

    @property
    def _gone(self) -> bool:
        return self._failed >= self.concurrency

    def _scored(self, row: TrainRow) -> npt.NDArray[np.float32] | str:
        """Scores of the row's response, or why there are none."""
        if row.temperature != 1.0 or row.grammar or row.logit_bias:
            return "drawn at another temperature than 1, under a grammar or with biases, which a server does not score"
        if row.images:
            return "drawn with images, which a server is not sent"
        if self._gone:
            return self._last
        try:
            ids, scores = (*row.prompt_ids, *row.response_ids), self._with_retries(row)
            found = [scores[at][str(ids[at])].logprob for at in range(len(row.prompt_ids), len(ids))]  # type: ignore[index]
        except _Unscored as error:
            self._failed, self._last = (self._failed + 1, str(error)) if error.passing else (0, "")
            return str(error)
        except (KeyError, IndexError, TypeError):
            return "the answer is not about the tokens that were sent"
        self._failed = 0
        if min(found) <= IMPOSSIBLE:
            return "the teacher gives a token no probability at all"
        return np.array(found, np.float32)

    def _with_retries(self, row: TrainRow) -> list[dict[str, _Logprob] | None]:
        for attempt in range(self._retries + 1):
            if attempt:
                time.sleep(PAUSE * 2 ** (attempt - 1))
                self._count("retried")
            try:
                return self._prompt_logprobs([*row.prompt_ids, *row.response_ids])
            except _Unscored as error:
                if not error.passing or attempt == self._retries:
                    raise
        raise AssertionError

    def _prompt_logprobs(self, ids: Sequence[int], best: int = 0) -> list[dict[str, _Logprob] | None]:
        """What the model says of each token but the first, and of the `best` in its place. Raises _Unscored."""
        body = {"model": self._model, "prompt": list(ids), "max_tokens": 1, "temperature": 1, "prompt_logprobs": best}
        self._count("requests")
        answer: _Answer = self._post("/v1/completions", body, _Answer)
        if len(answer.choices) != 1 or len(answer.choices[0].prompt_logprobs) != len(ids):
            raise _Unscored("the answer is not about the tokens that were sent")
        return answer.choices[0].prompt_logprobs

    def _post(self, path: str, body: Mapping[str, Any], kind: type[Any]) -> Any:
        import httpx

        try:
            answer = self._client.post(path, json=body)
        except httpx.TimeoutException:
            self._count("timeouts")
            raise _Unscored("no answer in time", passing=True) from None
        except httpx.HTTPError as error:
            raise _Unscored(f"no answer ({error_line(error)})", passing=True) from None
        if not answer.is_success:
            passing = answer.status_code >= 500 or answer.status_code in (408, 429)
            raise _Unscored(f"it answered {answer.status_code}: {message_of(answer.content)}", passing=passing)
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            raise _Unscored(f"it answered in another form ({error})") from None

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number

    def _check(self, tokenizer: Any) -> None:
        check("vllm", self._get("/version", ServerVersion).version)
        cards = self._get("/v1/models", Models).data
        served = [card.id for card in cards if card.parent is None]
        if not served:
            raise ConfigError(FIELD, self.url, "must be a vLLM server with a model", "Start it with: vllm serve MODEL")
        self._model = served[0]
        if len(served) < len(cards) or self._client.get("/v1/load_lora_adapter").status_code != 404:
            self.concurrency = 1
        try:
            self._check_tokenizer(tokenizer)
            self._check_scores(len(tokenizer))
        except _Unscored as error:
            raise ConfigError(
                FIELD, self.url, f"must be a server that scores tokens ({error})", "Read the server's log."
            ) from None

    def _check_tokenizer(self, tokenizer: Any) -> None:
        """Raises ConfigError unless the server reads every token id as `tokenizer` does."""
        for first in range(0, len(tokenizer), CHUNK):
            ids = list(range(first, min(first + CHUNK, len(tokenizer))))
            text = self._post("/detokenize", {"model": self._model, "tokens": ids}, _Text).prompt
            if text != tokenizer.decode(ids):
                raise ConfigError(
                    FIELD,
                    self.url,
                    f"must be a server whose model has the run's tokenizer; {self._model} reads the tokens "
                    f"{ids[0]} to {ids[-1]} otherwise",
                    "Serve a larger model of the same family.",
                )

    def _check_scores(self, vocabulary: int) -> None:
        """Raises ConfigError where what the server gives cannot be log-probabilities: that of the likeliest of n tokens
        is between -log n and 0."""
        places = [place for place in self._prompt_logprobs([0, 1, 0], best=1) if place]
        for likeliest in (max(one.logprob for one in place.values()) for place in places):
            if not -math.log(vocabulary) - 1.0 <= likeliest <= 1e-3:
                raise ConfigError(
                    FIELD,
                    self.url,
                    "must be a server that gives log-probabilities",
                    "Start it with --logprobs-mode raw_logprobs, which is vLLM's default.",
                )

    def _get(self, path: str, kind: type[Any]) -> Any:
        import httpx

        try:
            answer = self._client.get(path, timeout=CONTROL_SECONDS)
            if answer.is_success:
                return msgspec.json.decode(answer.content, type=kind)
        except (httpx.HTTPError, msgspec.DecodeError) as error:
            raise ConfigError(
                FIELD,
                self.url,
                f"must be the address of a vLLM server that runs ({error_line(error)})",
                "Look whether it runs.",
            ) from None
        key = answer.status_code in (401, 403)
        remedy = "Put its key into VLLM_API_KEY." if key else "Name the address of a vLLM server."
        raise ConfigError(FIELD, self.url, f"must be a vLLM server ({path} answered {answer.status_code})", remedy)
