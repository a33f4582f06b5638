"""The process that an in-process sampler's engine runs in."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.runtime.openmp import SPINS
from tests.integrations import tiny_models


def test_it_leaves_the_cores_to_others_while_its_threads_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.build("qwen3", tmp_path)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    async def environment() -> dict[str, str]:
        sampler = await TransformersSampler.open(tmp_path, host="process")
        try:
            return psutil.Process(sampler._host._process.pid).environ()
        finally:
            await sampler.aclose()

    assert asyncio.run(environment())["GOMP_SPINCOUNT"] == str(SPINS)


def test_a_host_whose_application_has_ended_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "cotune.integrations.samplers.transformers.host", str(theirs.fileno())]
    host = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    theirs.close()
    ours.close()
    said, _ = host.communicate(timeout=300)
    assert (host.returncode, said) == (0, b"")
