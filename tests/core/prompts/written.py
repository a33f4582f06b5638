"""Records of applications that never ran: episodes by their tasks, each a list of calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from cotune.records.ids import message_id, new_id
from cotune.records.structs import CallRecord, Candidate, Episode, Message, Task
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store


class Asked(NamedTuple):
    """A call: `messages` are texts of a user, or pairs of a role and a text, or whole messages."""

    role: str
    messages: Sequence[Any]
    answer: str = "ok"
    tools: Any = None
    params: Any = None
    redacted: bool = False
    tool_calls: Any = None


def whole(message: Any) -> dict[str, Any]:
    if isinstance(message, str):
        return {"role": "user", "content": message}
    return message if isinstance(message, dict) else {"role": message[0], "content": message[1]}


def store_of(path: Path, episodes: Iterable[tuple[Any, Sequence[Asked]]], **more: Any) -> Store:
    """A store with an episode for each task and its calls."""
    store = open_store(path)
    for task, calls in episodes:
        episode = new_id()
        turns: dict[str, int] = {}
        records: list[Any] = []
        for step, one in enumerate(calls):
            bodies = [whole(message) for message in one.messages]
            turn = turns[one.role] = turns.get(one.role, -1) + 1
            answer = {
                "role": "assistant",
                "content": one.answer,
                **({"tool_calls": one.tool_calls} if one.tool_calls else {}),
            }
            tools = None if one.tools is None else message_id({"tools": one.tools})
            records += [Message(message_id(body), body) for body in bodies]
            records += [] if tools is None else [Message(tools, one.tools)]
            records.append(
                CallRecord(
                    id=new_id(),
                    episode=episode,
                    role=one.role,
                    step=step,
                    turn=turn,
                    messages=tuple(map(message_id, bodies)),
                    tools=tools,
                    model="m",
                    params=one.params or {},
                    redacted=one.redacted,
                    candidates=(Candidate(index=0, text=one.answer, message=answer),),
                    chosen=0,
                )
            )
        id = str(task["id"]) if isinstance(task, dict) and "id" in task else str(task)
        records.append(
            Episode(id=episode, task=Task(id=id, input=task), workflow="app:solve", calls=len(calls), **more)
        )
        store.write(records)
    store.flush()
    return store
