"""A running vLLM server at a URL, as a `Sampler`."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cotune.errors import ConfigError, RequestRefused, SamplerError
from cotune.integrations.models.engine_sampler import LoopSampler
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.folder.meta_model import ModelSkeleton
from cotune.integrations.models.served_versions import BASE, Version
from cotune.integrations.models.vllm.adapters import SharedFolders, read_weights, write_shared
from cotune.integrations.models.vllm.client import CONTROL_SECONDS, Card, VllmClient
from cotune.integrations.models.vllm.requests import completion, http_params, likeliest
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams, TopTokens, Weights, fingerprint

log = logging.getLogger(__name__)

MOST_BIASES = 1024
"""The most entries of `logit_bias` that every model runner of vLLM accepts (MAX_NUM_LOGIT_BIAS_TOKENS in vLLM)."""


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


class VllmHttpSampler(LoopSampler):
    """A vLLM server as a `Sampler`, made by `open`. When it is closed, it unloads its adapters from the server, which
    continues to run."""

    name = "vllm-url"

    def __init__(self, client: VllmClient, skeleton: ModelSkeleton, folder: Path | None) -> None:
        """A sampler for a vLLM server. `folder` is where the server reads adapters from; by default a temporary folder
        of this machine.
        """
        super().__init__()
        self._client = client
        self._skeleton = skeleton
        self._folders = SharedFolders(folder)
        self._adapter_numbers = itertools.count(1)
        # Other users of the server and earlier runs must not have the same names of adapters.
        self._mark = os.urandom(3).hex()
        # Models with a padded vocabulary have logits for these ids, but no tokens.
        self._padding = range(skeleton.token_ids, skeleton.logits)
        self._base_name = ""

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
        """Connect to a server of `model` (a folder or Hub id), and check that it is suitable for training.

        The server must accept adapters of `max_lora_rank`. The adapters are written to `folder`, which the server must
        be able to read. Its default suits a server on this machine: shared memory or the temporary folder. Raises
        ConfigError if it is not a vLLM server, serves another model or was started without an option that training
        needs, UnsupportedVersion, and SamplerError if the server does not answer.
        """
        skeleton = await asyncio.to_thread(ModelSkeleton, model)
        sampler = cls(VllmClient(url, "url", api_key), skeleton, Path(folder) if folder else None)
        return await sampler._open_or_close(sampler._open(str(model), max_lora_rank))

    async def _open(self, model: str, rank: int) -> None:
        """Check that the server has the run's model, takes adapters, and reports the probabilities that it sampled
        from.
        """
        client = self._client
        # The server lists its base model under one or several names, and its adapters, which have a parent.
        cards = [card for card in await client.open() if card.parent is None]
        base = next((card for card in cards if card.max_model_len), None)
        if base is None or not _describes_model(model, base):
            raise ConfigError(
                "model",
                model,
                f"is not what {client.url} serves: {[card.id for card in cards]}",
                "Serve the run's model, or name it with --served-model-name.",
            )
        self.max_model_len = base.max_model_len or 0
        if not await client.takes_adapters():
            raise client.refused(
                "does not take adapters while it runs",
                "Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=True and --enable-lora.",
            )
        if len(self._padding) > MOST_BIASES:
            log.warning(
                "%s can draw the ids %d to %d, which stand for no token: they are too many to forbid by request. "
                "An answer with one fails. Engines that the run starts itself never draw them.",
                client.url,
                self._padding.start,
                self._padding.stop - 1,
            )
        await self._load_base(rank)
        # With top_k = 1, the sampled token has log-probability 0, unless the server reports it before truncation.
        likeliest_token = SamplingParams(temperature=0.5, top_k=1, max_tokens=1)
        (completion,) = await self._generate([1, 2], 1, likeliest_token, BASE, None)
        if abs(completion.logprobs[0]) > 1e-3:
            raise client.refused(
                "does not report the log-probabilities it sampled from",
                "Start it with --logprobs-mode processed_logprobs.",
            )

    async def _load_base(self, rank: int) -> None:
        """Load an adapter that changes nothing. Requests of the base name it instead of no adapter.

        The reason is that on CPUs, vLLM applies the adapter in its last slot to requests without an adapter, and all
        slots of a server can be in use.
        """
        name = f"base#0-{self._mark}"
        lora = LoraSpec(rank=rank, alpha=float(rank))
        empty = self._skeleton.empty_adapter(rank)
        folder = await asyncio.to_thread(write_shared, self._folders, name, BASE, empty, lora)
        try:
            await self._load_adapter(name, folder)
        except SamplerError as error:
            raise self._client.refused(
                f"does not take adapters of rank {rank} ({error.cause})",
                f"Start it with --enable-lora and a --max-lora-rank of at least {rank}.",
            ) from error
        self._base_name = name

    async def _generate(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef, target: Any
    ) -> list[Completion]:
        """Sample from the server. If the vocabulary is padded with a few ids that stand for no token, biases forbid
        them.
        """
        forbidden = self._padding if len(self._padding) <= MOST_BIASES else ()
        body = {"model": target or self._base_name, "prompt": list(prompt), **http_params(n, params, forbidden)}
        answer: _Answer = await self._client.post("/v1/completions", body, _Answer, seconds=None)
        choices = sorted(answer.choices, key=lambda choice: choice.index)
        # There may be too many of these ids to forbid, and speculative decoding ignores biases.
        without_token = {id for choice in choices for id in choice.token_ids if id in self._padding}
        if without_token:
            last = self._padding.start - 1
            raise SamplerError(
                f"{self._client.url} drew the token {min(without_token)}; the tokenizer ends at {last}.",
                'Ask again, or let the run start the engine, with engine = "vllm".',
            )
        return [
            completion(
                c.token_ids,
                c.logprobs.token_logprobs,
                c.finish_reason,
                _likeliest_tokens(c.logprobs, params.top_logprobs),
            )
            for c in choices
        ]

    async def _load(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None) -> Version:
        """Load an adapter into the server, and check that the server lists it. Raises RequestRefused for full weights,
        SamplerError for a server that does not take the adapter.
        """
        self._skeleton.check(policy, weights, lora)
        if lora is None:
            raise RequestRefused(
                f"{policy} has full weights; a vLLM server by URL takes adapters only.",
                "Train adapters, or let the run open the engines itself.",
            )
        name = f"{policy}#{next(self._adapter_numbers)}-{self._mark}"
        folder = await asyncio.to_thread(write_shared, self._folders, name, policy, weights, lora)
        try:
            await self._load_adapter(name, folder)
            if not any(card.id == name and card.root == str(folder) for card in await self._client.models()):
                cause = f"{self._client.url} does not list {name} after it was loaded."
                raise SamplerError(cause, "Read the server's log.")
            return Version(policy, fingerprint(await asyncio.to_thread(read_weights, folder)), name)
        except BaseException:
            self._folders.remove(name)
            raise

    async def _unload(self, version: Version) -> None:
        await self._unload_adapter(version.target)
        self._folders.remove(version.target)

    async def _load_adapter(self, name: str, folder: Path) -> None:
        body = {"lora_name": name, "lora_path": str(folder)}
        await self._client.post("/v1/load_lora_adapter", body, seconds=CONTROL_SECONDS)

    async def _unload_adapter(self, name: str) -> None:
        await self._client.post("/v1/unload_lora_adapter", {"lora_name": name}, seconds=CONTROL_SECONDS)

    async def _info(self) -> SamplerInfo:
        await self._client.models()
        return await super()._info()

    async def _close(self) -> None:
        """Take all adapters of this run out of the server, which others may use. One that the server does not release
        is logged.
        """
        base = [self._base_name] if self._base_name else []
        for name in [*base, *(version.target for version in self._versions.all())]:
            try:
                await self._unload_adapter(name)
            except SamplerError as error:
                log.warning("%s is left in the server: %s", name, error)
        await self._client.aclose()
        self._folders.close()


def _describes_model(model: str, card: Card) -> bool:
    """Whether a card describes the run's model: it has the same name, or the same folder on this machine."""
    return model in (card.id, card.root) or Path(card.root or "").resolve() == locate_model(model)


async def find_servers(urls: Sequence[str], models: Sequence[str], api_key: str | None) -> dict[str, str]:
    """Find the address of the server of each base model, by the servers' lists of models.

    Raises ConfigError if a model has no server, and the errors of `VllmHttpSampler.open`.
    """
    served: dict[str, list[Card]] = {}
    for url in urls:
        client = VllmClient(url, "engine", api_key)
        try:
            served[url] = [card for card in await client.open() if card.parent is None]
        finally:
            await client.aclose()
    addresses: dict[str, str] = {}
    for model in models:
        for url, cards in served.items():
            if any(_describes_model(model, card) for card in cards):
                addresses[model] = url
        if model not in addresses:
            lists = [f"{url} serves {', '.join(card.id for card in cards)}" for url, cards in served.items()]
            fault = f"names no server of the base model {model}: {'; '.join(lists)}"
            remedy = "Serve it, under its folder's path or by --served-model-name."
            raise ConfigError("engine", ", ".join(urls), fault, remedy)
    return addresses


def _likeliest_tokens(logprobs: _Logprobs, most: int) -> list[TopTokens]:
    """The `most` likeliest tokens at each position of a reply; empty if `most` is 0."""
    if not most:
        return []
    top: list[TopTokens] = []
    for logprob_of_name in logprobs.top_logprobs or ():
        pairs = []
        for name, logprob in (logprob_of_name or {}).items():
            id = int(name.removeprefix("token_id:"))
            pairs.append((id, logprob))
        top.append(likeliest(pairs, most))
    return top
