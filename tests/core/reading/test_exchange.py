"""The question, the answer and the expected answer of an episode, as lists show them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.reading.exchange import Exchange, answer_of, exchanges, expected_of, first_characters, question_of
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.recording.redaction import each_text
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Candidate, Episode, Task
from cotune.storage.sqlite_store import SqliteStore


@pytest.mark.parametrize(
    ("given", "question", "expected"),
    [
        ("2 + 2?", "2 + 2?", ""),
        ({"id": "t1", "question": "2 + 2?", "answer": 4}, "2 + 2?", "4"),
        ({"problem": "2 + 2?", "solution": "four", "hint": "add"}, "2 + 2?", "four"),
        ({"question": "", "prompt": "2 + 2?", "expected": [4, "4"]}, "2 + 2?", '[4, "4"]'),
        ({"id": "t1", "letter": "a", "label": False}, '{"letter": "a"}', "false"),
        ({"messages": [{"role": "user", "content": "first"}, {"role": "user", "content": "last"}]}, "last", ""),
        ([{"role": "system", "content": "be short"}, {"role": "user", "content": "2 + 2?"}], "2 + 2?", ""),
        ([1, 2], "[1, 2]", ""),
        ({"id": "t1", "answer": 4}, "", "4"),
        (7, "7", ""),
        (None, "", ""),
    ],
)
def test_question_and_expected_answer_of_a_task(given: Any, question: str, expected: str) -> None:
    assert (question_of(given), expected_of(given)) == (question, expected)


def test_an_answer_is_its_text_and_its_tool_calls() -> None:
    call = {"id": "1", "function": {"name": "search", "arguments": '{"q": 1}'}}
    assert answer_of({"content": "I look.", "tool_calls": [call]}) == 'I look.\nsearch({"q": 1})'
    assert answer_of({"content": None}) == "" and answer_of(None) == ""
    assert answer_of({"content": 3, "tool_calls": 4}) == "3", "an odd record is shown as far as it can be read"


def test_a_beginning_has_80_characters_on_one_line_and_marks_what_nobody_sees() -> None:
    text = question_of("pay\u202epal\x1d now\n" + "x" * 100)
    assert first_characters(text) == "pay�pal␝ now " + "x" * 66 + "…" and len(first_characters(text)) == 80


def write(store: SqliteStore, id: str, *answers: tuple[str, str]) -> None:
    """An episode with calls that ended with a status and an answer."""
    for step, (status, text) in enumerate(answers):
        said = Candidate(index=0, text=text, message={"role": "assistant", "content": text})
        other = Candidate(index=1, text="other", message={"role": "assistant", "content": "other"})
        store.write(
            [CallRecord(id=f"{id}c{step}", episode=id, role="r", step=step, turn=step, status=status,  # type: ignore[arg-type]
                        candidates=(other, said)[::-1], chosen=0 if status == "ok" else None)]
        )  # fmt: skip
    store.write([Episode(id=id, task=Task(id=id, input={"question": f"{id}?"}), workflow="w", calls=len(answers))])


def test_the_answer_is_the_chosen_one_of_the_latest_call_that_was_answered(tmp_path: Path) -> None:
    with SqliteStore.open(tmp_path) as store:
        write(store, "E1", ("ok", "plan"), ("ok", "done"), ("error", "lost"))
        write(store, "E2")
        write(store, "E3", ("timeout", ""))
        store.flush()
        assert exchanges(store, ["E1", "E2", "E3", "unknown"]) == {
            "E1": Exchange(question="E1?", answer="done"),
            "E2": Exchange(question="E2?"),
            "E3": Exchange(question="E3?"),
        }


def test_only_texts_of_the_asked_episodes_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Episodes of a page are found by index, and a page takes one query, however many it shows."""
    with SqliteStore.open(tmp_path) as store:
        for number in range(40):
            write(store, f"E{number:02}", ("ok", "plan"), ("ok", "done"))
        store.flush()
        asked = []
        rows = store.rows
        monkeypatch.setattr(store, "rows", lambda sql, values=(): asked.append((sql, values)) or rows(sql, values))
        assert len(exchanges(store, [f"E{number:02}" for number in range(20)])) == 20
        ((sql, values),) = asked
        plan = " ".join(str(row[-1]) for row in rows(f"EXPLAIN QUERY PLAN {sql}", values))
    assert "SCAN calls" not in plan and "SCAN latest" not in plan and "SCAN episodes" not in plan
    assert "calls_by_episode" in plan


def test_what_a_redactor_removed_is_not_shown(tmp_path: Path) -> None:
    hide = each_text(lambda text: text.replace("4111", "[card]"))
    with SqliteStore.open(tmp_path) as store:
        live = LiveEpisode(store, Task(id="t", input={"question": "pay with 4111"}), workflow="w", redactors=(hide,))
        call = live.start(CallerContext("r", "test"), {"messages": [{"role": "user", "content": "pay with 4111"}]})
        message = {"role": "assistant", "content": "paid with 4111"}
        call.finish(Answer(candidates=(Candidate(index=0, text="paid with 4111", message=message),)))
        live.end("ok")
        store.flush()
        assert exchanges(store, [live.id])[live.id] == Exchange(question="pay with [card]", answer="paid with [card]")
