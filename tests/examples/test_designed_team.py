"""The team that a model designs: its form, who is compared with whom, what check says of it, and a short run of it."""

from __future__ import annotations

import asyncio
import math
import random
from pathlib import Path
from statistics import fmean

import pytest

import cotune
from cotune.algorithms.prepare import prepare
from cotune.algorithms.samples import Sample
from cotune.records.structs import PolicyRef
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import read_metrics
from cotune.storage.open_store import open_store
from cotune.trainer.config.load import convert, read_toml
from examples.designed_team import app, base, table, tasks, train
from examples.tiny_model import word_tokenizer
from tests.examples.applications import check_knows_nothing_of_cotune, models_asked_by

CONFIG = str(table.CONFIG)
EXECUTORS = [f"executor {number}" for number in (1, 2, 3, 4)]


def test_the_application_knows_nothing_of_cotune() -> None:
    check_knows_nothing_of_cotune(Path(app.__file__))


def test_the_application_runs_alone_with_the_agents_that_the_designer_names() -> None:
    asked = models_asked_by("examples.designed_team.app", answer="ada : double ; bob : jump", ends="0 of 2 are right\n")
    assert asked == {"designer": 2, "ada": 2, "bob": 2}


@pytest.mark.parametrize(
    ("text", "agents"),
    [
        ("ada : double", [("ada", ("double",))]),
        ("ada : double ; bob : jump mirror", [("ada", ("double",)), ("bob", ("jump", "mirror"))]),
        (": double", []),
        ("ada : double ; bob :", []),
        ("ada : turn", []),
        ("designer : double", []),
        ("ada : double ; designer : jump", []),
        ("double", []),
        ("", []),
        (" ; ".join(["ada : jump"] * 5), []),
    ],
)
def test_a_design_is_read_whole_or_not_at_all(text: str, agents: list[tuple[str, tuple[str, ...]]]) -> None:
    assert [(agent.name, agent.operations) for agent in app.read_design(text)] == agents


def test_operations_are_applied_in_order() -> None:
    assert tasks.apply(["double", "increment"], "7") == "5"
    assert tasks.apply(["double", "jump", "mirror"], "5") == "6"


@pytest.mark.parametrize(
    ("team", "designs", "agents"),
    [
        ("designed", 1, [("mirror", "jump"), ("double",)]),
        ("one agent", 0, [("mirror", "jump", "double")]),
        ("an agent each", 0, [("mirror",), ("jump",), ("double",)]),
    ],
)
def test_the_task_says_which_team_works(
    team: tasks.Team, designs: int, agents: list[tuple[str, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    worked: list[tuple[str, ...]] = []

    async def answered(model: str, messages: list[dict[str, str]], max_tokens: int) -> str:
        """The designer's answer, or the right answer of an agent."""
        asked.append(model)
        if model == "designer":
            return "ada : mirror jump ; bob : double"
        worked.append(tuple(messages[0]["content"].split()[2:]))
        return tasks.apply(worked[-1], messages[1]["content"])

    monkeypatch.setattr(app, "ask", answered)
    operations = ["mirror", "jump", "double"]
    task = {"operations": operations, "number": "4", "answer": tasks.apply(operations, "4"), "executions": 2}
    rewards = asyncio.run(train.solve({**task, "id": "t", "team": team}))
    assert asked.count("designer") == designs and sorted(worked) == sorted(agents * 2)
    designer = {"designer": 1.0} if designs else {}
    assert rewards == {"success": 1.0, "executor 1": 1.0, "executor 2": 1.0, **designer}


def test_every_word_of_the_demonstrations_has_a_token() -> None:
    tokenizer = word_tokenizer(base.words())
    for messages, answer in base.demonstrations(random.Random(0), 400):
        text = tokenizer.apply_chat_template(messages, tokenize=False) + answer
        assert tokenizer.unk_token_id not in tokenizer(text)["input_ids"]


def answers(rollout: str, results: list[float], calls_of_an_execution: int) -> list[Sample]:
    """The designer's answer and those of the agents of one episode, with the outcome that the workflow returns."""
    ends = {"designer": fmean(results), **train.outcome(results)}
    roles = ["designer"]
    for number in range(len(results)):
        roles += [f"executor {number + 1}"] * calls_of_an_execution
    return [
        Sample(
            id=f"{rollout}{place}.0",
            task="q",
            rollout=rollout,
            role=role,
            turn=place,
            step=place,
            branch="",
            prompt="",
            policy=PolicyRef("designer" if role == "designer" else "executor"),
            tokens=4,
            outcome={name: value for name, value in ends.items() if name != "success"},
        )
        for place, role in enumerate(roles)
    ]


def test_designs_are_compared_by_their_means_and_executions_within_their_design() -> None:
    # Design e succeeds in both executions, f in one of two, g in none. The designer has 1, 0.5 and 0: mean 0.5.
    samples = [*answers("e", [1.0, 1.0], 1), *answers("f", [1.0, 0.0], 2), *answers("g", [0.0, 0.0], 1)]
    prepared = prepare(samples, train.DesignedTeam())
    advantages = dict(zip((sample.id for sample in prepared.samples), prepared.advantages.tolist(), strict=True))

    deviation = math.sqrt((0.25 + 0.0 + 0.25) / 3)
    assert advantages["e0.0"] == pytest.approx(0.5 / deviation, abs=1e-4)
    assert advantages["g0.0"] == pytest.approx(-0.5 / deviation, abs=1e-4)
    # The agents of f alone differ within their design: two calls of the first execution, two of the second one.
    agents = {name: value for name, value in advantages.items() if not name.endswith("0.0") and value}
    assert agents == {
        name: pytest.approx(value, abs=1e-4)
        for name, value in {"f1.0": 1.0, "f2.0": 1.0, "f3.0": -1.0, "f4.0": -1.0}.items()
    }
    assert {sample.id for sample in prepared.trained} == {"e0.0", "g0.0", *agents}


def test_check_says_that_invented_names_become_adapters_without_the_rule() -> None:
    ruled = cotune.check(train.solve, tasks.make_tasks(1, seed=0, executions=4), read_toml(CONFIG))
    assert ruled.trainable
    assert [role.role for role in ruled.roles] == ["designer", *EXECUTORS]
    assert [(role.policy, role.trained) for role in ruled.roles] == [("designer", True), *[("executor", True)] * 4]
    assert not any("invents" in finding.text for finding in ruled.findings)

    # The README gives this command. With train.toml it would be an error: its policies do not name the new roles.
    by_name = cotune.check(train.solve, tasks.make_tasks(1, seed=0, executions=4), {"roles_by": "model"})
    (finding,) = (finding for finding in by_name.findings if "invents" in finding.text)
    assert finding.level == "warns" and "flipper" in finding.about
    assert "a LoRA of its own" in finding.text and "roles_by" in finding.remedy


def test_a_call_that_has_lost_its_context_fails_the_episode() -> None:
    @cotune.workflow(roles=train.role_of)
    async def lost(task: tasks.Task) -> float:
        await app.execute([app.Agent("ada", ("double",))], task["number"])
        return 1.0

    report = cotune.check(lost, tasks.make_tasks(1, seed=0))
    assert not report.trainable
    assert any("current_execution" in finding.text for finding in report.findings)


@pytest.mark.parametrize("run", ["fixed", "designer", "both"])
def test_each_run_of_the_table_trains_the_policies_that_it_names(run: str) -> None:
    config = convert({**table.settings_of(run, 8), "model": "none"})
    learning = [
        [policy.name for policy in config.policy if policy.trained and config.trains(policy.name, step)]
        for step in range(8)
    ]
    in_turn = [["designer"]] * 2 + [["executor"]] * 2
    expected = {"fixed": [["executor"]] * 8, "designer": [["designer"]] * 8}
    assert learning == {**expected, "both": in_turn * 2}[run]


def test_a_short_run_trains_both_in_turn_and_the_agents_of_all_names_as_one_policy(
    in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    base.build(tmp_path / "base", steps=60, count=1500)
    settings = {**table.settings_of("both", 4), "model": str(tmp_path / "base"), "tasks_per_step": 4}
    cotune.train(train.solve, tasks.make_tasks(16, seed=1, executions=4), settings, out=tmp_path / "run")

    steps = list(read_metrics(tmp_path / "run"))
    frozen = [[policy for policy, why in line["stayed"].items() if why == "frozen step"] for line in steps]
    assert frozen == [["executor"], ["designer"], ["executor"], ["designer"]]
    with open_store(tmp_path / "run", read_only=True) as store:
        episodes = list(store.episodes(EpisodeFilters(phase="train")))
        calls = [call for episode in episodes for call in store.calls(episode.id)]
    assert len(episodes) == 4 * 4 * 4
    assert {call.role for call in calls} == {"designer", *EXECUTORS}
    assert len({call.model for call in calls}) > 3, "the designer invented several names"
    played = {call.policy.name for call in calls if call.policy is not None and call.role != "designer"}
    assert played == {"executor"}
