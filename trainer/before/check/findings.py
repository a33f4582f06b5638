"""Findings that only a dry run makes: of its runs, of parts that never called, of unanswerable requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cotune.episodes.episode import Outcome
from cotune.errors import ConfigError, CotuneError, SamplerError
from cotune.integrations.models.chat.content import for_template, text_of
from cotune.integrations.models.chat.reply_grammar import unenforceable
from cotune.recording.app_parts import Part
from cotune.records.images import holds_images, images_of
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import origin, phrase
from cotune.sampling.request_params import function_of
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.check.bases import CheckedBase
from cotune.trainer.before.check.report import IdleCheck
from cotune.trainer.before.check.runs import PAIRS, Run, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.findings import Finding, Level, RoleCheck, blocking
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.schedules.task_pool import extra_tasks

NAME_THEM = (
    "Name them: --set roles_by=caller (the function that calls), roles_by=model or a function of yours leave the "
    'application as it is; with cotune.role("name"): ... stands in it. See docs/how-to/roles.md.'
)
RARE = "List roles that call on some tasks only under `roles` in the configuration."
DECIDE = (
    "Let a model decide: --answers MODEL (a small one), --answers provider (your application's own), or --answers "
    "records:ADDRESS (answers that cotune trace recorded)."
)
UNSEEN = (
    "If it is a model, its calls are neither recorded nor trained, and the dry run made them: give its client the "
    "address of `with cotune.gateway()`, see docs/how-to/gateway.md."
)
PERSON = "Training has nobody to answer: take the reply from the task, or from a model in a role of its own."
TOGETHER = (
    "Training runs several episodes at once: make what they share in the workflow function, or set concurrency = 1."
)
OUTLIVES = "One episode must not see another: make histories, memories, teams and thread ids in the workflow function."
VARIES = "Time, chance or an id in a prompt does that; candidates are compared under one prompt."
ALWAYS_CALL = ("member", "agent")
"""Kinds of parts that always call a model."""
SHOWN_DIFFERENCE = 60
"""Characters that are shown where two prompts differ."""
LONGEST_ERROR = 600


def fault_findings(faults: Iterable[CotuneError], tasks: Sequence[TaskRuns], watch: Watch) -> Iterator[Finding]:
    """Errors that make training pointless. What fails after an answer may be due to that answer: then the verdict stays
    open."""
    ended = any(task.shown.ended for task in tasks)
    runs = [run for task in tasks for run in task.runs]
    waiting = [watch.asked[run.id] for run in runs if run.id in watch.asked and waited(run, ended)]
    if waiting:
        yield Finding("blocks", "runs", f"it waits for a person: {waiting[0]}.", PERSON)
    cut = sum(run.cut for run in runs)
    for fault in faults:
        if waiting and end_of_input(fault):
            continue
        known = isinstance(fault, ConfigError) and "Did you mean" in fault.remedy
        by_answers = not (ended or waiting) and all(run.cut or run.answered for run in runs)
        if known or not (ended or by_answers) or (ended and not answers_decide(fault, tasks)):
            yield blocking(fault)
            continue
        text = shorten(fault.cause)
        if by_answers:
            last = next((run.last_answer for run in runs if run.last_answer), "")
            text += f" Last answer before it: {last}." if last else ""
            text += f" All {len(runs)} runs failed"
            text += f", {cut} of them at a limit of time or calls." if cut else "."
        limits = "Raise --timeout or --calls if a run may need more. " if cut else ""
        yield Finding("undecided", "runs" if by_answers else "", text, limits + DECIDE)


def answers_decide(fault: CotuneError, tasks: Sequence[TaskRuns]) -> bool:
    """Whether a fault of runs that ended may be due to their answers: a scorer that fails, or a role that only other
    answers lead to."""
    if isinstance(fault, ConfigError):
        return True
    return any(str(call.error) in str(fault) for task in tasks for call in task.calls if call.error)


def shorten(text: str) -> str:
    """An error without the traceback that a framework put into its text."""
    head = text.partition("\nTraceback")[0].strip()
    return head if len(head) <= LONGEST_ERROR else f"{head[:LONGEST_ERROR]} ..."


def waited(run: Run, others_ended: bool) -> bool:
    """Whether a run that asked a person failed for want of a reply."""
    return not run.ended and (not others_ended or end_of_input(run.outcome.error))


def end_of_input(error: BaseException | None) -> bool:
    return error is not None and ("EOF" in str(error) or end_of_input(error.__cause__))


def pair_findings(tasks: Sequence[TaskRuns], store: Store) -> Iterator[Finding]:
    """Runs at once that fail, or whose prompts show that something outlives an episode."""
    told: dict[str, Finding] = {}
    for task in tasks:
        failed = task.failed_pairs
        if failed:
            errors = [run.outcome.error for pair in failed for run in pair if run.outcome.error is not None]
            cut = any(run.cut for pair in failed for run in pair)
            cut = any(run.cut for pair in failed for run in pair)
            each_time = len(failed) == PAIRS and not task.fails_by_chance and not cut
            level: Level = "blocks" if each_time else "undecided"
            text = f"task {task.task.id} ends well alone, and fails while two episodes run at once "
            text += f"({len(failed)} of {plural(len(task.pairs), 'pair')}): {shorten(errors[0].cause)}"
            yield Finding(level, "runs", text, TOGETHER)
        elif any(run.cut for pair in task.pairs for run in pair):
            text = f"task {task.task.id}: both of two runs at once reached a limit, so nothing is known of conflicts."
            yield Finding("warns", "runs", text, "Raise --timeout.")
        for run in (run for pair in task.pairs for run in pair):
            for finding in changed_prompts(task.shown, run, store):
                told.setdefault(finding.about, finding)
    yield from told.values()


def changed_prompts(first: Run, again: Run, store: Store) -> Iterator[Finding]:
    """How the first prompt of each role differs in another run of the same task with the same answers."""
    before, after = prompts_by_role(first.calls, store), prompts_by_role(again.calls, store)
    for role in sorted(before.keys() & after.keys()):
        one, other = before[role][0], after[role][0]
        if other in before[role] or one in after[role]:  # it may be asked several things at once, in any order
            continue
        if len(one) != len(other):
            low, high = sorted((len(one), len(other)))
            text, grew = f"has {plural(low, 'message')} in one run and {high} in another run of the same task", True
        else:
            old, new = next((old, new) for old, new in zip(one, other, strict=True) if old != new)
            pairs = enumerate(zip(old, new, strict=False))
            start = next((i for i, (left, right) in pairs if left != right), min(len(old), len(new)))
            begin = max(0, start - SHOWN_DIFFERENCE // 3)
            shown = " and ".join(repr(text[begin : begin + SHOWN_DIFFERENCE]) for text in (old, new))
            text, grew = f"differs between runs of the same task: {shown}", old in new or new in old
        if grew:
            yield Finding("warns", role, f"its first prompt {text}: something outlives an episode.", OUTLIVES)
        else:
            yield Finding("note", role, f"its first prompt {text}.", VARIES)


def prompts_by_role(calls: Iterable[CallRecord], store: Store) -> dict[str, list[list[str]]]:
    texts: dict[str, list[list[str]]] = {}
    for call in calls:
        texts.setdefault(call.role, []).append([message_text(store.message(name)) for name in call.messages])
    return texts


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, with the names and arguments of its tool calls but not their ids, which differ in each run."""
    text = text_of(message.get("content"))
    for tool in message.get("tool_calls") or ():
        function = tool.get("function") or {}
        text += f"{function.get('name')}{function.get('arguments')}"
    return text


def run_findings(tasks: Sequence[TaskRuns], watch: Watch) -> Iterator[Finding]:
    """Runs that failed where another one did not, and failures that the application or its framework swallowed."""
    runs = [run for task in tasks for run in task.runs]
    failed = [run for run in runs if not run.ended]
    if failed and len(failed) < len(runs):
        first = failed[0].outcome
        assert first.error is not None
        text = f"{len(failed)} of {plural(len(runs), 'run')} failed; the first, on task {first.episode.task.id}: "
        text += shorten(first.error.cause)
        text += f" Last answer before it: {failed[0].last_answer}." if failed[0].last_answer else ""
        remedy = "A model may answer like that too: have the workflow return a low reward."
        yield Finding("warns", "runs", text, f"{first.error.remedy} {remedy}".strip())
    if watch.asked and any(run.ended for run in runs):
        text = f"a person is asked and never answers: {next(iter(watch.asked.values()))}."
        yield Finding("warns", "runs", text, PERSON)

    counts: Counter[str] = Counter()
    last_answers: dict[str, str] = {}
    every = [run for task in tasks for run in task.all]
    for run in every:
        if run.ended and run.calls:
            raised = {f"{shorten(phrase(error))}{origin(error)}" for error in run.logged}
            counts.update(raised)
            last_answers = {**dict.fromkeys(raised, run.last_answer), **last_answers}
    for text, count in counts.items():
        told = f"raised in {count} of {plural(len(every), 'run')}, and swallowed by the application or its framework: "
        remedy = "The calls behind it are missing here, and in training if a model answers like that."
        yield Finding("warns", "runs", told + text, f"Last answer of that run: {last_answers[text]}. {remedy}")

    for task in tasks:
        if task.shown.ended and (count := sum(task.shown.outcome.live.failures.values())):
            text = f"{plural(count, 'call')} failed and the application went on as if nothing had happened."
            remedy = "Such an episode ends well and is trained on, without these calls. Let the error through."
            yield Finding("warns", f"task {task.task.id}", text, remedy)


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
    for address, count in passed.items():
        text = f"{plural(count, 'request')} for embeddings got fixed vectors; nothing was sent. Training sends them."
        yield Finding("note", address, text)
    for address, count in watch.connections.items():
        times = f"{plural(count, 'time')} in {plural(len(outcomes), 'run')}"
        text = f"the application itself connected there, {times}: a tool, or a model that cotune does not see."
        yield Finding("warns", address, text, UNSEEN)


def role_findings(roles: Sequence[RoleCheck], workflow: str) -> Iterator[Finding]:
    """Roles that are not trained, and calls that belong to none. `workflow` is the name of its function."""
    for one in roles:
        if one.reason == "no scorer":
            remedy = f'Add @{workflow}.scorer("{one.role}"), or use --plan independent.'
            yield Finding("warns", one.role, "not trained: no scorer", remedy)
        elif not one.trained:
            yield Finding("note", one.role, f"not trained: {one.reason}")
        if one.role == "app":
            text = f"Calls made outside any agent or node share the role `app`: {one.calls}."
            yield Finding("warns", "app", text, NAME_THEM)


def idle_findings(idle: Sequence[IdleCheck]) -> Iterator[Finding]:
    """Parts of the application that never called: those that never ran, and those that work without a model."""
    missed: dict[tuple[str, str], list[str]] = {}
    for one in idle:
        if not one.ran and one.waits:
            yield Finding("warns", one.role, f"the graph stops before it ({one.waits}) and is not resumed.", PERSON)
        elif not one.ran or one.kind in ALWAYS_CALL:
            missed.setdefault((one.kind, one.of), []).append(one.role)
    for (kind, of), roles in missed.items():
        how = "never called" if kind in ALWAYS_CALL else "never ran"
        text = f"{how} in these runs ({plural(len(roles), kind)} of {of})."
        text += "" if kind in ALWAYS_CALL else " The dry run does not tell whether it calls a model."
        remedy = f"Other answers or tasks may lead there: --answers, --limit. {RARE}"
        yield Finding("warns", ", ".join(roles), text, remedy)
    if quiet := [one.role for one in idle if one.ran and one.kind not in ALWAYS_CALL]:
        yield Finding("note", ", ".join(quiet), "ran without a call of its own.")


def unlisted_roles(calls: Sequence[CallRecord], known: Sequence[Part]) -> list[str]:
    """Roles that no framework lists: there may be other agents that did not call."""
    listed = {part.role for part in known}
    teams = tuple(f"{part.of}/" for part in known if part.kind == "member")
    roles = dict.fromkeys(call.role for call in calls)
    return [role for role in roles if role not in listed and not role.startswith(teams)]


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
    for role, base in bases.items():
        with_tools = [call for call in calls if call.role == role and call.tools]
        if with_tools and base is not None and not base.chat.shows_tools:
            from cotune.integrations.models.chat.template import SHOW_TOOLS, UNSHOWN_TOOLS

            # An application may describe its tools in the prompt itself.
            level: Level = "warns" if all(_names_tools(call, store) for call in with_tools) else "blocks"
            findings[role, UNSHOWN_TOOLS] = Finding(level, role, UNSHOWN_TOOLS, SHOW_TOOLS)
    return tokens, findings.values()


def _names_tools(call: CallRecord, store: Store) -> bool:
    """Whether the messages of a call name each tool that it offers."""
    text = "\n".join(text_of(store.message(name).get("content")) for name in call.messages)
    tools = store.message(call.tools) if call.tools else []
    return all(str(function_of(tool).get("name")) in text for tool in tools)
