"""Imports traces of other tools as records, to view and score them, and to use them for supervised fine-tuning."""

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
    count_or_zero,
    first_value,
    kind_of,
    messages_of,
    params_of,
    tools_of,
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
"""Most failed requests before a call that are recorded. A span has only their number."""
_STATUSES = ("ok", "error", "timeout", "cancelled", "malformed")
_PROMPT_TOKENS = (names.INPUT_TOKENS, "llm.token_count.prompt", "gen_ai.usage.prompt_tokens")
_ANSWER_TOKENS = (names.OUTPUT_TOKENS, "llm.token_count.completion", "gen_ai.usage.completion_tokens")
_REASONS = {"tool_call": "tool_calls", "max_tokens": "length", "end_turn": "stop"}


class Imported(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of an import. `left_out` counts data that have no place in records, by reason."""

    spans: int
    episodes: int
    calls: int
    without_tokens: int = 0
    """Calls without token ids or log-probabilities, which a policy gradient cannot use."""
    left_out: Mapping[str, int]


def import_file(path: str | Path, sink: Sink, *, phase: str = "import") -> Imported:
    """Write the LLM calls of a file of OTLP/JSON as records.

    An episode is a workflow's span, or else the whole trace. A role is the nearest agent or graph node around a call.
    `phase` is the phase of episodes that name none. A second import of the same file writes the same ids. Raises
    ConfigError for a file without spans.
    """
    left_out: Counter[str] = Counter()
    return import_spans(list(read(path, left_out)), sink, left_out, phase=phase)


def import_spans(spans: Sequence[Span], sink: Sink, left_out: Counter[str], *, phase: str = "import") -> Imported:
    """Write the LLM calls of spans as records, like `import_file`."""
    traces: dict[str, list[Span]] = {}
    for span in spans:
        traces.setdefault(span.trace, []).append(span)
    episodes = calls = without_tokens = 0
    for trace in traces.values():
        tree = _SpanTree(trace)
        for root, chats in _episodes(trace, tree, left_out):
            records = _EpisodeImport(root, chats, tree, phase, left_out).records()
            sink.write(records)
            episodes += 1
            for record in records:
                if isinstance(record, CallRecord):
                    calls += 1
                    candidates_have_tokens = all(c.token_ids and c.logprobs for c in record.candidates)
                    if record.prompt is None or not candidates_have_tokens:
                        without_tokens += 1
    return Imported(
        spans=len(spans), episodes=episodes, calls=calls, without_tokens=without_tokens, left_out=dict(left_out)
    )


class _SpanTree:
    """The spans of a trace, with the role and the root that each span inherits from the spans around it.

    Results are cached, so that a trace is read in linear time. A walk from each call to the outermost span would take
    quadratic time in a chain of spans.
    """

    def __init__(self, trace: Sequence[Span]) -> None:
        self.spans = {span.id: span for span in trace}
        self._roles: dict[str, str | None] = {}
        self._roots: dict[str, Span] = {}

    def role(self, span: Span) -> str | None:
        """The agent of the span, or else of the nearest span around it that names an agent."""
        return self._nearest(span, self._roles, agent_of, lambda outermost: None)

    def root(self, span: Span) -> Span:
        """The span itself if it is a workflow, or else the innermost workflow around it, or else the outermost span."""
        is_workflow = lambda span: span if kind_of(span) == "workflow" else None  # noqa: E731
        return self._nearest(span, self._roots, is_workflow, lambda outermost: outermost)

    def _nearest(
        self, span: Span, cache: dict[str, T], value_of: Callable[[Span], T | None], default: Callable[[Span], T]
    ) -> T:
        """The value of the nearest span with one, from `span` outwards, or else the `default` of the outermost span.

        All spans on the way inherit the same value, so each gets it in the `cache`, by span id.
        """
        walked: dict[str, Span] = {}
        while span.id not in cache:
            walked[span.id] = span
            parent = self.spans.get(span.parent or "")
            if (value := value_of(span)) is not None:
                cache[span.id] = value
            elif parent is None or parent.id in walked:  # the outermost span, or parents that form a circle
                cache[span.id] = default(span)
            else:
                span = parent
        for id in walked:
            cache[id] = cache[span.id]
        return cache[span.id]


def _episodes(trace: Sequence[Span], tree: _SpanTree, left_out: Counter[str]) -> Iterable[tuple[Span, list[Span]]]:
    """Episodes with their chat spans. The span of an episode is the innermost workflow around a chat span, or else the
    outermost span."""
    chats_of_episode: dict[str, list[Span]] = {span.id: [] for span in trace if kind_of(span) == "workflow"}
    for span in trace:
        kind = kind_of(span)
        if kind == "chat":
            chats_of_episode.setdefault(tree.root(span).id, []).append(span)
        elif kind == "other":
            left_out[f"span:{span.attributes.get(names.OPERATION) or 'not_llm'}"] += 1
    return [(tree.spans[id], chats) for id, chats in chats_of_episode.items()]


class _EpisodeImport:
    """The import of one episode."""

    def __init__(self, root: Span, chats: Sequence[Span], tree: _SpanTree, phase: str, left_out: Counter[str]) -> None:
        """One episode of a trace: its span `root` and the spans of its calls, `chats`.

        If cotune wrote the trace, the records keep the ids in it. Otherwise ids are derived from the spans, so that a
        second import gives the same records.
        """
        self.root = root
        self.chats = sorted(chats, key=lambda span: (count_or_zero(span.attributes.get(names.STEP)), span.start))
        self.tree = tree
        self.phase = phase
        self.left_out = left_out
        self.id = str(root.attributes.get(names.EPISODE) or _ulid_of_span(root))
        self.ids = {chat.id: str(chat.attributes.get(names.CALL) or _ulid_of_span(chat)) for chat in self.chats}
        self.call_count = 0
        """Number of the calls that were read so far."""
        self.turns = TurnCounter()
        self.call_records = CallRecords(None, nullcontext(), lambda kind, text: left_out.update([kind]))
        self.rewards: list[RewardRecord | FeedbackRecord] = []

    def records(self) -> list[Record]:
        """The records of the episode: messages before the calls that refer to them, the episode itself last."""
        records: list[Record] = []
        for chat in self.chats:
            try:
                records += self._call(self.call_count, chat)
                self.call_count += 1
            except _UNREADABLE:
                self.left_out["call_not_readable"] += 1
        self._read_rewards(self.root, self.id)
        return [*records, *self.rewards, self._episode()]

    def _episode(self) -> Episode:
        """The record of the episode, from its root span. If calls end later than the root span, the episode ends with
        the last of them.
        """
        attributes = self.root.attributes
        end = max([self.root.end, *(chat.end for chat in self.chats)])
        task_input = json_value(attributes.get(names.TASK_INPUT), names.TASK_INPUT, self.left_out)
        status: EpisodeStatus = "ok" if self.root.failed is None else "error"
        if attributes.get(names.STATUS) == "cancelled":
            status = "cancelled"
        workflow = self.root.name
        if kind_of(self.root) == "workflow":
            workflow = str(attributes.get(names.WORKFLOW_NAME) or self.root.name)
        step = attributes.get(names.TRAINING_STEP)
        return Episode(
            id=self.id,
            task=Task(id=str(attributes.get(names.TASK) or self.root.trace), input=task_input),
            workflow=workflow,
            phase=str(attributes.get(names.PHASE) or self.phase),
            training_step=None if step is None else count_or_zero(step),
            rollout=count_or_zero(attributes.get(names.ROLLOUT)),
            status=status,
            error=self.root.failed,
            started=self.root.start / 1e9,
            latency=max(end - self.root.start, 0) / 1e9,
            calls=self.call_count,
            metrics=self._metrics(),
        )

    def _metrics(self) -> dict[str, float]:
        """The metrics of the episode that are numbers. Others are counted in `left_out`."""
        recorded_metrics = json_value(self.root.attributes.get(names.METRICS), names.METRICS, self.left_out)
        if not isinstance(recorded_metrics, dict):
            return {}
        metrics: dict[str, float] = {}
        for name, value in recorded_metrics.items():
            number = metric(value)
            if number is None:
                self.left_out["metric_not_a_number"] += 1
            else:
                metrics[str(name)] = number
        return metrics

    def _call(self, step: int, chat: Span) -> list[Record]:
        """The records of one chat span: the messages of the call that no earlier call had, then the call itself.

        Unreadable attributes are counted in `left_out`.
        """
        role = self.tree.role(chat) or "app"
        _, turn = self.turns.count_call(role)
        messages, answers = messages_of(chat, self.left_out)
        if not messages:
            self.left_out["call_without_messages"] += 1
        # An answer that cannot be read raises an error here, before anything of the call is recorded.
        answer = self._answer(chat, answers)
        call = self._pending_call(chat, role, step, turn, messages)
        # `link` finds the calls whose answers this call has read, by their texts. Links of the span are more certain.
        self.call_records.link(call)
        linked_calls = tuple(self.ids[link] for link in chat.links if link in self.ids)
        if linked_calls:
            call.parents = linked_calls

        status = self._status(chat)
        error = None
        if status != "ok":
            error = chat.failed or "no answer was recorded"
        # An imported answer has no rewards of its own, so the call is the last of its records.
        *new_messages, record = self.call_records.records_of(call, answer, status, error)
        assert isinstance(record, CallRecord)
        self._read_rewards(chat, call.id)
        if chat.end < chat.start:
            self.left_out["negative_latency"] += 1
        latency = max(chat.end - chat.start, 0) / 1e9
        return [*new_messages, msgspec.structs.replace(record, latency=latency)]

    def _pending_call(
        self, chat: Span, role: str, step: int, turn: int, messages: Sequence[Mapping[str, Any]]
    ) -> PendingCall:
        """The request of a chat span with these messages, as a call that has not been answered yet."""
        attributes = chat.attributes
        caller = CallerContext(role, str(attributes.get(names.INTEGRATION) or "opentelemetry"))
        model = first_value(attributes, names.REQUEST_MODEL, "llm.model_name", "gen_ai.response.model")
        body = {
            **params_of(attributes, self.left_out),
            "messages": messages,
            "tools": tools_of(attributes, self.left_out),
            "model": str(model or ""),
            "stream": bool(attributes.get(names.REQUEST_STREAM)),
        }
        call = PendingCall(self.id, caller, step, turn, body)
        call.id = self.ids[chat.id]
        call.started = chat.start / 1e9
        # The span has only the number of failed attempts, not their errors.
        call.attempts = ["unknown"] * min(count_or_zero(attributes.get(names.ATTEMPTS)), _ATTEMPTS)
        return call

    def _answer(self, chat: Span, messages: Sequence[Mapping[str, Any]]) -> Answer:
        """The answer in a chat span, whose candidates have these messages."""
        attributes = chat.attributes
        candidates = self._candidates(chat, messages)
        chosen = attributes.get(names.CHOSEN)
        if not isinstance(chosen, int) or not 0 <= chosen < len(candidates):
            chosen = 0
        policy = None
        if attributes.get(names.POLICY):
            policy = PolicyRef(str(attributes[names.POLICY]), count_or_zero(attributes.get(names.POLICY_VERSION)))
        return Answer(
            candidates=candidates,
            chosen=chosen,
            prompt_ids=tuple(attributes.get(names.PROMPT_IDS) or ()),
            policy=policy,
            usage=Usage(
                count_or_zero(first_value(attributes, *_PROMPT_TOKENS)),
                count_or_zero(first_value(attributes, *_ANSWER_TOKENS)),
            ),
        )

    def _candidates(self, chat: Span, answers: Sequence[Mapping[str, Any]]) -> tuple[Candidate, ...]:
        """The candidates in a chat span, one for each message in `answers`.

        The finish reason is the message's own, or else the one that the span lists for it. The attribute
        `names.SAMPLED` lists the token ids and log-probabilities of each candidate.
        """
        span_reasons = chat.attributes.get(names.FINISH_REASONS)
        if not isinstance(span_reasons, Sequence) or isinstance(span_reasons, str):
            span_reasons = ()
        sampled = json_value(chat.attributes.get(names.SAMPLED), names.SAMPLED, self.left_out) or []
        candidates = []
        for index, message in enumerate(answers):
            span_reason = span_reasons[index] if index < len(span_reasons) else "stop"
            reason = str(message.get("finish_reason") or span_reason)
            tokens = sampled[index] if index < len(sampled) else {}
            body = {key: value for key, value in message.items() if key != "finish_reason"}
            content = body.get("content")
            candidates.append(
                Candidate(
                    index=index,
                    text=content if isinstance(content, str) else "",
                    message={**body, "role": "assistant"},
                    token_ids=tuple(tokens.get("token_ids") or ()),
                    logprobs=tuple(tokens.get("logprobs") or ()),
                    finish_reason=_REASONS.get(reason, reason),
                )
            )
        return tuple(candidates)

    def _status(self, chat: Span) -> CallStatus:
        """The recorded status, or else the span's own. A call without content and without an error is ok."""
        recorded = chat.attributes.get(names.STATUS)
        if recorded in _STATUSES:
            return recorded
        if chat.failed is None:
            return "ok"
        kind = str(chat.attributes.get(names.ERROR_TYPE) or "").lower()
        if "timeout" in kind:
            return "timeout"
        return "cancelled" if "cancel" in kind else "error"

    def _read_rewards(self, span: Span, target: str) -> None:
        """Append the rewards of a span's evaluation events, and their reasons, to `self.rewards`.

        `target` is the id of the episode or of a call. An event in a call's span rewards one candidate of the call: the
        one whose index it names, or else the first.
        """
        for event in span.events:
            if event.name != names.EVALUATION:
                continue
            name = event.attributes.get(names.EVALUATION_NAME)
            value = event.attributes.get(names.EVALUATION_VALUE)
            text = event.attributes.get(names.EVALUATION_EXPLANATION)
            number = float(value) if isinstance(value, int | float) else None
            reason = clean(text) if isinstance(text, str) and text.strip() else ""
            if name is None or (number is None and not reason):
                self.left_out["evaluation_without_score"] += 1
                continue
            rewarded_id = target
            if target != self.id:
                rewarded_id = candidate_id(target, count_or_zero(event.attributes.get(names.CANDIDATE)))
            if number is not None:
                self.rewards.append(RewardRecord(rewarded_id, str(name), number, event.at / 1e9))
            if reason:
                self.rewards.append(feedback_record(rewarded_id, str(name), reason, event.at / 1e9))


def _ulid_of_span(span: Span) -> str:
    """A ULID that sorts by the span's start. It is the same in each import."""
    digest = hashlib.blake2b(f"{span.trace} {span.id}".encode(), digest_size=10).digest()
    return ulid((span.start // 1_000_000 & (1 << 48) - 1) << 80 | int.from_bytes(digest, "big"))
