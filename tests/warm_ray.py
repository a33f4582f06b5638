"""Ray's workers, forked from a process that has imported what they need: one starts in a tenth of a second of a
processor's time instead of six seconds. Each is a process of its own, as ever.

Raylets start a worker by a script, `setup_worker.py` of Ray. Inside `warm_workers()`, they run this file instead, which
asks a server for a fork, and waits until that has ended. Workers that run the application are forked from a server
without torch: they are light. Workers in folders that Ray brings start as ever, and so do all workers of a Ray that a
test starts in a process of its own."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ADDRESS = "COTUNE_TESTS_WARM_RAY"
"""The environment variable with the folder of the servers' sockets, by kind."""
KINDS = ("heavy", "light")
MARK = "COTUNE_ROLLOUT_WORKER"
"""That of `process_reaper`, which is not imported here: raylets run this file for each worker."""
STREAMS = (0, 1, 2)


@contextlib.contextmanager
def warm_workers() -> Iterator[None]:
    """Rays that start in the block have warm workers, and no processes that read logs and add nodes all the time: they
    took a twentieth of a processor."""
    import pytest
    from ray._private import node, ray_constants

    with (
        tempfile.TemporaryDirectory(prefix="cotune-warm-", dir="/tmp") as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        pipe = subprocess.PIPE
        servers = [
            # In sessions of their own, which Ctrl-C does not reach.
            subprocess.Popen(
                [sys.executable, "-P", __file__, folder, kind], stdin=pipe, stdout=pipe, start_new_session=True
            )
            for kind in KINDS
        ]
        try:
            for server in servers:
                assert server.stdout is not None and server.stdout.readline(), "it has not started"
            for unused in ("start_log_monitor", "start_monitor"):
                patch.setattr(node.Node, unused, lambda _: None)
            patch.setenv(ADDRESS, folder)
            patch.setattr(ray_constants, "SETUP_WORKER_FILENAME", __file__)  # a path that replaces Ray's when joined
            yield
        finally:
            for server in servers:
                server.communicate(timeout=60)


def start_worker(words: list[str]) -> int:
    """Have a worker forked, and wait for its end. Called by raylets; they know the worker's own process by its number,
    which it tells them."""
    setting = "--serialized-runtime-env-context="
    context = json.loads(next((word.removeprefix(setting) for word in words if word.startswith(setting)), "{}"))
    variables = context.get("env_vars") or {}
    unusual = any(name.startswith("PYTHON") or "$" in value for name, value in variables.items())
    if context.get("command_prefix") or unusual:
        script = Path(words[0]).parent / "setup_worker.py"
        os.execv(sys.executable, [sys.executable, str(script), *words])
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(os.environ[ADDRESS]) / ("light" if MARK in variables else "heavy")))
        environment = {**os.environ, **variables}
        message = json.dumps({"words": words, "folder": str(Path.cwd()), "environment": environment})
        socket.send_fds(connection, [len(message).to_bytes(4, "big")], STREAMS)
        connection.sendall(message.encode())
        return int.from_bytes(connection.recv(1) or b"\1", "big")


def serve(address: str, kind: str) -> None:
    """Fork a worker for each connection until the standard input ends."""
    importlib.import_module("cotune.trainer.rollout.worker")
    if kind == "heavy":
        _preload()
    assert "ray" not in sys.modules, "it reads its variables when it is imported"
    gc.collect()
    gc.freeze()  # else a collection in a fork would copy all that is shared
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(address)
    listening.listen(64)
    alarm, wake = socket.socketpair()
    wake.setblocking(False)
    alarm.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    os.write(1, b"ready\n")
    workers: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([0, listening, alarm, *workers.values()], [], [])
        if alarm in readable:
            alarm.recv(4096)
        for process, connection in list(workers.items()):
            if connection in readable:  # the raylet has killed the one that waits
                _kill(process)
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError):
                    connection.send(bytes([os.waitstatus_to_exitcode(status) % 256]))
                workers.pop(process).close()
        if 0 in readable:
            for process in workers:
                _kill(process)
            os._exit(0)
        if listening in readable:
            connection, _ = listening.accept()
            size, streams, _, _ = socket.recv_fds(connection, 4, len(STREAMS))
            message = _read(connection, int.from_bytes(size, "big"))
            if not message:  # a raylet has killed the one that asks
                connection.close()
                continue
            wanted = json.loads(message)
            if "ray" not in sys.modules:  # which reads the raylet's variables when it is imported
                os.environ.update(wanted["environment"])
                importlib.import_module("ray._private.workers.default_worker")
            if (process := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for held in (listening, alarm, wake, connection, *workers.values()):
                    held.close()
                return _begin(streams, **wanted)
            workers[process] = connection
            for stream in streams:
                os.close(stream)


def _preload() -> None:
    import peft  # noqa: F401
    import torch.distributed.checkpoint
    import torch.distributed.fsdp  # noqa: F401
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: F401
    from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

    import cotune.integrations.cluster.router
    import cotune.integrations.models.transformers.engine
    import cotune.trainer.learner.fsdp.worker
    import cotune.trainer.step  # noqa: F401


def _read(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or none where the connection ends before."""
    whole = b""
    while len(whole) < size:
        part = connection.recv(size - len(whole))
        if not part:
            return b""
        whole += part
    return whole


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _begin(streams: list[int], words: list[str], folder: str, environment: dict[str, str]) -> None:
    """As Ray's own script begins: the words behind its own are those of the worker."""
    import argparse

    os.setsid()
    for stream, target in zip(streams, STREAMS, strict=True):
        os.dup2(stream, target)
        os.close(stream)
    os.chdir(folder)
    parser = argparse.ArgumentParser()
    parser.add_argument("--serialized-runtime-env-context")
    parser.add_argument("--language")
    _, words = parser.parse_known_args(words)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if ADDRESS in os.environ:
        sys.exit(start_worker(sys.argv[1:]))
    serve(str(Path(sys.argv[1]) / sys.argv[2]), sys.argv[2])
