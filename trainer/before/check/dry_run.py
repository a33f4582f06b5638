"""`cotune check`: runs an application without the models of training, and reports the roles, calls and groups that
training would have."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from cotune.algorithms.collect import collect
from cotune.algorithms.groups import build_groups
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.samples import Sample
from cotune.config.train import TrainConfig
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError
from cotune.judging.episodes import finished
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.app_parts import Part
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import CallRecord, RewardRecord, Task
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.trainer.before import findings as common_findings
from cotune.trainer.before.answers.drawn import DrawnAnswers
from cotune.trainer.before.answers.recorded import RecordedAnswers
from cotune.trainer.before.answers.responder import CheckResponder
from cotune.trainer.before.check import findings as run_findings
from cotune.trainer.before.check.bases import NO_MODEL, CheckedBase, base_findings, load_bases
from cotune.trainer.before.check.invented import (
    TaskNames,
    invented_findings,
    invented_roles,
    names_of_tasks,
    task_name_findings,
)
from cotune.trainer.before.check.prompts import prompt_findings, use_findings
from cotune.trainer.before.check.report import CheckLimits, CheckReport, GroupCheck, IdleCheck
from cotune.trainer.before.check.runs import Run, Runner, TaskRuns
from cotune.trainer.before.check.watch import Watch, watched
from cotune.trainer.before.findings import Finding, RoleCheck, blocking_finding, named_roles, rewards_by_role, roles_of
from cotune.trainer.config.load import convert
from cotune.trainer.config.policy import shared_tool_format
from cotune.trainer.config.resolve import resolve_plan, resolve_policies
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.judging.bench import Bench, judging_role
from cotune.trainer.schedules.curriculum import check_curriculum
from cotune.trainer.schedules.refill import check_refill

RECORDS = "records:"
PROVIDER = "provider"


def check(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    config: TrainConfig | Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    answers: str | None = None,
    call_tools: bool = True,
    limits: CheckLimits | None = None,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> CheckReport:
    """Run the first tasks, and report the roles, calls and groups that training would have.

    A task runs three to eight times, then twice at once, or three times twice at once if these runs fail. If an answer
    contains the name of a role, the task runs up to two times more with another name. A task whose first run makes no
    call runs once, and one whose runs reach the time limit runs twice. With drawn answers the next task then runs once,
    for the names of its roles.

    `workflow`, `tasks`, `config` and `settings` are the arguments of `train`; `model` is the model to train, whose
    tokenizer counts the prompts' tokens. Answers are drawn, unless `answers` names a small model, "provider" for the
    application's own, or "records:ADDRESS". Without `call_tools` drawn answers call no tool. `limits` are the number of
    tasks (default: 1) and the bounds of a run; `say` is called before each run. Raises ConfigError.

    ```python
    report = cotune.check(solve, "tasks.jsonl", plan={"k": 8})
    ```
    """
    limits = limits or CheckLimits()
    table = msgspec.to_builtins(config) if isinstance(config, TrainConfig) else dict(config or {})
    if model:
        table["model"] = model
    config = convert({"model": NO_MODEL, **table, **settings})
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/records.db") as store, watched() as watch:
        # All input is checked before the application runs.
        subject = _read_input(workflow, tasks, config, count_tokens=model is not None, say=say)
        at_once, offline = config.concurrency > 1, answers != PROVIDER

        async def run_tasks() -> CheckedRuns:
            async with answers_of_runs(answers, subject, call_tools, say) as responder:
                runner = Runner(subject.flow, store, responder, watch, say, limits, at_once, offline)
                with open_store(f"{folder}/renamed.db") as renamed:
                    return await _run_tasks(subject, runner, renamed, are_drawn=answers is None)

        runs = run_sync(run_tasks())
        training = _forecast_training(subject, runs, store, watch)
        tokens, findings = _find_all(subject, runs, training, store, watch, answers)
        calls = runs.calls
        return CheckReport(
            workflow=workflow if isinstance(workflow, str) else subject.flow.name,
            tasks=tuple(runs_of_task.task.id for runs_of_task in runs.tasks),
            answers=answers or "drawn",
            plan=subject.plan_text,
            runs=len(runs.all),
            roles=tuple(training.roles),
            idle=tuple(training.idle),
            unlisted=_unlisted_roles(calls, watch.known),
            calls=tuple(msgspec.structs.replace(call, candidates=()) for call in calls),
            tokens=tokens,
            groups=tuple(training.groups),
            team=runs.team,
            local={role: components for role, components in training.local.items() if components},
            left_out=training.left_out,
            findings=tuple(findings),
        )


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The application and the configuration that a dry run checks, read before anything runs."""

    flow: Workflow
    tasks: Sequence[Task]
    config: TrainConfig
    prompts: Prompts | None
    plan: Plan
    plan_text: str
    """The plan in a sentence, with the reason for it."""
    recipes: Recipes
    able: Sequence[str] | None
    """Roles that can be trained; None: all."""
    bases: Mapping[str, CheckedBase]
    """The base model of each policy, "" for all other policies; empty if no tokens are counted."""


@dataclass(frozen=True, kw_only=True)
class CheckedRuns:
    """The runs of a dry run."""

    tasks: Sequence[TaskRuns]
    calls: Sequence[CallRecord]
    """The calls that the report shows, with the calls of a judge that is a role of the run."""
    invented: Sequence[str]
    """Roles whose names an answer invented."""
    task_names: TaskNames | None
    """Roles that are named after their task."""
    team: Mapping[str, float]
    """The outcome of the runs, by component."""

    @property
    def all(self) -> list[Run]:
        """The runs of all tasks, with the runs at once."""
        runs: list[Run] = []
        for runs_of_task in self.tasks:
            runs += runs_of_task.all
        return runs


@dataclass(frozen=True, kw_only=True)
class ForecastTraining:
    """The roles, policies and groups that training would have."""

    local: Mapping[str, Mapping[str, tuple[float, float]]]
    """By role, the components of its scorer with their lowest and highest value."""
    idle: Sequence[IdleCheck]
    rare: Sequence[str]
    """Roles that need not have called."""
    roles: Sequence[RoleCheck]
    policy_findings: Sequence[Finding]
    """Why the policies cannot be resolved; empty if they can."""
    groups: Sequence[GroupCheck]
    left_out: Mapping[str, int]


def _read_input(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    config: TrainConfig,
    *,
    count_tokens: bool,
    say: Callable[[str], None],
) -> Subject:
    """Read everything that the user passed, without running the application. With `count_tokens`, or with several base
    models, the chat templates of the base models are loaded. Raises ConfigError."""
    prompts = read_prompts(config.prompts_file) if config.prompts_file else None
    all_tasks = as_tasks(tasks)
    say("loading the application ...")
    flow = workflow_of(workflow).named_by(config.roles_by)
    plan, recipes, plan_text = resolve_plan(config, list(flow.scorers), flow.variable)
    check_curriculum(config.curriculum, all_tasks)
    check_refill(config, recipes.every)
    return Subject(
        flow=flow,
        tasks=all_tasks,
        config=config,
        prompts=prompts,
        plan=plan,
        plan_text=plan_text,
        recipes=recipes,
        able=recipes.trainable_roles(flow.scorers),
        bases=load_bases(config) if count_tokens or len(config.bases) > 1 else {},
    )


async def _run_tasks(subject: Subject, runner: Runner, other_store: Store, *, are_drawn: bool) -> CheckedRuns:
    """Run the first tasks. If answers are drawn (`are_drawn`), a judge that is a role of the run is asked for its
    calls, too, and one more task runs once, for the names of its roles.

    That run, and runs with other names in their answers, are recorded in the store `other_store`.
    """
    flow, store = subject.flow, runner.store
    tasks = [await runner.run(task) for task in subject.tasks[: runner.limits.limit]]
    calls: list[CallRecord] = []
    for runs_of_task in tasks:
        calls += runs_of_task.calls
    if are_drawn:
        calls += await calls_of_judge(flow, tasks, store, runner.responder(0))
    invented: list[str] = []
    for runs_of_task in tasks:
        for role in await invented_roles(runner, runs_of_task, other_store):
            if role not in invented:
                invented.append(role)
    task_names = None
    more_tasks = subject.tasks[runner.limits.limit :]
    if are_drawn and more_tasks and any(runs_of_task.shown.ended for runs_of_task in tasks):
        task_names = await names_of_tasks(runner, tasks, more_tasks[0], other_store)

    # The components of the outcomes of all runs. From the last run to the first, so that the first run's values stay.
    team: dict[str, float] = {}
    for runs_of_task in reversed(tasks):
        for run in reversed(runs_of_task.all):
            team.update(run.outcome.rewards)
    runs = CheckedRuns(tasks=tasks, calls=calls, invented=invented, task_names=task_names, team=team)
    # A dry run does not ask the judge for its judgements: every episode gets the reward 0 from it.
    if flow.episode_judge is not None:
        team["judge"] = 0.0
        store.write([RewardRecord(run.outcome.episode.id, "judge", 0.0) for run in runs.all])
        store.flush()
    return runs


def _forecast_training(subject: Subject, runs: CheckedRuns, store: Store, watch: Watch) -> ForecastTraining:
    """The roles, policies and groups that training would have if all episodes were like these runs."""
    flow = subject.flow
    config = subject.config
    calls = runs.calls
    # The parts of the application that made no call. The calls of `team/writer` are calls of the part `team`, too, so
    # the paths are compared with a slash at the end.
    idle = []
    for part in watch.known:
        has_called = any(f"{call.role}/".startswith(f"{part.role}/") for call in calls)
        if not has_called:
            idle.append(IdleCheck(**msgspec.structs.asdict(part), ran=watch.ran(part)))
    not_called_yet = [part.role for part in idle if not part.ran and part.role in named_roles(config, flow)]
    policies: Policies | None = None
    policy_findings: list[Finding] = []
    try:
        # Without any call, the roles are not known, and another finding says that the application made none.
        if calls:
            all_roles = sorted({*not_called_yet, *(call.role for call in calls)})
            policies = resolve_policies(config, all_roles, scored=subject.able, workflow=flow.variable)
    except ConfigError as error:
        policy_findings = [blocking_finding(error, "policies")]
    roles = list(roles_of(calls, policies, flow, subject.able))
    trained = [role.role for role in roles if role.trained]
    plans = config.plans_of(subject.plan, config.named_roles)
    groups, left_out = groups_of(store, runs.all, calls, trained, subject.plan, plans, subject.recipes)
    return ForecastTraining(
        local=rewards_by_role(store, calls),
        idle=idle,
        rare=[*config.roles, *not_called_yet],
        roles=roles,
        policy_findings=policy_findings,
        groups=groups,
        left_out=left_out,
    )


def _unlisted_roles(calls: Iterable[CallRecord], parts: Collection[Part]) -> tuple[str, ...]:
    """The roles of calls that no framework lists. A team's manager (`team/selector`) is listed with its members."""
    listed = {part.role for part in parts}
    teams = {part.of for part in parts if part.kind == "member"}
    unlisted: list[str] = []
    for role in sorted({call.role for call in calls}):
        if role not in listed and role.partition("/")[0] not in teams:
            unlisted.append(role)
    return tuple(unlisted)


def _find_all(
    subject: Subject, runs: CheckedRuns, training: ForecastTraining, store: Store, watch: Watch, answers: str | None
) -> tuple[Mapping[str, int], list[Finding]]:
    """Collect all findings of a dry run. Findings that may block come first, in the order in which training would meet
    them. Returns the number of tokens of each call's prompt, by the id of the call, and the findings."""
    flow = subject.flow
    config = subject.config
    plan = subject.plan
    calls = runs.calls
    roles = training.roles
    rare = training.rare

    # 1. The runs, the policies, the requests and the groups.
    shown_outcomes = [runs_of_task.shown.outcome for runs_of_task in runs.tasks]
    errors = common_findings.find_faults(flow, shown_outcomes, calls, training.local, plan, rare)
    findings = [*run_findings.fault_findings(errors, runs.tasks), *run_findings.pair_findings(runs.tasks, store)]
    findings += training.policy_findings
    run_base = subject.bases.get("")
    base_of_role: dict[str, CheckedBase | None] = {}
    for role in roles:
        if role.kind != "provider":
            base_of_role[role.role] = subject.bases.get(role.policy, run_base)
    calls_of_policies = [call for call in calls if call.role in base_of_role]
    tokens, unanswerable = run_findings.request_findings(base_of_role, calls_of_policies, store)
    findings += [*unanswerable, *base_findings(base_of_role)]
    findings += [Finding("warns", "tool_format", text) for text in shared_tool_format(config)]
    # Without groups nothing would be trained. This is no news if an error above is the reason, or with answers of the
    # application's own provider, which have no policy.
    has_reason = answers == PROVIDER or any(finding.level in ("blocks", "undecided") for finding in findings)
    if not training.groups and not has_reason:
        findings.append(Finding("blocks", "groups", "the plan would form no group: see what is left out."))

    # 2. Roles, prompts, parameters and rewards.
    if flow.episode_judge is not None:
        findings.append(Finding("note", "judge", "it was not asked: a dry run invents its outcomes."))
    findings += [
        *run_findings.role_findings(roles, flow.variable),
        *run_findings.idle_findings(training.idle),
        *common_findings.scorer_findings(flow, calls, rare),
    ]
    unlisted = [role for role in runs.invented if role not in config.roles]
    findings += invented_findings(unlisted, config, subject.able)
    findings += task_name_findings(runs.task_names, config, subject.able)
    if subject.prompts is not None:
        findings += use_findings(store, calls, subject.prompts)
    findings += prompt_findings(store)
    findings += common_findings.call_findings(calls, roles, plan, config)
    if any(run.ended for run in runs.all):
        findings += common_findings.learning_findings(roles, training.local, runs.team, subject.recipes, rare)
    findings += [*run_findings.run_findings(runs.tasks), *run_findings.connection_findings(runs.all, watch)]
    return tokens, findings


@contextlib.asynccontextmanager
async def answers_of_runs(
    answers: str | None, subject: Subject, call_tools: bool, say: Callable[[str], None]
) -> AsyncIterator[Callable[[int], CheckResponder]]:
    """Yield a function from the number of a run to its responder. `answers` is the value of `--answers`."""
    flow, config, recipes = subject.flow, subject.config, subject.recipes
    roles = config.named_roles
    temperature = config.sampling.temperature
    # How training draws, compares and rewards the candidates of a call: arguments of `PolicyResponder`.
    options: dict[str, Any] = {
        "plan": subject.plan,
        "plans": config.plans_of(subject.plan, roles),
        "attribution": recipes.run.attribution,
        "attribution_of_role": recipes.attributions(recipes.roles),
        "sampling_of_role": config.own_sampling(roles),
    }

    # 1. Answers of a model, or of the application's own provider.
    if answers is not None and not answers.startswith(RECORDS):
        model = None if answers == PROVIDER else answers
        max_tokens = config.sampling.max_tokens
        async with answering(
            flow, policies=None, model=model, say=say, temperature=temperature, max_tokens=max_tokens, **options
        ) as responder:
            yield lambda run: CheckResponder(model=responder)
        return

    # 2. Recorded or drawn answers: a function from the number of a run to its answers.
    answers_of_run: Callable[[int], Any] = partial(DrawnAnswers, call_tools=call_tools)
    if answers is not None:
        with open_store(answers.removeprefix(RECORDS), read_only=True) as store:
            answers_of_run = RecordedAnswers(store).of_run
    training = {**options, "scorers": flow.scorers, "override": {"temperature": temperature}}
    provider_roles: list[str] = []
    for policy in config.policy:
        if policy.kind == "provider":
            provider_roles += policy.roles
    yield lambda run: CheckResponder(answers=answers_of_run(run), training=training, provider_roles=provider_roles)


async def calls_of_judge(
    flow: Workflow, ran: Sequence[TaskRuns], store: Store, responder: CheckResponder
) -> list[CallRecord]:
    """Ask a judge that is a role of the run about an episode that ended, and return its calls; empty for any other
    judge."""
    episodes = [task.shown.outcome.episode for task in ran if task.shown.ended]
    if not episodes or flow.episode_judge is None or not judging_role(flow):
        return []
    bench = Bench(workflow=flow, store=store, responder=responder, offline=True)
    # A judge may compare episodes of a task, so it gets two. The same one twice will do: only its calls matter here.
    await bench.ask(flow.episode_judge, [finished(store, episodes[0])] * 2, episodes[0].task)
    return [call for episode in bench.episodes for call in store.calls(episode.id)]


def groups_of(
    store: Store,
    runs: Sequence[Run],
    calls: Sequence[CallRecord],
    trained: Sequence[str],
    plan: Plan,
    plans: Mapping[str, Plan],
    recipes: Recipes,
) -> tuple[list[GroupCheck], Mapping[str, int]]:
    """Return the groups that a step of training would have if every episode made these `calls`, and the number of
    candidates that would be left out, by reason. `trained` are the roles that are trained. `plans` has the plan of each
    role whose policy has a K of its own."""
    # 1. Collect the samples of these calls, as training does, and repeat each as often as training would draw it.
    call_ids = {call.id for call in calls}
    episode_ids = {call.episode for call in calls}
    collected = collect(
        store,
        [run.outcome.episode for run in runs if run.outcome.episode.id in episode_ids],
        plan="tree" if plan.kind == "tree" else "independent",  # a dry run forks nothing
        roles=trained,
        method_of=recipes.of_role,
    )
    samples: list[Sample] = []
    for sample in collected.samples:
        if sample.call in call_ids:
            reads_calls = bool(collected.calls[sample.call].parents)
            samples += repeat_sample(sample, plans.get(sample.role, plan), reads_calls)

    # 2. Let each recipe group the samples of its roles.
    groups = []
    left_out = Counter(collected.left_out)
    for recipe, roles_of_recipe in recipes.by_recipe(trained):
        samples_of_recipe = [sample for sample in samples if sample.role in roles_of_recipe]
        built = build_groups(samples_of_recipe, recipe, ", ".join(roles_of_recipe))
        left_out += Counter(built.left_out)
        for group in built.groups:
            roles = tuple(dict.fromkeys(sample.role for sample in group.samples))
            groups.append(GroupCheck(task=group.samples[0].task, roles=roles, size=len(group.samples)))
    return groups, +left_out  # the plus drops reasons with a count of 0


def repeat_sample(sample: Sample, plan: Plan, reads_calls: bool) -> Iterator[Sample]:
    """Yield the samples that training would have in place of this one of the dry run.

    Under plan independent these are `plan.k` episodes, whose prompts differ if they read other calls; under plan replay
    `plan.k` forks of the call. Under plan tree the dry run has drawn all candidates of the call already.
    """
    for number in range(1 if plan.kind == "tree" else plan.k):
        copy = msgspec.structs.replace(sample, id=f"{number}{sample.id}")
        if plan.kind == "replay":
            copy = msgspec.structs.replace(copy, branch=sample.call)
        elif plan.kind == "independent":
            prompt = f"{sample.prompt}-{number}" if reads_calls else sample.prompt
            copy = msgspec.structs.replace(copy, rollout=f"{sample.rollout}-{number}", prompt=prompt, branch=prompt)
        yield copy
