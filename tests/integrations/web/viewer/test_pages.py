"""The pages of the viewer over HTTP: what each of them says of a run that was really trained."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from pathlib import Path

import httpx
import msgspec
import pytest

from cotune.cli.main import main
from cotune.errors import ConfigError, RunError
from cotune.integrations.web.viewer.report import report
from cotune.integrations.web.viewer.server import viewing
from cotune.integrations.web.viewer.timeline import TimedCall, UsedTool, timeline
from cotune.reading.curves import charts
from cotune.reading.find_runs import open_runs
from cotune.reading.groups import step_groups
from cotune.reading.run import OpenedRun
from cotune.records.structs import CallRecord, Candidate, Episode, Message, RewardRecord, Task, ToolResult
from cotune.storage.metrics_file import read_metrics
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.web.viewer.conftest import STEPS


def text(url: str) -> str:
    """A page without its tags."""
    answer = httpx.get(url, follow_redirects=True, timeout=60)
    assert answer.status_code == 200, answer.text
    plain = re.sub(r"<(style|script).*?</\1>", " ", answer.text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]+>", " ", plain).split())


def ids(run: Path, sql: str) -> list[str]:
    with SqliteStore.open(run, read_only=True) as store:
        return [id for (id,) in store.rows(sql)]


def test_one_run_is_shown_at_once_with_its_figures(site, run):
    said = text(site)
    last = list(read_metrics(run))[-1]
    assert "held-out success held_out.jsonl 66.7% trained 20.8% – 93.9% 3 tasks base 66.7%" in said
    assert f"steps {STEPS} of {STEPS}" in said and "recipe at_grpo" in said
    assert f"calls {2 * 3 * (2 * STEPS + 2)}" in said and last["held_out"]["episodes"] == 3


def test_a_list_shows_80_characters_of_question_and_answer(tmp_path):
    said = {"role": "assistant", "content": "so\u202e\n" * 60}
    with SqliteStore.open(tmp_path / "traced") as store:
        answer = Candidate(index=0, text="", message=said)
        store.write([CallRecord(id="C", episode="E", role="r", step=0, turn=0, candidates=(answer,), chosen=0)])
        store.write([Episode(id="E", task=Task(id="t", input={"question": "why " * 60}), workflow="w", calls=1)])
    with viewing([tmp_path / "traced"]) as server:
        for page in ("", "/episodes"):
            told = text(f"{server.url}/run/traced{page}")
            assert f"{('why ' * 20)[:79]}…" in told and f"{('so� ' * 20)[:79]}…" in told
            assert "why " * 21 not in told and "so� " * 21 not in told


def test_tokens_by_role_with_their_cost(run):
    prompt, answer = (
        ids(run, "SELECT sum(prompt_tokens) FROM calls"),
        ids(run, "SELECT sum(completion_tokens) FROM calls"),
    )
    with viewing([run], prices={"m": (1e6, 2e6)}) as server:
        said = text(f"{server.url}/run/trained/use")
        runs = httpx.get(f"{server.url}/?all=1").text
        (whole,) = re.findall(r'data-load="([^"]+)"', runs)
        assert text(f"{server.url}{whole}") == f"{prompt[0]} + {answer[0]} cost {prompt[0] + 2 * answer[0]:,}"
    assert f"all {prompt[0] + 2 * answer[0]:,}" in said


def test_prices_of_the_configuration_give_the_cost_too(run, tmp_path):
    priced = shutil.copytree(run, tmp_path / "priced", ignore=shutil.ignore_patterns("checkpoints"))
    about = json.loads((priced / "run.json").read_text())
    about["config"]["prices"] = {"m": [1e6, 0.0]}
    (priced / "run.json").write_text(json.dumps(about))
    (prompt,) = ids(run, "SELECT sum(prompt_tokens) FROM calls")
    with viewing([priced]) as server:
        assert f"all {prompt:,}" in text(f"{server.url}/run/priced/use")


def test_curves_hold_every_step_with_the_interval_of_held_out_success(site, run):
    page = httpx.get(f"{site}/run/trained/curves").text
    charts = {
        c["id"]: c for c in msgspec.json.decode(re.search(r'id="charts"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    }
    success = charts["outcome-success-on-held-out-tasks"]
    assert success["steps"] == [0, 1, 2, 3] and success["phase"] == "eval"
    assert [round(v, 3) for v in success["series"][0]["low"]] == [0.208] * (STEPS + 1)
    lines = list(read_metrics(run))
    assert {s["label"]: s["values"] for s in charts["roles-reward"]["series"]} == {
        role: [line["roles"][role]["reward"] for line in lines] for role in ("first", "second")
    }
    assert {"roles-entropy", "roles-sampler-trainer-gap", "the-run-seconds-by-phase"} <= charts.keys()


@pytest.mark.parametrize(
    ("query", "where"),
    [
        ("", "1"),
        ("step=2&phase=train", "training_step = 1 AND phase = 'train'"),
        ("task=a", "task = 'a'"),
        ("role=second", "1"),
        ("role=nobody", "0"),
        ("status=error", "status = 'error'"),
        ("low=0.25", "(SELECT value FROM rewards WHERE target = episodes.id) >= 0.25"),
        ("high=0", "(SELECT value FROM rewards WHERE target = episodes.id) <= 0"),
        ("q=say+b", "task = 'b'"),
        ("q=content", "0"),
        ("q=finish_reason", "0"),
        ("q=nowhere%25", "0"),
    ],
)
def test_episodes_are_filtered_and_searched(site, run, query, where):
    page = httpx.get(f"{site}/run/trained/episodes?{query}").text
    assert re.findall(r'class="main mono"[^>]*>(\w+)<', page) == ids(
        run, f"SELECT id FROM episodes WHERE {where} ORDER BY id DESC"
    )


def test_steps_count_from_1_wherever_a_person_looks(site, run, capsys):
    pages = {name: httpx.get(f"{site}/run/trained/{name}").text for name in ("episodes", "groups", "tasks", "curves")}
    assert re.findall(r"<option[^>]*>(\d+)<", pages["groups"]) == ["1", "2", "3"]
    assert "step 1 … 3" in text(f"{site}/run/trained/tasks") and "<title>step 3:" in pages["tasks"]
    assert re.findall(r"episodes\?step=(\d)\">(\d)<", pages["curves"]) == [("1", "1"), ("2", "2"), ("3", "3")]
    opened = OpenedRun(run, "r")
    assert {step for chart in charts([opened]) for step in chart.steps} == {0, 1, 2, 3}
    assert "before: base" in (said := report(opened, {})) and "after: trained" in said
    opened.close()
    (last,) = ids(run, "SELECT max(id) FROM episodes WHERE phase = 'train'")
    assert 'episodes?step=3&amp;phase=train">step 3</a>' in httpx.get(f"{site}/run/trained/episode/{last}").text
    assert main(["show", str(run), "--episode", last]) == 0 and "train step 3" in capsys.readouterr().out
    assert main(["show", str(run), "--limit", "1"]) == 0 and "c eval 3 2" in " ".join(capsys.readouterr().out.split())


def test_an_episode_shows_calls_candidates_and_what_trained_on_them(site, run):
    (episode,) = ids(run, "SELECT id FROM episodes WHERE phase = 'train' AND training_step = 1 AND task = 'a'")
    page = httpx.get(f"{site}/run/trained/episode/{episode}").text
    assert page.count('<article class="candidate') == 2 * 4 and page.count('candidate chosen"') == 2
    assert page.count('class="bar h') == 2 and 'id="call-1"' in page
    opened = OpenedRun(run, "r")
    groups = step_groups(opened, 1)
    mine = {
        id: a
        for id, a in groups.advantages.items()
        if id[:26] in ids(run, f"SELECT id FROM calls WHERE episode = '{episode}'")
    }
    for value in mine.values():
        assert f"</i> {value:+.3g}" in page
    opened.close()


def test_groups_are_those_that_were_trained_on(site, run):
    said = text(f"{site}/run/trained/groups?step=2")
    line = list(read_metrics(run))[1]
    opened = OpenedRun(run, "r")
    groups = step_groups(opened, 1)
    kept = {group.id for group in groups.groups if not group.reason}
    assert kept == set(ids(run, "SELECT target FROM consumed WHERE training_step = 1 AND is_group"))
    assert sum(map(bool, groups.advantages.values())) == line["rows"] and dict(groups.left_out) == line["left_out"]
    for reason, count in line["left_out"].items():
        assert f"{reason} {count}" in said
    some = groups.groups[0]
    assert "candidates, the best first" in text(f"{site}/run/trained/group/{some.id}?step=2").lower()
    opened.close()


def test_what_was_left_out_is_a_share_of_all_candidates_those_of_untrained_roles_too(run, tmp_path):
    more = shutil.copytree(run, tmp_path / "more", ignore=shutil.ignore_patterns("checkpoints"))
    lines = [json.loads(line) for line in (more / "metrics.jsonl").read_text().splitlines()]
    lines[1] |= {"rows": 30, "candidates": 40, "left_out": {"untrained_role": 60, "zero_variance": 10}}
    (more / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with viewing([more]) as server:
        said = text(f"{server.url}/run/more/groups?step=2")
    assert "Left out of 100 candidates" in said
    assert "untrained_role 60 60.0%" in said and "zero_variance 10 10.0%" in said


def test_tasks_that_never_and_always_succeed(site):
    said = text(f"{site}/run/trained/tasks")
    assert "never solved 1" in said and "always solved 2" in said and "sometimes solved 0" in said
    assert "c 3 0.0%" in text(f"{site}/run/trained/tasks?kind=never")
    assert "c 3 0.0%" not in text(f"{site}/run/trained/tasks?kind=always")


def test_a_call_shows_its_tokens_by_log_probability(site, run):
    call, said = ids(run, "SELECT id FROM calls LIMIT 1")[0], []
    with SqliteStore.open(run, read_only=True) as store:
        ((episode,),) = store.rows("SELECT episode FROM calls WHERE id = ?", (call,))
        said = store.calls(episode)[0].candidates[0]
    assert 'class="tokens"' not in httpx.get(f"{site}/run/trained/call/{call}").text
    page = httpx.get(f"{site}/run/trained/call/{call}?by=logprob").text
    shown = re.findall(
        r'<span class="t t\d" title="[^"]*">(.*?)</span>', page.split('class="tokens"')[1].split("</p>")[0]
    )
    assert "".join(shown).replace("&lt;", "<").replace("&gt;", ">").startswith(said.text)


def test_runs_beside_each_other_and_where_they_differ(run, tmp_path):
    other = shutil.copytree(run, tmp_path / "other", ignore=shutil.ignore_patterns("checkpoints"))
    (other / "run.json").write_text((other / "run.json").read_text().replace("0.003", "0.004"))
    with viewing([run, other]) as server:
        said = text(server.url)
        assert f"trained {run} · test_app:solve" in said or f"trained {run} · 2" in said
        assert said.count("finished at_grpo") == 2
        said = text(f"{server.url}/compare?run=trained&run=other")
        assert "learner.lr 0.003 0.004" in said and "tasks_per_step" not in said
        assert "tasks_per_step 3 3" in text(f"{server.url}/compare?run=trained&run=other&all=1")
        page = httpx.get(f"{server.url}/curves?run=trained&run=other").text
        assert "trained \\u00b7 first" in page and "other \\u00b7 second" in page


def test_a_run_under_way_is_followed(tmp_path):
    with SqliteStore.open(tmp_path / "traced") as store, viewing([tmp_path / "traced"]) as server:
        page = f"{server.url}/run/traced/episodes"
        before = httpx.get(f"{server.url}/run/traced/changed").json()
        assert before["state"] == "recording" and 'data-follow="/run/traced/changed"' in httpx.get(page).text
        store.write([Episode(id="E1", task=Task(id="t", input="x"), workflow="w")])
        store.flush()
        assert httpx.get(f"{server.url}/run/traced/changed").json()["stamp"] != before["stamp"]
        assert ">E1<" in httpx.get(page).text


def test_a_run_that_ended_before_its_first_step_says_how_to_go_on(tmp_path):
    run = tmp_path / "r1"
    run.mkdir()
    (run / "run.json").write_text(json.dumps({"model": "m", "config": {"recipe": "at_grpo", "steps": 10}}))
    with viewing([run]) as server:
        said = text(server.url)
        assert (
            "the run ended before its first step did." in said and f"Continue with: cotune train --resume {run}" in said
        )
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([call("C0", 0, ()), Episode(id="E1", task=Task(id="t", input="x"), workflow="w", calls=1)])
    with viewing([tmp_path / "traced"]) as server:
        assert "the records hold neither success nor rewards" in text(server.url)
        assert "· 1 call ·" in text(f"{server.url}/run/traced/episode/E1")


def test_a_cause_is_the_first_line_that_says_something(tmp_path):
    with SqliteStore.open(tmp_path / "traced") as store:
        for id, error in (("E1", "\nValueError: no plan\nTraceback:"), ("E2", "")):
            store.write([Episode(id=id, task=Task(id="t", input="x"), workflow="w", status="error", error=error)])
    with viewing([tmp_path / "traced"]) as server:
        for page in ("", "/episodes"):
            said = text(f"{server.url}/run/traced{page}")
            assert "error ValueError: no plan" in said and "error no reason recorded" in said
        assert "failed: ValueError: no plan" in text(server.url)


def test_what_stands_in_a_prompt_again_is_folded(tmp_path):
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([Message(f"m{i}", {"role": "user", "content": f"text {i}"}) for i in range(3)])
        store.write([call(f"C{turn}", turn, tuple(f"m{i}" for i in range(turn + 2))) for turn in range(2)])
    with viewing([tmp_path / "traced"]) as server:
        said = text(f"{server.url}/run/traced/episode/E1")
        assert "2 messages as in turn 0, and new: user text 2" in said and said.count("text 1") == 1
        assert "it is under way, or was interrupted" in said
        assert "text 0" in text(f"{server.url}/run/traced/call/C1")


def test_what_a_prompt_quotes_was_read(tmp_path):
    """Applications pass answers on as text too, as CrewAI does."""
    asked = ["go on", "The plan so far:\nfirst sand, then paint\nDo it.", "was it first sand, then painted?"]
    with SqliteStore.open(tmp_path / "traced") as store:
        store.write([Message(f"q{i}", {"role": "user", "content": asked[i]}) for i in range(3)])
        answers = ["first sand, then paint", "done", "done"]
        store.write(
            [
                CallRecord(
                    id=f"Q{i}",
                    episode="E1",
                    role=f"r{i}",
                    step=i,
                    turn=0,
                    messages=(f"q{i}",),
                    candidates=(Candidate(index=0, text=answers[i], message={"content": answers[i]}),),
                    chosen=0,
                )
                for i in range(3)
            ]
        )
    with viewing([tmp_path / "traced"]) as server:
        page = httpx.get(f"{server.url}/run/traced/episode/E1").text
    assert re.findall(r', reads <a href="#call-(\d)">0</a> \(guessed\)', page) == ["0"]
    assert page.count('class="reads guessed"') == 2 and 'class="reads"' not in page  # in time, and between roles
    assert "r1 read r0 1 time, 1 of them guessed" in page


def call(id: str, turn: int, messages: tuple[str, ...]):
    said = Candidate(index=0, text="yes", message={"role": "assistant", "content": "yes"})
    return CallRecord(
        id=id, episode="E1", role="r", step=turn, turn=turn, messages=messages, candidates=(said,), chosen=0
    )


def test_texts_of_applications_are_shown_as_text(hostile):
    with viewing([hostile]) as server:
        for path in (
            "",
            "/evaluations",
            "/episodes",
            "/episode/episode1",
            "/call/call1",
            "/groups",
            "/tasks",
            "/use",
            "/episodes?q=taken",
            "/episodes?q=taken&order=task",
            "/calls?q=taken",
            "/diff?a=call1.0",
            "/notes",
        ):
            answer = httpx.get(f"{server.url}/run/traced{path}")
            assert answer.status_code == 200
            assert "<script>document" not in answer.text and "<img src=x" not in answer.text
            assert "script-src 'self'" in answer.headers["content-security-policy"]
        said = httpx.get(f"{server.url}/run/traced/episode/episode1").text
        assert "␛[2J" in said and "\x1b" not in said
        assert '<span class="badge s-redacted"' in said
        assert said.count('<div class="feedback">') == 2 and "why &lt;" in said


def test_the_token_is_asked_for_once(run):
    with viewing([run], token="s e&cret") as server, httpx.Client(base_url=server.url) as client:
        assert client.get("/run/trained").status_code == 401
        assert client.get("/run/trained?token=wrong").status_code == 401
        arrived = client.get("/run/trained/episodes", params={"token": "s e&cret", "step": "1"})
        assert arrived.status_code == 303 and arrived.headers["location"] == "/run/trained/episodes?step=1"
        assert "HttpOnly" in arrived.headers["set-cookie"]
        assert client.get("/run/trained").status_code == 200
        assert httpx.get(f"{server.url}/", headers={"authorization": "Bearer s e&cret"}).status_code == 307


def test_without_a_token_only_this_machine_gets_in(run, site):
    assert httpx.get(f"{site}/run/trained", headers={"host": "evil.example"}).status_code == 403
    assert httpx.post(f"{site}/run/trained").status_code == 405
    with pytest.raises(ConfigError, match="Add --token"), viewing([run], host="0.0.0.0"):
        pass


def test_the_records_are_open_for_reading_only(run):
    opened = OpenedRun(run, "r")
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        opened.store.rows("DELETE FROM calls")
    opened.close()


@pytest.mark.parametrize(
    "path",
    [
        "/run/nobody",
        "/run/trained/episode/NONE",
        "/run/trained/call/NONE",
        "/run/trained/group/X?step=1",
        "/static/../x",
    ],
)
def test_what_is_not_there_is_said(site, path):
    answer = httpx.get(site + path)
    assert answer.status_code == 404 and "Traceback" not in answer.text


@pytest.mark.parametrize(
    "query", ["step=x", "low=x&high=-", "before=%00", "from=-5", "step=99999999999999", "kind=other"]
)
@pytest.mark.parametrize("page", ["episodes", "groups", "tasks"])
def test_odd_parameters_are_no_errors(site, page, query):
    assert httpx.get(f"{site}/run/trained/{page}?{query}").status_code == 200


def test_a_broken_row_and_metrics_that_are_no_numbers_are_left_out(run, tmp_path):
    broken = shutil.copytree(run, tmp_path / "broken", ignore=shutil.ignore_patterns("checkpoints"))
    db = sqlite3.connect(broken / "records.db")
    (first,) = db.execute("SELECT min(id) FROM calls WHERE episode IN (SELECT id FROM episodes)").fetchone()
    (episode,) = db.execute("SELECT episode FROM calls WHERE id = ?", (first,)).fetchone()
    db.execute("UPDATE calls SET body = '{' WHERE id = ?", (first,))
    db.execute("UPDATE episodes SET metrics = '{\"success\": NaN}'")
    db.commit()
    db.close()
    metrics = (broken / "metrics.jsonl").read_text().replace('"loss": ', '"loss": NaN, "was": ')
    (broken / "metrics.jsonl").write_text(metrics + '{"step": 3, "outc')
    with viewing([broken]) as server:
        for page in (
            "",
            "/curves",
            "/episodes",
            f"/episode/{episode}",
            "/groups?step=1",
            "/tasks",
            "/use",
            "/episodes?q=say",
        ):
            assert httpx.get(f"{server.url}/run/broken{page}").status_code == 200, page


def test_a_folder_of_runs_is_opened_and_what_cannot_be_is_said(run, tmp_path, caplog):
    opened = open_runs([run.parent])
    assert [one.name for one in opened] == ["trained"]
    opened[0].close()
    twice = open_runs([run, run / "records.db"])
    assert [one.name for one in twice] == ["trained", "trained-2"]
    for one in twice:
        one.close()
    shutil.copytree(run, tmp_path / "runs" / "good", ignore=shutil.ignore_patterns("checkpoints"))
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "run.json").write_text("{")
    (left,) = open_runs([tmp_path / "runs"])
    assert left.name == "good" and "bad is left out: " in caplog.text and "run.json is broken" in caplog.text
    left.close()
    with pytest.raises(RunError, match="broken"):
        open_runs([tmp_path / "runs" / "bad"])
    (tmp_path / "runs" / "demo").mkdir()
    (tmp_path / "runs" / "good").rename(tmp_path / "runs" / "demo" / "run")
    (below,) = open_runs([tmp_path / "runs"])
    assert below.name == "demo-run"
    below.close()
    (tmp_path / "empty").mkdir()
    for nothing in (tmp_path / "empty", tmp_path / "absent"):
        with pytest.raises(RunError):
            open_runs([nothing])


def test_an_open_viewer_finds_new_runs(tmp_path, capsys):
    for name in ("first", "second"):
        (tmp_path / "later" / name).mkdir(parents=True)
        with SqliteStore.open(tmp_path / "later" / name) as store:
            store.write([Episode(id="E1", task=Task(id="t", input="x"), workflow="app:solve", started=1e9)])
    (tmp_path / "runs").mkdir()
    (tmp_path / "later" / "first").rename(tmp_path / "runs" / "first")
    with viewing([tmp_path / "runs"]) as server:
        before = httpx.get(f"{server.url}/changed").json()
        (tmp_path / "later" / "second").rename(tmp_path / "runs" / "second")
        assert httpx.get(f"{server.url}/changed").json()["stamp"] != before["stamp"]
        said = text(f"{server.url}/?all=1")
        assert f"{tmp_path / 'runs' / 'second'} · app:solve · 2001-09-09" in said
    assert main(["show", str(tmp_path)]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert f"runs-second: {tmp_path / 'runs' / 'second'} · app:solve · 2001-09-09" in told


def test_a_reward_counts_that_comes_late(tmp_path):
    with SqliteStore.open(tmp_path / "traced") as store, viewing([tmp_path / "traced"]) as server:
        store.write([Episode(id="E1", task=Task(id="t", input="x"), workflow="w"), call("C0", 0, ())])
        store.flush()
        page = f"{server.url}/run/traced/episode/E1"
        assert "judge" not in text(page)
        store.write([RewardRecord("E1", "judge", 0.75)])
        store.flush()
        assert "judge 0.75" in text(page)


def test_calls_in_time_lie_beside_each_other_with_arrows_from_what_they_read():
    calls = [
        TimedCall("a", 0, "planner", 0, "ok", 10.0, 1.0),
        TimedCall("b", 1, "coder", 0, "ok", 11.0, 2.0, ("a",)),
        TimedCall("c", 2, "coder", 1, "ok", 11.5, 1.0, ("a", "gone")),
        TimedCall("d", 3, "coder", 2, "error", 13.0, 1.0, ("b",)),
    ]
    drawn = timeline(calls)
    assert [(bar.call.id, bar.x, bar.y, bar.width) for bar in drawn.bars] == [
        ("a", 130.0, 22.0, 205.0),
        ("b", 335.0, 58.0, 410.0),
        ("c", 437.5, 84.0, 205.0),
        ("d", 745.0, 58.0, 205.0),
    ]
    assert [(lane.role, lane.height) for lane in drawn.lanes] == [("planner", 26), ("coder", 52)]
    assert len(drawn.arrows) == 3 and [tick.text for tick in drawn.ticks] == ["0", "1 s", "2 s", "3 s", "4 s"]


def test_tools_are_drawn_between_the_call_that_asked_and_the_one_that_got_the_result(tmp_path):
    asks = {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "grep", "arguments": "{}"}}]}
    asked = Candidate(index=0, text="", message=asks)
    done = Candidate(index=0, text="done", message={"role": "assistant", "content": "done"})
    result = {"role": "tool", "tool_call_id": "c1", "content": "found"}
    about = {"episode": "E1", "role": "r", "latency": 1.0, "chosen": 0}
    for kept in (False, True):
        with SqliteStore.open(tmp_path / f"traced{kept}") as store:
            store.write([Message("m1", {"role": "user", "content": "q"}), Message("m2", asks), Message("m3", result)])
            store.write(
                [
                    CallRecord(id="C0", step=0, turn=0, messages=("m1",), started=1.0, candidates=(asked,), **about),
                    CallRecord(
                        id="C1", step=1, turn=1, messages=("m1", "m2", "m3"), started=4.5, candidates=(done,), **about
                    ),
                ]
            )  # fmt: skip
            results = (ToolResult("grep", "", 2.5, "m3", 0.75),) if kept else ()
            store.write([Episode(id="E1", task=Task(id="t", input="x"), workflow="w", calls=2, results=results)])
        with viewing([tmp_path / f"traced{kept}"]) as server:
            page = httpx.get(f"{server.url}/run/traced{kept}/episode/E1").text
        assert f"tool grep, {'750 ms' if kept else 'at most 2.5 s'}<" in page


def test_guessed_parents_and_tools_are_drawn_too():
    calls = [
        TimedCall("a", 0, "planner", 0, "ok", 10.0, 0.1),
        TimedCall("b", 1, "coder", 0, "ok", 10.3, 0.094, ("a",), ("a",)),
    ]
    used = [UsedTool("grep", 10.1, 0.2), UsedTool("read", 10.15, 0.1)]
    drawn = timeline(calls, used)
    assert [arrow.guessed for arrow in drawn.arrows] == [False, True]
    assert [lane.role for lane in drawn.lanes] == ["planner", "coder", "tools"]
    (grep, read), bar = drawn.tools, drawn.bars[0]
    assert (grep.x, read.y - grep.y) == (pytest.approx(bar.x + bar.width), 26) and grep.width > read.width > 0
    assert [tick.text for tick in drawn.ticks] == ["0", "100 ms", "200 ms", "300 ms"]


@pytest.mark.parametrize(
    ("lasted", "expected"),
    [(0.0009, "0.8 ms"), (7.5, "6 s"), (99.0, "80 s"), (110.0, "1.5 min"), (5000.0, "80 min"), (90_000.0, "25 h")],
)
def test_marks_of_time_are_round(lasted, expected):
    ticks = timeline([TimedCall("a", 0, "r", 0, "ok", 1.0, lasted)]).ticks
    assert ticks[-1].text == expected and 3 <= len(ticks) <= 8
