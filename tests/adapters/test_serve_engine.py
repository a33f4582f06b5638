"""An engine that ends is started again within bounds; then the server ends with the cause."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from cotune.adapters import restarting
from cotune.adapters.restarting import Restarting
from cotune.errors import EngineLost, RequestRefused, SamplerError
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, SamplerInfo, SamplingParams

pytestmark = pytest.mark.slow

POLICY = PolicyRef("p", 1)


class Engine:
    """Ends at a prompt that says so."""

    def __init__(self) -> None:
        self.broken: SamplerError | None = None
        self.closed = False

    async def sample(self, prompt: Any, n: int, params: SamplingParams, policy: PolicyRef) -> list[Completion]:
        if prompt == [13]:
            self.broken = SamplerError("The sampler's engine is gone: killed.")
        if self.broken is not None:
            raise SamplerError(self.broken.cause)
        if prompt == [0]:
            raise RequestRefused("No.")
        return [Completion((1,), (-0.1,), "stop")]

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="engine", max_model_len=64)

    async def aclose(self) -> None:
        self.closed = True


def test_requests_go_on_with_the_next_engine_until_the_restarts_are_used_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restarting, "RESTARTS", 2)
    made: list[Engine] = []
    fails = [True, False]

    async def opened() -> Engine:
        if fails and fails.pop(0):
            raise SamplerError("No memory.")
        made.append(Engine())
        return made[-1]

    async def main() -> None:
        first = Engine()
        sampler = Restarting(opened, first)  # type: ignore[arg-type]

        async def ask(token: int) -> int:
            return len(await sampler.sample([token], 1, SamplingParams(), POLICY))

        assert await ask(1) == 1
        with pytest.raises(RequestRefused):
            await ask(0)
        first.broken = SamplerError("The sampler's engine is gone: killed.")
        assert await asyncio.gather(*(ask(i) for i in range(1, 9))) == [1] * 8
        assert first.closed
        assert (sampler.restarts, len(made)) == (1, 1)  # the other restart failed, and counts
        with pytest.raises(EngineLost, match=r"killed.* Its restarts are used up: 2 within 10 minutes.* start again"):
            await ask(13)
        with pytest.raises(EngineLost):
            await ask(1)
        await sampler.aclose()

    asyncio.run(main())


SERVE = """
import sys
from cotune.adapters import restarting
restarting.RESTARTS = 1
from cotune.cli.main import main
sys.exit(main(["serve", sys.argv[1], "--port", "0", "--role", "planner", "--as", "gpt-4o-mini=planner"]))
"""


def engine_of(pid: int) -> int:
    """The process of the sampler that a server has started."""
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in children.read_text().split():
            if ".transformers.host" in Path(f"/proc/{child}/cmdline").read_text():
                return int(child)
    raise AssertionError("no engine")


def test_a_killed_engine_comes_back_once_and_then_the_server_ends_with_the_cause(base: Path, tmp_path: Path) -> None:
    with (tmp_path / "err").open("w") as err:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE, str(base)], stdout=subprocess.PIPE, stderr=err, text=True
        )
    try:
        assert server.stdout is not None
        url, said = "", []
        for line in server.stdout:
            said.append(line)
            url = line.split(" at ")[1].strip() if line.startswith("Serving") else url
            if line.startswith("Ctrl-C"):
                break
        assert any(line.startswith("  gpt-4o-mini, as planner: base@0") for line in said), said

        def ask() -> httpx.Response:
            asked = {"model": "gpt-4o-mini", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
            return httpx.post(f"{url}/chat/completions", json=asked, timeout=120)

        first = engine_of(server.pid)
        assert ask().json()["model"] == "gpt-4o-mini"
        os.kill(first, signal.SIGKILL)
        assert ask().status_code == 200
        assert engine_of(server.pid) != first
        assert httpx.get(url.replace("/v1", "/health")).json()["engine_restarts"] == 1
        os.kill(engine_of(server.pid), signal.SIGKILL)
        assert server.wait(60) == 1
        told = (tmp_path / "err").read_text()
        assert "The sampler's engine is gone: its process ended with code -9" in told
        assert "Its restarts are used up: 1 within 10 minutes." in told
        assert "Traceback" not in told
    finally:
        server.kill()
        server.wait()
