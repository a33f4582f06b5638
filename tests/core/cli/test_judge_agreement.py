"""Agreement of a judge with labels: figures worked out by hand, and the command on a run that was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.cli.records.judge_agreement import count_pairs, judge_agreement
from cotune.errors import ConfigError
from cotune.judging.labels import load_labels
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.judge_server import by, says
from tests.integrations.provider import Provider, serving

APP = """
import os
import openai, cotune

@cotune.workflow
async def solve(task):
    client = openai.AsyncOpenAI(base_url=os.environ["OPENAI_BASE_URL"], api_key="none")
    with cotune.role("writer"):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["ask"]}], n=4)

judge = cotune.Judge(model="j", rubric="Longer.", base_url=os.environ["JUDGE_URL"], api_key="none", price=(1.0, 2.0))
solve.scorer("writer", group=True)(judge)
solve.judge(judge)
"""


@pytest.mark.parametrize(
    ("labels", "rewards", "alike", "pairs"),
    [
        ([1, 2, 3, 4], [0.0, 0.2, 0.9, 0.5], 5.0, 6),  # only the pair of the last two is the other way round
        ([1, 1, 2, 3], [0.5, 0.1, 0.5, 1.0], 4.5, 5),  # people do not tell the first two apart; one tie of the judge
        ([3, 3], [0.0, 1.0], 0.0, 0),
        ([2], [1.0], 0.0, 0),
    ],
)
def test_pairs_alike_by_hand(labels: list[float], rewards: list[float], alike: float, pairs: int) -> None:
    assert count_pairs(labels, rewards) == (alike, pairs)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Provider]]:
    """Records of six tasks, four candidates of different lengths each, made with a provider by `cotune trace`."""
    folder = tmp_path_factory.mktemp("judged")
    (folder / "judged_app.py").write_text(APP)
    tasks = [{"id": str(n), "ask": f"question {n}"} for n in range(6)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    with serving() as provider, serving() as judge, pytest.MonkeyPatch.context() as patch:
        provider.reply = four
        judge.reply = by(len)
        patch.setenv("OPENAI_BASE_URL", provider.url)
        patch.setenv("JUDGE_URL", judge.url)
        patch.chdir(folder)
        for _ in range(2):
            assert main(["trace", "judged_app.py:solve", "--tasks", "tasks.jsonl", "--out", "run"]) == 0
        yield folder, judge


def four(body: dict[str, Any], number: int) -> Any:
    status, kind, (raw,) = says("x")
    reply = json.loads(raw)
    reply["choices"] = [
        {
            "index": i,
            "finish_reason": "stop",
            "message": {"role": "assistant", "content": "x" * ((number + 3 * i) % 7 + 1)},
        }
        for i in range(4)
    ]
    return status, kind, [json.dumps(reply).encode()]


def labels(folder: Path, name: str, lines: list[dict[str, Any]]) -> str:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / name)


def test_the_command_compares_and_asks_once_for_each_group(
    recorded: tuple[Path, Provider], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, judge = recorded
    blanks = str(folder / "blank.jsonl")
    command = ["records", "judge", str(folder / "run"), "--app", "judged_app.py:solve"]
    assert main([*command, "--to-label", blanks, "--role", "writer"]) == 0
    lines = [json.loads(line) for line in Path(blanks).read_text().splitlines()]
    assert len(lines) == 12 * 4 and lines[0]["request"].startswith("[user]\nquestion ")
    with pytest.raises(ConfigError, match="holds no label"):
        load_labels(blanks)
    for line in lines:
        line["score"] = len(line["answer"])
    # The shortest of the first four answers gets the best label: its three pairs are not alike.
    min(lines[:4], key=lambda line: len(line["answer"]))["score"] = 99
    lines[5]["score"] = None

    capsys.readouterr()
    asked = len(judge.requests)
    assert main([*command, "--labels", labels(folder, "labels.jsonl", lines)]) == 0
    shown = capsys.readouterr().out
    assert len(judge.requests) == asked + 12
    # Twelve calls of six pairs each, without the three pairs of the missing label.
    assert shown == "agreement with people: 95.7% of 69 pairs in 12 groups (chance: 50%)\n"
    assert main([*command, "--labels", str(folder / "labels.jsonl")]) == 0
    assert len(judge.requests) == asked + 12, "kept"


def test_what_a_judge_says_of_a_run_passes_the_redactor_of_the_run(
    recorded: tuple[Path, Provider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the judge is asked from another folder than the one that the run was started in."""
    folder, judge = recorded
    monkeypatch.setenv("COTUNE_TRUST_FOLDERS", str(tmp_path))
    run = shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns("judge.db*"))
    (folder / "privacy.py").write_text("def hide(m): return {**m, 'content': m['content'].replace('4111', '[card]')}")
    described = {"folder": str(folder), "config": {"redact": f"{folder}/privacy.py:hide"}}
    (run / "run.json").write_text(json.dumps(described))
    with SqliteStore.open(run, read_only=True) as store:
        lines = [{"id": episode.id, "score": n} for n, episode in enumerate(store.episodes())]
    ranked = judge.reply

    def reasoned(body: dict[str, Any], number: int) -> Any:
        status, kind, (raw,) = ranked(body, number)
        return status, kind, [raw.replace(b'\\"so\\"', b'\\"paid by 4111\\"')]

    monkeypatch.setattr(judge, "reply", reasoned)
    monkeypatch.chdir(tmp_path)
    judge_agreement(run, labels(tmp_path, "labels.jsonl", lines), f"{folder}/judged_app.py:solve")
    kept = b"".join(file.read_bytes() for file in run.glob("judge.db*"))
    assert b"paid by [card]" in kept and b"4111" not in kept


def test_whole_episodes_are_compared_by_task(recorded: tuple[Path, Provider]) -> None:
    folder, _ = recorded
    with SqliteStore.open(folder / "run", read_only=True) as store:
        ids = [(episode.id, episode.task.id) for episode in store.episodes()]
    given = [{"id": id, "score": n} for n, (id, task) in enumerate(ids) if task in "012"]
    found = judge_agreement(folder / "run", labels(folder, "episodes.jsonl", given), "judged_app.py:solve")
    assert (found.groups, found.pairs, found.left_out) == (3, 3, {})


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"id": "nobody.0", "score": 1}, r"not on record \(1 of 1\): nobody.0"),
        ({"id": "nobody.0", "score": "good"}, "line 1"),
        ({"score": 1}, "line 1"),
        ({"id": "nobody.0", "score": None}, "holds no label"),
    ],
)
def test_labels_that_say_nothing(recorded: tuple[Path, Provider], line: dict[str, Any], said: str) -> None:
    folder, judge = recorded
    asked = len(judge.requests)
    with pytest.raises(ConfigError, match=said):
        judge_agreement(folder / "run", labels(folder, "wrong.jsonl", [line]), "judged_app.py:solve")
    assert len(judge.requests) == asked


def test_labels_that_leave_nothing_to_compare(recorded: tuple[Path, Provider]) -> None:
    folder, _ = recorded
    with SqliteStore.open(folder / "run", read_only=True) as store:
        call = store.calls(next(iter(store.episodes())).id)[0]
    alone = labels(folder, "alone.jsonl", [{"id": f"{call.id}.0", "score": 1}])
    with pytest.raises(ConfigError, match="1 x alone in its group"):
        judge_agreement(folder / "run", alone, "judged_app.py:solve")
    with pytest.raises(ConfigError, match="does not say which workflow it recorded"):
        judge_agreement(folder / "run", alone)
    with pytest.raises(ConfigError, match=r"repeats the id a\.0"):
        judge_agreement(
            folder / "run", labels(folder, "twice.jsonl", [{"id": "a.0", "score": 1}] * 2), "judged_app.py:solve"
        )
