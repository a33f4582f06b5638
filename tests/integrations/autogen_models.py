"""AutoGen's model clients in tests: that of the OpenAI SDK, and one of its own."""

from __future__ import annotations

from typing import Any

from autogen_core.models import ChatCompletionClient, RequestUsage
from autogen_ext.models.openai import OpenAIChatCompletionClient

INFO: Any = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": True,
    "multiple_system_messages": True,
}
"""What the model can do."""
SEEING: Any = {**INFO, "vision": True}


def autogen_client(**options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(**{"model": "m", "model_info": INFO, **options})


class CountlessClient(ChatCompletionClient):
    """What a client of its own has to have, and no test looks at."""

    async def close(self): ...

    def actual_usage(self):
        return RequestUsage(0, 0)

    total_usage = actual_usage

    def count_tokens(self, messages, **options):
        return len(messages)

    def remaining_tokens(self, messages, **options):
        return 7

    @property
    def capabilities(self):
        return SEEING

    model_info = capabilities
