"""Going on from a checkpoint of the recorded episode, instead of repeating the calls before it."""

from __future__ import annotations

from collections.abc import Sequence

from cotune.recording.pending_call import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.structs import Checkpointed
from cotune.replay.responder import ReplayResponder
from cotune.replay.script import ScriptCall


def resume_point(responder: ReplayResponder) -> Checkpointed | None:
    """The checkpoint before the fork of a replay that may resume; None where there is none, or it is passed."""
    replay = responder.replay
    if not replay.resume or responder.resumed or replay.fork in responder.asked:
        return None
    return next((one for one in replay.script.checkpoints if one.call == replay.fork), None)


def calls_before(responder: ReplayResponder, point: Checkpointed) -> Sequence[ScriptCall] | str:
    """The recorded calls that a graph that is about to start has behind it at `point`, in step order; or why it must
    make them itself."""
    script = responder.replay.script
    places = {one.call: one for one in script.checkpoints}
    fork = next(call for call in script.calls if call.id == point.call)
    first = min(call.started for call in script.calls if call.id in places and places[call.id].thread == point.thread)
    if responder.asked != {call.id for call in script.calls if call.started < first}:
        return "another run of a graph comes before it, or goes on beside it"
    behind = [call for call in script.calls if first <= call.started < fork.started and call.id != fork.id]
    if any(call.fault or call.id not in places or places[call.id].thread != point.thread for call in behind):
        return "calls were made beside its graph"
    return [call for call in behind if places[call.id].checkpoint != point.checkpoint]


def leave_out(live: LiveEpisode, responder: ReplayResponder, calls: Sequence[ScriptCall], until: float) -> None:
    """Record the calls as repeated without making them. `until` is when the checkpoint after them was written (seconds
    since the epoch): what tools, clock, uuid and random gave before it is not asked again."""
    script = responder.replay.script
    outputs = {one.call: one.output for one in script.checkpoints}
    responder.leave_out(calls)
    live.tape.skip(until)
    if live.chance is not None:
        live.chance.skip(until)
    for call in calls:
        messages, tools = script.asked(call)
        body = {**call.params, "model": call.model, "messages": messages, "tools": tools, "stream": call.streamed}
        caller = CallerContext(call.role, call.integration, output=outputs[call.id], given=True)
        live.start(caller, body).finish(call.answer)
