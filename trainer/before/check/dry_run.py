"""`cotune check`: runs an application without the models of training, and reports the roles, calls and groups that
training would have."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
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
from cotune.prompts.file import read_prompts
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord, RewardRecord
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.trainer.before import findings as shared
from cotune.trainer.before.answers.drawn import DrawnAnswers
from cotune.trainer.before.answers.recorded import RecordedAnswers
from cotune.trainer.before.answers.responder import CheckResponder
from cotune.trainer.before.check import findings as own
from cotune.trainer.before.check.bases import NO_MODEL, base_findings, load_bases
from cotune.trainer.before.check.invented import invented_findings, invented_roles
from cotune.trainer.before.check.prompts import prompt_findings, use_findings
from cotune.trainer.before.check.report import CheckLimits, CheckReport, GroupCheck, IdleCheck
from cotune.trainer.before.check.runs import Run, Runner, TaskRuns
from cotune.trainer.before.check.watch import watched
from cotune.trainer.before.findings import Finding, blocking_finding, named_roles, rewards_by_role, roles_of
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
    call runs once, and one whose runs reach the time limit runs twice.

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
    config = convert({"model": NO_MODEL, **table, **({"model": model} if model else {}), **settings})
    prompts = read_prompts(config.prompts_file) if config.prompts_file else None
    with tempfile.TemporaryDirectory() as folder, open_store(f"{folder}/records.db") as store, watched() as watch:
        # 1. Check all input before the application runs.
        all_tasks = as_tasks(tasks)
        say("loading the application ...")
        flow = workflow_of(workflow).named_by(config.roles_by)
        plan, recipes, why = resolve_plan(config, list(flow.scorers), flow.name)
        check_curriculum(config.curriculum, all_tasks)
        check_refill(config, recipes.every)
        able = recipes.able(flow.scorers)
        bases = load_bases(config) if model is not None or len(config.bases) > 1 else {}

        # 2. The runs, and the calls of a judge that is a role of the run.
        async def run_tasks() -> tuple[list[TaskRuns], list[CallRecord], list[str]]:
            async with answers_of_runs(answers, flow, config, plan, recipes, call_tools, say) as responder:
                at_once, offline = config.concurrency > 1, answers != PROVIDER
                runner = Runner(flow, store, responder, watch, say, limits, at_once, offline)
                ran = [await runner.run(task) for task in all_tasks[: limits.limit]]
                judging = await calls_of_judge(flow, ran, store, responder(0)) if answers is None else []
                invented: dict[str, None] = {}  # a dictionary, so that each role occurs once and in order
                with open_store(f"{folder}/renamed.db") as renamed:
                    for task_runs in ran:
                        invented.update(dict.fromkeys(await invented_roles(runner, task_runs, renamed)))
                return ran, [*(call for task in ran for call in task.calls), *judging], list(invented)

        ran, calls, invented = run_sync(run_tasks())
        runs = [run for task in ran for run in task.all]
        team: dict[str, float] = {}
        for run in reversed(runs):  # the values of the first run are shown
            team.update(run.outcome.rewards)
        if flow.episode_judge is not None:
            team["judge"] = 0.0
            store.write([RewardRecord(run.outcome.episode.id, "judge", 0.0) for run in runs])
            store.flush()

        # 3. The roles, policies and groups that training would have.
        local = rewards_by_role(store, calls)
        idle = []
        for part in watch.known:
            if not any(f"{call.role}/".startswith(f"{part.role}/") for call in calls):
                idle.append(IdleCheck(**msgspec.structs.asdict(part), ran=watch.ran(part)))
        not_called_yet = [part.role for part in idle if not part.ran and part.role in named_roles(config, flow)]
        rare = [*config.roles, *not_called_yet]
        policies, misfits = None, []
        try:
            if calls:
                all_roles = sorted({*not_called_yet, *(call.role for call in calls)})
                policies = resolve_policies(config, all_roles, scored=able, workflow=flow.name)
        except ConfigError as error:
            misfits = [blocking_finding(error, "policies")]
        roles = list(roles_of(calls, policies, flow, able))
        trained = [role.role for role in roles if role.trained]
        plans = config.plans_of(plan, config.named_roles)
        groups, left_out = groups_of(store, runs, calls, trained, plan, plans, recipes)

        # 4. Findings: first the blocking ones, in the order of training.
        errors = shared.find_faults(flow, [task.shown.outcome for task in ran], calls, local, plan, rare)
        findings = [*own.fault_findings(errors, ran), *own.pair_findings(ran, store), *misfits]
        templates = {role.role: bases.get(role.policy, bases.get("")) for role in roles if role.kind != "provider"}
        calls_of_policies = [call for call in calls if call.role in templates]
        tokens, unanswerable = own.request_findings(templates, calls_of_policies, store)
        findings += [*unanswerable, *base_findings(templates)]
        findings += [Finding("warns", "tool_format", text) for text in shared_tool_format(config)]
        decided = answers == PROVIDER or any(finding.level in ("blocks", "undecided") for finding in findings)
        if not groups and not decided:
            findings.append(Finding("blocks", "groups", "the plan would form no group: see what is left out."))
        if flow.episode_judge is not None:
            findings.append(Finding("note", "judge", "it was not asked: a dry run invents its outcomes."))
        findings += [*own.role_findings(roles, idle, flow.name), *shared.scorer_findings(flow, calls, rare)]
        findings += invented_findings([role for role in invented if role not in config.roles], config, able)
        if prompts is not None:
            findings += use_findings(store, calls, prompts)
        findings += prompt_findings(store)
        findings += shared.call_findings(calls, roles, plan, config)
        if any(run.ended for run in runs):
            findings += shared.learning_findings(roles, local, team, recipes, rare)
        findings += [*own.run_findings(ran), *own.connection_findings(runs, watch)]
        return CheckReport(
            workflow=workflow if isinstance(workflow, str) else flow.name,
            tasks=tuple(task.task.id for task in ran),
            answers=answers or "drawn",
            plan=why,
            runs=len(runs),
            roles=tuple(roles),
            idle=tuple(idle),
            agents_known={call.role for call in calls} <= {part.role for part in watch.known},
            calls=tuple(msgspec.structs.replace(call, candidates=()) for call in calls),
            tokens=tokens,
            groups=tuple(groups),
            team=team,
            local={role: components for role, components in local.items() if components},
            left_out=left_out,
            findings=tuple(findings),
        )


@contextlib.asynccontextmanager
async def answers_of_runs(
    answers: str | None,
    flow: Workflow,
    config: TrainConfig,
    plan: Plan,
    recipes: Recipes,
    call_tools: bool,
    say: Callable[[str], None],
) -> AsyncIterator[Callable[[int], CheckResponder]]:
    """Yield the function that returns the responder of each run, by its number. `answers` is the value of
    `--answers`."""
    attribution = recipes.attributions(recipes.roles)
    roles = config.named_roles
    options: dict[str, Any] = {
        "plan": plan,
        "plans": config.plans_of(plan, roles),
        "attribution": recipes.run.attribution,
        "own": attribution,
        "own_sampling": config.own_sampling(roles),
    }
    sampling: dict[str, Any] = {"temperature": config.sampling.temperature}
    if answers is not None and not answers.startswith(RECORDS):
        model = None if answers == PROVIDER else answers
        sampling["max_tokens"] = config.sampling.max_tokens
        async with answering(flow, policies=None, model=model, say=say, **sampling, **options) as responder:
            yield lambda run: CheckResponder(model=responder)
        return

    source: Callable[[int], Any] = partial(DrawnAnswers, call_tools=call_tools)
    if answers is not None:
        with open_store(answers.removeprefix(RECORDS), read_only=True) as store:
            source = RecordedAnswers(store).of_run
    training = {**options, "scorers": flow.scorers, "override": sampling}
    provided = [role for policy in config.policy if policy.kind == "provider" for role in policy.roles]
    yield lambda run: CheckResponder(answers=source(run), training=training, provider_roles=provided)


async def calls_of_judge(
    flow: Workflow, ran: Sequence[TaskRuns], store: Store, responder: CheckResponder
) -> list[CallRecord]:
    """The calls of a judge that is a role of the run."""
    episodes = [task.shown.outcome.episode for task in ran if task.shown.ended]
    if not episodes or flow.episode_judge is None or not judging_role(flow):
        return []
    bench = Bench(workflow=flow, store=store, responder=responder, offline=True)
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
    """Return the groups of a step if every episode runs like the one that is shown, and the number of candidates that
    are left out, by reason. `plans` has the plan of each role whose policy has a K of its own."""
    ids, shown = {call.id for call in calls}, {call.episode for call in calls}
    collected = collect(
        store,
        [run.outcome.episode for run in runs if run.outcome.episode.id in shown],
        plan="tree" if plan.kind == "tree" else "independent",  # nothing is forked here
        roles=trained,
        method_of=recipes.of_role,
    )
    samples: list[Sample] = []
    for sample in collected.samples:
        if sample.call in ids:
            samples += repeated(sample, plans.get(sample.role, plan), bool(collected.calls[sample.call].parents))
    groups = []
    left_out = Counter(collected.left_out)
    for recipe, among in recipes.by_recipe(trained):
        built = build_groups([sample for sample in samples if sample.role in among], recipe, ", ".join(among))
        left_out += Counter(built.left_out)
        for group in built.groups:
            roles = tuple(dict.fromkeys(sample.role for sample in group.samples))
            groups.append(GroupCheck(task=group.samples[0].task, roles=roles, size=len(group.samples)))
    return groups, +left_out


def repeated(sample: Sample, plan: Plan, reads_calls: bool) -> Iterator[Sample]:
    """A sample in `plan.k` equal episodes, or forks of its call under a replay plan; the candidates of a tree have been
    drawn. Prompts that read other calls differ between episodes."""
    for number in range(1 if plan.kind == "tree" else plan.k):
        copy = msgspec.structs.replace(sample, id=f"{number}{sample.id}")
        if plan.kind == "replay":
            copy = msgspec.structs.replace(copy, branch=sample.call)
        elif plan.kind == "independent":
            prompt = f"{sample.prompt}-{number}" if reads_calls else sample.prompt
            copy = msgspec.structs.replace(copy, rollout=f"{sample.rollout}-{number}", prompt=prompt, branch=prompt)
        yield copy
