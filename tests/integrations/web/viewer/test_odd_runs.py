"""Run folders with an odd value anywhere: pages, reports and exports show what can be read, or name what cannot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cotune.cli.main import main
from cotune.errors import CotuneError
from cotune.integrations.web.viewer.opened import OpenedRun, open_runs
from cotune.integrations.web.viewer.pages import build_app
from cotune.recording.pending_call import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.run_layout import RunLayout
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.train import convert
from cotune.trainer.reporting.metrics import StepMetrics
from cotune.trainer.run.run_folder import RunFolder
from tests.mutations import ODD, as_json, mutated

PAGES = ("", "/use", "/curves", "/evaluations", "/episodes", "/groups", "/groups?step=1", "/tasks", "/config")


def line(step: int) -> dict[str, Any]:
    """A step's line, with something in every field."""
    share = {"a": 0.5, "b": 1.0}
    made = StepMetrics(
        step=step, episodes=2, failed=1, calls=4, candidates=8, groups=4, rows=8, path="single samples",
        outcome={"success": 0.5, "team": 0.25}, candidate_reward=0.5, held_out={"success": 0.5, "low": 0.2},
        roles={"a": {"reward": 0.5, "groups": 2.0, "kl": 0.1}, "b": share}, policies={"p": {"loss": 0.1, "steps": 1.0}},
        left_out={"zero_variance": 1}, staleness={"0": 8}, counters={"judge.cost": 0.5, "retries": 1.0}, lr_scale=1.0,
        seconds={"load": 1.0, "rollout": 2.0, "update": 1.0}, tokens_per_s=10.0, updated=True,
        stayed={"q": "no signal"}, silent={"c": 3}, notes=("a note",), replay={"forked": 1},
    )  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins(made)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    plan = {"kind": "tree", "k": 2}
    folder = RunFolder.create(path, convert({"model": "m", "plan": plan, "steps": 2}), workflow="app:solve", tasks=None)
    for step in range(2):
        folder.append_metrics(line(step))
    folder.checkpoints.mkdir(exist_ok=True)
    (folder.checkpoints / "step-000002").mkdir()
    saved = {"name": "p", "kind": "lora", "version": 2, "roles": ["a"], "metrics": {"a": {"reward": 1.0}}}
    (folder.checkpoints / "step-000002" / "policies.json").write_text(json.dumps([saved]))
    folder.latest.write_text("step-000002\n")
    folder.note_end("stopped", "It was stopped.")
    folder.close()
    with SqliteStore.open(path) as store:
        for number in range(4):
            task = Task(id=f"t{number}", input={"q": number})
            live = LiveEpisode(store, task, workflow="w", phase="train", training_step=number % 2)
            for role in ("a", "b"):
                messages = [{"role": "user", "content": f"question {number}"}]
                call = live.start(CallerContext(role, "test"), {"messages": messages, "temperature": 1.0})
                candidates = tuple(
                    Candidate(
                        index=i,
                        text=f"yes {i}",
                        message={"role": "assistant", "content": f"yes {i}"},
                        token_ids=(5, 6),
                        logprobs=(-1.0, -0.5),
                    )
                    for i in (0, 1)
                )
                rewards = ({"local": 0.0}, {"local": 1.0})
                call.finish(
                    Answer(candidates=candidates, prompt_ids=(1, number), policy=PolicyRef("p"), rewards=rewards)
                )
            live.end("ok", rewards={"team": 1.0}, metrics={"success": 1.0})
    return path


def changed(rng: random.Random, run: Path) -> None:
    """One file of a run gets an odd value."""
    layout, kind = RunLayout(run), rng.choice(("run", "metrics", "metrics", "records", "records", "policies", "latest"))
    if kind == "run":
        layout.run_json.write_bytes(as_json(mutated(rng, json.loads(layout.run_json.read_bytes()))))
    elif kind == "metrics":
        lines = layout.metrics.read_bytes().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = as_json(mutated(rng, json.loads(lines[at])))
        layout.metrics.write_bytes(b"\n".join(lines) + b"\n")
    elif kind == "policies":
        file = layout.checkpoints / "step-000002" / "policies.json"
        file.write_bytes(as_json(mutated(rng, json.loads(file.read_bytes()))))
    elif kind == "latest":
        layout.latest.write_bytes(rng.choice((b"\0", b"step-000002\0", b"abc", b"step-", b"../..", b"\xff\xfe", b"")))
    else:
        table, column = rng.choice(
            [
                ("calls", "body"),
                ("calls", "body"),
                ("calls", "candidates"),
                ("episodes", "body"),
                ("episodes", "metrics"),
            ]
        )
        with contextlib.closing(sqlite3.connect(layout.records, isolation_level=None)) as db:
            key, value = rng.choice(db.execute(f"SELECT rowid, {column} FROM {table}").fetchall())
            odd = as_json(mutated(rng, json.loads(value)) if rng.random() < 0.7 else rng.choice(ODD))
            with contextlib.suppress(UnicodeEncodeError, sqlite3.IntegrityError):
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (odd.decode(), key))


def asked(run: Path) -> Iterator[str]:
    """The addresses of a run's pages."""
    with contextlib.closing(sqlite3.connect(RunLayout(run).records)) as db:
        yield from (f"/run/run{page}" for page in PAGES)
        for table, page in (("episodes", "episode"), ("calls", "call")):
            for (name,) in db.execute(f"SELECT id FROM {table} LIMIT 3"):
                yield f"/run/run/{page}/{name}"
    yield from ("/", "/curves", "/compare")


async def answers(runs: list[OpenedRun], pages: list[str]) -> dict[str, httpx.Response]:
    transport = httpx.ASGITransport(build_app(runs), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return {page: await client.get(page) for page in pages}


def look(run: Path) -> None:
    """Every page says what it shows, or what is wrong."""
    pages = list(asked(run))
    try:
        runs = open_runs([run])
    except CotuneError as error:
        assert str(run) in str(error)
        return
    try:
        for page, answer in asyncio.run(answers(runs, pages)).items():
            assert "The server failed" not in answer.text, (page, answer.text[-300:])
            assert answer.status_code in (200, 302, 303, 307, 404) or str(run) in answer.text, (
                page,
                answer.text[-500:],
            )
    finally:
        for opened in runs:
            opened.close()


@pytest.mark.parametrize("count", [12, pytest.param(2400, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_odd_runs(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    rng, run = random.Random(11), tmp_path / "run"
    commands = [
        ["report", str(run), "--out", str(tmp_path / "r.html")],
        ["otel", "export", str(run), "--to", str(tmp_path / "o"), "--content", "--tokens"],
        ["show", str(run)], ["show", str(run), "--steps"], ["show", str(run), "--groups"], ["runs", str(tmp_path)],
        ["export", str(run), "--to", str(tmp_path / "e")], ["doctor", "--run", str(run)],
    ]  # fmt: skip
    look(whole)
    for _ in range(count):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(whole, run)
        changed(rng, run)
        look(run)
        for words in commands:
            status = main(words)
            said = capsys.readouterr().err.strip().splitlines()
            assert status in (0, 1), (words, said)
            assert "Traceback" not in "".join(said), (words, said)
            assert status == 0 or words[0] in ("doctor", "runs") or str(run) in said[-1], (words, said)
