"""Keys in the configuration of a cluster are nowhere in a run folder, nor at a tracker; resume asks for them."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.integrations.web.viewer.overview import settings
from cotune.reading.run import OpenedRun
from cotune.storage.run_layout import WITHHELD, read_run_json
from cotune.trainer import train
from cotune.trainer.config.load import convert
from cotune.trainer.config.withheld import with_values, without_variables
from cotune.trainer.reporting import loggers
from cotune.trainer.run.run_folder import RunFolder
from tests.trainer.tiny_app import application, letters

KEYS = {"FIRST_KEY": "sk-first-secret", "OTHER_KEY": "sk-other-secret"}
CLUSTER = {
    "address": "local",
    "env": {"FIRST_KEY": KEYS["FIRST_KEY"]},
    "runtime_env": {"env_vars": {"OTHER_KEY": KEYS["OTHER_KEY"]}, "pip": ["x"]},
}
CONFIG = {"model": "m", "cluster": CLUSTER, "loggers": ["trackio"]}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = RunFolder.create(tmp_path / "run", convert(CONFIG), workflow=None, tasks=None)
    folder.close()
    return folder.path


def test_a_run_folder_holds_the_names_and_no_values(run: Path) -> None:
    assert all(b"secret" not in file.read_bytes() for file in run.rglob("*") if file.is_file())
    cluster = read_run_json(run)["config"]["cluster"]
    assert cluster["env"] == {"FIRST_KEY": WITHHELD}
    assert cluster["runtime_env"] == {"env_vars": {"OTHER_KEY": WITHHELD}, "pip": ["x"]}


def test_a_tracker_is_not_told_them(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}
    monkeypatch.setattr(loggers, "Tracker", lambda *args, **more: SimpleNamespace(settings=told.update, id="1"))
    loggers._open_tracker("trackio", convert(CONFIG), run, 0)
    assert told["cluster.env.FIRST_KEY"] == WITHHELD and "secret" not in str(told)


def old_run(run: Path) -> dict[str, Any]:
    """Make a run one that holds values, as those of earlier versions do."""
    described = read_run_json(run)
    described["config"]["cluster"] |= {"env": CLUSTER["env"], "runtime_env": CLUSTER["runtime_env"]}
    described["changes"] = [{"step": 1, "changed": {"cluster.env.FIRST_KEY": ["sk-older-secret", "sk-first-secret"]}}]
    (run / "run.json").write_text(json.dumps(described))
    return described


def test_values_that_an_old_run_holds_are_not_shown(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old_run(run)
    with contextlib.closing(OpenedRun(run, "run")) as opened:
        shown = settings(opened)
    assert shown["cluster.env.FIRST_KEY"] == shown["cluster.runtime_env.env_vars.OTHER_KEY"] == WITHHELD
    assert "cluster.env.FIRST_KEY" in str(shown["changes"]) and "secret" not in str(shown)
    for words in (["show", str(run)], ["show", str(run.parent)], ["show", str(run), "--html", str(run / "r.html")]):
        main(words)
    assert "secret" not in "".join(capsys.readouterr()) + (run / "r.html").read_text()


def test_resume_takes_values_out_of_an_old_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old_run(run)
    monkeypatch.setattr(train, "check_tools", lambda tools: None)
    monkeypatch.setattr(train, "run_sync", lambda work: work.close())
    monkeypatch.setattr(train, "locate_base", lambda model, of: None)
    used: list[Any] = []

    async def nothing(*args: Any) -> None: ...

    monkeypatch.setattr(train, "_train", lambda *args, **_: used.extend(args[1:2]) or nothing())
    train.resume(run, workflow=application(first=letters), tasks=[{"id": "t"}])
    assert used[0].cluster.env == CLUSTER["env"]
    assert b"secret" not in (run / "run.json").read_bytes()


def test_resume_asks_for_what_is_missing_before_work_starts(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST_KEY", "sk-1")
    with pytest.raises(ConfigError, match=r"\(OTHER_KEY\).*export OTHER_KEY=") as raised:
        train.resume(run, workflow=application(first=letters), tasks=[{"id": "t"}])
    assert "sk-1" not in str(raised.value)


def test_resume_takes_them_from_the_environment_or_from_what_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    config = convert(CONFIG)
    monkeypatch.setenv("FIRST_KEY", "sk-1")
    monkeypatch.setenv("OTHER_KEY", "sk-2")
    filled = convert(with_values(without_variables(config), {"cluster": {"env": {"FIRST_KEY": "sk-given"}}}))
    assert filled.cluster.env == {"FIRST_KEY": "sk-given"}
    assert filled.cluster.runtime_env["env_vars"] == {"OTHER_KEY": "sk-2"}
    before = msgspec.structs.replace(config, cluster=convert({"model": "m"}).cluster)
    assert convert(with_values(without_variables(before), {})) == before


def test_a_key_that_is_changed_is_recorded_by_its_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(train, "check_tools", lambda tools: None)
    monkeypatch.setattr(train, "run_sync", lambda work: work.close())
    monkeypatch.setattr(train, "locate_base", lambda model, of: None)
    notes: list[str] = []

    async def nothing(folder: RunFolder, *args: Any) -> None: ...

    monkeypatch.setattr(train, "_train", lambda *args, **_: notes.extend(args[-1]) or nothing(args[0]))
    changes = {"cluster.env.NEW_KEY": "sk-new-secret", "steps": 7}
    train.resume(run, workflow=application(first=letters), tasks=[{"id": "t"}], changes=changes)
    assert "changed: cluster.env.NEW_KEY" in notes and "secret" not in str(notes)
    assert b"secret" not in (run / "run.json").read_bytes()
    assert read_run_json(run)["config"]["cluster"]["env"]["NEW_KEY"] == WITHHELD
