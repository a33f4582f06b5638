"""A user's application that uses every public name: `mypy --strict` finds nothing in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, assert_type

import cotune
from cotune.types import (
    Blame,
    BlameOptions,
    Call,
    CallRequest,
    Candidate,
    CheckLimits,
    CheckReport,
    Deployment,
    EpisodeJudge,
    EvaluationOptions,
    EvaluationReport,
    FinishedCall,
    FinishedEpisode,
    Gate,
    GroupScorer,
    JudgeSettings,
    Manifest,
    Redactor,
    Reward,
    RolesFunction,
    RunSummary,
    Scorer,
    Task,
    Trace,
    TracedCall,
    TrainConfig,
    Workflow,
    WorkflowFunction,
    WorkflowSource,
)


class Question(TypedDict):
    id: str
    question: str
    answer: str


class Graph:
    async def ainvoke(self, task: object) -> dict[str, object]:
        return {}


@cotune.workflow
async def solve(task: Question) -> bool:
    with cotune.role("planner"), cotune.gateway() as gate:
        assert_type(gate, Gate)
        return gate.url == gate.role_url(task["question"])


@solve.scorer("planner")
def short(candidate: Candidate, call: Call, task: Question) -> float:
    told = [message["content"] for message in call.messages]
    return float(len(candidate.text) < 10 * (call.turn + 1) and task["answer"] in told)


@solve.scorer("tester")
async def named(candidate: Candidate, call: Call, task: Question) -> dict[str, float]:
    return {"calls": len(candidate.tool_calls), "same": call.task.input == task, "state": call.state is None}


@solve.scorer("judged", group=True)
def compared(candidates: Sequence[Candidate], call: Call, task: Question) -> list[Reward | None]:
    return [None if not c.text else {"place": c.index, "length": len(c.text)} for c in candidates]


@solve.scorer("critic")
def explained(candidate: Candidate, call: Call, task: Question) -> cotune.Feedback:
    return cotune.Feedback({"length": float(len(candidate.text))}, "Shorter is better.")


panel: GroupScorer = compared
solve.scorer("editor", group=True)(cotune.Judge(model="m", rubric="Clear and short.", price=(0.15, 0.6), max_cost=1.0))


@solve.judge
async def ranked(episodes: Sequence[FinishedEpisode], task: Question) -> list[Reward | None]:
    def told(call: FinishedCall) -> str:
        return call.answer.text

    return [None if not episode.calls else float(len(told(episode.calls[-1]))) for episode in episodes]


outcomes: EpisodeJudge = cotune.Judge(model="m", rubric="Solves the task.", settings=JudgeSettings(passes=2))


@solve.redactor
def hide(message: dict[str, Any]) -> Mapping[str, Any]:
    return {**message, "content": "hidden"}


def who(call: CallRequest) -> str | None:
    return call.caller or call.role


@cotune.workflow(roles=who)
def sync(task: Question, retries: int = 3) -> dict[str, float]:
    return {"score": retries}


of_graph = cotune.workflow(Graph(), inputs=lambda task: {"q": task}, reward=lambda state, task: 1.0, roles="caller")

scorer: Scorer = short
redactor: Redactor = hide
roles: RolesFunction = who
reward: Reward = {"team": 1.0}
flow: Workflow = solve.cotune
function: WorkflowFunction[[Question], Any] = solve
sources: list[WorkflowSource] = [solve, sync, of_graph, flow, "app:solve"]
task: Task = Task(id="a", input={"question": "?"})


async def as_before(question: Question) -> None:
    assert_type(await solve(question), bool)
    assert_type(sync(question, retries=1), dict[str, float])


async def record() -> list[TracedCall]:
    with cotune.trace("records.db", task={"id": "a"}, redactor=hide, roles="caller") as traced:
        assert_type(traced, Trace)
        traced.reward(1.0, accuracy=0.5)
    async with cotune.trace() as again:
        print(again.id, again.rewards["team"], again.warnings)
    return [call for call in traced.calls if call.text and call.status == "ok"]


def run() -> None:
    config: TrainConfig | None = None
    summary = cotune.train(solve, [task, {"id": "b"}], config, out="runs/r1", model="some/model", steps=3)
    assert_type(summary, RunSummary)
    assert_type(cotune.resume("runs/r1", changes={"steps": 6}), RunSummary)
    dry = cotune.check(solve, [task], config, answers="provider", limits=CheckLimits(limit=2), steps=3)
    assert_type(dry, CheckReport)
    manifest = cotune.export("runs/r1", "adapters", step="best", gguf="q8_0")
    assert_type(manifest, Manifest)
    print(dry.verdict, dry.findings[0].text, manifest.policy("planner").folder)
    report = cotune.evaluate(
        "runs/r1", solve, "held_out.jsonl", EvaluationOptions(samples=8), prices={"gpt": (0.1, 0.2)}
    )
    assert_type(report, EvaluationReport)
    analysis = cotune.blame(solve, [task], BlameOptions(limit=5), references=("openai:gpt-5",))
    assert_type(analysis, Blame)
    print(analysis.sentence, analysis.at_fault)
    success = report.evaluations["trained"].success
    print(summary.steps, summary.headline.verdict, "none" if success is None else success.mean)


def serve() -> None:
    cotune.serve("adapters", port=8000, aliases={"gpt-4o-mini": "planner"}, say=print)


async def hand_back(question: Question) -> None:
    with cotune.trace("https://collector:4319", app="desk", key="order-17", sample={"planner": 0.1}):
        cotune.feedback(
            key="order-17", reward={"kept": 1.0}, text="Kept.", records="https://collector:4319", app="desk"
        )
    with cotune.deployed("adapters/", temperature=0.0, roles=who) as deployment:
        assert_type(deployment, Deployment)
        await solve(question)
        with deployment.here():
            print(deployment.calls, deployment.served["planner"].policy)
    try:
        async with cotune.deployed("adapters/"):
            await solve(question)
    except cotune.CotuneError as error:
        print(error)
    except OSError as error:
        raise cotune.Outage("The shop is down.") from error


@cotune.recorded
def price(item: str) -> dict[str, int]:
    return {item: 1}


@cotune.recorded
async def stock(item: str) -> int:
    return price(item)[item]
