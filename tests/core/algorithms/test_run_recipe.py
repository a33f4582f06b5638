"""What a run's recipe makes of its records, as it is shown."""

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.run_recipe import all_taught, regroup
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig


def test_groups_are_shown_as_they_were_trained_on_under_a_key_of_ones_own(book):
    for number, own in enumerate([{"local": 1.0}, {"local": 0.0}, None]):
        book.episode(f"e{number}", outcome={"team": 1.0})
        book.call(f"c{number}", f"e{number}", prompt=(1, number), rewards=[own])
    chosen = recipe("at_grpo", plan="independent").replaced(group_by=("task", "role"))
    found = regroup(book.store, book.store.episodes(), Recipes(run=chosen), TrainConfig())
    assert found.prepared is not None and [s.id for s in found.prepared.samples] == ["c0.0", "c1.0"]
    assert [[s.id for s in group.samples] for group, _ in found.groups] == [["c0.0", "c1.0"]]


def test_rewards_count_for_nothing_where_all_trained_policies_are_taught():
    taught = PolicyConfig(name="p", roles=("a",), recipe="self_distill")
    frozen = PolicyConfig(name="f", roles=("b",), kind="frozen")
    assert all_taught(TrainConfig(policy=(taught, frozen)))
    assert not all_taught(TrainConfig(policy=(taught, PolicyConfig(name="q", roles=("b",)))))
