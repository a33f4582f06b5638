"""Mode async: rollouts go on while the learner trains, within the bound on staleness."""

from __future__ import annotations

import contextlib
from collections import defaultdict

from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from tests.trainer.tiny_app import application, letters

BOTH = {"first": letters, "second": letters}
SETTINGS = {
    "policies": "full",
    "plan": {"k": 8},
    "learner": {"lr": 5e-3, "mini_batch": 8},
    "rewards": {"team_weight": 0.0},
}


def test_rewards_rise_and_samples_come_from_the_version_before(module_trainer) -> None:
    summary = module_trainer(application(**BOTH), steps=6, mode="async", to="async", **SETTINGS)
    lines = module_trainer.metrics("async")
    assert summary.finished
    assert lines[-1]["roles"]["first"]["reward"] > lines[0]["roles"]["first"]["reward"] + 0.2
    assert [set(line["staleness"]) for line in lines] == [{"0"}, *[{"1"}] * 5]
    assert not any("stale_version" in line["left_out"] for line in lines)
    for line in lines:
        assert line["rows"] == sum(line["staleness"].values())


def test_every_call_names_the_version_that_answered(module_trainer, monkeypatch) -> None:
    monkeypatch.setattr("cotune.config.train.STEPS_AHEAD", 2)
    module_trainer(application(**BOTH), steps=4, mode="async", to="two", **{**SETTINGS, "plan": {"k": 4}})
    lines = module_trainer.metrics("two")
    seen: defaultdict[tuple[int, str], set[int]] = defaultdict(set)
    with contextlib.closing(SqliteStore.open(module_trainer.folder / "two" / "records.db")) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            for call in store.calls(episode.id):
                seen[episode.training_step, call.policy.name].add(call.policy.version)
    assert set(seen) == {(step, policy) for step in range(4) for policy in ("first", "second")}
    assert all(len(versions) == 1 for versions in seen.values())  # two policies may be published between two steps
    lags: defaultdict[int, set[int]] = defaultdict(set)
    for (step, policy), (version,) in seen.items():
        lags[step].add(sum(policy in line["policies"] for line in lines[:step]) - version)
    assert lags[0] == {0} and 1 <= max(max(of) for of in lags.values()) <= 2
    assert all({int(lag) for lag in line["staleness"]} <= lags[step] for step, line in enumerate(lines))
    assert set().union(*(line["staleness"] for line in lines)) >= {"0", "1"}


def test_in_mode_sync_nothing_is_stale(module_trainer) -> None:
    module_trainer(application(**BOTH), steps=2, to="sync", **{**SETTINGS, "plan": {"k": 4}})
    assert [set(line["staleness"]) for line in module_trainer.metrics("sync")] == [{"0"}] * 2
