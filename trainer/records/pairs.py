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
from cotune.records.structs import CallRecord, Candidate
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store
from cotune.trainer.records.answers import Unwritten, counts_text, learned_from
from cotune.trainer.records.lessons import Reader, Readers, Recorded, Rows


class _Answer(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An answer while all are compared: its place in the store, and its rewards."""

    episode: str
    task: str
    call: str
    role: str
    index: int
    digest: bytes
    """Equal for equal answers."""
    rewards: tuple[float, ...]
    """One for each time that the answer occurred; their mean counts."""

    @property
    def worth(self) -> float:
        return fmean(self.rewards)


class StoredAnswer(NamedTuple):
    """An answer with its call, read from the store again."""

    call: CallRecord
    candidate: Candidate

    @classmethod
    def read(cls, store: Store, answer: _Answer) -> StoredAnswer:
        call = next(call for call in store.calls(answer.episode) if call.id == answer.call)
        return cls(call, next(candidate for candidate in call.candidates if candidate.index == answer.index))


def read_pairs(
    store: Store,
    readers: Readers,
    on_failure: OnFailure = "lowest",
    labels: Mapping[str, float] | None = None,
) -> Recorded:
    """Return a pair for each prompt that has a better and a worse answer, as two rows: the best, then the worst.

    Answers are compared if role, task and prompt are the same: candidates of a tree, forks of a replay, first turns of
    several episodes. Equal answers count once, with the mean of their rewards.

    An answer's reward is the sum of its own rewards. If no answer to its prompt has rewards, it is the value of the
    answer in the tree of the episodes that share it (`answer_values`), or else the outcome of its episode
    (`outcome_values`, with `on_failure`). With `labels` by candidate, people's scores are the only rewards.

    Raises RecordError if there is no pair.
    """
    left_out: Counter[str] = Counter()
    unwritten = Unwritten()
    rows = Rows()
    learned = Counter[str]()
    tasks: dict[str, str] = {}
    for answers in _by_prompt(store, left_out, on_failure, labels).values():
        ranked = sorted(answers, key=lambda answer: answer.worth)
        worst, best = ranked[0], ranked[-1]
        if len(answers) < 2 or not worst.worth < best.worth:
            left_out["only_answer" if len(answers) < 2 else "equal_rewards"] += len(answers)
            continue
        pair = _rows_of_pair(store, readers(best.role), StoredAnswer.read(store, best), StoredAnswer.read(store, worst))
        if isinstance(pair, str):
            left_out[pair] += len(answers)
            for answer in answers:
                unwritten.add(answer.role, pair, StoredAnswer.read(store, answer).candidate)
            continue
        left_out["in_between"] += len(answers) - 2
        learned[best.role] += len(pair)
        tasks[best.episode] = best.task
        rows.add(best.episode, {best.role: pair})
    if not rows:
        raise RecordError(
            f"There is no pair of a better and a worse answer to one prompt ({counts_text(left_out) or 'no answers'}).",
            "Pairs need several answers to a prompt with different rewards: records of a run with plan tree or "
            "replay, or several episodes of each task.",
        )
    counted = {reason: count for reason, count in left_out.items() if count}
    return Recorded(rows=rows, tasks=tasks, left_out=counted, notes=unwritten.notes(learned))


def _by_prompt(
    store: Store, left_out: Counter[str], on_failure: OnFailure, labels: Mapping[str, float] | None
) -> dict[Hashable, list[_Answer]]:
    """Return the different answers to each prompt that have a reward."""
    with_own_reward: dict[Hashable, list[_Answer]] = defaultdict(list)
    with_shared_reward: dict[Hashable, list[_Answer]] = defaultdict(list)
    outcomes = outcome_values(store, on_failure)
    values = answer_values(store, outcomes)
    repeated: set[str] = set()
    for episode in learned_from(store, left_out):
        for call in store.calls(episode.id):
            if call.status != "ok" or not call.messages:
                left_out["failed_call" if call.status != "ok" else "no_messages"] += max(1, len(call.candidates))
                continue
            first = call.replayed or call.id
            if first in values and first in repeated:
                left_out["replayed"] += 1
                continue
            repeated.add(first)
            token_prompt = call.prompt and prompt_id(call.prompt, call.sampling.get("images") or ())
            prompt: Hashable = (episode.task.id, call.role, token_prompt or (call.messages_out, call.tools_out))
            ids = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
            all_rewards = store.rewards(ids)
            for id, candidate in zip(ids, call.candidates, strict=True):
                rewards = all_rewards.get(id)
                chosen = candidate.index == call.chosen
                if labels is not None:
                    rewards = {"label": labels[id]} if id in labels else None
                    if rewards is None:
                        left_out["no_label"] += 1
                        continue
                if rewards:
                    worth = sum(rewards.values())
                elif chosen and (first in values or episode.id in outcomes):
                    worth = values.get(first, outcomes.get(episode.id, 0.0))
                else:
                    left_out["no_reward" if chosen else "not_chosen"] += 1
                    continue
                answer = _Answer(
                    episode=episode.id,
                    task=episode.task.id,
                    call=call.id,
                    role=call.role,
                    index=candidate.index,
                    digest=_candidate_digest(candidate),
                    rewards=(worth,),
                )
                if rewards:
                    with_own_reward[prompt].append(answer)
                else:
                    with_shared_reward[prompt].append(answer)

    # Shared rewards only count for prompts without an answer that has rewards of its own.
    for prompt, answers in with_shared_reward.items():
        if prompt in with_own_reward:
            left_out["no_reward"] += len(answers)
    by_prompt = {**with_shared_reward, **with_own_reward}
    return {prompt: _merge_equal(answers) for prompt, answers in by_prompt.items()}


def _merge_equal(answers: Iterable[_Answer]) -> list[_Answer]:
    """Merge equal answers into one with all of their rewards."""
    distinct: dict[bytes, _Answer] = {}
    for answer in answers:
        if equal := distinct.get(answer.digest):
            answer = msgspec.structs.replace(equal, rewards=(*equal.rewards, *answer.rewards))
        distinct[answer.digest] = answer
    return list(distinct.values())


def _candidate_digest(candidate: Candidate) -> bytes:
    content = pack_ids(candidate.token_ids) if candidate.token_ids else canonical(candidate.message)
    return hashlib.blake2b(content, digest_size=16).digest()


def _rows_of_pair(store: Store, reader: Reader, best: StoredAnswer, worst: StoredAnswer) -> list[TrainRow] | str:
    """Return the rows of a pair, which have one prompt, or the reason why there are none."""
    pair: list[Ids] = []
    chat = reader.chat
    for answer in (best, worst):
        ids = token_ids_of(store, chat, answer)
        if isinstance(ids, str):
            return ids
        pair.append(ids)
    try:
        messages = [store.message(id) for id in best.call.messages_out]
        images = chat.images(messages)
    except (RecordError, RequestRefused) as error:
        return "lost_message" if isinstance(error, RecordError) else "unrenderable"
    (prompt, _), (worst_prompt, _) = pair
    if worst_prompt != prompt:
        return "other_prompt"
    if len(prompt) + max(len(answer_ids) for _, answer_ids in pair) > reader.longest:
        return "too_long"
    rows: list[TrainRow] = []
    for answer, (_, answer_ids) in zip((best, worst), pair, strict=True):
        row = TrainRow(
            id=candidate_id(answer.call.id, answer.candidate.index),
            role=answer.call.role,
            prompt_ids=prompt,
            response_ids=answer_ids,
            logprobs=(0.0,) * len(answer_ids),
            advantage=0.0,
            trajectory=answer.call.episode,
            images=images,
        )
        rows.append(row)
    return rows


Ids = tuple[tuple[int, ...], tuple[int, ...]]
"""The token ids of a prompt and of an answer."""


def token_ids_of(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> Ids | str:
    """Return prompt and answer as token ids: as they were sampled if they fit this model, else in its chat template.
    Returns the reason if its template cannot write them."""
    return _as_sampled(store, chat, answer) or _as_encoded(store, chat, answer)


def _as_sampled(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> Ids | None:
    """Return prompt and answer as they were sampled, if they are recorded and fit this model's tokenizer."""
    call = answer.call
    ids = answer.candidate.token_ids
    if call.prompt is None or not ids or max(ids) >= len(chat.tokenizer):
        return None
    try:
        prompt = store.token_ids(call.prompt)
        tools = store.message(call.tools_out) if call.tools_out else None
    except RecordError:
        return None
    # Another tokenizer may know the ids too, but reads another text in them.
    text, _message, _finish_reason = chat.parse(ids, call.sampling.get("stop") or (), prompt=prompt, tools=tools)
    return (prompt, ids) if text == answer.candidate.text else None


def _as_encoded(store: Store, chat: ChatTemplate, answer: StoredAnswer) -> Ids | str:
    """Return prompt and answer in this model's chat template, or the reason why it cannot write them."""
    call = answer.call
    try:
        messages = [store.message(id) for id in call.messages_out]
        tools = store.message(call.tools_out) if call.tools_out else None
    except RecordError:
        return "lost_message"
    options: Mapping[str, object] = template_options(call.params)
    encoded = encode_answer(chat, messages, tools_shown(call.params, tools), answer.candidate.message, options)
    return encoded if isinstance(encoded, str) else (encoded.prompt, encoded.answer)
