"""`cotune records score`: rewards of what was recorded, by the scorers of today, and nothing else runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.records.ids import candidate_id
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, completion, json_reply, serving

APP = """
import os
import openai, cotune

@cotune.workflow
async def solve(task):
    client = openai.AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none", max_retries=0)
    for role in ("writer", "reader"):
        with cotune.role(role):
            messages = [{"role": "user", "content": f"{role} {task['id']}"}]
            await client.chat.completions.create(model="m", messages=messages, n=2)
    return {"old": 1.0}

@solve.scorer("writer")
def length(candidate, call, task):
    assert call.messages == [{"role": "user", "content": f"writer {task['id']}"}]
    if candidate.text == "fail":
        raise ValueError("not this one")
    return {"local": len(candidate.text), "turn": call.turn}

@solve.judge
def newest(episodes, task):
    return [{"place": float(i), "old": e.rewards["old"] / 2} for i, e in enumerate(episodes)]

@cotune.workflow
async def bare(task): return 0.0

@cotune.workflow
async def told(task): return 0.0

@told.scorer("reader")
def why(candidate, call, task):
    return cotune.Feedback(0.0, f"{candidate.text} by 4111, of 5222, at 6333")

@cotune.workflow
async def stateful(task): return 0.0

@stateful.scorer("writer")
def nearer(candidate, call, task):
    return call.state["position"]

def hiding(number):
    return cotune.recording.redaction.each_text(lambda text: text.replace(number, "[card]"))

told.redactor(hiding("4111"))
of_run, asked = hiding("5222"), hiding("6333")
"""
SAID = {"0": ["a", "abc"], "1": ["abcd", "ab"], "2": ["fail", "abc"]}


def answers(body: dict[str, Any], number: int) -> Any:
    texts = SAID[body["messages"][0]["content"].split()[1]]
    reply = completion({"role": "assistant", "content": ""})
    message = [{"role": "assistant", "content": text} for text in texts]
    reply["choices"] = [{"index": i, "message": m, "finish_reason": "stop"} for i, m in enumerate(message)]
    return json_reply(reply)


@pytest.fixture
def traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Provider]:
    """Three tasks recorded in `run`, with an application to score them by."""
    (tmp_path / "scored_app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps({"id": id}) + "\n" for id in SAID))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")
    with serving() as provider:
        provider.reply = answers
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        assert main(["trace", "scored_app.py:solve", "--tasks", "tasks.jsonl", "--out", "run"]) == 0
        provider.requests.clear()
        yield provider


def rewards(role: str = "writer") -> dict[str, dict[str, float]]:
    """By task and text, the stored rewards of the candidates of a role."""
    with SqliteStore.open("run", read_only=True) as store:
        calls = [(e.task.id, call) for e in store.episodes() for call in store.calls(e.id) if call.role == role]
        named = {(task, c.text): candidate_id(call.id, c.index) for task, call in calls for c in call.candidates}
        found = store.rewards(named.values())
        return {f"{task} {text}": dict(found[one]) for (task, text), one in named.items() if found.get(one)}


def test_a_scorer_that_reads_the_state_is_told_that_records_have_none(
    traced: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["records", "score", "run", "scored_app.py:stateful"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "6 x The scorer of writer reads call.state, which records do not have. Read it from call.messages" in said


def test_recorded_answers_are_scored_and_stored_only_when_asked(
    traced: Provider, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["records", "score", "run", "scored_app.py:solve"]) == 0
    shown = capsys.readouterr()
    lines = [line.split() for line in shown.out.splitlines()]
    assert ["(episodes)", "3", "3", "0", "0", "old", "1.000", "old", "0.500,", "place", "0.000"] in lines
    # 1 + 3 + 4 + 2 + 3 over five
    assert ["writer", "3", "5", "1", "0", "-", "local", "2.600,", "turn", "0.000"] in lines
    said = " ".join(shown.out.split())
    assert "1 x The scorer of role 'writer' raised ValueError: not this one" in said
    assert "no scorer: reader (3 calls)" in said and "nothing was stored: --write stores the rewards" in said
    assert rewards() == {} and traced.requests == []

    assert main(["records", "score", "run", "scored_app.py:solve", "--write", "--role", "writer"]) == 0
    assert rewards()["0 abc"] == {"local": 3.0, "turn": 0.0} and "2 fail" not in rewards()
    with SqliteStore.open("run", read_only=True) as store:
        assert set(map(str, store.rewards([e.id for e in store.episodes()]).values())) == {"{'old': 1.0}"}

    source = Path("scored_app.py").read_text()
    Path("other_app.py").write_text(source.replace('"local": len', '"local": -len'))
    capsys.readouterr()
    assert main(["records", "score", "run", "other_app.py:solve", "--write"]) == 0
    line = next(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("writer"))
    assert line[4] == "2", "another is the best in both groups that have two rewards"
    assert line[5:] == ["local", "2.600,", "turn", "0.000", "local", "-2.600,", "turn", "0.000"]
    assert rewards()["0 abc"] == {"local": -3.0, "turn": 0.0}
    with SqliteStore.open("run", read_only=True) as store:
        assert set(map(str, store.rewards([e.id for e in store.episodes()]).values())) == {"{'old': 0.5, 'place': 0.0}"}


def test_rewards_of_groups_that_were_trained_on_stay(traced: Provider, capsys: pytest.CaptureFixture[str]) -> None:
    with SqliteStore.open("run") as store:
        episode = next(e for e in store.episodes() if e.task.id == "0")
        store.consume([store.calls(episode.id)[0].id], 0)
    assert main(["records", "score", "run", "scored_app.py:solve", "--write", "--role", "writer"]) == 0
    assert "4 rewards of groups that were trained on stay as they were" in " ".join(capsys.readouterr().out.split())
    assert sorted(rewards()) == ["1 ab", "1 abcd", "2 abc"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "scored_app.py:bare"], "has no scorer and no judge"),
        (["run", "scored_app.py:solve", "--role", "nobody"], "roles with one: writer"),
        (["nowhere", "scored_app.py:solve"], "There is no records file"),
    ],
)
def test_what_cannot_be_scored(
    traced: Provider, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["records", "score", *words]) == 1
    assert said in capsys.readouterr().err


def test_feedback_passes_the_redactors_of_workflow_run_and_command(traced: Provider) -> None:
    Path("run/run.json").write_text(json.dumps({"config": {"redact": "scored_app.py:of_run"}}))
    shutil.copytree("run", "run/eval", ignore=shutil.ignore_patterns("run.json", "eval"))
    for folder in ("run", "run/eval"):  # an evaluation of a run is the run's as well
        command = ["records", "score", folder, "scored_app.py:told", "--redact", "scored_app.py:asked", "--write"]
        command.append("--trust-folder")
        assert main(command) == 0
        with SqliteStore.open(folder, read_only=True) as store:
            call = next(call for e in store.episodes() for call in store.calls(e.id) if call.role == "reader")
            assert store.feedback([f"{call.id}.0"])[f"{call.id}.0"] == {"local": "a by [card], of [card], at [card]"}
    Path("run/run.json").write_text(json.dumps({"config": {"redact": "scored_app.py:gone"}}))
    assert main(command) != 0
