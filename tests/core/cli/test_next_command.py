"""On a terminal, each command ends with the next one, which runs as it stands: followed from one to the other."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from cotune.cli.main import main, parser
from cotune.cli.printing.next_command import _NEXT, MODEL, next_commands
from cotune.reading.evaluations import EvaluationReport
from tests.integrations.provider import Provider, serving
from tests.test_surface import forms_of
from tests.trainer.tiny_app import build_base

APP = """
import cotune, openai

@cotune.workflow
async def solve(task):
    with cotune.role("writer"):
        system = {"role": "system", "content": "Say the letter a, and no other one, in every answer."}
        messages = [system, {"role": "user", "content": task["letter"]}]
        done = await openai.AsyncOpenAI().chat.completions.create(model="m", messages=messages, max_tokens=3)
    return float("e" in done.choices[0].message.content)

@solve.scorer("writer")
def varied(candidate, call, task):
    return sum(map(ord, candidate.text)) % 7
"""
SMALL = "--steps 1 --tasks-per-step 2 -k 2 --set sampling.max_tokens=3"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serving() as found:
        yield found


Follow = Callable[[str], list[str]]


@pytest.fixture
def follow(
    in_thread: None,
    base: Path,
    provider: Provider,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Follow:
    """Runs a command and returns those that it ends with."""
    (tmp_path / "app.py").write_text(APP)
    for name in ("tasks.jsonl", "held_out.jsonl"):
        (tmp_path / name).write_text("".join(json.dumps({"letter": letter}) + "\n" for letter in "abcd"))
    (tmp_path / "base").symlink_to(base)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    for name, value in {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "none"}.items():
        monkeypatch.setenv(name, value)

    def run(line: str) -> list[str]:
        program, *words = shlex.split(line)
        assert program == "cotune"
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
            status = main(words)
        said = capsys.readouterr().out
        assert status in (0, 3), said
        found = re.findall(r"^(?:next|  or): (.+)$", said, re.MULTILINE)
        for command in found:
            assert parser().parse_args(shlex.split(command)[1:]).command in line + command
        return found

    return run


def test_next_commands_belong_to_commands_that_exist() -> None:
    assert _NEXT.keys() <= {form.prog.removeprefix("cotune ") for form in forms_of(parser())}


def test_a_command_without_an_entry_suggests_nothing() -> None:
    assert next_commands(argparse.Namespace(command="view", subcommand=None), 0) == []


@pytest.mark.parametrize("sources", ["--base base", "--use writer=runs/r1"])
def test_no_command_follows_the_evaluation_of_a_team_or_of_base_models(sources: str) -> None:
    arguments = parser().parse_args(shlex.split(f"eval app:solve --tasks held_out.jsonl {sources}"))
    arguments.result = EvaluationReport(evaluations={})
    assert next_commands(arguments, 0) == []


def test_recorded_episodes_are_blamed_without_a_file_of_tasks() -> None:
    arguments = parser().parse_args(shlex.split("blame app:solve --episodes runs/t --reference openai:gpt-5"))
    arguments.result = SimpleNamespace(verdict="named", at_fault=("writer",), path="runs/swapped")
    improve, train = next_commands(arguments, 0)
    assert improve.startswith("cotune prompts improve app:solve --tasks tasks.jsonl --reflection gpt-5-mini --set")
    assert train == f"cotune train app:solve --tasks tasks.jsonl --model {MODEL}"


def test_from_the_check_to_the_export(follow: Follow) -> None:
    (train,) = follow("cotune check app:solve --tasks tasks.jsonl --model base --plan tree -k 2")
    assert train == "cotune train app:solve --tasks tasks.jsonl --model base --plan tree -k 2"
    evaluate, export, view = follow(f"{train} {SMALL} --out runs/r1 --set evaluation.tasks=none")
    assert view == "cotune view runs/r1"
    (steps,) = follow(f"{evaluate} --modes base,trained")
    assert steps.endswith("--steps --explain"), "four tasks show no improvement"
    assert follow(steps) == [view]
    assert follow(export) == ["cotune serve adapters/"]


def test_from_records_to_what_learns_from_them(follow: Follow) -> None:
    assert follow("cotune trace app:solve --tasks tasks.jsonl --out runs/t") == ["cotune show runs/t"]
    assert follow("cotune show runs/t") == ["cotune view runs/t"]
    (write,) = follow("cotune records score runs/t app:solve")
    assert write == "cotune records score runs/t app:solve --write"
    assert follow(write) == ["cotune show runs/t"]
    (learn,) = follow("cotune records sft runs/t --out sft.jsonl")
    assert learn == f"cotune train app:solve --recipe sft --records runs/t --model {MODEL}"
    follow(f"{learn.replace(MODEL, 'base')} --steps 1 --out runs/sft")
    assert follow("cotune show runs") == ["cotune show runs/t"]


def test_from_prompts_to_their_use(follow: Follow) -> None:
    follow("cotune trace app:solve --tasks tasks.jsonl --out runs/t")
    (edit,) = follow("cotune prompts show runs/t --out prompts.json")
    assert edit == "cotune prompts edit prompts.json --part writer.system"
    Path("new.md").write_text("Say the letter e.")
    (trace,) = follow(f"{edit} --text new.md")
    assert trace == "cotune trace app:solve --tasks tasks.jsonl --prompts prompts.json"
    assert follow(trace) == ["cotune show runs/trace"]
    (export,) = follow("cotune prompts diff prompts.json")
    assert follow(export) == [] and Path("prompts").is_dir()


def test_a_pipe_gets_no_next_command(follow: Follow, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "app:solve", "--tasks", "tasks.jsonl"]) == 0
    assert "next:" not in capsys.readouterr().out
