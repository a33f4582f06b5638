"""Run folders with an odd value anywhere: pages, reports and exports show what can be read, or name what cannot."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from cotune.cli.main import main
from cotune.errors import CotuneError
from cotune.integrations.web.viewer.pages import build_app
from cotune.reading.find_runs import FoundRuns
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.run_layout import RunLayout
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.config.load import convert
from cotune.trainer.run.run_folder import RunFolder
from tests.mutations import ODD, as_json, damaged, mutated

PAGES = ("", "/use", "/curves", "/evaluations", "/episodes", "/groups", "/groups?step=1", "/tasks", "/config")


def line(step: int) -> dict[str, Any]:
    """A step's line, with something in every field."""
    share = {"a": 0.5, "b": 1.0}
    made = StepMetrics(
        step=step, episodes=2, failed=1, calls=4, candidates=8, groups=4, rows=8, path="single samples",
        outcome={"success": 0.5, "team": 0.25}, candidate_reward=0.5,
        held_out={"success": 0.5, "success_low": 0.2, "success_high": 0.8, "success_n": 4.0, "reward": 0.5,
                  "episodes": 4.0, "against_untrained/a": 0.5},
        roles={"a": {"reward": 0.5, "groups": 2.0, "kl": 0.1, "rows": 4.0, "tokens_mean": 2.0, "loss": 0.1},
               "b": share},
        policies={"p": {"loss": 0.1, "steps": 1.0}},
        left_out={"zero_variance": 1}, staleness={"0": 8}, counters={"judge.cost": 0.5, "retries": 1.0}, lr_scale=1.0,
        seconds={"load": 1.0, "rollout": 2.0, "update": 1.0}, tokens_per_s=10.0, updated=True,
        stayed={"q": "no signal"}, silent={"c": 3}, notes=("a note",), replay={"forked": 1},
    )  # fmt: skip
    found: dict[str, Any] = msgspec.to_builtins(made)
    return found


def evaluation(path: Path) -> None:
    """A file of an evaluation, with something in every field."""
    interval = {"mean": 0.5, "low": 0.2, "high": 0.8, "n": 4}
    ending = {"status": "ok", "reward": 1.0, "success": True, "seconds": 1.0}
    failed = {"status": "error", "reward": 0.0, "success": False, "error": "ValueError: 3"}
    mode = {
        "episodes": 4, "success": interval, "reward": interval, "outcome": interval, "failed": {"ValueError: 3": 1},
        "endings": {"t0": ending, "t1": failed}, "use": {"prompt_tokens": 5, "completion_tokens": 6, "cost": 0.1},
    }  # fmt: skip
    compared = {"label": "trained", "against": "base", "success": interval, "reward": interval, "verdict": "It rose."}
    found = {"evaluations": {"base": mode, "trained": mode}, "comparisons": [compared], "notes": ["n"], "steps": 2}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**found, "created": 1.0, "tasks": "tasks.jsonl"}))


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
            if number == 3:
                live.end("error", error="ValueError: 3")
            else:
                live.end("ok", rewards={"team": 1.0}, metrics={"success": 1.0})
    (folder.checkpoints / "best.json").write_text(json.dumps({"p": {"checkpoint": "step-000002", "figure": 0.5}}))
    (folder.checkpoints / "step-000002" / "checkpoint.json").write_text('{"steps": 2, "run": "r"}')
    (path / "loggers.json").write_text('{"trackio": "1"}')
    evaluation(path / "held_out" / "step-000000.json")
    evaluation(path / "eval" / "evaluation.json")
    shutil.copy(path / "records.db", path / "eval")
    return path


@pytest.fixture(scope="module")
def learned(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that learns from the records of the other one."""
    path = tmp_path_factory.mktemp("learned") / "run"
    config = convert({"model": "m", "recipe": "sft", "records": {"path": str(whole)}, "steps": 2})
    folder = RunFolder.create(path, config, workflow=None, tasks=None)
    for step in range(2):
        folder.append_metrics(line(step))
    folder.close()
    return path


def changed(rng: random.Random, run: Path) -> None:
    """One file of a run gets an odd value."""
    layout = RunLayout(run)
    kinds = (
        "json",
        "run",
        "metrics",
        "metrics",
        *(("records", "records", "latest", "eval") if layout.records.exists() else ()),
    )
    kind = rng.choice(kinds)
    if kind in ("json", "run"):
        files = sorted(file for file in run.rglob("*.json"))
        file = rng.choice(files) if kind == "json" else layout.run_json
        known = file.read_bytes()
        file.write_bytes(damaged(rng, known) if rng.random() < 0.1 else as_json(odd(rng, json.loads(known))))
    elif kind == "metrics":
        lines = layout.metrics.read_bytes().splitlines()
        at = rng.randrange(len(lines))
        lines[at] = as_json(odd(rng, json.loads(lines[at])))
        layout.metrics.write_bytes(b"\n".join(lines) + b"\n")
    elif kind == "latest":
        layout.latest.write_bytes(rng.choice((b"\0", b"step-000002\0", b"abc", b"step-", b"../..", b"\xff\xfe", b"")))
    elif kind == "eval":
        file = run / "eval" / "records.db"
        file.write_bytes(rng.choice((b"", b"no database", damaged(rng, file.read_bytes()))))
    else:
        table, column = rng.choice(
            [
                ("calls", "body"),
                ("calls", "body"),
                ("calls", "candidates"),
                ("episodes", "body"),
                ("episodes", "body"),
                ("episodes", "metrics"),
                ("messages", "body"),
            ]
        )
        with contextlib.closing(sqlite3.connect(layout.records, isolation_level=None)) as db:
            key, value = rng.choice(db.execute(f"SELECT rowid, {column} FROM {table}").fetchall())
            written = as_json(odd(rng, json.loads(value)))
            with contextlib.suppress(UnicodeEncodeError, sqlite3.IntegrityError):
                db.execute(f"UPDATE {table} SET {column} = ? WHERE rowid = ?", (written.decode(), key))


def odd(rng: random.Random, value: Any) -> Any:
    """A value with odd ones somewhere in it, or in its place."""
    return mutated(rng, value) if rng.random() < 0.9 else rng.choice(ODD)


def asked(run: Path) -> Iterator[str]:
    """The addresses of a run's pages."""
    yield from ("/", "/curves", "/compare", *(f"/run/run{page}" for page in PAGES))
    if not RunLayout(run).records.exists():
        return
    yield from ("/run/run:eval", "/run/run:eval/episodes")
    with contextlib.closing(sqlite3.connect(RunLayout(run).records)) as db:
        for table, page in (("episodes", "episode"), ("calls", "call")):
            for (name,) in db.execute(f"SELECT id FROM {table} LIMIT 3"):
                yield f"/run/run/{page}/{name}"
                if table == "calls":
                    yield f"/run/run/diff?a={name}.0"


async def answers(runs: FoundRuns, pages: list[str]) -> dict[str, httpx.Response]:
    transport = httpx.ASGITransport(build_app(runs), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        return {page: await client.get(page) for page in pages}


def look(run: Path, *, shown: bool = False) -> None:
    """Every page says what it shows, or what is wrong; where all can be `shown`, every page shows it."""
    pages = list(asked(run))
    try:
        runs = FoundRuns([run])
    except CotuneError as error:
        assert str(run) in str(error) and not shown
        return
    try:
        for page, answer in asyncio.run(answers(runs, pages)).items():
            assert "The server failed" not in answer.text, (page, answer.text[-300:])
            fine = answer.status_code in (200, 302, 303, 307, 404) or (not shown and str(run) in answer.text)
            assert fine, (page, answer.text[-500:])
    finally:
        runs.close()


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the run that a test's parameter names."""
    path = tmp_path / "runs" / "run"
    shutil.copytree(request.getfixturevalue(request.param), path)
    return path


def looks(run: Path, out: Path) -> list[list[str]]:
    """The commands that look at a run."""
    return [
        ["show", str(run), "--html", str(out / "r.html")],
        ["otel", "export", str(run), "--out", str(out / "o"), "--content", "--tokens"],
        ["show", str(run)], ["show", str(run), "--steps"], ["show", str(run), "--groups"], ["show", str(run.parent)],
        ["export", str(run), "--out", str(out / "e")], ["doctor", "--run", str(run)],
    ]  # fmt: skip


def in_metrics(field: str, value: Any) -> Callable[[Path], None]:
    """Give a figure of every line of metrics.jsonl another value."""

    def change(run: Path) -> None:
        lines = [json.loads(text) for text in RunLayout(run).metrics.read_text().splitlines()]
        for found in lines:
            *tables, name = field.split(".", 1) if field.startswith("counters") else field.split(".")
            for table in tables:
                found = found[table]
            found[name] = value
        RunLayout(run).metrics.write_text("".join(json.dumps(one) + "\n" for one in lines))

    return change


def in_config(**fields: Any) -> Callable[[Path], None]:
    """Give a run's configuration other fields."""

    def change(run: Path) -> None:
        described = json.loads(RunLayout(run).run_json.read_bytes())
        RunLayout(run).run_json.write_text(json.dumps({**described, "config": {**described["config"], **fields}}))

    return change


def only_lines(change: Callable[[Path], None]) -> Callable[[Path], None]:
    """Change a run that has no file of its evaluations."""

    def both(run: Path) -> None:
        shutil.rmtree(run / "eval")
        shutil.rmtree(run / "held_out")
        change(run)

    return both


def in_records(table: str, sql: str) -> Callable[[Path], None]:
    """Change rows of the records by the end of an UPDATE."""

    def change(run: Path) -> None:
        with contextlib.closing(sqlite3.connect(RunLayout(run).records, isolation_level=None)) as db:
            db.execute(f"UPDATE {table} SET body = {sql}")

    return change


@pytest.mark.parametrize(
    ("run", "change", "named"),
    [
        ("learned", in_metrics("roles.a.tokens_mean", None), None),
        ("learned", in_metrics("roles.a.rows", float("nan")), None),
        ("whole", only_lines(in_metrics("held_out.success_n", None)), None),
        ("whole", only_lines(in_metrics("held_out.success_n", float("inf"))), None),
        ("whole", in_metrics("counters.judge.cost", None), None),
        ("whole", in_metrics("seconds.update", None), None),
        ("whole", in_config(on_failure="bogus"), "on_failure = 'bogus'"),
        ("whole", in_config(distill="x"), "config.distill"),
        ("learned", in_config(records={}), "config.records.path"),
        ("learned", in_config(steps=None), "config.steps"),
        ("whole", lambda run: (run / "eval" / "records.db").write_text("no database"), None),
        ("whole", in_records("episodes", "json_set(body, '$.error', 3) WHERE status = 'error'"), None),
        ("whole", in_records("calls", "json_set(body, '$.role', 'x') WHERE role = 'b'"), None),
    ],
    indirect=["run"],
)
def test_an_odd_value(
    run: Path, tmp_path: Path, change: Callable[[Path], None], named: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run)
    look(run, shown=named is None)
    for words in looks(run, tmp_path)[:6]:
        status, said = main(words), capsys.readouterr().err
        if words == ["show", str(run)]:
            assert (status == 0) if named is None else (status == 1 and named in said), (words, said)


@pytest.mark.parametrize("count", [12, pytest.param(2400, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_odd_runs(whole: Path, learned: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], count: int) -> None:
    rng, run = random.Random(11), tmp_path / "runs" / "run"
    look(whole)
    look(learned)
    for _ in range(count):
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(rng.choice((whole, whole, whole, learned)), run)
        changed(rng, run)
        look(run)
        for words in looks(run, tmp_path):
            status = main(words)
            said = capsys.readouterr().err.strip().splitlines()
            assert status in (0, 1), (words, said)
            assert "Traceback" not in "".join(said), (words, said)
            of_run = words[0] != "doctor" and words[1] != str(run.parent)
            assert status == 0 or not of_run or str(run) in said[-1], (words, said)
