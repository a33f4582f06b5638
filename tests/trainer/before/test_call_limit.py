"""Applications that only an answer ends, scorers of roles that seldom call, and limits of the application's own."""

from __future__ import annotations

import contextlib

import cotune
from cotune.storage.sqlite_store import SqliteStore
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask, converse, letters


async def endless(task):
    """Two roles that talk until one says a word that nobody will; it does not care for errors."""
    while True:
        with contextlib.suppress(Exception):
            await ask("first", "go on", max_tokens=1)


def test_an_episode_that_no_answer_ends_is_a_failure_of_the_policy(trainer: Trainer) -> None:
    summary = trainer(application(endless, first=letters), steps=1, max_calls=5, episode_timeout=300)
    assert summary.finished
    with SqliteStore.open(trainer.folder / "run", read_only=True) as store:
        episodes = list(store.episodes())
    assert {(episode.status, episode.blame, episode.calls) for episode in episodes} == {("error", "policy", 5)}
    assert "The episode made 5 calls" in str(episodes[0].error) and "max_calls" in str(episodes[0].error)
    assert {episode.phase for episode in episodes} == {"check", "train"}


def test_the_limit_is_four_times_what_was_seen(trainer: Trainer, monkeypatch) -> None:
    async def five_calls(task):
        for _ in range(5):
            await ask("first", f"say {task['letter']}", max_tokens=1)
        return 1.0

    monkeypatch.setattr("cotune.trainer.before.preflight.LEAST_CALL_LIMIT", 6)
    limits = []
    original = cotune.episodes.episode.live_episode
    monkeypatch.setattr(
        "cotune.episodes.episode.live_episode",
        lambda *args: limits.append(args[3].max_calls) or original(*args),
    )
    trainer(application(five_calls, first=letters), steps=1)
    assert limits[:3] == [6, 6, 6] and set(limits[3:]) == {20}


def test_a_scorer_whose_role_was_not_seen_is_told_of(trainer: Trainer) -> None:
    summary = trainer(application(converse, first=letters, thrid=letters), steps=1)
    assert summary.finished
    assert "thrid: has a scorer and made no call; these did: first, second." in " ".join(trainer.said.split())


def test_a_limit_of_the_application_stands_and_is_told_once(trainer: Trainer) -> None:
    """The application asks for at most 4 tokens."""
    trainer(application(converse, first=letters, second=letters), steps=1, sampling={"max_tokens": 3})
    said = "asks for at most 4 tokens itself; sampling.max_tokens = 3 does not apply to it."
    assert " ".join(trainer.said.split()).count(said) == 1


def test_the_version_has_a_name() -> None:
    assert cotune.__version__.count(".") == 2
