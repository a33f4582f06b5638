"""The recorder: turns what an application does into records, while it runs."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from cotune.context import Mark, current_episode
from cotune.ids import message_id, new_id, segment_id
from cotune.records import (
    Call,
    CallStatus,
    Candidate,
    Episode,
    EpisodeStatus,
    Message,
    PolicyRef,
    Record,
    Reward,
    Segment,
    Task,
    Usage,
    candidate_id,
)


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What answered a call: all candidates, which one goes on, and how it came about.

    `rewards[i]` are the components of candidate i, from before the selection; empty where no scorer ran, or
    where it failed (`error`). `sampling` holds the parameters that were really used, the seed included.
    """

    candidates: tuple[Candidate, ...]
    chosen: int = 0
    prompt_ids: tuple[int, ...] = ()
    policy: PolicyRef | None = None
    usage: Usage = Usage()
    rewards: tuple[Mapping[str, float], ...] = ()
    sampling: Mapping[str, Any] = {}
    error: str | None = None


class Responder(Protocol):
    """Answers calls in place of the provider that the application uses."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer a call, or return None to let the application's own provider answer."""
        ...


class Sink(Protocol):
    """Where the recorder puts records; every `Store` is one."""

    def write(self, records: Sequence[Record]) -> None: ...


class LiveCall:
    """A call in flight; scorers see it as `call`. Ends once, by `finish` or `fail`."""

    def __init__(self, episode: LiveEpisode, mark: Mark, step: int, turn: int, body: Mapping[str, Any]) -> None:
        self.id = new_id()
        self.episode = episode
        self.role = mark.role
        self.mark = mark
        self.step = step
        self.turn = turn
        self.messages: list[dict[str, Any]] = list(body.get("messages") or [])
        self.tools: list[dict[str, Any]] | None = body.get("tools") or None
        self.model = str(body.get("model", ""))
        self.streamed = bool(body.get("stream"))
        self.params = {k: v for k, v in body.items() if k not in ("messages", "tools", "model", "stream")}
        self.attempts: list[str] = []
        self.started = time.time()
        self.ended = False

    @property
    def task(self) -> Task:
        return self.episode.task

    @property
    def state(self) -> Any:
        """Input state of the node that makes the call (LangGraph), else None."""
        return self.mark.state

    def finish(self, answer: Answer) -> None:
        """Record the call with all its candidates and rewards. A second end of the call is ignored."""
        self.episode._end(self, answer, "ok", answer.error)

    def fail(self, status: CallStatus, error: str) -> None:
        """Record the call as failed; its episode keeps going unless the application stops."""
        self.episode._end(self, None, status, error)


class LiveEpisode:
    """An episode in progress. Numbers calls under a lock; safe from any thread."""

    def __init__(
        self,
        sink: Sink,
        task: Task,
        *,
        workflow: str,
        responder: Responder | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        phase: str = "trace",
        training_step: int | None = None,
        rollout: int = 0,
    ) -> None:
        self.id = new_id()
        self.sink = sink
        self.task = task
        self.workflow = workflow
        self.responder = responder
        self.loop = loop
        """Where `responder.respond` runs when the application calls from a thread without a loop."""
        self.phase = phase
        self.training_step = training_step
        self.rollout = rollout
        self.started = time.time()
        self.failures: dict[str, int] = {}
        self.ended = False
        self._lock = threading.Lock()
        self._steps = 0
        self._turns: dict[str, int] = {}
        self._outputs: dict[str, str] = {}
        self._paths: dict[str, list[tuple[tuple[int, ...], str]]] = {}
        self._token: Any = None

    def start(self, mark: Mark, body: Mapping[str, Any]) -> LiveCall:
        """Open a call; step and turn are taken here, under the lock."""
        with self._lock:
            step, self._steps = self._steps, self._steps + 1
            turn = self._turns.get(mark.role, 0)
            self._turns[mark.role] = turn + 1
        return LiveCall(self, mark, step, turn, body)

    def __enter__(self) -> LiveEpisode:
        self._token = current_episode.set(self)
        return self

    def __exit__(self, *exc: object) -> None:
        current_episode.reset(self._token)

    def end(
        self,
        status: EpisodeStatus,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        error: str | None = None,
    ) -> Episode:
        """Record the end of the episode with its team rewards."""
        self.ended = True
        record = Episode(
            id=self.id,
            task=self.task,
            workflow=self.workflow,
            phase=self.phase,
            training_step=self.training_step,
            rollout=self.rollout,
            status=status,
            error=error,
            started=self.started,
            latency=time.time() - self.started,
            calls=self._steps,
            metrics=dict(metrics or {}),
        )
        now = time.time()
        self.sink.write([*(Reward(self.id, k, v, now) for k, v in (rewards or {}).items()), record])
        return record

    def _end(self, call: LiveCall, answer: Answer | None, status: CallStatus, error: str | None) -> None:
        with self._lock:
            if call.ended:
                return
            call.ended = True
            if status != "ok":
                self.failures[status] = self.failures.get(status, 0) + 1
        records: list[Record] = []
        bodies = [Message(message_id(m), m) for m in call.messages]
        records.extend(bodies)
        tools = None
        if call.tools:
            tools = message_id({"tools": call.tools})
            records.append(Message(tools, call.tools))
        prompt = self._prompt(call.role, answer, records) if answer and answer.prompt_ids else None
        parents = self._parents(call, [m.id for m in bodies], answer)
        records.append(
            Call(
                id=call.id,
                episode=self.id,
                role=call.role,
                step=call.step,
                turn=call.turn,
                parents=parents,
                messages=tuple(m.id for m in bodies),
                tools=tools,
                model=call.model,
                params=call.params,
                sampling=dict(answer.sampling) if answer else {},
                prompt=prompt,
                prompt_tokens=len(answer.prompt_ids) if answer else 0,
                policy=answer.policy if answer else None,
                status=status,
                error=error,
                attempts=tuple(call.attempts),
                streamed=call.streamed,
                started=call.started,
                latency=time.time() - call.started,
                usage=answer.usage if answer else Usage(),
                candidates=answer.candidates if answer else (),
                chosen=answer.chosen if answer else None,
                integration=call.mark.integration,
            )
        )
        if answer:
            now = time.time()
            for i, components in enumerate(answer.rewards):
                records.extend(Reward(candidate_id(call.id, i), k, v, now) for k, v in components.items())
        self.sink.write(records)

    def _prompt(self, role: str, answer: Answer, records: list[Record]) -> str:
        """Store the prompt as the longest known path of this role plus what was added; return its segment id."""
        ids = answer.prompt_ids
        with self._lock:
            known = self._paths.setdefault(role, [])
            base, parent = max(
                ((path, tip) for path, tip in known if len(path) <= len(ids) and ids[: len(path)] == path),
                key=lambda item: len(item[0]),
                default=((), None),
            )
            added = ids[len(base) :]
            prompt = parent if parent is not None and not added else segment_id(ids)
            if added or parent is None:
                records.append(Segment(prompt, parent, added))
            known.append((ids, prompt))
            reply = answer.candidates[answer.chosen].token_ids
            if reply:
                tip = segment_id(ids + reply)
                records.append(Segment(tip, prompt, reply))
                known.append((ids + reply, tip))
        return prompt

    def _parents(self, call: LiveCall, message_ids: list[str], answer: Answer | None) -> tuple[str, ...]:
        """Calls whose outputs this prompt contains: by the framework's ids, else by assistant messages."""
        with self._lock:
            names = call.mark.read or tuple(message_ids)
            found = dict.fromkeys(self._outputs[name] for name in names if name in self._outputs)
            if answer:
                if call.mark.output:
                    self._outputs[call.mark.output] = call.id
                self._outputs[message_id(answer.candidates[answer.chosen].message)] = call.id
        return tuple(found)
