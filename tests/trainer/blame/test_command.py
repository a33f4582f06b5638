"""`cotune blame` on the command line, with an application and a reference that a provider on a port answers for."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cotune.cli.main import main
from cotune.intervals import Interval
from cotune.reading.blame import Blame, RoleBlame
from cotune.terminal import terminal
from cotune.trainer.blame.report import render
from tests.integrations.provider import serving
from tests.trainer.blame.office import Office, tasks

APP = """
import cotune, openai

@cotune.workflow
async def solve(task):
    text = task["word"]
    async with openai.AsyncOpenAI() as client:
        for role in ("planner", "writer"):
            messages = [{"role": "system", "content": f"You are the {role}."}, {"role": "user", "content": text}]
            with cotune.role(role):
                reply = await client.chat.completions.create(model="small", messages=messages)
            text = reply.choices[0].message.content
    return float(text == task["word"])
"""


@pytest.fixture
def office(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_thread: None) -> Any:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks(5)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    made = Office({"writer": 1.0})
    with serving() as provider:
        monkeypatch.setenv("OPENAI_BASE_URL", provider.url)
        monkeypatch.setenv("OPENAI_API_KEY", "none")
        provider.reply = made.reply
        yield made


LINE = ["blame", "app:solve", "--tasks", "tasks.jsonl", "--reference", "openai:good", "--runs", "4"]


def test_the_table_the_verdict_and_the_next_command(
    office: Office, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
        assert main([*LINE, "--yes"]) == 0
    said = capsys.readouterr().out
    assert "5 tasks, up to 4 runs of the application on each: 20 runs. It can name a role" in said
    assert "0% of the failures succeed at another try" not in said and "No failure was run again." in said
    assert "writer is at fault: it costs 100 (" in said
    assert "next: cotune prompts improve app:solve --tasks tasks.jsonl --reflection gpt-5-mini" in said
    # The same command runs nothing again.
    asked = office.asked.total()
    assert main([*LINE, "--yes", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["verdict"], values["at_fault"], values["runs"]) == ("named", ["writer"], 20)
    assert office.asked.total() == asked


def test_nothing_is_asked_without_a_limit_or_an_agreement(
    office: Office, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: False)
    assert main(LINE) == 1
    assert "Name a limit, --max-calls or --max-cost, or agree with --yes." in capsys.readouterr().err
    assert not office.asked


def report(role: str, **fields: Any) -> str:
    interval = Interval(mean=0.31, low=0.22, high=0.4, n=20)
    row = RoleBlame(
        role=role,
        reference="gpt-5",
        calls=2.5,
        score=interval,
        alone=interval,
        last=Interval(mean=-0.12, low=-0.25, high=0.1, n=20),
        seconds=-12.3,
        cost=0.00123,
        runs=4,
    )
    values: dict[str, Any] = {
        "workflow": "app:solve", "references": {"": "gpt-5"}, "removes": False, "tasks": 20, "runs": 600,
        "calls": 12_345, "cost": 1.5, "outcome": interval, "swapped": interval, "span": 1.0, "luck": interval,
        "roles": [row], "all_roles": [role], "verdict": "named", "at_fault": [role],
    }  # fmt: skip
    console = terminal(width=80)
    with console.capture() as heard:
        console.print(render(Blame(**{**values, **fields})))
    return heard.get()


def test_the_report_fits_into_80_columns() -> None:
    lines = report("planner").splitlines()
    assert max(map(len, lines)) <= 80
    assert any("31 (22 to 40)" in line and "-12 (-25 to 10)" in line and "-12.3" in line for line in lines)
    assert "31% of the failures succeed at another try (22 to 40); the rest fail again." in lines


def test_the_report_tells_no_failure_from_none_that_was_run_again() -> None:
    assert "No run of the application as it is failed." in report("planner", luck=None)
    assert "No failure was run again." in report("planner", luck=None, failures=3)


@pytest.mark.parametrize(
    ("verdict", "fields", "words"),
    [
        ("either", {"at_fault": ["a", "b"]}, "Either a or b is at fault"),
        ("nobody", {}, "Nobody is at fault: no role costs 10 points or more."),
        ("undecided", {"more_tasks": 12}, "Undecided: about 12 more tasks would decide."),
        ("undecided", {"more_tasks": None}, "Undecided: the costliest role costs about 10 points, the least"),
        ("reference", {}, "The reference does not help (0.31 as it is, 0.31 with all roles swapped)"),
    ],
)
def test_every_verdict_is_a_sentence(verdict: str, fields: dict[str, Any], words: str) -> None:
    assert words in report("planner", verdict=verdict, **fields).replace("\n", " ")
