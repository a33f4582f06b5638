"""Every python block of the documentation and of the public names' docstrings runs, page by page, as it stands there.

What a page supposes (an application, its tasks, a base model, a run) is real and small. Blocks for many machines are
held to what they call: see `test_what_needs_more_calls_what_there_is`.
"""

from __future__ import annotations

import ast
import asyncio
import contextvars
import functools
import importlib
import inspect
import json
import os
import queue
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypedDict

import openai
import pytest
from langgraph.graph import START, StateGraph
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cotune
from cotune.adapters.serving import Endpoint
from cotune.algorithms.catalogue import recipe
from cotune.config.learner import LearnerSettings
from cotune.prompts.file import write_prompts
from cotune.records.policies import LoraSpec, policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.learner.local import LocalLearner
from cotune.types import Call, Candidate, FinishedEpisode, Reward
from tests.integrations.edits import part, prompts
from tests.integrations.provider import completion, json_reply, said, serving
from tests.test_docs import ROOT, blocks
from tests.trainer.learner.learner_rows import build_learner_base, make_rows
from tests.trainer.tiny_app import build_base

TASKS = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in (1, 2)]
SMALLER = {"steps=100": "steps=1", '{"steps": 200}': '{"steps": 2}', '{"k": 8}': '{"k": 2}', "port=8000": "port=0"}
"""What is made smaller in a block before it runs."""
BACKEND = "127.0.0.1:4318"
"""The address of a backend in the documentation."""
OF_CLUSTERS = ("how-to/vllm.md", "internals/training.md", "internals/sampler.md")
"""Pages with blocks that need more than this machine; see `needs_more`."""
ELSEWHERE = ("start.md", "tutorials/", *(f"frameworks/{name}.md" for name in ("autogen", "crewai", "openai-agents")))
"""Pages that other tests follow: step by step, or with the framework."""
EXAMPLES = (
    "workflow", "role", "recorded", "trace", "check", "blame", "train", "resume", "evaluate", "export", "serve",
    "deployed", "gateway", "feedback", "Feedback", "Judge", "CotuneError", "Outage",
)  # fmt: skip
"""The public names in the order in which their examples build on each other."""


class State(TypedDict, total=False):
    question: str
    test: str
    answer: str


def ask(text: str) -> str:
    message = {"role": "user", "content": text}
    done = openai.OpenAI().chat.completions.create(model="any", messages=[message], max_tokens=4)
    return done.choices[0].message.content or ""


def answer(body: dict[str, Any], number: int) -> tuple[int, str, list[Any]]:
    """The provider's answer, on both of OpenAI's interfaces."""
    if body.get("logprobs"):
        top = [{"token": token, "logprob": -0.7, "bytes": None} for token in ("Yes", "No")]
        told = {"logprobs": {"content": [{**top[0], "top_logprobs": top}], "refusal": None}}
        found = completion({"role": "assistant", "content": "Yes"})
        return json_reply({**found, "choices": [{**found["choices"][0], **told}]})
    if "messages" in body:
        return said(body, number)
    content = [{"type": "output_text", "text": "a plan", "annotations": []}]
    message = {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": content}
    head = {"id": "r1", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    return json_reply({**head, "output": [message], "parallel_tool_calls": False, "tool_choice": "auto", "tools": []})


def my_graph() -> Any:
    builder = StateGraph(State)
    builder.add_node("tester", lambda state: {"test": ask(f"test {state['question']}")})
    builder.add_node("writer", lambda state: {"answer": ask(f"write {state['question']}")})
    builder.add_edge(START, "tester")
    builder.add_edge("tester", "writer")
    return builder.compile()


async def run(text: str, names: dict[str, Any]) -> None:
    """Run a block, which may await, with these names, and add its own to them."""
    for usual, here in {**SMALLER, BACKEND: f"127.0.0.1:{names['port']}"}.items():
        text = text.replace(usual, here)
    # A block that is a file of its own, such as a method, may name itself.
    names.setdefault("__file__", f"{Path.cwd()}/my_method.py")
    result = eval(compile(text, "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if inspect.isawaitable(result):
        await result


@pytest.fixture(scope="module")
def accepting() -> Iterator[int]:
    """The port of a server that takes whatever is posted to it, as a backend of OpenTelemetry."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def world(in_thread: None, tmp_path_factory: pytest.TempPathFactory, accepting: int) -> Iterator[dict[str, Any]]:
    """What pages take for granted: an application with its tasks, and a folder in which the docstrings' examples have
    trained it and exported the run."""
    folder = tmp_path_factory.mktemp("world")
    for name in ("tasks.jsonl", "held_out.jsonl"):
        (folder / name).write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    build_base(folder / "Qwen" / "Qwen3-1.7B")
    (folder / "models").mkdir()
    (folder / "models" / "base").symlink_to(folder / "Qwen" / "Qwen3-1.7B")
    module = ModuleType("my_app")
    module.graph = my_graph()  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch, serving() as provider:
        provider.reply = answer
        for name, value in {"OPENAI_BASE_URL": provider.url, "OPENAI_API_KEY": "none", "HF_HUB_OFFLINE": "1"}.items():
            patch.setenv(name, value)
        patch.setenv("COTUNE_SPOOL", str(folder / "spool"))
        patch.setitem(sys.modules, "my_app", module)
        patch.chdir(folder)
        patch.setattr(Endpoint, "wait", lambda self: None)  # cotune.serve returns once it serves
        names = {
            "__name__": "app",
            "cotune": cotune,
            "asyncio": asyncio,
            "contextvars": contextvars,
            "os": os,
            "re": re,
            "graph": module.graph,  # type: ignore[attr-defined]
            "client": openai.OpenAI(),
            "messages": [{"role": "user", "content": "hello"}],
            "Sequence": Sequence,
            **{kind.__name__: kind for kind in (Call, Candidate, FinishedEpisode)},
            "Reward": Reward,
            "Question": dict[str, str],
            "port": accepting,
        }
        _examples(names)
        yield names


def _examples(names: dict[str, Any]) -> None:
    """Run the examples of the public names, in the order in which they build on each other."""
    assert sorted(EXAMPLES) == sorted(cotune.__all__)
    for name in EXAMPLES:
        (text,) = re.findall(r"^```python\n(.*?)^```", example(name), re.MULTILINE | re.DOTALL)
        # The gateway's example is a workflow of its own, whose application is in JavaScript.
        asyncio.run(run(text, dict(names) if name == "gateway" else names))


def example(name: str) -> str:
    """The docstring of a public name; of `trace`, which is a class by another name, what stands below it."""
    if name == "trace":
        return (ROOT / "core" / "episodes" / "tracing.py").read_text()
    return inspect.getdoc(getattr(cotune, name)) or ""


def pages() -> list[str]:
    """Pages with python blocks that are run here."""
    named = [str(page.relative_to(ROOT / "docs")) for page in sorted((ROOT / "docs").rglob("*.md"))]
    return [name for name in named if not name.startswith(ELSEWHERE) and here(name)]


def needs_more(block: str) -> bool:
    """Whether a block opens Ray or vLLM."""
    return "integrations.cluster" in block or "Vllm" in block


def here(page: str) -> list[str]:
    """The blocks of a page that run on this machine."""
    return [block for block in blocks(ROOT / "docs" / page, "python") if not needs_more(block)]


def supposed(page: str, folder: Path) -> dict[str, Any]:
    """What one page supposes beyond that."""
    loss = recipe("at_grpo").loss
    if page == "internals/training.md":
        policies = policies_for("lora", ["navigator", "driver"], LoraSpec())
        opened = {"LocalLearner": LocalLearner, "LearnerSettings": LearnerSettings, "recipe": recipe}
        return {
            **opened,
            "model": build_learner_base(folder),
            "policies": policies,
            "rows": make_rows(role="navigator"),
        }
    if page == "internals/sampler.md":
        learner = LocalLearner.open(
            "models/base", policies_for("lora", ["planner"], LoraSpec()), LearnerSettings(), loss
        )
        kinds = {"PolicyRef": PolicyRef, "LoraSpec": LoraSpec, "SamplingParams": SamplingParams}
        return {**kinds, "weights": learner.weights("planner")}
    if page == "how-to/opentelemetry.md":
        return {"store": SqliteStore.open("runs/r1", read_only=True), "my_exporter": InMemorySpanExporter()}
    if page == "how-to/prompts.md":
        write_prompts("prompts.json", prompts(part("Old.", "New.", role="writer")))
    if page == "frameworks/openai.md":
        return {"queue": queue.Queue(), "question": "2 + 2"}
    return {}


def run_page(page: str, names: dict[str, Any]) -> None:
    """Run the blocks of a page; what they add to is a workflow of its own for each, where they make none."""
    for text in here(page):
        names["solve"] = cotune.workflow(lambda task: 0.0)
        asyncio.run(run(text, names))


@pytest.mark.parametrize("page", pages())
def test_the_blocks_of_a_page_run(page: str, world: dict[str, Any], tmp_path: Path) -> None:
    run_page(page, {**world, **supposed(page, tmp_path)})


def test_scorers_of_the_page_give_what_it_says(world: dict[str, Any]) -> None:
    names = dict(world)
    run_page("how-to/scorers.md", names)
    task = {"answer": "42", "goal": 5}
    plan, answer = (SimpleNamespace(text=text) for text in ("- look\n- add", "- say 42\n- stop"))
    assert [names["leaks"](said, None, task) for said in (plan, answer)] == [0.0, 1.0]
    assert names["plans"](plan, None, task) == {"steps": True, "given_away": 0.0}
    assert names["plans"](answer, None, task) == {"steps": True, "given_away": -1.0}
    there = SimpleNamespace(state={"position": 3})
    assert [names["progress"](SimpleNamespace(text=t), there, task) for t in ("right", "left", "up")] == [
        1.0,
        -1.0,
        0.0,
    ]
    assert names["brief"](SimpleNamespace(text="so " * 60), there, task) == cotune.Feedback(
        -10, "60 words; 50 would do"
    )
    shortest = names["shortest"]([SimpleNamespace(text=text) for text in ("ab", "a", "b")], there, task)
    assert [found["shortest"] for found in shortest] == [False, True, True]


@pytest.mark.parametrize("page", OF_CLUSTERS)
def test_what_needs_more_calls_what_there_is(page: str) -> None:
    """Imports are there, and every call of what is imported fits its signature."""
    bound = 0
    for text in filter(needs_more, blocks(ROOT / "docs" / page, "python")):
        tree = ast.parse(text)
        names = dict(_imported(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            parts = ast.unparse(call.func).split(".")
            if parts[0] in names.keys() - {"functools"} and all(part.isidentifier() for part in parts):
                called = functools.reduce(getattr, parts[1:], names[parts[0]])
                given = {word.arg: None for word in call.keywords if word.arg}
                inspect.signature(called).bind(*call.args, **given)
                bound += 1
    assert bound


def _imported(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module != "my_app":
            module = importlib.import_module(str(node.module))
            yield from ((name.asname or name.name, getattr(module, name.name)) for name in node.names)
        elif isinstance(node, ast.Import):
            yield from ((name.name, importlib.import_module(name.name)) for name in node.names)
