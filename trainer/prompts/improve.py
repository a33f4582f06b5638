"""`cotune prompts improve`: better prompts for an application, found on its tasks and judged on held-out ones."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cotune.adapters.prompts import prompts_of, trained_with
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError, RunError
from cotune.integrations.apps.openai.asking import key_for
from cotune.integrations.prompts.search import require, search
from cotune.integrations.versions import versions_of_installed
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts, write_prompts
from cotune.prompts.wording import Wording
from cotune.recording.recorder import Responder
from cotune.records.tasks import as_tasks
from cotune.runtime.run_context import RunContext, current_run
from cotune.storage.file_lock import FileLock
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_code import import_from, is_trusted, remember_orders
from cotune.storage.run_layout import whole_address
from cotune.tables import plural
from cotune.terminal import print_line, terminal
from cotune.trainer.prompts.evaluations import Evaluations, answering_in_search, check_judge
from cotune.trainer.prompts.held_out import HeldOut, compare_held_out
from cotune.trainer.prompts.improved_parts import earlier_base, find_base, guard_of, parts_to_improve
from cotune.trainer.prompts.options import (
    ImproveOptions,
    PromptRun,
    StoredSearch,
    check_changes,
    orders_of_search,
    read_search,
    with_absolute_paths,
)
from cotune.trainer.prompts.outcome import ImproveReport, make_report, write_candidates
from cotune.trainer.prompts.problem import SCORERS, Accepted, PromptProblem
from cotune.trainer.prompts.reflection import Reflection
from cotune.trainer.prompts.role_choice import RoleChoice, Turns, check_reference, choose_role
from cotune.trainer.prompts.showing import describe_roles
from cotune.trainer.prompts.spending import LimitReached, Spending
from cotune.trainer.prompts.task_result import TaskResult
from cotune.trainer.prompts.tasks import SearchTasks, split_for_search
from cotune.trainer.reporting.progress import episode_bar
from cotune.trainer.run.run_folder import write_atomically

Say = Callable[[str], None]
TASKS_FOR_PARTS = 8
"""Least number of tasks on which the application is run to find the parts of its prompts, if there are so many."""


def improve(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    options: ImproveOptions,
    *,
    out: str | Path,
    resume: bool = False,
    responder: Responder | None = None,
    reflector: Responder | None = None,
) -> ImproveReport:
    """Search for better prompts. `out` is a new folder, or with `resume` the folder of an interrupted search.

    `responder` answers the application's calls, and `reflector` the requests to the reflection model, instead of the
    configured models. Raises CotuneError subclasses for bad input, and if models cannot be reached; the prompts found
    until then are in the folder.
    """
    # 1. Check all input before anything is written. The folder of an interrupted search names code and addresses, which
    # are only used if this user has written or trusted the folder.
    options = with_absolute_paths(options)
    is_trusted_folder = True
    if resume:
        is_trusted_folder = is_trusted(orders_of_search(out))
        if is_trusted_folder:
            import_from(read_search(out).cwd)
    app = workflow_of(workflow).redacted(options.redact).named_by(options.roles_by)
    if options.reflection is None and reflector is None:
        raise ConfigError("reflection", None, "is missing", "Name a model that writes texts: --reflection gpt-5-mini")
    check_judge(app)
    check_reference(options)
    require()  # raises if gepa is not installed
    if reflector is None:
        key_for(options.reflection_url, options.reflection_key_env)  # raises if the key is missing
    if options.prompts_file is None and prompts_of(options.run) is not None:
        options = msgspec.structs.replace(options, prompts_file=options.run)
    all_tasks = as_tasks(tasks)
    split = split_for_search(all_tasks, options)

    # 2. Run the search in its folder.
    folder = PromptRun(out)
    description = {
        "app": whole_address(workflow) if isinstance(workflow, str) else "",
        "cwd": str(Path.cwd()),
        "workflow": app.name,
        "tasks": str(Path(tasks).absolute()) if isinstance(tasks, str | Path) else "",
        "task_ids": [task.id for task in all_tasks],
        "options": json.loads(msgspec.json.encode(options)),
        "versions": versions_of_installed(("cotune", "gepa", "openai")),
    }
    with _open_folder(folder, description, resume) as secret, open_store(folder.records) as store:
        if is_trusted_folder:
            remember_orders(orders_of_search(out))
        current_run.set(RunContext(folder=folder.path))
        return run_sync(_run_search(app, split, options, folder, store, secret, responder, reflector))


@contextlib.contextmanager
def _open_folder(folder: PromptRun, description: dict[str, Any], resume: bool) -> Iterator[str]:
    """Lock the folder of the search, and write its `description` (or check it, with `resume`). Yields the secret of
    its marks."""
    if folder.described.exists() and not resume:
        raise RunError(f"{folder.path} already holds a search.", "Choose another --out, or continue with --resume.")
    interrupted_search = read_search(folder.path) if resume else None
    folder.path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.lock, f"The search {folder.path}")
    try:
        if interrupted_search is not None:
            # The search keeps its description and its secret, and takes the present options.
            _check_same(interrupted_search, description)
            stored_description = json.loads(folder.described.read_bytes())
            new_description = {**stored_description, "options": description["options"]}
        else:
            created = time.strftime("%Y-%m-%dT%H:%M:%S%z")
            new_description = {**description, "created": created, "secret": secrets.token_hex(16)}
        write_atomically(folder.described, json.dumps(new_description, indent=2).encode())
        yield str(new_description["secret"])
    finally:
        lock.release()


def _check_same(before: StoredSearch, description: dict[str, Any]) -> None:
    """Raise ConfigError if a resumed search would be another one."""
    if before.task_ids != description["task_ids"]:
        fault = "are not the tasks that the search was started with"
        raise ConfigError("tasks", None, fault, "Name the same file, or a new --out.")
    check_changes(before.options, description["options"])


async def _run_search(
    app: Workflow,
    tasks: SearchTasks,
    options: ImproveOptions,
    folder: PromptRun,
    store: Store,
    secret: str,
    fixed_responder: Responder | None,
    reflector: Responder | None,
) -> ImproveReport:
    """Run a search in an open folder: measure the prompts as they are, choose the role to change, search, and compare
    the best prompts on the held-out tasks.

    `secret` makes the marks around quoted texts unpredictable. `fixed_responder` and `reflector` replace the models
    that the options name.
    """
    console = terminal(stderr=True)
    say = partial(print_line, console)

    for note in tasks.notes:
        say(note)
    spending = Spending(options.max_calls, options.max_cost, options.prices)

    # 1. Open the models.
    async with contextlib.AsyncExitStack() as stack:
        responder = fixed_responder or await stack.enter_async_context(answering_in_search(app, options, say))
        bar = stack.enter_context(episode_bar(console, total=None))
        evaluations = Evaluations(app, store, responder, options, spending, bar)
        reflection = Reflection(store, options, spending, secret, reflector)
        # For the comparison at the end: the prompts before and the best ones, once on each held-out task.
        spending.reserve = 2 * len(tasks.held_out)

        # 2. Measure the prompts as they are.
        base, notes = await _find_base(evaluations, tasks, folder, say)
        results = await evaluations.run(base, tasks.validation)
        _check_outcomes(results, evaluations, say)
        floor = min([0.0, *(result.outcome for result in results if result.outcome is not None)])
        say(_search_plan(base, tasks, options, spending))

        # 3. Choose the role to change, and search.
        choice = await choose_role(evaluations, base, parts_to_improve(base), tasks, folder, say)
        say(f"which role: {choice.note}")
        problem = PromptProblem(
            evaluations=evaluations,
            reflection=reflection,
            base=base,
            wording=Wording(base.parts),
            parts={part.name: part for part in parts_to_improve(base)},
            tasks={task.id: task for task in (*tasks.train, *tasks.validation)},
            lost=choice.lost,
            places=describe_roles(store, [result.episode for result in results]),
            turns=Turns(choice.parts, scored=bool(app.scorers)),
            floor=floor,
            guard=guard_of(base, tasks, store, options),
            loop=asyncio.get_running_loop(),
        )
        problem.on_accepted = _write_pool(problem, folder, say)
        return await _search_and_compare(problem, tasks, folder, choice, notes, say)


async def _search_and_compare(
    problem: PromptProblem, tasks: SearchTasks, folder: PromptRun, choice: RoleChoice, notes: list[str], say: Say
) -> ImproveReport:
    """Search, compare the best prompts with the prompts before on the held-out tasks, and write the result."""
    base = problem.base
    spending = problem.evaluations.spending
    held_out: HeldOut | None = None
    limit_text = ""
    try:
        # 1. Search. A limit ends the search with a result, and any other error is raised.
        await _run_gepa(problem, tasks)
        best = problem.prompts(problem.best().texts)
        if isinstance(problem.ended, LimitReached):
            limit_text = str(problem.ended)
        elif problem.ended is not None:
            raise problem.ended
        elif problem.exhausted:
            notes = [*notes, f"The search ended after {problem.rounds} rounds, as nothing new was proposed any more."]

        # 2. Compare, if the search has found other prompts.
        if best.id != base.id:
            say(f"comparing the best prompts with those before on {plural(len(tasks.held_out), 'held-out task')} ...")
            spending.reserve = 0  # The reserve was kept for these runs.
            try:
                held_out = await compare_held_out(problem.evaluations, base, best, tasks.held_out)
            except LimitReached as error:
                limit_text = f"{error} The held-out tasks were not all asked."
    except BaseException:
        # Also if the user interrupts the search: the best prompts so far stay in the folder.
        if problem.pool and not _has_better_file(folder, problem):
            _write_result(problem, folder, choice, held_out=None)
        raise
    return _write_result(problem, folder, choice, held_out, limit_text, notes)


def _has_better_file(folder: PromptRun, problem: PromptProblem) -> bool:
    """Return whether the file of an earlier process has more candidates, or has the verdict on the same prompts."""
    if not folder.prompts.exists():
        return False
    before = read_prompts(folder.prompts)
    candidates_before = before.provenance.get("candidates", 0)
    if candidates_before != len(problem.pool):
        return bool(candidates_before > len(problem.pool))
    return bool(before.evaluation.get("held_out")) and before.id == problem.prompts(problem.best().texts).id


def _check_outcomes(results: Sequence[TaskResult], evaluations: Evaluations, say: Say) -> None:
    """Raise RunError if no run has an outcome, because candidates could not be compared then.

    If all runs failed, the search starts: better prompts may prevent that.
    """
    if any(result.outcome is not None for result in results):
        return
    if any(not result.error for result in results):
        judge_error = evaluations.errors.get("judge_errors")
        first_error = f" The first error: {judge_error}" if judge_error else ""
        raise RunError(
            f"No run on the {len(results)} tasks to choose by has an outcome, and a search needs one.{first_error}",
            "Return a number from the workflow, and choose another --out. If a judge failed, fix it and use --resume.",
        )
    say(f"all {plural(len(results), 'run')} of the prompts as they are failed; the first: {results[0].error}")


async def _run_gepa(problem: PromptProblem, tasks: SearchTasks) -> None:
    """Run gepa's loop in a separate thread. The clients of the application stay on this event loop."""
    options = problem.evaluations.options
    work = asyncio.create_task(
        asyncio.to_thread(
            search,
            problem,
            problem.start(),
            [task.id for task in tasks.train],
            [task.id for task in tasks.validation],
            minibatch=options.minibatch,
            perfect=_highest_score(problem, tasks),
            seed=options.seed,
        )
    )
    try:
        await asyncio.shield(work)
    except asyncio.CancelledError:
        problem.cancel()
        await asyncio.gather(work, return_exceptions=True)
        raise
    except Exception as error:
        # gepa raises the error that ended the problem. With a pool, the search still has a result.
        if problem.ended is not error or not problem.pool:
            raise


def _highest_score(problem: PromptProblem, tasks: SearchTasks) -> float | None:
    """Return the highest possible score of a run, if all rewards so far are between 0 and 1; else None.

    A score is the sum of the outcome's components, and `SCORERS` times the mean score of the roles' scorers. The
    rewards so far are the ones that the prompts before the search have earned on the tasks to choose by.
    """
    components: set[str] = set()
    outcomes: list[float] = []
    role_scores: list[float] = []
    for task in tasks.validation:
        result = problem.evaluations.result_of(problem.base, task.id)
        if result is not None:
            components.update(result.rewards)
            outcomes += result.rewards.values()
            role_scores += result.by_role.values()
    if not outcomes or not all(0 <= value <= 1 for value in (*outcomes, *role_scores)):
        return None
    return len(components) + (SCORERS if role_scores else 0.0)


async def _find_base(
    evaluations: Evaluations, tasks: SearchTasks, folder: PromptRun, say: Say
) -> tuple[Prompts, list[str]]:
    """Find the prompts that the search starts from: the application's own ones, or edited ones. Returns them with the
    names of the parts that may change, and notes for the user. Raises RunError if no part can be improved."""
    options = evaluations.options
    if folder.parts.exists():  # The search is resumed.
        return read_prompts(folder.parts), []
    notes: list[str] = []
    if options.prompts_file is not None:
        base = earlier_base(options)
    else:
        say("running the application as it is, to find the parts of its prompts ...")
        unedited = Prompts(parts=(), workflow=evaluations.workflow.name)
        # The validation tasks are run in any case. Further tasks show more parts if these are few.
        further_tasks = tasks.train[: max(0, TASKS_FOR_PARTS - len(tasks.validation))]
        await evaluations.run(unedited, [*tasks.validation, *further_tasks])
        base, notes = find_base(evaluations, options)
    base = msgspec.structs.replace(base, trained_with=trained_with(options.run))
    for note in notes:
        say(note)
    if not parts_to_improve(base):
        raise RunError(
            "No prompt was found that can be improved.",
            f"See why with: cotune prompts show {folder.path}.",
        )
    write_prompts(folder.parts, base)
    return base, notes


def _search_plan(base: Prompts, tasks: SearchTasks, options: ImproveOptions, spending: Spending) -> str:
    """Describe the parts of prompts, the tasks and the limits of the search, in lines for the user."""
    parts = ", ".join(f"{part.name} ({part.now.constant} characters)" for part in parts_to_improve(base))
    # The limit of cost, or the cost of the most calls at the mean price of the calls so far.
    money = ""
    if options.max_cost is not None:
        money = f", {options.max_cost:g} of money"
    elif spending.prices:
        cost_per_call = spending.cost / max(spending.calls, 1)
        money = f", about {cost_per_call * options.max_calls:.2g} of money"
    lines = [
        f"improving {parts}",
        f"tasks: {len(tasks.train)} to reflect on, {len(tasks.validation)} to choose by, {len(tasks.held_out)} held "
        f"out; {spending.calls_per_episode:.1f} calls a run",
        f"at most {options.max_calls} calls{money}, of which {spending.calls} are made; "
        f"{spending.reserve} runs of these are kept for the held-out tasks",
        spending.unpriced,
    ]
    return "\n".join(line for line in lines if line)


def _write_pool(problem: PromptProblem, folder: PromptRun, say: Say) -> Callable[[Accepted], None]:
    """Return the function that writes the pool after each new candidate, and prints its score."""

    def write(accepted: Accepted) -> None:
        write_candidates(folder, problem)
        number = len(problem.pool) - 1
        calls = problem.evaluations.spending.calls
        name = f"candidate {number}" if number else "the prompts as they are"
        say(f"{name}: {accepted.score:.3f} on the tasks to choose by, after {calls} calls")

    return write


def _write_result(
    problem: PromptProblem,
    folder: PromptRun,
    choice: RoleChoice,
    held_out: HeldOut | None,
    limit_text: str = "",
    notes: Iterable[str] = (),
) -> ImproveReport:
    """Build the report of a search and write the best prompts into its folder. `limit_text` names the limit that ended
    the search; "" if none did."""
    report = make_report(problem, choice.note, held_out, limit_text, tuple(notes), folder)
    write_prompts(folder.prompts, report.prompts)
    return report
