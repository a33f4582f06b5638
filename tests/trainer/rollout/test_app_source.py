"""How an application travels: import path, folder, import paths, environment."""

from __future__ import annotations

import os
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.config.cluster import ClusterConfig
from cotune.config.train import TrainConfig
from cotune.episodes.workflows import workflow_of
from cotune.errors import ConfigError
from cotune.trainer.rollout.app_source import app_source, import_path
from tests.trainer import worker_app
from tests.trainer.tiny_app import application, letters


def configured(**cluster: Any) -> TrainConfig:
    return TrainConfig(model="base", cluster=ClusterConfig(address="local", **cluster))


def test_a_workflow_without_an_import_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be imported by rollout workers") as refused:
        import_path(workflow_of(application(first=letters)))
    assert "tiny_app.py:" in str(refused.value)
    assert 'pass "module:name"' in refused.value.remedy


def test_an_object_is_found_by_its_module() -> None:
    assert import_path(workflow_of(worker_app.solve)) == "tests.trainer.worker_app:solve"
    redacted = workflow_of(worker_app.solve).redacted(None, keep_token_ids=True)
    assert import_path(redacted) == "tests.trainer.worker_app:solve"


def test_an_object_of_the_script_itself_is_found_by_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    script = types.ModuleType("__main__")

    @cotune.workflow
    def solve(task: object) -> float:
        return 1.0

    script.solve = solve
    monkeypatch.setitem(sys.modules, "__main__", script)
    for file, path in (("/somewhere/script.py", "/somewhere/script.py"), (f"{Path.cwd()}/a/b.py", "a/b.py")):
        script.__file__ = file
        assert import_path(workflow_of(solve)) == f"{path}:solve"


def test_what_a_worker_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    monkeypatch.setenv("LANGCHAIN_TRACING_V2", "false")
    monkeypatch.setenv("SECRET_OF_MINE", "no")
    monkeypatch.setattr(sys, "path", ["", "/usr/lib", *sys.path])
    source = app_source("app.py:solve", configured(env={"MINE": "1", "OPENAI_API_KEY": "other"}))
    assert source.path == "app.py:solve"
    assert source.folder == str(tmp_path)
    assert source.sys_path[:2] == (str(tmp_path), "/usr/lib")
    assert source.env["OPENAI_API_KEY"] == "other"
    assert source.env["LANGCHAIN_TRACING_V2"] == "false"
    assert source.env["MINE"] == "1"
    assert "SECRET_OF_MINE" not in source.env
    assert "PATH" not in source.env


def test_a_working_dir_of_ray_replaces_the_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", str(tmp_path), "/usr/lib"])
    source = app_source("app.py:solve", configured(runtime_env={"working_dir": "."}))
    assert source.path == "app.py:solve"
    assert source.folder is None
    assert source.sys_path == ("/usr/lib",)


def test_loading_makes_the_process_like_the_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = "import os, cotune\nassert os.environ['ITS_KEY'] == 'k' and os.path.exists('app_of_folder.py')\n"
    (tmp_path / "app_of_folder.py").write_text(f"{text}@cotune.workflow\ndef solve(task): return 1.0\n")
    monkeypatch.setenv("ITS_KEY", "before")
    monkeypatch.setattr(sys, "path", list(sys.path))
    here = Path.cwd()
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        source = app_source("app_of_folder:solve", configured(env={"ITS_KEY": "k"}))
        os.chdir(here)
        flow = source.load()
        assert Path.cwd() == tmp_path
    assert flow.name == "solve"
    assert sys.modules.pop("app_of_folder").__file__ == f"{tmp_path}/app_of_folder.py"
