"""Findings that only a dry run makes: of its runs, of parts that never called, of unanswerable requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from cotune.episodes.episode import Outcome
from cotune.errors import CotuneError, SamplerError
from cotune.integrations.models.chat.content import for_template
from cotune.integrations.models.chat.reply_grammar import unenforceable
from cotune.recording.app_parts import Part
from cotune.records.images import holds_images, images_of
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import origin, phrase
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.check.bases import CheckedBase
from cotune.trainer.before.check.causes import Made
from cotune.trainer.before.check.report import IdleCheck
from cotune.trainer.before.check.runs import Run, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.findings import Finding, RoleCheck, blocking
from cotune.trainer.before.stub.fitting import quotes
from cotune.trainer.before.stub.words import message_text
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.schedules.task_pool import extra_tasks

_NAME_THEM = (
    "Name them: --roles-by caller (the function that calls), --roles-by model or a function of yours leave the "
    'application as it is; with cotune.role("name"): ... stands in it. See docs/how-to/roles.md.'
)
_RARE = "List roles that call on some tasks only under `roles` in the configuration."
_UNSEEN = (
    "If it is a model, its calls are neither recorded nor trained, and the dry run made them: give its client the "
    "address of `with cotune.gateway()`, see docs/how-to/gateway.md."
)
_PERSON = "Training has nobody to answer: take the reply from the task, or from a model in a role of its own."
_TOGETHER = (
    "Training runs several episodes at once: make what they share in the workflow function, or set concurrency = 1."
)
_OUTLIVES = "One episode must not see another: make histories, memories, teams and thread ids in the workflow function."
_VARIES = "Time, chance or an id in a prompt does that; candidates are compared under one prompt."
_BY_MODEL = ("member", "agent")
"""Kinds of parts that always call a model."""
_ROOM = 60
"""Characters that are shown where two prompts differ."""
_LONGEST = 600


def fault_findings(
    faults: Iterable[CotuneError], tasks: Sequence[TaskRuns], watch: Watch, command: str
) -> Iterator[Finding]:
    """Errors that make training pointless. Where only made-up answers failed the verdict is left open, with the command
    that decides it."""
    ended = any(task.shown.ended for task in tasks)
    person = watch.asked and not ended
    if person:
        yield Finding("blocks", "runs", f"it waits for a person: {next(iter(watch.asked.values()))}.", _PERSON)
    decide = f"The model's own answers decide it: {command or 'cotune train'} looks at up to 16 episodes first."
    decide += f" {_other(tasks)}"
    made = {text for task in tasks for text in Made.of(task.shown.calls).texts}
    for fault in faults:
        if not ended and all(task.undecided for task in tasks):
            manners = dict.fromkeys(run.manner.about for run in tasks[0].runs if run.manner.about)
            tried = f" {len(tasks[0].runs)} runs failed, also those {', '.join(manners)}." if manners else ""
            answer = tasks[0].runs[0].cause.answer
            yield Finding("undecided", "runs", f"{_short(fault.cause)} Made up before it: {answer}.{tried}", decide)
        elif ended and any(quotes(fault.cause, text) for text in made):
            yield Finding("undecided", "", fault.cause, decide)
        elif not (person and _end_of_input(fault)):
            yield blocking(fault)


def _other(tasks: Sequence[TaskRuns]) -> str:
    """How to make up other answers; without tools only where the application has some."""
    tools = any(run.stub.offered for task in tasks for run in task.runs)
    told = "Give an answer that the application can read with --answer TEXT"
    return f"{told}, or leave its tools alone with --no-tools." if tools else f"{told}."


def _short(text: str) -> str:
    """An error without the traceback that a framework put into its text."""
    head = text.partition("\nTraceback")[0].strip()
    return head if len(head) <= _LONGEST else f"{head[:_LONGEST]} ..."


def _end_of_input(error: BaseException | None) -> bool:
    return error is not None and ("EOF" in str(error) or _end_of_input(error.__cause__))


def twice_findings(tasks: Sequence[TaskRuns], store: Store) -> Iterator[Finding]:
    """A second run of a task fails while another episode runs, or remembers an earlier one."""
    told: dict[str, Finding] = {}
    for task in tasks:
        if task.alone:
            error = next(run.outcome.error for run in task.twice if run.outcome.error is not None)
            text = f"task {task.task.id} ends well alone, and fails while two episodes run at once: "
            yield Finding("blocks", "runs", text + _short(error.cause), _TOGETHER)
        for run in task.twice:
            for finding in _changed(task.shown, run, store):
                told.setdefault(finding.about, finding)
    yield from told.values()


def _changed(first: Run, again: Run, store: Store) -> Iterator[Finding]:
    """How the first prompt of each role differed in another run of the same task with the same answers."""
    before, after = _prompts(first.calls, store), _prompts(again.calls, store)
    for role in sorted(before.keys() & after.keys()):
        one, other = before[role][0], after[role][0]
        if other in before[role] or one in after[role]:  # it may be asked several things at once, in any order
            continue
        if len(one) == len(other):
            a, b = next((a, b) for a, b in zip(one, other, strict=True) if a != b)
            text, grown = f"differs between runs of the same task: {_difference(a, b)}", a in b or b in a
        else:
            low, high = sorted((len(one), len(other)))
            text, grown = f"has {plural(low, 'message')} in one run and {high} in another run of the same task", True
        if grown:
            yield Finding("warns", role, f"its first prompt {text}: something outlives an episode.", _OUTLIVES)
        else:
            yield Finding("note", role, f"its first prompt {text}.", _VARIES)


def _prompts(calls: Iterable[CallRecord], store: Store) -> dict[str, list[list[str]]]:
    """By role: the texts of its prompts. Ids of tool calls, which differ in every run, are not in them."""
    texts: dict[str, list[list[str]]] = {}
    for call in calls:
        texts.setdefault(call.role, []).append([message_text(store.message(name)) for name in call.messages])
    return texts


def _difference(one: str, other: str) -> str:
    """Where two texts first differ, as both say it."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, at - _ROOM // 3)
    return " and ".join(repr(text[begin : begin + _ROOM]) for text in (one, other))


def run_findings(tasks: Sequence[TaskRuns], watch: Watch) -> Iterator[Finding]:
    """Runs that failed where another one did not, and failures that the application or its framework swallowed."""
    runs = [run for task in tasks for run in task.runs]
    failed = [(task, run) for task in tasks for run in task.runs if not run.ended]
    if failed and any(run.ended for run in runs):
        task, run = failed[0]
        assert run.outcome.error is not None
        text = f"{len(failed)} of {plural(len(runs), 'run')} failed; the first, on task {task.task.id}: "
        text += _short(run.outcome.error.cause)
        text += f" Made up before it: {run.cause.answer}." if run.cause.answer else ""
        remedy = "A model may answer like that too: have the workflow return a low reward."
        remedy = f"{remedy} {_other(tasks)}" if run.cause.by_answer else f"{run.outcome.error.remedy} {remedy}"
        yield Finding("warns", "runs", text, remedy)
    if watch.asked and any(run.ended for run in runs):
        text = f"a person is asked and never answers: {next(iter(watch.asked.values()))}."
        yield Finding("warns", "runs", text, _PERSON)
    yield from _logged([run for task in tasks for run in task.all])
    for task in tasks:
        if task.shown.ended and (count := sum(task.shown.outcome.live.failures.values())):
            text = f"{plural(count, 'call')} failed and the application went on as if nothing had happened."
            remedy = "Such an episode ends well and is trained on, without these calls. Let the error through."
            yield Finding("warns", f"task {task.task.id}", text, remedy)


def _logged(runs: Sequence[Run]) -> Iterator[Finding]:
    """Exceptions that a framework logged, each once."""
    counts: Counter[str] = Counter()
    remedies: dict[str, str] = {}
    for run in runs:
        raised = {f"{_short(phrase(error))}{origin(error)}" for error in run.logged if run.ended and run.calls}
        counts.update(raised)
        remedy = "The calls behind it are missing here, and in training"
        if run.cause.by_answer:
            remedy = f"Made up before it: {run.cause.answer}. {remedy} where a model answers like that"
        remedies = {**dict.fromkeys(raised, f"{remedy}."), **remedies}
    for text, count in counts.items():
        told = f"raised in {count} of {plural(len(runs), 'run')}, and swallowed by the application or its framework: "
        yield Finding("warns", "runs", told + text, remedies[text])


def connection_findings(outcomes: Sequence[Outcome], watch: Watch) -> Iterator[Finding]:
    """Warnings of the recorder, and hosts that the application itself connected to."""
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
            yield Finding("note", address, f"{text}sends them too.")
        else:
            text = (
                f"the application itself connected there, {plural(count, 'time')} in {plural(len(outcomes), 'run')}: "
            )
            yield Finding("warns", address, f"{text}a tool, or a model that cotune does not see.", _UNSEEN)


def role_findings(roles: Sequence[RoleCheck]) -> Iterator[Finding]:
    """Roles that are not trained, and calls that belong to none."""
    for one in roles:
        if one.reason == "no scorer":
            remedy = f'Add @workflow.scorer("{one.role}"), or use --plan independent.'
            yield Finding("warns", one.role, "not trained: no scorer", remedy)
        elif not one.trained:
            yield Finding("note", one.role, f"not trained: {one.reason}")
        if one.role == "app":
            text = f"Calls made outside any agent or node share the role `app`: {one.calls}."
            yield Finding("warns", "app", text, _NAME_THEM)


def idle_findings(idle: Sequence[IdleCheck], calls: Sequence[CallRecord], known: Sequence[Part]) -> Iterator[Finding]:
    """Parts of the application that never called: those that never ran, and those that work without a model. And
    whether there may be agents that no framework lists."""
    if not calls:
        return
    missed: dict[tuple[str, str], list[str]] = {}
    for one in idle:
        if not one.ran and one.waits:
            yield Finding("warns", one.role, f"the graph stops before it ({one.waits}) and is not resumed.", _PERSON)
        elif not one.ran or one.kind in _BY_MODEL:
            missed.setdefault((one.kind, one.of), []).append(one.role)
    for (kind, of), roles in missed.items():
        how = "never called" if kind in _BY_MODEL else "never ran"
        text = f"{how} with these made-up answers ({plural(len(roles), kind)} of {of})."
        text += "" if kind in _BY_MODEL else " The dry run does not tell whether it calls a model."
        yield Finding(
            "warns", ", ".join(roles), text, f"Other answers or tasks may lead there: --answer, --limit. {_RARE}"
        )
    if quiet := [one.role for one in idle if one.ran and one.kind not in _BY_MODEL]:
        yield Finding("note", ", ".join(quiet), "ran without a call of its own.")
    listed = {part.role for part in known}
    teams = tuple(f"{part.of}/" for part in known if part.kind == "member")
    unlisted = dict.fromkeys(call.role for call in calls if call.role not in listed and not call.role.startswith(teams))
    if unlisted:
        text = f"no framework lists {', '.join(unlisted)}: roles that did not call may be missing."
        yield Finding("note", "roles", text, _RARE)


def refill_findings(config: TrainConfig, plan: Plan, tasks: int, calls: float) -> Iterator[Finding]:
    """What a refill may cost in a step; `tasks` are those of the run, `calls` those of an episode."""
    own = min(config.tasks_per_step, tasks)
    more = extra_tasks(config.refill.budget, own)
    more = more if config.refill.draw == "again" else min(more, tasks - own)
    if not config.refill.budget:
        return
    episodes = plan.k if plan.kind == "independent" else 1
    ran, extra = (f"{n * episodes:,} episodes, about {n * episodes * calls:,.0f} calls" for n in (own, more))
    first = f"a step runs {plural(own, 'task')} ({ran}), and up to {more} more ({extra})"
    yield Finding("note", "refill", f"{first} where groups have equal rewards.")


def request_findings(
    bases: Mapping[str, CheckedBase | None], calls: Sequence[CallRecord], store: Store
) -> tuple[Mapping[str, int], Iterable[Finding]]:
    """Tokens of each call's prompt in the chat template of its role's base, and the calls that training would refuse:
    the template cannot render them, the prompt is too long for the base, no policy can read their content, or no
    sampler can enforce the form of their reply."""
    tokens: dict[str, int] = {}
    findings: dict[tuple[str, str], Finding] = {}
    for call in calls:
        tools = store.message(call.tools) if call.tools else None
        messages = [store.message(name) for name in call.messages]
        if cause := unenforceable(call.params, tools):
            remedy = "Change the request, or give the role a policy of kind provider."
            findings[call.role, cause] = Finding("blocks", call.role, cause, remedy)
        try:
            if (base := bases.get(call.role)) is not None:
                tokens[call.id] = len(base.chat.render(messages, tools, most=base.context - 1))
            elif holds_images(messages):
                images_of(messages)
            for message in messages:
                for_template(message, parts=True)
        except SamplerError as error:
            remedy = f"{error.remedy} Or give the role a policy of kind provider."
            findings[call.role, error.cause] = Finding("blocks", call.role, error.cause, remedy)
    offered = [role for role in bases if any(call.tools for call in calls if call.role == role)]
    if unshown := [role for role in offered if (base := bases[role]) is not None and not base.chat.shows_tools]:
        from cotune.integrations.models.chat.template import SHOW_TOOLS, UNSHOWN_TOOLS

        findings["", ""] = Finding("warns", ", ".join(unshown), UNSHOWN_TOOLS, SHOW_TOOLS)
    return tokens, findings.values()
