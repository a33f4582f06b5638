"""Privacy: no prompt in the log, no connection that nobody asked for, no message past a redactor."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import openai
import pytest
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

import cotune
from cotune.cli.main import main
from cotune.recording import call_records
from cotune.records.structs import Message
from cotune.runtime import warn_once
from tests.core.storage.whole_file import copied
from tests.integrations.provider import Provider, completion, event, json_reply
from tests.integrations.recorded import Recorded, Sink, answer, episode

SECRET = "my-secret-words"
USER = [{"role": "user", "content": f"remember {SECRET}"}]


def test_no_prompt_is_in_the_log_whatever_goes_wrong(provider: Provider, caplog, monkeypatch):
    """Failures of the provider, the application, a redactor, a responder, the store and the recorder itself."""
    warn_once._first_of.cache_clear()
    echo = {"error": {"message": f"bad prompt: {SECRET}"}}
    replies = [
        json_reply(echo, 400),
        json_reply(echo, 429),
        (200, "application/json", [f"{{{SECRET}".encode()]),
        (200, "text/event-stream", [event({"content": SECRET}), f"data: {SECRET}\n\n".encode()]),
        (200, "text/event-stream", [event({"content": SECRET})]),
    ]
    provider.reply = lambda body, number: replies[number % len(replies)]
    model = ChatOpenAI(model="m", base_url=provider.url, api_key="none", max_retries=0)
    builder = StateGraph(MessagesState)
    builder.add_node("node", lambda state: {"messages": [model.invoke(state["messages"])]})
    builder.add_edge(START, "node")
    graph = builder.compile()

    async def run(task):
        async with openai.AsyncOpenAI(base_url=provider.url, api_key="none", max_retries=0) as client:
            for number in range(5):
                try:
                    got = await client.chat.completions.create(model="m", messages=USER, stream=number > 2)
                    if number > 2:
                        [chunk async for chunk in got]
                except Exception as error:  # noqa: BLE001
                    assert number < 4, error
        graph.invoke({"messages": USER})

    def raises(*args):
        raise ValueError(f"about {SECRET}")

    class Full(Sink):
        write = raises

    redacting = cotune.workflow(lambda task: graph.invoke({"messages": USER}))
    redacting.redactor(raises)
    monkeypatch.setattr(call_records, "_key", raises)
    with caplog.at_level(logging.INFO), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for sink, reply in ((Sink(), None), (Full(), None), (Sink(), raises), (Sink(), lambda call: answer(SECRET))):
            asyncio.run(episode(run, reply, sink))
        asyncio.run(episode(redacting))
    said = [record.getMessage() + str(record.exc_info or "") for record in caplog.records]
    assert [line for line in said if SECRET in line] == []
    assert [str(w.message) for w in warned if SECRET in str(w.message)] == []
    own = " ".join(record.getMessage() for record in caplog.records if record.name == "cotune")
    for happened in ("could not be recorded", "store refused", "redaction failed", "blocks its event loop"):
        assert happened in own


def test_details_are_logged_at_debug(caplog, monkeypatch, record: Recorded, nowhere: None):
    warn_once._first_of.cache_clear()

    class Broken(Sink):
        def write(self, records):
            raise ValueError("what the store says")

    with caplog.at_level(logging.DEBUG, "cotune"):
        asyncio.run(episode(lambda task: 1.0, None, Broken()))
    assert [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "cotune"] == [
        ("DEBUG", "The store refused 2 records."),
        ("WARNING", "The store refused 2 records. (ValueError)"),
    ]
    assert "what the store says" in caplog.text


_SCRIPT = """
import socket, sys
contacted = set()
for name in ("connect", "connect_ex"):
    def patched(self, address, original=getattr(socket.socket, name)):
        contacted.add(str(address))
        return original(self, address)
    setattr(socket.socket, name, patched)
lookups = []
original_lookup = socket.getaddrinfo
socket.getaddrinfo = lambda host, *args, **kwargs: lookups.append(host) or original_lookup(host, *args, **kwargs)
import cotune
assert not contacted and not lookups
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
model = ChatOpenAI(model="m", max_retries=0)
builder = StateGraph(MessagesState)
builder.add_node("writer", lambda state: {"messages": [model.invoke(state["messages"])]})
builder.add_edge(START, "writer")
graph = builder.compile()
with cotune.trace("run/records.db") as t:
    graph.invoke({"messages": [{"role": "user", "content": "hello"}]})
assert [(c.role, c.text) for c in t.calls] == [("writer", "re: hello")], t.calls
from cotune.cli.main import main
assert main(["trace", "app.py:solve", "--tasks", "tasks.jsonl", "--out", "run"]) == 0
assert main(["show", "run"]) == 0
assert main(["show", "run", "--groups"]) == 0
import json
print(json.dumps([sorted(contacted), sorted(set(map(str, lookups)))]))
"""

_APP = """
import os, re
import openai
import cotune

@cotune.workflow
def solve(task):
    with openai.OpenAI(max_retries=0) as client:
        reply = client.chat.completions.create(model="m", messages=[{"role": "user", "content": task["q"]}])
    return len(reply.choices[0].message.content)

def hide(message):
    message["content"] = re.sub("my-secret-words", "***", str(message["content"]))
    return message
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "app.py").write_text(textwrap.dedent(_APP))
    (tmp_path / "tasks.jsonl").write_text(json.dumps({"id": "t", "q": SECRET}) + "\n")
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_text_tasks_errors_and_finish_reasons_are_redacted(
    provider: Provider, app: Path, capsys, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "200")

    def hide(message):
        return {**message, "content": str(message.get("content")).replace(SECRET, "***")}

    body = completion({"role": "assistant", "content": "yes"})
    body["choices"][0]["finish_reason"] = f"because of {SECRET}"
    provider.reply = lambda asked, number: json_reply(body)
    client = openai.OpenAI(base_url=provider.url, api_key="none", max_retries=0)
    with cotune.trace("run/records.db", task=f"find {SECRET}", redactor=hide) as t:
        client.chat.completions.create(model="m", messages=USER)
        assert t.calls[0].record.candidates[0].finish_reason == "because of ***"
    failing = cotune.workflow(lambda task: 1 / 0 if task is None else int(SECRET))
    failing.redactor(hide)
    outcome = asyncio.run(episode(failing))
    assert outcome.error is not None and "ValueError" in str(outcome.error) and "***" in str(outcome.error)
    assert SECRET not in str(outcome.error) + repr(outcome.error) + str(outcome.episode)
    (app / "app.py").write_text(textwrap.dedent(_APP).replace("    with openai", "    int(task['q'])\n    with openai"))
    sys.modules.pop("app", None)
    client.chat.completions.create(model="m", messages=USER)
    assert main(["trace", "app.py:solve", "--tasks", "tasks.jsonl", "--out", "run", "--redact", "app:hide"]) == 1
    sys.modules.pop("app", None)
    assert main(["show", "run"]) == 0
    assert main(["otel", "export", "run", "--out", "run/spans.jsonl", "--content", "--tokens"]) == 0
    shown = capsys.readouterr()
    assert "find ***" in shown.out
    found = (shown.out + shown.err).encode() + b"".join(file.read_bytes() for file in (app / "run").iterdir())
    assert SECRET.encode() not in found


@pytest.mark.slow
def test_only_the_provider_is_contacted(provider: Provider, app: Path):
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, cwd=app)
    assert done.returncode == 0, done.stderr
    contacted, looked_up = json.loads(done.stdout.splitlines()[-1])
    port = int(provider.url.rpartition(":")[2].removesuffix("/v1"))
    assert contacted == [f"('127.0.0.1', {port})"]
    assert looked_up == ["127.0.0.1"]
    assert len(provider.requests) == 2


@pytest.mark.parametrize("redact", [[], ["--redact", "app:hide"]], ids=["as it is", "redacted"])
def test_a_redactor_from_the_command_line(provider: Provider, app: Path, capsys, redact):
    sys.modules.pop("app", None)
    assert main(["trace", "app.py:solve", "--tasks", "tasks.jsonl", "--out", "run", *redact]) == 0
    assert main(["show", "run"]) == 0
    found = b"".join(file.read_bytes() for file in (app / "run").iterdir())
    assert (SECRET.encode() in found) == (not redact)
    assert provider.requests[0]["messages"][0]["content"] == SECRET
    with copied(app / "run") as store:
        (done,) = store.episodes()
        (call,) = store.calls(done.id)
        assert store.message(call.messages[0])["content"] == ("***" if redact else SECRET)
        assert call.redacted == bool(redact)
    sys.modules.pop("app", None)


def test_a_redactor_that_does_not_exist_is_said_before_anything_runs(provider: Provider, app: Path, capsys):
    assert main(["trace", "app.py:solve", "--tasks", "tasks.jsonl", "--redact", "nowhere:hide"]) == 1
    assert "redact = 'nowhere:hide' must be a module on sys.path" in capsys.readouterr().err
    assert provider.requests == []
    sys.modules.pop("app", None)


def test_the_workflows_own_redactor(provider: Provider, record: Recorded):
    @cotune.workflow
    def solve(task):
        with openai.OpenAI(max_retries=0) as client:
            return len(client.chat.completions.create(model="m", messages=USER).choices[0].message.content)

    @solve.redactor
    def hide(message):
        return {**message, "content": "***"}

    outcome = record(solve)
    assert outcome.rewards == {"team": float(len(f"re: remember {SECRET}"))}
    assert {m.body["content"] for m in record.sink if isinstance(m, Message)} == {"***"}
    assert record.calls[0].candidates[0].text == "***"
    assert outcome.episode.task.input == "***"
