"""Traces of other tools as records: to be looked at, scored, and used for supervised fine-tuning."""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.conventions import (
    agent_of,
    first,
    kind_of,
    messages_of,
    params_of,
    tools_of,
    whole,
)
from cotune.integrations.exchange.otel.files import read
from cotune.integrations.exchange.otel.messages import json_value
from cotune.integrations.exchange.otel.spans import Span
from cotune.recording.call_records import CallerContext, CallRecords, PendingCall
from cotune.recording.recorder import Sink, TurnCounter
from cotune.recording.rewards import feedback_record
from cotune.records.answers import Answer, clean
from cotune.records.ids import candidate_id, ulid
from cotune.records.structs import (
    CallRecord,
    CallStatus,
    Candidate,
    Episode,
    EpisodeStatus,
    FeedbackRecord,
    PolicyRef,
    Record,
    RewardRecord,
    Task,
    Usage,
)
from cotune.storage.outcomes import metric

T = TypeVar("T")

_UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError, struct.error)
"""Errors of reading a span that does not follow its convention."""
_ATTEMPTS = 100
"""Failed requests before a call that are recorded at most; a span has their number alone."""
_STATUSES = ("ok", "error", "timeout", "cancelled", "malformed")
_REASONS = {"tool_call": "tool_calls", "max_tokens": "length", "end_turn": "stop"}


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an import; `left_out` is what could not be mapped, by reason."""

    spans: int
    episodes: int
    calls: int
    without_tokens: int = 0
    """Calls of which the file has no token ids or no log-probabilities: nothing for a policy gradient."""
    left_out: Mapping[str, int]


def import_file(path: str | Path, sink: Sink, *, phase: str = "import") -> Imported:
    """Write the LLM calls of a file of OTLP/JSON as records.

    `phase` is that of episodes which name none.

    An episode is a workflow's span, or else the whole trace; a role is the nearest agent or graph node around a call.
    Reading the same file again writes the same ids. Raises ConfigError for a file without spans.
    """
    left_out: Counter[str] = Counter()
    return import_spans(list(read(path, left_out)), sink, left_out, phase=phase)


def import_spans(spans: Sequence[Span], sink: Sink, left_out: Counter[str], *, phase: str = "import") -> Imported:
    """The same of spans that are there already."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace, []).append(span)
    episodes = calls = bare = 0
    for trace in traces.values():
        tree = _SpanTree(trace)
        for root, chats in _episodes(trace, tree, left_out):
            records = _Reading(root, chats, tree, phase, left_out).records()
            sink.write(records)
            made = [record for record in records if isinstance(record, CallRecord)]
            episodes, calls = episodes + 1, calls + len(made)
            bare += sum(
                call.prompt is None or not all(c.token_ids and c.logprobs for c in call.candidates) for call in made
            )
    return Imported(spans=len(spans), episodes=episodes, calls=calls, without_tokens=bare, left_out=dict(left_out))


class _SpanTree:
    """The spans of a trace, and what each of them takes from the spans around it.

    What a span takes is kept, so that a trace is read in linear time: a walk from each call to the outermost span would
    be quadratic in a chain.
    """

    def __init__(self, trace: Sequence[Span]) -> None:
        self.known = {span.id: span for span in trace}
        self._roles: dict[str, str | None] = {}
        self._roots: dict[str, Span] = {}

    def role(self, span: Span) -> str | None:
        """The agent of the span, or else of the nearest one around it that names one."""
        return self._nearest(span, self._roles, agent_of, lambda outermost: None)

    def root(self, span: Span) -> Span:
        """The workflow that the span is, or else the innermost around it, or else the outermost span."""
        is_workflow = lambda span: span if kind_of(span) == "workflow" else None  # noqa: E731
        return self._nearest(span, self._roots, is_workflow, lambda outermost: outermost)

    def _nearest(
        self, span: Span, known: dict[str, T], own: Callable[[Span], T | None], without: Callable[[Span], T]
    ) -> T:
        """The first value from a span outwards; `without` gives that of an outermost span which has none."""
        walked: dict[str, Span] = {}
        while span.id not in known:
            walked[span.id] = span
            around = self.known.get(span.parent or "")
            if (value := own(span)) is not None:
                known[span.id] = value
            elif around is None or around.id in walked:  # the outermost one, or spans that lead in a circle
                known[span.id] = without(span)
            else:
                span = around
        for id in walked:
            known[id] = known[span.id]
        return known[span.id]


def _episodes(trace: Sequence[Span], tree: _SpanTree, left_out: Counter[str]) -> Iterable[tuple[Span, list[Span]]]:
    """Chat spans by the span that is their episode: the innermost workflow around them, else the outermost span."""
    found: dict[str, list[Span]] = {span.id: [] for span in trace if kind_of(span) == "workflow"}
    for span in trace:
        kind = kind_of(span)
        if kind == "chat":
            found.setdefault(tree.root(span).id, []).append(span)
        elif kind == "other":
            left_out[f"span:{span.attributes.get(names.OPERATION) or 'not_llm'}"] += 1
    return [(tree.known[id], chats) for id, chats in found.items()]


class _Reading:
    """One episode in the making."""

    def __init__(self, root: Span, chats: Sequence[Span], tree: _SpanTree, phase: str, left_out: Counter[str]) -> None:
        self.root = root
        self.chats = sorted(chats, key=lambda span: (whole(span.attributes.get(names.STEP)), span.start))
        self.tree = tree
        self.phase = phase
        self.left_out = left_out
        self.id = str(root.attributes.get(names.EPISODE) or _ulid(root))
        self.ids = {chat.id: str(chat.attributes.get(names.CALL) or _ulid(chat)) for chat in self.chats}
        self.calls = 0
        self.turns = TurnCounter()
        self.made = CallRecords(None, nullcontext(), lambda kind, text: left_out.update([kind]))
        self.rewards: list[RewardRecord | FeedbackRecord] = []

    def records(self) -> list[Record]:
        """Messages before the calls that refer to them, the episode last."""
        made: list[Record] = []
        for chat in self.chats:
            try:
                made += self._call(self.calls, chat)
                self.calls += 1
            except _UNREADABLE:
                self.left_out["call_not_readable"] += 1
        self._rewards(self.root, self.id)
        return [*made, *self.rewards, self._episode()]

    def _episode(self) -> Episode:
        found = self.root.attributes
        own = kind_of(self.root) == "workflow"
        ends = [self.root.end, *(chat.end for chat in self.chats)]
        given = json_value(found.get(names.METRICS), names.METRICS, self.left_out)
        task_input = json_value(found.get(names.TASK_INPUT), names.TASK_INPUT, self.left_out)
        metrics = {str(name): metric(value) for name, value in given.items()} if isinstance(given, dict) else {}
        self.left_out.update("metric_not_a_number" for value in metrics.values() if value is None)
        status: EpisodeStatus = "ok" if self.root.failed is None else "error"
        if found.get(names.STATUS) == "cancelled":
            status = "cancelled"
        task = Task(id=str(found.get(names.TASK) or self.root.trace), input=task_input)
        return Episode(
            id=self.id,
            task=task,
            workflow=str(found.get(names.WORKFLOW_NAME) or self.root.name if own else self.root.name),
            phase=str(found.get(names.PHASE) or self.phase),
            training_step=None if found.get(names.TRAINING_STEP) is None else whole(found[names.TRAINING_STEP]),
            rollout=whole(found.get(names.ROLLOUT)),
            status=status,
            error=self.root.failed,
            started=self.root.start / 1e9,
            latency=max(max(ends) - self.root.start, 0) / 1e9,
            calls=self.calls,
            metrics={name: value for name, value in metrics.items() if value is not None},
        )

    def _call(self, step: int, chat: Span) -> list[Record]:
        found = chat.attributes
        role = self.tree.role(chat) or "app"
        _, turn = self.turns.count_call(role)
        asked, answers = messages_of(chat, self.left_out)
        if not asked:
            self.left_out["call_without_messages"] += 1
        candidates = self._candidates(chat, answers)
        caller = CallerContext(role, str(found.get(names.INTEGRATION) or "opentelemetry"))
        model = str(first(found, names.REQUEST_MODEL, "llm.model_name", "gen_ai.response.model") or "")
        body = {
            **params_of(found, self.left_out),
            "messages": asked,
            "tools": tools_of(found, self.left_out),
            "model": model,
        }
        body["stream"] = bool(found.get(names.REQUEST_STREAM))
        call = PendingCall(self.id, caller, step, turn, body)
        call.id, call.started = self.ids[chat.id], chat.start / 1e9
        call.attempts = ["unknown"] * min(whole(found.get(names.ATTEMPTS)), _ATTEMPTS)
        linked = tuple(self.ids[link] for link in chat.links if link in self.ids)
        self.made.link(call)
        call.parents = linked or call.parents
        chosen, policy = found.get(names.CHOSEN), found.get(names.POLICY)
        answer = Answer(
            candidates=candidates,
            chosen=chosen if isinstance(chosen, int) and 0 <= chosen < len(candidates) else 0,
            prompt_ids=tuple(found.get(names.PROMPT_IDS) or ()),
            policy=PolicyRef(str(policy), whole(found.get(names.POLICY_VERSION))) if policy else None,
            usage=Usage(
                whole(first(found, names.INPUT_TOKENS, "llm.token_count.prompt", "gen_ai.usage.prompt_tokens")),
                whole(
                    first(found, names.OUTPUT_TOKENS, "llm.token_count.completion", "gen_ai.usage.completion_tokens")
                ),
            ),
        )
        status = self._status(chat)
        error = None if status == "ok" else chat.failed or "no answer was recorded"
        *others, made = self.made.ended(call, answer, status, error)
        assert isinstance(made, CallRecord)
        self._rewards(chat, call.id)
        if chat.end < chat.start:
            self.left_out["negative_latency"] += 1
        return [*others, msgspec.structs.replace(made, latency=max(chat.end - chat.start, 0) / 1e9)]

    def _candidates(self, chat: Span, answers: Sequence[Mapping[str, Any]]) -> tuple[Candidate, ...]:
        reasons = chat.attributes.get(names.FINISH_REASONS)
        reasons = reasons if isinstance(reasons, Sequence) and not isinstance(reasons, str) else ()
        sampled = json_value(chat.attributes.get(names.SAMPLED), names.SAMPLED, self.left_out) or []
        made = []
        for index, message in enumerate(answers):
            own = reasons[index] if index < len(reasons) else "stop"
            reason = str(message.get("finish_reason") or own)
            ids = sampled[index] if index < len(sampled) else {}
            body = {key: value for key, value in message.items() if key != "finish_reason"}
            content = body.get("content")
            made.append(
                Candidate(
                    index=index,
                    text=content if isinstance(content, str) else "",
                    message={**body, "role": "assistant"},
                    token_ids=tuple(ids.get("token_ids") or ()),
                    logprobs=tuple(ids.get("logprobs") or ()),
                    finish_reason=_REASONS.get(reason, reason),
                )
            )
        return tuple(made)

    def _status(self, chat: Span) -> CallStatus:
        """As recorded; else by the span's own status. A call without content but without error ended well."""
        recorded = chat.attributes.get(names.STATUS)
        if recorded in _STATUSES:
            return recorded
        if chat.failed is None:
            return "ok"
        kind = str(chat.attributes.get(names.ERROR_TYPE) or "").lower()
        return "timeout" if "timeout" in kind else "cancelled" if "cancel" in kind else "error"

    def _rewards(self, span: Span, target: str) -> None:
        for event in span.events:
            asked = (names.EVALUATION_NAME, names.EVALUATION_VALUE, names.EVALUATION_EXPLANATION)
            name, value, text = map(event.attributes.get, asked)
            if event.name != names.EVALUATION:
                continue
            index = event.attributes.get(names.CANDIDATE)
            own = target if target == self.id else candidate_id(target, whole(index))
            number = float(value) if isinstance(value, int | float) else None
            explained = clean(text) if isinstance(text, str) and text.strip() else ""
            if name is None or (number is None and not explained):
                self.left_out["evaluation_without_score"] += 1
                continue
            if number is not None:
                self.rewards.append(RewardRecord(own, str(name), number, event.at / 1e9))
            if explained:
                self.rewards.append(feedback_record(own, str(name), explained, event.at / 1e9))


def _ulid(span: Span) -> str:
    """An id that sorts by the span's start and is the same each time."""
    digest = hashlib.blake2b(f"{span.trace} {span.id}".encode(), digest_size=10).digest()
    return ulid((span.start // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(digest, "big"))
