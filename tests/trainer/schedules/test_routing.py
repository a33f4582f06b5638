"""Roles whose policy changes over the steps: swapped in a ring."""

from __future__ import annotations

from collections import defaultdict

import pytest

from cotune.cli.main import main
from cotune.config.rollouts import RoutingConfig
from cotune.errors import ConfigError
from cotune.reading.groups import step_groups
from cotune.reading.run import OpenedRun
from cotune.records.policies import LoraSpec, Policies, PolicySpec, policies_for
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.schedules.routing import check_routing, swapped
from tests.trainer.tiny_app import application, converse, letters

TWO = policies_for("lora", ["pioneer", "observer", "judge"], LoraSpec())


def players(run) -> dict[int, dict[str, set[str]]]:
    """By training step and role, who answered, as policy@version."""
    store = SqliteStore.open(run / "records.db")
    found: dict[int, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for episode in store.episodes(EpisodeFilters(phase="train")):
        for call in store.calls(episode.id):
            found[episode.training_step][call.role].add(str(call.policy))
    store.close()
    return {step: dict(roles) for step, roles in found.items()}


def test_two_roles_swap_every_so_many_steps():
    routing = RoutingConfig(swap=("pioneer", "observer"))
    own = {"pioneer": "pioneer", "observer": "observer", "judge": "judge"}
    other = {"pioneer": "observer", "observer": "pioneer", "judge": "judge"}
    assert [swapped(TWO, routing, step).roles for step in (0, 4, 5, 9, 10)] == [own, own, other, other, own]
    assert swapped(TWO, RoutingConfig(), 7) is TWO


def test_three_roles_go_round():
    routing = RoutingConfig(swap=("pioneer", "observer", "judge"))
    assert [swapped(TWO, routing, step).roles["pioneer"] for step in (0, 5, 10, 15)] == [
        "pioneer",
        "observer",
        "judge",
        "pioneer",
    ]


@pytest.mark.parametrize(
    ("routing", "message"),
    [
        ({"swap": ("pioneer",)}, r"routing.swap = \['pioneer'\] is not two or more different roles"),
        ({"swap": ("pioneer", "nobody")}, "routing.swap = 'nobody' is not a trained role: observer, pioneer"),
        ({"swap": ("pioneer", "judge")}, "routing.swap = 'judge' is not a trained role: observer, pioneer"),
    ],
)
def test_wrong_routing(routing, message):
    specs = {**TWO.specs, "judge": PolicySpec(name="judge", kind="frozen")}
    with pytest.raises(ConfigError, match=message):
        check_routing(RoutingConfig(**routing), Policies(specs, TWO.roles))


def test_one_shared_policy_has_nothing_to_swap():
    with pytest.raises(ConfigError, match="are roles that share a policy"):
        check_routing(RoutingConfig(swap=("a", "b")), policies_for("shared", ["a", "b"], LoraSpec()))


def grouped(run, lines) -> None:
    """What is shown of each step is what was trained on in it."""
    opened = OpenedRun(run, "run")
    for line in lines:
        shown = step_groups(opened, line["step"])
        assert dict(shown.left_out) == line["left_out"]
        assert sum(map(bool, shown.advantages.values())) == line["rows"]
    opened.close()


def test_a_run_that_swaps_its_roles_trains_each_policy_on_what_it_said(trainer, capsys, monkeypatch):
    monkeypatch.setattr("cotune.records.policies.STEPS_BETWEEN_SWAPS", 1)
    settings = {"steps": 3, "policies": "lora", "routing": {"swap": ["first", "second"]}}
    trainer(application(converse, first=letters, second=letters), **settings)
    lines = trainer.metrics()
    assert [line["left_out"].get("untrained_role", 0) for line in lines] == [0, 0, 0]
    assert [line["staleness"] for line in lines] == [{"0": line["rows"]} for line in lines]
    grouped(trainer.folder / "run", lines)
    assert main(["show", str(trainer.folder / "run"), "--groups"]) == 0
    rows, candidates = (sum(line[name] for line in lines) for name in ("rows", "candidates"))
    assert f"{rows} of {candidates} candidates trained on" in capsys.readouterr().out
    played = players(trainer.folder / "run")
    assert [next(iter(played[step]["first"])).partition("@")[0] for step in range(3)] == ["first", "second", "first"]
    assert [next(iter(played[step]["second"])).partition("@")[0] for step in range(3)] == ["second", "first", "second"]
