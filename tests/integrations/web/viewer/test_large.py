"""A run of 100,000 calls: every page comes at once, from a server that holds little of it in memory."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from benchmarks.viewer import EPISODES, build, pages

CALLS = 100_000
MOST_SECONDS = 20.0
"""What a page may take beside other processes. benchmarks/viewer.py measures what it takes: under 1 s."""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("large") / "large", CALLS, tokens=4)


def test_pages_of_a_large_run_come_at_once_and_take_little_memory(large):
    command = [sys.executable, "-m", "cotune", "view", str(large), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout
            url = server.stdout.readline().removeprefix("Open ").strip().rstrip("/")
            for name, path in pages(large).items():
                began = time.monotonic()
                assert httpx.get(url + path, timeout=60).status_code == 200
                assert time.monotonic() - began < MOST_SECONDS, name
            memory = psutil.Process(server.pid).memory_info().rss
        finally:
            server.terminate()
    assert memory < 200 * 2**20


def test_a_page_of_episodes_leads_to_the_next_to_the_end(large):
    from cotune.integrations.web.viewer.episodes import PAGE, Filters, listed
    from cotune.reading.run import OpenedRun

    run, seen, before = OpenedRun(large, "large"), [], ""
    while True:
        page = listed(run, Filters(role="coder", training_step=6), before)
        seen += [row.id for row in page.rows]
        if not page.after:
            break
        before = page.after
    assert len(seen) == EPISODES and len(set(seen)) == EPISODES and seen == sorted(seen, reverse=True)
    everything = listed(run, Filters())
    assert len(everything.rows) == PAGE and everything.after == everything.rows[-1].id
    run.close()


def test_a_long_search_says_how_far_it_came_and_goes_on(large, monkeypatch):
    from cotune.integrations.web.viewer import episodes as queries
    from cotune.reading.run import OpenedRun

    monkeypatch.setattr(queries, "SEARCH_SECONDS", 0.0)
    run, before, pages_seen, searched = OpenedRun(large, "large"), "", 0, 0
    while True:
        page = queries.listed(run, queries.Filters(q="nowhere to be found", phase="train"), before)
        assert page.rows == ()
        if not page.after:
            break
        searched, before, pages_seen = searched + (page.searched or 0), page.after, pages_seen + 1
    assert pages_seen == searched // queries.CHUNK == CALLS // 20 // queries.CHUNK
    run.close()
