"""Translates recorded episodes to spans.

A workflow's span contains a span for each turn of an agent, which contains the chat call and the tools that it called.
Ids are derived from the ids of the records, so that a second export gives the same spans.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from cotune.errors import RecordError
from cotune.integrations.exchange.otel import names
from cotune.integrations.exchange.otel.messages import as_text, to_parts, tool_definition
from cotune.records.ids import address, candidate_id
from cotune.records.structs import CallRecord, Episode
from cotune.storage.protocol import Store

Kind = Literal["internal", "client"]


class SpanEvent(msgspec.Struct, frozen=True):
    """An event in a span, at a time in nanoseconds."""

    name: str
    at: int
    attributes: Mapping[str, Any]


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A span of OpenTelemetry. Ids are lower-case hex, times are nanoseconds since 1970.

    `failed` is the description of the error, or None for an unset status. `links` are span ids of the same trace.
    """

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
    """The parts of an export beyond structure, times and counts.

    `content` adds messages, tools and texts of errors. `tokens` adds token ids, log-probabilities and policy versions.
    """

    content: bool = False
    tokens: bool = False


STRUCTURE = Detail()
"""Neither content nor tokens."""


def episode_spans(
    store: Store, episode: Episode, detail: Detail = STRUCTURE, left_out: Counter[str] | None = None
) -> list[Span]:
    """The spans of a recorded episode, the workflow's first. Data without a place in spans count in `left_out`."""
    return list(_Episode(store, episode, detail, Counter() if left_out is None else left_out).spans())


class _ToolResult(NamedTuple):
    """The result of a tool call, with the times in nanoseconds between which the tool ran."""

    start: int
    end: int
    value: Any


class _Episode:
    def __init__(self, store: Store, episode: Episode, detail: Detail, left_out: Counter[str]) -> None:
        """Read what the spans of an episode need from the store. Spans that cannot be written are counted in
        `left_out`.
        """
        self.store = store
        self.episode = episode
        self.trace = address(episode.id.encode())
        self.detail = detail
        self.left_out = left_out
        self.calls = store.calls(episode.id)
        self.messages: dict[str, list[Mapping[str, Any]]] = {}
        """Id of a call -> the messages of its prompt."""
        targets = [episode.id]
        self.tool_ids: Counter[Any] = Counter()
        """Id of a tool call -> number of the episode's tool calls with this id."""
        for call in self.calls:
            bodies = map(self._body, call.messages_out)
            self.messages[call.id] = [body for body in bodies if isinstance(body, Mapping)]
            targets += [candidate_id(call.id, candidate.index) for candidate in call.candidates]
            self.tool_ids.update(_chosen_ids(call))
        self.rewards = store.rewards(targets)
        self.feedback = store.feedback(targets) if detail.content else {}
        self.root = _span_id(episode.id, "workflow")
        self.calls_of_id: Counter[str] = Counter()
        """Id of a tool call -> number of tool calls with this id that were handled, in all answers of the episode."""

    def spans(self) -> Iterator[Span]:
        """All spans of the episode: the workflow, then for each call its agent, the chat, and the tools that it
        called.
        """
        yield self._workflow()
        for index, call in enumerate(self.calls):
            tools = list(self._tools(index, call))
            agent_attributes = {
                names.OPERATION: names.AGENT,
                names.AGENT_NAME: call.role,
                names.CONVERSATION: self.episode.id,
                names.ROLE: call.role,
                names.TURN: call.turn,
            }
            yield self._span(
                _span_id(call.id, "agent"),
                parent=self.root,
                name=f"{names.AGENT} {call.role}",
                start=_nanoseconds(call.started),
                end=max([_end_of_call(call), *(tool.end for tool in tools)]),
                attributes=agent_attributes,
            )
            yield self._chat(call)
            yield from tools

    def _span(
        self, id: str, parent: str | None, name: str, start: int, end: int, attributes: Mapping[str, Any], **fields: Any
    ) -> Span:
        """A span of this episode. Attributes without a value are left out."""
        present = _without_none(attributes)
        return Span(
            trace=self.trace, id=id, parent=parent, name=name, start=start, end=end, attributes=present, **fields
        )

    def _workflow(self) -> Span:
        """The root span, with the task and the outcome of the episode."""
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
        start = _nanoseconds(episode.started)
        end = _nanoseconds(episode.started + episode.latency)
        return self._span(
            self.root,
            parent=None,
            name=f"{names.WORKFLOW} {episode.workflow}",
            start=start,
            end=end,
            attributes=attributes,
            events=tuple(self._evaluations(episode.id, end)),
            failed=self._error(episode.status, episode.error),
        )

    def _chat(self, call: CallRecord) -> Span:
        """The span of a call, with its rewards as events and links to the calls whose answers it read."""
        events: list[SpanEvent] = []
        for candidate in call.candidates:
            events += self._evaluations(candidate_id(call.id, candidate.index), _end_of_call(call), candidate.index)
        return self._span(
            _span_id(call.id, "chat"),
            parent=_span_id(call.id, "agent"),
            name=f"{names.CHAT} {call.model}".rstrip(),
            start=_nanoseconds(call.started),
            end=_end_of_call(call),
            attributes=self._chat_attributes(call),
            kind="client",
            events=tuple(events),
            links=tuple(_span_id(parent, "chat") for parent in call.parents),
            failed=self._error(call.status, call.error),
        )

    def _chat_attributes(self, call: CallRecord) -> dict[str, Any]:
        """The attributes of a call's span. Content and tokens are included as `detail` says."""
        finish_reasons = None
        if call.chosen is not None:
            finish_reasons = [candidate.finish_reason for candidate in call.candidates]
        attributes = {
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
            **dict(_request_attributes(call.params)),
            names.REQUEST_STREAM: call.streamed or None,
            names.CHOSEN: call.chosen,
            names.FINISH_REASONS: finish_reasons,
            names.PARENTS: list(call.parents) or None,
            names.ATTEMPTS: len(call.attempts) or None,
            names.PROMPTS: call.prompts or None,
            names.UNEDITED: call.unedited or None,
        }
        if self.detail.content:
            attributes |= self._content(call)
        if self.detail.tokens:
            attributes |= self._tokens(call)
        return attributes

    def _content(self, call: CallRecord) -> dict[str, Any]:
        """The messages and tools of a call, as JSON texts."""
        attributes = {names.INPUT_MESSAGES: as_text([to_parts(m, self.left_out) for m in self.messages[call.id]])}
        if call.candidates:
            answers = []
            for candidate in call.candidates:
                parts = to_parts(candidate.message, self.left_out)
                answers.append({**parts, "role": "assistant", "finish_reason": candidate.finish_reason})
            attributes[names.OUTPUT_MESSAGES] = as_text(answers)
        if call.tools_out:
            offered = self._body(call.tools_out) or ()
            attributes[names.TOOL_DEFINITIONS] = as_text([tool_definition(tool) for tool in offered])
        # If the prompts were edited, the messages of the application are exported too.
        if call.sent:
            original = [body for body in map(self._body, call.messages) if isinstance(body, Mapping)]
            attributes[names.ASKED_MESSAGES] = as_text([to_parts(m, self.left_out) for m in original])
        return attributes

    def _tokens(self, call: CallRecord) -> dict[str, Any]:
        """The token ids and log-probabilities of a call, and the policy that sampled them."""
        attributes: dict[str, Any] = {}
        if call.policy is not None:
            attributes |= {names.POLICY: call.policy.name, names.POLICY_VERSION: call.policy.version}
        if call.prompt is not None:
            try:
                attributes[names.PROMPT_IDS] = list(self.store.token_ids(call.prompt))
            except RecordError:
                self.left_out["prompt_not_stored"] += 1
        if any(candidate.token_ids for candidate in call.candidates):
            sampled = [{"token_ids": c.token_ids, "logprobs": c.logprobs} for c in call.candidates]
            attributes[names.SAMPLED] = as_text(sampled)
        return attributes

    def _tools(self, index: int, call: CallRecord) -> Iterator[Span]:
        """Spans of the tools that the chosen answer of a call uses. `index` is the call's position in the episode.

        The result of a tool is in the prompt of a later call, or was recorded for a replay. A tool without a result has
        no span.
        """
        tool_calls = [] if call.chosen is None else call.candidates[call.chosen].tool_calls
        results_in_prompts = self._results_in_later_prompts(index, call, tool_calls)
        # Servers may give several tool calls of an answer the same id, so their spans are numbered.
        calls_of_id_in_answer: Counter[str] = Counter()
        for tool_call, result_in_prompt in zip(tool_calls, results_in_prompts, strict=True):
            function = tool_call.get("function") or {}
            id = tool_call.get("id")
            result = result_in_prompt
            if result is None:
                result = self._replay_result(id, function.get("name"), self.calls_of_id[str(id)])
            if result is None:
                self.left_out["tool_without_result"] += 1
            else:
                yield self._tool_span(call, id, calls_of_id_in_answer[str(id)], function, result)
            self.calls_of_id[str(id)] += 1
            calls_of_id_in_answer[str(id)] += 1

    def _tool_span(
        self, call: CallRecord, id: Any, number: int, function: Mapping[str, Any], result: _ToolResult
    ) -> Span:
        """The span of a tool call. `number` is 0, or counts the tool calls of one answer that have the same id."""
        attributes = {
            names.OPERATION: names.TOOL,
            names.TOOL_NAME: str(function.get("name")),
            names.TOOL_TYPE: "function",
            names.TOOL_CALL_ID: str(id),
            names.AGENT_NAME: call.role,
        }
        if self.detail.content:
            attributes[names.TOOL_ARGUMENTS] = as_text(function.get("arguments"))
            attributes[names.TOOL_RESULT] = as_text(result.value)
        return self._span(
            _span_id(call.id, f"tool {id} {number}" if number else f"tool {id}"),
            parent=_span_id(call.id, "agent"),
            name=f"{names.TOOL} {function.get('name')}",
            start=result.start,
            end=result.end,
            attributes=attributes,
        )

    def _results_in_later_prompts(
        self, index: int, call: CallRecord, tool_calls: list[dict[str, Any]]
    ) -> list[_ToolResult | None]:
        """The result of each tool call in the answer to `call`, None for a tool call without one. `index` is the
        position of `call` in the episode.

        The results are the tool messages that follow the answer in the first later prompt that has any. The ids of tool
        calls alone do not find them, because another answer may use the same ids.
        """
        ids = [tool_call.get("id") for tool_call in tool_calls]
        results: list[_ToolResult | None] = [None] * len(ids)
        if not ids:
            return results
        # The role's answers with these ids, from this one up to the later call. If its prompt has all of them, this
        # answer is the last but two for a number of 3.
        answers_with_these_ids = 0
        for previous, later in itertools.pairwise(self.calls[index:]):
            if previous.role == call.role and _chosen_ids(previous) == ids:
                answers_with_these_ids += 1
            following = self._messages_after_answer(later, ids, answers_with_these_ids)
            contents = _contents_of_tool_calls(following, ids)
            if contents:
                start = _end_of_call(call)
                end = max(start, _nanoseconds(later.started))
                for position, content in contents.items():
                    results[position] = _ToolResult(start, end, content)
                break
        return results

    def _messages_after_answer(self, later: CallRecord, ids: list[Any], count_from_end: int) -> list[Mapping[str, Any]]:
        """The messages that follow an answer in the prompt of a later call, up to the next answer.

        The answer is one that called tools with these `ids`. If the prompt has several, it is the last one for a
        `count_from_end` of 1, the last but one for 2, and so on.
        """
        messages = self.messages[later.id]
        answer_positions = [index for index, message in enumerate(messages) if _tool_ids(message) == ids]
        if not answer_positions:
            # The application has rewritten its history. Results of ids that occur once can still be assigned.
            ids_are_unique = all(self.tool_ids[id] <= 1 for id in ids)
            return messages if ids_are_unique else []
        if count_from_end > len(answer_positions):
            return []  # the prompt does not have the answer any more
        messages_after = messages[answer_positions[-count_from_end] + 1 :]
        return list(itertools.takewhile(lambda message: message.get("role") != "assistant", messages_after))

    def _replay_result(self, id: Any, name: Any, number: int) -> _ToolResult | None:
        """The result of a tool that was recorded for a replay. If several have the same id, the one at position
        `number` among them; None if it was not recorded.
        """
        if not id:
            return None
        with_id = [result for result in self.episode.results if result.call == id and result.name == name]
        if number >= len(with_id):
            return None
        result = with_id[number]
        body = self._body(result.value)
        if not isinstance(body, Mapping):
            return None
        end = _nanoseconds(result.started + result.latency)
        return _ToolResult(_nanoseconds(result.started), end, body.get("result"))

    def _evaluations(self, target: str, at: int, candidate: int | None = None) -> Iterator[SpanEvent]:
        """An event at the time `at` for each reward of an episode or a candidate, with its reason.

        `target` is the id of the episode or candidate, `candidate` the candidate's index.
        """
        rewards = self.rewards.get(target) or {}
        texts = self.feedback.get(target) or {}
        for name in dict.fromkeys([*rewards, *texts]):
            attributes = {
                names.EVALUATION_NAME: name,
                names.EVALUATION_VALUE: rewards.get(name),
                names.EVALUATION_EXPLANATION: texts.get(name),
                names.CANDIDATE: candidate,
            }
            yield SpanEvent(names.EVALUATION, at, _without_none(attributes))

    def _error(self, status: str, error: str | None) -> str | None:
        """The description of an error; None without one."""
        if status == "ok":
            return None
        # The text of an error may quote messages, so it is exported only together with them.
        if error and self.detail.content:
            return error
        return status

    def _body(self, id: str) -> Any:
        try:
            return self.store.message(id)
        except RecordError:
            self.left_out["lost_message"] += 1
            return None


def _request_attributes(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of a request under OpenTelemetry's names."""
    for name, attribute in names.PARAMS.items():
        value = params.get(name)
        if name == "max_tokens" and value is None:
            value = params.get("max_completion_tokens")
        if name == "stop" and isinstance(value, str):
            value = [value]
        yield attribute, value
    response_format = params.get("response_format")
    if isinstance(response_format, Mapping):
        yield names.OUTPUT_TYPE, "json" if str(response_format.get("type")).startswith("json") else "text"


def _contents_of_tool_calls(messages: Sequence[Mapping[str, Any]], ids: Sequence[Any]) -> dict[int, Any]:
    """Position of a tool call among the calls with these `ids` -> content of the tool message with its result.

    Several tool calls of one answer may have the same id: their results come in the order of the calls.
    """
    contents: dict[int, Any] = {}
    for message in messages:
        id = message.get("tool_call_id")
        if message.get("role") != "tool" or id is None:
            continue
        for position, called_id in enumerate(ids):
            if called_id == id and position not in contents:
                contents[position] = message.get("content")
                break
    return contents


def _tool_ids(message: Mapping[str, Any]) -> list[Any]:
    """The ids of the tools that an assistant message calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return []
    return [call.get("id") for call in calls if isinstance(call, Mapping)]


def _chosen_ids(call: CallRecord) -> list[Any]:
    """The ids of the tools that the answer of a call calls."""
    return [] if call.chosen is None else [tool.get("id") for tool in call.candidates[call.chosen].tool_calls]


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _nanoseconds(seconds: float) -> int:
    # Through microseconds: a float has no more digits for the seconds since 1970.
    return round(seconds * 1e6) * 1000


def _end_of_call(call: CallRecord) -> int:
    return _nanoseconds(call.started + call.latency)


def _span_id(id: str, kind: str) -> str:
    return hashlib.blake2b(f"{id} {kind}".encode(), digest_size=8).hexdigest()
