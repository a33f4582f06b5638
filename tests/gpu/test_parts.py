"""What `make gpu` measures on a GPU runs here with small shapes, and without what such a machine may lack."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.parts import PARTS

ABSENT = [
    "bitsandbytes",
    "gguf",
    "httptools",
    "jinja2",
    "langchain_core",
    "langgraph",
    "llguidance",
    "openai",
    "PIL",
    "pydantic",
    "ray",
    "starlette",
    "time_machine",
    "uvicorn",
    "uvloop",
    "vllm",
    "zstandard",
]
ALL_PARTS = """
import sys
from pathlib import Path

sys.modules.update(dict.fromkeys({absent!r}))
from benchmarks.gpu.__main__ import PARTS, run_part

for name in PARTS:
    run_part(name, 60.0, tiny=True, out=Path({out!r}))
"""


@pytest.mark.slow
def test_every_part_runs_without_an_installation_and_its_checks_hold(tmp_path: Path) -> None:
    out = tmp_path / "gpu.jsonl"
    script = ALL_PARTS.format(absent=ABSENT, out=str(out))
    command = ["benchmarks/gpu/from_source.sh", sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]

    lines = [json.loads(line) for line in out.read_text().splitlines()]
    found = gpu.summary(lines)
    assert found == {"checks": 8, "checks_failed": [], "parts_failed": [], "left_out": []}, lines
    assert list(dict.fromkeys(line["part"] for line in lines)) == list(PARTS)
    assert [line["tokens"] for line in lines if line["part"] == "rollouts" and "tokens" in line] == [16, 48] * 3


def test_a_part_that_fails_is_a_line_with_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(bench: Any) -> Any:
        yield {"figure": 1}
        raise ZeroDivisionError("a fault")

    monkeypatch.setitem(PARTS, "trees", (60, broken))  # type: ignore[arg-type]
    out = tmp_path / "gpu.jsonl"
    gpu.run_part("trees", 1.0, tiny=True, out=out)
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first == {"part": "trees", "figure": 1}
    assert second["failed"] == "ZeroDivisionError: a fault" and "in broken" in second["where"]
    assert gpu.summary([first, second])["parts_failed"] == ["trees"]


def test_a_part_that_hangs_or_dies_is_a_line_and_the_next_one_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], timeout: float) -> Any:
        if "device" in command:
            raise subprocess.TimeoutExpired(command, timeout)
        return Namespace(returncode=-6)

    monkeypatch.setattr(subprocess, "run", run)
    out = tmp_path / "gpu.jsonl"
    gpu.run_all(Namespace(minutes=7.0, out=out, tiny=False), ["device", "trees"])
    assert [json.loads(line)["failed"] for line in out.read_text().splitlines()] == [
        "stopped after 90 s",
        "the process ended with status -6",
    ]


def test_a_failed_check_and_what_was_left_out_are_in_the_summary() -> None:
    lines: list[dict[str, Any]] = [
        {"part": "correctness", "check": "trees", "ok": False},
        {"part": "correctness", "check": "rows", "ok": True},
        {"part": "updates", "left_out": "Qwen3-4B"},
    ]
    found = gpu.summary(lines)
    assert (found["checks"], found["checks_failed"], found["left_out"]) == (2, ["trees"], ["updates: Qwen3-4B"])
