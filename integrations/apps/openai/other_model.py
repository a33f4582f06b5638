"""Answers an application's calls with another model of a provider than the application asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from cotune.errors import ConfigError, RunError, error_text, install_extra
from cotune.integrations.apps.openai.completions import answer_of
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer

if TYPE_CHECKING:
    import openai

_NOT_ASKED = frozenset({"stream_options", "return_token_ids"})
"""Fields of a request that concern how its answer is delivered, which stays with the application."""


def check_address(option: str = "reference", value: str = "openai:") -> None:
    """Raise ConfigError, for the `value` of an `option`, unless the OpenAI SDK is installed and has a key."""
    if find_spec("openai") is None:
        raise ConfigError(option, value, "needs the OpenAI SDK", install_extra("prompts"))
    if not os.environ.get("OPENAI_API_KEY"):
        fault = "needs OPENAI_API_KEY, which is not set in the environment"
        raise ConfigError(option, value, fault, "A server without keys takes any: export OPENAI_API_KEY=none")


class OtherModel:
    """Sends the application's calls to another `model`, at the OpenAI-compatible address of the environment.

    Without a `model` each call goes to the model that it asks for. `temperature` replaces the temperature of the calls,
    and their seeds are left out.
    It may be open in one event loop only; close it with `aclose`.
    """

    def __init__(self, model: str | None, temperature: float | None = None) -> None:
        self.model = model
        self.temperature = temperature
        self._client: openai.AsyncOpenAI | None = None

    async def respond(self, call: LiveCall) -> Answer:
        """The answer of the other model to a call, with its edited prompts.

        Raises RunError, not SamplerError, if there is no answer: the failure is not the application's.
        """
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI()
        try:
            completion: Any = await self._client.post("/chat/completions", cast_to=object, body=self._body(call))
            return answer_of(completion)
        except (openai.OpenAIError, ValueError) as error:
            cause = f"{self.model or call.model} did not answer a call of role {call.role!r}: {error_text(error)[:300]}"
            raise RunError(
                cause, "Check the name of the model, its key, and whether it takes requests of this form."
            ) from error

    def _body(self, call: LiveCall) -> Mapping[str, Any]:
        """The body to send: the call with edited prompts, if it has any, under the name of the other model."""
        outgoing = call.rewritten or call
        body = {name: value for name, value in outgoing.params.items() if name not in _NOT_ASKED}
        body |= {"model": self.model or call.model, "messages": outgoing.messages, "stream": False}
        if self.temperature is not None:
            body["temperature"] = self.temperature
            body.pop("seed", None)  # would give the same answer at any temperature
        if outgoing.tools:
            body["tools"] = outgoing.tools
        return body

    async def aclose(self) -> None:
        """Close its connections."""
        if self._client is not None:
            await self._client.close()
