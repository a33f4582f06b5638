"""`cotune check`: runs an application without training's models, and reports what training would see."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from cotune.algorithms.collect import Collected, collect
from cotune.algorithms.groups import build_groups
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.samples import Sample
from cotune.episodes.episode import Outcome
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError
from cotune.integrations.versions import SUPPORTED, installed, refusal
from cotune.judging.episodes import finished
from cotune.prompts.file import read_prompts
from cotune.recording.recorder import LiveCall
from cotune.records.plans import Plan
from cotune.records.structs import CallRecord, RewardRecord
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout
from cotune.trainer.before.answers.drawn import DrawnAnswers
from cotune.trainer.before.answers.recorded import RecordedAnswers
from cotune.trainer.before.answers.responder import CheckResponder
from cotune.trainer.before.check.bases import NO_MODEL, base_findings, load_bases
from cotune.trainer.before.check.findings import (
    connection_findings,
    fault_findings,
    idle_findings,
    message_text,
    pair_findings,
    refill_findings,
    request_findings,
    role_findings,
    run_findings,
    unlisted_roles,
)
from cotune.trainer.before.check.prompts import prompt_findings, use_findings
from cotune.trainer.before.check.report import CallCheck, CheckReport, Framework, GroupCheck, IdleCheck
from cotune.trainer.before.check.runs import Runner, TaskRuns
from cotune.trainer.before.check.watch import watched
from cotune.trainer.before.findings import (
    Finding,
    RoleCheck,
    blocking,
    call_findings,
    faults,
    learning_findings,
    named_roles,
    rewards_by_role,
    roles_of,
    scorer_findings,
)
from cotune.trainer.config.train import TrainConfig, convert
from cotune.trainer.evaluation.policies import answering
from cotune.trainer.rollout.judging import Bench, judging_role
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
    limit: int = 1,
    answers: str | None = None,
    call_tools: bool = True,
    calls: int = 64,
    timeout: float = 60.0,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> CheckReport:
    """Run the first `limit` tasks three to eight times each, and report what training would see.

    `workflow`, `tasks`, `config` and `settings` are those of `train`; `model` is the model to be trained, whose
    tokenizer counts the prompts' tokens. Answers are drawn and no provider is contacted, unless `answers` names who
    answers: a small model (folder or Hugging Face id), "provider" for the application's own, or "records:ADDRESS" for
    recorded answers. Without `call_tools` drawn answers call no tool. `calls` and `timeout` (seconds) bound a run,
    `say` is called before each. Raises ConfigError for bad input.

    ```python
    report = cotune.check(solve, "tasks.jsonl", plan={"k": 8})
    print(report.verdict, [finding.text for finding in report.findings])
    ```
    """
    started = time.perf_counter()
    for name, value in (("limit", limit), ("calls", calls), ("timeout", timeout)):
        if value <= 0:
            raise ConfigError(name, value, "must be a number above 0")
    table = msgspec.to_builtins(config) if isinstance(config, TrainConfig) else dict(config or {})
    config = convert({"model": NO_MODEL, **table, **({"model": model} if model else {}), **settings})
    prompts = read_prompts(config.prompts) if config.prompts else None
    with tempfile.TemporaryDirectory() as folder, open_store(RunLayout(folder).records) as store, watched() as watch:
        # 1. Everything that can be wrong before the application runs.
        say("loading the application ...")
        flow = workflow_of(workflow).named_by(config.roles_by)
        all_tasks = as_tasks(tasks)
        checked_tasks = all_tasks[:limit]
        plan, recipes, why = config.resolve_plan(list(flow.scorers))
        check_curriculum(config.curriculum, plan, all_tasks)
        check_refill(config, plan, recipes.every, flow)
        able = recipes.able(flow.scorers)
        loaded = time.perf_counter()
        bases = load_bases(config) if model is not None or len(config.bases) > 1 else {}
        begun = time.perf_counter()

        # 2. The runs.
        source = Answers(answers, flow, config, plan, recipes, call_tools, calls)

        async def run_tasks() -> tuple[Runner, list[TaskRuns], list[CallRecord]]:
            async with source.open(say) as responder:
                at_once, offline = config.concurrency > 1, answers != PROVIDER
                runner = Runner(flow, store, responder, timeout, watch, at_once, offline, say)
                task_runs = await runner.run(checked_tasks)
                judging = await calls_of_judge(flow, task_runs, store, responder(0)) if answers is None else []
                return runner, task_runs, judging

        runner, ran, judging = run_sync(run_tasks())
        ended = time.perf_counter()

        # 3. Roles, policies and groups, as training would see them.
        outcomes = [run.outcome for task in ran for run in task.all]
        seen = [call for task in ran for call in task.calls] + judging
        if flow.episode_judge is not None:
            outcomes = [replace(one, rewards={**one.rewards, "judge": 0.0}) for one in outcomes]  # it is not asked
            store.write([RewardRecord(outcome.episode.id, "judge", 0.0) for outcome in outcomes])
            store.flush()
        local = rewards_by_role(store, seen)
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.rewards)
        team = {name: fmean(one.rewards[name] for one in outcomes if name in one.rewards) for name in names}
        parts = runner.parts
        called = {f"{call.role}/" for call in seen}
        idle = []
        for part in parts.known:
            if not any(role.startswith(f"{part.role}/") for role in called):
                idle.append(IdleCheck(**msgspec.structs.asdict(part), ran=parts.ran(part)))
        unseen = [one.role for one in idle if not one.ran and one.role in named_roles(config, flow)]
        rare = [*config.roles, *unseen]
        policies, findings = None, []
        try:
            if seen:
                policies = config.resolve_policies(sorted({*unseen, *(call.role for call in seen)}), scored=able)
        except ConfigError as error:
            findings = [blocking(error, "policies")]
        roles = list(roles_of(seen, policies, flow, able))
        groups, left_out = groups_of(store, outcomes, seen, roles, plan, recipes)

        # 4. Findings: first those that block, in the order in which training would meet them.
        errors = faults(flow, [task.shown.outcome for task in ran], seen, local, plan, rare)
        findings = [*fault_findings(errors, ran, watch), *pair_findings(ran, store), *findings]
        provided = {role.role for role in roles if role.kind == "provider"}
        templates = {role.role: bases.get(role.policy, bases.get("")) for role in roles if role.role not in provided}
        counts, unanswered = request_findings(templates, [call for call in seen if call.role in templates], store)
        findings += [*unanswered, *base_findings(templates)]
        findings += [Finding("warns", "tool_format", text) for text in config.one_format]
        if answers == PROVIDER:
            findings.append(Finding("note", "groups", "answers of a provider form no groups; training draws its own."))
        elif not groups and not any(finding.level in ("blocks", "undecided") for finding in findings):
            text = "the plan would form no group: nothing would be trained."
            findings.append(Finding("blocks", "groups", text, "See the candidates left out above."))
        if flow.episode_judge is not None:
            findings.append(Finding("note", "judge", "it was not asked: a dry run makes its outcomes up."))
        findings += [*role_findings(roles, flow.name), *idle_findings(idle), *scorer_findings(flow, seen, rare)]
        if prompts is not None:
            findings += use_findings(store, seen, prompts)
        named = workflow if isinstance(workflow, str) else "app:solve"
        findings += prompt_findings(store, named, str(tasks) if isinstance(tasks, str | Path) else "tasks.jsonl")
        findings += call_findings(seen, roles, plan, config)
        findings += refill_findings(config, plan, len(all_tasks), sum(len(task.calls) for task in ran) / len(ran))
        if any(outcome.error is None for outcome in outcomes):
            findings += learning_findings(roles, local, team, recipes, rare)
        findings += [*run_findings(ran, watch), *connection_findings(outcomes, watch)]
        return CheckReport(
            workflow=workflow if isinstance(workflow, str) else flow.name,
            tasks=tuple(task.id for task in checked_tasks),
            answers=answers or "drawn",
            seconds=time.perf_counter() - started,
            spent={"loading": loaded - started, "reading": begun - loaded, "running": ended - begun},
            plan=why,
            frameworks=tuple(frameworks()),
            runs=len(outcomes),
            roles=tuple(roles),
            idle=tuple(idle),
            agents_known=not unlisted_roles(seen, parts.known),
            calls=tuple(checked_calls(seen, outcomes, counts, store)),
            groups=tuple(groups),
            team=team,
            local={role: named for role, named in local.items() if named},
            left_out=left_out,
            findings=tuple(findings),
        )


class Provider:
    """Leaves every call to the application's own provider."""

    async def respond(self, call: LiveCall) -> None:
        return None


@dataclass
class Answers:
    """Who answers the runs: `source` is what the user passed for `--answers`."""

    source: str | None
    flow: Workflow
    config: TrainConfig
    plan: Plan
    recipes: Recipes
    call_tools: bool
    calls: int

    @contextlib.asynccontextmanager
    async def open(self, say: Callable[[str], None]) -> AsyncIterator[Callable[[int], CheckResponder]]:
        """The responder of each run, by its number."""
        options: dict[str, Any] = {
            "plan": self.plan,
            "attribution": self.recipes.run.attribution,
            "own": self.recipes.attributions(self.recipes.roles),
        }
        drawn: dict[str, Any] = {
            **options,
            "scorers": self.flow.scorers,
            "provider_roles": [
                role for policy in self.config.policy if policy.kind == "provider" for role in policy.roles
            ],
            "sampling": {"temperature": self.config.sampling.temperature},
        }
        if self.source is None:
            yield lambda run: CheckResponder(answers=DrawnAnswers(run, self.call_tools), limit=self.calls, **drawn)
        elif self.source == PROVIDER:
            yield lambda run: CheckResponder(answers=DrawnAnswers(run), real=Provider(), limit=self.calls)
        elif self.source.startswith(RECORDS):
            with open_store(self.source.removeprefix(RECORDS), read_only=True) as store:
                recorded = RecordedAnswers(store)
            yield lambda run: CheckResponder(answers=recorded.of_run(run), limit=self.calls, **drawn)
        else:
            sampling = self.config.sampling
            model = answering(
                self.flow,
                policies=None,
                model=self.source,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                say=say,
                **options,
            )
            async with model as real:
                yield lambda run: CheckResponder(answers=DrawnAnswers(run), real=real, limit=self.calls)


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
    outcomes: Sequence[Outcome],
    seen: Sequence[CallRecord],
    roles: Sequence[RoleCheck],
    plan: Plan,
    recipes: Recipes,
) -> tuple[list[GroupCheck], Mapping[str, int]]:
    """The groups of a step in which every episode runs like the one shown, and what is left out, by reason."""
    trained = [role.role for role in roles if role.trained]
    shown = {call.episode for call in seen}
    collected = collect(
        store,
        [outcome.episode for outcome in outcomes if outcome.episode.id in shown],
        plan="tree" if plan.kind == "tree" else "independent",  # nothing is forked here
        roles=trained,
        rewarded=lambda role: recipes.of_role(role).takes_rewards,
    )
    ids = {call.id for call in seen}
    collected = msgspec.structs.replace(collected, samples=[one for one in collected.samples if one.call in ids])
    samples = list(repeated(collected, plan))
    groups = []
    left_out = Counter(collected.left_out)
    for recipe, among in recipes.by_recipe(trained):
        built = build_groups([sample for sample in samples if sample.role in among], recipe, ", ".join(among))
        left_out += Counter(built.left_out)
        for group in built.groups:
            groups.append(
                GroupCheck(
                    task=group.samples[0].task,
                    roles=tuple(dict.fromkeys(sample.role for sample in group.samples)),
                    turns=tuple(sorted({sample.turn for sample in group.samples})),
                    size=len(group.samples),
                )
            )
    return groups, +left_out


def repeated(collected: Collected, plan: Plan) -> Iterable[Sample]:
    """The samples of `plan.k` equal episodes under independent rollouts, where prompts that read other calls differ; of
    forks at every call under a replay plan."""
    if plan.kind == "tree":
        yield from collected.samples
        return
    for number in range(plan.k):
        for sample in collected.samples:
            if plan.kind == "replay":
                yield msgspec.structs.replace(sample, id=f"{number}{sample.id}", branch=sample.call)
                continue
            own = f"{sample.prompt}-{number}" if collected.calls[sample.call].parents else sample.prompt
            rollout = f"{sample.rollout}-{number}"
            yield msgspec.structs.replace(sample, id=f"{number}{sample.id}", rollout=rollout, prompt=own, branch=own)


def checked_calls(
    calls: Sequence[CallRecord], outcomes: Sequence[Outcome], tokens: Mapping[str, int], store: Store
) -> Iterable[CallCheck]:
    tasks = {outcome.episode.id: outcome.episode.task.id for outcome in outcomes}
    steps = {call.id: call.step for call in calls}
    for call in calls:
        tools = store.message(call.tools) if call.tools else ()
        yield CallCheck(
            task=tasks.get(call.episode, outcomes[0].episode.task.id),
            step=call.step,
            role=call.role,
            turn=call.turn,
            parents=tuple(sorted(steps[parent] for parent in call.parents if parent in steps)),
            characters=sum(len(message_text(store.message(name))) for name in call.messages),
            tokens=tokens.get(call.id),
            model=call.model,
            temperature=call.params.get("temperature"),
            n=int(call.params.get("n") or 1),
            stream=call.streamed,
            tools=tuple(str((tool.get("function") or tool).get("name") or tool.get("type")) for tool in tools),
            structured=isinstance(call.params.get("response_format"), Mapping),
            status=call.status,
            error=call.error,
            integration=call.integration,
        )


def frameworks() -> Iterator[Framework]:
    """Frameworks that the application has loaded, and whether their versions can be recorded."""
    for name, (oldest, beyond) in SUPPORTED.items():
        if name.replace("-", "_") in sys.modules:
            version, ok = installed([name]).get(name, ""), refusal(name) is None
            yield Framework(name=name, version=version, supported=f">={oldest},<{beyond}", ok=ok)
