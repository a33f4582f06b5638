"""Privileged text: a critic or a teacher reads it in training, but the policy and the application do not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from cotune.algorithms.collect import Collected
from cotune.algorithms.own import own_function
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.recipes import FEEDBACK
from cotune.algorithms.samples import Sample, TrainRow
from cotune.errors import ConfigError, GroupError, PromptTooLong, SamplerError, error_text
from cotune.judging.episodes import FinishedCall, finished_call
from cotune.records.ids import candidate_id
from cotune.records.structs import Episode, Task
from cotune.runtime.user_code import error_origin
from cotune.sampling.protocol import ChatFormat, ChatFormats
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.protocol import Store

NO_FEEDBACK = (
    "No candidate of {policies} in this step has a text that teacher_sees asks for and that fits into the context. For "
    "feedback, return cotune.Feedback(reward, text) from the scorers or the workflow."
)


class Hints(NamedTuple):
    """The candidates to train on, and what their teachers read."""

    collected: Collected
    prompts: Mapping[str, tuple[int, ...]]
    """The prompt with the hint, by the id of the candidate."""


def check_privileged(recipes: Recipes, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if a task lacks a field that a critic or a teacher reads."""
    for recipe in recipes.every:
        fields = {"critic_sees": recipe.loss.critic_sees}
        if _is_field(recipe.loss.teacher_sees):
            fields["teacher_sees"] = recipe.loss.teacher_sees
        for setting, field in fields.items():
            if not field:
                continue
            for task in tasks:
                _text(task, field, setting)  # raises ConfigError


def with_privileged(
    rows: Sequence[TrainRow], episodes: Sequence[Episode], chat: ChatFormat, field: str
) -> Sequence[TrainRow]:
    """Return the rows of a policy with the token ids of the task's `field`, which only its critic reads. Without a
    field, the rows stay as they are."""
    if not field:
        return rows
    privileged: dict[str, tuple[int, ...]] = {}
    for episode in episodes:
        message = {"role": "user", "content": _text(episode.task, field)}
        privileged[episode.id] = tuple(chat.render([message], None))
    return [msgspec.structs.replace(row, privileged=privileged[row.trajectory]) for row in rows]


def with_hints(
    collected: Collected,
    episodes: Sequence[Episode],
    recipes: Recipes,
    store: Store,
    chats: ChatFormats,
    context: Callable[[str], int],
) -> Hints:
    """Build the prompts that the teachers of policies with `teacher_sees` read instead of the policies' prompts.

    A candidate is left out, and counted as `no_hint`, if it has no hint, or if the prompt with the hint does not fit
    into the context of its policy. If a recipe sums the rewards of later calls, the reward of a candidate that is left
    out still counts for the calls before it. `context` returns the number of tokens of a policy's context. Raises
    GroupError for a function that fails.
    """
    teacher_sees: dict[str, str] = {}
    for sample in collected.samples:
        teacher_sees[sample.policy.name] = recipes.of(sample.policy.name).loss.teacher_sees
    taught = [sample for sample in collected.samples if teacher_sees[sample.policy.name]]
    if not taught:
        return Hints(collected, {})

    # Render the prompt of each taught sample.
    tasks = {episode.id: episode.task for episode in episodes}
    context_of = {name: context(name) for name in {sample.policy.name for sample in taught}}
    feedback = _feedback(store, taught)
    prompts: dict[str, tuple[int, ...]] = {}
    for sample in taught:
        record = collected.calls[sample.call]
        call = finished_call(store, record, tasks[sample.rollout])
        spec = teacher_sees[sample.policy.name]
        if spec == FEEDBACK:
            hint: str | list[dict[str, Any]] = feedback.get(sample.id, "")
        elif _is_field(spec):
            hint = f"{spec}: {_text(call.task, spec, 'teacher_sees')}"
        else:
            hint = _hint_of_function(spec, sample, call)
        if not hint or record.sampling.get("images"):
            continue  # teachers read no images
        # A text is added to the policy's own messages. Messages of a function replace them.
        messages = with_text([store.message(id) for id in record.messages_out], hint) if isinstance(hint, str) else hint
        most_tokens = context_of[sample.policy.name] - sample.tokens
        prompt = _render_hint(chats.of(sample.policy.name), messages, call, most_tokens, spec)
        if prompt is not None:
            prompts[sample.id] = prompt

    # Leave out the samples without a prompt.
    samples: list[Sample] = []
    without_hint: list[Sample] = []
    for sample in collected.samples:
        if teacher_sees[sample.policy.name] and sample.id not in prompts:
            without_hint.append(sample)
        else:
            samples.append(sample)
    others = list(collected.others)  # answers that are not trained on, but whose rewards count for earlier calls
    if recipes.joins_calls:
        others += [sample for sample in without_hint if sample.chosen]
    left_out = dict(Counter(collected.left_out) + Counter(no_hint=len(without_hint)))
    return Hints(msgspec.structs.replace(collected, samples=samples, others=others, left_out=left_out), prompts)


def _is_field(teacher_sees: str) -> bool:
    """Whether a `teacher_sees` names a field of tasks, and neither feedback nor a function ("module:name")."""
    return teacher_sees != FEEDBACK and ":" not in teacher_sees


def _feedback(store: Store, samples: Sequence[Sample]) -> dict[str, str]:
    """Return the feedback on samples, by their ids: on the candidate, and on its episode. Samples without any are left
    out."""
    targets: list[str] = []
    for sample in samples:
        targets += [sample.id, sample.rollout]
    texts_of_target = store.feedback(targets)
    hints: dict[str, str] = {}
    for sample in samples:
        texts = [*texts_of_target.get(sample.id, {}).values(), *texts_of_target.get(sample.rollout, {}).values()]
        if texts:
            hints[sample.id] = "\n".join(["Feedback on an earlier answer to this:", *texts])
    return hints


def _render_hint(
    chat: ChatFormat, messages: Sequence[Mapping[str, Any]], call: FinishedCall, most_tokens: int, spec: str
) -> tuple[int, ...] | None:
    """Return the token ids of a teacher's prompt; None if it has more than `most_tokens`. Raises GroupError for
    messages of the user's function that the chat template refuses."""
    tools = tools_shown(call.params, call.tools)
    try:
        prompt = chat.render(messages, tools, most=most_tokens, options=template_options(call.params) or None)
    except PromptTooLong:
        return None
    except SamplerError as error:
        cause = f"The hint of {spec} for a teacher cannot be rendered: {error_text(error)}."
        raise GroupError(cause, "Correct the function.") from error
    return tuple(prompt)


def with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return the messages with `text` at the end of the last user message, or as a new one if there is none."""
    copies = [dict(message) for message in messages]
    last_user_message = next((message for message in reversed(copies) if message.get("role") == "user"), None)
    if last_user_message is None:
        return [*copies, {"role": "user", "content": text}]
    content = last_user_message.get("content")
    if isinstance(content, list):
        last_user_message["content"] = [*content, {"type": "text", "text": text}]
    else:
        last_user_message["content"] = f"{content}\n\n{text}" if content else text
    return copies


def _hint_of_function(spec: str, sample: Sample, call: FinishedCall) -> str | list[dict[str, Any]]:
    """Return the hint that the user's function gives for a candidate: a text, or messages; empty without one."""
    function = own_function("teacher_sees", spec)
    candidate = next(drawn for drawn in call.candidates if candidate_id(call.id, drawn.index) == sample.id)
    try:
        hint = function(candidate, call, call.task.input)
    except Exception as error:
        raise GroupError(f"{spec} raised {error_text(error)}{error_origin(error)}.", "Correct the function.") from error
    if hint is None or isinstance(hint, str):
        return hint or ""
    if isinstance(hint, Sequence) and all(isinstance(message, Mapping) for message in hint):
        return [dict(message) for message in hint]
    cause = f"{spec} returned {type(hint).__name__}, which is neither a text nor a list of messages."
    raise GroupError(cause, "Return a text, a list of messages in OpenAI form, or None.")


def _text(task: Task, field: str, setting: str = "critic_sees") -> str:
    """Return the text in a field of a task. Raises ConfigError, which names the `setting` that needs it, if the task
    has none."""
    text: Any = task.input.get(field) if isinstance(task.input, Mapping) else None
    if not isinstance(text, str) or not text:
        remedy = f"Give every task a text in {field!r}, or leave {setting} out."
        raise ConfigError(setting, field, f"is not text in every task; task {task.id} has {text!r}", remedy)
    return text
