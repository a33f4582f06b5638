"""Records files with odd values in any column, or flipped bytes: read around, or refused in one line."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from cotune.cli.main import main
from cotune.errors import RecordError, RunError
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.ids import new_id
from cotune.records.images import Image, data_url
from cotune.records.structs import Candidate, PolicyRef, Task
from cotune.storage.schema import WIDTHS
from cotune.storage.sqlite_store import SqliteStore
from tests.mutations import as_json, mutated

COLUMNS = {
    "images": ("media_type", "data"),
    "messages": ("body",),
    "segments": ("parent", "token_ids"),
    "calls": ("episode", "step", "turn", "status", "prompt", "body", "candidates", "token_ids", "logprobs"),
    "episodes": ("task", "phase", "training_step", "status", "body", "metrics"),
    "rewards": ("value",),
    "feedback": ("text", "at", "cut"),
}
ODD = [None, 0, -1, 2**40, 1.5, "", "x", "{", "[]", "{}", "null", b"", b"\xff\xfe", b"\x00" * 7, "\ud83d", float("inf")]


def image_part(data: bytes) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": data_url(Image("image/png", data))}}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    with SqliteStore.open(folder) as store:
        for number in range(4):
            live = LiveEpisode(
                store, Task(id=f"t{number}", input={"q": number}), workflow="w", phase="train", training_step=0
            )
            for step in range(3):
                said = {"role": "assistant", "content": "yes"}
                candidates = tuple(
                    Candidate(index=i, text="yes", message=said, token_ids=(5, 6), logprobs=(-1.0, -0.5))
                    for i in (0, 1)
                )
                content = [image_part(f"{number}".encode()), {"type": "text", "text": f"{number} {step}"}]
                call = live.start(CallerContext("r", "test"), {"messages": [{"role": "user", "content": content}]})
                call.finish(
                    Answer(
                        candidates=candidates,
                        prompt_ids=(1, number, step),
                        policy=PolicyRef("p"),
                        rewards=({"local": 0.0}, {"local": 1.0}),
                        feedback=("why", ""),
                    )
                )
            live.end("ok", rewards={"team": 1.0}, metrics={"success": 1.0})
    return folder / "records.db"


def changed(rng: random.Random, file: Path) -> None:
    """One to three columns of one row each get an odd value, or the file some odd bytes."""
    if rng.random() < 0.2:
        raw = bytearray(file.read_bytes())
        for _ in range(rng.randrange(1, 30)):
            raw[rng.randrange(100, len(raw))] = rng.randrange(256)
        file.write_bytes(raw)
        return
    db = sqlite3.connect(file)
    for _ in range(rng.choice((1, 1, 2, 3))):
        table = rng.choice(list(COLUMNS))
        column = rng.choice(COLUMNS[table])
        name = "target" if table in ("rewards", "feedback") else "rowid"
        key, value = rng.choice(db.execute(f"SELECT {name}, {column} FROM {table}").fetchall())
        odd = rng.choice(ODD)
        if column in ("body", "candidates", "metrics") and rng.random() < 0.7:
            try:
                odd = as_json(mutated(rng, json.loads(value))).decode()
            except (ValueError, TypeError):
                odd = "{"
        try:
            db.execute(f"UPDATE {table} SET {column} = ? WHERE {name} = ?", (odd, key))
        except (sqlite3.IntegrityError, UnicodeEncodeError):
            continue
    db.commit()
    db.close()


@pytest.mark.slow
@pytest.mark.parametrize("count", [12, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_odd_records(whole: Path, tmp_path: Path, capsys, count: int) -> None:
    rng = random.Random(6)
    episode = next(iter(sqlite3.connect(whole).execute("SELECT id FROM episodes")))[0]
    run, out = tmp_path / "run", str(tmp_path / "out")
    commands = [
        ["show"], ["show", "--groups"], ["show", "--episode", episode], ["show", "--episode", new_id()],
        ["records", "sft", "--out", out, "--min-reward", "0"],
        ["otel", "export", "--out", out, "--content", "--tokens"],
    ]  # fmt: skip
    for _ in range(count):
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        shutil.copy(whole, run)
        changed(rng, run / "records.db")
        for words in commands:
            before = (run / "records.db").read_bytes()
            status = main([*words, str(run)])
            said = capsys.readouterr().err.strip().splitlines()
            told = [line for line in said if line.startswith("cotune ")]
            assert status in (0, 1)
            assert len(told) <= 1 and "Traceback" not in "".join(said), said
            assert (run / "records.db").read_bytes() == before
    assert WIDTHS.keys() == COLUMNS.keys()


@pytest.mark.parametrize("count", [12, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_a_damaged_file_is_written_on_or_refused(whole: Path, tmp_path: Path, count: int) -> None:
    rng, run = random.Random(3), tmp_path / "run"
    run.mkdir()
    raw = whole.read_bytes()
    for _ in range(count):
        made = bytearray(raw[: rng.randrange(len(raw))] if rng.random() < 0.2 else raw)
        for _ in range(rng.randrange(1, 60)):
            made[rng.randrange(min(len(made) - 1, rng.choice((16, 100))), len(made))] = rng.randrange(256)
        for file in run.iterdir():
            file.unlink()
        (run / "records.db").write_bytes(made)
        with contextlib.suppress(RunError), SqliteStore.open(run) as store:
            live = LiveEpisode(store, Task(id="new", input=1), workflow="w")
            live.end("ok", rewards={"team": 1.0})
            with contextlib.suppress(RecordError):
                store.consume({"h": ["b.0"]}, 1)
            assert store.counters() and list(store.episodes()) is not None


def test_a_table_that_the_writer_reads_at_its_start(whole: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(whole, tmp_path / "records.db"))
    with contextlib.closing(sqlite3.connect(file)) as db:
        page = db.execute("SELECT rootpage FROM sqlite_master WHERE name = 'consumed'").fetchone()[0]
        size = db.execute("PRAGMA page_size").fetchone()[0]
    raw = bytearray(file.read_bytes())
    raw[(page - 1) * size : page * size] = b"\xff" * size
    file.write_bytes(raw)
    with pytest.raises(RunError, match="is damaged"):
        SqliteStore.open(file)
