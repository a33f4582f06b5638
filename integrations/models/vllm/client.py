"""A client of a running vLLM server, by its address."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.errors import ConfigError, RequestRefused, SamplerError, error_line
from cotune.integrations.versions import check

CONNECT_SECONDS = 10.0
IDLE_SECONDS = 2.0
"""How long a connection may be idle before it is given up. vLLM closes idle connections after 5 s, and a request that
arrives at that moment is lost (ReadError)."""
CONTROL_SECONDS = 60.0
"""How long the server may take for any request except sampling."""


class Card(msgspec.Struct):
    """One model of the server: the base or an adapter. Only adapters have a `parent`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[Card]


class _Version(msgspec.Struct):
    version: str


class VllmClient:
    """Requests to a vLLM server, from one event loop. Errors name `field`, the setting with the `url`."""

    def __init__(self, url: str, field: str, key: str | None) -> None:
        """A client of the vLLM server at `url`, with the API key `key`. `field` is the setting that errors name."""
        import httpx

        self.url = url.rstrip("/").removesuffix("/v1")
        self._field = field
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            limits=httpx.Limits(max_keepalive_connections=256, keepalive_expiry=IDLE_SECONDS),
        )

    def refused(self, fault: str, remedy: str) -> ConfigError:
        """Make the error for a server that cannot be used."""
        return ConfigError(self._field, self.url, fault, remedy)

    async def open(self) -> list[Card]:
        """Check the server and list its models. Raises ConfigError if it is not a vLLM server, UnsupportedVersion,
        SamplerError."""
        check("vllm", (await self._get("/version", _Version)).version)
        return await self.models()

    async def models(self) -> list[Card]:
        """List the models of the server. Raises ConfigError, SamplerError."""
        models: _Models = await self._get("/v1/models", _Models)
        return models.data

    async def takes_adapters(self) -> bool:
        """Whether the server can load adapters while it runs. Raises SamplerError."""
        return bool((await self._request("GET", "/v1/load_lora_adapter")).status_code != 404)

    async def post(
        self, path: str, body: Mapping[str, Any], kind: type[Any] | None = None, *, seconds: float | None
    ) -> Any:
        """Send a request and decode its answer as `kind`; without a kind, return its bytes. Raises RequestRefused if
        the request is wrong, and SamplerError if a repetition may succeed or the answer has another form."""
        answer = await self._request("POST", path, seconds, body)
        if not answer.is_success:
            cause = f"{self.url}{path} answered {answer.status_code}: {_message(answer.content)}"
            if answer.status_code < 500 and answer.status_code not in (408, 429):
                raise RequestRefused(cause, "Correct the request, or how the server was started.")
            raise SamplerError(cause, "Read the server's log.")
        if kind is None:
            return answer.content
        try:
            return msgspec.json.decode(answer.content, type=kind)
        except msgspec.DecodeError as error:
            remedy = "Check which server, or proxy, is at this address, and read its log."
            raise SamplerError(f"{self.url}{path} answered in another form than vLLM: {error}.", remedy) from error

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _get(self, path: str, kind: type[Any]) -> Any:
        """Read a resource of the server. Raises ConfigError if the server refuses the key or is not vLLM."""
        answer = await self._request("GET", path)
        if answer.status_code in (401, 403):
            raise self.refused(f"needs a key ({path} answered {answer.status_code})", "Put it into VLLM_API_KEY.")
        if answer.is_success:
            # Another server may answer in another form, which is refused below.
            with contextlib.suppress(msgspec.DecodeError):
                return msgspec.json.decode(answer.content, type=kind)
        fault = f"is not a vLLM server ({path} answered {answer.status_code}: {_message(answer.content)})"
        raise self.refused(fault, "Name the address of a vLLM server.")

    async def _request(self, method: str, path: str, seconds: float | None = CONTROL_SECONDS, body: Any = None) -> Any:
        """Send a request. Raises SamplerError if the server does not answer in time."""
        import httpx

        try:
            return await self._http.request(
                method, path, json=body, timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS)
            )
        except httpx.HTTPError as error:
            remedy = "Check that the server is running."
            raise SamplerError(f"{self.url} does not answer: {error_line(error)}.", remedy) from error


def _message(content: bytes) -> str:
    """The message of an error response, in any of the forms that vLLM uses."""
    try:
        body = msgspec.json.decode(content)
        return str(body.get("error", body).get("message", body))
    except (msgspec.DecodeError, AttributeError):
        return content[:200].decode(errors="replace")
