"""An application that knows nothing of the gateway: its roles and its episodes are told by what it sends anyway."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from rich.console import Console

from cotune.cli.printing.overview import show_run
from cotune.errors import ConfigError
from cotune.integrations.web.gateway.settings import Split
from cotune.recording.roles import roles_function
from tests.integrations.web.gateway.client import Bench, ask, bench


def until(true: Callable[[], Any]) -> None:
    for _ in range(400):
        if true():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def ended(gate: Bench) -> list[tuple[str, str, int]]:
    return [(e.task.id, e.status, e.calls) for e in gate.episodes()]


def shown(gate: Bench) -> str:
    gate.store.flush()
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(show_run(gate.folder))
    return console.export_text()


def ask_as(gate: Bench, model: str, **options: Any) -> None:
    client = gate.client(f"{gate.url}/v1", **options)
    client.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}])


def test_a_role_by_the_models_name_a_header_or_a_function(tmp_path: Path) -> None:
    roles = roles_function("model")
    with bench(tmp_path, roles=roles, role_header="X-Agent", split=Split(idle=60)) as gate:
        ask_as(gate, "planner-model")
        ask_as(gate, "m", default_headers={"X-Agent": "writer"})
        ask_as(gate, "m", default_headers={"X-Agent": "writer", "X-Cotune-Role": "judge"})
        ask(gate.client(f"{gate.url}/r/critic/v1"))
        gate.when_idle()  # a call is recorded after its answer was sent
        (episode,) = gate.running.opened.episodes.open
        assert [call.role for call in gate.calls(episode)] == ["planner-model", "writer", "judge", "critic"]
    with bench(tmp_path / "other", roles=lambda call: call.messages[-1]["content"]) as gate:
        ask_as(gate, "m")
        gate.store.flush()
        assert gate.store.rows("SELECT role FROM calls", ()) == [("x",)]


def test_an_episode_at_a_time_ends_after_a_pause(tmp_path: Path) -> None:
    with bench(tmp_path, split=Split(idle=60)) as gate:
        client, opened = gate.client(f"{gate.url}/v1"), gate.running.opened.episodes
        ask(client, "one")
        listing = shown(gate)
        (episode,) = opened.open
        assert episode[-8:] in listing and "open" in listing
        opened.config = msgspec.structs.replace(opened.config, split=Split(idle=0.2))
        ask(client, "two")
        until(lambda: ended(gate))
        ask(client, "three")
        until(lambda: len(ended(gate)) == 2)
        assert ended(gate) == [("gateway", "ok", 2), ("gateway", "ok", 1)]
        assert gate.health()["records"].get("unattributed", 0) == 0


def test_an_episode_for_each_value_of_a_header(tmp_path: Path) -> None:
    with bench(tmp_path, split=Split(header="X-Session")) as gate:
        answers = []
        for session in ("a", "b", "a"):
            headers = {"X-Session": session, "X-Cotune-Key": f"order-{session}-{len(answers)}"}
            client = gate.client(f"{gate.url}/v1", default_headers=headers)
            answers.append(
                client.chat.completions.with_raw_response.create(model="m", messages=[{"role": "user", "content": "x"}])
            )
        ids = [answer.headers["x-cotune-episode"] for answer in answers]
        assert ids[0] == ids[2] != ids[1]
        assert gate.end(ids[1], rewards={"team": 1.0}).json()["calls"] == 1
    from cotune.storage.sqlite_store import SqliteStore

    with SqliteStore.open(tmp_path, read_only=True) as store:
        found = sorted((e.task.id, e.status, e.calls, e.key) for e in store.episodes())
        assert found == [("a", "ok", 2, "order-a-0"), ("b", "ok", 1, "order-b-1")]
        assert store.rewards([ids[1]]) == {ids[1]: {"team": 1.0}}


def test_an_episode_for_each_connection(tmp_path: Path) -> None:
    with bench(tmp_path, split=Split(by="connection")) as gate:
        first, second = (gate.client(f"{gate.url}/v1") for _ in range(2))
        for client in (first, second, first):
            ask(client)
        assert len(gate.running.opened.episodes.open) == 2 and ended(gate) == []
        first.close()
        until(lambda: ended(gate) == [("connection", "ok", 2)])
        second.close()
        until(lambda: len(ended(gate)) == 2)
        assert ended(gate)[1] == ("connection", "ok", 1)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="episode_idle"):
        Split(idle=0)
    with pytest.raises(ConfigError, match="episode_by"):
        Split(by="connection", header="X-Session")


@pytest.mark.slow
def test_the_command_line(tmp_path: Path, provider: Any) -> None:
    """The application has nothing but another OPENAI_BASE_URL; `cotune show` sees its episode while it runs."""
    line = [sys.executable, "-m", "cotune", "gateway", "--upstream", provider.url, "--records", "r", "--port", "0"]
    gate = subprocess.Popen(
        [*line, "--roles-by", "model", "--episode-idle", "30"], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    try:
        assert gate.stdout is not None
        url = gate.stdout.readline().split()[2]
        for model in ("planner", "writer"):
            client = openai.OpenAI(base_url=url, api_key="k")
            client.chat.completions.create(model=model, messages=[{"role": "user", "content": json.dumps(model)}])
        show = [sys.executable, "-m", "cotune", "show", "r"]
        until(lambda: "writer" in subprocess.run(show, cwd=tmp_path, capture_output=True, text=True).stdout)
        listing = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True).stdout
        assert "planner" in listing and "open" in listing
    finally:
        gate.terminate()
        assert gate.wait(20) == 0
    done = subprocess.run(show, cwd=tmp_path, capture_output=True, text=True).stdout
    assert "gateway" in done and "open" not in done.replace(str(tmp_path), "")
