"""Applications that hang, leave, fork or tear their run apart: the run ends in time, says why, and keeps the rest."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cotune.runtime.interrupts import TOGETHER
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import Provider, serving
from tests.trainer.forked import Command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT = 200.0
"""Seconds in which a command ends that would hang for ever otherwise: the application sleeps for ten minutes."""


class Ended(NamedTuple):
    status: int
    output: str
    folder: Path

    @property
    def last(self) -> str:
        return self.output.rstrip().splitlines()[-1]

    @property
    def said(self) -> str:
        """The output with its lines joined, as a narrow terminal breaks them anywhere."""
        return " ".join(self.output.split())

    def episodes(self, run: str = "run") -> dict[str, tuple[str, str]]:
        """Status and error of each task's episode."""
        store = SqliteStore.open(self.folder / run / "records.db", read_only=True)
        return {e.task.id: (e.status, e.error or "") for e in store.episodes()}


@pytest.fixture
def provider() -> Iterator[Provider]:
    with serving() as made:
        yield made


def start(folder: Path, provider: Provider, command: str, app: str, deeds: Sequence[Any], *more: str) -> Command:
    """Start `cotune COMMAND` in `folder`, on one task per deed: its name, or a dict with more of the task."""
    tasks = [{"do": deed} if isinstance(deed, str) else dict(deed) for deed in deeds]
    lines = [json.dumps({"id": task["do"] or "well", **task}) + "\n" for task in tasks]
    (folder / "tasks.jsonl").write_text("".join(lines))
    words = [command, f"tests.trainer.hostile_app:{app}", "--tasks", "tasks.jsonl", *more]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OPENAI_BASE_URL": provider.url, "SAMPLER_IN_THREAD": "1"}
    return Command(words, folder, environment, log_of(folder))


def log_of(folder: Path) -> Path:
    """What commands in `folder` say, beside it."""
    return folder.with_suffix(".log")


def end(process: Command, folder: Path) -> Ended:
    try:
        status = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"it hangs:\n{log_of(folder).read_text()}") from None
    return Ended(status, log_of(folder).read_text(), folder)


def trace(
    folder: Path, provider: Provider, deeds: Sequence[Any], app: str = "asynchronous", timeout: str = "12"
) -> Ended:
    more = ("--out", "run", "--timeout", timeout)
    return end(start(folder, provider, "trace", app, deeds, *more), folder)


def test_code_that_never_ends_costs_its_own_episode(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["sleep", "", "spin"])
    found = ended.episodes()
    assert ended.status == 0, ended.said
    assert {task: status for task, (status, _) in found.items()} == {"sleep": "error", "well": "ok", "spin": "error"}
    assert re.search(r"blocked its event loop for \d+ s.* in sleep: time\.sleep\(600\)", found["sleep"][1])
    assert re.search(r"blocked its event loop for \d+ s.* in spin: while True:", found["spin"][1])


@pytest.mark.long  # `test_an_evaluation_ends_beside_a_plain_function_that_never_ends` holds the same of an evaluation
def test_a_plain_function_that_never_ends_costs_its_own_episode(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["sleep", ""], "synchronous")
    found = ended.episodes()
    assert ended.status == 0, ended.said
    said = r"did not finish within 12\.0 seconds: its thread goes on at .* in synchronous: time\.sleep\(600\)"
    assert found["well"][0] == "ok" and re.search(said, found["sleep"][1])


def test_code_that_cannot_be_interrupted_ends_the_process_with_its_name(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["swallow"])
    assert ended.status == 1
    said = "cotune: The workflow 'asynchronous' on task 'swallow' has blocked its event loop for"
    assert said in ended.last and "in swallow: time.sleep(600)" in ended.last


def test_leaving_costs_the_episode_not_the_run(tmp_path: Path, provider: Provider) -> None:
    deeds = ["exit", "exit_in_a_task", "close", "stop", {"do": "move", "to": "/"}, ""]
    ended = trace(tmp_path, provider, deeds, timeout="30")
    found = ended.episodes()
    assert ended.status == 0, ended.said
    assert "Traceback" not in ended.said
    assert Counter(status for status, _ in found.values()) == {"error": 3, "ok": 3}
    assert "raised SystemExit: sys.exit('bye') was called" in found["exit"][1] and "in exit)" in found["exit"][1]
    assert "sys.exit('bye')" in found["exit_in_a_task"][1]
    assert "GeneratorExit" in found["close"][1]
    assert "The application called loop.stop()" in ended.said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "tasks.jsonl"]


def test_the_end_of_the_process_by_the_application_is_told(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["exit_at_once"], timeout="30")
    assert ended.status == 7
    assert "The workflow 'asynchronous' on task 'exit_at_once' called os._exit(7)" in ended.last
    assert "in exit_at_once: os._exit(7)" in ended.last


def test_a_thread_that_is_left_behind_does_not_keep_the_process(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["linger"], timeout="30")
    assert ended.status == 0
    assert "1 threads of the application still run, the process ends without them: left␛[2J at" in ended.last
    assert ended.episodes()["linger"][0] == "ok"


def test_forked_children_are_told_off_and_deadlock_nothing(tmp_path: Path, provider: Provider) -> None:
    """Three children of a process whose threads are recording, several times over; and one that leaves."""
    deeds = [{"id": f"fork {n}", "do": "fork"} for n in range(4)]
    deeds.append({"do": "fork_and_exit", "file": str(tmp_path / "status")})
    ended = trace(tmp_path, provider, deeds, timeout="50")
    assert ended.status == 0, ended.said
    assert {status for status, _ in ended.episodes().values()} == {"ok"}
    assert (tmp_path / "status").read_text() == "5"
    assert "It is not recorded: The call was made in a child process that the application forked" in ended.said
    store = SqliteStore.open(tmp_path / "run" / "records.db", read_only=True)
    assert {e.task.id: e.calls for e in store.episodes()} == {**{f"fork {n}": 6 for n in range(4)}, "fork_and_exit": 1}
    assert len(provider.requests) == 4 * (2 + 4 + 3) + 1


def test_too_many_reward_names_are_refused(tmp_path: Path, provider: Provider) -> None:
    ended = trace(tmp_path, provider, ["many"], app="lavish", timeout="30")
    assert ended.status == 1
    assert "returned 100000 numbers (name 0, name 1, name 2, ...): at most 256 are allowed." in ended.said
    assert len(ended.said) < 2000


def test_removed_records_stop_the_run(tmp_path: Path, provider: Provider) -> None:
    file = str(tmp_path / "run" / "records.db")
    ended = trace(tmp_path, provider, [{"do": "remove", "file": file}, ""], timeout="30")
    assert ended.status == 1
    assert f"{file}: the store cannot be written (the file has been removed or replaced)" in ended.said
    assert "lost records" in ended.said


def test_a_second_signal_ends_a_blocked_process_at_once(tmp_path: Path, provider: Provider) -> None:
    process = start(tmp_path, provider, "trace", "asynchronous", ["sleep"], "--out", "run", "--timeout", "500")
    while not provider.requests:
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(0.5)
    os.kill(process.pid, signal.SIGINT)
    while "stopping; once more ends it at once" not in " ".join(log_of(tmp_path).read_text().split()):
        assert process.poll() is None
        time.sleep(0.05)
    time.sleep(1.5 * TOGETHER)  # two that come together are one
    os.kill(process.pid, signal.SIGINT)
    ended = end(process, tmp_path)
    assert ended.status == 130
    # The second text where a busy machine takes longer to end than the process may.
    assert ended.last == "interrupted" or ended.last.endswith("ended at once, as asked for twice.")


def test_one_signal_ends_what_waits_and_keeps_its_records(tmp_path: Path, provider: Provider) -> None:
    one_by_one = ("--concurrency", "1")  # the first has ended when the other asks
    process = start(tmp_path, provider, "trace", "asynchronous", ["", "wait"], "--out", "run", *one_by_one)
    while len(provider.requests) < 2:
        assert process.poll() is None
        time.sleep(0.05)
    os.kill(process.pid, signal.SIGTERM)
    ended = end(process, tmp_path)
    assert ended.status == 130 and ended.last == "interrupted"
    assert {task: status for task, (status, _) in ended.episodes().items()} == {"well": "ok", "wait": "cancelled"}


TRAIN = ("--policies", "full", "--steps", "1", "--tasks-per-step", "4", "--lr", "1e-3", "-k", "2", "--out", "run")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Ended:
    """A run beside a sync scorer that never returns for `sleep`, which runs into the episode's time-out."""
    folder = tmp_path_factory.mktemp("trained")
    deeds = [{"id": name, "do": ""} for name in ("well", "also")] + ["sleep", "exit"]
    more = ("--model", str(tiny_base), *TRAIN, "--set", "episode_timeout=3")
    with serving() as provider:
        return end(start(folder, provider, "train", "scored", deeds, *more), folder)


def test_training_goes_on_beside_scorers_that_hang_or_leave(trained: Ended) -> None:
    """`well` and `also` are trained on."""
    ended = trained
    assert ended.status == 0, ended.said
    assert "turn 0 of role 'first' was open (its scorer was running)" in ended.said
    assert "raised SystemExit: sys.exit('no more scores') was called" in ended.said
    assert "finished after 1 step in" in ended.said


def test_an_evaluation_ends_beside_a_plain_function_that_never_ends(
    trained: Ended, provider: Provider, tmp_path: Path
) -> None:
    more = ("--run", str(trained.folder / "run"), "--modes", "trained", "--timeout", "12", "--out", "eval")
    ended = end(start(tmp_path, provider, "eval", "synchronous", ["sleep", ""], *more), tmp_path)
    assert ended.status == 0, ended.said
    waits = ["loading tests.trainer", "loading the model", "publishing the policies", "evaluating trained on 2 tasks"]
    assert all(ended.said.index(one) < ended.said.index(then) for one, then in itertools.pairwise(waits)), ended.said
    found = ended.episodes("eval")
    said = r"did not finish within 12\.0 seconds: its thread goes on at .* in synchronous: time\.sleep\(600\)"
    assert found["well"][0] == "ok" and re.search(said, found["sleep"][1])


def test_training_says_how_to_go_on_when_the_application_ends_it(
    tmp_path: Path, provider: Provider, tiny_base: Path
) -> None:
    """The tasks are long enough to pass the first look; the deed is done in training alone."""
    deeds = [{"id": str(n), "do": ""} for n in range(3)] + [{"do": "exit_at_once"}]
    more = ("--model", str(tiny_base), *TRAIN)
    ended = end(start(tmp_path, provider, "train", "asynchronous", deeds, *more), tmp_path)
    assert ended.status == 7
    assert ended.last.endswith(f"Continue with: cotune train --resume {tmp_path / 'run'}")
    assert (tmp_path / "run" / "run.json").is_file()
