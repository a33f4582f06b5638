"""`serve` in the main thread: says where it serves, and ends by Ctrl-C or SIGTERM with the sampler closed."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from cotune.adapters import serving as module
from cotune.adapters.open_policies import LocalPolicies, ServedModel, served_policy
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplerInfo
from tests.adapters.test_model_names import manifest


class Idle:
    """A sampler that only knows when it was closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    async def info(self) -> SamplerInfo:
        return SamplerInfo(name="idle", max_model_len=64)

    async def aclose(self) -> None:
        self.closed.set()


def test_it_says_that_a_server_cannot_tell_apart_roles_of_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    export = manifest({"planner": "planner", "writer": "writer"}, {"planner": ["m"], "writer": ["m"]})

    async def opened(source: Any, **options: Any) -> LocalPolicies:
        roles = {role: served_policy(role, export.policy(role)) for role in ("planner", "writer")}
        return LocalPolicies(Idle(), None, roles, [], 64, manifest=export)

    def say(line: str) -> None:
        lines.append(line)
        if line == "Ctrl-C stops it.":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(module, "open_local", opened)
    module.serve("adapters/", port=0, say=say)
    assert lines[-3:] == [
        "  planner and writer both ask for m: use cotune.deployed",
        "  any other name is refused. Start the server with --default POLICY (planner, writer) or --default base.",
        "Ctrl-C stops it.",
    ]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_serving(monkeypatch: pytest.MonkeyPatch, sent: signal.Signals) -> None:
    sampler = Idle()
    lines: list[str] = []

    async def opened(source: Any, **options: Any) -> LocalPolicies:
        served = {"writer": ServedModel("writer", PolicyRef("writer", 2), "lora", "/models/tiny", "b" * 64, "f" * 64)}
        return LocalPolicies(sampler, None, served, ["judge"], 64)

    def say(line: str) -> None:
        lines.append(line)
        if line == "Ctrl-C stops it.":
            signal.raise_signal(sent)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(module, "open_local", opened)
    module.serve("adapters/", port=0, say=say)
    assert sampler.closed.is_set()
    assert signal.getsignal(signal.SIGTERM) is before
    assert lines[0].startswith("Serving adapters/ at http://127.0.0.1:")
    assert lines[1:] == [
        "  writer: writer@2 (lora), weights ffffffffffff, /models/tiny",
        "  judge: not here, its provider answers",
        "Ctrl-C stops it.",
    ]
