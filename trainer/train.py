"""Training from Python: checks its arguments, opens or resumes the run, and drives the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from cotune.adapters.prompts import prompts_of
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.config.policy import PolicyConfig
from cotune.config.train import NO_TASKS, TrainConfig
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError, CotuneError
from cotune.integrations.exchange.trackers.tracker import check_tools
from cotune.integrations.models.devices import untried_gpu, unused_gpu
from cotune.integrations.models.folder.folder import locate_base, locate_model, of_policy
from cotune.prompts.file import write_prompts
from cotune.records.structs import Task
from cotune.records.tasks import as_tasks
from cotune.runtime.interrupts import stop_by
from cotune.runtime.openmp import spin_briefly
from cotune.runtime.run_context import RunContext, current_run
from cotune.storage.open_store import is_path
from cotune.storage.run_code import open_run_code
from cotune.storage.run_layout import (
    is_withheld,
    known_workflow,
    leaves,
    read_config,
    relocated,
    whole_address,
    with_addresses,
    without_values,
)
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from cotune.trainer.config.withheld import with_values, without_variables
from cotune.trainer.evaluation.split import Split, overlap, split_again, split_tasks, write_split
from cotune.trainer.opening.open_run import open_run
from cotune.trainer.opening.resume import (
    apply_changes,
    base_digests,
    check_files,
    check_tasks,
    keep_or_check_bases,
    tasks_digest,
)
from cotune.trainer.opening.warm_start import check_same_bases, check_source
from cotune.trainer.privileged import check_privileged
from cotune.trainer.records.loop import train_on_records
from cotune.trainer.records.run import RecordsRun, open_records_run
from cotune.trainer.reporting.loggers import Loggers
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.reporting.summary import RunSummary, sum_up
from cotune.trainer.run.checkpoint import load_checkpoint, tidy_checkpoints
from cotune.trainer.run.parts import where_it_runs
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.run.run_folder import RunFolder
from cotune.trainer.schedules.curriculum import check_curriculum
from cotune.trainer.schedules.refill import check_refill
from cotune.trainer.step import train_on_rollouts


def train(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any] | None = None,
    config: TrainConfig | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    console: Console | None = None,
    profile: bool = False,
    **settings: Any,
) -> RunSummary:
    """Train the policies of `workflow` on `tasks`. This returns when training is done or stopped.

    `workflow` is a decorated function or "module:attribute". `tasks` is a JSON-lines file or a list of values, and None
    for recipes that learn from records. `config` and `settings` are fields of TrainConfig. `out` is the new run folder,
    by default runs/DATE-TIME. `profile` writes a trace of one step, see docs/how-to/profile.md. Raises CotuneError
    subclasses before work starts for bad input.

    ```python
    summary = cotune.train(solve, "tasks.jsonl", model="Qwen/Qwen3-1.7B", out="runs/r1", steps=100, plan={"k": 8})
    print(summary.path, summary.finished, summary.headline.verdict)
    ```
    """
    spin_briefly(os.environ)
    flow = workflow_of(workflow)
    table = msgspec.to_builtins(config) if isinstance(config, TrainConfig) else dict(config or {})
    chosen = convert({**table, **settings})

    # Check everything that does not need the models, before the run folder is made.
    if chosen.from_records and tasks is not None:
        fault = f"cannot be used with recipe {chosen.recipe}, whose tasks are the recorded ones"
        raise ConfigError("tasks", tasks, fault, "Leave them out.")
    if tasks is None and not chosen.from_records:
        raise ConfigError("tasks", None, "is missing", "Pass --tasks FILE.")
    all_tasks = [] if tasks is None else as_tasks(tasks)
    if not chosen.from_records:
        _, recipes, _ = resolve_plan(chosen, list(flow.scorers), flow.variable)
        check_curriculum(chosen.curriculum, all_tasks)
        check_refill(chosen, recipes.every)
        check_privileged(recipes, all_tasks)
    chosen = with_whole_paths(chosen)
    flow = flow.redacted(chosen.redact, keep_token_ids=chosen.keep_token_ids).named_by(chosen.roles_by)
    flow = flow.prompted(chosen.prompts_file)
    if chosen.learner.needing_gpu and not chosen.cluster.on_ray:  # on Ray, learners may be on other machines
        from cotune.trainer.learner.memory.optimizer import check_hardware

        check_hardware(chosen.learner)
    split = split_tasks(all_tasks, chosen)
    check_source(chosen.init)
    check_tools(chosen.loggers)

    # Make the run folder, and train. "held" has what a resumed run must not change.
    path = Path(out) if out is not None else Path("runs") / time.strftime("%Y%m%d-%H%M%S")
    folder = RunFolder.create(
        path,
        chosen,
        workflow=whole_address(workflow) if isinstance(workflow, str) else None,
        tasks=str(Path(tasks).resolve()) if isinstance(tasks, str | Path) else None,
        held={"tasks": tasks_digest(all_tasks), "count": len(all_tasks), "held_out": list(split.chosen_ids)},
        **({} if flow.prompts is None else {"prompts": flow.prompts.id}),
    )
    try:
        if flow.prompts is not None:
            write_prompts(folder.path, flow.prompts)
        return run_sync(_train(folder, chosen, flow, split, console, profile=profile))
    except BaseException:
        folder.discard_unbegun()
        raise


def resume(
    run: str | Path,
    *,
    workflow: WorkflowSource | None = None,
    tasks: str | Path | Iterable[Any] | None = None,
    changes: Mapping[str, Any] | None = None,
    console: Console | None = None,
    profile: bool = False,
) -> RunSummary:
    """Continue a run from its newest checkpoint, with its own configuration and `changes`, which are recorded.

    `changes` are fields of TrainConfig, nested or by dotted names. Some may not change (docs/reference/run-folder.md).
    `workflow` and `tasks` are only needed if the run was started from Python with objects instead of names. `profile`
    writes a trace of one step. Raises ConfigError or RunError, before work starts, for a change that would make it
    another run.

    ```python
    summary = cotune.resume("runs/r1", workflow=solve, changes={"steps": 200})
    ```
    """
    spin_briefly(os.environ)
    folder = RunFolder.open(run)
    with contextlib.ExitStack() as stack:
        stack.callback(folder.close)
        described = folder.described
        from_user = {name for name, _ in leaves(changes or {})}
        if workflow is not None:
            from_user.add("workflow")
        folder.trusted = open_run_code(folder.path, from_user)
        flow, all_tasks = _resumed_app(folder, described, workflow, tasks)
        check_tasks(described, all_tasks)

        # Read the newest checkpoint, and apply the changes to the configuration of the run.
        tidy_checkpoints(folder.checkpoints)
        saved = load_checkpoint(folder.checkpoints)
        done = saved[0].steps if saved else 0
        old_config = _resumed_config(folder, described, changes or {})
        check_files(folder, done, old_config)
        config, changed = apply_changes(old_config, changes or {}, done=done)

        # Write the changes to run.json. Values of environment variables never stay there.
        description = without_values(described)
        if changed:
            all_changes = [*described.get("changes", ()), {"step": done, "changed": changed}]
            description |= without_values(
                {"model": config.model, "config": without_variables(config), "changes": all_changes}
            )
        if description != described:
            folder.describe_as(description)

        check_tools(config.loggers)
        for model, policies in config.bases.items():
            locate_base(model, of="" if model == config.model else policies[0])
        flow = flow.redacted(config.redact, keep_token_ids=config.keep_token_ids).named_by(config.roles_by)
        flow = flow.prompted(prompts_of(folder.path))
        stack.pop_all()  # from here on, `_train` closes the folder
    split = split_again(all_tasks, config, described)
    notes: list[str] = []
    for name, (old, new) in changed.items():
        notes.append(f"changed: {name}" if is_withheld(name) else f"changed: {name} = {new!r}, was {old!r}")
    if done >= config.steps:
        notes.append(f"all {done} steps of the run are done: pass --steps with a larger number to continue")
    return run_sync(_train(folder, config, flow, split, console, notes, profile=profile))


def _resumed_config(folder: RunFolder, described: Mapping[str, Any], changes: Mapping[str, Any]) -> TrainConfig:
    """Return the configuration of a run before the changes, with the values of environment variables that it needs.
    Models, teachers and records that were moved together with the run folder are found at their new places."""
    table = with_values(read_config(folder.path), changes)
    for fields in (table, *table.get("policy", ()), table.get("distill", {}), table.get("records", {})):
        for name in ("model", "teacher", "path"):
            if fields.get(name):
                fields[name] = relocated(fields[name], described, folder.path)
    return convert(table)


def _resumed_app(
    folder: RunFolder,
    described: Mapping[str, Any],
    workflow: WorkflowSource | None,
    tasks: str | Path | Iterable[Any] | None,
) -> tuple[Workflow, list[Task]]:
    """Return the workflow and the tasks of a run to resume: the ones that the user has passed, else the ones that
    run.json names.

    Raises ConfigError if run.json does not name them either, or if the run was started with another workflow.
    """
    started_with = described["workflow"]
    if isinstance(workflow, str) and started_with is not None and not _same_name(workflow, started_with):
        fault = f"is not the workflow that the run was started with, {started_with!r}"
        raise ConfigError("workflow", workflow, fault, "Start a new run for it.")
    if workflow is None:
        workflow = known_workflow(described, folder.path)
    from_records = described["config"].get("recipe") in FROM_RECORDS
    if tasks is None and described["tasks"] is not None:
        tasks = relocated(described["tasks"], described, folder.path)
    if workflow is None or (tasks is None and not from_records):
        name = "workflow" if workflow is None else "tasks"
        fault = "is missing: the run was started from Python with an object, so run.json does not name it"
        raise ConfigError(name, None, fault, f"Pass {name}.")
    return workflow_of(workflow), [] if tasks is None else as_tasks(tasks)


def _same_name(workflow: str, other: str) -> bool:
    """Return whether two addresses end in the same attribute. Their modules may be named in several ways."""
    return workflow.rpartition(":")[2] == other.rpartition(":")[2]


def with_whole_paths(config: TrainConfig) -> TrainConfig:
    """Return the configuration with absolute paths of files on this machine. Raises ConfigError for a missing model."""
    replace = msgspec.structs.replace

    def whole(path: str) -> str:
        return str(Path(path).expanduser().resolve()) if path and is_path(path) else path

    def whole_model(model: str) -> str:
        folder = locate_model(model)
        return str(folder) if Path(model).expanduser().exists() else model

    def whole_teacher(teacher: str) -> str:  # a folder, an id or an address
        return whole(teacher) if Path(teacher).expanduser().is_dir() else teacher

    def whole_policy(policy: PolicyConfig) -> PolicyConfig:
        try:
            model = policy.model and whole_model(policy.model)
            return replace(policy, model=model, teacher=whole_teacher(policy.teacher))
        except ConfigError as error:
            raise of_policy(error, policy.name) from None

    held_out = config.evaluation.tasks
    config = convert(with_addresses(msgspec.to_builtins(config), whole_address))
    return replace(
        config,
        model=whole_model(config.model),
        policy=tuple(whole_policy(policy) for policy in config.policy),
        init=whole(config.init),
        prompts_file=whole(config.prompts_file),
        records=replace(config.records, path=whole(config.records.path)),
        evaluation=replace(config.evaluation, tasks=held_out if held_out == NO_TASKS else whole(held_out)),
        distill=replace(config.distill, teacher=whole_teacher(config.distill.teacher)),
    )


async def _train(
    folder: RunFolder,
    config: TrainConfig,
    flow: Workflow,
    split: Split,
    console: Console | None,
    notes: Iterable[str] = (),
    *,
    profile: bool = False,
) -> RunSummary:
    """Open the run in `folder`, train it to its end or until it is stopped, and sum it up. `notes` are printed first.
    With `profile`, one step is traced."""
    started = time.perf_counter()
    how_to_continue = f"Continue with: cotune train --resume {folder.path}"
    current_run.set(RunContext(folder=folder.path, go_on=how_to_continue))
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(folder.close)
        stack.enter_context(folder.noting_errors())
        progress = Progress(config.steps, console, folder.path)
        stack.callback(progress.activity.close)

        # Open the run. The phase "load" ends before the first step.
        loading = stack.enter_context(contextlib.ExitStack())
        loading.enter_context(progress.activity.phase("load"))
        for note in notes:
            progress.say(note)
        if split.note:
            progress.say(split.note)
        held_out_file = write_split(folder.path, split, progress.say) or config.evaluation.tasks.removesuffix(NO_TASKS)
        run = await _open_and_check(folder, config, flow, split, progress, stack)
        gpu_warning = unused_gpu() or untried_gpu()
        if gpu_warning:
            progress.say(f"warning: {gpu_warning}")
        progress.say(where_it_runs(run.config))
        progress.loggers = Loggers(config, folder, run.state.steps, progress.say)
        stack.callback(progress.loggers.close)
        loading.close()

        if profile and not run.finished:
            # The first step of a process also loads and compiles, so the second one is traced if there is one.
            run.profile_step = min(run.state.steps + 2, config.steps)

        # Train, until the run ends or a signal stops it.
        def stop() -> None:
            finishes_step = run.stop()
            if finishes_step:
                progress.say("finishing and saving the step under way first")

        with stop_by(stop), progress:
            progress.begin(run.state.steps)
            for note in (*run.notes, *overlap(split.tasks, split.held_out)):
                progress.say_once(note)
            try:
                if isinstance(run, RecordsRun):
                    await train_on_records(run, progress)
                else:
                    await train_on_rollouts(run, progress)
            except (CotuneError, OSError):
                if folder.latest.exists():
                    progress.say(f"failed in step {run.state.steps + 1}. {how_to_continue}")
                raise
            _report_end(run, folder, progress, how_to_continue)
        run.store.flush()
        if run.store.health.lost:
            progress.say(f"{run.store.health.lost} records could not be stored and are lost")
        return sum_up(
            folder.path,
            run.state,
            finished=run.finished,
            lost_records=run.store.health.lost,
            seconds=time.perf_counter() - started,
            held_out=held_out_file,
            ended=run.ended,
        )


async def _open_and_check(
    folder: RunFolder,
    config: TrainConfig,
    flow: Workflow,
    split: Split,
    progress: Progress,
    stack: contextlib.AsyncExitStack,
) -> RolloutRun | RecordsRun:
    """Open the run, and check that its base models are the ones that it was started with. `stack` closes the run."""
    # The base models' files are hashed while the run opens.
    hashing = asyncio.create_task(asyncio.to_thread(base_digests, config.bases))
    run: RolloutRun | RecordsRun
    try:
        if config.from_records:
            run = await stack.enter_async_context(open_records_run(folder, config, flow, progress.say))
        else:
            opening = open_run(folder, config, flow, split.tasks, split.held_out, progress)
            run = await stack.enter_async_context(opening)
    except BaseException:
        hashing.cancel()
        raise
    if not hashing.done():
        progress.say("hashing the base model's files ...")
    keep_or_check_bases(folder, await hashing)
    # Before the first checkpoint only: a resumed run has its own weights.
    if config.init and run.committed < 0:
        check_same_bases(config.init, run.state.policies, hashing.result())
    return run


def _report_end(run: RolloutRun | RecordsRun, folder: RunFolder, progress: Progress, how_to_continue: str) -> None:
    """If a run has ended before its last step, print why, and write it to the run folder. `how_to_continue` is a
    sentence with the command."""
    if run.ended:
        progress.say(f"ended after step {run.state.steps}: {run.ended}")
        if run.way_back:
            progress.say(run.way_back)
        folder.note_end("ended", run.ended, run.way_back)
    elif run.stopping and not run.finished:
        progress.say(f"stopped after step {run.state.steps}; saved. {how_to_continue}")
        folder.note_end("stopped", "It was stopped.")
    if (run.profile_step or 0) > run.state.steps:
        progress.say(f"step {run.profile_step} has no profile: it was not reached")
