"""Thumbs and notes from the page: who may write them, where they are kept, and how the terminal uses them."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.by import By

from cotune.cli.main import main
from cotune.errors import RecordError
from cotune.integrations.web.viewer.rendering import asset
from cotune.integrations.web.viewer.server import viewing
from cotune.storage.notes import FILE, LONGEST, Note, notes_file, read_notes, write_note
from tests.integrations.web.viewer.test_browser import opened, screen, until
from tests.integrations.web.viewer.test_pages import ids


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    """A run of this test's own, without its weights."""
    return shutil.copytree(run, tmp_path / "trained", ignore=shutil.ignore_patterns("checkpoints"))


@pytest.fixture
def url(copied: Path) -> Iterator[str]:
    with viewing([copied]) as server:
        yield server.url.rstrip("/")


def a_call(run: Path) -> str:
    sql = "SELECT calls.id FROM calls JOIN episodes ON episodes.id = episode WHERE phase = 'train' LIMIT 1"
    (call,) = ids(run, sql)
    return call


def post(url: str, body: object, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/run/trained/note", json=body, headers={"origin": url, **headers})


def test_a_thumb_and_a_note_are_kept_shown_and_taken_back(url: str, copied: Path) -> None:
    id = f"{a_call(copied)}.1"
    assert post(url, {"id": id, "score": 1, "note": " clear <b> "}).status_code == 200
    assert post(url, {"id": f"{a_call(copied)}.0", "score": -1}).status_code == 200
    first, second = read_notes(copied / FILE).values()
    assert (first.id, first.score, first.note, second.score) == (id, 1.0, "clear <b>", -1.0) and first.at > 1e9
    page = httpx.get(f"{url}/run/trained/notes").text
    assert "clear &lt;b&gt;" in page and "1 candidate with a thumb up, 1 with a thumb down" in page
    assert page.count('aria-pressed="true"') == 0
    assert httpx.get(f"{url}/run/trained/call/{a_call(copied)}").text.count('aria-pressed="true"') == 2
    assert post(url, {"id": id, "score": None, "note": ""}).json()["score"] is None
    assert list(read_notes(copied / FILE)) == [second.id]


def test_only_pages_of_this_viewer_write(url: str, copied: Path) -> None:
    body = {"id": f"{a_call(copied)}.1", "score": 1}
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null", ""):
        assert post(url, body, origin=origin).status_code == 403, origin
    form = httpx.post(f"{url}/run/trained/note", data={"id": "x"}, headers={"origin": url})
    assert form.status_code == 415
    assert httpx.post(f"{url}/run/trained", json=body, headers={"origin": url}).status_code == 405
    assert httpx.get(f"{url}/run/trained/note").status_code == 405
    assert not (copied / FILE).exists()


def test_with_a_token_it_is_needed_to_write(copied: Path) -> None:
    body = {"id": f"{a_call(copied)}.1", "score": 1}
    with viewing([copied], token="secret") as server, httpx.Client() as client:
        url = server.url.rstrip("/")
        assert post(url, body).status_code == 401
        assert post(url, body, authorization="Bearer secret", origin="").status_code == 200
        client.get(f"{url}/?token=secret")
        asked = {"json": body, "headers": {"origin": url}}
        assert client.post(f"{url}/run/trained/note", **asked).status_code == 200
        for origin in ("http://evil.example", "http://[broken"):
            asked["headers"] = {"origin": origin}
            assert client.post(f"{url}/run/trained/note", **asked).status_code == 403, origin


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"id": "nowhere.0", "score": 1}, 404),
        ({"id": "nowhere", "note": "x"}, 404),
        ({"id": "x", "score": 5}, 400),
        ({"id": "x", "note": "x" * (LONGEST + 1)}, 400),
        ({"id": "x", "unknown": 1}, 400),
        ([], 400),
    ],
)
def test_a_note_of_nothing_is_refused(url: str, copied: Path, body: object, status: int) -> None:
    assert post(url, body).status_code == status and not (copied / FILE).exists()


def test_a_request_that_is_too_large_is_told_how_long_a_note_may_be(url: str) -> None:
    refused = post(url, {"id": "x", "note": "x" * (1 << 17)})
    said = refused.json()["error"]["message"]
    assert refused.status_code == 413 and "at most 10,000 characters" in said and "--max-body" not in said


def test_notes_are_labels_for_judges(url: str, copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = a_call(copied)
    for index, score in enumerate((1, -1, -1, 1)):
        post(url, {"id": f"{call}.{index}", "score": score, "note": "a text that judges pass over"})
    app = copied / "app.py"
    app.write_text("from tests.trainer.tiny_app import application, letters\njudged = application(first=letters)\n")
    command = ["records", "judge", str(copied), "--labels", str(copied / FILE), "--app", f"{app}:judged"]
    assert main(command) == 0
    assert " of 4 pairs in 1 group " in capsys.readouterr().out


def test_a_broken_file_of_notes_is_named_with_its_line(tmp_path: Path) -> None:
    file = notes_file(tmp_path / "records.db")
    assert file == tmp_path / FILE and read_notes(file) == {}
    assert notes_file(tmp_path / "other.db") == tmp_path / f"other.db.{FILE}"
    write_note(file, Note(id="a", score=1.0))
    file.write_text(file.read_text() + "{broken\n")
    with pytest.raises(RecordError, match="line 2"):
        read_notes(file)


def test_commands_of_the_page_survive_a_path_with_spaces(copied: Path) -> None:
    named = copied.rename(copied.with_name("my run; x"))
    with viewing([named]) as server:
        url = server.url.rstrip("/")
        here = httpx.get(url, follow_redirects=True).url.path
        note = {"id": f"{a_call(named)}.1", "score": 1}
        assert httpx.post(f"{url}{here}/note", json=note, headers={"origin": url}).status_code == 200
        (commands,) = re.findall('<pre class="commands">(.*?)</pre>', httpx.get(f"{url}{here}/notes").text, re.DOTALL)
    judge, train = (shlex.split(line) for line in html.unescape(commands).splitlines())
    assert judge == ["cotune", "records", "judge", str(named), "--labels", str(named / FILE)]
    assert train[train.index("--records") + 1] == str(named)
    assert train[train.index("--set") + 1] == f"records.labels={named / FILE}"


def test_thumbs_do_not_look_like_the_troubles_that_a_page_notes() -> None:
    """Both had the class `noted`, so that the list of troubles stood beside its heading."""
    shared = re.findall(r"^\.noted\b.*", asset("viewer.css"), re.MULTILINE)
    assert shared == [] and ".thumbs {" in asset("viewer.css")


def test_a_page_is_told_why_its_note_was_not_kept(url: str, copied: Path) -> None:
    (copied / FILE).write_text("{broken\n")
    answer = post(url, {"id": f"{a_call(copied)}.1", "score": 1})
    assert answer.status_code == 500 and "line 1 is not a note" in answer.json()["error"]["message"]


def test_a_thumb_is_a_click_and_again_takes_it_back(driver, url: str, copied: Path) -> None:
    screen(driver, 1280, 800, "light")
    opened(driver, f"{url}/run/trained/call/{a_call(copied)}")
    box = driver.find_elements(By.CSS_SELECTOR, "[data-note]")[1]
    up, told = box.find_element(By.CSS_SELECTOR, "button"), box.find_element(By.CSS_SELECTOR, "[role=status]")
    up.click()
    until(driver, lambda d: told.text == "kept")
    assert [json.loads(line)["score"] for line in (copied / FILE).read_text().splitlines()] == [1.0]
    box.find_element(By.TAG_NAME, "summary").click()
    box.find_element(By.TAG_NAME, "textarea").send_keys("well said\t")
    until(driver, lambda d: "well said" in (copied / FILE).read_text())
    up.click()
    until(driver, lambda d: '"score":null' in (copied / FILE).read_text())
