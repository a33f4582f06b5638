"""For workflows that need the sandbox: a machine without one is at fault, and not the workflow or the policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import cotune
from examples.workloads.code.programs import sandbox
from examples.workloads.sandbox.permission import SandboxUnavailable


@contextlib.asynccontextmanager
async def sandbox_required() -> AsyncIterator[None]:
    """Start the sandbox before the block, so that an episode without one ends before its first call.

    Raises cotune.Outage, with the reason and the remedy, if there is no sandbox or if it fails inside the block. cotune
    then leaves the episode out: no answer of a policy is the cause.
    """
    remedy = "See examples/workloads/sandbox/README.md."
    try:
        await asyncio.to_thread(sandbox)
    except SandboxUnavailable as error:
        text = f"This workload runs programs in a sandbox, and this machine has none: {error}"
        raise cotune.Outage(text, remedy) from error
    try:
        yield
    except SandboxUnavailable as error:
        text = f"This workload runs programs in a sandbox. It worked when the episode began, and then failed: {error}"
        raise cotune.Outage(text, remedy) from error
