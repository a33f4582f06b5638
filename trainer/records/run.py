"""A run that learns from records: its parts, and how they are opened."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, RunError
from cotune.integrations.models.chat.formats import load_templates
from cotune.integrations.models.folder.folder import context_length, locate_model
from cotune.judging.labels import load_labels
from cotune.records.policies import Policies
from cotune.storage.open_store import open_store
from cotune.storage.outcomes import failure_reward
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.config.learner import PolicyTraining
from cotune.trainer.config.policy import settings_of
from cotune.trainer.config.resolve import resolve_policies
from cotune.trainer.learner.protocol import Learner
from cotune.trainer.opening.open_run import open_local_learner
from cotune.trainer.opening.resume import tasks_per_step
from cotune.trainer.opening.warm_start import warm_start
from cotune.trainer.records.answers import counts, read_answers
from cotune.trainer.records.choice import choose
from cotune.trainer.records.lessons import Reader, Recorded, split, total
from cotune.trainer.records.objectives import Likelihood, Objective, PreferenceLearner
from cotune.trainer.records.pairs import read_pairs
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.run.division import divide_run
from cotune.trainer.run.precision import without_sampler
from cotune.trainer.run.run import Run
from cotune.trainer.run.run_folder import RunFolder
from cotune.trainer.schedules.schedule import TaskSchedule

PATIENCE = 3
"""A policy stops learning when so many held-out losses in a row were not its lowest."""
START = "start.json"
"""File of a run for what is compared with the weights that it starts from."""


@dataclass(kw_only=True)
class RecordsRun(Run):
    """A run that learns from records; nothing is written to its store, which holds them."""

    learner: Objective
    recorded: Recorded
    schedule: TaskSchedule[str]
    """Episodes of each step."""
    held_out: Mapping[str, Sequence[TrainRow]]
    """Rows by policy."""

    @property
    def learning(self) -> list[str]:
        """The policies that still learn: those whose held-out loss falls."""
        best = self.state.best
        return [name for name in self.state.policies.trained if name not in best or best[name].since < PATIENCE]

    @property
    def finished(self) -> bool:
        """Whether no step is left to make."""
        return super().finished or not self.learning


@contextlib.asynccontextmanager
async def open_records_run(
    folder: RunFolder, config: TrainConfig, workflow: Workflow, say: Callable[[str], None]
) -> AsyncIterator[RecordsRun]:
    """Read the records, open the learner, and restore the newest checkpoint.

    Raises ConfigError, RecordError and RunError before any weights are loaded for records that cannot be learned from.
    """
    async with contextlib.AsyncExitStack() as stack:
        config, division_notes = divide_run(config, stack)
        config = without_sampler(config)
        store = open_store(config.records.path, read_only=True)
        stack.callback(store.close)
        say(f"reading the records of {store.address} ...")
        chosen, since = choose(folder, config.records, store)
        recorded = await asyncio.to_thread(_read, config, chosen)
        _check_same(folder, recorded)
        policies = _policies(config, recorded)
        episodes, held_out, note = split_for(policies, recorded, config.seed)
        players = policies.learning
        loss = _loss(config)
        say(f"loading the weights to train: {', '.join(policies.trained)} ...")
        learner = _objective(config, await _open_learner(config, workflow, policies, loss, stack, say))
        saved = load_checkpoint(folder.checkpoints)
        begun: list[str] = []
        notes = [*division_notes, _said(config, store, recorded, episodes, held_out), *recorded.notes, note, since]
        if unused := ", ".join(config.of_rollouts):
            notes.append(f"not used, as recipe {config.recipe} runs no episode: {unused}")
        if saved is not None:
            learner.go_on(folder.path / START)
        else:
            if config.init:
                begun, said = await warm_start(config.init, config.model, policies, learner)
                notes += said
            all_rows = functools.partial(recorded.of, recorded.rows, players)
            await asyncio.to_thread(learner.start, all_rows, folder.path / START)
        run = RecordsRun(
            folder=folder,
            config=config,
            store=store,
            learner=learner,
            recorded=recorded,
            schedule=TaskSchedule(episodes, config.seed, tasks_per_step(config, folder.described.get("changes", ()))),
            held_out=recorded.of(held_out, players),
            notes=list(filter(None, notes)),
            state=Checkpoint(policies=policies, versions=dict.fromkeys(begun, 1)),
        )
        if saved is not None:
            say(f"loading the checkpoint after {plural(saved[0].steps, 'step')} ...")
            await asyncio.to_thread(learner.load, saved[1])
            run.state = msgspec.structs.replace(saved[0], policies=policies)
            run.committed = saved[0].steps
            folder.truncate_metrics(saved[0].steps)
        for name, longest in recorded.longest(players).items():
            await asyncio.to_thread(learner.check, name, [longest])
        yield run


def _read(config: TrainConfig, store: Store) -> Recorded:
    templates = load_templates(config.bases, config.tool_formats)
    by_base = {model: Reader(chat, context_length(locate_model(model))) for model, chat in templates.items()}
    specs, on_failure = config.specs, failure_reward(config.on_failure)
    by_role = {role: by_base[specs[p.name].model or config.model] for p in config.policy for role in p.roles}

    def reader(role: str) -> Reader:
        return by_role.get(role, by_base[config.model])

    if config.recipe == "dpo":
        labels = load_labels(config.records.labels) if config.records.labels else None
        return read_pairs(store, reader, on_failure, labels)
    return read_answers(store, reader, config.records, on_failure)


def _policies(config: TrainConfig, recorded: Recorded) -> Policies:
    """The policies of the recorded roles. Raises ConfigError for a role that is configured and not recorded."""
    known = ", ".join(recorded.roles)
    named = {"roles": config.roles, "policy.roles": [role for p in config.policy for role in p.roles]}
    for field, roles in named.items():
        for role in roles:
            if role not in recorded.roles:
                raise ConfigError(
                    field,
                    role,
                    f"has no recorded answers to learn from; these have: {known}",
                    f"Left out are {counts(recorded.left_out) or 'none'}. See the roles with cotune show.",
                )
    return resolve_policies(config, recorded.roles)


def split_for(policies: Policies, recorded: Recorded, seed: int) -> tuple[list[str], list[str], str]:
    """As `split`, but nothing is held out if a policy would have no row left to learn from."""
    episodes, held_out, note = split(recorded, seed)
    rows = total(recorded.rows, episodes)
    for name in policies.trained:
        if not any(rows[role] for role in policies.roles_of(name)):
            note = f"no held-out loss: all answers of policy {name!r} would be held out"
            return [*recorded.rows], [], note
    return episodes, held_out, note


def _check_same(folder: RunFolder, recorded: Recorded) -> None:
    """Write the records' digest to run.json. Raises RunError where it holds that of others."""
    described = folder.described
    held = described.get("held") or {}
    found = {"records": recorded.digest, "episodes": len(recorded.rows)}
    if "records" not in held:
        folder.describe_as({**described, "held": {**held, **found}})
    elif held["records"] != found["records"]:
        raise RunError(
            f"The records are other than the run was started with: {held['episodes']} episodes then, "
            f"{found['episodes']} now.",
            "Give it the same records, or start a new run.",
        )


def _loss(config: TrainConfig) -> LossSpec:
    return FROM_RECORDS[config.recipe or ""]


def _objective(config: TrainConfig, learner: Learner) -> Objective:
    if config.recipe == "dpo":
        return PreferenceLearner(learner, pairs=config.learner.mini_batch // 2)
    return Likelihood(learner)


async def _open_learner(
    config: TrainConfig,
    workflow: Workflow,
    policies: Policies,
    loss: LossSpec,
    stack: contextlib.AsyncExitStack,
    say: Callable[[str], None],
) -> Learner:
    own = {one.name: PolicyTraining(settings_of(config, one.name).learner, loss) for one in config.policy}
    if not config.cluster.on_ray:
        return await open_local_learner(config, policies, loss, own)
    from cotune.trainer.opening.cluster import Cluster

    cluster = Cluster(config, workflow, "", stack, say)
    cluster.open_ray()
    return await cluster.open_learner(policies, loss, own)


def _said(
    config: TrainConfig, store: Store, recorded: Recorded, episodes: Sequence[str], held_out: Sequence[str]
) -> str:
    """What is learned from, in a sentence."""
    what = "pairs" if config.recipe == "dpo" else "rows"
    share = 2 if config.recipe == "dpo" else 1
    rows = ", ".join(f"{role} {count // share}" for role, count in sorted(total(recorded.rows, episodes).items()))
    out = f", {len(held_out)} held out" if held_out else ""
    left = counts(recorded.left_out)
    return (
        f"recipe {config.recipe}: {what} from {plural(len(episodes), 'episode')}{out}: {rows}"
        f"{f'; left out: {left}' if left else ''} ({store.address})"
    )
