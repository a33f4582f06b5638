"""Agreement of a judge with labels: figures worked out by hand, and the command on a run that was recorded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.evaluation.judge_agreement import Compared, agreement, clustered_share, judge_agreement, verdict
from cotune.trainer.evaluation.labels import load_labels
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


def test_figures_of_two_groups_by_hand() -> None:
    """5 of 6 pairs are alike in the first; in the second 4 of 5, and one is a tie of the judge."""
    groups = [
        Compared(role="a", labels=[1, 2, 3, 4], rewards=[0.0, 0.2, 0.9, 0.5]),
        Compared(role="a", labels=[1, 1, 2, 3], rewards=[0.5, 0.1, 0.5, 1.0]),
    ]
    found = agreement(groups)
    assert (found.groups, found.labels, found.pairs) == (2, 8, 11)
    assert found.accuracy is not None and found.accuracy.mean == pytest.approx((5 + 4.5) / 11)
    # tau-b: (5 - 1) / 6, and (4 - 0) / sqrt(5 x 5) with one pair tied in the labels and one in the rewards
    assert found.tau is not None and found.tau.mean == pytest.approx((4 / 6 + 4 / 5) / 2)


def test_pairs_of_one_group_count_less_than_those_of_many() -> None:
    apart = clustered_share([(1.0, 1)] * 15 + [(0.0, 1)] * 5)
    assert apart is not None and (apart.low, apart.high) == pytest.approx((0.531299, 0.888138), abs=1e-5), "Wilson's"
    together = clustered_share([(5.0, 5)] * 3 + [(0.0, 5)])
    assert together is not None and together.mean == apart.mean == 0.75
    # the design effect is 4/3 x (3 x 1.25^2 + 3.75^2) / 20^2 over .75 x .25 / 19, or 19/3; times (t(.975, 3) / z)^2,
    # or (3.182446 / 1.959964)^2: 1.2 of 20 trials count
    assert (together.low, together.high) == pytest.approx((0.136039, 0.982805), abs=1e-5)
    sure = clustered_share([(28.0, 28)] * 2)
    assert sure is not None and (sure.low, sure.high) == pytest.approx((0.342380, 1.0), abs=1e-5), "two groups"
    one = clustered_share([(5.0, 6)])
    assert one is not None and (one.low, one.n) == (None, 6)
    assert clustered_share([]) is None


@pytest.mark.parametrize("chance", [0.5, 0.8])
@pytest.mark.parametrize("size", [3, 28])
def test_the_interval_of_a_share_holds_the_truth_for_few_groups(chance: float, size: int) -> None:
    """Pairs of one group are alike: the groups' own shares vary by a beta distribution."""
    generator = np.random.default_rng(0)
    held = 0
    for _ in range(400):
        shares = generator.beta(2.0 * chance, 2.0 * (1 - chance), 4)
        found = clustered_share([(float(generator.binomial(size, share)), size) for share in shares])
        assert found is not None and found.low is not None and found.high is not None
        held += found.low <= chance <= found.high
    assert held / 400 >= 0.93


@pytest.mark.parametrize(
    ("clusters", "said"),
    [
        ([(1.0, 1)] * 20, "agrees with people more often than chance: 100.0% [83.9%, 100.0%] of 20 pairs"),
        ([(0.0, 1)] * 20, "prefers what people do not: 0.0% [0.0%, 16.1%] of 20 pairs alike"),
        ([(1.0, 1)] * 5 + [(0.0, 1)] * 3, "not shown to agree more often than chance (62.5% [30.6%, 86.3%])"),
        ([(3.0, 3)], "one group tells little"),
        ([], "no pair tells"),
    ],
)
def test_the_verdict(clusters: Any, said: str) -> None:
    found = agreement([])
    pairs = sum(n for _, n in clusters)
    assert said in verdict(msgspec.structs.replace(found, accuracy=clustered_share(clusters), pairs=pairs))


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
    command = ["judge", str(folder / "run"), "--app", "judged_app.py:solve"]
    assert main([*command, "--to-label", blanks, "--groups", "8", "--role", "writer"]) == 0
    lines = [json.loads(line) for line in Path(blanks).read_text().splitlines()]
    assert len(lines) == 8 * 4 and lines[0]["request"].startswith("[user]\nquestion ")
    with pytest.raises(ConfigError, match="holds no label"):
        load_labels(blanks)
    for line in lines:
        line["score"] = len(line["answer"])
    lines[0]["score"], lines[5]["score"] = 99, None

    capsys.readouterr()
    asked = len(judge.requests)
    assert main([*command, "--labels", labels(folder, "labels.jsonl", lines)]) == 0
    shown = capsys.readouterr().out
    assert len(judge.requests) == asked + 8
    assert "writer" in shown and "requests 8" in shown and "cost 0.000104" in shown
    assert "agrees with people more often than chance" in shown
    assert main([*command, "--labels", str(folder / "labels.jsonl")]) == 0
    assert len(judge.requests) == asked + 8, "kept"


def test_what_a_judge_says_of_a_run_passes_the_redactor_of_the_run(
    recorded: tuple[Path, Provider], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the judge is asked from another folder than the one that the run was started in."""
    folder, judge = recorded
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
    assert found.by_role.keys() == {"(episodes)"} and (found.all.groups, found.all.pairs) == (3, 3)


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
