"""`cotune eval --base`: untrained models on the same tasks, before any run exists."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.policies import open_models
from tests.integrations.provider import Provider
from tests.integrations.provider import serving as serving_provider
from tests.trainer.tiny_app import application, ask, build_base

TASKS = [{"id": letter, "letter": letter} for letter in "abcdefgh"]
ME = "tests.trainer.evaluation.test_base_models"

pytestmark = pytest.mark.usefixtures("in_thread", "no_provider")


async def twice(task: Any) -> dict[str, Any]:
    """Two roles; the first speaks twice. Solved if an answer has the letter."""
    heard = await ask("first", f"say {task['letter']}")
    said = await ask("second", f"after {heard}: {task['letter']}")
    await ask("first", f"well {said}")
    return {"team": said.count(task["letter"]) / 4, "success": task["letter"] in heard + said}


async def unsolved(task: Any) -> bool:
    await ask("first", f"say {task['letter']}")
    return False


SOLVE, UNSOLVED = application(twice), application(unsolved)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models of other weights, and the tasks."""
    folder = tmp_path_factory.mktemp("models")
    build_base(folder / "one")
    build_base(folder / "two", seed=1)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    return folder


@pytest.fixture
def no_provider(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    with serving_provider() as made:
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        yield made


def command(models: Path, *more: str, app: str = "SOLVE") -> list[str]:
    return ["eval", f"{ME}:{app}", "--tasks", str(models / "tasks.jsonl"), *more]


def test_two_models_and_today_are_compared_on_the_same_tasks(
    models: Path, provider: Provider, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--base", str(models / "one"), "--base", str(models / "two"), "--modes", "today"]
    words += ["--price", "two=10/20", "--temperature", "1", "--out", str(tmp_path / "out")]
    assert main(command(models, *words)) == 0
    written = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert list(written["evaluations"]) == ["one", "two", "today"]
    assert [(c["label"], c["against"]) for c in written["comparisons"]] == [
        ("two", "one"), ("one", "today"), ("two", "today"),
    ]  # fmt: skip
    players = {
        mode: {role: r["policies"] for role, r in e["roles"].items()} for mode, e in written["evaluations"].items()
    }
    assert players["one"] == {"first": ["one@0"], "second": ["one@0"]}
    assert players["two"] == {"first": ["two@0"], "second": ["two@0"]}
    use = written["evaluations"]["two"]["use"]
    assert use["cost"] == pytest.approx((use["prompt_tokens"] * 10 + use["completion_tokens"] * 20) / 1e6)
    assert written["evaluations"]["one"]["use"]["cost"] is None
    said = " ".join(capsys.readouterr().out.split())
    assert all(c["verdict"] in said for c in written["comparisons"])
    assert "has no policy" not in said and "export" not in said
    with SqliteStore.open(tmp_path / "out", read_only=True) as store:
        answers = {
            mode: {
                (e.task.id, c.role, c.turn): (c.candidates[0].text, c.sampling["seed"])
                for e in store.episodes(EpisodeFilters(phase=f"eval-{mode}"))
                for c in store.calls(e.id)
            }
            for mode in ("one", "two")
        }
    one, two = answers["one"], answers["two"]
    assert one.keys() == two.keys() and len(one) == 24
    assert {place: seed for place, (_, seed) in one.items()} == {place: seed for place, (_, seed) in two.items()}
    assert [text for text, _ in one.values()] != [text for text, _ in two.values()], "other weights answer otherwise"


def test_a_model_answers_as_it_does_alone(models: Path) -> None:
    """The second engine of two is the model that it says it is."""
    both = cotune.evaluate(None, SOLVE, TASKS, bases=(models / "one", models / "two"))
    alone = cotune.evaluate(None, SOLVE, TASKS, bases=(models / "two",))
    assert both.evaluations["two"].successes == alone.evaluations["two"].successes
    assert both.evaluations["one"].successes != both.evaluations["two"].successes
    assert alone.comparisons == () and alone.notes[-1].startswith("Not stored: ")


def test_when_nobody_solves_a_task_no_model_is_called_better(models: Path) -> None:
    report = cotune.evaluate(None, UNSOLVED, TASKS, bases=(models / "one", models / "two"))
    assert [e.success.mean for e in report.evaluations.values() if e.success] == [0.0, 0.0]
    assert report.comparisons[0].verdict.startswith("no difference shown between two and one: +0.0 points of success")


def test_models_with_one_name_are_told_apart_by_their_paths(models: Path, tmp_path: Path) -> None:
    (tmp_path / "one").symlink_to(models / "one")
    (tmp_path / "base").symlink_to(models / "one")
    names = [policy.name for policy in open_models([models / "one", tmp_path / "one"]).policies]
    assert names == [str(models / "one"), str(tmp_path / "one")]
    assert open_models([tmp_path / "base"]).policies[0].name == str(tmp_path / "base"), "base is a mode"
    with pytest.raises(ConfigError, match="is named twice"):
        open_models([models / "one", models / "one"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--run is missing. Name a run or an export (--run), a team (--use ROLE=SOURCE), or base models (--base)."),
        (["--run", "{models}/one", "--base", "{models}/two"], "cannot be combined with --base"),
        (["--run", "{models}/one"], "is a model, not a run or an export. Evaluate the model alone: --base"),
        (["--base", "{models}/three"], "bases = '{models}/three' is not a model folder or GGUF file"),
        (["--base", "{models}/one", "--modes", "base,trained"], "needs a single run, export or team"),
        (["--base", "{models}/one", "--model", "{models}/two"], "and no run is evaluated"),
        (["--base", "{models}/one", "--modes", "best"], "modes = 'best' is not one of"),
    ],
)
def test_bad_input_is_refused_before_a_model_is_loaded(
    words: list[str], said: str, models: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cotune.trainer.evaluation.policies.open_engines", None)
    assert main(command(models, *(word.format(models=models) for word in words))) == 1
    assert said.format(models=models) in capsys.readouterr().err
