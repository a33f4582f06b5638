"""The process that an in-process sampler's engine runs in."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from cotune.integrations.models.transformers.host import PAGES
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.runtime.openmp import SPINS
from tests.integrations import tiny_models

APPLICATION = """
import os, sys
from cotune.integrations.models.transformers.host import TransformersProcess
from cotune.integrations.models.child.wire import Command
from cotune.integrations.models.transformers.wire import ModelSource

source = ModelSource({model!r}, None, None, None, 8, 1024, None, (0,))
host = TransformersProcess(lambda replies: None, lambda error: None)
host.start(source)
print(host._process.pid, flush=True)
sent = {sent!r}
if sent == "command":
    host.send(Command("info", 1))
else:
    os.write(host._pipe.fileno(), sent)
os._exit(7)
"""


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], int]:
    """The environment of a host that starts amid Ctrl-C, and how often that reached it."""
    model, stop, sent = tmp_path_factory.mktemp("host"), threading.Event(), 0
    tiny_models.build("qwen3", model)

    def interrupt_children() -> None:
        nonlocal sent
        while not stop.wait(0.02):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    if "cotune.integrations.models.transformers.host" in child.cmdline():
                        child.send_signal(signal.SIGINT)
                        sent += 1

    async def environment() -> dict[str, str]:
        sampler = await TransformersSampler.open(model, host="process")
        try:
            return psutil.Process(sampler._host._process.pid).environ()
        finally:
            await sampler.aclose()

    thread = threading.Thread(target=interrupt_children)
    thread.start()
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
                patch.delenv(name, raising=False)
            return asyncio.run(environment()), sent
    finally:
        stop.set()
        thread.join()


def test_ctrl_c_does_not_reach_a_host_that_starts(started: tuple[dict[str, str], int]) -> None:
    assert started[1] > 0


def test_it_keeps_its_pages_from_step_to_step(started: tuple[dict[str, str], int]) -> None:
    assert {name: started[0][name] for name in PAGES} == PAGES


def test_it_leaves_the_cores_to_others_while_its_threads_wait(started: tuple[dict[str, str], int]) -> None:
    assert started[0]["GOMP_SPINCOUNT"] == str(SPINS)


@pytest.mark.parametrize("sent", [b"", pytest.param(b"\0\0", marks=pytest.mark.long), b"\0\0\1\0half of a message"])
def test_a_host_whose_application_has_ended_ends_without_a_word(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "cotune.integrations.models.transformers.host", str(theirs.fileno())]
    host = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    theirs.close()
    ours.sendall(sent)
    ours.close()
    said, _ = host.communicate(timeout=300)
    assert (host.returncode, said) == (0, b"")


@pytest.mark.parametrize("sent", [pytest.param(b"\0\0\1\0half of a message", marks=pytest.mark.long), "command"])
def test_an_application_that_ends_amid_a_command_ends_the_host_without_a_word(
    sent: bytes | str, tmp_path: Path
) -> None:
    """The application is a process of its own, whose last act is to send a part of a message."""
    tiny_models.build("qwen3", tmp_path / "model")
    application = tmp_path / "application.py"
    application.write_text(APPLICATION.format(model=str(tmp_path / "model"), sent=sent))
    said = tmp_path / "said"
    with said.open("w") as file:
        done = subprocess.run(
            [sys.executable, application], stdout=subprocess.PIPE, stderr=file, text=True, timeout=300
        )
    host, deadline = int(done.stdout), time.monotonic() + 240
    while runs(host) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert (done.returncode, runs(host), said.read_text()) == (7, False, "")


def runs(pid: int) -> bool:
    """Whether a process runs; its entry stays until whoever has adopted it looks."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_an_opening_that_is_cancelled_leaves_no_process(tmp_path: Path) -> None:
    tiny_models.build("qwen3", tmp_path)

    def hosts() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]

    async def scenario() -> None:
        before = hosts()
        opening = asyncio.create_task(TransformersSampler.open(tmp_path, host="process"))
        while not (started := [host for host in hosts() if host not in before]):
            await asyncio.sleep(0.01)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await asyncio.to_thread(psutil.wait_procs, started, 60)
        assert hosts() == before

    asyncio.run(scenario())
