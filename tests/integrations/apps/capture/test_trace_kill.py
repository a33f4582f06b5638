"""An application that is killed while `cotune.trace` records it loses its last moment, and nothing before."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cotune.storage.sqlite_store import SqliteStore

pytestmark = pytest.mark.slow

APP = """
import json, sys, time
import httpx, openai
import cotune

def answer(request):
    said = json.loads(request.content)["messages"][0]["content"]
    message = {"role": "assistant", "content": said}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}
    return httpx.Response(200, json=body)

http = httpx.Client(transport=httpx.MockTransport(answer))
client = openai.OpenAI(api_key="none", http_client=http, max_retries=0)
with cotune.trace(sys.argv[1]), cotune.role("writer"):
    while True:
        said = f"{time.time():.6f}"
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": said}])
        print(said, flush=True)
"""
LOST = 0.3
"""Seconds before a kill of which calls may be missing: a transaction gathers for a fifth of a second."""
STALL = 2.0
"""Seconds by which a machine with other work may be late."""


def killed(run: Path, seconds: float) -> tuple[float, int]:
    """Seconds between the oldest answered call that is lost and the kill, and how many calls were answered."""
    process = subprocess.Popen([sys.executable, "-c", APP, str(run)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    answered = [process.stdout.readline().strip() for _ in range(21)]
    time.sleep(seconds)
    process.kill()
    end = time.time()
    answered += process.stdout.read().split("\n")
    complete = [line for line in answered if "." in line and len(line.partition(".")[2]) == 6]
    with SqliteStore.open(run, read_only=True) as store:
        calls = [
            call for episode in [*store.episodes(), *store.figures().unfinished()] for call in store.calls(_id(episode))
        ]
        recorded = {store.message(call.messages[0])["content"] for call in calls}
        assert {call.role for call in calls} <= {"writer"}
        assert len(calls) == len(recorded)
    lost = [float(line) for line in complete if line not in recorded]
    return end - min(lost) if lost else 0.0, len(complete)


def _id(episode: object) -> str:
    return episode if isinstance(episode, str) else episode.id  # type: ignore[attr-defined]


@pytest.mark.parametrize("kills", [1, pytest.param(24, marks=pytest.mark.long)])
def test_a_killed_application_loses_its_last_moment(
    tmp_path: Path, kills: int, record_property: Callable[[str, object], None]
) -> None:
    rng = random.Random(5)
    found = [killed(tmp_path / str(i), rng.uniform(0.4, 1.5)) for i in range(kills)]
    record_property("calls", sum(calls for _, calls in found))
    record_property("most_seconds_lost", round(max(lost for lost, _ in found), 3))
    assert min(calls for _, calls in found) > 20
    assert max(lost for lost, _ in found) <= (LOST if kills > 10 else LOST + STALL)
