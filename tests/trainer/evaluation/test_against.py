"""`cotune eval --run A --against B`: two runs on the same tasks, with one verdict."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.records.policies import Policies, PolicySpec, policies_for
from tests.trainer.evaluation.made_runs import LORA, make_run
from tests.trainer.tiny_app import application, ask, build_base

ME = "tests.trainer.evaluation.test_against"
TASKS = [{"id": letter, "letter": letter} for letter in "abcdefgh"]

pytestmark = pytest.mark.usefixtures("in_thread", "no_provider")


async def asked(task: Any) -> dict[str, Any]:
    one = await ask("first", f"say {task['letter']}")
    two = await ask("second", f"now {task['letter']}")
    three = await ask("critic", f"judge {task['letter']}")
    said = one + two + three
    return {"team": said.count(task["letter"]) / 12, "success": task["letter"] in said}


async def unsolved(task: Any) -> bool:
    await ask("first", f"say {task['letter']}")
    return False


SOLVE, UNSOLVED = application(asked), application(unsolved)


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`a` and `b` have policies of the same names on different bases; `only` has a policy of the first role alone."""
    folder = tmp_path_factory.mktemp("against")
    one, two = build_base(folder / "one"), build_base(folder / "two", seed=1)
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    make_run(folder / "a", one, seed=1)
    make_run(folder / "b", two, policies_for("lora", ("first", "second"), LORA), seed=2, tasks=str(tasks))
    specs = {"first": PolicySpec(name="first", lora=LORA)}
    make_run(folder / "only", one, Policies(specs, {"first": "first"}), seed=3)
    return folder


def success(here: Path, source: Path | None, mode: str, **options: Any) -> dict[str, float]:
    return cotune.evaluate(source, SOLVE, TASKS, threads=1, **options).evaluations[mode].successes


def test_two_runs_have_one_verdict_on_the_same_tasks(
    here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["eval", f"{ME}:SOLVE", "--tasks", str(here / "tasks.jsonl"), "--run", str(here / "a")]
    assert main([*words, "--against", str(here / "b"), "--out", str(tmp_path / "out")]) == 0
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(written["evaluations"]) == ["a", "b"]
    (comparison,) = written["comparisons"]
    assert (comparison["label"], comparison["against"], comparison["success"]["n"]) == ("a", "b", 8)
    assert re.search("between a and b|than b", comparison["verdict"])
    said = " ".join(capsys.readouterr().out.split())
    assert comparison["verdict"] in said and "95% interval" in comparison["verdict"]
    players = {
        label: {role: one["policies"] for role, one in mode["roles"].items()}
        for label, mode in written["evaluations"].items()
    }
    assert players == {
        "a": {"first": ["first-a@1"], "second": ["second-a@1"], "critic": ["base of a@0"]},
        "b": {"first": ["first-b@1"], "second": ["second-b@1"], "critic": ["base of b@0"]},
    }
    assert "Role 'critic' has no policy: the untrained model answered its 16 calls (other_roles)." in written["notes"]
    assert "b: 8 of 8 held-out tasks are trained on too: success on them says little." in written["notes"]


def test_the_run_says_what_is_not_named(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The workflow that it was trained with, and the tasks that it held out."""
    assert main(["eval", "--run", str(here / "a"), "--against", str(here / "b")]) == 1
    assert "a held out no tasks. Name a file: --tasks" in capsys.readouterr().err
    (here / "a" / "held_out.jsonl").write_text((here / "tasks.jsonl").read_text())
    described = json.loads((here / "a" / "run.json").read_text())
    (here / "a" / "run.json").write_text(json.dumps({**described, "workflow": None}))
    assert main(["eval", "--run", str(here / "a"), "--against", str(here / "b")]) == 1
    assert "a does not name it. Name it: cotune eval app:solve" in capsys.readouterr().err
    (here / "a" / "run.json").write_text(json.dumps({**described, "workflow": f"{ME}:SOLVE"}))
    words = ["eval", "--run", str(here / "a"), "--against", str(here / "b")]
    assert main(words) == 1 and "was not written by you on this machine" in capsys.readouterr().err
    assert main([*words, "--trust-folder"]) == 0
    assert re.search("between a and b|than b", capsys.readouterr().out)
    assert main(["eval", "--base", str(here / "one")]) == 1
    assert "workflow is missing: --base needs it" in capsys.readouterr().err
    (here / "a" / "held_out.jsonl").unlink()


def test_each_side_plays_as_it_does_alone(here: Path) -> None:
    """Also the untrained model that plays the role without a policy is that of its own run."""
    both = cotune.evaluate(here / "a", SOLVE, TASKS, against=here / "b", threads=1).evaluations
    assert both["a"].successes == success(here, here / "a", "trained")
    assert both["b"].successes == success(here, here / "b", "trained")
    assert both["a"].successes != both["b"].successes


def test_a_role_of_one_run_alone_and_a_model(here: Path) -> None:
    report = cotune.evaluate(here / "only", SOLVE, TASKS, against=here / "a", threads=1)
    roles = report.evaluations["only"].roles
    assert (roles["first"].policies, roles["second"].policies) == (("first-only@1",), ("base of only@0",))
    assert "Role 'second' has no policy: the untrained model answered its 8 calls (other_roles)." in report.notes
    model = cotune.evaluate(here / "only", SOLVE, TASKS, against=here / "one", threads=1)
    assert {one.policies for one in model.evaluations["one"].roles.values()} == {("one@0",)}
    assert model.evaluations["one"].successes == success(here, None, "one", bases=(here / "one",))


def test_ties_are_no_difference(here: Path) -> None:
    """Nobody solves the task, and a run against a checkpoint with the same weights."""
    report = cotune.evaluate(here / "a", UNSOLVED, TASKS, against=here / "b", threads=1)
    assert report.comparisons[0].verdict.startswith("no difference shown between a and b: +0.0 points of success")
    same = cotune.evaluate(here / "a", SOLVE, TASKS, against=f"{here / 'a'}#1", threads=1)
    assert list(same.evaluations) == ["a", "a#1"]
    assert same.comparisons[0].verdict.startswith("no difference shown between a and a#1: +0.0 points of success")


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("a", {"against": "{here}/a"}, "is the run itself"),
        ("a", {"against": "{here}/a/"}, "is the run itself"),
        ("a", {"against": "{here}/b", "modes": ("trained",)}, "modes = 'trained' needs a single run"),
        (None, {"against": "{here}/b", "bases": ("x",)}, "needs a run or an export. Name both as base models"),
        ("a", {"against": "{here}/nothing"}, r"is not a run \(RUN or RUN#STEP\), an export"),
    ],
)
def test_bad_input(here: Path, source: str | None, options: dict[str, Any], said: str) -> None:
    options = options | {"against": options["against"].format(here=here)}
    with pytest.raises(ConfigError, match=said):
        cotune.evaluate(here / source if source else None, SOLVE, TASKS, **options)
    with pytest.raises(ConfigError, match="needs a single run or export, and a team is evaluated"):
        cotune.evaluate({"first": here / "a"}, SOLVE, TASKS, against=here / "b")
