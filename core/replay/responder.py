"""Answer calls from the record of another episode, up to the fork."""

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
"""Seconds that an answer waits for a call that was answered earlier in the record and has not been asked yet."""
ORDER_GAP = (0.005, 0.05)
"""Minimum and maximum seconds between two answers that must keep their order: an answer over HTTP takes a while to
arrive."""
_CHANGED = "If the application was changed, record it again; docs/how-to/replay.md lists other causes of differences."
_BY_CHANCE = (
    'Set replay.tools = "frozen", or record with: cotune trace --record frozen. Then clock, uuid and random return '
    "their recorded values."
)


class ReplayResponder:
    """Answers the calls of one episode from a script. Calls that need a new answer go to `responder_of_new_calls`.

    A request is looked up by role and content (messages, tools, model and parameters, without ids). If several recorded
    requests are equal, the earliest is used first. Until the fork is answered, only recorded calls may come, in any
    order: a request that was not recorded is a divergence, and so is any later request. After the fork, calls that
    began in the record before the forked call ended are still answered from the record, as the new answer cannot have
    changed them. If calls ran at the same time in the record, their answers come in the recorded order.

    Calls in `replay.parallel` get new answers too, perhaps before the fork is answered. What follows such an answer
    differs from the record, so from then on a request that was not recorded is a new call.
    """

    def __init__(self, replay: Replay, responder_of_new_calls: Responder | None = None) -> None:
        """`replay` is the record and its fork. Without a `responder_of_new_calls`, the application's own provider gives
        new answers."""
        self.replay = replay
        self.responder_of_new_calls = responder_of_new_calls
        self.diverged: ReplayDiverged | None = None
        """The first divergence. No call is answered after it."""
        script = replay.script
        self._unaffected_calls = {call.id for call in script.calls}
        """Ids of the recorded calls that the new answer at the fork cannot have changed."""
        if replay.fork:
            self._unaffected_calls = script.unaffected_calls(replay.fork)
        self._entries = [_Entry(call) for call in script.calls]
        self._queues: dict[tuple[str, str], deque[_Entry]] = {}
        # Equal requests of a role are answered in the order of the record.
        for entry in sorted(self._entries, key=lambda entry: entry.call.turn):
            recorded = entry.call
            key = recorded.role, digest(*script.messages_and_tools(recorded), recorded.model, recorded.params)
            self._queues.setdefault(key, deque()).append(entry)
        self._forked = False
        """Whether the call at the fork has its new answer."""
        self._has_new_parallel_answer = False
        """Whether a call in `replay.parallel` has its new answer."""
        self._new_calls: Counter[str] = Counter()
        """Number of calls of each role that are not in the record."""
        self._lock = threading.Lock()

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer a call: from the script if it repeats a recorded call, with a new answer at the fork and for new calls
        after it. None if the application's own provider gives the new answer. Raises ReplayDiverged."""
        entry = self._match(call)
        if entry is None:
            return await self._new_answer(call)
        recorded = entry.call
        try:
            if recorded.id == self.replay.fork:
                return await self._fork(call, recorded)
            if recorded.id in self.replay.parallel:  # it ran at the same time as the fork, and is sampled again too
                answer = await self._new_answer(call)
                self._has_new_parallel_answer = True
                return answer
            await self._wait_for_order(call, recorded)
            return recorded.answer
        finally:
            entry.answered.set_result(None)

    def require_followed(self) -> None:
        """Raise the first divergence, if any, even if the application has swallowed it."""
        if self.diverged is not None:
            raise self.diverged

    def require_complete(self) -> None:
        """Check the episode when it has ended. Raises ReplayDiverged if it has diverged, or if it did not make a
        recorded call that it had to repeat."""
        self.require_followed()
        not_asked = [entry.call for entry in self._entries if not entry.asked.done()]
        if self.replay.fork and not self._forked:
            call = next(call for call in not_asked if call.id == self.replay.fork)
            self._diverge(call, f"{_recorded_turn_text(call)} is not asked this time.")
        missing = [call for call in not_asked if self._must_be_repeated(call)]
        if not missing:
            return
        text = f"{_recorded_turn_text(missing[0])} is not asked this time"
        if len(missing) == 2:
            text += ", nor is 1 other"
        elif len(missing) > 2:
            text += f", nor are {len(missing) - 1} others"
        self._diverge(missing[0], f"{text}.")

    def _must_be_repeated(self, recorded: ScriptCall) -> bool:
        """Whether an episode that has ended must have made this recorded call again."""
        if recorded.id in self.replay.parallel:
            return False  # the new answer of another call in `parallel` may have prevented or changed it
        if recorded.id not in self._unaffected_calls:
            return False
        if not self.replay.fork:
            return True
        # A new answer may end the episode before this call. But new calls of a role come after its recorded calls: if
        # there is one, the role must have made this call before.
        return self._new_calls[recorded.role] > 0

    def _match(self, call: LiveCall) -> _Entry | None:
        """The recorded call that `call` repeats. It is marked as asked, and no other call repeats it.

        None for a new call, which may come after a new answer (of the fork, or of a call in `replay.parallel`). Raises
        ReplayDiverged for a new call before that, and for a recorded call that cannot be answered again.
        """
        with self._lock:
            self.require_followed()
            request = digest(call.messages, call.tools, call.model, call.params)
            entries_with_request = self._queues.get((call.role, request), deque())
            entry = next((entry for entry in entries_with_request if self._may_repeat(entry.call)), None)
            if entry is None:
                if self._has_new_answer:
                    self._new_calls[call.role] += 1
                    return None
                cause, remedy = self._difference(call)
                self._diverge(call, cause, remedy)
            recorded = entry.call
            gets_new_answer = recorded.id == self.replay.fork or recorded.id in self.replay.parallel
            if recorded.fault and not gets_new_answer:
                cause = f"{_recorded_turn_text(recorded)} cannot be answered again: {recorded.fault}."
                self._diverge(call, cause, "Fork before it, or choose another episode.")
            entries_with_request.remove(entry)
            entry.asked.set_result(None)
            return entry

    @property
    def _has_new_answer(self) -> bool:
        """Whether the application has got a new answer. From then on it may make calls that are not in the record."""
        return self._forked or self._has_new_parallel_answer

    def _may_repeat(self, recorded: ScriptCall) -> bool:
        """Whether a request may still repeat this recorded call."""
        if self._has_new_answer:
            # The new answer may have changed all other calls.
            return recorded.id == self.replay.fork or recorded.id in self._unaffected_calls
        return True

    async def _wait_for_order(self, call: LiveCall, recorded: ScriptCall) -> None:
        """Delay the answer to `call`, so that parallel calls are answered in the order of the record.

        `recorded` is the recorded call. In the record, other calls may have been answered while it waited. Their
        answers come first now too. The time from the last of them to this answer is kept, within `ORDER_GAP`.
        """
        earlier = [entry for entry in self._entries if recorded.started < entry.call.ended < recorded.ended]
        if not earlier:
            return
        for other in earlier:
            is_asked, _ = await asyncio.wait({asyncio.wrap_future(other.asked)}, timeout=PATIENCE)
            if is_asked:
                await asyncio.wait({asyncio.wrap_future(other.answered)})
            else:  # the application may make the other call only after this answer
                call.episode.warn(
                    "replay_order",
                    f"Role {call.role!r} is answered before a call of role {other.call.role!r}, which was answered "
                    f"first in the record: the application did not make that call within {PATIENCE:g} s.",
                )
        gap_in_record = recorded.ended - max(other.call.ended for other in earlier)
        shortest, longest = ORDER_GAP
        await asyncio.sleep(min(longest, max(shortest, gap_in_record)))

    async def _fork(self, call: LiveCall, recorded: ScriptCall) -> Answer | None:
        """Answer the call at which the episode leaves the record, and note the fork in the episode. `recorded` is the
        recorded call that it repeats.

        The answer is `replay.answer` if it is set, otherwise a new one. A new answer must be to the same prompt: the
        episode diverges if the messages are equal but their token ids differ.
        """
        call.episode.fork = Fork(self.replay.script.episode, recorded.id, call.id)
        # The episode came here faster than the recorded one, whose calls took time. The clock that the application sees
        # continues from the time of the recorded call.
        if call.episode.chance is not None:
            call.episode.chance.advance_to(recorded.started)
        if self.replay.answer is not None:
            self._forked = True
            return self.replay.answer
        answer = await self._new_answer(call)
        self._forked = True
        # Edits of the prompts (`prompts`) may have changed the messages on purpose.
        if answer is not None and call.prompts == recorded.prompts:
            self._require_same_tokens(call, recorded, answer)
        return answer

    def _require_same_tokens(self, call: LiveCall, recorded: ScriptCall, answer: Answer) -> None:
        """Raise ReplayDiverged if the prompt of a new answer has other token ids than the recorded prompt."""
        recorded_ids = recorded.answer.prompt_ids
        if not recorded_ids or answer.prompt_ids == recorded_ids:
            return
        where = "in their number"
        for position, (old, new) in enumerate(zip(recorded_ids, answer.prompt_ids, strict=False), 1):
            if old != new:
                where = f"from token {position} on"
                break
        cause = f"{_recorded_turn_text(recorded)}: the messages are the same, but their token ids differ {where}."
        self._diverge(call, cause, "The model's template or tokenizer was changed.")

    async def _new_answer(self, call: LiveCall) -> Answer | None:
        """An answer that is not from the record; None if the application's own provider gives it."""
        if self.responder_of_new_calls is None:
            return None
        return await self.responder_of_new_calls.respond(call)

    def _diverge(self, call: LiveCall | ScriptCall, cause: str, remedy: str = _CHANGED) -> NoReturn:
        """Raise ReplayDiverged, and refuse all further calls."""
        self.diverged = ReplayDiverged(call.role, call.turn, cause, remedy)
        raise self.diverged

    def _difference(self, call: LiveCall) -> tuple[str, str]:
        """The cause and the remedy of the error for a request that was not recorded. The cause names the first
        difference from the most similar recorded request of the role that has not been repeated."""
        this_call = f"Turn {call.turn} of role {call.role!r}"
        entries_of_role = [entry for entry in self._entries if entry.call.role == call.role]
        not_asked = [entry.call for entry in entries_of_role if not entry.asked.done()]
        if not not_asked:
            if entries_of_role:
                recorded = f"{len(entries_of_role)} calls of that role"
            else:
                roles = ", ".join(sorted({entry.call.role for entry in self._entries}))
                recorded = f"no call of that role, but of {roles}"
            return f"{this_call} is not in the record, which has {recorded}.", _CHANGED
        script = self.replay.script
        most_similar = max(not_asked, key=lambda other: (other.turn == call.turn, similarity(script, other, call)))
        difference = first_difference(script, most_similar, call)
        is_by_chance = LOOKS_LIKE in difference and not script.reads  # a time or random value that was not recorded
        remedy = _BY_CHANCE if is_by_chance else _CHANGED
        return f"{this_call} differs from the record in {difference}.", remedy


class _Entry:
    """A call of the script, and whether it was asked and answered this time. Futures, so that any thread or loop can
    wait for it."""

    def __init__(self, call: ScriptCall) -> None:
        self.call = call
        self.asked: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.answered: concurrent.futures.Future[None] = concurrent.futures.Future()


def _recorded_turn_text(call: ScriptCall) -> str:
    return f"Turn {call.turn} of role {call.role!r}, which is in the record,"
