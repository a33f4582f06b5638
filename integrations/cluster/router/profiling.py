"""What the engines behind a router do when, for the profile of a step."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from cotune.integrations.cluster.router import limits
from cotune.integrations.cluster.router.replica import Engine, TakenOut, describe
from cotune.step_profile import Trace

ANEW = "it was taken out, or started anew, in the meantime"


async def begin_traces(engines: Sequence[Engine]) -> dict[Engine, str]:
    """Let engines note what they do; by engine why one does not, or "". None is taken out for that."""
    reasons = await asyncio.gather(*map(_begin, engines))
    return dict(zip(engines, reasons, strict=True))


async def end_traces(engines: Sequence[Engine], begun: Mapping[Engine, str]) -> list[Trace]:
    """What engines have done since, where they have `begun` to note it; the last trace says which do not."""
    found = await asyncio.gather(*(_end(engine, begun.get(engine, ANEW)) for engine in engines))
    untraced = {e.name: answer for e, answer in zip(engines, found, strict=True) if isinstance(answer, str)}
    untraced |= {engine.name: ANEW for engine in begun if engine not in engines}
    reasons: dict[str, list[str]] = {}
    for name, reason in sorted(untraced.items()):
        reasons.setdefault(reason, []).append(name)
    notes = tuple(f"not traced: {', '.join(names)}: {reason}" for reason, names in reasons.items())
    return [*(trace for answer in found if not isinstance(answer, str) for trace in answer), Trace([], [], 0, notes)]


async def _begin(engine: Engine) -> str:
    answer = await _asked(engine, "begin_trace")
    return answer if isinstance(answer, str) else ""


async def _end(engine: Engine, untraced: str) -> list[Trace] | str:
    answer: list[Trace] | str = untraced or await _asked(engine, "end_trace")
    return answer


async def _asked(engine: Engine, method: str) -> Any:
    """What a method of the engine's sampler returns, or in a line why it does not."""
    try:
        work: Coroutine[Any, Any, Any] = getattr(engine.sampler, method)()
        return await engine.within(limits.CONTROL_SECONDS, work)
    except TakenOut as gone:
        return str(gone)
    except Exception as error:  # noqa: BLE001, an engine may be of any kind
        return describe(error).splitlines()[-1]
