"""Whose answer a call read: recorded parents are certain, quotations are guessed by one documented rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.reading.reads import Reads, reads
from cotune.records.structs import CallRecord, Candidate, Message
from cotune.storage.sqlite_store import SqliteStore

LONG = "Take the second door\nand then 2 steps north."
DEMO = [
    ("navigator", "goal right=3 up=2\nwalls left", "up"),
    ("driver", "controls up=K left=J\nsaid up", "K"),
    ("navigator", "goal right=3 up=1\nwalls up", "right up"),
    ("driver", "controls up=K left=J\nsaid right up", "J K"),
]
"""The game of `make demo`: short answers after a label, and a word of an answer that stands in a prompt by chance."""

Call = tuple[str, Any, str]
CASES: dict[str, tuple[list[Call], tuple[int, ...]]] = {
    # what is a quotation
    "a whole message": ([("a", "q", LONG), ("b", LONG, "x")], (0,)),
    "a whole message, however short": ([("a", "q", "2"), ("b", "2", "x")], (0,)),
    "a whole message of several": ([("a", "q", "yes"), ("b", ["Decide.", "yes"], "x")], (0,)),
    "a long answer inside a message": ([("a", "q", LONG), ("b", f"Check this:\n{LONG}\nIs it right?", "x")], (0,)),
    "two answers in one message": (
        [("a", "q", "take the left path"), ("b", "q", "take the right path"),
         ("c", "1. take the left path\n2. take the right path", "x")], (0, 1),
    ),
    "a short answer after a label": ([("a", "q", "Paris"), ("b", "Is it right?\nAnswer: Paris", "x")], (0,)),
    "with signs around it": ([("a", "q", "Paris"), ("b", 'Proposed: "Paris".', "x")], (0,)),
    "a label of one word": (DEMO[:2], (0,)),
    "a label in every turn": (DEMO, (2,)),
    "the same message in another turn": (
        [*DEMO, ("navigator", "goal right=1", "right up"), ("driver", DEMO[3][1], "J K")], (4,),
    ),
    "a number of three digits after a label": ([("a", "q", "4711"), ("b", "Result: 4711", "x")], (0,)),
    "the latest of equal answers": (
        [("a", "q", "go up now"), ("a", "q2", "go up now"), ("b", "Do: go up now", "x")], (1,),
    ),
    "equal answers of parallel calls": (
        [("a", "q", "it is Paris"), ("a2", "q", "it is Paris"), ("b", "1. it is Paris\n2. it is Paris", "x")], (0, 1),
    ),
    "the same message to two readers": (
        [("a", "q", LONG), ("b", f"Check: {LONG}", "x"), ("c", f"Check: {LONG}", "y")], (0,),
    ),
    # what is none
    "a number in a sentence": ([("a", "q", "2"), ("b", "Take 2 of the 5 doors.", "x")], ()),
    "a number after a label": ([("a", "q", "2"), ("b", "Rounds left: 2", "x")], ()),
    "a number inside a quoted answer": ([("a", "q", "2"), ("b", "q", LONG), ("c", f"Check: {LONG}", "x")], (1,)),
    "a short word in an instruction": ([("a", "q", "right"), ("b", "Say left or right.", "x")], ()),
    "a single long word in an instruction": ([("a", "q", "approved"), ("b", "Write approved or not.", "x")], ()),
    "part of a longer word": ([("a", "q", "go up now"), ("b", "Do not go up nowhere.", "x")], ()),
    "a label that also held other text": (DEMO[:3], ()),
    "text of the task itself": ([("a", "q", "the red house"), ("b", "Draw the red house at night.", "x")], ()),
    "a message that was sent before": (
        [("a", "Say: so it is done", "x"), ("b", "q", "so it is done"), ("c", "Say: so it is done", "y")], (),
    ),
    "what the role has read before": (
        [("a", "q", LONG), ("b", f"Check: {LONG}", "x"), ("b", [f"Check: {LONG}", "And now?"], "y")], (),
    ),
    "an empty answer": ([("a", "q", ""), ("b", "", "x")], ()),
}  # fmt: skip


def last_reads(path: Path, calls: list[Call], parents: tuple[str, ...] = (), together: bool = False) -> Reads:
    """What the last of these calls read; one begins after the other has ended, or all at once."""
    with SqliteStore.open(path) as store:
        records = []
        for step, (role, said, answer) in enumerate(calls):
            texts = [said] if isinstance(said, str) else said
            store.write([Message(f"m{text}", {"role": "user", "content": text}) for text in texts])
            candidate = Candidate(index=0, text=answer, message={"role": "assistant", "content": answer})
            records.append(
                CallRecord(
                    id=f"C{step}", episode="E", role=role, step=step, turn=0,
                    messages=tuple(f"m{text}" for text in texts), started=0.0 if together else 2.0 * step, latency=1.0,
                    candidates=(candidate,), chosen=0, parents=parents if step == len(calls) - 1 else (),
                )
            )  # fmt: skip
        store.write(records)
        store.flush()
        return reads(store, records[-1:], records[:-1], {"question": "Where is the red house?"})[f"C{len(calls) - 1}"]


@pytest.mark.parametrize("name", CASES)
def test_a_quotation_is_guessed(tmp_path: Path, name: str) -> None:
    calls, expected = CASES[name]
    assert last_reads(tmp_path, calls) == Reads((), expected)


def test_a_recorded_parent_is_certain_and_no_guess(tmp_path: Path) -> None:
    calls = [("a", "q", LONG), ("b", "q2", "take the left path"), ("c", f"{LONG}\ntake the left path", "x")]
    assert last_reads(tmp_path, calls, parents=("C0",)) == Reads((0,), (1,))


def test_a_call_that_has_not_ended_is_not_read(tmp_path: Path) -> None:
    assert last_reads(tmp_path, [("a", "q", LONG), ("b", LONG, "x")], together=True) == Reads()
