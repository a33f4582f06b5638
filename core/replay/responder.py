"""Answers calls from the record of another episode, up to the fork."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import Counter, deque
from typing import NoReturn

from cotune.errors import ReplayDiverged
from cotune.recording.recorder import LiveCall, Responder
from cotune.records.answers import Answer
from cotune.records.structs import Fork
from cotune.replay.requests import LOOKS_LIKE, digest, first_difference, similarity
from cotune.replay.script import Replay, ScriptCall

PATIENCE = 1.0
"""Seconds for which an answer waits for a call that had its own before it in the record and is not asked yet."""
GAP = 0.005, 0.05
"""Seconds, at least and at most, between two of these answers: one by HTTP takes a while to arrive."""
_CHANGED = "If the application was changed, record it again; docs/how-to/replay.md lists other causes of differences."
_BY_CHANCE = (
    'Set replay.tools = "frozen", or record with: cotune trace --record frozen. Then clock, uuid and random return '
    "their recorded values."
)


class ReplayResponder:
    """Answers the calls of one episode from a script; calls that come after its fork go to `others`.

    A request is found by role and content (messages, tools, model, parameters, but no ids). If several recorded
    requests are equal, the earliest is used first. Until the fork is answered any recorded call may come, and
    nothing else: a request that was not recorded is a divergence, and so is any later one. Once it is answered, calls
    that began before it ended in the record are still answered from there, as nothing new can have changed them. Where
    calls ran side by side in the record, their answers come in the order in which they came there.
    """

    def __init__(self, replay: Replay, others: Responder | None = None) -> None:
        self.replay = replay
        self.others = others
        self.diverged: ReplayDiverged | None = None
        """The first divergence; no call is answered after it."""
        script = replay.script
        self._before = script.before(replay.fork) if replay.fork else {call.id for call in script.calls}
        self._entries = [_Entry(call) for call in script.calls]
        self._queues: dict[tuple[str, str], deque[_Entry]] = {}
        for entry in sorted(self._entries, key=lambda entry: entry.call.turn):
            recorded = entry.call
            key = recorded.role, digest(*script.asked(recorded), recorded.model, recorded.params)
            self._queues.setdefault(key, deque()).append(entry)
        self._forked = False
        self._new: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer from the script, or at the fork and after it as `others` do. Raises ReplayDiverged."""
        entry = self._take(call)
        if entry is None:
            return await self._others(call)
        try:
            if entry.call.id == self.replay.fork:
                return await self._fork(call, entry.call)
            await self._in_order(call, entry.call)
            return entry.call.answer
        finally:
            entry.answered.set_result(None)

    def require_followed(self) -> None:
        """Raise the first divergence, if any: also one that the application has swallowed."""
        if self.diverged is not None:
            raise self.diverged

    def require_complete(self) -> None:
        """Raise ReplayDiverged also where recorded calls were not asked that must have been."""
        self.require_followed()
        left = [entry.call for entry in self._entries if not entry.asked.done()]
        if self.replay.fork and not self._forked:
            call = next(call for call in left if call.id == self.replay.fork)
            self._diverge(call, f"{_place(call)} is not asked this time.")
        missing = [c for c in left if c.id in self._before and (not self.replay.fork or self._new[c.role])]
        if missing:
            others = len(missing) - 1
            more = f", nor {'is 1 other' if others == 1 else f'are {others} others'}" if others else ""
            self._diverge(missing[0], f"{_place(missing[0])} is not asked this time{more}.")

    def _take(self, call: LiveCall) -> _Entry | None:
        """The recorded call that `call` repeats; None for a new one."""
        with self._lock:
            self.require_followed()
            queue = self._queues.get((call.role, digest(call.messages, call.tools, call.model, call.params)))
            entry = next((e for e in queue or () if not self._forked or e.call.id in self._before), None)
            if entry is None and self._forked:
                self._new[call.role] += 1
                return None
            if entry is None or queue is None:
                self._diverge(call, *self._difference(call))
            if entry.call.fault and entry.call.id != self.replay.fork:
                why = f"{_place(entry.call)} cannot be answered again: {entry.call.fault}."
                self._diverge(call, why, "Fork before it, or choose another episode.")
            queue.remove(entry)
            entry.asked.set_result(None)
            return entry

    async def _in_order(self, call: LiveCall, recorded: ScriptCall) -> None:
        """Wait for the answers that came while this call waited for its own in the record, and as long after them."""
        earlier = [entry for entry in self._entries if recorded.started < entry.call.ended < recorded.ended]
        if not earlier:
            return
        for other in earlier:
            asked, _ = await asyncio.wait({asyncio.wrap_future(other.asked)}, timeout=PATIENCE)
            if asked:
                await asyncio.wait({asyncio.wrap_future(other.answered)})
            else:  # something else holds it up
                call.episode.warn(
                    "replay_order",
                    f"Role {call.role!r} is answered before a call of role {other.call.role!r} that had its answer "
                    f"first in the record: that one was not asked within {PATIENCE:g} s.",
                )
        least, most = GAP
        await asyncio.sleep(min(most, max(least, recorded.ended - max(other.call.ended for other in earlier))))

    async def _fork(self, call: LiveCall, recorded: ScriptCall) -> Answer | None:
        call.episode.fork = Fork(self.replay.script.episode, recorded.id, call.id)
        if call.episode.chance is not None:
            call.episode.chance.reach(recorded.started)
        answer = self.replay.answer or await self._others(call)
        self._forked = True
        if self.replay.answer is not None:
            return answer
        was = recorded.answer.prompt_ids
        if answer is not None and was and answer.prompt_ids != was and call.prompts == recorded.prompts:
            at = next((i for i, pair in enumerate(zip(was, answer.prompt_ids, strict=False)) if pair[0] != pair[1]), -1)
            where = f"from token {at + 1} on" if at >= 0 else "in their number"
            why = f"{_place(recorded)}: the messages are the same, but their token ids differ {where}."
            self._diverge(call, why, "The model's template or tokenizer was changed.")
        return answer

    async def _others(self, call: LiveCall) -> Answer | None:
        return None if self.others is None else await self.others.respond(call)

    def _diverge(self, at: LiveCall | ScriptCall, why: str, remedy: str = _CHANGED) -> NoReturn:
        self.diverged = ReplayDiverged(at.role, at.turn, why, remedy)
        raise self.diverged

    def _difference(self, call: LiveCall) -> tuple[str, str]:
        """How a request that was not recorded differs from the recorded one that is most like it, and the remedy."""
        who = f"Turn {call.turn} of role {call.role!r}"
        left = [entry.call for entry in self._entries if entry.call.role == call.role and not entry.asked.done()]
        if not left:
            count = sum(entry.call.role == call.role for entry in self._entries)
            roles = ", ".join(sorted({entry.call.role for entry in self._entries}))
            known = f"{count} calls of that role" if count else f"no call of that role, but of {roles}"
            return f"{who} is not in the record, which has {known}.", _CHANGED
        script = self.replay.script
        like = max(left, key=lambda c: (c.turn == call.turn, similarity(script, c, call)))
        difference = first_difference(script, like, call)
        remedy = _BY_CHANCE if LOOKS_LIKE in difference and not script.reads else _CHANGED
        return f"{who} differs from the record in {difference}.", remedy


class _Entry:
    """A call of the script, and whether it was asked and answered this time. The futures serve any thread or loop."""

    def __init__(self, call: ScriptCall) -> None:
        self.call = call
        self.asked: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.answered: concurrent.futures.Future[None] = concurrent.futures.Future()


def _place(call: ScriptCall) -> str:
    return f"Turn {call.turn} of role {call.role!r}, which is in the record,"
