from __future__ import annotations

import asyncio
import io
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from rich.console import Console

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.goal import goal_of, goal_of_policies
from cotune.algorithms.policy_recipes import Recipes
from cotune.episodes.rollout import EpisodeBatch
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, Outage, WorkflowError
from cotune.intervals import Interval
from cotune.reading.evaluations import EvaluationReport
from cotune.recording.call_records import CallerContext
from cotune.recording.context import current_episode
from cotune.recording.recorder import Nowhere
from cotune.records.policies import UNTRAINED
from cotune.records.structs import CallRecord, Episode, PolicyRef, Record, Task
from cotune.sampling.protocol import Completion, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.sampling.scoring import OfOne
from cotune.trainer.evaluation.evaluate import evaluate_modes
from cotune.trainer.evaluation.modes import (
    DEFAULT_MODES,
    TRAINING_TEMPERATURE,
    EvaluationOptions,
    Lineup,
    check_modes,
    contest_of_run,
    swap,
    temperature_of,
)
from cotune.trainer.evaluation.report import render
from cotune.trainer.evaluation.run import evaluate_episodes
from tests.integrations.edits import part, prompts

ASKER, SOLVER = PolicyRef("asker", 3), PolicyRef("solver", 3)
TRAINED = {"ask": ASKER, "solve": SOLVER}


class Letters:
    """Token ids are code points."""

    def images(self, messages: Any) -> tuple[bytes, ...]:
        return ()

    def render(self, messages: Sequence[Mapping[str, Any]], tools: object, **earlier: object) -> list[int]:
        return [ord(letter) for letter in messages[-1]["content"]]

    def parse(self, token_ids: Sequence[int], stop: Sequence[str] = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        text = "".join(map(chr, token_ids))
        return text, {"role": "assistant", "content": text}, "stop"


class Scripted:
    """Each policy name knows one answer from version 1 on; version 0 always says "?"."""

    answers: Mapping[str, str] = {"asker": "sum", "solver": "four"}

    def __init__(self) -> None:
        self.asked: list[tuple[PolicyRef, SamplingParams, int]] = []

    async def sample(
        self, prompt: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        self.asked.append((policy, params, n))
        text = self.answers[policy.name] if policy.version else "?"
        return [Completion(tuple(map(ord, text)), (0.0,) * len(text), "length" if text == "?" else "stop")] * n


class Listed:
    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)


async def ask(role: str, text: str) -> str:
    live = current_episode.get()
    assert live is not None and live.responder is not None
    call = live.start(CallerContext(role, "test"), {"messages": [{"role": "user", "content": text}]})
    answer = await live.responder.respond(call)
    assert answer is not None
    call.finish(answer)
    return answer.candidates[answer.chosen].text


async def solve(task: Mapping[str, Any]) -> dict[str, float]:
    if task["broken"]:
        raise ValueError("boom")
    asked = await ask("ask", "2+2")
    solved = await ask("solve", asked)
    return {"team": (asked == "sum") + 2.0 * (solved == "four"), "success": asked == "sum" and solved == "four"}


async def only_reward(task: Mapping[str, Any]) -> float:
    return 1.0 if await ask("solve", "2+2") == "four" else 0.0


def tasks(count: int, broken: int = 0) -> list[Task]:
    return [Task(id=str(i), input={"broken": i < broken}) for i in range(count)]


def modes(workflow: Workflow, its_tasks: list[Task], roles: Mapping[str, PolicyRef], **options: Any) -> Any:
    names = {ref.name for ref in roles.values()}
    sampler = options.pop("sampler", None) or Scripted()
    who = {name: options.pop(name) for name in ("provider_roles", "others") if name in options}
    players = responder(workflow, roles, sampler, **who)
    batch = EpisodeBatch(tasks=its_tasks, sink=Nowhere(), phase="eval")
    labels, temperature = (
        check_modes(options.pop("modes", DEFAULT_MODES)),
        options.pop("temperature", TRAINING_TEMPERATURE),
    )
    contest = contest_of_run(roles, names, labels, temperature)
    return asyncio.run(evaluate_modes(workflow, batch, players, contest, **options))


def responder(workflow: Workflow, roles: Mapping[str, PolicyRef], sampler: Any, **who: Any) -> PolicyResponder:
    chat: Any = Letters()
    return PolicyResponder(sampler, chat, roles, scorers=workflow.scorers, seed=0, stream="eval", **who)


def test_success_reward_and_roles_of_one_evaluation() -> None:
    workflow = Workflow("solve", solve, {"solve": lambda candidate, call, task: {"team": 1.0, "short": 0.25}})
    sink = Listed()
    batch = EpisodeBatch(tasks=tasks(4, broken=1), sink=sink, phase="eval")
    found = asyncio.run(evaluate_episodes(workflow, batch, responder(workflow, TRAINED, Scripted()), label="x"))
    assert found.episodes == 4
    assert found.success is not None and (found.success.mean, found.success.n) == (0.75, 4)
    assert found.reward is not None and (found.reward.mean, found.reward.n) == (2.25, 4), "a failed episode counts 0"
    assert found.outcome is None, "which is the same"
    assert list(found.failed.values()) == [1] and "boom" in next(iter(found.failed))
    assert sorted(found.roles) == ["ask", "solve"]
    ask_role, solve_role = found.roles["ask"], found.roles["solve"]
    assert (ask_role.calls, ask_role.failed, ask_role.turns) == (3, 0, 1.0)
    assert (ask_role.prompt_tokens, ask_role.completion_tokens, ask_role.truncated) == (3.0, 3.0, 0.0)
    assert ask_role.rewards == {} and ask_role.policies == ("asker@3",)
    assert solve_role.completion_tokens == 4.0 and solve_role.rewards == {"short": 0.25, "team": 1.0}
    assert sum(isinstance(r, CallRecord) for r in sink.records) == 6
    assert [r.phase for r in sink.records if isinstance(r, Episode)] == ["eval"] * 4


def test_a_role_without_a_policy_is_played_by_the_untrained_model_and_told() -> None:
    sampler = Scripted()
    report = modes(
        Workflow("solve", solve), tasks(2), {"ask": ASKER}, modes=["trained"], sampler=sampler, others=UNTRAINED
    )
    found = report.evaluations["trained"]
    assert (found.failed, found.unlisted) == ({}, {"solve": 2})
    assert found.roles["solve"].policies == ("base@0",)
    assert report.notes == ("Role 'solve' has no policy: the untrained model answered its 2 calls (other_roles).",)


def test_all_modes_draw_the_same_random_numbers() -> None:
    sampler = Scripted()
    modes(Workflow("solve", solve), tasks(2), TRAINED, sampler=sampler, modes=["base", "trained", "swapped"])
    seeds = [params.seed for _, params, _ in sampler.asked]
    assert seeds[:4] == seeds[4:8] == seeds[8:]
    assert len(set(seeds[:4])) == 4 and None not in seeds


def test_all_episodes_failed_names_the_commonest_cause_and_no_missing_success() -> None:
    report = modes(Workflow("solve", solve), tasks(3, broken=3), TRAINED, modes=["base", "trained"])
    assert report.broken == ["base", "trained"]
    (cause,) = report.evaluations["base"].failed
    assert report.notes == tuple(f"All 3 episodes of {mode} failed, most often of: {cause}" for mode in report.broken)
    with pytest.raises(WorkflowError, match=r"All 6 episodes failed.*the commonest cause: error: .*boom"):
        report.require_some_episode()


def test_each_mode_asks_the_right_policies_at_the_right_temperature() -> None:
    sampler = Scripted()
    report = modes(Workflow("solve", solve), tasks(1), TRAINED, sampler=sampler)
    untrained = [PolicyRef("asker", 0), PolicyRef("solver", 0)]
    trained, swapped = [ASKER, SOLVER], [SOLVER, ASKER]
    assert [policy for policy, _, _ in sampler.asked] == untrained + trained + swapped
    assert [params.temperature for _, params, _ in sampler.asked] == [1] * 6
    assert {n for _, _, n in sampler.asked} == {1}
    means = {mode: e.success.mean for mode, e in report.evaluations.items() if e.success}
    assert means == {"base": 0.0, "trained": 1.0, "swapped": 0.0}
    assert {mode.temperature for mode in report.evaluations.values()} == {1.0}


def test_comparisons_are_paired_and_name_their_base() -> None:
    report = modes(Workflow("solve", solve), tasks(50), TRAINED)
    pairs = {c.label: c.against for c in report.comparisons}
    assert pairs == {"trained": "base", "swapped": "trained"}
    trained = report.comparisons[0]
    assert trained.success is not None and trained.reward is not None
    assert (trained.success.mean, trained.success.low, trained.success.n) == (1.0, pytest.approx(0.9244, abs=1e-4), 50)
    assert (trained.reward.mean, trained.reward.n) == (3.0, 50)


def test_only_today_has_the_application_s_own_prompts() -> None:
    async def edited(task: Mapping[str, Any]) -> float:
        live = current_episode.get()
        return float(live is not None and live.prompting is not None)

    edits = prompts(part("2+2", "What is 2+2?", role="solve", kind="user"))
    workflow = Workflow("edited", edited, prompts=edits)
    report = modes(workflow, tasks(9), {"solve": SOLVER}, modes=["today", "base", "trained"])
    means = {mode: e.reward.mean for mode, e in report.evaluations.items() if e.reward}
    assert means == {"today": 0.0, "base": 1.0, "trained": 1.0}
    assert {(c.label, c.against) for c in report.comparisons} == {("trained", "base"), ("trained", "today")}


def test_two_temperatures_are_never_compared_without_a_word() -> None:
    chosen = ["today", "trained"]
    assert (temperature_of(chosen, None), temperature_of(["trained"], None), temperature_of(chosen, 0.5)) == (
        "app", 1.0, 0.5,
    )  # fmt: skip
    for temperature in ("app", 0.5):
        report = modes(Workflow("alone", alone), tasks(2), TRAINED, modes=chosen, temperature=temperature)
        sampled = {label: mode.temperature for label, mode in report.evaluations.items()}
        assert sampled == {"today": "app", "trained": temperature}
        different = [note for note in report.notes if "sampled as the application asks" in note]
        assert len(different) == (temperature != "app")
        console = Console(width=200, file=io.StringIO())
        console.print(render(report))
        shown = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
        one = "Results at the application's own temperature, 95%"
        two = "Results (today at the application's own temperature, trained at temperature 0.5), 95%"
        assert (one if temperature == "app" else two) in shown


async def alone(task: Mapping[str, Any]) -> float:
    return 1.0


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf"), "own"])
def test_a_wrong_temperature_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"temperature .*must be a number of 0 or more, or app"):
        EvaluationOptions(temperature=wrong)


@pytest.mark.parametrize(
    ("old", "replacement"),
    [
        ("base_greedy", "mode base with --temperature 0"),
        ("greedy", "mode trained with --temperature 0"),
        ("base_as_deployed", "mode base with --temperature app"),
        ("as_deployed", "mode trained with --temperature app"),
        ("as_written", "mode today"),
    ],
)
def test_a_removed_mode_names_its_replacement(old: str, replacement: str) -> None:
    with pytest.raises(ConfigError, match=f"modes = '{old}' was removed.*{replacement}"):
        EvaluationOptions(modes=("base", old))


def test_swap_rotates_policies_and_leaves_the_others() -> None:
    a, b, c, frozen = PolicyRef("a", 1), PolicyRef("b", 2), PolicyRef("c", 3), PolicyRef("f", 0)
    roles = {"r1": a, "r2": a, "r3": frozen, "r4": b, "r5": c}
    assert swap(roles, {"a", "b", "c"}) == {"r1": b, "r2": b, "r3": frozen, "r4": c, "r5": a}
    assert swap({"r1": a, "r2": a}, {"a"}) is None


def test_a_mode_that_cannot_be_played_is_said() -> None:
    contest = contest_of_run({"r1": ASKER, "r2": ASKER}, {"asker"}, ["trained", "swapped"], 0.5)
    assert contest.lineups == {"trained": Lineup({"r1": ASKER, "r2": ASKER}, 0.5)}
    assert contest.notes == ["swapped was not run: fewer than two trained policies play a role."]


def test_without_success_only_the_reward_is_reported_and_said() -> None:
    report = modes(Workflow("only_reward", only_reward), tasks(3), TRAINED, modes=["base", "trained"])
    assert [e.success for e in report.evaluations.values()] == [None, None]
    # with half a -1 and half a 1 more the mean of four is 0.75 and sd = sqrt(1.75 / 3): 0.75 - 3.182446 sd / 2
    assert report.comparisons[0].reward == Interval(mean=1.0, low=pytest.approx(-0.4653, abs=1e-4), high=1.0, n=3)
    assert report.comparisons[0].verdict == (
        "no difference shown between trained and base: +1.000 of reward, 95% interval -0.465 to 1.000, on 3 tasks; "
        "about 6 tasks would show a difference of this size"
    )
    assert report.notes == (
        "No success rate: the workflow returns no `success`, so only its reward is reported.",
        "Role 'ask' made no call.",
    )


async def asked_alone(task: Mapping[str, Any]) -> float:
    await ask("solve", "2+2")
    return 0.0


def test_intervals_of_rewards_stay_inside_the_bounds_that_scorers_declare() -> None:
    def fined(candidate: Any, call: Any, task: Mapping[str, Any]) -> float:
        return 0.0 if candidate.text == "four" and not task["broken"] else -3.0

    found: dict[bool, EvaluationReport] = {}
    for declares in (False, True):
        scorer = OfOne(fined, bounds=(-3.0, 0.0) if declares else None)
        workflow = Workflow("asked_alone", asked_alone, {"solve": scorer})
        goal = goal_of_policies(Recipes(run=recipe("at_grpo")), "lowest", {"solve": "solver"}, workflow.bounds)
        options = {"modes": ["base", "trained"], "goal": goal}
        found[declares] = modes(workflow, tasks(6, broken=1), {"solve": SOLVER}, **options)
    free, bounded = found[False].evaluations["trained"], found[True].evaluations["trained"]
    assert (free.reward_bounds, bounded.reward_bounds) == (None, (-3.0, 0.0))
    assert free.reward is not None and bounded.reward is not None
    assert free.reward.mean == bounded.reward.mean == -0.5
    assert free.reward.high is not None and free.reward.high > 0.0
    assert (bounded.reward.low, bounded.reward.high) == (free.reward.low, 0.0)
    free_difference, bounded_difference = (report.comparisons[0].reward for report in found.values())
    assert free_difference is not None and free_difference.high is not None and free_difference.high > 3.0
    assert bounded_difference is not None and bounded_difference.high == 3.0
    stored = json.loads(json.dumps(found[True].to_json()))
    assert stored["evaluations"]["trained"]["reward_bounds"] == [-3.0, 0.0]


async def sometimes_known(task: Mapping[str, Any]) -> dict[str, float | None]:
    return {"success": None if task["broken"] else await only_reward(task)}


def test_an_episode_whose_outcome_nobody_knows_is_neither_a_success_nor_a_failure() -> None:
    report = modes(Workflow("sometimes", sometimes_known), tasks(3, broken=1), TRAINED, modes=["trained"])
    found = report.evaluations["trained"]
    assert (found.episodes, found.failed, len(found.successes), len(found.rewards)) == (3, {}, 2, 2)
    assert found.success is not None
    assert (found.success.mean, found.success.n) == (1.0, 2)


def test_the_report_as_json_and_as_tables() -> None:
    report = modes(Workflow("solve", solve), tasks(8, broken=2), TRAINED, modes=["base", "trained"])
    plain = json.loads(json.dumps(report.to_json()))
    assert plain["evaluations"]["trained"]["success"]["mean"] == 0.75
    assert len(plain["evaluations"]["base"]["endings"]) == 8
    assert plain["comparisons"][0]["against"] == "base"
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(render(report))
    text = console.export_text()
    assert re.search(r"75.0% \[40.9%, 92.9%\] +8 ", text) and "+75.0%" in text and "asker@3" in text
    assert "trained: 2 x error" in text
    titles = [n for n, line in enumerate(text.splitlines()) if line.startswith(("Differences", "Roles", "Means"))]
    assert len(titles) == 3 and all(not text.splitlines()[n - 1].strip() for n in titles)
    assert text.splitlines()[-1].strip() == (
        "trained is better than base by 75.0 points of success, 95% interval 19.6 to 100.0, on 8 tasks"
    )


async def crashing(task: Mapping[str, Any]) -> float:
    """Half a reward by the untrained model; the trained one is better where it does not crash."""
    said = await ask("solve", "2+2")
    if said == "four" and int(task["id"]) % 4:
        raise ValueError("boom")
    return 0.85 if said == "four" else 0.5


def test_failed_episodes_count_and_a_verdict_names_them() -> None:
    its_tasks = [Task(id=str(i), input={"id": str(i)}) for i in range(16)]
    workflow = Workflow("crashing", crashing)
    options = {"modes": ["base", "trained"]}
    report = modes(workflow, its_tasks, {"solve": SOLVER}, **options)
    base, trained = report.evaluations["base"], report.evaluations["trained"]
    assert base.reward.mean == 0.5 and trained.reward.mean == pytest.approx(4 * 0.85 / 16)
    assert trained.reward.n == 16 and list(trained.failed.values()) == [12]
    (verdict,) = [comparison.verdict for comparison in report.comparisons]
    assert "trained is worse than base by 0.287 of reward" in verdict
    assert verdict.endswith("failed episodes: 12 of 16 of trained, 0 of 16 of base")
    left_out = modes(workflow, its_tasks, {"solve": SOLVER}, goal=goal_of(None, "exclude"), **options)
    assert left_out.evaluations["trained"].reward.n == 4
    assert left_out.comparisons[0].reward.n == 4 and "12 of 16 of trained" in left_out.comparisons[0].verdict
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render(left_out))
    rows = [line for line in console.export_text().splitlines() if line.split()[:1] == ["trained"]]
    assert re.search(r"\] +4 +16 +12 ", rows[0]) and rows[1].split()[-1] == "4", "n, episodes, failed"


async def late_crash(task: Mapping[str, Any]) -> float:
    """The untrained model is fined, and the trained one crashes where it is."""
    said = await ask("solve", "2+2")
    if int(task["id"]) < 2:
        if said == "four":
            raise ValueError("boom")
        return -4.0
    return 0.5


def test_a_crash_is_no_better_than_the_worst_reward_of_the_other_side() -> None:
    its_tasks = [Task(id=str(i), input={"id": str(i)}) for i in range(8)]
    report = modes(Workflow("late", late_crash), its_tasks, {"solve": SOLVER}, modes=["base", "trained"])
    base, trained = (report.evaluations[mode] for mode in ("base", "trained"))
    assert report.comparisons[0].reward.mean == 0.0
    assert trained.reward == base.reward and base.reward.mean == pytest.approx(-0.625), "as shown beside the difference"
    assert trained.roles["solve"].reward == pytest.approx(-0.625)


async def outage(task: Mapping[str, Any]) -> dict[str, float]:
    await ask("solve", "2+2")
    if task["id"] == "0":
        raise Outage("no network")
    return {"success": True}


def test_an_outage_says_nothing_of_the_policies() -> None:
    its_tasks = [Task(id=str(i), input={"id": str(i)}) for i in range(4)]
    report = modes(Workflow("outage", outage), its_tasks, {"solve": SOLVER}, modes=["base"])
    assert report.evaluations["base"].success.mean == 1.0 and report.evaluations["base"].success.n == 3
    assert sum(report.evaluations["base"].failed.values()) == 1


def test_the_verdict_goes_by_the_mixed_reward() -> None:
    """Right answers that take too long: the plain sum praises them, the recipe that is trained with does not."""

    async def slow(task: Mapping[str, Any]) -> dict[str, float]:
        trained = await ask("solve", "2+2") == "four"
        return {
            "correct": float(trained) * (int(task["id"]) % 2),
            "minutes": 3.0 + int(task["id"]) % 3 if trained else 1.0,
        }

    its_tasks = [Task(id=str(i), input={"id": str(i)}) for i in range(12)]
    chosen = recipe("dr_mas", weights={"correct": 1.0, "minutes": -0.5})
    options = {"modes": ["base", "trained"], "goal": goal_of(chosen, "lowest", ["solve"])}
    report = modes(Workflow("slow", slow), its_tasks, {"solve": SOLVER}, **options)
    trained, (found,) = report.evaluations["trained"], report.comparisons
    assert trained.reward.mean == pytest.approx(0.5 - 0.5 * 4.0) and trained.outcome.mean == pytest.approx(4.5)
    assert found.verdict.startswith("trained is worse than base by 1.000 of reward") and found.outcome.mean == 3.5
    assert trained.roles["solve"].reward == trained.reward.mean


def test_roles_that_play_against_each_other_are_judged_against_the_untrained_model() -> None:
    """The trained asker beats the untrained solver, and the trained solver loses to the untrained asker."""

    async def duel(task: Mapping[str, Any]) -> dict[str, float]:
        asked, solved = await ask("ask", "2+2"), await ask("solve", "2+2")
        won = (asked == "sum") - (int(task["id"]) % 2) / 2 + (solved == "four") / 4
        return {"ask": won, "solve": -won, "success": won > 0}

    its_tasks = [Task(id=str(i), input={"id": str(i)}) for i in range(8)]
    goal = goal_of(recipe("spiral"), "lowest", ["ask", "solve"])
    report = modes(Workflow("duel", duel), its_tasks, TRAINED, modes=["base", "trained"], goal=goal)
    whole, asker, solver = report.comparisons
    assert whole.success is whole.reward is report.evaluations["trained"].reward is None
    assert whole.verdict.startswith("nothing to compare between trained and base: the rewards of ask, solve add up")
    assert asker.verdict.startswith("ask against base is better than base by 1.000 of reward")
    assert solver.verdict.startswith("solve against base is worse than base by 0.250 of reward")
    players = {label: [found.roles[role].policies for role in TRAINED] for label, found in report.evaluations.items()}
    assert players["ask against base"] == [("asker@3",), ("solver@0",)]
    assert players["solve against base"] == [("asker@0",), ("solver@3",)]


@pytest.mark.parametrize("wrong", [["bsae"], []])
def test_modes_are_checked(wrong: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"modes .*base, trained, swapped, today"):
        modes(Workflow("solve", solve), tasks(1), TRAINED, modes=wrong)


def test_pass_at_k_of_several_episodes_of_each_task() -> None:
    """The first task succeeds in its last episode of four, the second in all, the third in none: one of them fails."""
    seen: dict[str, int] = {}

    async def play(task: str) -> dict[str, float]:
        seen[task] = number = seen.get(task, -1) + 1
        if task == "c" and number == 1:
            raise ValueError("no")
        return {"success": {"a": number == 3, "b": True, "c": False}[task], "team": float(number)}

    batch = EpisodeBatch(
        tasks=[Task(id=letter, input=letter) for letter in "abc"],
        sink=Nowhere(),
        phase="eval",
        rollouts=4,
        concurrency=1,
    )
    found = asyncio.run(evaluate_episodes(Workflow("play", play), batch, label="trained"))
    assert {k: interval.mean for k, interval in found.pass_at.items()} == pytest.approx(
        {1: (0.25 + 1 + 0) / 3, 2: (0.5 + 1 + 0) / 3, 4: (1 + 1 + 0) / 3}
    )
    assert found.episodes == 12 and sum(found.failed.values()) == 1
    # A task is one observation: the mean of its episodes. The failed one counts as no success and the lowest reward, 0.
    assert found.successes == {"a": 0.25, "b": 1.0, "c": 0.0}
    assert found.success is not None and (found.success.mean, found.success.n) == (pytest.approx(1.25 / 3), 3)
    assert found.rewards == {"a": 1.5, "b": 1.5, "c": 1.25}

    alone = EpisodeBatch(tasks=batch.tasks, sink=Nowhere(), phase="eval")
    assert asyncio.run(evaluate_episodes(Workflow("play", play), alone, label="trained")).pass_at == {}


async def until_solved(task: Mapping[str, Any]) -> float:
    """The untrained model does not answer, so the role is asked again: five calls in place of two."""
    await ask("ask", "2+2")
    for _ in range(4):
        if await ask("solve", "2+2") == "four":
            return 1.0
    return 0.0


def test_calls_and_turns_of_an_episode_are_compared() -> None:
    report = modes(Workflow("until", until_solved), tasks(8), TRAINED, modes=["base", "trained"])
    base, trained = report.evaluations["base"], report.evaluations["trained"]
    assert set(base.calls_by_task.values()) == {5.0} and set(trained.calls_by_task.values()) == {2.0}
    assert (base.roles["solve"].turns, trained.roles["solve"].turns) == (4.0, 1.0)
    (comparison,) = report.comparisons
    assert comparison.calls is not None and (comparison.calls.mean, comparison.calls.n) == (-3.0, 8)
    out = io.StringIO()
    Console(file=out, width=100).print(render(report))
    use = out.getvalue().partition("Means per episode")[2]
    assert re.search(r"trained - base +-3\.0 \[", use)
    same = modes(Workflow("solve", solve), tasks(8), TRAINED, modes=["base", "trained"])
    out = io.StringIO()
    Console(file=out, width=100).print(render(same))
    assert "trained - base" not in out.getvalue().partition("Means per episode")[2], "the calls do not differ"


def test_calls_of_failed_episodes_do_not_count() -> None:
    report = modes(Workflow("solve", solve), tasks(4, broken=2), TRAINED, modes=["base", "trained"])
    assert report.evaluations["base"].calls_by_task == {"2": 2.0, "3": 2.0}
    assert report.comparisons[0].calls is not None and report.comparisons[0].calls.n == 2
