"""A method of the user's own in a run: the example of the documentation, as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.reading.find_runs import open_runs
from cotune.reading.groups import step_groups
from cotune.trainer.config.load import convert
from cotune.trainer.config.resolve import resolve_plan
from tests.test_docs import ROOT
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, letters


@pytest.fixture
def named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The recipe of the page, its file being in the current folder."""
    page = (ROOT / "docs/reference/recipes.md").read_text()
    (code,) = re.findall(r"```python\n(# my_method.py\n.*?)```", page, re.DOTALL)
    (tmp_path / "my_method.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (recipe,) = re.findall(r'^recipe = "(my_method.py:\w+)"$', page, re.MULTILINE)
    return str(recipe)


def test_the_page_s_method_trains_and_is_not_run_by_whoever_looks(
    trainer: Trainer, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = trainer(application(first=letters, second=letters), steps=2, recipe=named)
    assert done.finished and done.versions
    assert "my_method.py:Ranked: scorers for first, second" in trainer.said
    assert all(line["policies"] for line in trainer.metrics())
    assert all(f["clip_share"] == 0.0 for line in trainer.metrics() for f in line["policies"].values())
    Path("my_method.py").write_text("raise SystemExit")
    run = trainer.folder / "run"
    (opened,) = open_runs([run])
    found = step_groups(opened, 1)
    assert found.groups and found.advantages == {} and "my_method.py:Ranked is not run here" in found.problems[-1]
    assert main(["show", str(run), "--groups"]) == 0
    assert "is not run here" in " ".join(capsys.readouterr().out.split())


def test_a_loss_of_ones_own_is_refused_where_its_file_may_not_be(named: str) -> None:
    with pytest.raises(ConfigError, match="cannot be used on a cluster"):
        resolve_plan(convert({"model": "m", "cluster": {}, "recipe": named}), ["first"])
