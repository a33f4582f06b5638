"""The page of an analysis of `cotune blame`, and its effects in the timeline of an episode."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from selenium.webdriver import Chrome

from cotune.integrations.web.viewer.server import viewing
from cotune.intervals import Interval
from cotune.reading.blame import DECISIVE, FORK, REPORT, Blame, CallEffect, LostEpisode, RoleBlame
from cotune.records.structs import CallRecord, Candidate, Episode, Fork, Message, RewardRecord, Task
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.web.viewer.conftest import SCRIPT
from tests.integrations.web.viewer.test_browser import errors, opened, screen
from tests.integrations.web.viewer.test_pages import text

ROLES = ("planner", "writer", "checker")


def record(episode: str, step: int, said: str) -> CallRecord:
    """A call of the role whose turn it is."""
    answer = Candidate(index=0, text=said, message={"role": "assistant", "content": said})
    return CallRecord(
        id=f"{episode}-{step}",
        episode=episode,
        role=ROLES[step],
        step=step,
        turn=0,
        messages=("asked",),
        model="small",
        started=float(step),
        latency=1.0,
        candidates=(answer,),
        chosen=0,
    )


def roles_of(at_fault: str) -> list[RoleBlame]:
    """A row per role."""
    rows = []
    for role in ROLES:
        mean = 0.38 if role == at_fault else 0.05
        score = Interval(mean=mean, low=mean - 0.1, high=mean + 0.1, n=20)
        rows.append(
            RoleBlame(
                role=role,
                reference="gpt-5",
                calls=1.0,
                score=score,
                alone=score,
                last=score,
                seconds=0.4,
                cost=None,
                runs=3,
            )
        )
    return rows


def result(**fields: object) -> Blame:
    """The result of an analysis."""
    values: dict[str, object] = {
        "workflow": "office",
        "references": {"": "gpt-5"},
        "removes": False,
        "tasks": 20,
        "runs": 560,
        "calls": 1680,
        "cost": None,
        "outcome": Interval(mean=0.5, low=0.4, high=0.6, n=20),
        "swapped": Interval(mean=1.0, low=0.97, high=1.0, n=20),
        "span": 1.0,
        "luck": Interval(mean=0.53, low=0.31, high=0.74, n=12),
        "roles": roles_of("writer"),
        "all_roles": ROLES,
        "verdict": "named",
        "at_fault": ("writer",),
        **fields,
    }
    return Blame(**values)  # type: ignore[arg-type]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An analysis of an episode that the writer's call lost, with two forks there."""
    folder = tmp_path / "blame"
    folder.mkdir()
    lost = LostEpisode(
        episode="lost",
        task="t1",
        calls=3,
        call=1,
        role="writer",
        loss=Interval(mean=0.67, low=0.38, high=0.85, n=24),
        answer="wrong",
        redraw="right",
        forks=31,
        effects=[
            CallEffect(step=0, loss=Interval(mean=0.0, low=-0.3, high=0.3, n=13), forks=13),
            CallEffect(step=1, loss=Interval(mean=0.67, low=0.38, high=0.85, n=24), forks=24),
        ],
    )
    other = LostEpisode(episode="other", task="t2", calls=3, call=None, why="no single call decides", forks=9)
    with SqliteStore.open(folder) as store:
        store.write([Message("asked", {"role": "user", "content": "what"})])
        for episode, said in (("lost", "wrong"), ("good", "right"), ("bad", "wrong again")):
            fork = None if episode == "lost" else Fork("lost", "lost-1", f"{episode}-1")
            phase = "blame own" if episode == "lost" else FORK
            store.write([record(episode, step, said) for step in range(3)])
            task = Task(id="t1", input="what")
            store.write([Episode(id=episode, task=task, workflow="office", phase=phase, calls=3, fork=fork)])
            store.write([RewardRecord(episode, "team", float(episode == "good"))])
    (folder / REPORT).write_text(json.dumps(result(episodes=[lost, other]).to_json()))
    return folder


def test_the_page_has_the_verdict_the_roles_and_the_alternatives(folder: Path) -> None:
    with viewing([folder]) as server:
        page = f"{server.url}/run/blame/blame"
        said = text(page)
        assert "writer is at fault: it costs 38 (28 to 48) points" in said
        assert "53% of the failures succeed at another try (31 to 74); the rest fail again." in said
        assert "writer at fault 38 (28 to 48) 38 (28 to 48) 38 (28 to 48) 1.0 +0.4 gpt-5" in said
        assert "Task t1 : call 1 of writer loses 67 (38 to 85) points said wrong best redraw right" in said
        assert "2 alternatives answer at this call outcome right 1.00 wrong again 0.00" in said
        assert "outcome 0.50 (0.40 to 0.60) · with all roles swapped 1.00 (0.97 to 1.00)" in said
        assert "31 forks of an episode of 3 calls" in said
        assert "Task t2 : no single call decides" in said
        assert DECISIVE in said
        linked = httpx.get(page).text
        assert '/run/blame/episode/good#call-1"' in linked and '/run/blame/blame" aria-current="page"' in linked


def test_outcomes_that_are_not_known_are_no_zero(folder: Path) -> None:
    with SqliteStore.open(folder) as store:
        for id, status in (("silent", "ok"), ("raised", "error")):
            store.write([record(id, step, f"said in {id}") for step in range(3)])
            fork = Fork("lost", "lost-1", f"{id}-1")
            task = Task(id="t1", input="what")
            store.write([Episode(id=id, task=task, workflow="office", phase=FORK, calls=3, fork=fork, status=status)])
    with viewing([folder]) as server:
        said = text(f"{server.url}/run/blame/blame")
    assert "right 1.00 wrong again 0.00 said in " in said
    assert "said in silent unknown" in said and "said in raised raised an error" in said


def test_the_timeline_colours_the_analysed_calls(folder: Path) -> None:
    with viewing([folder]) as server:
        page = httpx.get(f"{server.url}/run/blame/episode/lost").text
        assert 'class="bar v0"' in page and 'class="bar v2"' in page and page.count('class="bar h') == 1
        assert "loses 67 (38 to 85) points, from 24 forks" in page and "Analysed" in page
        # A fork was not analysed itself.
        assert "Analysed" not in httpx.get(f"{server.url}/run/blame/episode/good").text


def test_folders_without_an_analysis_have_no_such_tab(folder: Path) -> None:
    (folder / REPORT).write_text("{")
    with viewing([folder]) as server:
        assert 'href="/run/blame/blame"' not in httpx.get(f"{server.url}/run/blame").text
        assert "This folder holds no analysis." in text(f"{server.url}/run/blame/blame")


def test_texts_of_an_analysis_are_no_html(folder: Path) -> None:
    lost = LostEpisode(episode="lost", task=SCRIPT, calls=3, call=None, why=SCRIPT, role=SCRIPT)
    found = result(workflow=SCRIPT, notes=[SCRIPT], ended=SCRIPT, episodes=[lost], left_out={SCRIPT: 1})
    (folder / REPORT).write_text(json.dumps(found.to_json()))
    with viewing([folder]) as server:
        page = httpx.get(f"{server.url}/run/blame/blame").text
    assert "<script>document" not in page and "&lt;script&gt;document" in page


@pytest.mark.parametrize(("width", "height", "scheme"), [(1280, 800, "light"), (390, 844, "dark")])
def test_the_pages_fit_the_screen(driver: Chrome, folder: Path, width: int, height: int, scheme: str) -> None:
    screen(driver, width, height, scheme)
    errors(driver)
    with viewing([folder]) as server:
        for path in ("blame", "episode/lost"):
            opened(driver, f"{server.url}/run/blame/{path}")
            script = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert driver.execute_script(script) <= 0, path
            assert errors(driver) == [], path
