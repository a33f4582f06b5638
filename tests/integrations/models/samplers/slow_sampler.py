"""A sampler for child processes whose answers take as long as a test needs, with a process of its own."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from cotune.errors import ConfigError, RequestRefused
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams

WAIT = 0
"""A prompt of this token is not answered before it is cancelled."""


class SlowSampler:
    """Answers with the number of prompts that were cancelled, and is called after its processes."""

    def __init__(self) -> None:
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        self._child = subprocess.Popen(sleep)
        self._cancelled = 0

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        if not prompt:
            raise RequestRefused("The prompt is empty.", "Send one.")
        try:
            await asyncio.sleep(600 if prompt[0] == WAIT else 0)
        except asyncio.CancelledError:
            self._cancelled += 1
            raise
        return [Completion((self._cancelled,), (0.0,), "stop")] * n

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name=f"{os.getpid()} {self._child.pid}", max_model_len=8)

    async def aclose(self) -> None:
        self._child.kill()
        self._child.wait()


async def open(fault: str = "", seconds: float = 0.0) -> Any:
    time.sleep(seconds)  # as vLLM, which blocks its loop while it starts
    if fault:
        raise ConfigError("model", "m", fault)
    return SlowSampler()
