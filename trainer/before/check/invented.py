"""Roles whose names are not fixed: an application that lets a model name its agents, or names them after its tasks, has
as many roles as there are names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial

import msgspec

from cotune.config.train import TrainConfig
from cotune.recording.recorder import LiveCall
from cotune.records.structs import CallRecord, Task
from cotune.storage.protocol import Store
from cotune.trainer.before.answers.responder import CheckResponder, Message
from cotune.trainer.before.check.runs import Runner, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.findings import Finding

SUFFIX = "x"
"""Added to a name, it makes a name that no application knows."""
MOST_REPEATS = 2
"""Runs of a task that are repeated with other names in their answers."""
ONE_NAME = (
    'Give such agents one role: roles_by = "module:function" (docs/how-to/roles.md), or a fixed name in cotune.role.'
)
SHARED = 'With policies = "shared" all of them play one policy.'


async def invented_roles(runner: Runner, runs: TaskRuns, store: Store) -> list[str]:
    """Return the roles of a task's runs whose names an answer invented.

    A name in an answer may still be one of a fixed list, as a supervisor chooses from. So the run is repeated with
    other names in its answers: a role is invented if a role with the other name calls instead. One run that shows it is
    enough, and at most `MOST_REPEATS` runs are repeated. They are recorded in the separate `store`, because they are no
    runs of the report. Answers of a model cannot be repeated with other names, so the result is empty for them.
    """
    renaming_runner = dataclasses.replace(runner, store=store, watch=Watch())
    tried_roles: set[str] = set()
    repeats = 0
    for run in runs.runs:
        name_of_role = {role: name for role, name in names_in_answers(run.calls) if role not in tried_roles}
        can_rename = runner.responder(run.number).answers is not None
        if not name_of_role or not run.ended or not can_rename:
            continue
        tried_roles.update(name_of_role)
        renaming_runner.responder = partial(renaming_responder, runner.responder, name_of_role.values())
        repeated = await renaming_runner.run_once(runs.task, run.number, how=", again, with other names in its answers")
        repeats += 1
        # In the repeated run, each of these names has SUFFIX behind it in all answers.
        invented: list[str] = []
        for role in name_of_role:
            if f"{role}{SUFFIX}" in repeated.roles:
                invented.append(role)
        if invented or repeats == MOST_REPEATS:
            return invented
    return []


@dataclasses.dataclass(frozen=True)
class TaskNames:
    """Two tasks, and the roles of each that the application does not have in the other."""

    task: str
    roles: Sequence[str]
    other_task: str
    other_roles: Sequence[str]


async def names_of_tasks(runner: Runner, tasks: Sequence[TaskRuns], other_task: Task, store: Store) -> TaskNames | None:
    """Compare the roles of tasks that have run with the roles of one run of another task. None if one of them has no
    role of its own: then tasks only choose among the same roles.

    The run is recorded in the separate `store`, because it is no run of the report.
    """
    other_watch = Watch()
    other_runner = dataclasses.replace(runner, store=store, watch=other_watch)
    other = await other_runner.run_once(other_task, 0, how=", for the names of its roles")
    roles = {call.role for runs in tasks for call in runs.calls}
    parts = {part.role for part in runner.watch.known}
    other_parts = {part.role for part in other_watch.known}
    only_here = sorted(roles - other.roles - other_parts)
    only_there = sorted(other.roles - roles - parts)
    if not only_here or not only_there or not other.ended:
        return None
    return TaskNames(tasks[0].task.id, only_here, other_task.id, only_there)


def names_in_answers(calls: Sequence[CallRecord]) -> Iterator[tuple[str, str]]:
    """Yield the roles whose name occurs in an earlier answer of a run, each with this name: the last part of its path.
    `calls` are in the order of the run."""
    earlier_answers = ""
    earlier_roles: set[str] = set()
    for call in calls:
        name = call.role.rpartition("/")[2]
        if call.role not in earlier_roles and whole_words([name]).search(earlier_answers):
            yield call.role, name
        earlier_roles.add(call.role)
        for candidate in call.candidates:
            if candidate.index == call.chosen:
                functions = [tool.get("function") or {} for tool in candidate.tool_calls]
                arguments = [str(function.get("arguments", "")) for function in functions]
                earlier_answers = "\n".join([earlier_answers, candidate.text, *arguments])


def whole_words(names: Collection[str]) -> re.Pattern[str]:
    """A pattern for names as whole words, in upper or lower case. If one name begins with another, the longer one is
    found."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)


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
    pattern = whole_words(names)

    def with_other_names(text: str) -> str:
        return pattern.sub(lambda match: match[0] + SUFFIX, text)

    changed = {**message}
    if isinstance(content := message.get("content"), str):
        changed["content"] = with_other_names(content)
    if tool_calls := message.get("tool_calls"):
        changed["tool_calls"] = []
        for tool in tool_calls:
            function = {**tool["function"], "arguments": with_other_names(str(tool["function"]["arguments"]))}
            changed["tool_calls"].append({**tool, "function": function})
    return changed


def invented_findings(invented: Sequence[str], config: TrainConfig, able: Collection[str] | None) -> Iterator[Finding]:
    """Warn of roles with names that an answer invented, unless one policy plays them all. Only roles in `able` can be
    trained (None: all)."""
    if invented:
        text = f"an answer of a model invents {'this name' if len(invented) == 1 else 'these names'}."
        yield from _naming_findings(invented, text, config, able)


def task_name_findings(names: TaskNames | None, config: TrainConfig, able: Collection[str] | None) -> Iterator[Finding]:
    """Warn of roles that are named after their task, unless they are listed in the configuration, or one policy plays
    them all. Only roles in `able` can be trained (None: all)."""
    if names is None:
        return
    roles = [role for role in names.roles if role not in config.roles]
    other_roles = [role for role in names.other_roles if role not in config.roles]
    if not roles or not other_roles:
        return
    text = (
        f"only task {names.task!r} has {_first(roles)}, and only task {names.other_task!r} has {_first(other_roles)}."
    )
    text += " Are agents named after their task?"
    for finding in _naming_findings(roles, text, config, able):
        listed = "If the tasks choose among fixed agents, list all of them under `roles`."
        yield msgspec.structs.replace(finding, remedy=f"{finding.remedy} {listed}")


def _first(roles: Sequence[str]) -> str:
    """The first three names of a list."""
    return ", ".join(roles[:3]) + (", ..." if len(roles) > 3 else "")


def _naming_findings(
    roles: Sequence[str], text: str, config: TrainConfig, able: Collection[str] | None
) -> Iterator[Finding]:
    """Say what training does with roles whose names are not fixed, after the `text` that tells why they are not."""
    policy_texts = {"shared": "the shared policy", "lora": "a LoRA of its own", "full": "a model of its own"}
    policy = policy_texts[config.policies]
    remedy = ONE_NAME
    if config.policy:
        consequence = (
            "Training does not start if a role calls that no [[policy]] lists. A role that first calls later has no "
        )
        consequence += "policy, and its calls are not trained on."
    elif able is not None:  # plan tree
        consequence = "Under plan tree only roles with a scorer are trained, and no scorer knows a new name."
    elif config.other_roles == "provider":
        consequence = (
            f"A name of the first episodes becomes a role with {policy}. The application's provider answers as all "
        )
        consequence += 'later ones, because other_roles = "provider", and these calls are not trained on.'
    elif config.policies == "shared":
        return
    else:
        consequence = f"Each new name becomes a role with {policy}, which starts untrained."
        remedy = f"{ONE_NAME} {SHARED}"
    yield Finding("warns", ", ".join(roles), f"{text} {consequence}", remedy)
