"""A coding assistant that follows the skill: its files and commands work as they stand."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cotune.cli.main import main
from tests.docs.test_blocks import answer, my_graph
from tests.integrations.provider import serving
from tests.test_docs import ROOT, blocks
from tests.trainer.tiny_app import build_base

SKILL = ROOT / "docs" / "SKILL.md"
SMALLER = shlex.split("--tasks-per-step 2 -k 2 --set sampling.max_tokens=4")


@pytest.mark.slow
def test_every_step_of_the_skill_works(
    in_thread: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(SKILL, "python")
    (tmp_path / "app.py").write_text(code)
    for name in ("tasks.jsonl", "held_out.jsonl"):
        lines = (json.dumps({"question": f"{n} and {n}", "answer": "a"}) + "\n" for n in range(4))
        (tmp_path / name).write_text("".join(lines))
    module = ModuleType("my_app")
    module.graph = my_graph()  # type: ignore[attr-defined]
    base = build_base(tmp_path / "base")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "my_app", module)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    monkeypatch.setattr(logging, "basicConfig", lambda **options: None)
    said = {}
    with serving() as provider:
        provider.reply = answer
        for name, value in {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "none", "OMP_NUM_THREADS": "1"}.items():
            monkeypatch.setenv(name, value)
        for line in (line for block in blocks(SKILL, "sh") for line in block.splitlines()):
            program, command, *words = shlex.split(line.replace("Qwen/Qwen3-1.7B", str(base)))
            smaller = SMALLER if command == "train" else []
            assert program == "cotune" and main([command, *words, *smaller]) == 0, line
            said[command] = capsys.readouterr().out
    assert re.search(r"^trainable\b", said["check"], re.MULTILINE) and "a run can start" in said["doctor"]
    assert re.search(r"^writer +\d+ +\d+ +0\b", said["records"], re.MULTILINE)
    assert {entry["role"] for entry in json.loads(Path("adapters/roles.json").read_text())["roles"]} >= {"writer"}


def test_the_skill_says_when_to_use_it() -> None:
    """Front matter as the format of skills has it: a name of small letters and a description."""
    head = re.match(r"---\nname: ([a-z-]+)\ndescription: (.+)\n---\n", SKILL.read_text())
    assert head and len(head[2]) <= 1024 and SKILL.stat().st_size < 8000
