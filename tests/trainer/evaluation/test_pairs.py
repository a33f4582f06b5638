"""`cotune eval --base A --base B --pairs`: all assignments of models to roles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.cli.main import main
from cotune.errors import ConfigError, WorkflowError
from cotune.intervals import Interval
from cotune.reading.evaluations import EvaluatedMode, TaskEnding
from cotune.trainer.evaluation.assignments import RoleUse, all_assignments, check_limit, estimate, kind_of, role_effects
from tests.trainer.tiny_app import application, ask, build_base

ME = "tests.trainer.evaluation.test_pairs"
TASKS = [{"id": letter, "letter": letter} for letter in "abcdef"]

pytestmark = pytest.mark.usefixtures("in_thread", "no_provider")


async def two_roles(task: Any) -> dict[str, Any]:
    one = await ask("first", f"say {task['letter']}")
    two = await ask("second", f"after {one}: {task['letter']}")
    if task["letter"] == "f":
        await ask("late", "well")
    return {"team": (one + two).count(task["letter"]) / 8, "success": task["letter"] in one + two}


async def one_role(task: Any) -> bool:
    return task["letter"] in await ask("first", f"say {task['letter']}")


async def broken(task: Any) -> bool:
    raise ValueError("not at all")


SOLVE, ALONE, BROKEN = application(two_roles), application(one_role), application(broken)


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pairs")
    build_base(folder / "one")
    build_base(folder / "two", seed=1)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


def test_the_assignments_and_their_kinds() -> None:
    assignments = all_assignments(["a", "b"], ["x", "y"])
    assert {label: kind_of(one) for label, one in assignments.items()} == {
        "a": "homogeneous", "x=a y=b": "mixed", "x=b y=a": "mixed", "b": "homogeneous",
    }  # fmt: skip
    assert len(all_assignments(["a", "b", "c"], ["x", "y", "z"])) == 27
    assert kind_of(all_assignments(["a"], ["x"])["a"]) == "solo"


def test_the_estimate_is_by_hand() -> None:
    uses = {"x": RoleUse(2.0, 100.0, 10.0), "y": RoleUse(1.0, 50.0, 5.0)}
    said = estimate(["a", "b"], uses, 10, {"a": (1000.0, 2000.0), "b": (0.0, 0.0)})
    # Each role is played by `a` in 2 of 4 assignments: 2 * 10 * ((150 * 1000 + 15 * 2000) / 1e6) = 3.6
    assert said == ("4 assignments of models to x, y: 40 episodes, about 120 calls and 6,600 tokens, cost about 3.6")
    assert "cost" not in estimate(["a", "b"], uses, 1, {"a": (1.0, 1.0)})


def test_assignments_above_the_limit_are_not_listed() -> None:
    uses = {f"role {place}": RoleUse(1.0, 10.0, 1.0) for place in range(40)}
    assert estimate(["a", "b", "c"], uses, 1, {}).startswith("12,157,665,459,056,928,801 assignments")
    with pytest.raises(ConfigError, match="12,157,665,459,056,928,801 episodes"):
        check_limit(3**40, 1, 1000)


def test_the_effect_of_a_model_in_a_role() -> None:
    """`b` wins every task as x, and changes nothing as y."""
    assignments = all_assignments(["a", "b"], ["x", "y"])

    def mode(solved: bool) -> EvaluatedMode:
        endings = {str(i): TaskEnding(status="ok", success=solved, outcome=float(solved)) for i in range(10)}
        return EvaluatedMode(episodes=10, endings=endings, success=Interval(mean=float(solved), n=10))

    evaluations = {label: mode(one["x"] == "b") for label, one in assignments.items()}
    x, y = role_effects(evaluations, assignments)
    assert (x.role, x.model, x.against, x.difference.mean, x.difference.n) == (
        "x",
        "b",
        "a",
        pytest.approx(1.0, abs=0.1),
        10,
    )
    assert x.difference.low is not None and x.difference.low > 0.5
    assert (y.role, y.difference.mean) == ("y", 0.0)


def test_all_assignments_play_the_same_tasks(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["eval", f"{ME}:SOLVE", "--tasks", str(models / "tasks.jsonl"), "--pairs", "--out", str(tmp_path / "out")]
    words += ["--base", str(models / "one"), "--base", str(models / "two"), "--price", "one=1/2", "--price", "two=1/2"]
    assert main(words) == 0
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    players = {
        label: {role: one["policies"] for role, one in mode["roles"].items() if role != "late"}
        for label, mode in written["evaluations"].items()
    }
    assert players == {
        "one": {"first": ["one@0"], "second": ["one@0"]},
        "first=one second=two": {"first": ["one@0"], "second": ["two@0"]},
        "first=two second=one": {"first": ["two@0"], "second": ["one@0"]},
        "two": {"first": ["two@0"], "second": ["two@0"]},
    }
    assert [(c["label"], c["against"]) for c in written["comparisons"]] == [
        ("first=one second=two", "one"), ("first=two second=one", "one"), ("two", "one"),
    ]  # fmt: skip
    assert written["assignments"]["first=two second=one"] == {"first": "two", "second": "one"}
    assert [(effect["role"], effect["model"]) for effect in written["effects"]] == [("first", "two"), ("second", "two")]
    heard = capsys.readouterr()
    said = " ".join(heard.out.split())
    assert "homogeneous" in said and "mixed" in said and "One role's model exchanged" in said
    assert "Of 3 comparisons with one assignment, about 1 in 20 shows a difference by chance." in said
    # The late role speaks on the last task only, so it was not seen before: the first model plays it in each.
    assert "Role 'late' has no policy: one answered its 4 calls (other_roles)." in said
    told = " ".join((heard.out + heard.err).split())
    assert "4 assignments of models to first, second: 24 episodes, about 48 calls and" in told and "cost about" in told
    homogeneous = cotune.evaluate(None, SOLVE, TASKS, bases=(models / "two",)).evaluations["two"]
    assert {
        task: ending["success"] for task, ending in written["evaluations"]["two"]["endings"].items() if task != "f"
    } == {task: bool(value) for task, value in homogeneous.successes.items() if task != "f"}


def test_above_the_limit_nothing_is_evaluated(models: Path, tmp_path: Path) -> None:
    bases, out = (models / "one", models / "two"), tmp_path / "out"
    with pytest.raises(
        ConfigError, match=r"max_episodes = 23 is below the 24 episodes of 4 assignments. Allow them with"
    ):
        cotune.evaluate(None, SOLVE, TASKS, bases=bases, pairs=True, max_episodes=23, out=out)
    assert not out.exists()
    # At temperature 0 each task is run once.
    report = cotune.evaluate(None, ALONE, TASKS, bases=bases, pairs=True, max_episodes=12, samples=3, temperature=0.0)
    assert list(report.evaluations) == ["one", "two"]


def test_bad_input(models: Path) -> None:
    with pytest.raises(ConfigError, match="needs two base models or more"):
        cotune.evaluate(None, SOLVE, TASKS, bases=(models / "one",), pairs=True)
    with pytest.raises(
        WorkflowError, match=r"With one in every role the application failed on the first 3 tasks.*not at all"
    ):
        cotune.evaluate(None, BROKEN, TASKS, bases=(models / "one", models / "two"), pairs=True)
