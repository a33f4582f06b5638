"""Recorded episodes as spans: the workflow, in it a span per agent turn, in that the chat call and the tools it led to.

Ids follow from those of the records, so exporting twice gives the same spans.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from cotune.errors import RecordError
from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.messages import as_text, to_parts, tool_definition
from cotune.records.ids import address, candidate_id
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store

Kind = Literal["internal", "client"]


class SpanEvent(msgspec.Struct, frozen=True):
    """Something that happened in a span, at a time in nanoseconds."""

    name: str
    at: int
    attributes: Mapping[str, Any]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span as OpenTelemetry has it; ids are lower-case hex, times nanoseconds since 1970. `failed` is None where the
    status is unset, else the description of the error. `links` are span ids of the same trace."""

    trace: str
    id: str
    parent: str | None
    name: str
    kind: Kind = "internal"
    start: int
    end: int
    attributes: Mapping[str, Any]
    events: tuple[SpanEvent, ...] = ()
    links: tuple[str, ...] = ()
    failed: str | None = None


class Detail(msgspec.Struct, frozen=True):
    """What is exported beyond structure, times and counts: `content` (messages, tools, errors as text) and `tokens`
    (token ids, log-probabilities, policy versions). Neither does unless asked for."""

    content: bool = False
    tokens: bool = False


STRUCTURE = Detail()
"""Neither content nor tokens."""


def episode_spans(
    store: Store, episode: Episode, detail: Detail = STRUCTURE, left_out: Counter[str] | None = None
) -> list[Span]:
    """The spans of a recorded episode, the workflow's first. What has no place in them is counted in `left_out`."""
    return list(_Episode(store, episode, detail, Counter() if left_out is None else left_out).spans())


class _Episode:
    def __init__(self, store: Store, episode: Episode, detail: Detail, left_out: Counter[str]) -> None:
        self.store = store
        self.episode = episode
        self.trace = address(episode.id.encode())
        self.detail = detail
        self.left_out = left_out
        self.calls = store.calls(episode.id)
        self.messages = {
            call.id: [body for body in map(self._body, call.messages_out) if isinstance(body, Mapping)]
            for call in self.calls
        }
        targets = [candidate_id(call.id, c.index) for call in self.calls for c in call.candidates]
        self.rewards = store.rewards([episode.id, *targets])
        self.feedback = store.feedback([episode.id, *targets]) if detail.content else {}
        self.root = _span_id(episode.id, "workflow")
        self.tool_ids = Counter(id for call in self.calls for id in _chosen_ids(call))
        """How many tool calls of the episode have an id."""
        self.used_ids: Counter[str] = Counter()
        """How many of them have been written."""

    def spans(self) -> Iterator[Span]:
        yield self._workflow()
        for place, call in enumerate(self.calls):
            tools = list(self._tools(place, call))
            agent: dict[str, Any] = {
                names.OPERATION: names.AGENT,
                names.AGENT_NAME: call.role,
                names.CONVERSATION: self.episode.id,
            }
            agent |= {names.ROLE: call.role, names.TURN: call.turn}
            end = max([_end(call), *(tool.end for tool in tools)])
            own, name = _span_id(call.id, "agent"), f"{names.AGENT} {call.role}"
            yield self._span(own, self.root, name, _nanoseconds(call.started), end, agent)
            yield self._chat(call)
            yield from tools

    def _span(
        self, id: str, parent: str | None, name: str, start: int, end: int, attributes: Mapping[str, Any], **fields: Any
    ) -> Span:
        """A span of this episode, with those attributes that have a value."""
        known = {name: value for name, value in attributes.items() if value is not None}
        return Span(trace=self.trace, id=id, parent=parent, name=name, start=start, end=end, attributes=known, **fields)

    def _workflow(self) -> Span:
        episode = self.episode
        task = as_text(episode.task.input) if self.detail.content else None
        attributes: dict[str, Any] = {
            names.OPERATION: names.WORKFLOW,
            names.SPAN_KIND: "CHAIN",
            names.WORKFLOW_NAME: episode.workflow,
            names.CONVERSATION: episode.id,
            names.EPISODE: episode.id,
            names.TASK: episode.task.id,
            names.PHASE: episode.phase,
            names.ROLLOUT: episode.rollout,
            names.STATUS: episode.status,
            names.TRAINING_STEP: episode.training_step,
            names.METRICS: as_text(episode.metrics) if episode.metrics else None,
            names.TASK_INPUT: task,
            names.INPUT_VALUE: task,
            names.ERROR_TYPE: None if episode.status == "ok" else episode.status,
        }
        start, end = (_nanoseconds(episode.started + later) for later in (0, episode.latency))
        return self._span(
            self.root,
            None,
            f"{names.WORKFLOW} {episode.workflow}",
            start,
            end,
            attributes,
            events=tuple(self._evaluations(episode.id, end)),
            failed=self._error(episode.status, episode.error),
        )

    def _chat(self, call: CallRecord) -> Span:
        ids = {candidate.index: candidate_id(call.id, candidate.index) for candidate in call.candidates}
        events = [self._evaluations(id, _end(call), index) for index, id in ids.items()]
        return self._span(
            _span_id(call.id, "chat"),
            _span_id(call.id, "agent"),
            f"{names.CHAT} {call.model}".rstrip(),
            _nanoseconds(call.started),
            _end(call),
            self._chat_attributes(call),
            kind="client",
            events=tuple(event for those in events for event in those),
            links=tuple(_span_id(parent, "chat") for parent in call.parents),
            failed=self._error(call.status, call.error),
        )

    def _chat_attributes(self, call: CallRecord) -> dict[str, Any]:
        return {
            names.OPERATION: names.CHAT,
            names.PROVIDER: "cotune" if call.policy else "openai",
            names.REQUEST_MODEL: call.model,
            names.AGENT_NAME: call.role,
            names.CONVERSATION: self.episode.id,
            names.CALL: call.id,
            names.ROLE: call.role,
            names.STEP: call.step,
            names.TURN: call.turn,
            names.STATUS: call.status,
            names.ERROR_TYPE: None if call.status == "ok" else call.status,
            names.INTEGRATION: call.integration,
            names.CANDIDATES: len(call.candidates),
            names.INPUT_TOKENS: call.usage.prompt_tokens,
            names.OUTPUT_TOKENS: call.usage.completion_tokens,
            **dict(_request(call.params)),
            names.REQUEST_STREAM: call.streamed or None,
            names.CHOSEN: call.chosen,
            names.FINISH_REASONS: None if call.chosen is None else [c.finish_reason for c in call.candidates],
            names.PARENTS: list(call.parents) or None,
            names.ATTEMPTS: len(call.attempts) or None,
            names.PROMPTS: call.prompts or None,
            names.UNEDITED: call.unedited or None,
            **(self._content(call) if self.detail.content else {}),
            **(self._tokens(call) if self.detail.tokens else {}),
        }

    def _content(self, call: CallRecord) -> dict[str, Any]:
        found = {names.INPUT_MESSAGES: as_text([to_parts(m, self.left_out) for m in self.messages[call.id]])}
        if call.candidates:
            answers = [
                {**to_parts(c.message, self.left_out), "role": "assistant", "finish_reason": c.finish_reason}
                for c in call.candidates
            ]
            found[names.OUTPUT_MESSAGES] = as_text(answers)
        if call.tools_out:
            offered = self._body(call.tools_out) or ()
            found[names.TOOL_DEFINITIONS] = as_text([tool_definition(tool) for tool in offered])
        if call.sent:
            asked = [body for body in map(self._body, call.messages) if isinstance(body, Mapping)]
            found[names.ASKED_MESSAGES] = as_text([to_parts(m, self.left_out) for m in asked])
        return found

    def _tokens(self, call: CallRecord) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if call.policy is not None:
            found |= {names.POLICY: call.policy.name, names.POLICY_VERSION: call.policy.version}
        if call.prompt is not None:
            try:
                found[names.PROMPT_IDS] = list(self.store.token_ids(call.prompt))
            except RecordError:
                self.left_out["prompt_not_stored"] += 1
        if any(c.token_ids for c in call.candidates):
            sampled = [{"token_ids": c.token_ids, "logprobs": c.logprobs} for c in call.candidates]
            found[names.SAMPLED] = as_text(sampled)
        return found

    def _tools(self, place: int, call: CallRecord) -> Iterator[Span]:
        """The tools that the chosen answer called, known by the tool messages of a later call, or by results that were
        recorded for a replay."""
        called = [] if call.chosen is None else call.candidates[call.chosen].tool_calls
        read = self._read_results(place, call, called)
        numbers: Counter[str] = Counter()
        for tool, result in zip(called, read, strict=True):
            function, id = tool.get("function") or {}, tool.get("id")
            number = numbers[str(id)]  # servers may give several calls the same id
            numbers[str(id)] += 1
            found = result or self._kept_result(id, function.get("name"), self.used_ids[str(id)])
            self.used_ids[str(id)] += 1
            if found is None:
                self.left_out["tool_without_result"] += 1
                continue
            start, end, result = found
            attributes = {
                names.OPERATION: names.TOOL,
                names.TOOL_NAME: str(function.get("name")),
                names.TOOL_TYPE: "function",
                names.TOOL_CALL_ID: str(id),
                names.AGENT_NAME: call.role,
            }
            if self.detail.content:
                attributes[names.TOOL_ARGUMENTS] = as_text(function.get("arguments"))
                attributes[names.TOOL_RESULT] = as_text(result)
            which = f"tool {id} {number}" if number else f"tool {id}"
            own, name = _span_id(call.id, which), f"{names.TOOL} {function.get('name')}"
            yield self._span(own, _span_id(call.id, "agent"), name, start, end, attributes)

    def _read_results(
        self, place: int, call: CallRecord, called: list[dict[str, Any]]
    ) -> list[tuple[int, int, Any] | None]:
        """Start, end and result of each tool of an answer, as the first later call that has any of them.

        The results are the tool messages after the answer. Ids alone may belong to the tools of another answer.
        """
        ids = [tool.get("id") for tool in called]
        results: list[tuple[int, int, Any] | None] = [None] * len(called)
        same_answers = 0
        for position in range(place, len(self.calls) - 1) if called else ():
            # Turns may call tools under the same ids: the history of a later call ends with those of the last turns.
            one, later = self.calls[position], self.calls[position + 1]
            same_answers += one.role == call.role and _chosen_ids(one) == ids
            messages = self.messages[later.id]
            answered = [at for at, message in enumerate(messages) if _tool_ids(message) == ids]
            if answered:
                at = answered[-same_answers] if same_answers <= len(answered) else len(messages)
                following = messages[at + 1 :]
            else:  # the application has rewritten its history: only an id of its own tells
                following = [] if any(self.tool_ids[id] > 1 for id in ids) else messages
            for message in following:
                if message.get("role") == "assistant" and answered:
                    break
                id = message.get("tool_call_id")
                if message.get("role") != "tool" or id is None:
                    continue
                open_places = [i for i, own in enumerate(ids) if own == id and results[i] is None]
                if open_places:
                    start = _end(call)
                    end = max(start, _nanoseconds(later.started))
                    results[open_places[0]] = start, end, message.get("content")
            if any(results):
                break
        return results

    def _kept_result(self, id: Any, name: Any, number: int) -> tuple[int, int, Any] | None:
        """The same, as it was recorded for a replay: of calls with the same id, that of this number."""
        kept_of_id = [kept for kept in self.episode.results if id and (kept.call, kept.name) == (id, name)]
        for kept in kept_of_id[number : number + 1]:
            if isinstance(body := self._body(kept.value), Mapping):
                return _nanoseconds(kept.started), _nanoseconds(kept.started + kept.latency), body.get("result")
        return None

    def _evaluations(self, target: str, at: int, candidate: int | None = None) -> Iterator[SpanEvent]:
        """The rewards of an episode or a candidate, and the texts beside them."""
        rewards, texts = self.rewards.get(target) or {}, self.feedback.get(target) or {}
        for name in dict.fromkeys([*rewards, *texts]):
            attributes = {
                names.EVALUATION_NAME: name,
                names.EVALUATION_VALUE: rewards.get(name),
                names.EVALUATION_EXPLANATION: texts.get(name),
                names.CANDIDATE: candidate,
            }
            known = {key: value for key, value in attributes.items() if value is not None}
            yield SpanEvent(names.EVALUATION, at, known)

    def _error(self, status: str, error: str | None) -> str | None:
        """An error's text may quote messages, so it goes along with them only."""
        if status == "ok":
            return None
        return (error or status) if self.detail.content else status

    def _body(self, id: str) -> Any:
        try:
            return self.store.message(id)
        except RecordError:
            self.left_out["lost_message"] += 1
            return None


def _request(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, attribute in names.PARAMS.items():
        value = params.get(name)
        if name == "max_tokens" and value is None:
            value = params.get("max_completion_tokens")
        if name == "stop" and isinstance(value, str):
            value = [value]
        yield attribute, value
    asked = params.get("response_format")
    if isinstance(asked, Mapping):
        yield names.OUTPUT_TYPE, "json" if str(asked.get("type")).startswith("json") else "text"


def _tool_ids(message: Mapping[str, Any]) -> list[Any]:
    """The ids of the tools that an assistant message calls."""
    calls = message.get("tool_calls")
    return [one.get("id") for one in calls if isinstance(one, Mapping)] if isinstance(calls, list) else []


def _chosen_ids(call: CallRecord) -> list[Any]:
    """The ids of the tools that the answer of a call calls."""
    return [] if call.chosen is None else [tool.get("id") for tool in call.candidates[call.chosen].tool_calls]


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e6) * 1000


def _end(call: CallRecord) -> int:
    return _nanoseconds(call.started + call.latency)


def _span_id(id: str, kind: str) -> str:
    return hashlib.blake2b(f"{id} {kind}".encode(), digest_size=8).hexdigest()
