"""An external `vllm serve` behind the `Sampler` protocol, by its URL."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError, RequestRefused, SamplerError, error_line
from cotune.integrations.models.engine_sampler import LoopSampler
from cotune.integrations.models.folder.meta_model import ModelSkeleton
from cotune.integrations.models.served_versions import BASE, Version
from cotune.integrations.models.vllm.adapters import SharedFolders, read_weights, write_shared
from cotune.integrations.models.vllm.requests import completion, http_params, likeliest
from cotune.integrations.versions import check
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, TopTokens, Weights, fingerprint

log = logging.getLogger(__name__)

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""How long a connection may be idle and still be used: vLLM closes one after 5 s, and a request that arrives in that
moment is lost (ReadError)."""
CONTROL_SECONDS = 60.0
"""How long the server may take for anything but sampling."""


class _Logprobs(msgspec.Struct):
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str
    token_ids: list[int]
    logprobs: _Logprobs


class _Answer(msgspec.Struct):
    choices: list[_Choice]


class Card(msgspec.Struct):
    """One model of the server: the base, or an adapter (`parent` given)."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Models(msgspec.Struct):
    """What /v1/models answers."""

    data: list[Card]


class ServerVersion(msgspec.Struct):
    """What /version answers."""

    version: str


class VllmHttpSampler(LoopSampler):
    """A vLLM server as a `Sampler`; made by `open`. Closing it leaves the server running, without its adapters."""

    name = "vllm-url"

    def __init__(self, url: str, skeleton: ModelSkeleton, api_key: str | None, folder: Path | None) -> None:
        super().__init__()
        self._skeleton = skeleton
        self._url = url.rstrip("/").removesuffix("/v1")
        self._key = api_key
        self._folders = SharedFolders(folder)
        self._made = itertools.count(1)
        # Names that no other user of the server, and no earlier run, has taken.
        self._mark = os.urandom(3).hex()
        self._base_name = ""
        self._client: Any = None

    @classmethod
    async def open(
        cls,
        url: str,
        model: str | Path,
        *,
        api_key: str | None = None,
        max_lora_rank: int = 1,
        folder: str | Path | None = None,
    ) -> VllmHttpSampler:
        """Connect to a server that serves `model` (a folder or hub id), and check that it can be trained with.

        The server must take adapters of `max_lora_rank`. `folder` is where adapters are written, for the server to read
        (default: shared memory or the temporary folder, for a server on this machine). Raises ConfigError when the
        server is none of vLLM's, serves another model, or was started without what training needs, UnsupportedVersion,
        SamplerError when it does not answer.
        """
        skeleton = await asyncio.to_thread(ModelSkeleton, model)
        sampler = cls(url, skeleton, api_key, Path(folder) if folder else None)
        return await sampler._opened(sampler._open(str(model), max_lora_rank))

    async def _open(self, model: str, rank: int) -> None:
        import httpx

        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        self._client = httpx.AsyncClient(
            base_url=self._url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
        )
        check("vllm", (await self._get("/version", ServerVersion)).version)
        cards = (await self._get("/v1/models", Models)).data
        base = next((c for c in cards if c.parent is None and c.max_model_len), None)
        if base is None or not self._is(model, base):
            raise ConfigError(
                "model",
                model,
                f"must be what {self._url} serves: {[c.id for c in cards if c.parent is None]}",
                "Serve the run's model, or name it with --served-model-name.",
            )
        self.max_model_len = base.max_model_len
        await self._check_adapters()
        await self._load_base(rank)
        await self._check_logprobs()

    def _is(self, model: str, card: Card) -> bool:
        """Whether a card is the run's model: by name, or by the folder where both see it."""
        return model in (card.id, card.root) or Path(card.root or "").resolve() == self._skeleton.folder

    async def _check_adapters(self) -> None:
        answer = await self._request("GET", "/v1/load_lora_adapter")
        if answer.status_code == 404:
            raise ConfigError(
                "url",
                self._url,
                "must be a server that takes adapters while it runs",
                "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora.",
            )

    async def _load_base(self, rank: int) -> None:
        """The base is asked for as an adapter that changes nothing: on CPUs, vLLM gives requests without one whatever
        stands in its last slot, and a server's slots fill up."""
        name, lora = f"base#0-{self._mark}", LoraSpec(rank=rank, alpha=float(rank))
        empty = self._skeleton.empty_adapter(rank)
        folder = await asyncio.to_thread(write_shared, self._folders, name, BASE, empty, lora)
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, CONTROL_SECONDS)
        except SamplerError as error:
            raise ConfigError(
                "url",
                self._url,
                f"must be a server that takes adapters of rank {rank} ({error.cause})",
                f"Start it with --enable-lora and a --max-lora-rank of at least {rank}.",
            ) from error
        self._base_name = name

    async def _check_logprobs(self) -> None:
        """The one token that top_k = 1 leaves has log-probability 0, unless the server reports the model's own."""
        how = SamplingParams(temperature=0.5, top_k=1, max_tokens=1)
        (token,) = await self._generate([1, 2], 1, how, BASE, None)
        if abs(token.logprobs[0]) > 1e-3:
            raise ConfigError(
                "url",
                self._url,
                "must be a server that reports the log-probabilities it sampled from",
                "Start it with --logprobs-mode processed_logprobs.",
            )

    async def _generate(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef, target: Any
    ) -> list[Completion]:
        body = {"model": target or self._base_name, "prompt": list(prompt), **http_params(n, params)}
        answer = await self._post("/v1/completions", body)
        try:
            choices = msgspec.json.decode(answer, type=_Answer).choices
        except msgspec.DecodeError as error:
            raise SamplerError(f"{self._url} answered in another form: {error}.", "Read the server's log.") from None
        choices = sorted(choices, key=lambda choice: choice.index)
        return [
            completion(c.token_ids, c.logprobs.token_logprobs, c.finish_reason, _top(c.logprobs, params.top_logprobs))
            for c in choices
        ]

    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        self._skeleton.check(policy, weights, lora)
        if lora is None:
            raise RequestRefused(
                f"{policy} has full weights; a vLLM server by URL takes adapters only.",
                "Train adapters, or let the run open the engines itself.",
            )
        name = f"{policy}#{next(self._made)}-{self._mark}"
        folder = await asyncio.to_thread(write_shared, self._folders, name, policy, weights, lora)
        try:
            await self._post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(folder)}, CONTROL_SECONDS)
            if not any(c.id == name and c.root == str(folder) for c in (await self._get("/v1/models", Models)).data):
                raise SamplerError(f"{self._url} does not list {name} after it was loaded.", "Read the server's log.")
            return Version(policy, fingerprint(await asyncio.to_thread(read_weights, folder)), name)
        except BaseException:
            self._folders.remove(name)
            raise

    async def _unload(self, version: Version) -> None:
        await self._post("/v1/unload_lora_adapter", {"lora_name": version.target}, CONTROL_SECONDS)
        self._folders.remove(version.target)

    async def _info(self) -> SamplerInfo:
        await self._get("/v1/models", Models)
        return await super()._info()

    async def _close(self) -> None:
        if self._client is not None:
            base = [self._base_name] if self._base_name else []
            for name in [*base, *(version.target for version in self._versions.all())]:
                try:
                    await self._post("/v1/unload_lora_adapter", {"lora_name": name}, CONTROL_SECONDS)
                except SamplerError as error:
                    log.warning("%s is left in the server: %s", name, error)
            await self._client.aclose()
        self._folders.close()

    async def _get(self, path: str, kind: type[Any]) -> Any:
        import httpx

        answer = await self._request("GET", path, timeout=CONTROL_SECONDS)
        try:
            answer.raise_for_status()
            return msgspec.json.decode(answer.content, type=kind)
        except (httpx.HTTPStatusError, msgspec.DecodeError) as error:
            key = "Check the API key." if answer.status_code == 401 else "Name the address of a vLLM server."
            raise ConfigError("url", self._url, f"must be a vLLM server ({path}: {error_line(error)})", key) from None

    async def _post(self, path: str, body: Mapping[str, Any], seconds: float | None = None) -> bytes:
        answer = await self._request("POST", path, json=body, timeout=seconds)
        if answer.is_success:
            return answer.content
        cause = f"{self._url}{path} answered {answer.status_code}: {message_of(answer.content)}"
        if answer.status_code < 500 and answer.status_code not in (408, 429):
            raise RequestRefused(cause, "Correct the request, or how the server was started.")
        raise SamplerError(cause, "Read the server's log.")

    async def _request(self, method: str, path: str, **arguments: Any) -> Any:
        import httpx

        try:
            return await self._client.request(method, path, **arguments)
        except httpx.HTTPError as error:
            raise SamplerError(f"{self._url} does not answer: {error_line(error)}.", "Look whether it runs.") from error


def _top(told: _Logprobs, most: int) -> list[TopTokens]:
    """The likeliest tokens of each place, which are named "token_id:ID"."""
    places = told.top_logprobs if most else None
    return [
        likeliest(((int(name.partition(":")[2]), p) for name, p in (place or {}).items()), most)
        for place in places or ()
    ]


def message_of(content: bytes) -> str:
    """What an error response says, in whichever of vLLM's forms."""
    try:
        body = msgspec.json.decode(content)
        return str(body.get("error", body).get("message", body))
    except (msgspec.DecodeError, AttributeError):
        return content[:200].decode(errors="replace")
