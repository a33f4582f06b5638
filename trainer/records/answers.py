"""Recipe sft: the rows of recorded answers, in the model's own template."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from cotune.algorithms.samples import TrainRow
from cotune.config.records import RecordsConfig
from cotune.errors import RecordError
from cotune.integrations.models.chat.answers import encode_answer
from cotune.reading.recorded_answers import RecordedAnswer, recorded_answers
from cotune.records.ids import candidate_id
from cotune.records.structs import CallRecord, Candidate, Episode
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.outcomes import OnFailure
from cotune.storage.protocol import Store
from cotune.trainer.records.lessons import Reader, Readers, Recorded, Rows

_REDACTED = "{count} answers are of calls with redacted parts: their replacements are learned"
_REASONING = "{count} answers lose their reasoning, which the chat template does not show"
_TEMPLATE_FAULTS = {
    "inexpressible": "the model's chat template does not write the answer, or its text would be read back as another "
    "answer",
    "unrenderable": "the model's chat template refuses the messages",
}
"""Reasons for which an answer has no row because of the chat template, with their meaning."""
_NO_REWARD = "Lower records.min_reward, or give rewards with: cotune records score RUN app:solve --write."
_REMEDIES = {
    "below_reward": _NO_REWARD,
    "no_reward": _NO_REWARD,
    "too_long": "Take a model with a longer context.",
}


class Unwritten:
    """Counts the answers that have no row, by role and reason, for notes to the user."""

    def __init__(self) -> None:
        self._reasons_of_role: dict[str, Counter[str]] = {}
        self._tool_calls: Counter[str] = Counter()

    def add(self, role: str, reason: str, answer: Candidate) -> None:
        """Count an answer of a role that has no row for this reason."""
        self._reasons_of_role.setdefault(role, Counter())[reason] += 1
        if reason in _TEMPLATE_FAULTS and answer.tool_calls:
            self._tool_calls[role] += 1

    def notes(self, learned: Mapping[str, int]) -> tuple[str, ...]:
        """Return a note for each role that learns nothing, or that has answers that the chat template cannot write. It
        has their number, the reason and the remedy. `learned` has the number of rows of each role."""
        notes: list[str] = []
        for role, reasons in sorted(self._reasons_of_role.items()):
            if not learned.get(role) or reasons.keys() & _TEMPLATE_FAULTS.keys():
                notes.append(self._note(role, learned.get(role, 0), reasons))
        return tuple(notes)

    def _note(self, role: str, learned: int, reasons: Counter[str]) -> str:
        """Return the note of a role with `learned` rows. `reasons` has the numbers of answers without a row."""
        lost = reasons.total()
        why = counts_text(reasons)
        tool_calls = self._tool_calls[role]
        if tool_calls:
            why += f", of them {tool_calls} tool calls"
        remedy = _commonest_remedy(reasons)
        if learned:
            return f"Role {role} learns {learned} of {learned + lost} answers; left out are {why}. {remedy}"
        return f"Role {role} learns nothing: all {lost} of its answers are left out ({why}). {remedy}"


def read_answers(store: Store, readers: Readers, settings: RecordsConfig, on_failure: OnFailure = "lowest") -> Recorded:
    """Return the recorded answers that `settings` select, as rows.

    `on_failure` is the outcome of failed branches in the value of an answer. Evaluations of a run and its first
    episodes, which find the roles, are left out. Raises RecordError if no answer is left.
    """
    left_out: Counter[str] = Counter()
    count_of_note: Counter[str] = Counter()  # the number of answers that each note is about, by its text
    tasks: dict[str, str] = {}
    rows = Rows()
    learned = Counter[str]()
    unwritten = Unwritten()
    episodes = learned_from(store, left_out)
    answers = recorded_answers(store, episodes, left_out, min_reward=settings.min_reward, on_failure=on_failure)

    # The answers of an episode come one after the other.
    for episode, answers_of_episode in itertools.groupby(answers, key=lambda answer: answer.episode.id):
        turns_of_role: dict[str, list[TrainRow]] = {}
        for answer in answers_of_episode:
            row = _row_of_answer(readers(answer.call.role), answer, count_of_note)
            if isinstance(row, str):  # the reason why there is none
                left_out[row] += 1
                unwritten.add(answer.call.role, row, answer.call.candidates[answer.call.chosen or 0])
                continue
            count_of_note[_REDACTED] += answer.call.redacted
            tasks[episode] = answer.episode.task.id
            turns_of_role.setdefault(row.role, []).append(row)
            learned[row.role] += 1
        rows.add(episode, {role: join_turns(turns) for role, turns in turns_of_role.items()})

    if not rows:
        raise RecordError(
            f"No recorded answer can be learned from ({counts_text(left_out) or 'there is none'}).",
            _commonest_remedy(left_out),
        )
    notes = [*unwritten.notes(learned)]
    for text, count in count_of_note.items():
        if count:
            notes.append(text.format(count=count))
    return Recorded(rows=rows, tasks=tasks, left_out=dict(left_out), notes=tuple(notes))


def join_turns(rows: Sequence[TrainRow]) -> list[TrainRow]:
    """Join the rows of one role in one episode. A row is appended to an earlier row if its prompt begins with the
    prompt and the answer of that row.

    A joined row has a loss mask: the tokens between the answers do not count. The loss stays the same, and the tokens
    that the turns share are computed once.
    """
    joined: list[TrainRow] = []
    for row in rows:
        continued = next((index for index, earlier in enumerate(joined) if _continues_row(row, earlier)), None)
        if continued is None:
            joined.append(row)
        else:
            joined[continued] = _append_turn(joined[continued], row)
    return joined


def _continues_row(row: TrainRow, earlier: TrainRow) -> bool:
    """Whether the prompt of a row begins with the prompt and the answer of an earlier row, and has its images."""
    path = earlier.prompt_ids + earlier.response_ids
    return row.prompt_ids[: len(path)] == path and row.images[: len(earlier.images)] == earlier.images


def _append_turn(earlier: TrainRow, row: TrainRow) -> TrainRow:
    """Return the earlier row, whose response now ends with the answer of `row`."""
    response = (*row.prompt_ids[len(earlier.prompt_ids) :], *row.response_ids)
    earlier_mask = earlier.loss_mask or (True,) * len(earlier.response_ids)
    tokens_between = len(response) - len(earlier.response_ids) - len(row.response_ids)
    return msgspec.structs.replace(
        earlier,
        response_ids=response,
        logprobs=(0.0,) * len(response),
        loss_mask=(*earlier_mask, *(False,) * tokens_between, *(True,) * len(row.response_ids)),
        images=row.images,
    )


def learned_from(store: Store, left_out: Counter[str]) -> Iterator[Episode]:
    """Yield the episodes of a store to learn from. Evaluations, and the first episodes of a run, which find the roles,
    are left out: their calls are added to `left_out`."""
    for episode in store.episodes():
        if episode.phase.startswith("eval"):
            left_out["evaluation"] += episode.calls
        elif episode.phase == "check":
            left_out["first_look"] += episode.calls
        else:
            yield episode


def call_fault(call: CallRecord) -> str:
    """Return the reason why no candidate of a call can be learned from; an empty text if they can."""
    if call.status != "ok":
        return "failed_call"
    if not call.messages:
        return "no_messages"
    return ""


def _row_of_answer(reader: Reader, answer: RecordedAnswer, count_of_note: Counter[str]) -> TrainRow | str:
    """Return the row of an answer, or the reason why there is none. If the template drops its reasoning, this is
    counted in `count_of_note`."""
    call = answer.call
    chat = reader.chat
    assert call.chosen is not None
    if answer.fault is not None:
        return answer.fault
    tools = tools_shown(call.params, answer.tools)
    options = template_options(call.params)
    encoded = encode_answer(chat, answer.messages, tools, answer.answer, options)
    if isinstance(encoded, str):
        return encoded
    if len(encoded.prompt) + len(encoded.answer) > reader.longest:
        return "too_long"
    count_of_note[_REASONING] += encoded.dropped_reasoning
    return TrainRow(
        id=candidate_id(call.id, call.chosen),
        role=call.role,
        prompt_ids=encoded.prompt,
        response_ids=encoded.answer,
        logprobs=(0.0,) * len(encoded.answer),
        advantage=1.0,
        trajectory=call.episode,
        images=chat.images(answer.messages),
    )


def _commonest_remedy(left_out: Counter[str]) -> str:
    """Return the remedy for the commonest reason for which answers are left out."""
    reasons = left_out.most_common(1)
    commonest = reasons[0][0] if reasons else ""
    if commonest in _TEMPLATE_FAULTS:
        meaning = _TEMPLATE_FAULTS[commonest]
        return f"{commonest}: {meaning}. Take a model whose chat template writes tool calls, or set tool_format."
    return _REMEDIES.get(commonest, "Look at the records with cotune show; record more with cotune trace.")


def counts_text(left_out: Mapping[str, int]) -> str:
    """List reasons with their counts, the commonest first."""
    return ", ".join(f"{reason}: {count}" for reason, count in Counter(left_out).most_common() if count)
