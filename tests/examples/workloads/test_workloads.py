"""What every published workload is: an application that runs alone, and under each command of cotune.

A workload joins by a line in `WORKLOADS`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.serving import serving
from cotune.cli.main import main
from cotune.episodes.workflows import workflow_of
from cotune.storage.metrics_file import read_metrics
from cotune.storage.run_layout import RunLayout
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import load_config
from tests.examples.applications import check_knows_nothing_of_cotune, imported_again
from tests.examples.speaker import build_speaker

ROOT = Path(__file__).parents[3]
SHAPE = ("app.py", "train.py", "tasks.py", "verifier.py", "README.md", "train.toml")
SCREEN = 60
"""Lines of a README that are one screen."""


@dataclass(frozen=True)
class Workload:
    """A folder of `examples/workloads/`, the roles in it, and messages that these could say: some solve one of the two
    tasks that `make_tasks(2, seed=0, **tasks)` gives, or earn more than others."""

    name: str
    roles: tuple[str, ...]
    says: tuple[str, ...]
    tasks: Mapping[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    """Further options of `cotune train`."""
    flow: str = "solve"
    """The workflow in `train.py`; where it is one of several, the game that the application is told to play."""
    recipe: str = "dr_mas"
    """Of independent episodes."""
    sees: bool = False
    """Whether its model sees images."""

    @property
    def folder(self) -> Path:
        return ROOT / "examples" / "workloads" / self.name

    @property
    def workflow(self) -> str:
        return f"examples.workloads.{self.name}.train:{self.flow}"


_TEST = "**Test Input:**\n```\n{}\n```\n**Test Output:**\n```\n{}\n```"
_RUN = '<tool_call>{{"name": "run_python", "arguments": {{"program": "{}"}}}}</tool_call>'
_WALK = '<tool_call>{{"name": "walk", "arguments": {{"path": "{}"}}}}</tool_call>'
WORKLOADS = (
    Workload(
        "code",
        ("coder", "tester"),
        ("```python\nprint(0)\n```", "```python\nprint(input())\n```", _TEST.format("1 2", "0"), "I do not know."),
    ),
    Workload(
        "code_team",
        ("coder", "planner"),
        (
            *(_RUN.format(f"print('{answer}')") for answer in ("up up up up left left left left", "up", "?")),
            "accept",
            "reject",
        ),
    ),
    Workload("sudoku", ("planner", "filler"), ("r1c3", "r1c1", "r1c3=2", "r4c3=3", "r1c1=1", "none"), {"empty": 1}),
    Workload("search", ("writer", "reader", "answerer"), ("Fenn", "Dara", "salt", "nothing at all")),
    Workload(
        "maths",
        ("reasoner", "tool_user", "judge"),
        ("Answer: 28080", "Answer: 7", "```python\nprint(28080)\n```", "I do not know."),
    ),
    Workload(
        "self_play",
        ("first", "second"),
        ("accept", "offer me 3 lamp you 3 cup 1 hat", "offer me 3 lamp you 1 ball 3 pen"),
        {"game": "negotiation"},
        ("--recipe", "at_grpo"),
        flow="negotiation",
        recipe="spiral",
    ),
    Workload(
        "self_play",
        ("affirmative", "negative", "judge"),
        ("yes", "no", '"Ada is richer than Emil"'),
        {"game": "debate"},
        ("--recipe", "at_grpo"),
        flow="debate",
        recipe="spiral",
    ),
    Workload(
        "pictures",
        ("describer", "solver"),
        ("goal right=4 up=1 walls down left", "goal left=2 down=1 walls up", "right", "left", "up", "down"),
        sees=True,
    ),
    Workload("sokoban", ("planner", "executor"), ("2,2 right", "right right", "down left up", "I do not know.")),
    Workload(
        "plan_path_checked",
        ("planner", "checker"),
        ("up", "left left", *(_WALK.format(path) for path in ("up", "left", "left left", "down"))),
        {"size": 4},
    ),
)


SHORT = ("search-solve", "self_play-debate", "pictures-solve", "plan_path_checked-solve")
"""A workload of plain messages, a game, one with images, and one with tools. `make test-long` takes the others through
the same commands; what is particular to each has tests of its own."""

ONE_FOR_EACH_RECIPE = [
    workload
    if workload.flow == "debate" or workload.name == "search"
    else pytest.param(workload, marks=pytest.mark.long)
    for workload in WORKLOADS
]
"""A workload for each recipe of independent episodes; `make test-long` repeats these tests with the others."""


def name_of(workload: Workload) -> str:
    return f"{workload.name}-{workload.flow}"


MARKED = [
    workload if name_of(workload) in SHORT else pytest.param(workload, marks=pytest.mark.long) for workload in WORKLOADS
]


@pytest.fixture(scope="module", params=MARKED, ids=name_of)
def workload(request: pytest.FixtureRequest) -> Workload:
    return request.param


@pytest.fixture(scope="module")
def base(workload: Workload, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that says what the workload's roles could say."""
    return build_speaker(tmp_path_factory.mktemp(workload.name) / "base", workload.says, sees=workload.sees)


@pytest.fixture(scope="module")
def tasks(workload: Workload, base: Path) -> Path:
    made = importlib.import_module(f"examples.workloads.{workload.name}.tasks").make_tasks(2, seed=0, **workload.tasks)
    (base.parent / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in made))
    return base.parent / "tasks.jsonl"


@pytest.fixture(scope="module")
def no_provider(in_thread: None) -> Iterator[None]:
    """The sampler in a thread, and no provider behind it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
        patch.setenv("OPENAI_API_KEY", "none")
        yield


@pytest.fixture(scope="module")
def run(workload: Workload, base: Path, tasks: Path, no_provider: None) -> Path:
    """A run of two steps by train.toml, but for model and size: a tree of candidates."""
    return trained(workload, base, tasks, "tree")


def trained(workload: Workload, base: Path, tasks: Path, plan: str, *options: str) -> Path:
    out = base.parent / plan
    words = ["train", workload.workflow, "--config", str(workload.folder / "train.toml"), "--tasks", str(tasks)]
    words += [
        "--model",
        str(base),
        "--steps",
        "2",
        "--tasks-per-step",
        "1",
        "--plan",
        plan,
        "--set",
        "sampling.max_tokens=4",
    ]
    words += ["--lr", "1e-3", *workload.options, *options, "--out", str(out)]
    assert main(words) == 0
    return out


def check_trained(run: Path, workload: Workload) -> None:
    """Both steps were made, each role was trained on, and nothing failed."""
    lines = list(read_metrics(run))
    assert [line["step"] for line in lines] == [0, 1]
    assert sum(line["rows"] for line in lines) > 0
    assert all(line["rows"] + sum(line["left_out"].values()) == line["candidates"] for line in lines)
    assert roles_recorded(run) == set(workload.roles)


def roles_recorded(folder: Path) -> set[str]:
    store = SqliteStore.open(RunLayout(folder).records)
    try:
        calls = [call for episode in store.episodes() for call in store.calls(episode.id)]
    finally:
        store.close()
    assert {call.status for call in calls} == {"ok"}
    return {call.role for call in calls}


@pytest.mark.parametrize("workload", WORKLOADS, ids=name_of)
def test_it_has_the_shape_of_a_workload(workload: Workload) -> None:
    assert [name for name in SHAPE if not (workload.folder / name).is_file()] == []
    assert len((workload.folder / "README.md").read_text().splitlines()) <= SCREEN
    for path in workload.folder.glob("*.py"):
        if path.name not in ("train.py", "base.py", "demo.py"):
            check_knows_nothing_of_cotune(path)


def test_it_runs_alone_and_under_trace_against_what_cotune_serves(
    workload: Workload, base: Path, tasks: Path, in_thread: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both in this process: importing a framework takes longer than two tasks."""
    program = f"examples.workloads.{workload.name}.app"
    alone = [program, "--tasks", "2", *([] if workload.flow == "solve" else ["--game", workload.flow])]
    out = base.parent / "traced"
    traced = ["trace", workload.workflow, "--tasks", str(tasks), "--out", str(out)]
    with pytest.MonkeyPatch.context() as patch, serving(base, names=workload.roles) as endpoint:
        patch.setenv("OPENAI_BASE_URL", endpoint.url)
        patch.setenv("OPENAI_API_KEY", "none")
        with imported_again("examples."):
            patch.setattr(sys, "argv", alone)
            runpy.run_module(program, run_name="__main__", alter_sys=True)
            said = capsys.readouterr().out
        with imported_again("examples."):
            assert main(traced) == 0
    assert re.search(r"\d+ of 2 [a-z ]+\n$", said), said
    assert roles_recorded(out) == set(workload.roles)


def test_check_says_that_every_role_would_be_trained(
    workload: Workload, base: Path, tasks: Path, tmp_path: Path, no_provider: None
) -> None:
    report = tmp_path / "check.json"
    words = ["check", workload.workflow, "--tasks", str(tasks), "--model", str(base), "--json", str(report)]
    assert main(words) == 0
    found: dict[str, Any] = json.loads(report.read_text())
    assert set(workload.roles) <= set(re.findall(r"\w+", json.dumps(found["roles"])))


def test_it_trains_by_its_settings_with_a_tree_of_candidates(workload: Workload, run: Path) -> None:
    check_trained(run, workload)


@pytest.mark.parametrize("workload", ONE_FOR_EACH_RECIPE, ids=name_of, indirect=True)
def test_it_trains_on_independent_episodes(workload: Workload, base: Path, tasks: Path, no_provider: None) -> None:
    check_trained(trained(workload, base, tasks, "independent", "--recipe", workload.recipe), workload)


@pytest.mark.parametrize("workload", ONE_FOR_EACH_RECIPE, ids=name_of, indirect=True)
def test_it_is_evaluated_and_exported(workload: Workload, run: Path, tasks: Path, no_provider: None) -> None:
    out, exported = run.parent / "eval", run.parent / "export"
    words = ["eval", workload.workflow, "--run", str(run), "--tasks", str(tasks), "--modes", "base,trained"]
    assert main([*words, "--out", str(out)]) == 0
    found = json.loads((out / "evaluation.json").read_text())
    assert set(re.findall(r"\b(base|trained)\b", json.dumps(found))) == {"base", "trained"}
    assert main(["export", str(run), "--out", str(exported)]) == 0
    manifest = json.loads((exported / "roles.json").read_text())
    assert set(workload.roles) <= set(re.findall(r"\w+", json.dumps(manifest)))


def test_what_is_compared_has_a_base_model_a_single_agent_and_settings_for_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the benchmark would set
    compared = importlib.import_module("benchmarks.workloads")
    named = {"search", "sokoban", "sudoku", "maths", "code", "plan_path", "pictures", "noughts"}
    assert named <= set(compared.WORKLOADS)
    for name, kind in compared.WORKLOADS.items():
        trainings = compared.Trainings(name, 0, argparse.Namespace(out=Path("nowhere")))
        assert callable(trainings.part("base").build)
        flows = {training: trainings.flow(training) for training in compared.TRAININGS}
        found = {training: workflow_of(flow) for training, flow in flows.items() if flow is not None}
        assert found["by_role"] is found["shared"] and (found["alone"] is found["by_role"]) == bool(kind.opponent)
        assert ("without_tool" in found) == (name in ("sudoku", "maths"))
        assert load_config(ROOT / "examples" / "workloads" / kind.example / "small.toml", {}).plan.k >= 8
        assert len(trainings.tasks(3, 900, **kind.opponent)) == 3


@pytest.mark.parametrize(
    "name",
    [
        "pictures",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("sudoku", "maths", "code")),
    ],
)
def test_a_single_agent_is_trained_from_the_base_model_of_a_workload(
    name: str, tmp_path: Path, no_provider: None
) -> None:
    base, tasks, out = tmp_path / "base", tmp_path / "tasks.jsonl", tmp_path / "run"
    importlib.import_module(f"examples.workloads.{name}.base").build(base, steps=2, count=48)
    made = importlib.import_module(f"examples.workloads.{name}.tasks").make_tasks(1)
    tasks.write_text(json.dumps(made[0]) + "\n")
    words = [
        "train",
        f"examples.workloads.{name}.train:alone",
        "--config",
        str(ROOT / "examples" / "workloads" / name / "small.toml"),
    ]
    words += ["--model", str(base), "--tasks", str(tasks), "--steps", "1", "--tasks-per-step", "1", "--out", str(out)]
    assert main(words) == 0
    assert roles_recorded(out) == {"agent"}
