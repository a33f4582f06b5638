"""Recipe sft: the rows of recorded answers, in the model's own template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.config.records import RecordsConfig
from cotune.errors import RecordError
from cotune.integrations.models.chat.answers import encode_answer
from cotune.reading.recorded_answers import RecordedAnswer, recorded_answers
from cotune.records.ids import candidate_id
from cotune.records.structs import Candidate, Episode
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store
from cotune.trainer.records.lessons import Reader, Readers, Recorded, Rows

_REDACTED = "{count} answers are of calls with redacted parts: what stands there instead is learned"
_REWARDED = "Lower records.min_reward, or give rewards with: cotune records score RUN app:solve --write."
_MEANINGS = {
    "inexpressible": "the model's chat template does not write the answer, or writes what would be read back as "
    "something else",
    "unrenderable": "the model's chat template refuses the messages",
}
_REMEDIES = {
    **dict.fromkeys(("below_reward", "no_reward"), _REWARDED),
    **{
        reason: f"{reason}: {meaning}. Take a model whose chat template writes tool calls, or set tool_format."
        for reason, meaning in _MEANINGS.items()
    },
    "too_long": "Take a model with a longer context.",
}
_REASONING = "{count} answers lose their reasoning, which the chat template does not show"


class Unwritten:
    """Answers that were to be learned and have no row, by role and reason."""

    def __init__(self) -> None:
        self._reasons: dict[str, Counter[str]] = {}
        self._tool_calls: Counter[str] = Counter()

    def add(self, role: str, reason: str, answer: Candidate) -> None:
        """Count an answer."""
        self._reasons.setdefault(role, Counter())[reason] += 1
        self._tool_calls[role] += reason in _MEANINGS and bool(answer.tool_calls)

    def notes(self, learned: Mapping[str, int]) -> tuple[str, ...]:
        """What to know of the roles that learn nothing, of the rows that each has `learned`, or that say what the
        template cannot write: how much it is, why, and what to do."""
        return tuple(
            self._note(role, learned.get(role, 0), reasons)
            for role, reasons in sorted(self._reasons.items())
            if not learned.get(role) or reasons.keys() & _MEANINGS.keys()
        )

    def _note(self, role: str, learned: int, reasons: Counter[str]) -> str:
        lost = reasons.total()
        why = counts(reasons) + (f", of them {calls} tool calls" if (calls := self._tool_calls[role]) else "")
        if learned:
            return f"Role {role} learns {learned} of {learned + lost} answers; left out are {why}. {_remedy(reasons)}"
        return f"Role {role} learns nothing: all {lost} of its answers are left out ({why}). {_remedy(reasons)}"


def read_answers(store: Store, readers: Readers, settings: RecordsConfig, on_failure: OnFailure = "lowest") -> Recorded:
    """The answers of a records file that `settings` ask for, as rows.

    Failed branches count in an answer's value as `on_failure` says. Held-out evaluations of a run and its first look at
    the application are not learned from. Raises RecordError where no answer is left.
    """
    left_out: Counter[str] = Counter()
    noted: Counter[str] = Counter()
    tasks: dict[str, str] = {}
    rows, learned = Rows(), Counter[str]()
    of_episode: dict[str, list[TrainRow]] = {}
    episodes = learned_from(store, left_out)
    unwritten = Unwritten()
    listed = recorded_answers(store, episodes, left_out, min_reward=settings.min_reward, on_failure=on_failure)
    before = ""
    for found in listed:
        if found.episode.id != before:
            rows.add(before, {role: join_turns(turns) for role, turns in of_episode.items()})
            before, of_episode = found.episode.id, {}
        row = _row(readers(found.call.role), found, noted)
        if isinstance(row, str):
            left_out[row] += 1
            unwritten.add(found.call.role, row, found.call.candidates[found.call.chosen or 0])
            continue
        noted[_REDACTED] += found.call.redacted
        tasks[found.episode.id] = found.episode.task.id
        of_episode.setdefault(found.call.role, []).append(row)
        learned[row.role] += 1
    rows.add(before, {role: join_turns(turns) for role, turns in of_episode.items()})
    if not rows:
        raise RecordError(
            f"No recorded answer can be learned from ({counts(left_out) or 'there is none'}).", _remedy(left_out)
        )
    notes = (*unwritten.notes(learned), *(text.format(count=count) for text, count in noted.items() if count))
    return Recorded(rows=rows, tasks=tasks, left_out=dict(left_out), notes=notes)


def join_turns(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """The rows of one role in one episode, those joined whose prompt begins with an earlier row, prompt and answer.

    A joined row has a loss mask: what stands between the answers does not count. The loss stays the same, and what the
    turns share is computed once.
    """
    found: list[TrainRow] = []
    for row in rows:
        at = next((i for i, one in enumerate(found) if _goes_on(row, one)), None)
        if at is None:
            found.append(row)
            continue
        before = found[at]
        between = len(row.prompt_ids) - len(before.prompt_ids) - len(before.response_ids)
        mask = before.loss_mask or (True,) * len(before.response_ids)
        response = (*row.prompt_ids[len(before.prompt_ids) :], *row.response_ids)
        found[at] = msgspec.structs.replace(
            before,
            response_ids=response,
            logprobs=(0.0,) * len(response),
            loss_mask=(*mask, *(False,) * between, *(True,) * len(row.response_ids)),
            images=row.images,
        )
    return found


def _goes_on(row: TrainRow, before: TrainRow) -> bool:
    path = before.prompt_ids + before.response_ids
    return row.prompt_ids[: len(path)] == path and row.images[: len(before.images)] == before.images


def learned_from(store: Store, left_out: Counter[str]) -> Iterator[Episode]:
    """The episodes of a records file but for evaluations and first looks, whose calls are counted."""
    for episode in store.episodes():
        if episode.phase.startswith("eval"):
            left_out["evaluation"] += episode.calls
        elif episode.phase == "check":
            left_out["first_look"] += episode.calls
        else:
            yield episode


def _row(reader: Reader, found: RecordedAnswer, noted: Counter[str]) -> TrainRow | str:
    """The row of an answer, or why there is none."""
    call, chat = found.call, reader.chat
    assert call.chosen is not None
    if found.fault is not None:
        return found.fault
    tools, options = tools_shown(call.params, found.tools), template_options(call.params)
    encoded = encode_answer(chat, found.messages, tools, found.answer, options)
    if isinstance(encoded, str):
        return encoded
    if len(encoded.prompt) + len(encoded.answer) > reader.longest:
        return "too_long"
    noted[_REASONING] += encoded.dropped_reasoning
    return TrainRow(
        id=candidate_id(call.id, call.chosen),
        role=call.role,
        prompt_ids=encoded.prompt,
        response_ids=encoded.answer,
        logprobs=(0.0,) * len(encoded.answer),
        advantage=1.0,
        trajectory=call.episode,
        images=chat.images(found.messages),
    )


def _remedy(left_out: Counter[str]) -> str:
    """What mends the commonest reason for which answers are left out."""
    commonest = next((reason for reason, _ in left_out.most_common(1)), "")
    return _REMEDIES.get(commonest, "Look at the records with cotune show; record more with cotune trace.")


def counts(left_out: Mapping[str, int]) -> str:
    """Reasons and their counts, the commonest first."""
    return ", ".join(f"{reason}: {count}" for reason, count in Counter(left_out).most_common() if count)
