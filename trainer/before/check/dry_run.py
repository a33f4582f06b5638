"""`cotune check`: a dry run on a task with made-up answers, which reports what training would see. Loads no model."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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
from cotune.records.plans import Plan, PlanKind
from cotune.records.structs import CallRecord, RewardRecord
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout
from cotune.trainer.before.check.bases import NO_MODEL, base_findings, load_bases
from cotune.trainer.before.check.findings import (
    connection_findings,
    fault_findings,
    idle_findings,
    refill_findings,
    request_findings,
    role_findings,
    run_findings,
    twice_findings,
)
from cotune.trainer.before.check.prompts import prompt_findings, use_findings
from cotune.trainer.before.check.report import CallCheck, CheckReport, Framework, GroupCheck, IdleCheck
from cotune.trainer.before.check.runs import Runner, refused
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
)
from cotune.trainer.before.stub.fitting import Manner
from cotune.trainer.before.stub.stub import StubResponder
from cotune.trainer.before.stub.words import message_text
from cotune.trainer.config.train import TrainConfig, convert
from cotune.trainer.rollout.judging import Bench, judging_role
from cotune.trainer.schedules.curriculum import check_curriculum
from cotune.trainer.schedules.refill import check_refill


def check(
    workflow: WorkflowSource,
    tasks: str | Path | Iterable[Any],
    config: TrainConfig | Mapping[str, Any] | None = None,
    *,
    model: str | None = None,
    limit: int = 1,
    answers: Sequence[str] = (),
    call_tools: bool = True,
    calls: int = 64,
    timeout: float = 60.0,
    say: Callable[[str], None] = lambda text: None,
    **settings: Any,
) -> CheckReport:
    """Run the first `limit` tasks with made-up answers, and report what training would see.

    `workflow`, `tasks`, `config` and `settings` are those of `train`. No model is loaded and no provider contacted;
    with `model`, or where policies have bases of their own, their tokenizers count the prompts' tokens. A task runs
    again with other answers where one may have failed it or could have led elsewhere, and twice at once. `answers` are
    texts for the made-up answers, without `call_tools` no tool is called, `calls` and `timeout` (seconds) bound an
    episode, `say` is called before each run.
    Raises ConfigError for bad input.

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
    with tempfile.TemporaryDirectory() as folder, open_store(RunLayout(folder).records) as store:
        with watched() as watch:
            say("loading the application ...")
            flow = workflow_of(workflow).named_by(config.roles_by)
            every = as_tasks(tasks)
            listed = every[:limit]
            plan, recipes, why = config.resolve_plan(list(flow.scorers))
            check_curriculum(config.curriculum, plan, every)
            for recipe in recipes.every:
                check_refill(config, plan, recipe, flow)
            able = recipes.able(flow.scorers)
            loaded = time.perf_counter()
            bases = load_bases(config) if model is not None or len(config.bases) > 1 else {}
            begun = time.perf_counter()

            def stub(variant: int, manner: Manner) -> StubResponder:
                return StubResponder(
                    plan=plan,
                    scorers=flow.scorers,
                    attribution=recipes.run.attribution,
                    own=recipes.attributions(recipes.roles),
                    provider_roles=[role for one in config.policy if one.kind == "provider" for role in one.roles],
                    answers=answers,
                    manner=manner,
                    limit=calls,
                    sampling={"temperature": config.sampling.temperature},
                    variant=variant,
                )

            at_once = config.concurrency > 1
            runner = Runner(flow, store, stub, timeout, watch, Manner(call_tools=call_tools), at_once, say)
            ran = run_sync(runner.run(listed))
            ended = time.perf_counter()
        outcomes = [run.outcome for one in ran for run in one.all]
        seen = [call for one in ran for call in one.calls]
        if flow.episode_judge is not None:
            outcomes = [replace(one, rewards={**one.rewards, "judge": 0.0}) for one in outcomes]  # it is not asked
            store.write([RewardRecord(outcome.episode.id, "judge", 0.0) for outcome in outcomes])
            store.flush()
            seen = [*seen, *run_sync(_asked_of_judge(flow, outcomes, store, stub(0, Manner())))]
        local = rewards_by_role(store, seen)
        names = dict.fromkeys(name for outcome in outcomes for name in outcome.rewards)
        team = {name: fmean(one.rewards[name] for one in outcomes if name in one.rewards) for name in names}
        parts = runner.parts
        called = {f"{call.role}/" for call in seen}
        idle = [
            IdleCheck(**msgspec.structs.asdict(part), ran=parts.ran(part))
            for part in parts.known
            if not any(role.startswith(f"{part.role}/") for role in called)
        ]
        unseen = [one.role for one in idle if not one.ran and one.role in named_roles(config, flow)]
        rare = [*config.roles, *unseen]
        policies, findings = None, []
        try:
            if seen:
                known = sorted({*unseen, *(call.role for call in seen)})
                policies = config.resolve_policies(known, scored=able)
        except ConfigError as error:
            findings = [blocking(error, "policies")]
        roles = list(roles_of(seen, policies, flow, able))
        groups, left_out = _groups(store, outcomes, seen, roles, plan, recipes)

        # what blocks comes first, in the order in which it would be met
        command = f"cotune train {workflow} --tasks {tasks} --model MODEL" if isinstance(workflow, str) else ""
        wrong = faults(flow, [one.shown.outcome for one in ran], seen, local, rare)
        findings = [*fault_findings(wrong, ran, watch, command), *twice_findings(ran, store), *findings]
        provided = {role.role for role in roles if role.kind == "provider"}
        templates = {role.role: bases.get(role.policy, bases.get("")) for role in roles if role.role not in provided}
        counts, unanswered = request_findings(templates, [call for call in seen if call.role in templates], store)
        findings += [*unanswered, *base_findings(templates)]
        findings += [Finding("warns", "tool_format", text) for text in config.one_format]
        if not groups and not any(finding.level in ("blocks", "undecided") for finding in findings):
            text = "the plan would form no group: nothing would be trained."
            findings.append(Finding("blocks", "groups", text, "See the candidates left out above."))
        if flow.episode_judge is not None:
            findings.append(Finding("note", "judge", "it was not asked: a dry run makes its outcomes up."))
        findings += [*role_findings(roles), *idle_findings(idle, seen, parts.known)]
        named = workflow if isinstance(workflow, str) else "app:solve"
        if prompts is not None:
            findings += use_findings(store, seen, prompts)
        findings += prompt_findings(store, named, str(tasks) if isinstance(tasks, str | Path) else "tasks.jsonl")
        findings += call_findings(seen, roles, plan, config)
        findings += refill_findings(config, plan, len(every), sum(len(one.calls) for one in ran) / len(ran))
        if any(outcome.error is None for outcome in outcomes):
            findings += learning_findings(roles, local, team, recipes, rare)
        findings += [*run_findings(ran, watch), *connection_findings(outcomes, watch)]
        done = time.perf_counter()
        return CheckReport(
            workflow=workflow if isinstance(workflow, str) else flow.name,
            tasks=tuple(task.id for task in listed),
            seconds=done - started,
            spent={"loading": loaded - started, "reading": begun - loaded, "running": ended - begun},
            plan=why,
            frameworks=tuple(_frameworks()),
            runs=len(outcomes),
            roles=tuple(roles),
            idle=tuple(idle),
            calls=tuple(_calls(seen, outcomes, counts, store)),
            groups=tuple(groups),
            team=team,
            local={role: named for role, named in local.items() if named},
            left_out=left_out,
            findings=tuple(findings),
        )


async def _asked_of_judge(
    flow: Workflow, outcomes: Sequence[Outcome], store: Store, responder: StubResponder
) -> list[CallRecord]:
    """The calls of a judge that is a role of the run."""
    ended = next((outcome.episode for outcome in outcomes if outcome.error is None), None)
    if ended is None or not judging_role(flow):
        return []
    bench = Bench(workflow=flow, store=store, responder=responder, offline=True)
    assert flow.episode_judge is not None
    await bench.ask(flow.episode_judge, [finished(store, ended)] * 2, ended.task)
    return [call for episode in bench.episodes for call in store.calls(episode.id)]


def _groups(
    store: Store,
    outcomes: Sequence[Outcome],
    seen: Sequence[CallRecord],
    roles: Sequence[RoleCheck],
    plan: Plan,
    recipes: Recipes,
) -> tuple[list[GroupCheck], Mapping[str, int]]:
    """The groups of a step in which every episode runs like the one that was seen."""
    trained = [role.role for role in roles if role.trained]
    shown = {call.episode for call in seen}
    episodes = [outcome.episode for outcome in outcomes if outcome.episode.id in shown]
    plan_kind: PlanKind = "tree" if plan.kind == "tree" else "independent"  # nothing is forked here
    collected = collect(
        store,
        episodes,
        plan=plan_kind,
        roles=trained,
        rewarded=lambda role: recipes.of_role(role).takes_rewards,
    )
    kept = {call.id for call in seen}
    collected = msgspec.structs.replace(collected, samples=[one for one in collected.samples if one.call in kept])
    samples = list(_repeated(collected, plan))
    built = [
        build_groups([sample for sample in samples if sample.role in among], recipe, ", ".join(among))
        for recipe, among in recipes.by_recipe(trained)
    ]
    found = [
        GroupCheck(
            task=group.samples[0].task,
            roles=tuple(dict.fromkeys(sample.role for sample in group.samples)),
            turns=tuple(sorted({sample.turn for sample in group.samples})),
            size=len(group.samples),
        )
        for one in built
        for group in one.groups
    ]
    left_out = sum((Counter(one.left_out) for one in built), Counter(collected.left_out))
    own = sum(refused(call) for episode in episodes for call in store.calls(episode.id))
    return found, +(left_out - Counter(failed_call=own))


def _repeated(collected: Collected, plan: Plan) -> Iterable[Sample]:
    """Under independent rollouts the samples of all episodes of a task; prompts that read other calls differ. Under a
    replay plan those of all forks, as if every call were forked."""
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


def _calls(
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


def _frameworks() -> Iterator[Framework]:
    """Frameworks that the application has loaded, and whether their versions can be recorded."""
    for name, (oldest, beyond) in SUPPORTED.items():
        if name.replace("-", "_") in sys.modules:
            found, ok = installed([name]).get(name, ""), refusal(name) is None
            yield Framework(name=name, version=found, supported=f">={oldest},<{beyond}", ok=ok)
