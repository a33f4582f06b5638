"""Roles whose names a model invents: an application that lets a model write its agents has as many roles as the model
finds names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

from cotune.config.train import TrainConfig
from cotune.recording.recorder import LiveCall
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store
from cotune.trainer.before.answers.responder import CheckResponder, Message
from cotune.trainer.before.check.runs import Runner, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.findings import Finding

SUFFIX = "x"
"""Added to a name, it makes a name that no application knows."""
ONE_NAME = (
    'Give such agents one role: roles_by = "module:function" (docs/how-to/roles.md), or a fixed name in cotune.role. '
    'With policies = "shared" all of them play one policy.'
)


async def invented_roles(runner: Runner, runs: TaskRuns, store: Store) -> list[str]:
    """Return the roles of a task's runs that an answer named, and that would have had any other name just as well.

    A name that an answer contains may still be one of a fixed list, as a supervisor chooses from. So the run is
    repeated with other names in its answers: a role is invented if a role with the other name calls instead. The
    repeated runs are recorded in `store`, a separate one, because they are no runs of the report. Answers of a model
    cannot be repeated with other names: there is no result then.
    """
    repeating = dataclasses.replace(runner, store=store, watch=Watch())
    tried: set[str] = set()
    invented: list[str] = []
    for run in runs.runs:
        names = {role: name for role, name in names_in_answers(run.calls) if role not in tried}
        if not names or not run.ended or runner.responder(run.number).answers is None:
            continue
        tried.update(names)
        repeating.responder = partial(renaming_responder, runner.responder, names.values())
        repeated = await repeating.run_once(runs.task, run.number)
        for role, name in names.items():
            if f"{role.removesuffix(name)}{name}{SUFFIX}" in repeated.roles:
                invented.append(role)
    return invented


def names_in_answers(calls: Sequence[CallRecord]) -> Iterator[tuple[str, str]]:
    """Yield the roles whose name occurs in an earlier answer of a run, each with this name: the last part of its path.
    `calls` are in the order of the run."""
    answers = ""
    seen: set[str] = set()
    for call in calls:
        name = call.role.rpartition("/")[2]
        if call.role not in seen and word(name).search(answers):
            yield call.role, name
        seen.add(call.role)
        for candidate in call.candidates:
            if candidate.index == call.chosen:
                functions = [tool.get("function") or {} for tool in candidate.tool_calls]
                arguments = [str(function.get("arguments", "")) for function in functions]
                answers = "\n".join([answers, candidate.text, *arguments])


def word(name: str) -> re.Pattern[str]:
    """A pattern for a name as a whole word, in upper or lower case."""
    return re.compile(rf"(?<!\w){re.escape(name)}(?!\w)", re.IGNORECASE)


def renaming_responder(
    responder: Callable[[int], CheckResponder], names: Collection[str], number: int
) -> CheckResponder:
    """The responder of run `number`, which gives the same answers with other names in them."""
    original = responder(number)
    answers = original.answers
    assert answers is not None

    def renamed_answers(call: LiveCall) -> Callable[[int], Message]:
        message = answers(call)
        return lambda index: renamed(message(index), names)

    return dataclasses.replace(original, answers=renamed_answers)


def renamed(message: Message, names: Collection[str]) -> Message:
    """An answer with `SUFFIX` behind each of `names`, in its text and in the arguments of its tool calls."""

    def with_other_names(text: str) -> str:
        for name in names:
            text = word(name).sub(lambda match: match[0] + SUFFIX, text)
        return text

    changed = {**message}
    if isinstance(content := message.get("content"), str):
        changed["content"] = with_other_names(content)
    if tool_calls := message.get("tool_calls"):
        changed["tool_calls"] = []
        for tool in tool_calls:
            function = {**tool["function"], "arguments": with_other_names(str(tool["function"]["arguments"]))}
            changed["tool_calls"].append({**tool, "function": function})
    return changed


def invented_findings(invented: Sequence[str], config: TrainConfig) -> Iterator[Finding]:
    """Warn of roles with invented names, if each of them would have a policy of its own, or none."""
    if not invented or (config.policies == "shared" and not config.policy):
        return
    if config.policy:
        fate = "A name that no [[policy]] lists has no policy, and its calls are not trained on."
    else:
        policy = "LoRA" if config.policies == "lora" else "model"
        fate = f"Each new name becomes a role with a {policy} of its own, which starts untrained."
    text = f"an answer of a model invents {'this name' if len(invented) == 1 else 'these names'}. {fate}"
    yield Finding("warns", ", ".join(invented), text, ONE_NAME)
