"""Recipes dpo and sweet_rl: the best and the worst of the recorded answers to each prompt, as rows."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from statistics import fmean
from typing import NamedTuple

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.errors import RecordError, RequestRefused
from cotune.integrations.models.chat.answers import encode_answer
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.reading.recorded_answers import answer_values, outcome_values
from cotune.records.ids import candidate_id, canonical, pack_ids
from cotune.records.images import prompt_id
from cotune.records.structs import CallRecord, Candidate, Episode
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store
from cotune.trainer.records.answers import Unwritten, call_fault, counts_text, learned_from
from cotune.trainer.records.lessons import Reader, Readers, Recorded, Rows


class _Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A recorded answer as far as it is needed to compare it with others: where to read it, and its rewards."""

    episode: str
    task: str
    call: str
    role: str
    index: int
    """The index of the candidate in its call."""
    digest: bytes
    """Equal for equal answers."""
    rewards: tuple[float, ...]
    """A reward for each time that the answer occurred."""

    @property
    def mean_reward(self) -> float:
        return fmean(self.rewards)


class StoredAnswer(NamedTuple):
    """An answer with its call, read from the store again."""

    call: CallRecord
    candidate: Candidate

    @classmethod
    def read(cls, store: Store, answer: _Answer) -> StoredAnswer:
        """Read the call and the candidate of an answer."""
        call = next(call for call in store.calls(answer.episode) if call.id == answer.call)
        candidate = next(candidate for candidate in call.candidates if candidate.index == answer.index)
        return cls(call, candidate)


def read_pairs(
    store: Store,
    readers: Readers,
    on_failure: OnFailure = "lowest",
    labels: Mapping[str, float] | None = None,
) -> Recorded:
    """Return a pair for each prompt that has a better and a worse answer, as two rows: the best, then the worst.

    Answers are compared if role, task and prompt are the same: candidates of a tree, forks of a replay, or first turns
    of several episodes. Equal answers count once, with the mean of their rewards.

    An answer's reward is the sum of its own rewards. If no answer to its prompt has rewards, two substitutes are tried:
    the value of the answer in the tree of the episodes that share it (`answer_values`), then the outcome of its episode
    (`outcome_values`, with `on_failure`). With `labels`, these scores of candidates are the only rewards.

    Raises RecordError if there is no pair.
    """
    left_out: Counter[str] = Counter()
    unwritten = Unwritten()
    rows = Rows()
    learned_answers = Counter[str]()  # by role
    tasks: dict[str, str] = {}
    for answers in _answers_by_prompt(store, left_out, on_failure, labels).values():
        if len(answers) < 2:
            left_out["only_answer"] += len(answers)
            continue
        ranked = sorted(answers, key=lambda answer: answer.mean_reward)
        worst, best = ranked[0], ranked[-1]
        if not worst.mean_reward < best.mean_reward:
            left_out["equal_rewards"] += len(answers)
            continue
        pair = _rows_of_pair(store, readers(best.role), StoredAnswer.read(store, best), StoredAnswer.read(store, worst))
        if isinstance(pair, str):
            reason_without_pair = pair
            left_out[reason_without_pair] += len(answers)
            for answer in answers:
                unwritten.add(answer.role, reason_without_pair, StoredAnswer.read(store, answer).candidate)
            continue
        left_out["in_between"] += len(answers) - 2
        learned_answers[best.role] += len(pair)
        tasks[best.episode] = best.task
        rows.add(best.episode, {best.role: pair})
    if not rows:
        raise RecordError(
            f"There is no pair of a better and a worse answer to one prompt ({counts_text(left_out) or 'no answers'}).",
            "Pairs need several answers to a prompt with different rewards: records of a run with plan tree or "
            "replay, or several episodes of each task.",
        )
    nonzero_counts = {reason: count for reason, count in left_out.items() if count}
    return Recorded(rows=rows, tasks=tasks, left_out=nonzero_counts, notes=unwritten.notes(learned_answers))


def _answers_by_prompt(
    store: Store, left_out: Counter[str], on_failure: OnFailure, labels: Mapping[str, float] | None
) -> dict[Hashable, list[_Answer]]:
    """Return the different answers to each prompt that have a reward. The others are added to `left_out`, by reason.

    An answer's reward is its label, if there are `labels`. Otherwise it is the sum of the answer's own rewards, or else
    a reward that it shares with others: the value of the answer, or the outcome of its episode.
    """
    # 1. The rewards of all answers.
    with_own_reward: dict[Hashable, list[_Answer]] = defaultdict(list)
    with_shared_reward: dict[Hashable, list[_Answer]] = defaultdict(list)
    outcomes = outcome_values(store, on_failure)
    values = answer_values(store, outcomes)
    counted_calls: set[str] = set()
    for episode in learned_from(store, left_out):
        for call in store.calls(episode.id):
            if fault := call_fault(call):
                left_out[fault] += max(1, len(call.candidates))
                continue
            # The value of an answer already has the outcomes of all episodes that replay its call.
            original = call.replayed or call.id
            if original in values and original in counted_calls:
                left_out["replayed"] += 1
                continue
            counted_calls.add(original)
            shared_reward = values.get(original, outcomes.get(episode.id))
            own_rewards = _own_rewards(store, call) if labels is None else labels
            prompt = _prompt_key(episode, call)
            for candidate in call.candidates:
                is_chosen = candidate.index == call.chosen
                own_reward = own_rewards.get(candidate_id(call.id, candidate.index))
                if own_reward is not None:
                    with_own_reward[prompt].append(_answer(episode, call, candidate, own_reward))
                elif labels is not None:
                    left_out["no_label"] += 1
                elif not is_chosen:
                    left_out["not_chosen"] += 1  # the episode continued with another candidate
                elif shared_reward is None:
                    left_out["no_reward"] += 1
                else:
                    with_shared_reward[prompt].append(_answer(episode, call, candidate, shared_reward))

    # 2. Shared rewards only count for prompts without an answer that has rewards of its own.
    for prompt, answers in with_shared_reward.items():
        if prompt in with_own_reward:
            left_out["no_reward"] += len(answers)
    by_prompt = {**with_shared_reward, **with_own_reward}
    return {prompt: _merge_equal(answers) for prompt, answers in by_prompt.items()}


def _own_rewards(store: Store, call: CallRecord) -> dict[str, float]:
    """Return the sum of each candidate's own rewards, by the id of the candidate. Candidates without any are left
    out."""
    ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
    return {id: sum(rewards.values()) for id, rewards in store.rewards(ids).items() if rewards}


def _prompt_key(episode: Episode, call: CallRecord) -> Hashable:
    """Return a key that is equal for calls whose answers are compared. It has the token ids of the prompt, with its
    images, if they are recorded, and otherwise its messages and tools."""
    if call.prompt:
        prompt: Hashable = prompt_id(call.prompt, call.sampling.get("images") or ())
    else:
        prompt = (call.messages_out, call.tools_out)
    return episode.task.id, call.role, prompt


def _answer(episode: Episode, call: CallRecord, candidate: Candidate, reward: float) -> _Answer:
    """Return a candidate with its reward, for comparison with other answers to its prompt."""
    return _Answer(
        episode=episode.id,
        task=episode.task.id,
        call=call.id,
        role=call.role,
        index=candidate.index,
        digest=_candidate_digest(candidate),
        rewards=(reward,),
    )


def _merge_equal(answers: Iterable[_Answer]) -> list[_Answer]:
    """Merge equal answers into one with all of their rewards."""
    merged: dict[bytes, _Answer] = {}
    for answer in answers:
        equal = merged.get(answer.digest)
        if equal is None:
            merged[answer.digest] = answer
        else:
            merged[answer.digest] = msgspec.structs.replace(equal, rewards=(*equal.rewards, *answer.rewards))
    return list(merged.values())


def _candidate_digest(candidate: Candidate) -> bytes:
    """Return a digest of the token ids of a candidate, or of its message if they are not recorded."""
    content = pack_ids(candidate.token_ids) if candidate.token_ids else canonical(candidate.message)
    return hashlib.blake2b(content, digest_size=16).digest()


def _rows_of_pair(store: Store, reader: Reader, best: StoredAnswer, worst: StoredAnswer) -> list[TrainRow] | str:
    """Return the rows of a pair, which have one prompt, or the reason why there are none."""
    chat = reader.chat
    best_ids = token_ids_of(store, chat, best)
    if isinstance(best_ids, str):
        return best_ids
    worst_ids = token_ids_of(store, chat, worst)
    if isinstance(worst_ids, str):
        return worst_ids
    try:
        images = chat.images([store.message(id) for id in best.call.messages_out])
    except RecordError:
        return "lost_message"
    except RequestRefused:
        return "unrenderable"
    if best_ids.prompt != worst_ids.prompt:
        return "other_prompt"
    if len(best_ids.prompt) + max(len(best_ids.answer), len(worst_ids.answer)) > reader.longest:
        return "too_long"
    return [_row(best, best_ids, images), _row(worst, worst_ids, images)]


def _row(answer: StoredAnswer, ids: AnswerIds, images: tuple[bytes, ...]) -> TrainRow:
    """Return the row of an answer. Its advantage is only known when it is trained on (`PreferenceLearner`)."""
    return TrainRow(
        id=candidate_id(answer.call.id, answer.candidate.index),
        role=answer.call.role,
        prompt_ids=ids.prompt,
        response_ids=ids.answer,
        logprobs=(0.0,) * len(ids.answer),
        advantage=0.0,
        trajectory=answer.call.episode,
        images=images,
    )


class AnswerIds(NamedTuple):
    """The token ids of an answer and its prompt."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def token_ids_of(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> AnswerIds | str:
    """Return prompt and answer as token ids: as they were sampled if they fit this model, else in its chat template.
    Returns the reason if its template cannot write them."""
    return _as_sampled(store, chat, answer) or _as_encoded(store, chat, answer)


def _as_sampled(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> AnswerIds | None:
    """Return prompt and answer as they were sampled, if they are recorded and fit this model's tokenizer."""
    call = answer.call
    ids = answer.candidate.token_ids
    if call.prompt is None or not ids or max(ids) >= len(chat.tokenizer):
        return None
    try:
        prompt = store.token_ids(call.prompt)
        tools = store.message(call.tools_out) if call.tools_out else None
    except RecordError:
        return None  # the store has lost a part of the prompt
    # If the ids are of another tokenizer, this one reads another text in them.
    text, _message, _finish_reason = chat.parse(ids, call.sampling.get("stop") or (), prompt=prompt, tools=tools)
    return AnswerIds(prompt, ids) if text == answer.candidate.text else None


def _as_encoded(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> AnswerIds | str:
    """Return prompt and answer in this model's chat template, or the reason why it cannot write them."""
    call = answer.call
    try:
        messages = [store.message(id) for id in call.messages_out]
        tools = store.message(call.tools_out) if call.tools_out else None
    except RecordError:
        return "lost_message"
    options: Mapping[str, object] = template_options(call.params)
    encoded = encode_answer(chat, messages, tools_shown(call.params, tools), answer.candidate.message, options)
    return encoded if isinstance(encoded, str) else AnswerIds(encoded.prompt, encoded.answer)
