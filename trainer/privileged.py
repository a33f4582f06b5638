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
from cotune.judging.episodes import finished_call
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
    """The candidates to train on, and the prompts that their teachers read instead, by candidate."""

    collected: Collected
    prompts: Mapping[str, tuple[int, ...]]


def check_privileged(recipes: Recipes, tasks: Sequence[Task]) -> None:
    """Raise ConfigError if a task lacks a field that a critic or a teacher reads."""
    for loss in (recipe.loss for recipe in recipes.every):
        fields = {"critic_sees": loss.critic_sees}
        if loss.teacher_sees != FEEDBACK and ":" not in loss.teacher_sees:
            fields["teacher_sees"] = loss.teacher_sees
        for setting, field in fields.items():
            for task in tasks if field else ():
                _text(task, field, setting)


def with_privileged(
    rows: Sequence[TrainRow], episodes: Sequence[Episode], chat: ChatFormat, field: str
) -> Sequence[TrainRow]:
    """Return the rows of a policy with the token ids of the task's `field`, which only its critic reads."""
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
    into the `context` of its policy. Its reward still counts for samples of other policies. Raises GroupError for a
    function that fails.
    """
    teacher_sees: dict[str, str] = {}
    for sample in collected.samples:
        teacher_sees[sample.policy.name] = recipes.of(sample.policy.name).loss.teacher_sees
    taught = [sample for sample in collected.samples if teacher_sees[sample.policy.name]]
    if not taught:
        return Hints(collected, {})

    tasks = {episode.id: episode.task for episode in episodes}
    context_of = {name: context(name) for name in {sample.policy.name for sample in taught}}
    targets: list[str] = []  # feedback is on a candidate, or on its episode
    for sample in taught:
        targets += [sample.id, sample.rollout]
    feedback = store.feedback(targets)

    prompts: dict[str, tuple[int, ...]] = {}
    for sample in taught:
        call = finished_call(store, collected.calls[sample.call], tasks[sample.rollout])
        spec = teacher_sees[sample.policy.name]
        hint: str | list[dict[str, Any]] = ""
        if spec == FEEDBACK:
            texts = [*feedback.get(sample.id, {}).values(), *feedback.get(sample.rollout, {}).values()]
            if texts:
                hint = "\n".join(["Feedback on an earlier answer to this:", *texts])
        elif ":" in spec:
            hint = _hint_of_function(spec, sample, call)
        else:
            hint = f"{spec}: {_text(call.task, spec, 'teacher_sees')}"
        if not hint or collected.calls[sample.call].sampling.get("images"):
            continue

        # A text is added to the policy's own messages; a function may also replace them.
        if isinstance(hint, str):
            sent = [store.message(name) for name in collected.calls[sample.call].messages_out]
            messages = with_text(sent, hint)
        else:
            messages = hint
        chat = chats.of(sample.policy.name)
        options = template_options(call.params) or None
        room = context_of[sample.policy.name] - sample.tokens
        try:
            prompt = chat.render(messages, tools_shown(call.params, call.tools), most=room, options=options)
        except PromptTooLong:
            continue
        except SamplerError as error:
            cause = f"The hint of {spec} for a teacher cannot be rendered: {error_text(error)}."
            raise GroupError(cause, "Correct the function.") from error
        prompts[sample.id] = tuple(prompt)

    samples: list[Sample] = []
    without_hint: list[Sample] = []
    for sample in collected.samples:
        if teacher_sees[sample.policy.name] and sample.id not in prompts:
            without_hint.append(sample)
        else:
            samples.append(sample)
    others = list(collected.others)
    if recipes.joins_calls:
        others += [sample for sample in without_hint if sample.chosen]
    left_out = dict(Counter(collected.left_out) + Counter(no_hint=len(without_hint)))
    return Hints(msgspec.structs.replace(collected, samples=samples, others=others, left_out=left_out), prompts)


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


def _hint_of_function(spec: str, sample: Sample, call: Any) -> str | list[dict[str, Any]]:
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
    text: Any = task.input.get(field) if isinstance(task.input, Mapping) else None
    if not isinstance(text, str) or not text:
        remedy = f"Give every task a text there, or leave {setting} out."
        raise ConfigError(setting, field, f"is not text in every task; task {task.id} has {text!r}", remedy)
    return text
