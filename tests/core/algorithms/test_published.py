"""Published systems: what each recipe makes of a few games, worked out by hand beside the numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest

from cotune.algorithms.attribution import attribute_siblings
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.filters import align_call_counts
from cotune.algorithms.learning_signal import learns_from
from cotune.algorithms.method import Method
from cotune.algorithms.prepare import prepare
from cotune.algorithms.recipes import Attribution, Filters
from cotune.algorithms.samples import Sample
from cotune.algorithms.step import AdvantageState
from cotune.algorithms.tree_values import tree_values
from cotune.errors import ConfigError
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import CentredRoles


def step(
    rollout: str,
    role: str,
    turn: int = 0,
    own: Mapping[str, float] | None = None,
    *,
    ends: Mapping[str, float] | None = None,
    task: str = "q",
    tokens: int = 4,
    sees: str = "",
    entropy: float = 0.0,
    policy: str = "p",
    n: int = 0,
) -> Sample:
    """One call of `role` in the episode `rollout`, which ends with the outcome `ends`."""
    return Sample(
        id=f"{rollout}{role}{turn}{n}.0",
        task=task,
        rollout=rollout,
        role=role,
        turn=turn,
        step=turn,
        branch=sees,
        prompt=sees,
        policy=PolicyRef(policy),
        tokens=tokens,
        observation=sees,
        entropy=entropy,
        rewards=own or {},
        outcome=ends or {},
    )


def weighed(name: str | Method, samples: list[Sample], state: AdvantageState | None = None):
    """What is trained on, in the order of `samples`: the advantage of each sample, None where it is left out."""
    made = prepare(samples, recipe(name) if isinstance(name, str) else name, state)
    found = dict(zip((s.id for s in made.samples), made.advantages.tolist(), strict=True))
    return [None if s.id not in found else pytest.approx(found[s.id], abs=1e-4) for s in samples], made


def values(name: str | Method, samples: list[Sample]) -> list[object]:
    return weighed(name, samples)[0]


def test_magrpo_discounts_the_joint_reward_and_compares_turn_by_turn():
    # e ends with 1, f with 0: R of turns 0, 1 is 0.9, 1 against 0, 0; means 0.45 and 0.5
    samples = [step(r, a, t, ends={"team": e}) for r, e in (("e", 1.0), ("f", 0.0)) for a in "ab" for t in (0, 1)]
    assert values("magrpo", samples) == [0.45, 0.5, 0.45, 0.5, -0.45, -0.5, -0.45, -0.5]


def test_magrpo_takes_one_joint_reward_of_a_turn_for_all_roles():
    # e: the roles earn 1 and 0 in turn 0, jointly 0.5, and the outcome 1 in turn 1: R_0 = 0.5 + 0.9 = 1.4
    # f: nothing, so the mean is 0.7
    samples = [step("e", a, 0, {"local": w}, ends={"team": 1.0}) for a, w in (("a", 1.0), ("b", 0.0))]
    samples += [step("e", a, 1, {"local": 0.0}, ends={"team": 1.0}) for a in "ab"]
    samples += [step("f", a, t, {"local": 0.0}, ends={"team": 0.0}) for t in (0, 1) for a in "ab"]
    assert values("magrpo", samples) == [0.7, 0.7, 0.5, 0.5, -0.7, -0.7, -0.5, -0.5]


def m_grpo_episodes() -> list[Sample]:
    e, f, good = {"correct": 1.0}, {"correct": 0.0}, {"format": 1.0}
    return [
        step("e", "main", 0, good, ends=e),
        step("f", "main", 0, good, ends=f),
        *(step("e", "sub", t, {**good, "judge": j}, ends=e) for t, j in enumerate((1.0, 0.5, 0.0))),
        step("f", "sub", 0, {"format": 0.0, "judge": 1.0}, ends=f),
    ]


def test_m_grpo_mixes_by_role_behind_the_format():
    # main: 0.1 + 0.9 and 0.1: +-0.45 / 0.6364. sub: 0.1 + 0.4 + 0.5 x 1, 0.5, 0 = 1, 0.75, 0.5, and 0 behind a wrong
    # format; mean 0.5625, squares 0.1914 + 0.0352 + 0.0039 + 0.3164 = 0.5469, / 3, root 0.4270
    assert values("m_grpo", m_grpo_episodes()) == [0.7071, -0.7071, 1.0247, 0.4391, -0.1464, -1.3175]


def test_m_grpo_gives_every_episode_as_many_calls():
    _, made = weighed("m_grpo", m_grpo_episodes())
    # sub is called three times in e and once in f, which counts three times; main once in each
    assert Counter(s.id for s in made.samples) == {
        "emain00.0": 1, "fmain00.0": 1, "esub00.0": 1, "esub10.0": 1, "esub20.0": 1, "fsub00.0": 3
    }  # fmt: skip
    _, made = weighed(recipe("m_grpo").replaced(filters=Filters(align_to=2)), m_grpo_episodes())
    assert Counter((s.rollout, s.role) for s in made.samples) == {
        ("e", "main"): 1, ("f", "main"): 1, ("e", "sub"): 2, ("f", "sub"): 2
    }  # fmt: skip
    assert made.left_out == {"beyond_alignment": 1}
    assert sum(len(group.samples) for group in made.groups) == 5
    assert align_call_counts(m_grpo_episodes(), 2) == align_call_counts(m_grpo_episodes(), 2)


def games() -> list[Sample]:
    """White moves twice and black once in e, which white wins; the reverse in f."""
    e, f = {"white": 1.0, "black": -1.0}, {"white": -1.0, "black": 1.0}
    first = [step("e", "white", 0, ends=e), step("e", "black", 0, ends=e), step("e", "white", 1, ends=e)]
    return [*first, step("f", "white", 0, ends=f), step("f", "black", 0, ends=f), step("f", "black", 1, ends=f)]


def test_marshal_sums_first_and_then_takes_the_mean_of_a_seats_turns():
    # white: 1, 1, -1, mean 1/3. black: -1, 1, 1, mean 1/3
    assert values("marshal", games()) == [0.6667, -1.3333, 0.6667, -1.3333, 0.6667, 0.6667]


def test_marshal_adds_the_rewards_of_later_turns():
    # white in e: its first turn costs 0.5, so 0.5, 1 and -1: mean 1/6
    costs = [0.5, 0.0, 0.0, 0.0, 0.0, 0.0]
    samples = [
        Sample(**{**{f: getattr(s, f) for f in Sample.__struct_fields__}, "rewards": {"cost": -c}})
        for s, c in zip(games(), costs, strict=True)
    ]
    assert values("marshal", samples)[0:4:2] == [0.3333, 0.8333]


def test_spiral_holds_each_seat_to_its_own_moving_average():
    samples = [step(r, seat, ends={"white": 1.0, "black": -1.0}) for r in "ef" for seat in ("white", "black")]
    found, made = weighed("spiral", samples)
    # b: 0.95 x 0 + 0.05 x 1 for white, -0.05 for black
    assert found == [0.95, -0.95, 0.95, -0.95]
    drawn = [step(r, seat, ends={"white": 0.0, "black": 0.0}) for r in "ef" for seat in ("white", "black")]
    # b: 0.95 x 0.05 and 0.95 x -0.05
    assert weighed("spiral", drawn, made.state)[0] == [-0.0475, 0.0475, -0.0475, 0.0475]
    none = weighed("spiral", drawn)[1]
    assert none.left_out == {"zero_advantage": 4}


def test_gigpo_adds_the_comparison_of_steps_that_saw_the_same():
    # outcomes 1, 0, 0: A_E = 1.1547, -0.5774, -0.5774. All saw s in turn 0, with G = 0.95, 0, 0: A_S is the same.
    # In turn 1 e saw t alone, and f and g both u, with G = 0 each: A_S = 0
    ends = {"e": 1.0, "f": 0.0, "g": 0.0}
    samples = [step(r, "a", 0, ends={"team": w}, sees="s") for r, w in ends.items()]
    samples += [step(r, "a", 1, ends={"team": w}, sees="t" if r == "e" else "u") for r, w in ends.items()]
    assert values("gigpo", samples) == [2.3094, -1.1547, -1.1547, 1.1547, -0.5774, -0.5774]


def test_reinforce_pp_normalises_over_the_tokens_of_the_batch():
    # 1 for 2 tokens, 0 for 6: mean 0.25, variance (2 x 0.5625 + 6 x 0.0625) / 8 = 0.1875, root 0.4330
    samples = [step("e", "a", ends={"team": 1.0}, tokens=2), step("f", "a", ends={"team": 0.0}, tokens=6, task="p")]
    assert values("reinforce_pp", samples) == [1.7321, -0.5774]


def test_reinforce_pp_keeps_policies_apart_and_their_versions_together():
    samples = [step(r, "a", ends={"team": w}, policy="a") for r, w in (("e", 1.0), ("f", 0.0))]
    samples += [step(r, "b", ends={"team": 5.0 * w}, policy="b") for r, w in (("e", 1.0), ("f", 0.0))]
    fields = {f: getattr(samples[0], f) for f in Sample.__struct_fields__}
    samples[0] = Sample(**{**fields, "policy": PolicyRef("a", 3)})
    assert values("reinforce_pp", samples) == [1.0, -1.0, 1.0, -1.0]


def test_reinforce_pp_baseline_divides_what_is_above_the_tasks_mean_by_the_batchs_deviation():
    # q: +-0.5. p: 1/3, 1/3, -2/3. Variance (0.25 + 0.25 + 1/9 + 1/9 + 4/9) / 5 = 0.2333, root 0.4830
    won = {"q": (1.0, 0.0), "p": (1.0, 1.0, 0.0)}
    samples = [step(f"{t}{i}", "a", ends={"team": w}, task=t) for t, all_ in won.items() for i, w in enumerate(all_)]
    assert values("reinforce_pp_baseline", samples) == [1.0351, -1.0351, 0.6901, 0.6901, -1.3801]


def test_comas_shares_one_score_between_solver_and_evaluator():
    # by tokens: 3 x 0.75 + 0.25 + 0.25 + 3 x 0.75 over 8 = 0.625; variance (6 x 0.0156 + 2 x 0.1406) / 8, root 0.2165
    e, f = {"solver": 0.75, "evaluator": 0.25}, {"solver": 0.25, "evaluator": 0.75}
    samples = [
        step("e", "solver", ends=e, tokens=3),
        step("e", "evaluator", ends=e, tokens=1),
        step("f", "solver", ends=f, tokens=1),
        step("f", "evaluator", ends=f, tokens=3),
    ]
    assert values("comas", samples) == [0.5774, -1.7321, -1.7321, 0.5774]


def test_advantage_alignment_adds_ones_own_past_times_the_others_present():
    # R_0 = r_0 + 0.96 r_1. x in e: 1.96, 1; y in e: 0.96, 1; both 0 in f. Of two episodes A is the difference.
    # turn 1 of x in e: 1 + 2 (0.96 x 1.96) 1 = 4.7632; in f: -1 + 2 (0.96 x -1.96) (-1) = 2.7632
    # turn 1 of y in e: 1 + 2 (0.96 x 0.96) 1 = 2.8432; in f: -1 + 1.8432 = 0.8432
    earned = {("e", "x"): (1.0, 1.0), ("e", "y"): (0.0, 1.0), ("f", "x"): (0.0, 0.0), ("f", "y"): (0.0, 0.0)}
    samples = [step(r, a, t, {"pay": w}) for (r, a), pay in earned.items() for t, w in enumerate(pay)]
    assert values("advantage_alignment", samples) == [1.96, 4.7632, 0.96, 2.8432, -1.96, 2.7632, -0.96, 0.8432]
    assert values(recipe("advantage_alignment").replaced(beta=0.0), samples) == [
        1.96,
        1.0,
        0.96,
        1.0,
        -1.96,
        -1.0,
        -0.96,
        -1.0,
    ]


def test_self_redteam_leaves_ties_out_and_normalises_by_role():
    # attacker: 1 for 2 tokens, -1 for 6: mean -0.5, variance (2 x 2.25 + 6 x 0.25) / 8 = 0.75, root 0.8660
    won, lost, tie = ({"attacker": a, "defender": -a} for a in (1.0, -1.0, 0.0))
    samples = [step("e", "attacker", ends=won, tokens=2), step("e", "defender", ends=won)]
    samples += [step("f", "attacker", ends=lost, tokens=6), step("f", "defender", ends=lost)]
    samples += [step("g", "attacker", ends=tie), step("g", "defender", ends=tie)]
    found, made = weighed("self_redteam", samples)
    assert found == [1.7321, -1.0, -0.5774, 1.0, None, None]
    assert made.left_out == {"tie": 2}


def test_cpmobius_trains_the_player_on_what_it_half_solves_and_the_coach_on_all():
    half = [step("e", "player", i, {"right": w}, sees="half") for i, w in enumerate((1.0, 0.0))]
    easy = [step("f", "player", i, {"right": w}, sees="easy") for i, w in enumerate((1.0,) * 9 + (0.0,))]
    coach = [step(r, "coach", ends={"coach": w}, sees="seed") for r, w in (("e", 0.02), ("f", 0.0))]
    found, made = weighed("cpmobius", [*half, *easy, *coach])
    assert found == [0.7071, -0.7071, *(None,) * 10, *(pytest.approx(v, abs=1e-3) for v in (0.7071, -0.7071))]
    assert made.left_out == {"mean_out_of_range": 10}


def test_mmedagent_rl_does_not_count_exploration_as_reward():
    ends = [{"accuracy": a, "format": 1.0, "exploration": x} for a, x in ((1.0, 0.0), (0.0, 2.0))]
    samples = [step(r, "doctor", ends=end) for r, end in zip("ef", ends, strict=True)]
    # 1 + 1 and 0 + 1: +-0.5 / 0.7071
    assert values("mmedagent_rl", samples) == [0.7071, -0.7071]


def test_afm_rl_pays_a_right_answer_of_the_right_format_alone():
    # answer x format = 1, 0, 0: mean 1/3, variance 1/3
    ends = [{"answer": a, "format": f} for a, f in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0))]
    samples = [step(r, "agent", ends=end) for r, end in zip("efg", ends, strict=True)]
    assert values("afm_rl", samples) == [1.1547, -0.5774, -0.5774]
    flat = [step(r, "agent", ends=ends[1]) for r in "ef"]
    assert weighed("afm_rl", flat)[1].left_out == {"zero_variance": 2}


def test_dart_trains_on_the_steps_of_most_entropy():
    # steps, not episodes, are the unit: 1, 1, 1, 0, 0: mean 0.6, variance (3 x 0.16 + 2 x 0.36) / 4 = 0.3, root 0.5477
    ends = {"e": {"team": 1.0}, "f": {"team": 0.0}}
    entropies = {"e": (0.9, 0.1, 0.5), "f": (0.4, 0.3)}
    samples = [step(r, "a", t, ends=ends[r], entropy=h) for r, all_ in entropies.items() for t, h in enumerate(all_)]
    found, made = weighed("dart", samples)
    assert found == [0.7303, None, 0.7303, -1.0954, -1.0954]  # 4 of 5
    assert made.left_out == {"low_entropy": 1}


def test_masksearch_is_dapo_on_the_answer():
    # outcomes 1, 0, 0: mean 1/3, variance 1/3
    won = {"e": 1.0, "f": 0.0, "g": 0.0}
    samples = [step(r, a, ends={"answer": w}) for r, w in won.items() for a in ("search", "answer")]
    assert values("dapo", samples) == [1.1547, 1.1547, -0.5774, -0.5774, -0.5774, -0.5774]


# --- the settings behind them ---------------------------------------------------------------------------------------


def test_a_weight_may_be_for_one_role_alone():
    # opposite rewards of one outcome: white gets it, black its negative
    ends = ({"score": 1.0}, {"score": 0.0})
    samples = [step(r, seat, ends=end) for r, end in zip("ef", ends, strict=True) for seat in ("white", "black")]
    by_seat = Attribution(own=False, outcome=True, weights={"score": 1.0, "black/score": -1.0})
    found = values(CentredRoles().replaced(attribution=by_seat), samples)
    assert found == [0.5, -0.5, -0.5, 0.5]


def test_a_run_says_which_seat_learns_from_what():
    told = learns_from({"white": (), "black": ()}, ["white", "black"], recipe("spiral"))
    assert told == {
        "white": "learns from white (the episode's outcome); weight 0: black",
        "black": "learns from black (the episode's outcome); weight 0: white",
    }


def test_a_missing_gate_is_a_missing_reward_and_one_that_nobody_has_is_open():
    samples = [step("e", "a", 0, {"right": 1.0, "format": 1.0}), step("f", "a", 0, {"right": 1.0})]
    samples += [step("e", "b", 0, {"right": 1.0}), step("f", "b", 0, {"right": 0.0})]
    found, made = weighed(recipe("dr_mas").replaced(attribution=Attribution(gates=("format",))), samples)
    assert found == [None, None, 1.0, -1.0]
    assert made.left_out == {"missing_reward": 1, "group_of_one": 1}


def test_the_candidate_that_goes_on_is_chosen_behind_the_gate():
    shaped = Attribution(gates=("format",), weights={"b/right": 2.0})
    answers = [{"right": 1.0, "format": 0.0}, {"right": 0.5, "format": 1.0}]
    assert attribute_siblings(answers, "a", shaped).tolist() == [0.0, 0.5]
    assert attribute_siblings(answers, "b", shaped).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("dart", {"top_entropy": 0.5}, "top_entropy = 0.5 was removed from the settings of recipes"),
        ("reinforce_pp_baseline", {"scale_key": ["batch"]}, r"scale_key = .* write a method of your own; see docs/"),
        ("spiral", {"plan": "tree"}, "compares whole rollouts"),
    ],
)
def test_wrong_settings(name, overrides, message):
    with pytest.raises(ConfigError, match=message):
        recipe(name, **overrides)


def test_cory_gives_both_roles_what_both_have_earned():
    # the pioneer earns 0.25, the observer 1: 1.25 each, as the reward that the critic judges
    ends = {"pioneer": 0.25, "observer": 1.0}
    samples = [step(r, a, ends=ends) for r in "ef" for a in ("pioneer", "observer")]
    assert values("cory", samples) == [1.25, 1.25, 1.25, 1.25]


def test_maporl_takes_the_discounted_mean_over_later_turns_and_the_mean_over_the_agents():
    # a scores 0, 1 and b 1, 1: R_0 = (0 + 0.9) / 1.9 = 0.4737 and 1, mean 0.7368; R_1 = 1
    scored = {("a", 0): 0.0, ("a", 1): 1.0, ("b", 0): 1.0, ("b", 1): 1.0}
    samples = [step(r, a, t, {"score": w}) for r in "ef" for (a, t), w in scored.items()]
    assert values("maporl", samples) == [0.7368, 1.0, 0.7368, 1.0] * 2


def test_malt_values_are_means_over_what_follows():
    """One episode g0 v0 r0 that ended well, forked at each call with K = 3.

    V(r) = 1, 1, 0 after v0, so V(v0) = 2/3. The critiques v1 and v2 led to 0 and 1, so V(g0) = (2/3 + 0 + 1) / 3 = 5/9,
    not the mean 3/5 of the five episodes that share g0. The siblings g1 and g2 led to 0 and 1.
    """
    found = tree_values(
        [
            (["g0", "v0", "r0"], 1.0),
            (["g0", "v0", "r1"], 1.0),
            (["g0", "v0", "r2"], 0.0),
            (["g0", "v1", "r3"], 0.0),
            (["g0", "v2", "r4"], 1.0),
            (["g1", "v3", "r5"], 0.0),
            (["g2", "v4", "r6"], 1.0),
        ]
    )
    assert found["v0"] == pytest.approx(2 / 3) and found["g0"] == pytest.approx(5 / 9)
    assert [found[answer] for answer in ("v1", "v2", "g1", "g2", "r0", "r2")] == [0.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_values_of_episodes_that_end_at_once():
    assert tree_values([(["a"], 2.0), (["a"], 1.0), (["a", "b"], 0.0)]) == {"a": 1.0, "b": 0.0}
    assert tree_values([]) == {}
