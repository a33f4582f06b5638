"""A recorded episode with all that spans can show: two roles, a tool, several candidates, a failed call, rewards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task, Usage
from cotune.storage.sqlite_store import SqliteStore

SECRET = "the heron flies at dawn"
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CALLED = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"q":"' + SECRET + '"}'}}
SYSTEM = {"role": "system", "content": f"You write. {SECRET}"}
ASKED = {"role": "user", "content": [{"type": "text", "text": SECRET}, {"type": "text", "text": "and more"}]}
CALLING = {"role": "assistant", "content": None, "tool_calls": [CALLED]}
LOOKED = {"role": "tool", "tool_call_id": "call_1", "content": f"found {SECRET}"}


def record(folder: Path) -> SqliteStore:
    """A store with one episode of four calls."""
    store = SqliteStore.open(folder / "records.db")
    live = LiveEpisode(store, Task(id="t1", input={"question": SECRET}), workflow="solve", phase="train", rollout=2)
    with_tools: dict[str, Any] = {"model": "m", "tools": [TOOL], "temperature": 0.5, "stop": "END"}
    first = live.start(CallerContext("writer", "langgraph"), {**with_tools, "messages": [SYSTEM, ASKED]})
    first.finish(
        Answer(
            candidates=(said(0, None, (7, 8), tool_calls=[CALLED], finish="tool_calls"),),
            prompt_ids=(1, 2, 3),
            policy=PolicyRef("writer", 3),
            usage=Usage(3, 2),
        )
    )
    second = live.start(
        CallerContext("writer", "langgraph"), {**with_tools, "messages": [SYSTEM, ASKED, CALLING, LOOKED]}
    )
    second.finish(
        Answer(
            candidates=(said(0, "one", (9,)), said(1, "two", (10,))),
            chosen=1,
            prompt_ids=(1, 2, 3, 7, 8, 4),
            policy=PolicyRef("writer", 3),
            usage=Usage(6, 2),
            rewards=({"local": 0.0}, {"local": 1.0}),
            feedback=(f"not what {SECRET} says", ""),
        )
    )
    judged = {"role": "user", "content": "Good?"}
    third = live.start(
        CallerContext("critic", "autogen"),
        {"model": "other", "messages": [{"role": "assistant", "content": "two"}, judged], "stream": True, "n": 1},
    )
    third.attempts.append("HTTP 500")
    third.finish(Answer(candidates=(said(0, "yes", (), finish="length"),), usage=Usage(11, 1)))
    fourth = live.start(CallerContext("critic", "autogen"), {"model": "other", "messages": [judged]})
    fourth.fail("timeout", f"APITimeoutError while reading {SECRET}")
    live.end("ok", rewards={"team": 0.5}, feedback=f"half of {SECRET}", metrics={"success": 1.0})
    store.flush()
    return store


def said(
    index: int, text: str | None, ids: tuple[int, ...], *, tool_calls: Any = None, finish: str = "stop"
) -> Candidate:
    message = {"role": "assistant", "content": text, **({"tool_calls": tool_calls} if tool_calls else {})}
    logprobs = tuple(-0.5 for _ in ids)
    return Candidate(
        index=index, text=text or "", message=message, token_ids=ids, logprobs=logprobs, finish_reason=finish
    )


def seen(store: SqliteStore) -> list[Any]:
    """What a round trip must keep of every call, with the messages themselves."""
    found = []
    for episode in store.episodes():
        names = [f"{call.id}.{c.index}" for call in store.calls(episode.id) for c in call.candidates]
        rewards, texts = store.rewards([episode.id, *names]), store.feedback([episode.id, *names])
        found.append({name: dict(values) for name, values in texts.items() if values})
        found.append((episode.task, episode.workflow, episode.phase, episode.rollout, episode.status, episode.metrics))
        found.append({name: dict(values) for name, values in rewards.items() if values})
        for call in store.calls(episode.id):
            found.append((call.id, call.role, call.step, call.turn, call.parents, call.status, call.error))
            found.append((call.model, call.usage, call.streamed, call.integration, len(call.attempts), call.chosen))
            found.append([store.message(name) for name in call.messages])
            found.append(store.message(call.tools) if call.tools else None)
            found.append([(c.text, c.message, c.finish_reason) for c in call.candidates])
    return found
