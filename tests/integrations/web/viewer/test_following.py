"""Following one answer: from an outcome to its tokens, colours, searches, comparisons, and tables as files."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from selenium.webdriver.common.by import By
from starlette.testclient import TestClient

from cotune.cli.servers.view import documented_fields
from cotune.integrations.web.viewer.chart_csv import chart_as_csv
from cotune.integrations.web.viewer.diff import diff
from cotune.integrations.web.viewer.server import viewing
from cotune.integrations.web.viewer.timeline import TimedCall, role_graph
from cotune.integrations.web.viewer.tokens import COLOURS, Colouring
from cotune.integrations.web.viewer.viewer import KnownField
from cotune.reading.curves import Chart, Series
from cotune.records.structs import CallRecord, Candidate, Episode, Message, Task
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.storage.token_figures import CandidateTokens, TokenFigures, read_token_figures, write_token_figures
from tests.integrations.web.viewer.conftest import STEPS
from tests.integrations.web.viewer.test_browser import click, errors, opened, screen, until
from tests.integrations.web.viewer.test_pages import ids, text


def rows_of(url: str) -> list[list[str]]:
    answer = httpx.get(url)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/csv"), answer.text
    return list(csv.reader(io.StringIO(answer.text)))


def test_three_clicks_lead_from_a_bad_outcome_to_the_tokens(driver, site):
    screen(driver, 1280, 800, "light")
    errors(driver)
    opened(driver, f"{site}/run/trained/episodes?solved=no&phase=train")
    click(driver, "a.main.mono")
    click(driver, "#call-0 h2 a.main")
    click(driver, "[href*='by=logprob']")
    assert "by=logprob" in driver.current_url
    assert len(driver.find_elements(By.CSS_SELECTOR, ".candidate .tokens .t")) > 4
    assert errors(driver) == []


def test_a_card_leads_to_its_tokens(site, run):
    (episode,) = ids(run, "SELECT id FROM episodes WHERE phase = 'train' ORDER BY id LIMIT 1")
    page = httpx.get(f"{site}/run/trained/episode/{episode}").text
    there = re.findall(r'href="([^"]*/call/[^"]*by=logprob#candidate-([^"]*))"', page)
    assert len(there) == 8
    assert f'id="candidate-{there[0][1]}"' in httpx.get(site + there[0][0]).text


@pytest.mark.parametrize("by", [name for name in COLOURS if name])
def test_cards_are_coloured_by_what_is_chosen(site, run, by):
    (episode,) = ids(run, "SELECT id FROM episodes WHERE phase = 'train' AND training_step = 1 ORDER BY id LIMIT 1")
    page = httpx.get(f"{site}/run/trained/episode/{episode}?by={by}").text
    assert re.search(rf'aria-current="true">{COLOURS[by]}</a>', page)
    cards = page.split('<article class="candidate')[1:]
    coloured = [card for card in cards if re.search(r'class="(t|whole) t', card)]
    assert len(cards) == 8 and coloured


def test_colours_say_how_large_a_figure_is():
    said = Candidate(index=0, text="abc", message={}, token_ids=(1, 2, 3), logprobs=(-0.05, -1.5, -9.0))
    seen = TokenFigures({"c.0": CandidateTokens(np.array([0.0, 0.5, -1.0]), np.array([0.01, 3.0, np.nan]))})

    def colours(by: str) -> list[str]:
        found = Colouring(by, "", seen).of_tokens(said, "c.0")
        return [token.colour for token in found.tokens] if found else []

    assert colours("logprob") == ["t0", "t3", "t5"]
    assert colours("entropy") == ["t0", "t4", "t0"]
    assert colours("ratio") == ["t0", "t-p2", "t-n2"]
    assert colours("advantage") == colours("") == colours("no such") == []
    whole = Colouring("advantage")
    assert [whole.of_candidate(value) for value in (-2.0, -0.5, 0.0, 0.5, 2.0, None)] == [
        "t-n2", "t-n1", "t0", "t-p1", "t-p2", "",
    ]  # fmt: skip
    assert Colouring("entropy", "", None).without_figures and not Colouring("entropy", "", seen).without_figures


def test_a_page_colours_so_many_tokens_and_says_what_it_left_out(monkeypatch):
    monkeypatch.setattr("cotune.integrations.web.viewer.tokens.MOST_TOKENS", 4)
    said = Candidate(index=0, text="abc", message={}, token_ids=(1, 2, 3), logprobs=(-1.0, -1.0, -1.0))
    colouring = Colouring("logprob")
    first, second, third = (colouring.of_tokens(said, f"c.{i}") for i in range(3))
    assert first and second and third is None
    assert (len(first.tokens), first.left_out, len(second.tokens), second.left_out) == (3, 0, 1, 2)


def test_figures_of_tokens_are_kept_by_step(tmp_path: Path):
    write_token_figures(
        tmp_path,
        0,
        {
            "a.0": CandidateTokens(np.array([0.5, 0.0]), np.array([1.0, 2.0])),
            "b.1": CandidateTokens(np.zeros(1), np.ones(1)),
        },
    )
    found = read_token_figures(tmp_path, 0)
    assert found and found.of("none") is None
    assert (seen := found.of("a.0")) and seen.gaps.tolist() == [0.5, 0.0] and seen.entropies.tolist() == [1.0, 2.0]
    assert read_token_figures(tmp_path, 1) is None
    (tmp_path / "tokens" / "step-000001.npz").write_bytes(b"broken")
    assert read_token_figures(tmp_path, 0) is None


def test_a_search_shows_what_matched(tmp_path: Path):
    said = Candidate(index=0, text="the KEY is here", message={"role": "assistant", "content": "the KEY is here"})
    other = Candidate(index=1, text="no", message={"role": "assistant", "content": "no"})
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([Message("m1", {"role": "user", "content": "where is <it>?"})])
        for n in range(3):
            store.write(
                [Episode(id=f"E{n}", task=Task(id=f"t{n}", input="İ: find key" if n == 2 else "x"), workflow="w")]
            )
            if n < 2:
                found = {"messages": ("m1",), "candidates": (said, other) if n else (other,), "chosen": 0}
                store.write([CallRecord(id=f"C{n}", episode=f"E{n}", role=f"r{n}", step=0, turn=0, **found)])
    with viewing([tmp_path / "traced"]) as server:
        here = f"{server.url}/run/traced"
        page = httpx.get(f"{here}/episodes?q=key").text
        assert re.findall(r'class="main mono"[^>]*>(\w+)<', page) == ["E2", "E1"]
        assert "input: İ: find <mark>key</mark>" in page and "/call/C1" in page
        assert "answer</a>: the <mark>KEY</mark> is here" in page
        page = httpx.get(f"{here}/calls?q=key").text
        assert page.count("<mark>") == 1 and "answer</a>: the <mark>KEY</mark> is here" in page
        page = httpx.get(f"{here}/calls?q=%3Cit%3E&role=r0").text
        assert "prompt, user</a>: where is <mark>&lt;it&gt;</mark>?" in page and page.count("<mark>") == 1
        assert "No call fits" in httpx.get(f"{here}/calls?q=nowhere").text


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("", "1"),
        ("role=second&turn=0", "role = 'second'"),
        ("phase=train&step=2", "episode IN (SELECT id FROM episodes WHERE phase = 'train' AND training_step = 1)"),
        ("task=a", "episode IN (SELECT id FROM episodes WHERE task = 'a')"),
        ("status=error", "0"),
    ],
)
def test_calls_are_filtered_and_paged(site, run, query, where):
    expected = ids(run, f"SELECT id FROM calls WHERE {where} ORDER BY id DESC")
    found, page = [], f"{site}/run/trained/calls?{query}"
    while page:
        answer = httpx.get(page).text
        found += re.findall(r'class="main" href="/run/trained/call/(\w+)"', answer)
        more = re.search(r'rel="next" href="([^"]+)"', answer)
        page = site + more[1].replace("&amp;", "&") if more else ""
    assert found == expected


def test_episodes_are_put_in_order_and_told_by_outcome(site, run):
    reward = "(SELECT sum(value) FROM rewards WHERE target = episodes.id)"
    orders = {
        "oldest": "id",
        "lowest": f"{reward}, id DESC",
        "highest": f"{reward} DESC, id DESC",
        "task": "task, id DESC",
    }
    for order, sql in orders.items():
        page = httpx.get(f"{site}/run/trained/episodes?order={order}").text
        found = re.findall(r'class="main mono"[^>]*>(\w+)<', page)
        assert found == ids(run, f"SELECT id FROM episodes ORDER BY {sql}")[: len(found)] and found
    solved = {name: text(f"{site}/run/trained/episodes?solved={name}") for name in ("yes", "no")}
    assert " solved " in solved["yes"].split("Filter")[1] and "not solved" not in solved["yes"].split("Filter")[1]
    assert "not solved" in solved["no"].split("Filter")[1]


def test_a_curve_is_a_file_with_exact_figures(site, run):
    line = list(read_metrics(run))[-1]
    chart = rows_of(f"{site}/run/trained/curves?csv=roles-reward")
    assert chart[0] == ["step", "first", "second"] and float(chart[-1][1]) == line["roles"]["first"]["reward"]
    assert len(chart) == STEPS + 1
    assert httpx.get(f"{site}/run/trained/curves?csv=none").status_code == 404


def test_no_cell_of_a_file_is_a_formula():
    series = [Series(label="=1+1", run="r", values=[-0.5, None]), Series(label="a", run="r", values=[1.0, 2.0])]
    chart = Chart(id="reward", section="", title="", help="", steps=[0, 1], series=series)
    rows = list(csv.reader(io.StringIO(TestClient(chart_as_csv(chart)).get("/").text)))
    assert rows == [["step", "'=1+1", "a"], ["0", "-0.5", "1.0"], ["1", "", "2.0"]]


def test_words_that_differ_are_marked():
    left, right = diff("go up now", "go down now, please")
    assert [(piece.kind, piece.text) for piece in left] == [("same", "go "), ("removed", "up"), ("same", " now")]
    assert [(p.kind, p.text) for p in right] == [
        ("same", "go "),
        ("added", "down"),
        ("same", " now"),
        ("added", ", please"),
    ]
    assert diff("", "") == ([], [])


def test_two_candidates_are_compared_with_the_chosen_one_first(site, run):
    call, chosen = ids(run, "SELECT id FROM calls WHERE json_array_length(candidates) = 4 LIMIT 1")[0], 0
    with SqliteStore.open(run, read_only=True) as store:
        record = store.figures().call(call)
        chosen = record.chosen or 0
    other = (chosen + 1) % 4
    page = httpx.get(f"{site}/run/trained/diff?a={call}.{other}").text
    picked = re.findall(r'<option value="([^"]+)" selected', page)
    assert picked == [f"{call}.{other}", f"{call}.{chosen}"]
    for wrong in (f"a={call}.9", "a=none.0", "", f"a={call}.0&b=none.0"):
        assert httpx.get(f"{site}/run/trained/diff?{wrong}").status_code == 404, wrong


def test_who_read_whom_is_counted_by_role():
    calls = [
        TimedCall("a", 0, "planner", 0, "ok", 0.0, 1.0),
        TimedCall("b", 1, "coder", 0, "ok", 1.0, 1.0, ("a",)),
        TimedCall("c", 2, "planner", 1, "ok", 2.0, 1.0, ("a",), ("b",)),
    ]
    graph = role_graph(calls)
    assert graph and [(node.role, node.calls) for node in graph.nodes] == [("planner", 2), ("coder", 1)]
    edges = {(edge.source, edge.target): (edge.certain, edge.guessed) for edge in graph.edges}
    assert edges == {("planner", "coder"): (1, 0), ("coder", "planner"): (0, 1), ("planner", "planner"): (1, 0)}
    assert role_graph(calls[:1]) is None


def test_the_configuration_is_grouped_with_defaults_and_help(run):
    known = {name: KnownField(default, said) for name, default, said in documented_fields()}
    with viewing([run], fields=known) as server:
        page = httpx.get(f"{server.url}/run/trained/config").text
        heads = re.findall(r'scope="rowgroup">\[(\w+)\]', page)
        assert heads[-1] == "versions" and {"plan", "replay", "rewards", "learner"} <= set(heads)
        assert re.search(r'learner.lr</td><td class="mono break"><b>0.003</b></td>.*Learning rate of AdamW', page)
        assert re.search(r'learner.quantize</td><td class="mono break">none</td>', page)
        said = text(f"{server.url}/run/trained/config?set=1")
        assert "learner.lr" in said and "learner.quantize" not in said


def test_the_view_of_curves_is_in_the_address(driver, site):
    screen(driver, 1280, 800, "light")
    opened(driver, f"{site}/run/trained/curves?smooth=0.5&off=second")
    shown = "return PLOTS.get('roles-reward').plot.series.map((one) => [one.label, one.show])"
    assert [pair for pair in driver.execute_script(shown) if pair[0] == "second"] == [["second", False]] * 2
    raw = driver.execute_script("return JSON.parse(document.getElementById('charts').textContent)")
    (chart,) = [one for one in raw if one["id"] == "roles-reward"]
    values, drawn = chart["series"][0]["values"], driver.execute_script("return PLOTS.get('roles-reward').plot.data")
    mean = (0.5 * values[0] * 0.5 + 0.5 * values[1]) / 0.75
    assert drawn[1][1] == pytest.approx(mean) and drawn[3] == values
    driver.find_element(By.NAME, "log").click()
    until(driver, lambda d: "log=1" in d.current_url)
    assert "smooth=0.5" in driver.current_url and "off=second" in driver.current_url
    assert errors(driver) == []


def test_a_chart_is_read_by_keyboard(driver, site):
    screen(driver, 1280, 800, "light")
    opened(driver, f"{site}/run/trained/curves")
    chart = driver.find_element(By.CSS_SELECTOR, "[data-chart=roles-reward]")
    plot = chart.find_element(By.CSS_SELECTOR, ".plot")
    driver.execute_script("arguments[0].focus()", plot)
    plot.send_keys("\ue012")  # left: from the last step to the one before
    said = chart.find_element(By.CSS_SELECTOR, "[role=status]").get_attribute("textContent")
    assert said.startswith(f"step {STEPS - 1}: first ")
    plot.send_keys("\ue007")
    until(driver, lambda d: "/episodes" in d.current_url and f"step={STEPS - 1}" in d.current_url)


def test_keys_lead_to_the_next_call_and_the_next_group(site, run):
    with SqliteStore.open(run, read_only=True) as store:
        ((episode,),) = store.rows("SELECT id FROM episodes WHERE phase = 'train' LIMIT 1")
        first, second = (call.id for call in store.calls(episode))
    page = httpx.get(f"{site}/run/trained/call/{first}?by=logprob").text
    assert f'rel="next" href="/run/trained/call/{second}?by=logprob"' in page and 'rel="prev"' not in page
    group = re.search(r'/run/trained/group/[^"]+', httpx.get(f"{site}/run/trained/groups?step=1").text)
    assert group and 'rel="next" href="/run/trained/group/' in httpx.get(site + group[0].replace("&amp;", "&")).text


def test_tasks_are_a_grid_and_lines_without_a_map_where_each_was_tried_once(tmp_path: Path):
    with SqliteStore.open(tmp_path / "run") as store:
        for n in range(30):
            about: Any = {"workflow": "w", "phase": "train", "training_step": n % 3, "metrics": {"success": n % 2}}
            store.write([Episode(id=f"E{n:02}", task=Task(id=f"t{n:02}", input="x"), **about)])
    with viewing([tmp_path / "run"]) as server:
        page = httpx.get(f"{server.url}/run/run/tasks").text
        grid = page.split('<div class="grid"')[1].split("</div>")[0]
        assert grid.count("<a ") == 30 and grid.count('class="v0"') == grid.count('class="v4"') == 15
        assert "in steps" in page and 'aria-label="success by step"' not in page
