"""Recorded answers to learn from: the chosen answers of calls and episodes that finished without an error."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

from cotune.algorithms.tree_values import tree_values
from cotune.errors import RecordError
from cotune.json_values import json_or_none
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode, Fork
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store
from cotune.storage.sql.figures import EpisodeLine

_PAGE = 500
"""Number of episodes whose rewards are read by one query."""


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
        """The reason why no model can learn from the answer; None if one can.

        It is `continued` if the request ends with an assistant message, which the answer continues, so that the answer
        alone is not complete. For the other reasons see `answer_fault`.
        """
        assert self.call.chosen is not None
        last_message = self.messages[-1] if self.messages else {}
        if isinstance(last_message, Mapping) and last_message.get("role") == "assistant":
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
    """The answers of these episodes in order. An answer that replays have repeated is taken once.

    Args:
        left_out: counts the other calls by reason.
        role: take calls of this role only.
        min_reward: the least reward of an answer. It is the sum of the answer's own rewards. For an answer without
            rewards it is its value in the tree of the episodes that share it (`answer_values`), or, if the episode was
            not forked, the sum of the episode's rewards.
        on_failure: the value of an episode that failed.
        asked: return the application's own messages and tools, and not the ones that were sent to the model. They
            differ if prompts were edited.
    """
    yielded_calls: set[str] = set()
    values: Mapping[str, float] = {}
    if min_reward is not None:
        values = answer_values(store, outcome_values(store, on_failure))
    for episode in episodes:
        for call in store.calls(episode.id):
            original_call = call.replayed or call.id
            reason = _left_out_reason(store, episode, call, role, min_reward, values)
            if reason is not None:
                left_out[reason] += 1
                continue
            if original_call in yielded_calls:
                left_out["replayed"] += 1
                continue
            answer = _read_answer(store, episode, call, asked)
            if answer is None:
                left_out["lost_message"] += 1
                continue
            yielded_calls.add(original_call)
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
    tool_calls = message.get("tool_calls") or ()
    for tool_call in tool_calls:
        function = tool_call.get("function") or {}
        arguments = function.get("arguments") or "{}"
        if not function.get("name") or not isinstance(json_or_none(arguments), dict):
            return "malformed"
    if tool_calls or message.get("function_call"):
        return None
    return None if _has_text(message.get("content")) else "empty_answer"


def _has_text(content: Any) -> bool:
    """Whether the content of a message, a text or a list of parts, is not blank."""
    if isinstance(content, str):
        return bool(content.strip())
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return any(texts)


def outcome_values(store: Store, on_failure: OnFailure = "lowest") -> dict[str, float]:
    """The value of each episode of a store with a known outcome, by id (`OutcomeValues`)."""
    values = OutcomeValues(on_failure)
    episodes = iter(store.episodes())
    # Rewards are read for a page of episodes at once: a query for each episode would be slow.
    while page := list(islice(episodes, _PAGE)):
        values.add(page, store.rewards(episode.id for episode in page))
    return values.by_episode()


class OutcomeValues:
    """Collects the values of episodes with a known outcome: the sum of an episode's rewards.

    An episode without rewards that the policy failed gets the value of `on_failure`: a number, or `lowest`, the lowest
    value of the finished episodes of its phase, but at most 0. With `exclude`, failed episodes are left out.
    """

    def __init__(self, on_failure: OnFailure) -> None:
        self._on_failure = on_failure
        self._values: dict[str, float] = {}
        self._lowest_of_phase: dict[str, float] = defaultdict(float)
        self._phase_of_failure: dict[str, str] = {}
        """The phase of each failed episode without rewards."""

    def add(self, episodes: Iterable[Episode | EpisodeLine], rewards: Mapping[str, Mapping[str, float]]) -> None:
        """Add episodes. `rewards` has their rewards, by episode."""
        for episode in episodes:
            has_failed = episode.status != "ok"
            if not episode.is_outcome or (has_failed and self._on_failure == "exclude"):
                continue
            if components := rewards.get(episode.id):
                value = sum(components.values())
                self._values[episode.id] = value
                if not has_failed:
                    self._lowest_of_phase[episode.phase] = min(self._lowest_of_phase[episode.phase], value)
            elif has_failed:
                self._phase_of_failure[episode.id] = episode.phase

    def by_episode(self) -> dict[str, float]:
        """The value of each episode, by id. Only after the last episode is the lowest value of a phase known."""
        values = dict(self._values)
        for id, phase in self._phase_of_failure.items():
            if self._on_failure == "lowest":
                values[id] = self._lowest_of_phase[phase]
            elif self._on_failure != "exclude":
                values[id] = self._on_failure
        return values


def answer_values(store: Store, outcomes: Mapping[str, float]) -> dict[str, float]:
    """The value of each answer in episodes that were forked, by the id of the call that first gave the answer.

    A forked episode (the trunk) and its forks (the branches) share the answers before a fork. So the value of an answer
    depends on the outcomes of all episodes that have it (`algorithms.tree_values`). `outcomes` are the values of
    episodes (`outcome_values`); other episodes are left out.
    """
    # 1. The branches, and the calls of the trunks with their order.
    fork_of_branch: dict[str, Fork] = {}
    for episode in store.episodes():
        if episode.fork is not None and episode.id in outcomes:
            fork_of_branch[episode.id] = episode.fork
    calls_of_trunk: dict[str, list[CallRecord]] = {}
    step_of_call: dict[str, int] = {}
    for fork in fork_of_branch.values():
        if fork.trunk not in calls_of_trunk:
            calls_of_trunk[fork.trunk] = _answered_calls(store, fork.trunk)
            step_of_call.update((call.id, call.step) for call in calls_of_trunk[fork.trunk])

    # 2. The path of each episode with its outcome: its answers in order. An answer that a branch repeats has the id of
    #    the trunk's call, so that the paths share it.
    paths: list[tuple[list[str], float]] = []
    for id in dict.fromkeys((*calls_of_trunk, *fork_of_branch)):
        if id not in outcomes:
            continue
        calls = calls_of_trunk[id] if id in calls_of_trunk else _answered_calls(store, id)
        shared_answers = {call.replayed for call in calls if call.replayed}
        new_answers = [call.id for call in calls if not call.replayed]
        if id in fork_of_branch:
            # A failed branch may not have repeated all calls before the fork, but it shares them.
            fork = fork_of_branch[id]
            fork_step = step_of_call.get(fork.call, 0)
            shared_answers |= {call.id for call in calls_of_trunk[fork.trunk] if call.step < fork_step}
        path = sorted(shared_answers, key=lambda call: step_of_call.get(call, 0)) + new_answers
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
    """The reason to leave out a call, or None.

    `values` are the values of answers in forked episodes (`answer_values`); None of them is needed without
    `min_reward`.
    """
    if role is not None and call.role != role:
        return "other_role"
    if episode.status != "ok":
        return "failed_episode"
    if call.status != "ok":
        return "failed_call"
    if call.chosen is None or not call.candidates:
        return "no_answer"
    if not call.messages:
        return "no_messages"
    if min_reward is None:
        return None

    # The answer's own rewards count first, then its value in the tree of episodes, then the rewards of its episode.
    answer_id = candidate_id(call.id, call.chosen)
    tree_value = values.get(call.replayed or call.id)
    stored = store.rewards([answer_id, episode.id])
    if stored.get(answer_id):
        value = sum(stored[answer_id].values())
    elif tree_value is not None:
        value = tree_value
    elif stored.get(episode.id):
        value = sum(stored[episode.id].values())
    else:
        return "no_reward"
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
