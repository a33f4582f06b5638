"""Findings that only a dry run makes: on its runs, on parts that never called, on requests without an answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cotune.errors import ConfigError, CotuneError, Outage, SamplerError
from cotune.integrations.models.chat.content import for_template, text_of
from cotune.integrations.models.chat.reply_grammar import unenforceable
from cotune.integrations.models.chat.template import SHOW_TOOLS, UNSHOWN_TOOLS
from cotune.records.images import holds_images, images_of
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import error_origin, error_phrase
from cotune.sampling.request_params import function_of
from cotune.storage.protocol import Store
from cotune.tables import plural, snippet
from cotune.trainer.before.answers.recorded import NO_RECORD
from cotune.trainer.before.check.bases import CheckedBase
from cotune.trainer.before.check.report import IdleCheck
from cotune.trainer.before.check.runs import PAIRS, Run, TaskRuns
from cotune.trainer.before.check.watch import Watch
from cotune.trainer.before.findings import Finding, RoleCheck, blocking_finding

NAME_THEM = "Name them with cotune.role(...), or set roles_by=caller (the calling function): docs/how-to/roles.md."
DECIDE = (
    "Let a model decide: --answers MODEL (a small one), --answers provider (your application's own), or --answers "
    "records:ADDRESS (answers that cotune trace recorded)."
)
UNSEEN = "The client of a model needs the address of `with cotune.gateway()`: see docs/how-to/gateway.md."
PERSON = "Training has nobody to answer: take the reply from the task, or from a model in a role of its own."
TOGETHER = "Training runs several episodes at once: make what they share in the workflow, or set concurrency = 1."
OUTLIVES = "One episode must not see another: make histories, memories, teams and thread ids in the workflow function."
OTHER_ANSWERS = "Other --answers or tasks may lead there. Name roles that seldom call in the field `roles`."
ASK_PROVIDER = "Or give the role a policy of kind provider."
ALWAYS_CALL = ("member", "agent")
"""Kinds of parts that always call a model."""


def fault_findings(faults: Iterable[CotuneError], tasks: Sequence[TaskRuns]) -> Iterator[Finding]:
    """Yield the errors that make training pointless, as findings that block or leave the verdict undecided.

    The answers of a dry run are invented, so a failure that an answer may have caused leaves the verdict undecided. No
    answer causes an outage, unless a recorded answer is missing.
    """
    runs = [run for task in tasks for run in task.runs]
    any_ended = any(task.shown.ended for task in tasks)

    # 1. Runs that failed because they asked a person, who never answers in a dry run.
    questions = []
    for run in runs:
        if run.asked and not run.ended and (not any_ended or end_of_input(run.outcome.error)):
            questions.append(run.asked)
    if questions:
        yield Finding("blocks", "runs", f"it waits for a person: {questions[0]}.", PERSON)

    # 2. The other errors.
    call_errors = [str(call.error) for task in tasks for call in task.calls if call.error]
    answers_may_fail_runs = not any_ended and not questions and all(run.cut or run.answered for run in runs)
    runs_at_limit = sum(run.cut for run in runs)
    for fault in faults:
        if questions and end_of_input(fault):
            continue  # The question above caused this fault.
        if not _may_depend_on_answers(fault, call_errors, answers_may_fail_runs, any_ended):
            yield blocking_finding(fault)
            continue
        about = ""
        text = shorten(fault.cause)
        remedy = DECIDE
        if answers_may_fail_runs:
            about = "runs"
            last_answer = next((run.last_answer for run in runs if run.last_answer), "none")
            text += f" Last answer before it: {last_answer}. All {len(runs)} runs failed."
        if runs_at_limit:
            text += f" {runs_at_limit} of them reached a limit of time or calls."
            remedy = f"Raise --timeout or --calls if a run may need more. {remedy}"
        yield Finding("undecided", about, text, remedy)


def shorten(text: str) -> str:
    """An error on one line, without the traceback that a framework put into its text."""
    return snippet(text.partition("\nTraceback")[0], 600)


def end_of_input(error: BaseException | None) -> bool:
    """Whether a run failed because a person gave no reply."""
    return error is not None and ("EOF" in str(error) or end_of_input(error.__cause__))


def pair_findings(tasks: Sequence[TaskRuns], store: Store) -> Iterator[Finding]:
    """Yield findings on pairs of runs at the same time: a failure, and prompts that show that something outlives an
    episode (one finding for each role)."""
    finding_by_role: dict[str, Finding] = {}
    for task in tasks:
        runs = [run for pair in task.pairs for run in pair]
        failed = [run for pair in task.failed_pairs for run in pair]
        if failed:
            fails_each_time = len(task.failed_pairs) == PAIRS and not any(run.cut for run in failed)
            error = next(run.outcome.error for run in failed if run.outcome.error is not None)
            text = f"task {task.task.id} ends well alone, and fails while two episodes run at once "
            text += f"({len(task.failed_pairs)} of {plural(len(task.pairs), 'pair')}): {shorten(error.cause)}"
            yield Finding("blocks" if fails_each_time else "undecided", "runs", text, TOGETHER)
        elif any(run.cut for run in runs):
            text = f"two runs of task {task.task.id} at once reached a limit: their conflicts are unknown."
            yield Finding("warns", "runs", text, "Raise --timeout.")
        for run in runs:
            for finding in grown_prompts(task.shown, run, store):
                finding_by_role[finding.about] = finding
    yield from finding_by_role.values()


def grown_prompts(first: Run, again: Run, store: Store) -> Iterator[Finding]:
    """Yield a finding for each role whose first prompt is longer in a second run of the same task with the same
    answers. Then something outlives an episode, such as a list of messages that all runs share."""
    before = prompts_by_role(first, store)
    after = prompts_by_role(again, store)
    for role in sorted(before.keys() & after.keys()):
        old_prompt = before[role][0]
        new_prompt = after[role][0]
        # A role may get several requests at the same time, in any order.
        if new_prompt in before[role] or old_prompt in after[role]:
            continue
        # Compare the messages of both prompts, as far as both have them. The prompt grew if it has more messages, or if
        # a message became longer. A message that is just different, such as one with the time, is no growth.
        changed = [(old, new) for old, new in zip(old_prompt, new_prompt, strict=False) if old != new]
        one_contains_the_other = any(old in new or new in old for old, new in changed)
        if len(old_prompt) != len(new_prompt) or one_contains_the_other:
            if changed:
                # Show the message from the first character that differs.
                old, new = changed[0]
                start = 0
                while old[start : start + 1] == new[start : start + 1] != "":
                    start += 1
                difference = new[start:]
            else:
                difference = "\n".join(new_prompt[len(old_prompt) :])
            text = "its first prompt grew in another run of the same task"
            if difference.strip():
                text += f": it has {snippet(difference)!r}"
            yield Finding("warns", role, f"{text}. Something outlives an episode.", OUTLIVES)


def prompts_by_role(run: Run, store: Store) -> dict[str, list[list[str]]]:
    """By role, the prompts of its calls, each as the texts of its messages."""
    texts: dict[str, list[list[str]]] = {}
    for call in run.calls:
        texts.setdefault(call.role, []).append([message_text(store.message(name)) for name in call.messages])
    return texts


def message_text(message: Mapping[str, Any]) -> str:
    """Text of a message, with its tool calls but not their ids, which differ in each run."""
    functions = [tool.get("function") for tool in message.get("tool_calls") or ()]
    return f"{text_of(message.get('content'))}{functions or ''}"


def run_findings(tasks: Sequence[TaskRuns]) -> Iterator[Finding]:
    """Yield runs that failed although another one did not, and errors that the application or its framework
    swallowed."""
    runs = [run for task in tasks for run in task.runs]
    failed = [run for run in runs if not run.ended]
    # If all runs failed, `fault_findings` says so.
    if len(failed) < len(runs):
        outages = [run for run in failed if isinstance(run.outcome.error, Outage)]
        others = [run for run in failed if run not in outages]
        low_reward = "A model may answer like that too: have the workflow return a low reward."
        yield from _failed_run_finding(others, len(runs), "failed", remedy=low_reward)
        yield from _failed_run_finding(outages, len(runs), "ended in an outage")
    questions = [run.asked for run in runs if run.asked]
    if questions and any(run.ended for run in runs):
        yield Finding("warns", "runs", f"a person is asked and never answers: {questions[0]}.", PERSON)

    all_runs: list[Run] = []
    for task in tasks:
        all_runs += task.all
    runs_of_error: dict[str, list[Run]] = {}
    for run in all_runs:
        if run.ended and run.calls:
            for error_text in {f"{shorten(error_phrase(error))}{error_origin(error)}" for error in run.logged}:
                runs_of_error.setdefault(error_text, []).append(run)
    for error_text, with_error in runs_of_error.items():
        text = f"swallowed in {len(with_error)} of {plural(len(all_runs), 'run')} by the application or its framework: "
        remedy = f"Last answer of that run: {with_error[0].last_answer}. "
        remedy += "Further calls may be missing, here and in training."
        yield Finding("warns", "runs", text + error_text, remedy)


def _may_depend_on_answers(
    fault: CotuneError, call_errors: Sequence[str], answers_may_fail_runs: bool, any_ended: bool
) -> bool:
    """Whether a fault may not occur with other answers. `call_errors` are the errors of all calls.

    `answers_may_fail_runs` says that every run failed in a way that an answer may cause, and `any_ended` that a run
    ended well.
    """
    is_misspelt_name = isinstance(fault, ConfigError) and "Did you mean" in fault.remedy
    if is_misspelt_name:
        return False
    if isinstance(fault, Outage) and not any(NO_RECORD in error for error in call_errors):
        return False
    if answers_may_fail_runs:
        return True
    # Even if runs ended, other answers may please a scorer, or lead to a role that has not called.
    is_of_scorer = isinstance(fault, ConfigError) or any(error in str(fault) for error in call_errors)
    return any_ended and is_of_scorer


def _failed_run_finding(failed: Sequence[Run], runs: int, ended_how: str, remedy: str = "") -> Iterator[Finding]:
    """Yield a finding on the `failed` ones among `runs` runs, with the error of the first; nothing if none failed.
    `ended_how` says how they ended."""
    if not failed:
        return
    error = failed[0].outcome.error
    assert error is not None
    text = (
        f"{len(failed)} of {plural(runs, 'run')} {ended_how}; the first, on task {failed[0].outcome.episode.task.id}: "
    )
    text += f"{shorten(error.cause)} Last answer before it: {failed[0].last_answer or 'none'}."
    yield Finding("warns", "runs", text, f"{error.remedy} {remedy}".strip())


def connection_findings(runs: Sequence[Run], watch: Watch) -> Iterator[Finding]:
    """Yield findings on warnings of the recorder, requests for embeddings, and hosts that the application itself
    connected to."""
    warning_counts: Counter[str] = Counter()
    text_of_warning: dict[str, str] = {}
    embeddings: Counter[str] = Counter()
    connections: Counter[str] = Counter()
    for run in runs:
        live = run.outcome.live
        connections.update(watch.connections.get(run.outcome.episode.id, {}))
        # Runs are alike, so a warning has its highest count of any run, and not the sum.
        warning_counts |= Counter(live.warnings)
        text_of_warning.update(live.explained)
        embeddings.update(live.notes.get("embeddings", {}))
    for kind, count in warning_counts.items():
        yield Finding("warns", f"{kind} ({count})", text_of_warning[kind])
    for address, count in embeddings.items():
        text = f"{plural(count, 'request')} for embeddings got fixed vectors; nothing was sent. Training sends them."
        yield Finding("note", address, text)
    for address, count in connections.items():
        text = f"the application itself connected there, {plural(count, 'time')} in {plural(len(runs), 'run')}: "
        yield Finding("warns", address, f"{text}a tool, or a model that cotune does not see.", UNSEEN)


def role_findings(roles: Sequence[RoleCheck], workflow: str) -> Iterator[Finding]:
    """Yield findings on roles that are not trained, and on calls without a role. `workflow` is the name of the
    workflow's function."""
    for role in roles:
        if role.reason == "no scorer":
            remedy = f'Add @{workflow}.scorer("{role.role}"), or use --plan independent.'
            yield Finding("warns", role.role, "not trained: no scorer", remedy)
        elif not role.trained:
            yield Finding("note", role.role, f"not trained: {role.reason}")
        if role.role == "app":
            text = f"Calls made outside any agent or node share the role `app`: {role.calls}."
            yield Finding("warns", "app", text, NAME_THEM)


def idle_findings(idle: Sequence[IdleCheck]) -> Iterator[Finding]:
    """Yield findings on parts of the application (nodes, agents) that never called a model: they wait for a person,
    were not reached, or ran without a model."""
    ran_without_model: list[str] = []
    # Parts that were not reached are reported together if they are of one kind and of the same graph or team.
    not_reached: dict[tuple[str, str], list[str]] = {}
    for part in idle:
        if not part.ran and part.waits:
            yield Finding("warns", part.role, f"the graph stops before it ({part.waits}) and is not resumed.", PERSON)
        elif part.ran and part.kind not in ALWAYS_CALL:
            ran_without_model.append(part.role)
        else:
            not_reached.setdefault((part.kind, part.of), []).append(part.role)
    for (kind, owner), names in not_reached.items():
        parts = f"in these runs ({plural(len(names), kind)} of {owner})."
        text = f"never ran {parts} It may call no model."
        if kind in ALWAYS_CALL:
            text = f"never called {parts}"
        yield Finding("warns", ", ".join(names), text, OTHER_ANSWERS)
    if ran_without_model:
        yield Finding("note", ", ".join(ran_without_model), "ran without a call of its own.")


def request_findings(
    bases: Mapping[str, CheckedBase | None], calls: Sequence[CallRecord], store: Store
) -> tuple[Mapping[str, int], Iterable[Finding]]:
    """Count the tokens of each call's prompt in the chat template of its role's base model, and find calls that
    training would refuse. Returns the counts, by the id of the call, and the findings.

    Training refuses a call that the template cannot render, or whose prompt is too long for the base model. It also
    refuses content that no policy can read, and a form of the reply, such as a JSON schema, that no sampler enforces.
    """
    tokens: dict[str, int] = {}
    # By role and cause, so that a role has each finding once.
    findings: dict[tuple[str, str], Finding] = {}
    for call in calls:
        base = bases.get(call.role)
        tools = store.message(call.tools) if call.tools else []
        messages = [store.message(name) for name in call.messages]
        if cause := unenforceable(call.params, tools):
            findings[call.role, cause] = Finding("blocks", call.role, cause, f"Change the request. {ASK_PROVIDER}")
        if tools and base is not None and not base.chat.shows_tools:
            # An application may describe its tools in the prompt itself.
            text = "\n".join(map(message_text, messages))
            described = all(str(function_of(tool).get("name")) in text for tool in tools)
            finding = Finding("warns" if described else "blocks", call.role, UNSHOWN_TOOLS, SHOW_TOOLS)
            findings[call.role, UNSHOWN_TOOLS + finding.level] = finding
        try:
            if base is not None:
                tokens[call.id] = len(base.chat.render(messages, tools or None, most=base.context - 1))
            elif holds_images(messages):
                images_of(messages)
            for message in messages:
                for_template(message, parts=True)
        except SamplerError as error:
            finding = Finding("blocks", call.role, error.cause, f"{error.remedy} {ASK_PROVIDER}")
            findings[call.role, error.cause] = finding
    return tokens, findings.values()
