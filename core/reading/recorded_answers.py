"""Recorded answers to learn from: the chosen answers of calls and episodes that finished without an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, NamedTuple

from cotune.algorithms.collect import failure_of
from cotune.algorithms.tree_values import tree_values
from cotune.errors import RecordError
from cotune.json_values import json_or_none
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store


class RecordedAnswer(NamedTuple):
    """A call with its request and its answer, as messages in OpenAI form."""

    episode: Episode
    call: CallRecord
    messages: list[Any]
    tools: Any
    """The tools that the request offered; None without tools."""
    answer: dict[str, Any]

    @property
    def fault(self) -> str | None:
        """The reason why the answer cannot be learned from, see `answer_fault`; None if it can. `continued`: the answer
        continues the last message."""
        assert self.call.chosen is not None
        last = self.messages[-1] if self.messages else {}
        if isinstance(last, Mapping) and last.get("role") == "assistant":
            return "continued"
        return answer_fault(self.call.candidates[self.call.chosen])


def recorded_answers(
    store: Store,
    episodes: Iterable[Episode],
    left_out: Counter[str],
    *,
    role: str | None = None,
    min_reward: float | None = None,
    on_failure: OnFailure = "lowest",
    asked: bool = False,
) -> Iterator[RecordedAnswer]:
    """The answers of these episodes in order. `left_out` counts the other calls by reason.

    An answer that replays have repeated is taken once. With `role`, only calls of this role are taken. `min_reward` is
    compared with the sum of the answer's rewards. An answer without rewards has a value in the tree of the episodes
    that share it (`answer_values`, with failures as `on_failure` says); for an episode that was not forked, this is the
    sum of the episode's rewards. Messages and tools are the ones that were sent to the model, or with `asked` the
    application's own, which differ if prompts were edited.
    """
    taken: set[str] = set()
    values = {} if min_reward is None else answer_values(store, outcome_values(store, on_failure))
    for episode in episodes:
        for call in store.calls(episode.id):
            reason = _left_out_reason(store, episode, call, role, min_reward, values)
            if reason is None and (call.replayed or call.id) in taken:
                reason = "replayed"
            answer = None if reason else _read_answer(store, episode, call, asked)
            if answer is None:
                left_out[reason or "lost_message"] += 1
            else:
                taken.add(call.replayed or call.id)
                yield answer
    if store.health.unreadable:
        left_out["unreadable"] += store.health.unreadable


def answer_fault(candidate: Candidate) -> str | None:
    """The reason why no model can learn from an answer; None if it is complete and not empty.

    truncated: cut at its length limit, or its stream was interrupted. filtered: cut by the provider's filter.
    malformed: a tool call cannot be read, or its arguments are not a JSON object. empty_answer: neither text nor tool
    calls.
    """
    message = candidate.message
    if candidate.finish_reason in ("length", "interrupted"):
        return "truncated"
    if candidate.finish_reason == "content_filter":
        return "filtered"
    if candidate.malformed:
        return "malformed"
    calls = message.get("tool_calls") or ()
    for call in calls:
        function = call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        if not function.get("name") or not isinstance(json_or_none(arguments), dict):
            return "malformed"
    if calls or message.get("function_call"):
        return None
    content = message.get("content")
    if isinstance(content, str):
        has_text = bool(content.strip())
    else:
        parts = content if isinstance(content, list) else [content]
        has_text = any(part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return None if has_text else "empty_answer"


def outcome_values(store: Store, on_failure: OnFailure = "lowest") -> dict[str, float]:
    """The value of each episode, by id: the sum of its rewards.

    An episode without rewards that the policy failed gets the value of `on_failure`: a number, or `lowest`, the lowest
    value of the finished episodes of its phase, but at most 0. With `exclude`, failed episodes are left out.
    """
    values: dict[str, float] = {}
    lowest: dict[str, float] = defaultdict(float)
    failed: list[tuple[str, str, float | Literal["lowest"]]] = []
    counted = (
        episode
        for episode in store.episodes()
        if episode.is_outcome and (episode.status == "ok" or on_failure != "exclude")
    )
    while page := list(islice(counted, 500)):  # pages, as rewards of many episodes are read by one query
        rewards = store.rewards(episode.id for episode in page)
        for episode in page:
            if named := rewards.get(episode.id):
                values[episode.id] = sum(named.values())
                if episode.status == "ok":
                    lowest[episode.phase] = min(lowest[episode.phase], values[episode.id])
            elif (failure := failure_of(episode, on_failure)) is not None:
                failed.append((episode.id, episode.phase, failure))
    for id, phase, failure in failed:
        values[id] = lowest[phase] if failure == "lowest" else failure
    return values


def answer_values(store: Store, outcomes: Mapping[str, float]) -> dict[str, float]:
    """Values (`algorithms.tree_values`) of the answers in forked episodes and their branches, by the id of the call
    that first gave the answer. `outcomes` are the values of episodes (`outcome_values`); other episodes are left out.
    """
    forks = {}  # by episode
    for episode in store.episodes():
        if episode.fork is not None and episode.id in outcomes:
            forks[episode.id] = episode.fork
    calls_of_trunks = {fork.trunk: _answered_calls(store, fork.trunk) for fork in forks.values()}
    steps: dict[str, int] = {}
    for calls in calls_of_trunks.values():
        steps.update((call.id, call.step) for call in calls)

    # The path of an episode: the answers that it shares with its trunk, in step order, then its new answers.
    paths = []
    for id in dict.fromkeys((*calls_of_trunks, *forks)):
        if id not in outcomes:
            continue
        calls = calls_of_trunks[id] if id in calls_of_trunks else _answered_calls(store, id)
        shared = {call.replayed for call in calls if call.replayed}
        if fork := forks.get(id):
            # A failed branch may not have repeated all calls before the fork, but it shares them.
            fork_step = steps.get(fork.call, 0)
            shared |= {call.id for call in calls_of_trunks[fork.trunk] if call.step < fork_step}
        path = sorted(shared, key=lambda call: steps.get(call, 0))
        path += [call.id for call in calls if not call.replayed]
        if path:
            paths.append((path, outcomes[id]))
    return {str(answer): value for answer, value in tree_values(paths).items()}


def _answered_calls(store: Store, episode: str) -> list[CallRecord]:
    return [call for call in store.calls(episode) if call.status == "ok" and call.chosen is not None]


def _left_out_reason(
    store: Store,
    episode: Episode,
    call: CallRecord,
    role: str | None,
    min_reward: float | None,
    values: Mapping[str, float],
) -> str | None:
    """The reason why a call is left out; None if it is taken."""
    if role is not None and call.role != role:
        return "other_role"
    if episode.status != "ok":
        return "failed_episode"
    if call.status != "ok" or call.chosen is None or not call.candidates:
        return "failed_call" if call.status != "ok" else "no_answer"
    if not call.messages:
        return "no_messages"
    if min_reward is None:
        return None
    answer_id = candidate_id(call.id, call.chosen)
    stored = store.rewards([answer_id, episode.id])
    value = values.get(call.replayed or call.id)
    if value is None or stored.get(answer_id):
        rewards = stored.get(answer_id) or stored.get(episode.id)
        if not rewards:
            return "no_reward"
        value = sum(rewards.values())
    return None if value >= min_reward else "below_reward"


def _read_answer(store: Store, episode: Episode, call: CallRecord, asked: bool) -> RecordedAnswer | None:
    """The chosen answer of a call with the messages and tools it answers; None if a message was lost.

    With `asked` these are the application's own messages and tools, otherwise the ones that were sent, with edited
    prompts.
    """
    assert call.chosen is not None
    tools_id = call.tools if asked else call.tools_out
    try:
        messages = [store.message(id) for id in (call.messages if asked else call.messages_out)]
        tools = store.message(tools_id) if tools_id else None
    except RecordError:
        return None
    return RecordedAnswer(episode, call, messages, tools, call.candidates[call.chosen].message)
