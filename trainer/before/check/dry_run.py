"""`cotune check`: a dry run on a task with made-up answers, which says what training would see. Loads no model."""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import msgspec

from cotune.algorithms.collect import Collected, collect
from cotune.algorithms.groups import build_groups
from cotune.algorithms.recipes import Recipe
from cotune.algorithms.samples import Sample
from cotune.episodes.episode import Outcome
from cotune.episodes.run_sync import run_sync
from cotune.episodes.workflows import Workflow, WorkflowSource, workflow_of
from cotune.errors import ConfigError
from cotune.integrations.versions import SUPPORTED, UnsupportedVersion, require
from cotune.judging.episodes import finished
from cotune.records.plans import Plan, PlanKind
from cotune.records.policies import Policies
from cotune.records.structs import CallRecord, RewardRecord
from cotune.records.tasks import as_tasks
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout
from cotune.trainer.before.check.findings import (
    blocking,
    call_findings,
    idle_findings,
    learning_findings,
    role_findings,
)
from cotune.trainer.before.check.report import (
    CallCheck,
    CheckReport,
    Finding,
    Framework,
    GroupCheck,
    IdleCheck,
    RoleCheck,
)
from cotune.trainer.before.check.requests import chat_of, forms, tokens
from cotune.trainer.before.check.run_findings import connection_findings, fault_findings, run_findings, twice_findings
from cotune.trainer.before.check.runs import Runner, refused
from cotune.trainer.before.check.watch import watched
from cotune.trainer.before.preflight import faults, rewards_by_role, unseen_roles
from cotune.trainer.before.stub.fitting import Manner
from cotune.trainer.before.stub.stub import StubResponder
from cotune.trainer.config.train import TrainConfig, convert
from cotune.trainer.rollout.judging import Bench, judging_role

_AUTOGEN, _GRAPHS = frozenset({"autogen"}), frozenset({"langgraph"})
_USED_BY: Mapping[str, frozenset[str]] = {
    "langchain-core": _GRAPHS,
    "langgraph": _GRAPHS,
    "autogen-agentchat": _AUTOGEN,
    "autogen-core": _AUTOGEN,
    "openai-agents": frozenset({"openai-agents"}),
    "crewai": frozenset({"crewai"}),
    "vllm": frozenset(),
    "ray": frozenset(),
}
"""By distribution: the integrations whose calls come through it; any other may be used unseen."""


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
    with `model`, its tokenizer counts the prompts' tokens. A task runs again with other answers where one may have
    failed it or could have led elsewhere, and twice at once. `answers` are texts for the made-up answers, without
    `call_tools` no tool is called, `calls` and `timeout` (seconds) bound an episode, `say` is called before each run.
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
    config = convert({"model": model or "none", **table, **settings})
    with tempfile.TemporaryDirectory() as folder, open_store(RunLayout(folder).records) as store:
        with watched() as watch:
            say("loading the application ...")
            flow = workflow_of(workflow).named_by(config.roles_by)
            listed = as_tasks(tasks)[:limit]
            plan, recipe, why = config.resolve_plan(list(flow.scorers))
            chat = chat_of(model, config)
            loaded = time.perf_counter()

            def stub(variant: int, manner: Manner) -> StubResponder:
                return StubResponder(
                    plan=plan,
                    scorers=flow.scorers,
                    attribution=recipe.attribution,
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
            outcomes = _judged(outcomes, store)
            seen = [*seen, *run_sync(_asked_of_judge(flow, outcomes, store, stub(0, Manner())))]
        local, team = rewards_by_role(store, seen), _means([outcome.rewards for outcome in outcomes])
        idle = runner.idle(seen)
        unseen = unseen_roles(config, flow, [part for part, worked in idle if not worked])
        rare = [*config.roles, *unseen]
        command = f"cotune train {workflow} --tasks {tasks} --model MODEL" if isinstance(workflow, str) else ""
        wrong = faults(flow, [one.shown.outcome for one in ran], seen, local, rare)
        found = [*fault_findings(wrong, ran, watch, command), *twice_findings(ran, store)]
        policies, more = _policies(config, seen, unseen, flow, plan)
        roles = _roles(seen, policies, flow, plan)
        groups, left_out = _groups(store, outcomes, seen, roles, plan, recipe)
        left = {role.role for role in roles if role.kind == "provider"}
        answered = [call for call in seen if call.role not in left]
        counts, refused = tokens(chat, answered, store)
        found += [*more, *refused, *forms(answered, store, chat)]
        if flow.episode_judge is not None:
            found.append(Finding("note", "judge", "it was not asked: a dry run makes its outcomes up."))
        if not groups and not any(finding.level in ("blocks", "undecided") for finding in found):
            text = "the plan would form no group: nothing would be trained."
            found.append(Finding("blocks", "groups", text, "See what was left out."))
        found += [*role_findings(roles, seen, plan), *idle_findings(idle, seen, runner.parts.known)]
        found += call_findings(seen, roles, plan, config)
        if any(outcome.error is None for outcome in outcomes):
            found += learning_findings(roles, local, team, recipe, rare)
        found += [*run_findings(ran, watch), *connection_findings(outcomes, watch)]
        done = time.perf_counter()
        return CheckReport(
            workflow=workflow if isinstance(workflow, str) else flow.name,
            tasks=tuple(task.id for task in listed),
            seconds=done - started,
            spent={"loading": loaded - started, "running": ended - loaded},
            plan=why,
            frameworks=tuple(_frameworks({call.integration for call in seen})),
            runs=len(outcomes),
            roles=tuple(roles),
            idle=tuple(IdleCheck(role=p.role, kind=p.kind, of=p.of, ran=worked) for p, worked in idle),
            calls=tuple(_calls(seen, outcomes, counts, store)),
            groups=tuple(groups),
            team=team,
            local={role: named for role, named in local.items() if named},
            left_out=left_out,
            findings=tuple(found),
        )


def _judged(outcomes: Sequence[Outcome], store: Store) -> list[Outcome]:
    """Outcomes as a judge might give them, which is not asked."""
    made = [replace(outcome, rewards={**outcome.rewards, "judge": 0.0}) for outcome in outcomes]
    store.write([RewardRecord(outcome.episode.id, "judge", 0.0) for outcome in made])
    store.flush()
    return made


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


def _policies(
    config: TrainConfig, calls: Sequence[CallRecord], unseen: Sequence[str], flow: Workflow, plan: Plan
) -> tuple[Policies | None, list[Finding]]:
    if not calls:
        return None, []
    seen = sorted({*unseen, *(call.role for call in calls)})
    try:
        scored = list(flow.scorers) if plan.kind == "tree" else None
        return config.resolve_policies(seen, scored=scored), []
    except ConfigError as error:
        return None, [blocking(error, "policies")]


def _roles(calls: Sequence[CallRecord], policies: Policies | None, flow: Workflow, plan: Plan) -> list[RoleCheck]:
    found = []
    for role in dict.fromkeys(call.role for call in calls):
        spec = policies.of(role) if policies else None
        able = plan.kind != "tree" or role in flow.scorers
        reason = ""
        if spec is None:
            reason = "the policies cannot be resolved"
        elif spec.kind == "provider":
            reason = "left to the application's provider"
        elif not able:
            reason = "no scorer"
        elif spec.kind == "frozen":
            reason = "its policy is frozen"
        elif all(call.status != "ok" for call in calls if call.role == role):
            reason = "all its calls failed"
        found.append(
            RoleCheck(
                role=role,
                calls=sum(call.role == role for call in calls),
                policy=spec.name if spec else "",
                kind=spec.kind if spec else "",
                scorer=role in flow.scorers,
                trained=not reason,
                reason=reason,
            )
        )
    return found


def _groups(
    store: Store,
    outcomes: Sequence[Outcome],
    seen: Sequence[CallRecord],
    roles: Sequence[RoleCheck],
    plan: Plan,
    recipe: Recipe,
) -> tuple[list[GroupCheck], Mapping[str, int]]:
    """The groups of a step in which every episode runs like the one that was seen."""
    trained = [role.role for role in roles if role.trained]
    shown = {call.episode for call in seen}
    episodes = [outcome.episode for outcome in outcomes if outcome.episode.id in shown]
    plan_kind: PlanKind = "tree" if plan.kind == "tree" else "independent"  # nothing is forked here
    collected = collect(store, episodes, plan=plan_kind, roles=trained, rewarded=recipe.takes_rewards)
    kept = {call.id for call in seen}
    collected = msgspec.structs.replace(collected, samples=[one for one in collected.samples if one.call in kept])
    built = build_groups(list(_repeated(collected, plan)), recipe)
    found = [
        GroupCheck(
            task=group.samples[0].task,
            roles=tuple(dict.fromkeys(sample.role for sample in group.samples)),
            turns=tuple(sorted({sample.turn for sample in group.samples})),
            size=len(group.samples),
        )
        for group in built.groups
    ]
    left_out = Counter({**collected.left_out, **built.left_out})
    own = sum(refused(call) for episode in episodes for call in store.calls(episode.id))
    return found, +(left_out - Counter(failed_call=own))


def _repeated(collected: Collected, plan: Plan) -> Iterable[Sample]:
    """Under independent rollouts the samples of all episodes of a task; what was read from other calls differs. Under a
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
            characters=sum(_length(store.message(name)) for name in call.messages),
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


def _length(message: Mapping[str, Any]) -> int:
    """Characters of a message: its text, and what its tool calls say."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    functions = [tool.get("function") or {} for tool in message.get("tool_calls") or ()]
    return len(content) + sum(len(f"{f.get('name')}{f.get('arguments')}") for f in functions)


def _means(outcomes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for rewards in outcomes for name in rewards)
    values = {name: [rewards[name] for rewards in outcomes if name in rewards] for name in names}
    return {name: sum(found) / len(found) for name, found in values.items()}


def _frameworks(used: Collection[str]) -> Iterable[Framework]:
    """Those that calls came through, and any that is loaded in a version that cannot be recorded."""
    for name, (oldest, beyond) in SUPPORTED.items():
        if name.replace("-", "_") not in sys.modules:
            continue
        try:
            found, ok = require(name), True
        except UnsupportedVersion:
            found, ok = version(name), False
        except PackageNotFoundError:
            found, ok = "", True
        known = _USED_BY.get(name)
        if not ok or known is None or not used or known & set(used):
            yield Framework(name=name, version=found, supported=f">={oldest},<{beyond}", ok=ok)
