"""metrics.jsonl with broken lines: they are left out and counted, and no good line is lost."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from cotune.storage.metrics_file import read_metrics
from cotune.trainer.run.run_folder import RunFolder
from tests.mutations import as_json, damaged, mutated
from tests.trainer.conftest import Trainer
from tests.trainer.metrics_page import undocumented
from tests.trainer.tiny_app import application, letters

LINE = {"step": 0, "outcome": {"team": 0.5}, "left_out": {"flat": 3}, "calls": 6, "candidates": 24, "groups": 6}


@pytest.fixture
def folder(tmp_path: Path):
    made = RunFolder(tmp_path)
    yield made
    made.close()


BROKEN = [b'{"step": 1, "outc', b"\xff\xfe\x00", b"{}", b"[]", b"null", b'{"step": "one"}', b"[" * 100_000]


@pytest.mark.parametrize("broken", BROKEN, ids=[line[:12].decode("latin-1") for line in BROKEN])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_broken_line_anywhere_costs_itself(folder: RunFolder, caplog, broken: bytes, place: int) -> None:
    lines = [json.dumps({**LINE, "step": step}).encode() for step in range(4)]
    lines.insert(place, broken)
    folder.metrics.write_bytes(b"\n".join(lines))
    assert [line["step"] for line in read_metrics(folder.path)] == [0, 1, 2, 3]
    assert f"{folder.metrics}: 1 broken line is left out" in caplog.text
    folder.truncate_metrics(3)
    assert [line["step"] for line in read_metrics(folder.path)] == [0, 1, 2]
    folder.append_metrics({**LINE, "step": 3, "outcome": {"team": float("nan")}})
    assert [line["step"] for line in read_metrics(folder.path)] == [0, 1, 2, 3]


def test_a_run_resumed_over_a_broken_line_keeps_the_good_ones(trainer: Trainer) -> None:
    app = application(first=letters, second=letters)
    trainer(app, steps=3, policies="full")
    file = trainer.folder / "run" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + b'{"step": 1, "br\xff\n{}\n' + b"".join(lines[1:]))
    assert trainer.resume(app).finished
    assert [line["step"] for line in trainer.metrics()] == [0, 1, 2]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.long)])
def test_odd_lines(folder: RunFolder, count: int) -> None:
    rng = random.Random(5)
    for _ in range(count):
        odd = as_json(mutated(rng, LINE))
        odd = damaged(rng, odd) if rng.random() < 0.3 else odd
        folder.metrics.write_bytes(json.dumps(LINE).encode() + b"\n" + odd + b"\n" + json.dumps(LINE).encode() + b"\n")
        folder.truncate_metrics(1)
        found = list(read_metrics(folder.path))
        assert found[0] == found[-1] and LINE.items() <= found[0].items()
        for line in found:
            sum(line["left_out"].values())


def test_every_name_of_a_step_is_explained(trainer: Trainer) -> None:
    trainer(application(first=letters, second=letters), loss={"kl": 0.1})
    line = trainer.metrics()[-1]
    assert {"kl", "sampler_gap_mean"} <= line["roles"]["first"].keys()
    assert undocumented(line) == []
    line["roles"]["first"]["new"] = line["seconds"]["lunch"] = 1.0
    line["left_out"]["whim"] = 1
    assert undocumented({**line, "more": 1}) == ["left_out.whim", "more", "roles.new", "seconds.lunch"]
