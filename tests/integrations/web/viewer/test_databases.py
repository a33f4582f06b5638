"""Each page of the viewer says the same of records in PostgreSQL as of the same records in a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from cotune.integrations.web.viewer.server import viewing
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.ids import new_id
from cotune.records.structs import CallRecord, Candidate, Episode, FeedbackRecord, PolicyRef, Task
from cotune.storage.episode_filters import ORDERS, CallFilters, EpisodeFilters
from cotune.storage.open_store import open_store
from cotune.storage.protocol import Store
from cotune.storage.sql.upkeep import copy
from tests.postgres import Server

FOUND = ["Étude", "étude", "ANSWER 3", "100%", "a_b", "back\\slash", 'quo"te', "kept it", "KEPT über", "\u2603"]
"""Texts to search for."""


def told(text: str) -> Candidate:
    said = {"role": "assistant", "content": text}
    return Candidate(index=0, text=text, message=said, token_ids=(1, 2), logprobs=(-1, -2))


def fill(store: Store) -> None:
    """Two phases, steps, tasks that come again, roles, failures, rewards that are missing, equal and negative."""
    for number in range(24):
        phase, step = ("train", number // 8) if number < 18 else ("eval", None)
        task = Task(id=f"t{number % 4}", input={"q": f"Étude 100% a_b {number}"})
        live = LiveEpisode(store, task, workflow="w", phase=phase, training_step=step)
        for role in ("writer", "critic")[: 1 + number % 2]:
            asked = [{"role": "system", "content": 'quo"te'}, {"role": "user", "content": f"back\\slash {number % 5}"}]
            call = live.start(CallerContext(role, "test"), {"messages": asked, "model": "m"})
            answers = (told(f"Answer {number} \u2603"), replace(told(f"other étude {number}"), index=1))
            rewards: Any = ({"local": number / 10}, {"local": 0.5})
            policy = PolicyRef("p", step or 0)
            call.finish(Answer(candidates=answers, policy=policy, rewards=rewards, chosen=number % 2))
        given = {} if number % 7 == 0 else {"team": float(number % 5 - 1), "other": 0.1}
        failed = number % 9 == 5
        metrics = {} if number % 6 == 0 else {"success": number % 2}
        live.end("error" if failed else "ok", rewards=given, metrics=metrics, error="no Étude" if failed else None)
        if given:
            store.write([FeedbackRecord(live.id, "team", f"Kept über it {number}")])
    cut_off = CallRecord(id=new_id(), episode=new_id(), role="writer", step=0, turn=0, status="error", error="Étude")
    store.write([cut_off])
    store.flush()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, postgres: Server) -> tuple[str, str]:
    """The addresses of a file and of a database with the same records."""
    file, database = str(tmp_path_factory.mktemp("both") / "pair.db"), postgres.database()
    with open_store(file) as store:
        fill(store)
    with open_store(file, read_only=True) as source, open_store(database) as target:
        copy(source, target, lambda *_: None)
    return file, database


@pytest.fixture(scope="module")
def stores(both: tuple[str, str]) -> Iterator[list[Store]]:
    opened = [open_store(address, read_only=True) for address in both]
    yield opened
    for store in opened:
        store.close()


def same(stores: list[Store], method: str, *asked: Any) -> Any:
    """What both stores answer."""
    file, database = (getattr(store.figures(), method)(*asked) for store in stores)
    assert [*map(repr, file)] == [*map(repr, database)] if isinstance(file, list) else file == database
    return file


def test_figures_are_the_same(stores: list[Store]) -> None:
    for on_failure in ("lowest", "exclude", "reward:-1"):
        same(stores, "outcome_means", on_failure)
        for phase in same(stores, "phases"):
            same(stores, "outcomes_by_task", phase, on_failure)
            same(stores, "outcomes_by_step", phase, on_failure, ["t0", "t1"])
    for phase in ("train", "eval"):
        for step in (None, *same(stores, "steps", phase)):
            same(stores, "first_episodes", phase, step, ["t0", "t1", "none"])
        same(stores, "repeated_tasks", phase, 5)
    once = ("success_counts", "has_scored_candidates", "cut_feedback", "counts")
    lists = ("episodes_by_phase", "failed_episodes", "failed_calls", "recent_roles", "apps", "by_day")
    for method in (*once, *lists):
        assert same(stores, method) is not None
    assert stores[0].counters() == stores[1].counters()
    means = [{row[:2]: row[2] for row in store.figures().rewards_by_role()} for store in stores]
    assert means[0] == pytest.approx(means[1], rel=1e-12)
    same(stores, "answered_by", "p")
    same(stores, "open_episodes", 9)
    use = [store.figures().use(0)[1] for store in stores]
    assert len(use[0]) == 3
    assert [*map(repr, use[0])] == [*map(repr, use[1])]


@pytest.mark.parametrize("order", ORDERS)
def test_lists_are_the_same(stores: list[Store], order: str) -> None:
    every = [
        EpisodeFilters(),
        EpisodeFilters(solved="yes"),
        EpisodeFilters(solved="no", phase="train", training_step=1),
    ]
    for filters in (*every, EpisodeFilters(role="critic", low=0.0, high=2.0), EpisodeFilters(status="counted")):
        for start in (0, 5):
            lines = same(stores, "episode_lines", filters, 10, order, start)
            assert len(same(stores, "inputs_and_answers", [line.id for line in lines])) == len(lines)
        same(stores, "episode_count", filters)
    ids = same(stores, "episode_ids", EpisodeFilters(), 100)
    same(stores, "neighbours", ids[3])
    assert same(stores, "call_times", ids[3])
    assert same(stores, "messages_of", ids[3], "writer", 0)
    assert same(stores, "episode_named", ids[3][-8:]) == ids[3]
    calls = same(stores, "call_ids", "", 100)
    for chosen in (CallFilters(), CallFilters(role="critic", phase="train", step=1), CallFilters(status="error")):
        assert same(stores, "call_lines", calls, chosen)


@pytest.mark.parametrize("text", FOUND)
def test_searches_find_the_same(stores: list[Store], text: str) -> None:
    ids = stores[0].figures().episode_ids(EpisodeFilters(), 100)
    calls = stores[0].figures().call_ids("", 100)
    found = [
        (store.figures().episodes_with_text(text, ids, {}), store.figures().calls_with_text(text, calls, {}))
        for store in stores
    ]
    assert found[0] == found[1]


def pages_of(store: Store) -> list[str]:
    """The pages of a run."""
    ids, calls = store.figures().episode_ids(EpisodeFilters(), 3), store.figures().call_ids("", 3)
    return [
        *(
            "",
            "/use",
            "/changed",
            "/curves",
            "/episodes",
            "/calls",
            "/groups",
            "/tasks",
            "/tasks?phase=train",
            "/config",
        ),
        *(f"/episodes?order={order}&phase=train" for order in ORDERS),
        *("/episodes?text=%C3%89tude", "/calls?text=kept"),
        *(f"/episode/{id}" for id in ids),
        *(f"/call/{id}" for id in calls),
    ]


def test_pages_are_the_same(both: tuple[str, str], stores: list[Store]) -> None:
    shown: list[dict[str, str]] = []
    for address in both:
        with viewing([address]) as server:
            name = httpx.get(server.url, follow_redirects=True).url.path.split("/")[2]
            answers = {page: httpx.get(f"{server.url}/run/{name}{page}", timeout=60) for page in pages_of(stores[0])}
        place = address.rpartition("/")[0] + "/"  # of a file; a database is shown by its name
        shown.append({page: said.text.replace(place, "").replace(name, "NAME") for page, said in answers.items()})
        assert [page for page, said in answers.items() if said.status_code != 200 and page != "/changed"] == []
    for page, file in shown[0].items():
        assert file == shown[1][page], page


def test_a_page_shows_what_another_process_commits(postgres: Server) -> None:
    with open_store(address := postgres.database()) as store, viewing([address]) as server:
        name = httpx.get(server.url, follow_redirects=True).url.path.split("/")[2]
        page = f"{server.url}/run/{name}/episodes"
        for number in range(2):
            assert f"task {number}" not in httpx.get(page).text
            store.commit([Episode(id=new_id(), task=Task(id=f"task {number}", input=1), workflow="w")])
            assert f"task {number}" in httpx.get(page).text
