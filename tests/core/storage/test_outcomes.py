"""All that tells what recorded episodes came to says the same: failed ones count, first by rewards of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotune.records.structs import Episode, RewardRecord, Task
from cotune.storage.outcomes import LOWEST_SUM, outcome_means, outcome_sum
from cotune.storage.sqlite_store import SqliteStore


@pytest.fixture
def store(tmp_path: Path) -> SqliteStore:
    """Two good episodes, two that the policy failed, an outage, one that was cancelled, and a failure with a reward."""
    made = SqliteStore.open(tmp_path)
    ends = [("ok", None), ("ok", None), ("error", "policy"), ("error", None), ("error", "infrastructure")]
    for n, (status, blame) in enumerate([*ends, ("cancelled", None), ("error", None)]):
        task = Task(id=f"t{n}", input=n)
        made.write([Episode(id=f"e{n}", task=task, workflow="w", phase="trace", status=status, blame=blame)])
    made.write([RewardRecord("e0", "team", 1.0), RewardRecord("e0", "style", 0.5), RewardRecord("e1", "team", -2.0)])
    made.write([RewardRecord("e6", "team", 0.7), RewardRecord("e4", "team", 9.0)])
    made.flush()
    return made


@pytest.mark.parametrize(
    ("on_failure", "team", "sums"),
    [
        ("lowest", (-0.86, 5), [1.5, -2.0, -2.0, -2.0, None, None, 0.7]),
        ("reward:-1", (-0.46, 5), [1.5, -2.0, -1.0, -1.0, None, None, 0.7]),
        ("exclude", (-0.5, 2), [1.5, -2.0, None, None, None, None, None]),
    ],
)
def test_failed_episodes(
    store: SqliteStore, on_failure: str, team: tuple[float, int], sums: list[float | None]
) -> None:
    means = {name: (mean, n) for phase, name, mean, n in store.rows(outcome_means(on_failure)) if phase == "trace"}
    assert means["team"] == (pytest.approx(team[0]), team[1])
    assert means["style"] == (
        pytest.approx({"reward:-1": -2.5 / 4, "exclude": 0.5}.get(on_failure, 0.5 / 4)),
        {"exclude": 1}.get(on_failure, 4),
    )
    ((lowest,),) = store.rows(LOWEST_SUM, ("trace",))
    assert lowest == -2.0
    found = store.rows(f"SELECT {outcome_sum(on_failure, lowest)} FROM episodes ORDER BY id")
    assert [value for (value,) in found] == sums
    store.close()
