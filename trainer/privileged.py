"""What a critic or a teacher sees beyond the policy: text that the application does not show."""

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
from cotune.runtime.user_code import origin
from cotune.sampling.protocol import ChatFormat, ChatFormats
from cotune.sampling.request_params import template_options, tools_shown
from cotune.storage.protocol import Store

NO_FEEDBACK = (
    "No candidate of {policies} in this step has a text that teacher_sees asks for and that fits into the context. For "
    "feedback, return cotune.Feedback(reward, text) from the scorers or the workflow."
)


class Hints(NamedTuple):
    """The candidates whose teacher has something to see, and the prompts that it reads, by candidate."""

    collected: Collected
    prompts: Mapping[str, tuple[int, ...]]


def check_privileged(recipes: Recipes, tasks: Sequence[Task]) -> None:
    """Raises ConfigError where a critic or a teacher is to see a field that a task lacks."""
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
    """The rows of a policy with the token ids of the field of their task that its critic alone sees."""
    if not field:
        return rows
    seen = {e.id: tuple(chat.render([{"role": "user", "content": _text(e.task, field)}], None)) for e in episodes}
    return [msgspec.structs.replace(row, privileged=seen[row.trajectory]) for row in rows]


def with_hints(
    collected: Collected,
    episodes: Sequence[Episode],
    recipes: Recipes,
    store: Store,
    chats: ChatFormats,
    context: Callable[[str], int],
) -> Hints:
    """What the teachers of policies with `teacher_sees` read in place of the policies' prompts. A candidate without a
    text to see, or with one that does not fit into the `context` of its policy, is left out, counted as `no_hint`; its
    reward still counts for those of other policies. Raises GroupError for a function that fails."""
    sees = {name: recipes.of(name).loss.teacher_sees for name in {one.policy.name for one in collected.samples}}
    taught = [sample for sample in collected.samples if sees[sample.policy.name]]
    if not taught:
        return Hints(collected, {})
    tasks = {episode.id: episode.task for episode in episodes}
    most = {name: context(name) for name in {sample.policy.name for sample in taught}}
    texts = store.feedback([place for sample in taught for place in (sample.id, sample.rollout)])
    prompts: dict[str, tuple[int, ...]] = {}
    for sample in taught:
        call = finished_call(store, collected.calls[sample.call], tasks[sample.rollout])
        spec = sees[sample.policy.name]
        found: str | list[dict[str, Any]] = ""
        if spec == FEEDBACK:
            about = [text for place in (sample.id, sample.rollout) for text in texts.get(place, {}).values()]
            found = "\n".join(["Feedback on an earlier answer to this:", *about]) if about else ""
        elif ":" in spec:
            found = _said(spec, sample, call)
        else:
            found = f"{spec}: {_text(call.task, spec, 'teacher_sees')}"
        if not found or collected.calls[sample.call].sampling.get("images"):
            continue
        sent = [store.message(name) for name in collected.calls[sample.call].messages_out]
        messages = with_text(sent, found) if isinstance(found, str) else found
        chat, options = chats.of(sample.policy.name), template_options(call.params) or None
        room = most[sample.policy.name] - sample.tokens
        try:
            prompt = chat.render(messages, tools_shown(call.params, call.tools), most=room, options=options)
        except PromptTooLong:
            continue
        except SamplerError as error:
            said = f"What {spec} gives a teacher to see cannot be rendered: {error_text(error)}."
            raise GroupError(said, "Correct the function.") from error
        prompts[sample.id] = tuple(prompt)
    kept = [sample for sample in collected.samples if not sees[sample.policy.name] or sample.id in prompts]
    without = [sample for sample in taught if sample.id not in prompts]
    chosen = [sample for sample in without if sample.chosen] if recipes.joins_calls else []
    return Hints(
        msgspec.structs.replace(
            collected,
            samples=kept,
            others=[*collected.others, *chosen],
            left_out=dict(Counter(collected.left_out) + Counter(no_hint=len(without))),
        ),
        prompts,
    )


def with_text(messages: Sequence[Mapping[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with `text` at the end of the last one of a user; a message of its own where there is none."""
    shown = [dict(message) for message in messages]
    last = next((message for message in reversed(shown) if message.get("role") == "user"), None)
    if last is None:
        return [*shown, {"role": "user", "content": text}]
    content = last.get("content")
    if isinstance(content, list):
        last["content"] = [*content, {"type": "text", "text": text}]
    else:
        last["content"] = f"{content}\n\n{text}" if content else text
    return shown


def _said(spec: str, sample: Sample, call: Any) -> str | list[dict[str, Any]]:
    """What a function of the user's own gives a teacher to see of a candidate; empty for nothing."""
    function = own_function("teacher_sees", spec)
    candidate = next(one for one in call.candidates if candidate_id(call.id, one.index) == sample.id)
    try:
        found = function(candidate, call, call.task.input)
    except Exception as error:
        raise GroupError(f"{spec} raised {error_text(error)}{origin(error)}.", "Correct the function.") from error
    if found is None or isinstance(found, str):
        return found or ""
    if isinstance(found, Sequence) and all(isinstance(message, Mapping) for message in found):
        return [dict(message) for message in found]
    said = f"{spec} returned {type(found).__name__}, which is neither a text nor a list of messages."
    raise GroupError(said, "Return a text, a list of messages in OpenAI form, or None.")


def _text(task: Task, field: str, setting: str = "critic_sees") -> str:
    found: Any = task.input.get(field) if isinstance(task.input, Mapping) else None
    if not isinstance(found, str) or not found:
        remedy = f"Give every task a text there, or leave {setting} out."
        raise ConfigError(setting, field, f"is not text in every task; task {task.id} has {found!r}", remedy)
    return found
