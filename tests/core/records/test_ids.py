"""Ids are sortable, unique across threads and forks, and say when they were made."""

from __future__ import annotations

import os
import threading
import time

import pytest

from cotune.records import ids

ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def value(made: str) -> int:
    number = 0
    for character in made:
        number = number * 32 + ALPHABET.index(character)
    return number


def test_an_id_is_a_ulid_of_now() -> None:
    before = time.time_ns() // 1_000_000
    made = ids.new_id()
    assert len(made) == 26
    assert before <= value(made) >> 80 <= time.time_ns() // 1_000_000


def test_ids_are_strictly_increasing_across_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 2_000_000_000_000_000_000)
    made = [ids.new_id() for _ in range(5000)]
    numbers = [value(one) for one in made]
    assert numbers == list(range(numbers[0], numbers[0] + 5000))
    assert made == sorted(made)
    monkeypatch.undo()
    ids._last.reset()


def test_ids_of_many_threads_are_unique() -> None:
    made: list[str] = []

    def make() -> None:
        made.extend([ids.new_id() for _ in range(5000)])

    threads = [threading.Thread(target=make) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == len(made) == 20_000


def test_a_forked_process_makes_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 2_000_000_000_000_000_000)
    ids.new_id()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, ids.new_id().encode())
        os._exit(0)
    os.waitpid(child, 0)
    theirs = os.read(read, 26).decode()
    os.close(read)
    os.close(write)
    assert theirs[:10] == ids.new_id()[:10]
    assert abs(value(theirs) - value(ids.new_id())) > 1 << 40
    monkeypatch.undo()
    ids._last.reset()
