"""Opening a run from its folder: sampler, runner of episodes and learner, on this machine or on Ray."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from cotune.algorithms.recipes import LossSpec
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError
from cotune.recording.chance import start_freezing
from cotune.records.policies import Policies, models_text
from cotune.records.structs import Task
from cotune.sampling.protocol import ChatFormats, Sampler
from cotune.storage.open_store import open_store
from cotune.storage.run_layout import Precision
from cotune.tables import plural
from cotune.trainer.before.preflight import max_calls, preflight
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.config.policy import shared_tool_format
from cotune.trainer.config.resolve import add_policies, resolve_plan, with_bases
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.opening.restore import begin_from, restore
from cotune.trainer.opening.resume import steps_at_start, tasks_per_step
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.rollout.app_source import import_path
from cotune.trainer.rollout.forks import expected_budget
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.run.division import divide_run
from cotune.trainer.run.engines import engine_sets, open_in_process
from cotune.trainer.run.episode_runner import EpisodeRunner, LocalRunner
from cotune.trainer.run.methods import bounded_loss, trainings_of_tables
from cotune.trainer.run.own_thread import OwnThread
from cotune.trainer.run.precision import (
    check_bounds_of_losses,
    check_precision,
    decide_precision,
    keep_precision,
    learner_device,
    with_dtype,
    without_sampler,
)
from cotune.trainer.run.publication_time import publication_notes
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.run.run_folder import RunFolder
from cotune.trainer.run.teachers import open_teachers
from cotune.trainer.schedules.routing import check_routing
from cotune.trainer.schedules.task_pool import TaskPool

if TYPE_CHECKING:
    from cotune.trainer.opening.cluster import Cluster


@contextlib.asynccontextmanager
async def open_run(
    folder: RunFolder,
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    held_out: Sequence[Task],
    progress: Progress,
) -> AsyncIterator[RolloutRun]:
    """Open all parts of a run, and restore its newest checkpoint. A run without a checkpoint first runs a few episodes
    of the application, to find its roles."""
    say = progress.say
    async with contextlib.AsyncExitStack() as stack:
        # 1. The settings that depend on the machine, and the plan.
        config, division_notes = divide_run(config, stack, is_importable=lambda: _is_importable(folder, workflow))
        teacher_config = without_sampler(config)
        config, chosen_precision, precision_notes = decide_precision(folder, config)
        plan, recipes, plan_text = resolve_plan(config, list(workflow.scorers), workflow.variable)
        if plan.kind == "replay" and config.replay.tools == "frozen":
            start_freezing()
        saved = load_checkpoint(folder.checkpoints)

        # 2. The records, the teachers and the models that sample.
        store = open_store(folder.records)
        stack.callback(store.close)
        cluster = _prepare_cluster(config, folder, workflow, stack, say) if config.cluster.on_ray else None
        teachers = await open_teachers(teacher_config, stack, say)
        sampler, chats = await _open_model(config, stack, cluster, say)

        # 3. The policies: of the roles that a new run finds, or of the checkpoint.
        if saved is None:
            with progress.activity.phase("look"):
                policies, notes = await preflight(config, workflow, tasks, store, sampler, chats, say)
            if plan.kind == "replay":
                count = min(config.tasks_per_step, len(tasks))
                notes.append(expected_budget(config, store, policies.learning, plan, count))
        else:
            policies, notes = _policies_of_checkpoint(config, saved[0], recipes.trainable_roles(workflow.scorers))
        check_routing(config.routing, policies)

        # 4. The learner, and the runner of episodes.
        loss = bounded_loss(recipes.run.loss, config.sampling.max_tokens)
        trainings = trainings_of_tables(config, recipes)
        loading = f"loading the weights to train: {', '.join(policies.trained)} ..."
        engine_sets(config, policies)  # raises ConfigError for policies that the engines cannot serve
        notes += await asyncio.to_thread(publication_notes, config, policies)
        changes = folder.described.get("changes", ())
        runner: EpisodeRunner
        learner: Learner
        if cluster is None:
            say(loading)
            learner = await open_local_learner(config, policies, loss, trainings)
            runner = local = LocalRunner(workflow, sampler, chats)
        else:
            sampler = await cluster.complete(policies)
            say(loading)
            runner, learner = await cluster.open_workers_and_learner(policies, loss, sampler, trainings)

        async def open_learner(policies: Policies) -> Learner:
            if cluster is not None:
                return await cluster.reopen_learner(policies, loss, trainings)
            return await open_local_learner(run.config, policies, loss, trainings)

        async def fall_back(gap: float | None, noise: str = "") -> None:
            """Continue the run in float32, because sampler and learner differ too much in bfloat16. `gap` is their
            measured difference in nats a token, if there is one, and `noise` describes another reason."""
            device = learner_device(run.config)
            keep_precision(folder, Precision(dtype="float32", device=device, gap=gap, fell_back=True, noise=noise))
            run.config = with_dtype(run.config, "float32")
            run.fall_back = None  # there is no further precision to fall back to
            if device == "cpu":  # the in-process engine has the learner's precision; on a GPU it stays in bfloat16
                await run.sampler.aclose()
                run.sampler = local.sampler = await _open_sampler(run.config, stack)
            await run.reopen_learner()

        run = RolloutRun(
            folder=folder,
            config=config,
            workflow=workflow,
            max_calls=max_calls(config, store),
            store=store,
            sampler=sampler,
            chats=chats,
            runner=runner,
            learner=learner,
            open_learner=open_learner,
            plan=plan,
            recipes=recipes,
            schedule=TaskPool(
                tasks,
                config.curriculum,
                config.refill.budget,
                config.seed,
                tasks_per_step(config, changes),
                steps_at_start(config, changes),
            ),
            held_out=held_out,
            teachers=teachers,
            notes=[
                *division_notes,
                plan_text,
                *precision_notes,
                *notes,
                *_roles_not_trained(policies),
                *_policies_trained_in_some_steps(config),
                *shared_tool_format(config),
            ],
            state=Checkpoint(policies=policies),
        )
        # Only `run` holds the learner from here on: `reopen_learner` frees its memory before it opens another one.
        del learner

        # 5. The checks of the precision, and the weights to start from.
        if chosen_precision is not None and chosen_precision.dtype == "bfloat16":
            run.fall_back = fall_back
            if chosen_precision.gap is None:  # not measured yet
                run.notes = [*run.notes, await check_precision(run)]
        if saved is None:
            run.notes = [*run.notes, *await check_bounds_of_losses(run)]
        if saved is not None:
            say(f"loading the checkpoint after {plural(saved[0].steps, 'step')} ...")
            run.notes = [*run.notes, *await restore(run, *saved)]
        elif config.init:
            run.notes = [*run.notes, *await begin_from(run, config.init)]
        yield run


def _policies_of_checkpoint(
    config: TrainConfig, checkpoint: Checkpoint, scored: Sequence[str] | None
) -> tuple[Policies, list[str]]:
    """Return the policies of a checkpoint and of further roles, and a note for each further role. These are roles that
    have appeared since, or that the setting `roles` names now. With `scored`, only these roles get a policy."""
    before = with_bases(config, checkpoint.policies)
    policies = add_policies(config, before, [*checkpoint.new_roles, *config.roles], scored=scored)
    new_roles = sorted(policies.roles.keys() - before.roles.keys())
    return policies, [f"role {role!r} gets the policy {policies.roles[role]}" for role in new_roles]


def _is_importable(folder: RunFolder, workflow: Workflow) -> bool:
    """Return whether rollout workers can import the application."""
    try:
        return bool(folder.workflow or import_path(workflow))
    except ConfigError:
        return False


def _prepare_cluster(
    config: TrainConfig,
    folder: RunFolder,
    workflow: Workflow,
    stack: contextlib.AsyncExitStack,
    say: Callable[[str], None],
) -> Cluster:
    """Prepare the cluster of a run. If Ray ends this process, a notice says how to continue."""
    from cotune.integrations.cluster.runtime import crash_notice
    from cotune.trainer.opening.cluster import Cluster

    killed = "The run was ended from outside: killed, out of memory, or Ray has lost a node that it needs."
    stack.enter_context(crash_notice(f"{killed} Continue with: cotune train --resume {folder.path}"))
    return Cluster(config, workflow, folder.workflow or import_path(workflow), stack, say)


async def open_local_learner(
    config: TrainConfig, policies: Policies, loss: LossSpec, trainings: Mapping[str, PolicyTraining]
) -> Learner:
    """Open the learner in this process."""
    from cotune.trainer.learner.local import LocalLearner

    return await asyncio.to_thread(
        OwnThread, lambda: LocalLearner.open(config.model, policies, config.learner, loss, trainings, config.seed)
    )


async def _open_model(
    config: TrainConfig, stack: contextlib.AsyncExitStack, cluster: Cluster | None, say: Callable[[str], None]
) -> tuple[Sampler, ChatFormats]:
    """Open the sampler and the chat formats. The sampler's process, or Ray, starts while this one imports torch."""
    models = models_text(config.bases)
    say(f"loading {models} ..." if cluster is None else f"starting Ray ({config.cluster.address}) ...")
    loading = asyncio.get_running_loop().run_in_executor(None, _load_chats, config)
    if cluster is not None:
        cluster.open_ray()
        chats = await loading
        return await cluster.open_sampler(), chats
    return await _open_sampler(config, stack), await loading


async def _open_sampler(config: TrainConfig, stack: contextlib.AsyncExitStack) -> Sampler:
    sampler = await open_in_process(config)
    stack.push_async_callback(sampler.aclose)
    return sampler


def _load_chats(config: TrainConfig) -> ChatFormats:
    """Load the chat format of each base model, and import the modules of the learner at the same time."""
    from cotune.integrations.models.chat.formats import load_formats
    from cotune.trainer.learner import local as local_learner  # noqa: F401

    return load_formats(config.bases, config.tool_formats)


def _policies_trained_in_some_steps(config: TrainConfig) -> list[str]:
    """Return a note for each policy that is only trained in some steps."""
    policies = [policy for policy in config.policy if policy.train]
    return [f"policy {policy.name} is trained in steps {policy.train} of {config.steps}" for policy in policies]


def _roles_not_trained(policies: Policies) -> list[str]:
    """Return notes that name the roles without a trained policy, and who plays them."""
    roles_of_kind: dict[str, list[str]] = {}
    for role, name in policies.roles.items():
        roles_of_kind.setdefault(policies.specs[name].kind, []).append(role)
    notes: list[str] = []
    if "frozen" in roles_of_kind:
        notes.append(f"not trained: {', '.join(roles_of_kind['frozen'])} (played by the untrained model)")
    if "provider" in roles_of_kind:
        notes.append(f"not trained: {', '.join(roles_of_kind['provider'])} (left to the application's provider)")
    return notes
