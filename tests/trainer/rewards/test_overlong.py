"""Runs in which answers hit their length limit: trained on, dropped, or punished."""

import pytest

from cotune.reading.metrics import columns
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.metrics_file import StepMetrics
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.reporting.columns import role_table
from tests.trainer.tiny_app import application, letters

SETTINGS = {"policies": "shared", "steps": 1}

ALWAYS = [one.column for one in columns().values() if not one.optional]
"""Columns that the table of roles always has."""


@pytest.fixture
def run(trainer):
    def made(to, **rewards):
        trainer(application(first=letters), to=to, rewards={"zero_variance": False, **rewards}, **SETTINGS)
        return trainer.metrics(to)[0]

    return made


def test_truncated_answers_are_dropped_or_punished_as_the_settings_say(run, trainer):
    plain, dropped = run("plain"), run("dropped", drop_truncated=True)
    punished = run("punished", overlong_penalty=1.0, overlong_buffer=2)
    role = plain["roles"]["first"]
    assert 0 < role["truncated"] < 1
    assert role["kept"] == 12
    assert "truncated" not in plain["left_out"]
    assert dropped["left_out"]["truncated"] == role["truncated"] * 12
    assert dropped["rows"] == 12 - dropped["left_out"]["truncated"]
    assert punished["roles"]["first"]["overlong"] >= role["truncated"]
    assert punished["roles"]["first"]["reward"] <= role["reward"] - role["truncated"] + 1e-9
    with SqliteStore.open(trainer.folder / "punished" / "records.db", read_only=True) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            call = next(c for c in store.calls(episode.id) if c.role == "first")
            rewards = []
            for candidate in call.candidates:
                size = len(candidate.token_ids)
                lost = 1.0 if candidate.finish_reason == "length" else max(size - 2, 0) / 2
                rewards.append(letters(candidate, call, {}) - lost)
            assert rewards[call.chosen] == pytest.approx(max(rewards))  # what goes on is the best by this reward too
    table = role_table(StepMetrics(**plain))
    assert [column.header for column in table.columns] == [
        "role",
        *ALWAYS,
        "cut off",
    ]
    assert next(iter(table.columns[-1].cells)) == f"{role['truncated']:.0%}"
    whole = role | {"masked_share": 0.0, "truncated": 0.0}
    for first, more in ((whole, []), (whole | {"masked_share": 0.25}, ["masked"])):
        table = role_table(StepMetrics(**plain | {"roles": {"first": first, "second": whole}}))
        assert [column.header for column in table.columns] == [
            "role",
            *ALWAYS,
            *more,
        ]
    assert list(table.columns[-1].cells) == ["25%", "0%"]
