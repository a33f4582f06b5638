"""`--prompts` of `trace`, and how `show` tells what was asked from what was sent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.prompts.file import write_prompts
from cotune.storage.open_store import open_store
from tests.integrations.edits import NEW, OLD, part, prompts
from tests.integrations.provider import serving

APP = f"""
import os, openai, cotune

@cotune.workflow
def solve(task):
    client = openai.OpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="k", max_retries=0)
    for role, text in (("writer", {OLD!r}), ("critic", "Judge it.")):
        with cotune.role(role):
            asked = [{{"role": "system", "content": text}}, {{"role": "user", "content": "hello"}}]
            client.chat.completions.create(model="m", messages=asked)
    return 1.0
"""


def test_trace_and_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("app.py").write_text(APP)
    Path("tasks.jsonl").write_text('{"id": "1"}\n')
    given = prompts(part(OLD, NEW, role="writer"), part("Judge this.", "Judge.", role="critic"))
    write_prompts("prompts.json", given)
    with serving() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        words = ["trace", "app.py:solve", "--tasks", "tasks.jsonl", "--out", "run", "--prompts", "prompts.json"]
        assert main(words) == 0
    assert [request["messages"][0]["content"] for request in provider.requests] == [NEW, "Judge it."]
    said = " ".join(capsys.readouterr().out.split())
    assert "edited prompts of critic: 0 of 1 call; 1 sent unedited" in said
    assert "edited prompts of writer: 1 of 1 call 1 episode," in said
    with open_store("run/records.db", read_only=True) as store:
        (episode,) = [episode.id for episode in store.episodes()]

    assert main(["show", "run", "--episode", episode, "--full"]) == 0
    shown = capsys.readouterr().out
    assert f"edited prompts {given.id[:8]}" in shown
    assert "prompt_unmatched: sent unedited" in shown
    assert f"< system: {OLD}" in shown
    assert f"< sent instead, by edited prompts: system: {NEW.splitlines()[0]}" in shown
    assert main(["show", "run", "--episode", episode, "--json"]) == 0
    writer, critic = json.loads(capsys.readouterr().out)["calls"]
    assert [message["content"] for message in writer["messages"]] == [OLD, "hello"]
    assert [message["content"] for message in writer["sent"]] == [NEW, "hello"]
    assert (critic["sent"], critic["unedited"]) == ([], "prompt_unmatched")
