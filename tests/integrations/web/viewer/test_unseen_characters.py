"""Characters that nobody sees are marked on every page, in the lists of filters too."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

import pytest

from cotune.integrations.web.viewer.server import viewing
from cotune.records.ids import candidate_id
from cotune.records.structs import (
    CallRecord,
    Candidate,
    Episode,
    FeedbackRecord,
    Message,
    PolicyRef,
    RewardRecord,
    Task,
)
from cotune.storage.sqlite_store import SqliteStore
from cotune.terminal import UNSEEN, harmless
from tests.integrations.web.viewer.test_run_folder_is_data import crawl

HIDDEN = "a\u202eb\u200bc\U000e0041d\x1b[31me\u2067f"


class Texts(HTMLParser):
    """The texts that a page shows, without those of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        self.texts += [value or "" for name, value in attributes if name in ("title", "aria-label", "placeholder")]

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.texts.append(data)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "sent"
    folder.mkdir()
    said = {
        "role": "assistant",
        "content": HIDDEN,
        "tool_calls": [{"id": HIDDEN, "function": {"name": HIDDEN, "arguments": f'{{"{HIDDEN}": 1}}'}}],
    }
    with SqliteStore.open(folder) as store:
        store.write([Message("m1", {"role": "user", "name": HIDDEN, "content": HIDDEN})])
        for number in range(2):
            call = f"01K0ABCDEFGHJKMNPQRSTVWX{number:02}"
            episode = f"01K0BBCDEFGHJKMNPQRSTVWX{number:02}"
            candidate = Candidate(index=0, text=HIDDEN, message=said, finish_reason=HIDDEN)
            store.write(
                [
                    CallRecord(
                        id=call,
                        episode=episode,
                        role=HIDDEN,
                        step=0,
                        turn=0,
                        messages=("m1",),
                        model=HIDDEN,
                        policy=PolicyRef(HIDDEN, 1),
                        error=HIDDEN,
                        params={HIDDEN: HIDDEN},
                        started=1.0,
                        latency=1.0,
                        candidates=(candidate,),
                        chosen=0,
                    ),
                    RewardRecord(candidate_id(call, 0), HIDDEN, 1.0),
                    RewardRecord(episode, HIDDEN, 1.0),
                    FeedbackRecord(episode, HIDDEN, HIDDEN),
                    Episode(
                        id=episode,
                        task=Task(id=HIDDEN, input=HIDDEN),
                        workflow=HIDDEN,
                        phase=HIDDEN,
                        status="error",
                        error=HIDDEN,
                        calls=1,
                        key=HIDDEN,
                        metrics={HIDDEN: 1.0},
                    ),
                ]
            )
    return folder


def test_no_page_shows_a_character_that_nobody_sees(recorded: Path) -> None:
    with viewing([recorded]) as server:
        pages = crawl(server.url)
    assert len(pages) > 10
    marked = 0
    for page, html in pages.items():
        parser = Texts()
        parser.feed(html)
        for text in parser.texts:
            assert not UNSEEN.search(text.strip("\n")), (page, text)
            marked += harmless(HIDDEN) in text
    assert marked > 20


@pytest.mark.parametrize(
    "text", ["👩\u200d💻", "می\u200cخواهم", "क\u094d\u200dष", "naïve – “quoted”", "line\n\ttab", "❤\ufe0f\u200d🔥"]
)
def test_joiners_that_a_script_or_an_emoji_needs_stay(text: str) -> None:
    assert harmless(text) == text


@pytest.mark.parametrize("text", ["pay\u200dpal", "\u200c", "x\u00ady", "a\ufeffb", "\U000e0049\U000e0067", "\u202e"])
def test_others_are_marked(text: str) -> None:
    assert harmless(text) != text and not UNSEEN.search(harmless(text))
