"""A run that learns from records: its parts, and how they are opened."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from cotune.algorithms.from_records import FROM_RECORDS, PAIRED, TURN_CRITIC
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, RecordError, RunError
from cotune.integrations.models.chat.formats import load_templates
from cotune.integrations.models.folder.folder import context_length, locate_model
from cotune.judging.labels import Label, load_labels
from cotune.reading.recorded_answers import outcome_values
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
from cotune.trainer.records.answers import counts_text, read_answers
from cotune.trainer.records.choice import choose_episodes
from cotune.trainer.records.lessons import EpisodeSplit, Reader, Readers, Recorded, count_rows, split_episodes
from cotune.trainer.records.objectives import Likelihood, Objective, PreferenceLearner
from cotune.trainer.records.pairs import read_pairs
from cotune.trainer.records.turn_critic import (
    ANY_NUMBER,
    EpisodePair,
    TurnCritic,
    accuracy,
    count_turns,
    opposed_roles,
    pair_episodes,
    policies_with_choice,
    read_turns,
    score_turns,
    tasks_with_reference,
)
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.run.division import divide_run
from cotune.trainer.run.precision import without_sampler
from cotune.trainer.run.run import Run
from cotune.trainer.run.run_folder import RunFolder, write_atomically
from cotune.trainer.schedules.schedule import TaskSchedule

PATIENCE = 3
"""A policy stops learning after this many held-out losses in a row that were not its lowest."""
TURN_ADVANTAGES = "turn_advantages.jsonl"
"""File of a run of recipe sweet_rl: a line for each recorded candidate, in the form of `records.labels`."""
START = "start.json"
"""File of a run with the figures of its rows under the initial weights."""


@dataclass(kw_only=True)
class RecordsRun(Run):
    """A run that learns from records. Its store contains the records, and nothing is written to it."""

    learner: Objective
    recorded: Recorded
    schedule: TaskSchedule[str]
    """The episodes of each step."""
    held_out: Mapping[str, Sequence[TrainRow]]
    """The held-out rows of each policy."""

    @property
    def learning(self) -> list[str]:
        """The policies that still learn, because their held-out loss falls or is not measured."""
        best = self.state.best
        return [name for name in self.state.policies.trained if name not in best or best[name].since < PATIENCE]

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or no policy learns any more."""
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

        # Read the rows to learn from, and hold out some of them.
        store = open_store(config.records.path, read_only=True)
        stack.callback(store.close)
        say(f"reading the records of {store.address} ...")
        chosen_store, choice_note = choose_episodes(folder, config.records, store)
        split_tasks: set[str] = set()
        if config.recipe == "sweet_rl":  # its critic and its policies hold out the same tasks
            split_tasks = await asyncio.to_thread(tasks_with_reference, chosen_store)
        labels, critic_notes = await _labels(folder, config, workflow, chosen_store, split_tasks, say)
        recorded = await asyncio.to_thread(_read, config, chosen_store, labels)
        _keep_or_check_digest(folder, recorded)
        policies, untrained_note = _policies_with_rows(config, recorded)
        split = split_for(policies, recorded, config.seed, split_tasks)
        summary = _summary(config, store, recorded, split)
        notes = [*division_notes, *critic_notes, untrained_note, summary, *recorded.notes, split.note, choice_note]
        if unused := ", ".join(config.settings_for_rollouts):
            notes.append(f"not used, as recipe {config.recipe} runs no episode: {unused}")

        # Open the learner, and begin or continue the run.
        say(f"loading the weights to train: {', '.join(policies.trained)} ...")
        loss = FROM_RECORDS[config.recipe or ""]
        learner = await _open_learner(config, workflow, policies, loss, stack, say)
        players = policies.learning
        run = RecordsRun(
            folder=folder,
            config=config,
            store=store,
            learner=_make_objective(config, learner),
            recorded=recorded,
            schedule=TaskSchedule(
                split.learned, config.seed, tasks_per_step(config, folder.described.get("changes", ()))
            ),
            held_out=recorded.of(split.held_out, players),
            notes=(),
            state=Checkpoint(policies=policies),
        )
        saved = load_checkpoint(folder.checkpoints)
        if saved is None:
            notes += await _begin(run)
        else:
            await _continue(run, *saved, say)
        run.notes = [note for note in notes if note]
        for policy, row in recorded.longest(players).items():
            await asyncio.to_thread(run.learner.check, policy, [row])
        yield run


async def _begin(run: RecordsRun) -> Sequence[str]:
    """Load the initial weights of a new run, and compute the figures of its rows under them. Returns notes for the
    user."""
    policies = run.state.policies
    notes: Sequence[str] = ()
    if run.config.init:
        started, notes = await warm_start(run.config.init, run.config.model, policies, run.learner)
        run.state.versions = dict.fromkeys(started, 1)
    all_rows = functools.partial(run.recorded.of, run.recorded.rows, policies.learning)
    await asyncio.to_thread(run.learner.start, all_rows, run.folder.path / START)
    return notes


async def _continue(run: RecordsRun, saved: Checkpoint, path: Path, say: Callable[[str], None]) -> None:
    """Restore the run from a checkpoint: its state `saved`, and the learner's files in `path`."""
    run.learner.resume(run.folder.path / START)
    say(f"loading the checkpoint after {plural(saved.steps, 'step')} ...")
    await asyncio.to_thread(run.learner.load, path)
    run.state = msgspec.structs.replace(saved, policies=run.state.policies)
    run.committed = saved.steps
    run.folder.truncate_metrics(saved.steps)


def _read(config: TrainConfig, store: Store, labels: Mapping[str, float] | None) -> Recorded:
    """Read the answers to learn from, or pairs of answers if the recipe needs them. If given, `labels` rank the answers
    of a pair."""
    on_failure = failure_reward(config.on_failure)
    if config.recipe in PAIRED:
        return read_pairs(store, _readers(config), on_failure, labels)
    return read_answers(store, _readers(config), config.records, on_failure)


def _readers(config: TrainConfig) -> Readers:
    """Return the reader of each role, with the chat template of its policy's base model."""
    templates = load_templates(config.bases, config.tool_formats)
    reader_of_base = {model: Reader(chat, context_length(locate_model(model))) for model, chat in templates.items()}
    # Roles that no configured policy names are read with the run's model, in `reader`.
    reader_of_role: dict[str, Reader] = {}
    for policy in config.policy:
        base = config.specs[policy.name].model or config.model
        reader_of_role |= dict.fromkeys(policy.roles, reader_of_base[base])

    def reader(role: str) -> Reader:
        return reader_of_role.get(role, reader_of_base[config.model])

    return reader


async def _labels(
    folder: RunFolder,
    config: TrainConfig,
    workflow: Workflow,
    store: Store,
    split_tasks: Collection[str],
    say: Callable[[str], None],
) -> tuple[Mapping[str, float] | None, list[str]]:
    """Return the scores that replace the recorded rewards, by candidate, and notes on them; None if the recorded
    rewards are used.

    The scores are from a file that the configuration names, or from the critic of recipe sweet_rl, which holds out a
    part of `split_tasks`.
    """
    if config.recipe == "sweet_rl":
        advantages, notes = await _turn_advantages(folder, config, workflow, store, split_tasks, say)
        _free_critic()
        return advantages, notes
    if config.records.labels:
        return load_labels(config.records.labels), []
    return None, []


def _free_critic() -> None:
    """Free the memory of the critic before the policy's learner is opened.

    Activation checkpointing makes a reference cycle through every layer (`learner.memory.checkpointing`), so the
    weights stay until the garbage collector runs.
    """
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


async def _turn_advantages(
    folder: RunFolder,
    config: TrainConfig,
    workflow: Workflow,
    store: Store,
    split_tasks: Collection[str],
    say: Callable[[str], None],
) -> tuple[dict[str, float], list[str]]:
    """Return the advantage that a critic gives each recorded candidate, by its id, and notes on the critic.

    The critic is trained when the run is first opened. A resumed run reads its advantages from the run folder. Raises
    ConfigError and RecordError for records that it cannot learn from.
    """
    file = folder.path / TURN_ADVANTAGES
    if file.is_file():
        return load_labels(file), []

    # Read the turns and pair the episodes.
    turns = await asyncio.to_thread(read_turns, store, _readers(config))
    await asyncio.to_thread(_refuse_opposed_roles, store, turns)
    policies = _policies(config, turns)
    players = policies.learning
    outcomes = await asyncio.to_thread(outcome_values, store, failure_reward(config.on_failure))
    split = split_for(policies, turns, config.seed, split_tasks)
    pairs = count_turns(turns, pair_episodes(split.learned, turns.tasks, outcomes), players)
    held_out_pairs = count_turns(turns, pair_episodes(split.held_out, turns.tasks, outcomes), players)

    with_choice = await asyncio.to_thread(policies_with_choice, turns, players)
    notes = _drop_policies_without_critic(pairs, policies.trained, with_choice)
    if left_out := counts_text(turns.left_out):
        notes.append(f"the critic leaves out: {left_out}")

    # Train the critics, and score all candidates.
    say(f"training a critic for {', '.join(pairs)} ...")
    settings = msgspec.structs.replace(config.learner, mini_batch=ANY_NUMBER)
    critic_config = msgspec.structs.replace(config, learner=settings)
    async with contextlib.AsyncExitStack() as stack:
        learner = await _open_learner(critic_config, workflow, policies, TURN_CRITIC, stack, say)
        if config.init:
            await warm_start(config.init, config.model, policies, learner)
        critic = TurnCritic(learner)
        scored_players = {role: policy for role, policy in players.items() if policy in pairs}
        scores = await score_turns(critic, turns, scored_players, pairs, config.learner.mini_batch, config.seed, say)
        for name, trained_pairs in pairs.items():
            share = await asyncio.to_thread(accuracy, critic, name, turns, trained_pairs, players)
            note = f"critic of {name}: the better of two episodes has the larger sum of turn advantages in {share:.0%} "
            note += f"of {plural(len(trained_pairs), 'pair')}"
            if name in held_out_pairs:
                unseen_pairs = held_out_pairs[name]
                share = await asyncio.to_thread(accuracy, critic, name, turns, unseen_pairs, players)
                note += f", and in {share:.0%} of {len(unseen_pairs)} of held-out tasks"
            notes.append(note)
    lines = [msgspec.json.encode(Label(id=id, score=score)) + b"\n" for id, score in scores.items()]
    write_atomically(file, b"".join(lines))
    return scores, notes


def _refuse_opposed_roles(store: Store, turns: Recorded) -> None:
    """Raise ConfigError if roles play against each other: then the sum of outcomes is the same in all episodes."""
    if opposed := opposed_roles(store, turns.roles):
        raise ConfigError(
            "recipe",
            "sweet_rl",
            f"sums the outcomes of an episode, and the outcomes of {', '.join(opposed)} always add up to the same "
            "number: these roles play against each other",
            "Use a recipe that has an outcome for each role and samples new answers, like spiral, without --records.",
        )


def _drop_policies_without_critic(
    pairs: dict[str, dict[EpisodePair, int]], trained: Sequence[str], with_choice: Collection[str]
) -> list[str]:
    """Remove the policies from `pairs` that have no two candidates for a prompt: a critic has nothing to choose there.

    Returns a note for each trained policy that has no critic: one of these, or a policy without pairs of episodes.
    Raises RecordError if no policy is left.
    """
    faults: list[str] = []
    for name in trained:
        if name not in pairs:
            faults.append(f"{name} has no turns in two episodes of one task with different outcomes")
        elif name not in with_choice:
            faults.append(f"{name} has no two different candidates for one prompt")
            del pairs[name]
    if not pairs:
        raise RecordError(
            f"Recipe sweet_rl can train no policy: {'; '.join(faults)}.",
            "It needs several episodes of each task with different outcomes, and several candidates of a turn. Record "
            "them with --plan tree or --plan replay.",
        )
    return [f"no critic for a policy, whose candidates get no label: {fault}" for fault in faults]


def _policies(config: TrainConfig, recorded: Recorded) -> Policies:
    """Return the policies of the recorded roles. Raises ConfigError for a role that is configured and not recorded."""
    configured = [("roles", role) for role in config.roles]
    for policy in config.policy:
        configured += [("policy.roles", role) for role in policy.roles]
    for field, role in configured:
        if role not in recorded.roles:
            raise ConfigError(
                field,
                role,
                f"has no recorded answers to learn from; these have: {', '.join(recorded.roles)}",
                f"Left out are {counts_text(recorded.left_out) or 'none'}. See the roles with cotune show.",
            )
    return resolve_policies(config, recorded.roles)


def _policies_with_rows(config: TrainConfig, recorded: Recorded) -> tuple[Policies, str]:
    """Return the policies, and a note on configured roles that recipe sweet_rl does not train.

    The critic has checked that these roles are recorded. Their candidates give no pair, so their policies are frozen.
    Other recipes refuse these roles.
    """
    if config.recipe != "sweet_rl":
        return _policies(config, recorded), ""
    roles_with_rows = set(recorded.roles)
    all_roles = set(roles_with_rows)
    untrained_roles = set(config.roles) - roles_with_rows
    tables: list[PolicyConfig] = []
    for table in config.policy:
        all_roles.update(table.roles)
        if not table.trained:
            tables.append(table)
            continue
        untrained_roles.update(set(table.roles) - roles_with_rows)
        has_no_rows = roles_with_rows.isdisjoint(table.roles)
        if has_no_rows:
            tables.append(msgspec.structs.replace(table, kind="frozen"))
        else:
            tables.append(table)
    config_with_rows = msgspec.structs.replace(config, roles=(), policy=tuple(tables))
    note = ""
    if untrained_roles:
        note = f"not trained, because their candidates give no pair: {', '.join(sorted(untrained_roles))}"
    return resolve_policies(config_with_rows, sorted(all_roles)), note


def split_for(policies: Policies, recorded: Recorded, seed: int, all_tasks: Collection[str] = ()) -> EpisodeSplit:
    """Divide the recorded episodes as `split_episodes` does, but hold out nothing if a policy would have no row left to
    learn from."""
    split = split_episodes(recorded, seed, all_tasks)
    rows_of_role = count_rows(recorded.rows, split.learned)
    for name in policies.trained:
        if not any(rows_of_role[role] for role in policies.roles_of(name)):
            note = f"no held-out loss: all answers of policy {name!r} would be held out"
            return EpisodeSplit(learned=list(recorded.rows), held_out=[], note=note)
    return split


def _keep_or_check_digest(folder: RunFolder, recorded: Recorded) -> None:
    """At the first start, write the digest of the records to run.json. Later, raise RunError if the records have
    another digest."""
    run_json = folder.described
    at_start = run_json.get("held") or {}
    digest = recorded.digest
    episodes = len(recorded.rows)
    if "records" not in at_start:
        folder.describe_as({**run_json, "held": {**at_start, "records": digest, "episodes": episodes}})
    elif at_start["records"] != digest:
        raise RunError(
            f"The records are not the ones that the run was started with: {at_start['episodes']} episodes then, "
            f"{episodes} now.",
            "Pass the same records, or start a new run.",
        )


def _make_objective(config: TrainConfig, learner: Learner) -> Objective:
    if config.recipe in PAIRED:
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
    """Open the learner in this process or on Ray, as configured."""
    trainings = {
        policy.name: PolicyTraining(settings_of(config, policy.name).learner, loss) for policy in config.policy
    }
    if not config.cluster.on_ray:
        return await open_local_learner(config, policies, loss, trainings)
    from cotune.trainer.opening.cluster import Cluster

    cluster = Cluster(config, workflow, "", stack, say)
    cluster.open_ray()
    return await cluster.open_learner(policies, loss, trainings)


def _summary(config: TrainConfig, store: Store, recorded: Recorded, split: EpisodeSplit) -> str:
    """Return a sentence with the numbers of rows (or pairs) of each role, and of the answers that are left out."""
    unit = "rows"
    rows_per_unit = 1
    if config.recipe in PAIRED:
        unit = "pairs"
        rows_per_unit = 2
    rows_of_role = count_rows(recorded.rows, split.learned)
    counts = [f"{role} {count // rows_per_unit}" for role, count in sorted(rows_of_role.items())]
    text = f"recipe {config.recipe}: {unit} from {plural(len(split.learned), 'episode')}"
    if split.held_out:
        text += f", {len(split.held_out)} held out"
    text += f": {', '.join(counts)}"
    if left_out := counts_text(recorded.left_out):
        text += f"; left out: {left_out}"
    return f"{text} ({store.address})"
