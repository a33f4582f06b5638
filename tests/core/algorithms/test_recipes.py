"""Recipes: the settings of each, advantages worked out by hand, and overrides."""

from __future__ import annotations

import re

import pytest

from cotune.algorithms.attribution import weight_of
from cotune.algorithms.catalogue import GENERAL, RECIPES, REMOVED, SETTINGS, recipe
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.recipes import OWN_AND_OUTCOME, Attribution, Filters, LossSpec
from cotune.algorithms.samples import Sample
from cotune.config.records import LEARN_FROM_RECORDS
from cotune.errors import ConfigError
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import advantages

BASIC = {method.name: method for method in GENERAL}

# Two episodes of one task. Episode e: role a calls twice, b once, outcome 1. Episode f: a once, b once, outcome 0.
# Episode g: a once, b twice, outcome 0.
ROLLOUTS = [
    ("e", "a", 0, 1.0),
    ("e", "a", 1, 1.0),
    ("e", "b", 0, 1.0),
    ("f", "a", 0, 0.0),
    ("f", "b", 0, 0.0),
    ("g", "a", 0, 0.0),
    ("g", "b", 0, 0.0),
    ("g", "b", 1, 0.0),
]


def rollouts() -> list[Sample]:
    return [
        Sample(
            id=f"{rollout}{role}{turn}.0",
            task="q",
            rollout=rollout,
            role=role,
            turn=turn,
            step=turn,
            branch="p",
            prompt="p",
            policy=PolicyRef(role),
            tokens=4,
            outcome={"team": team},
        )
        for rollout, role, turn, team in ROLLOUTS
    ]


def siblings(components: list[dict[str, float]]) -> list[Sample]:
    return [
        Sample(
            id=f"c.{i}",
            task="q",
            rollout="e",
            role="a",
            turn=0,
            step=0,
            branch="e",
            prompt="p",
            policy=PolicyRef("a"),
            tokens=4,
            rewards=rewards,
            chosen=i == 0,
        )
        for i, rewards in enumerate(components)
    ]


def of(name: str, samples: list[Sample], **overrides):
    """Advantages, to be compared with four decimals."""
    return pytest.approx(advantages(samples, recipe(name, **overrides))[0].tolist(), abs=1e-4)


def test_at_grpo():
    # r = team + local = 1.5, 1, 0, -0.5; mean 0.5; deviations 1, .5, -.5, -1; variance 2.5 / 3
    group = siblings(
        [
            {"team": 1.0, "local": 0.5},
            {"team": 1.0, "local": 0.0},
            {"team": 0.0, "local": 0.0},
            {"team": 0.0, "local": -0.5},
        ]
    )
    assert of("at_grpo", group) == [1.0954, 0.5477, -0.5477, -1.0954]


def test_at_grpo_alpha_weighs_the_team():
    # r = 2 * team + local = 2.5, 0.5; mean 1.5, deviation 1, standard deviation sqrt 2
    group = siblings([{"team": 1.0, "local": 0.5}, {"team": 0.0, "local": 0.5}])
    assert of("at_grpo", group, team_weight=2.0) == [0.7071, -0.7071]
    assert of("at_grpo", group, team_weight=0.0) == [0.0, 0.0]


def test_grpo():
    # rollouts 1, 0, 0: mean 1/3, variance (4/9 + 1/9 + 1/9) / 2 = 1/3; (2/3) / 0.57735 and (-1/3) / 0.57735
    assert of("grpo", rollouts()) == [1.1547, 1.1547, 1.1547, -0.5774, -0.5774, -0.5774, -0.5774, -0.5774]


def test_dr_grpo():
    assert of("dr_grpo", rollouts()) == [0.6667, 0.6667, 0.6667, -0.3333, -0.3333, -0.3333, -0.3333, -0.3333]


def test_rloo():
    # the others' means: (0 + 0) / 2 for e, (1 + 0) / 2 for f and g
    assert of("rloo", rollouts()) == [1.0, 1.0, 1.0, -0.5, -0.5, -0.5, -0.5, -0.5]


def test_dr_mas():
    # a acts in 4 steps, rewards 1, 1, 0, 0: mean 1/2, deviation 1/2, so +-1.
    # b acts in 4 steps, rewards 1, 0, 0, 0: mean 1/4, variance 3/16: 0.75 / 0.4330 and -0.25 / 0.4330
    assert of("dr_mas", rollouts()) == [1.0, 1.0, 1.7321, -1.0, -0.5774, -1.0, -0.5774, -0.5774]


def forks() -> list[Sample]:
    """A fork with siblings in three episodes, whose outcomes are 1, 0.5 and 0."""
    return [
        Sample(
            id=f"{rollout}.0",
            task="q",
            rollout=rollout,
            role="a",
            turn=1,
            step=1,
            branch="e.call",
            prompt="p",
            policy=PolicyRef("a"),
            tokens=4,
            rewards={"local": 9.0},
            outcome={"team": team},
        )
        for rollout, team in (("e", 1.0), ("f", 0.5), ("g", 0.0))
    ]


def test_replay():
    assert recipe("c3").filters == Filters(zero_variance=True) and recipe("c3").loss == LossSpec()
    # leave one out: 1 - 0.25, 0.5 - 0.5, 0 - 0.75
    assert of("c3", forks()) == [0.75, 0.0, -0.75]
    assert of("gspo", forks(), plan="replay") == [0.75, 0.0, -0.75]
    # at_grpo adds the outcome's components to the candidate's own: 10, 9.5, 9 around 9.5 with std 0.5
    assert of("at_grpo", forks(), plan="replay") == [1.0, 0.0, -1.0]


@pytest.mark.parametrize("name", ["gspo", "dapo", "cispo"])
def test_recipes_of_a_loss_take_the_advantages_of_grpo(name):
    assert of(name, rollouts()) == [1.1547, 1.1547, 1.1547, -0.5774, -0.5774, -0.5774, -0.5774, -0.5774]
    group = siblings([{"local": 1.0}, {"local": 0.0}])
    assert of(name, group, plan="tree") == [0.7071, -0.7071]


def test_loss_settings():
    assert {name: r.loss for name, r in BASIC.items()} == {
        "at_grpo": LossSpec(
            ratio="token",
            clip_low=0.2,
            clip_high=0.2,
            style="ppo",
            dual_clip=None,
            tis_cap=2.0,
            kl=0.0,
            entropy=0.0,
            aggregation="token_mean",
        ),
        "grpo": LossSpec(aggregation="trajectory_mean"),
        "dr_grpo": LossSpec(aggregation="constant", constant_length=None),
        "rloo": LossSpec(aggregation="constant", constant_length=None),
        "dr_mas": LossSpec(aggregation="token_mean"),
        "gspo": LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="trajectory_mean"),
        "dapo": LossSpec(clip_low=0.2, clip_high=0.28, aggregation="token_mean"),
        "cispo": LossSpec(style="cispo", clip_low=1.0, clip_high=4.0, aggregation="token_mean"),
    }


def test_plans_keys_and_filters():
    assert {name: (r.plan, r.group_by, r.filters.zero_variance) for name, r in BASIC.items()} == {
        "at_grpo": ("tree", ("task", "role", "turn", "branch"), True),
        "grpo": ("independent", ("task",), False),
        "dr_grpo": ("independent", ("task",), False),
        "rloo": ("independent", ("task",), False),
        "dr_mas": ("independent", ("task", "role"), False),
        "gspo": ("independent", ("task",), False),
        "dapo": ("independent", ("task",), True),
        "cispo": ("independent", ("task",), True),
    }


def test_settings_go_where_they_live():
    changed = recipe("at_grpo", team_weight=0.5, clip_high="0.28", entropy=0.01, drop_truncated=True)
    assert changed.attribution == Attribution(team_weight=0.5)
    assert changed.filters == Filters(zero_variance=True, drop_truncated=True)
    assert changed.loss == LossSpec(clip_high=0.28, entropy=0.01)
    assert RECIPES["at_grpo"].loss.clip_high == 0.2 and recipe("at_grpo") == recipe("at_grpo") != changed
    for name, attribute in SETTINGS.items():
        assert hasattr(getattr(changed, attribute), name), name


@pytest.mark.parametrize("name", sorted(REMOVED))
def test_a_removed_setting_says_what_to_use_instead(name):
    with pytest.raises(ConfigError, match=f"{name} = 1 was removed from the settings of recipes") as caught:
        recipe("grpo", **{name: 1})
    assert caught.value.remedy == REMOVED[name] and name not in SETTINGS


def test_a_tree_has_no_trajectories_to_take_a_mean_over():
    assert recipe("gspo", plan="tree").loss.aggregation == "sequence_mean"
    with pytest.raises(ConfigError, match="aggregation = 'trajectory_mean' cannot be used under a tree plan"):
        recipe("at_grpo", aggregation="trajectory_mean")


def test_naming_weights_leaves_the_rest_out():
    assert weight_of("team", "a", recipe("dr_mas", weights={"correct": 0.9}).attribution) == 0.0
    assert weight_of("team", "a", recipe("dr_mas").attribution) == 1.0


def test_at_grpo_over_independent_rollouts_takes_in_the_outcome():
    assert recipe("at_grpo", plan="independent").attribution == OWN_AND_OUTCOME


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        (
            "at_grop",
            {},
            "recipe = 'at_grop' is not one of advantage_alignment, afm_rl, at_grpo, c3, c3_branches, cispo, ",
        ),
        ("grpo", {"clip": 0.2}, r"clip = 0.2 is not a setting of recipes: absent, aggregation, clip_high, "),
        ("grpo", {"plan": "tree"}, "compares whole rollouts"),
        ("grpo", {"plan": "forest"}, "plan = 'forest' is not one of tree, independent, replay"),
        ("grpo", {"plan": "replay"}, "use c3_branches, gspo, dapo or cispo under a replay plan."),
        ("c3", {"plan": "tree"}, "plan.kind = 'tree' cannot be used with recipe c3"),
        ("grpo", {"clip_low": 1.5}, "clip_low = 1.5 must be between 0 and 1"),
        ("grpo", {"clip_high": float("nan")}, "clip_high = nan"),
        ("grpo", {"kl": -1}, "kl = -1.0 must be 0 or more"),
        ("grpo", {"overlong_penalty": -1}, "overlong_penalty = -1.0 must be 0 or more"),
        ("grpo", {"overlong_buffer": 8}, "overlong_buffer = 8 has no effect, as overlong_penalty is 0"),
        ("grpo", {"tis_cap": 0}, "tis_cap = 0.0"),
        ("grpo", {"team_weight": "much"}, "team_weight = 'much'"),
    ],
)
def test_wrong_settings_are_named_with_what_is_allowed(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipe(name, **overrides)


def test_wrong_attributes_of_a_method_are_named_with_what_is_allowed():
    with pytest.raises(
        ConfigError, match=r"timeout_penalty = 1\.0 is taken from outcomes, and these candidates answer"
    ):
        Attribution(timeout_penalty=1.0)
    with pytest.raises(ConfigError, match=r"dual_clip = 1\.0"):
        LossSpec(dual_clip=1.0)
    with pytest.raises(ConfigError, match=r"constant_length = 0"):
        LossSpec(constant_length=0)
    for bounds in (0.5, (0.5,), (0.5, 1.0, 2.0), (2.0, 0.5)):
        with pytest.raises(ConfigError, match=rf"mask_range = {re.escape(str(bounds))} must be two numbers"):
            LossSpec(mask="token", mask_range=bounds)


def test_groups_of_a_tree_must_hold_the_call():
    with pytest.raises(ConfigError, match="compares whole rollouts"):
        recipe("at_grpo").replaced(group_by=("task", "role")).check()
    with pytest.raises(ConfigError, match="groups by 'rolle', not one of task, rollout, role"):
        recipe("grpo").replaced(group_by=("task", "rolle")).check()


def test_the_configuration_knows_the_recipes_that_learn_from_records():
    assert tuple(FROM_RECORDS) == LEARN_FROM_RECORDS
