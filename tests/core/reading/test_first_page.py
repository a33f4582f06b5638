"""Every kind of run has the same first page: a verdict, before and after on named tasks, and the failed tasks."""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from cotune.cli.printing.overview import show_run
from cotune.integrations.web.viewer.pages import build_app
from cotune.integrations.web.viewer.report import report
from cotune.reading.find_runs import FoundRuns
from cotune.reading.first_page import first_page
from cotune.reading.run import OpenedRun
from cotune.terminal import terminal
from tests.core.reading.test_failed_tasks import HELD_OUT, mode, record


def trace(folder: Path) -> None:
    record(folder, 1, 1.0)
    record(folder, 2, 0.0)


def search(folder: Path) -> None:
    for rollout, prompts in enumerate(("", "p" * 64)):
        for number in (1, 2):
            success = float(number == 1)
            record(folder, number, success, phase=HELD_OUT, prompts=prompts, rollout=rollout)
    held_out = {"tasks": 2, "base": 0.5, "best": 0.5, "difference": [-0.1, 0.0, 0.1]}
    (folder / "prompts.json").write_text(json.dumps({"id": "p" * 64, "evaluation": {"held_out": held_out}}))
    about = {"tasks": "/data/all.jsonl", "options": {"evaluation": {"tasks": ""}}}
    (folder / "improve.json").write_text(json.dumps(about))


def describe(folder: Path, **config: Any) -> None:
    about = {"workflow": "app:solve", "tasks": "/data/all.jsonl", "config": {"steps": 1, **config}}
    (folder / "run.json").write_text(json.dumps(about))
    line = {
        **{"step": 0, "outcome": {}, "roles": {"r": {"reward": 0.5, "loss": 0.5}}, "left_out": {}, "seconds": {}},
        **{"counters": {}, "episodes": 2, "rows": 2, "calls": 2, "candidates": 2, "groups": 1},
    }
    (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")


def train(folder: Path) -> None:
    for number in (1, 2):
        record(folder, number, float(number == 1), phase="train", training_step=0)
    describe(folder)


def evaluate(folder: Path, tasks: str) -> None:
    figures = {
        name: {"mean": mean, "low": 0.0, "high": 1.0, "n": 2} for name, mean in (("base", 0.25), ("trained", 0.5))
    }
    modes = {"base": mode({1: 0.0, 2: 0.0}), "trained": mode({1: 1.0, 2: 0.0})}
    evaluations = {name: {**one, "success": figures[name]} for name, one in modes.items()}
    compared = {"label": "trained", "against": "base", "verdict": "no difference shown between trained and base"}
    about = {"evaluations": evaluations, "comparisons": [compared], "tasks": tasks, "steps": 1}
    folder.parent.mkdir(exist_ok=True)
    folder.write_text(json.dumps(about))


def train_and_evaluate(folder: Path) -> None:
    train(folder)
    record(folder, 1, 1.0, phase="eval", training_step=0)
    record(folder, 2, 0.0, phase="eval", training_step=0)
    evaluate(folder / "held_out" / "step-000001.json", "")


def evaluation(folder: Path) -> None:
    record(folder, 1, 1.0, phase="eval-trained")
    record(folder, 2, 0.0, phase="eval-trained")
    evaluate(folder / "evaluation.json", "/data/test.jsonl")


def learn(folder: Path) -> None:
    folder.mkdir()
    describe(folder, recipe="sft", records={"path": "/data/records.db"})


KINDS: dict[Callable[[Path], None], tuple[str, str]] = {
    trace: ("1 of 2 tasks solved; there is nothing to compare them with", "success"),
    search: ("no difference shown: 0 (95% interval -0.1 to 0.1) on 2 held-out tasks", "tasks held out of all.jsonl"),
    train: ("no verdict: the trained policies were not compared with the base on held-out tasks", "reward of r"),
    train_and_evaluate: ("no difference shown between trained and base", "tasks held out of all.jsonl"),
    evaluation: ("no difference shown between trained and base", "test.jsonl"),
    learn: ("no verdict: the run learned from recorded answers and was not tried on held-out tasks", "loss of r"),
}


def screens(folder: Path) -> dict[str, str]:
    """The first page in the terminal, in the viewer and as a file, without mark-up and white space."""
    out = io.StringIO()
    terminal(file=out, width=200).print(show_run(folder))
    runs = FoundRuns([folder])
    found = {
        "show": out.getvalue(),
        "view": TestClient(build_app(runs), base_url="http://127.0.0.1").get("/run/r1").text,
        "html": report(runs.opened["r1"], {}),
    }
    runs.close()
    texts = {}
    for name, page in found.items():
        plain = page if name == "show" else re.sub(r"<(style|script).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
        texts[name] = " ".join(html.unescape(plain).split())
    return texts


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_verdict_figures_and_failed_tasks_come_first(tmp_path: Path, kind: Callable[[Path], None]) -> None:
    kind(tmp_path / "r1")
    verdict, figure = KINDS[kind]
    for name, said in screens(tmp_path / "r1").items():
        at = [said.index(verdict), said.index(figure, said.index(verdict))]
        if kind is learn:
            at.append(said.index("No failed tasks: this run ran none."))
        else:
            at += [said.index(text) for text in ("Failed tasks, worst first", "2 + 1?", "it is 2")]
            at.append(said.index("3", at[-1] + len("it is 2")))
        assert at == sorted(at), (name, at)
        # The names of the pages stand above the verdict.
        later = [
            said.find(text, at[0]) for text in ("phase episodes", "Curves", "by step:", "Latest episodes", "all curves")
        ]
        assert all(place < 0 or place > at[-1] for place in later), name


def test_the_overview_has_one_held_out_success_with_its_tasks_and_their_number(tmp_path: Path) -> None:
    """Beside an evaluation of another file, training's own held-out figures are on the page of curves alone."""
    train_and_evaluate(tmp_path / "r1")
    line = json.loads((tmp_path / "r1" / "metrics.jsonl").read_text())
    line["held_out"] = {"success": 0.922, "success_n": 51}
    (tmp_path / "r1" / "metrics.jsonl").write_text(json.dumps(line) + "\n")

    def pages() -> tuple[str, str]:
        runs = FoundRuns([tmp_path / "r1"])
        client = TestClient(build_app(runs), base_url="http://127.0.0.1")
        found = client.get("/run/r1").text, client.get("/run/r1/curves").text
        runs.close()
        return found

    overview, curves = pages()
    assert "Success on held-out tasks" in overview and "Tasks: tasks held out of all.jsonl." in overview

    evaluate(tmp_path / "r1" / "eval" / "evaluation.json", "/data/test.jsonl")
    overview, curves = pages()
    tile = " ".join(re.sub(r"<[^>]+>", " ", overview).split())
    assert "held-out success test.jsonl 50.0% trained 0.0% – 100.0% 2 tasks" in tile
    assert "Success on held-out tasks" not in overview and "0.922" not in overview
    assert "Success on held-out tasks" in curves and "0.922" in curves


def test_a_run_without_a_verdict_names_the_command_for_one(tmp_path: Path) -> None:
    train(tmp_path / "my run")
    with OpenedRun(tmp_path / "my run") as run:
        command = first_page(run, 5).command
    assert command == f"cotune eval app:solve --tasks held_out.jsonl --run '{tmp_path / 'my run'}'"


def test_a_comparison_of_edited_prompts_is_found_beside_its_episodes(tmp_path: Path) -> None:
    """`cotune prompts edit --tasks` writes the figures into prompts.json, and the episodes into a folder next to it."""
    folder = tmp_path / "compared-1"
    search(folder)
    (folder / "prompts.json").rename(tmp_path / "prompts.json")
    with OpenedRun(folder) as run:
        assert run.headline.changes == (), "it may be the comparison of another folder"
    found = json.loads((tmp_path / "prompts.json").read_text())
    found["evaluation"]["records"] = str(folder)
    (tmp_path / "prompts.json").write_text(json.dumps(found))
    with OpenedRun(folder) as run:
        assert run.headline.verdict.startswith("no difference shown")
