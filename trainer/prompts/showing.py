"""The runs as the reflection model sees them: the calls of one role, as data between marks."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from cotune.judging.shown import shown_message
from cotune.prompts.chat_texts import map_message
from cotune.prompts.edits import PromptPart
from cotune.prompts.templates import Reading
from cotune.prompts.wording import Wording
from cotune.reading.blame import LostEpisode, loss_points
from cotune.reading.reads import reads
from cotune.recording.rewards import without_middle
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate
from cotune.storage.protocol import Store
from cotune.trainer.prompts.task_result import TaskResult, read_result

MOST_CHARACTERS = 2000
"""Most characters of one text that are shown."""
_FAILED_RANK = -1e9
"""Rank of a call whose run failed without an outcome: below every outcome, so that it is shown among the worst."""
MOST_DECISIVE = 2
"""Most failed runs that are shown because a single call decided them, those with the largest loss."""


class Fence:
    """Puts data between lines with a mark that the data cannot contain."""

    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __call__(self, text: str) -> str:
        text, _ = without_middle(text, MOST_CHARACTERS)
        return f"<<<data {self.mark}\n{text.replace(self.mark, '')}\ndata {self.mark}>>>"


class DecisiveFailure(NamedTuple):
    """A failed run, and the step of the call that decided it, alone or together with calls at the same time."""

    result: TaskResult
    step: int
    roles: Sequence[str]
    """The roles of the calls that decided the run together, each as often as it called; one if the call did it
    alone."""
    loss: str
    """In points, for people; empty if it was not measured."""
    redraw: str
    """The answer at this call in the best of the repeated runs; empty if it has no such call."""
    redraw_result: TaskResult | None
    """The result of that run."""


class _RankedCall(NamedTuple):
    """A call with a part of its prompt: its rank, the result of its run, and the values of the part's slots."""

    rank: float
    result: TaskResult
    call: CallRecord
    values: tuple[str, ...]


def examples(
    store: Store,
    part: PromptPart,
    results: Sequence[TaskResult],
    wording: Wording,
    fence: Fence,
    *,
    shown: int,
    decisive: Sequence[DecisiveFailure] = (),
) -> list[str]:
    """Return the calls with this part that decided failures, then its `shown` worst calls and one of the best, each as
    text. They are ranked by the role's own scorer, or else by the outcome of the run."""
    # 1. The decisive calls.
    texts = []
    for failure in decisive:
        for ranked_call in _ranked_calls(store, part, failure.result):
            if ranked_call.call.step == failure.step:
                lines = [_example_text(store, ranked_call, wording, fence), *_explain_decisive(failure, fence)]
                texts.append("\n".join(lines))

    # 2. The worst calls, and the best one if it is not among them.
    calls: list[_RankedCall] = []
    for result in results:
        calls += _ranked_calls(store, part, result)
    worst_first = sorted(calls, key=lambda ranked_call: ranked_call.rank)
    chosen = worst_first[:shown]
    if len(worst_first) > shown:
        chosen.append(worst_first[-1])
    return texts + [_example_text(store, ranked_call, wording, fence) for ranked_call in chosen]


def _explain_decisive(failure: DecisiveFailure, fence: Fence) -> list[str]:
    """Lines that explain to the reflection model that this answer lost its run, with the answer of the best repeated
    run."""
    difference = f", by {failure.loss} of 100" if failure.loss else ""
    before = "This run was made before the text was changed for the first time."
    if len(failure.roles) == 1:
        decided = (
            "This answer decided it: runs that are repeated from before the answer succeed more often than runs that "
            f"are repeated from after it{difference}."
        )
    else:
        decided = (
            f"{len(failure.roles)} calls at the same time decided it together (of {', '.join(failure.roles)}), and "
            "this answer is one of theirs: runs that are repeated from before all of them succeed more often than "
            f"runs that are repeated from after them{difference}. Which of them did it is not known."
        )
    lines = [f"{before} {decided}"]
    if failure.redraw:
        lines.append(f"Another answer to this very request, in the best of the repeated runs:\n{fence(failure.redraw)}")
    return lines


def decisive_failures(store: Store, lost: Sequence[LostEpisode], part: PromptPart) -> list[DecisiveFailure]:
    """The failed episodes that a call with this part decided, the largest loss first, at most `MOST_DECISIVE`.

    If several calls ran at the same time and decided together, the failure is shown at the first one with the part.
    Each failure has the answer of the best repeated run and the result of this run, if there was one.
    """
    failures: list[DecisiveFailure] = []
    for episode in sorted(lost, key=lambda episode: -(episode.loss.mean if episode.loss else 0.0)):
        if episode.call is None or len(failures) == MOST_DECISIVE:
            continue
        # 1. The call that decided the failure, or the first of several parallel calls, with the part in its prompt.
        steps = (episode.call, *episode.parallel)
        parallel_calls = [call for call in store.calls(episode.episode) if call.step in steps]
        calls_of_roles = [call for call in parallel_calls if call.role in part.roles]
        with_part = [call for call in calls_of_roles if _slot_values_of_call(store, part, call) is not None]
        if not with_part:
            continue
        call = with_part[0]

        # 2. The answer to the same request in the best repeated run, if there is one.
        redraw = ""
        redraw_result = None
        if episode.redraw_call:
            redraw_call = store.figures().call(episode.redraw_call)
            redraw_episode = redraw_call.episode
            redrawn: CallRecord | None = redraw_call
            if call.step != episode.call:
                # `redraw_call` is another one of the parallel calls. They may have started in another order in the
                # repeated run, so steps and turns do not identify this one.
                redrawn = _find_same_request(store.calls(redraw_episode), call)
            redraw = "" if redrawn is None else chosen_answer_text(redrawn)
            redraw_result = read_result(store, store.episode(redraw_episode))
        failures.append(
            DecisiveFailure(
                result=read_result(store, store.episode(episode.episode)),
                step=call.step,
                roles=[parallel_call.role for parallel_call in parallel_calls],
                loss="" if episode.loss is None else loss_points(episode.loss),
                redraw=redraw,
                redraw_result=redraw_result,
            )
        )
    return failures


def _find_same_request(calls: Iterable[CallRecord], call: CallRecord) -> CallRecord | None:
    """The first of these calls with the role and the messages of `call`; None without any."""
    for other in calls:
        if other.role == call.role and other.messages == call.messages:
            return other
    return None


def describe_roles(store: Store, episodes: Sequence[str]) -> dict[str, str]:
    """Return a paragraph for each role, which says who acts before and after it. It has the order of all roles, the
    roles whose answers its requests contain, and the roles that read its answers. Empty for a single role."""
    # 1. Count whose answers each role reads.
    roles: list[str] = []
    sources: defaultdict[str, Counter[str]] = defaultdict(Counter)
    readers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for id in episodes:
        calls = store.calls(id)
        role_of_step = {call.step: call.role for call in calls}
        read_by_call = reads(store, calls, (), store.episode(id).task.input)
        for call in calls:
            if call.role not in roles:
                roles.append(call.role)
            for step in read_by_call[call.id].steps:
                source = role_of_step[step]
                if source != call.role:
                    sources[call.role][source] += 1
                    readers[source][call.role] += 1
    if len(roles) < 2:
        return {}

    # 2. The paragraphs.
    paragraphs = {}
    for role in roles:
        source_names = _most_frequent_names(sources[role]) or "no other role"
        sentences = [
            f"The application calls its roles for the first time in this order: {', '.join(roles)}.",
            f"Requests of {role} hold answers of {source_names}.",
        ]
        if readers[role]:
            sentences.append(f"Answers of {role} are read by {_most_frequent_names(readers[role])}.")
        else:
            sentences.append(f"No other role reads the answers of {role}: the application itself uses them.")
        paragraphs[role] = " ".join(sentences)
    return paragraphs


def _most_frequent_names(roles: Counter[str]) -> str:
    """Return names of roles, the most frequent one first."""
    return ", ".join(role for role, _ in roles.most_common())


def slot_values(store: Store, part: PromptPart, results: Iterable[TaskResult]) -> dict[int, list[str]]:
    """Return up to two different values of each slot in these runs."""
    values_of_slot: dict[int, list[str]] = {}
    for result in results:
        for ranked in _ranked_calls(store, part, result):
            for slot, value in enumerate(ranked.values, 1):
                values = values_of_slot.setdefault(slot, [])
                if value not in values and len(values) < 2:
                    values.append(value)
    return values_of_slot


def _ranked_calls(store: Store, part: PromptPart, result: TaskResult) -> list[_RankedCall]:
    """Return the answered calls of a run whose prompt has the part."""
    ranked: list[_RankedCall] = []
    for call in store.calls(result.episode):
        if call.role not in part.roles or call.chosen is None:
            continue
        values = _slot_values_of_call(store, part, call)
        if values is None:
            continue
        target = candidate_id(call.id, call.chosen)
        rewards = store.rewards([target]).get(target)
        if rewards:
            rank = sum(rewards.values())
        elif result.outcome is not None:
            rank = result.outcome
        else:
            rank = _FAILED_RANK
        ranked.append(_RankedCall(rank, result, call, values))
    return ranked


def _slot_values_of_call(store: Store, part: PromptPart, call: CallRecord) -> tuple[str, ...] | None:
    """Return the values of the part's slots in this call; None if its prompt does not have the part. A slot is a gap in
    the text that the application fills in for each request."""
    if part.kind in ("tool", "format"):
        return ()
    matches: list[tuple[str, ...]] = []

    def collect_match(kind: str, key: str, text: str) -> None:
        if kind != part.kind:
            return
        values = part.old.match(text)
        # A Reading says that the text could not be read in the part's form.
        if values is not None and not isinstance(values, Reading):
            matches.append(values)

    for id in call.messages:
        map_message(store.message(id), collect_match)
    # If several messages have the part, the newest counts.
    return matches[-1] if matches else None


def _example_text(store: Store, ranked: _RankedCall, wording: Wording, fence: Fence) -> str:
    """One call as text for the reflection model: its slots, messages, answer, scores, comments and errors, and how
    other answers to the same request did.

    Texts of the application are fenced, so that instructions in them are not taken for the user's.
    """
    call = ranked.call
    result = ranked.result
    assert call.chosen is not None
    target = candidate_id(call.id, call.chosen)
    lines = [f"{wording.mark(slot)} was:\n{fence(value)}" for slot, value in enumerate(ranked.values, 1)]
    messages = [store.message(id) for id in call.messages]
    further_messages = [message for message in messages if message.get("role") not in ("system", "developer")]
    if further_messages:
        lines.append("Messages after the instructions:")
        lines += [
            f"[{message.get('role', 'message')}]\n{fence(shown_message(message))}" for message in further_messages
        ]
    lines.append(f"The role answered:\n{fence(_candidate_text(call.candidates[call.chosen]))}")
    rewards = store.rewards([target]).get(target)
    if rewards:
        lines.append(f"Scores of this answer: {_numbers_text(rewards)}")
    outcome = "it failed" if result.outcome is None else f"{result.outcome:g}"
    if result.rewards:
        outcome += f" ({_numbers_text(result.rewards)})"
    lines.append(f"Outcome of the whole run: {outcome}")
    for comments in store.feedback([target, result.episode]).values():
        lines += [f"Comment on {name}:\n{fence(text)}" for name, text in comments.items()]
    if result.error:
        lines.append(f"Error of the run:\n{fence(result.error)}")
    lines += _best_and_worst_answer(store, call, fence)
    return "\n".join(lines)


def _best_and_worst_answer(store: Store, call: CallRecord, fence: Fence) -> list[str]:
    """Return the best and the worst answer to this request, if several answers have a result and the results differ."""
    if len(call.candidates) < 2:
        return []
    all_rewards = store.rewards(candidate_id(call.id, candidate.index) for candidate in call.candidates)
    answers_and_scores: list[tuple[str, float]] = []
    for candidate in call.candidates:
        rewards = all_rewards.get(candidate_id(call.id, candidate.index))
        if rewards:
            answers_and_scores.append((_candidate_text(candidate), sum(rewards.values())))
    if len(answers_and_scores) < 2:
        return []
    worst, worst_score = min(answers_and_scores, key=lambda pair: pair[1])
    best, best_score = max(answers_and_scores, key=lambda pair: pair[1])
    if worst_score == best_score:
        return []
    return [
        f"Other answers to this very request: one that came to {best_score:g}\n{fence(best)}",
        f"and one that came to {worst_score:g}\n{fence(worst)}",
    ]


def chosen_answer_text(call: CallRecord) -> str:
    """Return the chosen answer of a call as text; an empty text without one."""
    return "" if call.chosen is None else _candidate_text(call.candidates[call.chosen])


def _candidate_text(candidate: Candidate) -> str:
    return shown_message(candidate.message or {"content": candidate.text})


def _numbers_text(named: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in named.items())
