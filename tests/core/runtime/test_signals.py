"""Signals that end a process: a closed terminal, Ctrl-C while a model loads, a traced application that is stopped."""

from __future__ import annotations

import json
import os
import pty
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cotune.storage.sqlite_store import SqliteStore
from tests.integrations import tiny_models
from tests.integrations.apps.capture.test_trace_kill import APP
from tests.integrations.provider import serving

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
OWN = """
import signal, sys
def stop(number, frame):
    print("own", flush=True)
    sys.exit(5)
"""
SLOW = """
import importlib.abc, sys, time
class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "transformers.models.qwen3.modeling_qwen3":
            print("loads", name, flush=True)
            time.sleep(100)
sys.meta_path.insert(0, Slow())
"""
"""Makes a model take its time to load, in each process of a command."""


def traced(run: Path, number: signal.Signals, app: str = APP, more: tuple[str, ...] = ()) -> tuple[int, set[str], str]:
    """The exit status of an application that a signal has ended, the answered calls that are not recorded, and the end
    of what it said."""
    process = subprocess.Popen([sys.executable, "-c", app, str(run), *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answered = [process.stdout.readline().strip() for _ in range(21)]
    time.sleep(random.Random(3).uniform(0.05, 0.15))
    process.send_signal(number)
    rest = process.stdout.read()
    answered += [line for line in rest.split("\n") if line.partition(".")[2]]
    with SqliteStore.open(run, read_only=True) as store:
        found = [e if isinstance(e, str) else e.id for e in [*store.episodes(), *store.figures().unfinished()]]
        recorded = {store.message(call.messages[0])["content"] for id in found for call in store.calls(id)}
    return process.wait(60), {line for line in answered if len(line.partition(".")[2]) == 6} - recorded, rest


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGHUP, marks=pytest.mark.long)])
def test_a_traced_application_that_is_ended_loses_no_answered_call(tmp_path: Path, number: signal.Signals) -> None:
    status, lost, _ = traced(tmp_path, number)
    assert (status, lost) == (-number, set())


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.long), "after"])
def test_an_applications_own_handler_stays_its_own(tmp_path: Path, when: str) -> None:
    own = f"{OWN}\nsignal.signal(signal.SIGTERM, stop)\n"
    late = APP.replace("    while True", f"    exec({own!r}, globals())\n    while True")
    status, lost, said = traced(tmp_path, signal.SIGTERM, own + APP if when == "before" else late)
    assert (status, lost) == (5, set()) and "own" in said


def test_a_durable_trace_loses_no_answered_call_when_it_is_killed(tmp_path: Path) -> None:
    app = APP.replace("cotune.trace(sys.argv[1])", "cotune.trace(sys.argv[1], durable=True)")
    assert traced(tmp_path, signal.SIGKILL, app)[:2] == (-signal.SIGKILL, set())


def command(folder: Path, *words: str) -> dict[str, object]:
    """How `cotune` is started in `folder` with a model there that does not finish loading."""
    tiny_models.build("qwen3", folder / "model")
    (folder / "slow").mkdir()
    (folder / "slow" / "sitecustomize.py").write_text(SLOW)
    (folder / "tasks.jsonl").write_text("".join(json.dumps({"id": str(i), "do": ""}) + "\n" for i in range(4)))
    environment = {
        **os.environ,
        "PYTHONPATH": f"{folder / 'slow'}:{ROOT}",
        "PYTHONUNBUFFERED": "1",
        "OPENAI_BASE_URL": "http://127.0.0.1:9",
    }
    return {"args": [sys.executable, "-m", "cotune", *words], "cwd": folder, "env": environment}


APPLICATION = ("tests.trainer.hostile_app:asynchronous", "--tasks", "tasks.jsonl", "--out", "run")
TRAIN = ("train", *APPLICATION, "--model", "model")


@pytest.mark.parametrize(
    "words", [TRAIN, pytest.param(("serve", "model", "--port", "0"), marks=pytest.mark.long)], ids=["train", "serve"]
)
def test_ctrl_c_while_a_model_loads_ends_the_command_and_its_processes_soon(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    process = subprocess.Popen(
        **command(tmp_path, *words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    heard = ""
    while "loads transformers" not in heard:
        heard += process.stdout.readline()
        assert process.poll() is None, heard
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    process.send_signal(signal.SIGINT)
    gone, alive = psutil.wait_procs(everything, timeout=20)
    said = heard + process.stdout.read()
    assert not alive, said
    status = next(ended.returncode for ended in gone if ended.pid == process.pid)
    assert status == 130 and said.rstrip().endswith("interrupted"), said
    assert not (tmp_path / "run").exists()


def test_a_closed_terminal_ends_a_command_as_ctrl_c_does(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "well", "do": ""}\n{"id": "wait", "do": "wait"}\n')
    with serving() as provider:
        pid, terminal = pty.fork()
        if pid == 0:
            os.chdir(tmp_path)
            environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": provider.url}
            os.execve(
                sys.executable,
                [sys.executable, "-m", "cotune", "trace", *APPLICATION, "--concurrency", "1"],
                environment,
            )
        while len(provider.requests) < 2:
            time.sleep(0.05)
        os.close(terminal)
        _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    with SqliteStore.open(tmp_path / "run", read_only=True) as store:
        assert {e.task.id: e.status for e in store.episodes()} == {"well": "ok", "wait": "cancelled"}


def test_nohup_keeps_a_command_going(tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "well", "do": ""}\n')
    with serving() as provider:
        process = subprocess.Popen(
            [sys.executable, "-m", "cotune", "trace", *APPLICATION],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": provider.url},
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
        )
        while not provider.requests:
            process.send_signal(signal.SIGHUP)
            time.sleep(0.02)
        assert process.wait(60) == 0
