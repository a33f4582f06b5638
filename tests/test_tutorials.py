"""The tutorials, followed line by line in their order: applications and commands are real, the provider is scripted,
and the model to train is small."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from cotune.adapters.serving import serving as serving_model
from cotune.cli.main import main
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, completion, json_reply, serving
from tests.integrations.tiny_models import build_bytes
from tests.page_reader import Reader
from tests.test_docs import ROOT

pytestmark = pytest.mark.slow

SMALLER = shlex.split("--steps 1 --tasks-per-step 2 -k 2 --set sampling.max_tokens=4")
FEWER = {"--modes base,trained": "--modes trained", "--out runs/traced": "--out runs/traced --limit 2"}
PAGES = {
    "../start": ["triage", "writer"],
    "langgraph": ["llm_call"],
    "autogen": ["critic", "primary"],
    "crewai": ["reporting analyst", "researcher"],
    "openai": ["planner", "writer"],
    "other-languages": ["planner", "writer"],
}
"""Tutorials, and the roles that each trains."""


class Here(Reader):
    """Runs commands and models in this process, which spares each the start of an interpreter."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], smaller: dict[str, str]) -> None:
        super().__init__(folder, {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}, smaller)
        self._capsys = capsys
        self._open = contextlib.ExitStack()

    def serve(self, words: list[str], port: int) -> None:
        if words[1] != "serve":
            return super().serve(words, port)
        names = [name for flag, name in pairwise(words) if flag == "--role"]
        self._open.enter_context(serving_model(words[2], names=names, port=port))
        return None

    def _forget_application(self) -> None:
        """Let the next command import the application again: clients that it made read the environment then."""
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                del sys.modules[name]

    def _keep_few_tasks(self) -> None:
        """Shorten the files of tasks that a program has written: evaluations go through all of them."""
        for file in self.folder.glob("*.jsonl"):
            file.write_text("".join(file.read_text().splitlines(keepends=True)[:6]))

    def stop(self) -> None:
        super().stop()
        self._open.close()

    def run(self, command: str) -> tuple[int, str]:
        words, given = shlex.split(command), dict(self.environment)
        while "=" in words[0]:
            name, _, value = words.pop(0).partition("=")
            given[name] = value
        if given != self.environment:
            self._forget_application()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in given.items():
                patch.setenv(name, value)
            match words:
                case ["cotune", *arguments]:
                    status = main([*arguments, *(SMALLER if arguments[0] == "train" else [])])
                case ["python", "-m", module, *arguments]:
                    patch.setattr(sys, "argv", [module, *arguments])
                    runpy.run_module(module, run_name="__main__", alter_sys=False)
                    self._keep_few_tasks()
                    status = 0
                case ["python", script, *arguments]:
                    patch.setattr(sys, "argv", [script, *arguments])
                    runpy.run_path(script, run_name="__main__")
                    status = 0
                case _:
                    return super().run(command)
        out, err = self._capsys.readouterr()
        return status, out + err


def answer(body: dict[str, Any], number: int) -> tuple[int, str, list[Any]]:
    """A provider that calls its first tool once, and else says something that ends well."""
    if body.get("tools") and body["messages"][-1]["role"] == "user":
        call = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps({"a": 3, "b": 4})}
        return json_reply(completion({"role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function", "function": call}
        ]}))  # fmt: skip
    return json_reply(completion({"role": "assistant", "content": "It says 7 . APPROVE"}))


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    with serving() as made:
        made.reply = answer
        monkeypatch.setenv("OPENAI_BASE_URL", made.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        yield made


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "Qwen3-1.7B"
    build_bytes(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 2048}))
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_a_tutorial_works_as_it_stands(
    page: str,
    provider: Provider,
    small_model: Path,
    in_thread: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.delitem(sys.modules, "app", raising=False)  # of an earlier test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    smaller = {"Qwen/Qwen3-1.7B": str(small_model), "https://api.openai.com/v1": provider.url}
    reader = Here(tmp_path, capsys, {**smaller, "max_tokens=256": "max_tokens=8", **FEWER})
    reader.follow((ROOT / "docs" / "tutorials" / f"{page}.md").resolve())

    checks = [text for line, text in reader.said.items() if line.startswith("cotune check")]
    assert checks and all(re.search(r"^trainable\b", text, re.MULTILINE) for text in checks)
    (run,) = [path.parent for path in tmp_path.glob("runs/*/metrics.jsonl")]
    (step,) = read_metrics(run)
    assert step["candidates"] > 1 and step["failed"] == 0
    exported = json.loads(next(tmp_path.glob("*/roles.json")).read_text())
    assert sorted(entry["role"] for entry in exported["roles"]) == PAGES[page]
    with SqliteStore.open(tmp_path / "runs" / "traced", read_only=True) as store:
        assert {episode.status for episode in store.episodes()} == {"ok"}
    asked = len(provider.requests)
    assert page != "../start" or (asked == 0 and (tmp_path / "report.html").is_file())
    for script in tmp_path.glob("*_trained.py"):
        runpy.run_path(str(script), run_name="__main__")
        assert capsys.readouterr().out
    assert len(provider.requests) == asked, "the trained policies answer, not the provider"


def obedient(body: dict[str, Any], number: int) -> tuple[int, str, list[Any]]:
    """A provider whose jokes have what their prompt asks for, and that knows one rule to add to a prompt."""
    text = body["messages"][-1]["content"]
    if body["model"] == "gpt-5-mini":
        now = text.partition("<text>\n")[2].partition("\n</text>")[0]
        rule = "Name the topic" if "generate_joke" in text.partition("\n")[0] else "Use at most twenty words"
        return json_reply(completion({"role": "assistant", "content": f"<new-text>{rule}. {now}</new-text>"}))
    topic = text.partition("joke about ")[2] or text.partition("wordplay: ")[2]
    said = topic if "Name the topic" in text or "wordplay" in text else f"Number {hash(topic)} is the funniest"
    said += "" if "wordplay" not in text or "twenty words" in text else " and" * 30
    return json_reply(completion({"role": "assistant", "content": said}))


def test_the_tutorial_on_prompts_finds_better_ones(
    provider: Provider, in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    monkeypatch.delitem(sys.modules, "app", raising=False)  # of an earlier test
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    provider.reply = obedient
    reader = Here(tmp_path, capsys, {})
    reader.follow(ROOT / "docs" / "tutorials" / "prompts.md")
    (said,) = [text for line, text in reader.said.items() if "improve" in line]
    assert "The new prompts are better on held-out tasks: 0.000 before, 1.000 after" in said
    sent = [body["messages"][-1]["content"] for body in provider.requests if body["model"] == "gpt-4o-mini"]
    assert any(text.startswith("Name the topic. Write a short joke about ") for text in sent)
