"""What works with the base install alone; what needs an extra says which one, in one line."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from tests.core.installed import ROOT, install

pytestmark = pytest.mark.slow

WORKFLOW = "import cotune\n\n@cotune.workflow\ndef solve(task):\n    return 1.0\n"
RUN = ("app:solve", "--tasks", "tasks.jsonl")
MY_APP = """
from typing import TypedDict
import openai
from langgraph.graph import START, StateGraph

class State(TypedDict, total=False):
    question: str
    test: str
    answer: str

async def ask(text):
    said = await openai.AsyncOpenAI(api_key="none").chat.completions.create(
        model="any", messages=[{"role": "user", "content": text}])
    return said.choices[0].message.content

async def tester(state):
    return {"test": await ask("Write a test: " + state["question"])}

async def coder(state):
    return {"answer": await ask("Make it pass: " + state["test"])}

builder = StateGraph(State)
builder.add_node("tester", tester)
builder.add_node("coder", coder)
builder.add_edge(START, "tester")
builder.add_edge("tester", "coder")
graph = builder.compile()
"""
"""The application of the README's example."""


@pytest.fixture(scope="module")
def folder(base_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An application with one task, and an episode of it that was recorded without any extra."""
    made = tmp_path_factory.mktemp("base")
    (made / "app.py").write_text(WORKFLOW)
    (made / "tasks.jsonl").write_text('{"id": "a"}\n')
    told = cotune(base_environment, made, "trace", *RUN, "--out", "traced")
    assert "1 episode, 0 calls, 0 failed episodes, 0 lost records: traced" in told.stdout, told.stderr
    return made


def cotune(environment: Path, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [environment / "cotune", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_the_wheel_has_every_module(base_environment: Path) -> None:
    (installed,) = base_environment.parent.glob("lib/python*/site-packages/cotune")
    rooms = [("core", installed), *((name, installed / name) for name in ("integrations", "adapters", "trainer"))]
    ours = {place / path.relative_to(ROOT / room) for room, place in rooms for path in (ROOT / room).rglob("*.py")}
    assert ours == set(installed.rglob("*.py"))
    assert (installed / "py.typed").exists()


def test_the_viewer_needs_its_extra_alone(wheel: Path, folder: Path, tmp_path: Path) -> None:
    environment = install(wheel, tmp_path / "venv", "view")
    done = cotune(environment, folder, "show", "traced", "--html", str(tmp_path / "report.html"))
    assert done.stdout.startswith("wrote ") and "uPlot" in (tmp_path / "report.html").read_text(), done.stderr
    command = [environment / "cotune", "view", "traced", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout
        url = server.stdout.readline().removeprefix("Open ").strip()
        try:
            assert "team" in httpx.get(url, follow_redirects=True).text
            assert all(httpx.get(f"{url}static/{name}").status_code == 200 for name in ("uplot.js", "viewer.css"))
        finally:
            server.terminate()
    assert server.returncode == 0


def test_the_readme_example_is_checked(wheel: Path, tmp_path: Path) -> None:
    environment = install(wheel, tmp_path / "venv", "langgraph")
    example = re.search(r"```python\n(import cotune\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert example is not None
    (tmp_path / "app.py").write_text(example[1])
    (tmp_path / "my_app.py").write_text(MY_APP)
    (tmp_path / "tasks.jsonl").write_text('{"question": "sort a list", "answer": "sorted"}\n')
    done = cotune(environment, tmp_path, "check", *RUN)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    roles = [line.split() for line in done.stdout.splitlines() if line.startswith(("tester  ", "coder  "))]
    assert roles == [
        ["tester", "1", "lora", "yes", "yes"],
        ["coder", "1", "frozen", "no:", "no", "scorer"],
    ]
    assert done.stdout.endswith("\ntrainable\n")


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--help",), 0, "gateway  Record"),
        (("check", *RUN), 1, "\nnot trainable\n"),
        (("show", "traced"), 0, "team 1"),
        (("show", "."), 0, "team: trace 1"),
        (("show", "traced", "--json"), 0, '"rewards":{"team":1.0}'),
        (("records", "sft", "traced", "--out", "sft.jsonl"), 1, "wrote 0 lines"),
        (("otel", "export", "traced", "--out", "spans.jsonl"), 0, "exported 1 span of 1 episode"),
    ],
)
def test_works_without_an_extra(
    base_environment: Path, folder: Path, arguments: tuple[str, ...], status: int, said: str
) -> None:
    done = cotune(base_environment, folder, *arguments)
    assert (done.returncode, done.stderr) == (status, "")
    assert said in done.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (("check", *RUN, "--model", "some/model"), "train"),
        (("train", *RUN, "--model", "some/model"), "train"),
        (("train", *RUN, "--model", "some/model", "--cluster", "auto"), "train"),
        (("eval", *RUN, "--run", "traced"), "train"),
        (("serve", "./nowhere"), "train"),
        (("gateway", "--upstream", "http://127.0.0.1:9"), "gateway"),
        (("view", "traced"), "view"),
        (("show", "traced", "--html", "report.html"), "view"),
        (("otel", "export", "traced", "--endpoint", "http://127.0.0.1:9"), "otel"),
        (("trace", *RUN, "--out", "other", "--otlp", "http://127.0.0.1:9"), "otel"),
    ],
)
def test_names_the_extra_that_is_missing(
    base_environment: Path, folder: Path, arguments: tuple[str, ...], extra: str
) -> None:
    done = cotune(base_environment, folder, *arguments)
    assert done.returncode == 1
    assert all(line.endswith(" ...") for line in done.stdout.splitlines()), "only what is being loaded"
    assert done.stderr.startswith(f"cotune {arguments[0]}: ")
    assert f"pip install -e '.[{extra}]'" in done.stderr
    assert done.stderr.count("\n") == 1
