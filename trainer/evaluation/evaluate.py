"""`cotune eval`: trained policies against their base and today's model, or base models against each other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cotune.algorithms.goal import Goal, goal_of, goal_of_policies
from cotune.config.train import TrainConfig
from cotune.episodes.rollout import EpisodeBatch
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError
from cotune.reading.evaluations import EVALUATION, EvaluatedMode, EvaluationReport, claim_folder
from cotune.reading.prompt_use import PromptUse
from cotune.recording.recorder import Nowhere
from cotune.records.policies import UNTRAINED
from cotune.records.prices import Prices
from cotune.records.structs import Episode, Task
from cotune.records.tasks import as_tasks
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.open_store import open_store
from cotune.storage.run_code import open_run_code
from cotune.storage.run_layout import FUNCTIONS, RunLayout, read_config
from cotune.storage.whole_file import system_error_message
from cotune.tables import plural
from cotune.terminal import print_line, terminal
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from cotune.trainer.evaluation.assignments import (
    PROBE_TASKS,
    Assignment,
    all_assignments,
    check_limit,
    contest_of_assignments,
    estimate,
    probe_roles,
    with_assignments,
)
from cotune.trainer.evaluation.modes import (
    Contest,
    EvaluationOptions,
    Lineup,
    Temperature,
    against_base,
    modes_of,
    temperature_of,
)
from cotune.trainer.evaluation.policies import EvaluatedPolicies
from cotune.trainer.evaluation.recorded import read_recorded, with_recorded
from cotune.trainer.evaluation.report import compare, remarks
from cotune.trainer.evaluation.run import evaluate_episodes, of_role, share_floor
from cotune.trainer.evaluation.subject import Subject, agreed, open_subject, trained_on_notes
from cotune.trainer.reporting.progress import episode_bar
from cotune.trainer.run.run_folder import write_atomically

log = logging.getLogger("cotune")

TIMEOUT = 600.0
"""Seconds for one episode of an export: it does not record the time limit of its training."""

OnMode = Callable[[str], contextlib.AbstractContextManager[Callable[[Episode], None] | None]]
"""From the label of a mode: a context that is open while the mode plays, and yields the function to call after each
episode."""


def evaluate(
    source: str | Path | Mapping[str, str | Path] | None,
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    options: EvaluationOptions | None = None,
    **settings: Any,
) -> EvaluationReport:
    """Evaluate a run's newest checkpoint, an export, a team, or base models on held-out tasks.

    `source` is the run or the export. A mapping from roles to runs (`RUN` or `RUN#STEP`), exports and models makes a
    team of them; its key `*` stands for all other roles. None evaluates the models in `bases`. `workflow` is a workflow
    or its name (`app:solve`); `tasks` a file of JSON lines or a sequence; `settings` are fields of `options`. Each mode
    runs one episode per task. Raises CotuneError subclasses for bad input, before any model is loaded, and
    WorkflowError when every episode failed.

    ```python
    report = cotune.evaluate("runs/r1", solve, "held_out.jsonl", modes=("base", "trained"))
    print(report.evaluations["trained"].success, report.comparisons)
    ```
    """
    # 1. Check all input before a model is loaded.
    all_options = msgspec.structs.replace(options or EvaluationOptions(), **settings)
    app = workflow_of(workflow)
    held_out = as_tasks(tasks)
    out = None if all_options.out is None else _new_folder(all_options.out)
    modes = modes_of(source is None, all_options)
    temperature = temperature_of(modes, all_options.temperature)
    subject = open_subject(source, all_options)
    evaluated = subject.policies

    # 2. Use the application as in training, as far as the options do not override that.
    configs = {run: convert(read_config(run)) for run in subject.runs}
    app = _application_of_training(app, subject, configs, all_options)
    goal, goal_note = _goal(subject, configs, app)
    contest = dataclasses.replace(subject.contest(modes, temperature), own_sampling=evaluated.evaluation_sampling)
    prices = _prices(configs.values(), all_options.prices, evaluated)
    timeout = all_options.timeout
    if timeout is None:
        timeout = max([config.episode_timeout for config in configs.values()], default=TIMEOUT)
    all_options = msgspec.structs.replace(all_options, prices=prices, timeout=timeout)
    recorded = read_recorded(all_options.records, held_out, prices, goal) if all_options.records is not None else None
    max_tokens = max([config.sampling.max_tokens for config in configs.values()], default=SamplingParams().max_tokens)

    # 3. Play all modes.
    with _claimed_folder(out, subject.own_run) as (claimed, claim_notes):
        report, contest = run_sync(
            _evaluate(
                app, held_out, evaluated, contest, all_options, claimed, training_max_tokens=max_tokens, goal=goal
            )
        )

    # 4. Complete the report and write it.
    if recorded is not None:
        recorded_mode, recorded_note = recorded
        report = with_recorded(report, contest.candidates, recorded_mode, recorded_note)
    notes = [
        subject.note,
        *claim_notes,
        goal_note,
        _sampling_note(evaluated, contest, temperature),
        *trained_on_notes(subject.runs, held_out),
        subject.prompts_note(app.prompts),
    ]
    report = msgspec.structs.replace(report, notes=(*report.notes, *filter(None, notes)))
    if claimed is not None:
        tasks_file = str(Path(tasks).absolute()) if isinstance(tasks, str | Path) else ""
        report = msgspec.structs.replace(report, created=time.time(), steps=subject.steps, tasks=tasks_file)
        report = _write_report(report, claimed.path / EVALUATION)
    report.require_some_episode()
    return report


def _new_folder(path: str | Path) -> RunLayout:
    """The folder to which an evaluation records. Raises ConfigError if it has records already: the episodes of the
    evaluation could not be told apart from them."""
    out = RunLayout(Path(path).absolute())
    for file in (out.records, out.path / EVALUATION, out.run_json):
        if file.exists():
            raise ConfigError("out", str(out.path), f"already has {file.name}", "Name a new folder.")
    return out


def _application_of_training(
    app: Workflow, subject: Subject, configs: Mapping[Path, TrainConfig], options: EvaluationOptions
) -> Workflow:
    """The application with the role names, redaction and prompts that the runs trained it with, unless the options
    override them. Raises ConfigError if runs differ in such a setting and no option decides."""
    # The functions that the runs name are only loaded if this user has written or trusted their folders. A function
    # that the options name takes the place of the runs' one.
    from_options = ["roles_by"] if options.roles_by else []
    for run in subject.runs:
        open_run_code(run, from_options, only=FUNCTIONS)
    roles_by = options.roles_by or agreed("roles_by", {run: config.roles_by for run, config in configs.items()})
    app = app.named_by(roles_by)
    for config in configs.values():
        app = app.redacted(config.redact, keep_token_ids=config.keep_token_ids)
    return app.prompted(subject.prompts(options.prompts))


def _prices(configs: Iterable[TrainConfig], chosen_prices: Prices, evaluated: EvaluatedPolicies) -> Prices:
    """Return the prices of the runs, which `chosen_prices` override. The price of a base model is also the price of
    each of its policies that has none."""
    prices: dict[str, tuple[float, float]] = {}
    for config in configs:
        prices.update(config.prices)
    prices.update(chosen_prices)
    for model, policies in evaluated.bases.items():
        base_price = prices.get(model, prices.get(Path(model).name))
        if not base_price:
            continue
        if model == evaluated.model:
            prices.setdefault(UNTRAINED.name, base_price)
        for policy in policies:
            prices.setdefault(policy, base_price)
    return prices


async def _evaluate(
    app: Workflow,
    tasks: Sequence[Task],
    evaluated: EvaluatedPolicies,
    contest: Contest,
    options: EvaluationOptions,
    out: RunLayout | None,
    *,
    training_max_tokens: int,
    goal: Goal,
) -> tuple[EvaluationReport, Contest]:
    """Play the contest with a sampler in this process.

    `out` is the folder to record to (None: nothing is recorded). `training_max_tokens` bounds answers if neither the
    application nor the options do. Returns the report and the contest: with `pairs`, the contest of all assignments is
    known only after the application has run on a few tasks.
    """
    console = terminal(stderr=True)
    say = partial(print_line, console)

    @contextlib.contextmanager
    def show_progress(mode: str) -> Iterator[Callable[[Episode], None]]:
        """Show a bar of progress while a mode runs, and yield the function to call after each episode."""
        lineup = contest.lineups.get(mode)
        samples = options.samples
        if lineup is not None and lineup.temperature == 0:
            samples = 1
        if not console.is_terminal:
            say(f"evaluating {mode} on {plural(len(tasks), 'task')} ...")
        with episode_bar(console, len(tasks) * samples, mode) as advance:
            yield advance

    async with contextlib.AsyncExitStack() as stack:
        responder = await stack.enter_async_context(
            evaluated.responder(
                threads=options.threads,
                say=say,
                scorers=app.scorers,
                defaults=SamplingParams(max_tokens=options.max_tokens or training_max_tokens),
                seed=options.seed,
                stream="eval",
            )
        )
        context_length = (await responder.sampler.info()).max_model_len
        prompt_use = PromptUse(Nowhere() if out is None else stack.enter_context(open_store(out.records)))
        batch = EpisodeBatch(
            tasks=tasks,
            sink=prompt_use,
            phase="eval",
            rollouts=options.samples,
            concurrency=options.concurrency,
            timeout=options.timeout,
        )
        assignments: dict[str, Assignment] = {}
        if options.pairs:
            models = list(contest.candidates)
            temperature = contest.lineups[models[0]].temperature
            assignments = await _find_assignments(app, batch, responder, models, temperature, options, say)
            modes = modes_of(models_only=True, options=options)
            contest = contest_of_assignments(assignments, models[0], modes, temperature)
        report = await evaluate_modes(
            app,
            batch,
            responder,
            contest,
            deployed_params=SamplingParams(max_tokens=options.max_tokens or context_length),
            prices=options.prices,
            goal=goal,
            on_mode=show_progress,
        )
        report = msgspec.structs.replace(report, notes=(*report.notes, *prompt_use.lines()))
        if assignments:
            report = with_assignments(report, assignments)
        return report, contest


async def _find_assignments(
    app: Workflow,
    batch: EpisodeBatch,
    responder: PolicyResponder,
    models: Sequence[str],
    temperature: Temperature,
    options: EvaluationOptions,
    say: Callable[[str], None],
) -> dict[str, Assignment]:
    """Find the roles of the application by running it on a few tasks, and return all assignments of `models` to them.
    Raises ConfigError if the assignments take more episodes than `max_episodes` of the options."""
    say(f"finding the roles with {models[0]} on {plural(min(PROBE_TASKS, len(batch.tasks)), 'task')} ...")
    uses = await probe_roles(app, batch, responder, models[0])
    episodes = len(batch.tasks)
    if temperature != 0:  # at temperature 0 further samples would be equal, and are not run
        episodes *= options.samples
    say(estimate(models, uses, episodes, options.prices))
    check_limit(len(models) ** len(uses), episodes, options.max_episodes)
    return all_assignments(models, list(uses))


async def evaluate_modes(
    workflow: Workflow,
    batch: EpisodeBatch,
    responder: PolicyResponder,
    contest: Contest,
    *,
    deployed_params: SamplingParams | None = None,
    prices: Prices | None = None,
    goal: Goal | None = None,
    on_mode: OnMode = lambda mode: contextlib.nullcontext(),
) -> EvaluationReport:
    """Run `batch` with each lineup of `contest` on the same tasks, and compare them as the contest says.

    `responder` answers with the newest policies. `deployed_params` are its defaults at the temperature `app`.

    If trained roles play against each other, each also plays in a mode `ROLE against base`, with the untrained model
    in the other seats. It is compared with the untrained model in its own role.
    """
    evaluations: dict[str, EvaluatedMode] = {}

    async def play(label: str, lineup: Lineup, goal: Goal | None) -> None:
        """Run the tasks with one lineup, the choice of who plays each role, and store the result under `label`."""
        # 1. The responder that answers the calls; None for the application's own provider.
        lineup_responder = None
        if lineup.policies is not None:
            lineup_responder = dataclasses.replace(
                responder,
                policies=lineup.policies,
                override=lineup.override,
                sampling_of_role=contest.sampling_of_roles(lineup),
            )
            if lineup.others is not None:
                lineup_responder.others = lineup.others.player
                lineup_responder.provider_roles = lineup.others.provider_roles
        if lineup_responder and deployed_params and lineup.temperature == "app":
            lineup_responder.defaults = deployed_params

        # 2. The episodes.
        with on_mode(label) as on_episode:
            episodes = msgspec.structs.replace(batch, phase=f"eval-{label}", on_episode=on_episode)
            # At temperature 0 all episodes of a task would be the same.
            if lineup.temperature == 0:
                episodes = msgspec.structs.replace(episodes, rollouts=1)
            # Today's model gets the application's own prompts: edited prompts belong to the side it is compared with.
            flow = workflow
            if lineup_responder is None:
                flow = dataclasses.replace(workflow, prompts=None)
            played_mode = await evaluate_episodes(
                flow, episodes, lineup_responder, label=label, prices=prices, goal=goal
            )

            # 3. The result. Calls of roles without a policy are reported, unless the user chose who answers them.
            unlisted = played_mode.unlisted
            if lineup.others is not None and lineup.others.by_intent:
                unlisted = {}
            evaluations[label] = msgspec.structs.replace(played_mode, temperature=lineup.temperature, unlisted=unlisted)

    # 1. The modes. Rewards are final once all have run: a failed episode gets the lowest reward of any mode.
    for label, lineup in contest.lineups.items():
        await play(label, lineup, goal)
    evaluations = dict(zip(evaluations, share_floor(list(evaluations.values())), strict=True))
    sound = [mode for mode, evaluation in evaluations.items() if evaluation.all_failed is None]
    comparisons = [compare(evaluations[mode], evaluations[other]) for mode, other in contest.pairs(sound)]

    # 2. Roles that play against each other: each against the untrained model.
    if goal is not None and {"base", "trained"} <= set(sound):
        seats = evaluations["trained"].opposed or evaluations["base"].opposed
        for role in seats:
            label = f"{role} against base"
            lineup = Lineup(against_base(responder.policies, role, seats), contest.lineups["trained"].temperature)
            await play(label, lineup, goal.of_role(role))
            comparisons.append(compare(evaluations[label], of_role(evaluations["base"], role)))
    return EvaluationReport(
        evaluations=evaluations,
        comparisons=tuple(comparisons),
        notes=(*contest.notes, *remarks(evaluations, contest, responder)),
    )


def _goal(subject: Subject, configs: Mapping[Path, TrainConfig], app: Workflow) -> tuple[Goal, str]:
    """Return the reward that a run trained on. If it is not known, return the plain sum of rewards, with a note."""
    if not subject.trained_sources:
        return Goal(), ""
    if subject.trained_sources > 1:
        note = "Rewards are the plain sum: the policies were trained in several runs, perhaps on different rewards."
        return Goal(), note
    if not configs:
        note = "Rewards are the plain sum: an export does not record the rewards of its training. Name the run instead."
        return Goal(), note
    (config,) = configs.values()
    if config.from_records:  # such a recipe weighs no rewards
        return goal_of(None, config.on_failure), ""
    try:
        _plan, recipes, _plan_text = resolve_plan(config, sorted(app.scorers), app.variable)
    except ConfigError as error:
        note = f"Rewards are the plain sum, as the run's recipe does not fit this workflow: {error}"
        return goal_of(None, config.on_failure), note
    evaluated = subject.policies
    policy_of_role: dict[str, str] = {}
    for policy in evaluated.policies:
        if policy.name in evaluated.trained:
            policy_of_role |= dict.fromkeys(policy.roles, policy.name)
    return goal_of_policies(recipes, config.on_failure, policy_of_role, app.bounds), ""


def _sampling_note(evaluated: EvaluatedPolicies, contest: Contest, temperature: Temperature) -> str:
    """Name the policies that are sampled with a `top_p`, `top_k` or `min_p` of their own, and the sides that play
    without some of them; empty if there are none."""
    policies: list[str] = []
    for policy, settings in evaluated.evaluation_sampling.items():
        values = ", ".join(f"{name} {value:g}" for name, value in settings.items())
        policies.append(f"{policy} ({values})")
    if not policies:
        return ""
    if temperature == "app":
        return f"At --temperature app the evaluation settings of [[policy]] tables are not used: {', '.join(policies)}."
    note = f"The evaluation settings of [[policy]] tables hold in all modes except today: {', '.join(policies)}."

    # Another model or run plays without these policies, and so without their settings. In `swapped` the settings move
    # to other roles together with their policies.
    settings_of_side: dict[str, dict[str, Mapping[str, Any]]] = {}
    for label, lineup in contest.lineups.items():
        if lineup.policies is not None and label != "swapped":
            settings_of_side[label] = contest.sampling_of_roles(lineup)
    first, *others = settings_of_side.values() or [{}]
    if any(settings != first for settings in others):
        sides: list[str] = []
        for label, settings in settings_of_side.items():
            sides.append(f"{label} has them for {', '.join(sorted(settings)) or 'no role'}")
        note += f" The sides are not sampled alike: {'; '.join(sides)}."
    return note


@contextlib.contextmanager
def _claimed_folder(out: RunLayout | None, run: Path | None) -> Iterator[tuple[RunLayout | None, list[str]]]:
    """Yield the folder to which an evaluation records: `out`, or the next one of the run. If there is no folder, yield
    None with a note that says why nothing is stored.

    If the evaluation ends early, the episodes that have ended stay. If there are none, the folder is removed.
    """
    # 1. Choose the folder.
    is_new = out is None or not out.path.exists()
    folder = out
    if folder is None:
        if run is None:
            yield None, ["Not stored: only a run has a place for its evaluations. Store this one with --out FOLDER."]
            return
        try:
            folder = RunLayout(claim_folder(run))
        except OSError as error:
            yield None, [f"Not stored: {run} cannot be written ({error.strerror}). Name another place with --out."]
            return

    # 2. Let the evaluation record to it. Clean up if it ends early, also if the user interrupts it.
    try:
        yield folder, []
    except BaseException:
        episodes = _count_ended_episodes(folder)
        if episodes:
            log.warning("The episodes that have ended are kept (%d): cotune show %s", episodes, folder.path)
            raise
        for file in folder.path.glob(f"{folder.records.name}*"):
            file.unlink(missing_ok=True)
        if is_new and folder.path.exists():
            folder.path.rmdir()
        raise


def _count_ended_episodes(out: RunLayout) -> int:
    if not out.records.exists():
        return 0
    with open_store(out.records, read_only=True) as store:
        return sum(episode.status != "cancelled" for episode in store.episodes())


def _write_report(report: EvaluationReport, file: Path) -> EvaluationReport:
    """Write the report. Returns it with its folder, or with a note if it cannot be written: its figures are still
    shown."""
    try:
        write_atomically(file, json.dumps(report.to_json(), indent=2).encode())
    except OSError as error:
        log.error("The figures are shown, and not stored: %s", system_error_message(error, "evaluate again"))
        note = f"{file} could not be written: {error.strerror}."
        return msgspec.structs.replace(report, notes=(*report.notes, note))
    return msgspec.structs.replace(report, stored=str(file.parent))
