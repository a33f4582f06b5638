"""What the runs of a dry run say against training: how they failed, what outlives them, what they did beside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cotune.episodes.episode import Outcome
from cotune.errors import CotuneError
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import origin, phrase
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.check.causes import Made, said_last
from cotune.trainer.before.check.findings import blocking
from cotune.trainer.before.check.report import Finding
from cotune.trainer.before.check.runs import Run, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.stub.fitting import quotes

_UNSEEN = (
    "Calls of a model that cotune does not see are neither recorded nor trained, and a dry run makes them: give its "
    "client the address of `with cotune.gateway()`, see docs/how-to/gateway.md."
)
_PERSON = "Training has nobody to answer: take the reply from the task, or from a model in a role of its own."
_TOGETHER = (
    "Training runs several episodes at once: make what they share in the workflow function, or set concurrency = 1."
)
_KEPT = (
    "What one episode says must not reach the next: make histories, memories, teams and thread ids in the workflow "
    "function."
)
_VARIES = "Time, chance or an id in a prompt has this effect; candidates are compared under one prompt."
_ROOM = 60
"""Characters that are shown where two prompts differ."""
_LONGEST = 600


def fault_findings(
    faults: Iterable[CotuneError], tasks: Sequence[TaskRuns], watch: Watch, command: str
) -> Iterator[Finding]:
    """What would make training pointless. Where only made-up answers failed the verdict is left open, with the command
    that decides it."""
    ended = any(task.shown.ended for task in tasks)
    person = watch.asked and not ended
    if person:
        text = f"it waits for a person: {next(iter(watch.asked.values()))}."
        yield Finding("blocks", "runs", text, _PERSON)
    decide = f"The model's own answers decide it: {command or 'cotune train'} looks at up to 16 episodes first."
    decide += f" {_other(tasks)}"
    for fault in faults:
        finding = blocking(fault)
        if not ended and all(task.undecided for task in tasks):
            run = tasks[0].runs[0]
            text = f"{_short(fault.cause)} Made up before it: {said_last(run.calls)}.{_tried(tasks[0])}"
            yield Finding("undecided", "runs", text, decide)
        elif ended and _quoted(fault.cause, tasks):
            yield Finding("undecided", "", finding.text, decide)
        elif not (person and _end_of_input(fault)):
            yield finding


def _other(tasks: Sequence[TaskRuns]) -> str:
    """How to make up other answers; without tools only where the application has some."""
    tools = any(run.stub.offered for task in tasks for run in task.runs)
    told = "Give an answer that the application can read with --answer TEXT"
    return f"{told}, or leave its tools alone with --no-tools." if tools else f"{told}."


def _short(text: str) -> str:
    """An error without the traceback that a framework put into its text."""
    head = text.partition("\nTraceback")[0].strip()
    return head if len(head) <= _LONGEST else f"{head[:_LONGEST]} ..."


def _tried(task: TaskRuns) -> str:
    manners = dict.fromkeys(run.manner.about for run in task.runs if run.manner.about)
    return f" {len(task.runs)} runs failed, also those {', '.join(manners)}." if manners else ""


def _quoted(text: str, tasks: Sequence[TaskRuns]) -> bool:
    return any(quotes(text, made) for task in tasks for made in Made.of(task.shown.calls).texts)


def _end_of_input(error: BaseException | None) -> bool:
    return error is not None and ("EOF" in str(error) or _end_of_input(error.__cause__))


def twice_findings(tasks: Sequence[TaskRuns], store: Store) -> Iterator[Finding]:
    """What running a task again showed: that it fails beside another episode, or that it remembers an earlier one."""
    for task in tasks:
        if task.alone:
            error = next(run.outcome.error for run in task.twice if run.outcome.error is not None)
            text = (
                f"task {task.task.id} ends well alone, and fails while two episodes run at once: {_short(error.cause)}"
            )
            yield Finding("blocks", "runs", text, _TOGETHER)
    told: dict[str, Finding] = {}
    for task in tasks:
        for run in task.twice:
            told = {**_changed(task.shown, run, store), **told}
    yield from told.values()


def _changed(first: Run, again: Run, store: Store) -> dict[str, Finding]:
    """By role: how its first prompt differed in another run of the same task with the same answers."""
    found: dict[str, Finding] = {}
    before, after = _prompts(first.calls, store), _prompts(again.calls, store)
    for role in before.keys() & after.keys():
        one, other = before[role][0], after[role][0]
        if other in before[role] or one in after[role]:  # it may be asked several things at once, in any order
            continue
        if len(one) != len(other):
            low, high = sorted((len(one), len(other)))
            text = (
                f"its first prompt has {plural(low, 'message')} in one run and {high} in another run of the same task"
            )
            found[role] = Finding("warns", role, f"{text}: something outlives an episode.", _KEPT)
            continue
        a, b = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
        grown = a in b or b in a
        text = f"its first prompt differs between runs of the same task: {_difference(a, b)}"
        if grown:
            found[role] = Finding("warns", role, f"{text}: something outlives an episode.", _KEPT)
        else:
            found[role] = Finding("note", role, f"{text}.", _VARIES)
    return found


def _prompts(calls: Iterable[CallRecord], store: Store) -> dict[str, list[list[str]]]:
    """By role: the texts of its prompts. Ids of tool calls, which every run draws anew, are none."""
    found: dict[str, list[list[str]]] = {}
    for call in calls:
        found.setdefault(call.role, []).append([_text(store.message(name)) for name in call.messages])
    return found


def _text(message: Mapping[str, Any]) -> str:
    functions = [tool.get("function") or {} for tool in message.get("tool_calls") or ()]
    called = [f"{one.get('name')}({one.get('arguments')})" for one in functions]
    return "\n".join([str(message.get("content") or ""), *called])


def _difference(one: str, other: str) -> str:
    """Where two texts first differ, as both say it."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - _ROOM // 3)
    return " and ".join(repr(text[begin : begin + _ROOM]) for text in (one, other))


def run_findings(tasks: Sequence[TaskRuns], watch: Watch) -> Iterator[Finding]:
    """Runs that failed where another one did not, failures that the application or its framework swallowed, and
    warnings of the recorder."""
    runs = [run for task in tasks for run in task.runs]
    failed = [(task, run) for task in tasks for run in task.runs if not run.ended]
    if failed and any(run.ended for run in runs):
        task, run = failed[0]
        assert run.outcome.error is not None
        text = f"{len(failed)} of {plural(len(runs), 'run')} failed; the first, on task {task.task.id}: "
        text += _short(run.outcome.error.cause)
        if said := said_last(run.calls):
            text += f" Made up before it: {said}."
        remedy = f"{run.outcome.error.remedy} A model may answer like that too: have the workflow return a low reward."
        if run.cause.by_answer:
            remedy = f"A model may answer like that too: have the workflow return a low reward. {_other(tasks)}"
        yield Finding("warns", "runs", text, remedy)
    if watch.asked and any(run.ended for run in runs):
        text = f"a person is asked and never answers: {next(iter(watch.asked.values()))}."
        yield Finding("warns", "runs", text, _PERSON)
    yield from _logged(tasks)
    for task in tasks:
        if task.shown.ended and task.shown.outcome.live.failures:
            count = sum(task.shown.outcome.live.failures.values())
            text = f"{plural(count, 'call')} failed and the application went on as if nothing had happened."
            remedy = "Such an episode ends well and is trained on, without these calls. Let the error through."
            yield Finding("warns", f"task {task.task.id}", text, remedy)


def _logged(tasks: Sequence[TaskRuns]) -> Iterator[Finding]:
    """Exceptions that a framework logged, each once."""
    found: Counter[str] = Counter()
    remedy: dict[str, str] = {}
    for task in tasks:
        for run in task.all:
            raised = {f"{_short(phrase(error))}{origin(error)}" for error in run.logged if run.ended and run.calls}
            found.update(raised)
            lost = "The calls behind it are missing here, and in training"
            if run.cause.by_answer:
                lost = f"Made up before it: {said_last(run.calls)}. {lost} where a model answers like that"
            remedy = {**dict.fromkeys(raised, f"{lost}."), **remedy}
    total = sum(len(task.all) for task in tasks)
    for text, count in found.items():
        told = f"raised in {count} of {plural(total, 'run')}, and swallowed by the application or its framework: {text}"
        yield Finding("warns", "runs", told, remedy[text])


def connection_findings(outcomes: Sequence[Outcome], watch: Watch) -> Iterator[Finding]:
    """What the recorder warned of, and where the application connected to by itself."""
    counts: Counter[str] = Counter()
    texts: dict[str, str] = {}
    passed: Counter[str] = Counter()
    for outcome in outcomes:
        counts |= Counter(outcome.live.warnings)
        texts = {**outcome.live.explained, **texts}
        passed.update(outcome.live.notes.get("embeddings", {}))
    for kind, count in counts.items():
        yield Finding("warns", f"{kind} ({count})", texts[kind])
    for address, count in watch.connections.items():
        if address in passed:
            text = f"{plural(passed[address], 'request')} for embeddings went there. They are no calls: training "
            text += "sends them too."
            yield Finding("note", address, text)
            continue
        text = f"the application itself connected there, {plural(count, 'time')} in {plural(len(outcomes), 'run')}: "
        text += "a tool, or a model that cotune does not see."
        yield Finding("warns", address, text, _UNSEEN)
