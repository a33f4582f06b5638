"""Rows without an advantage: they count in the denominators of the loss, and no model computes them."""

import msgspec
import numpy as np
import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.records.policies import policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.fsdp_ranks import with_eps
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows, on_policy, snapshot

pytestmark = pytest.mark.slow

AS_GRADIENTS = change(FAST, lr=1.0, betas=(0.0, 0.99))
"""With an epsilon of 1,000: steps of the size of the gradients, without momentum."""
CASES = {
    "token mean": ({}, LossSpec()),
    "several steps": ({"mini_batch": 8}, LossSpec(aggregation="sequence_mean")),
    "small batches": ({"mini_batch": 8}, LossSpec(aggregation="constant", constant_length=9)),
    "a mask": ({}, LossSpec(mask="token", mask_range=(0.99, 1.01))),
    "plain passes": ({"shared_prompts": False, "micro_batch_tokens": 60}, LossSpec(aggregation="trajectory_mean")),
}


ON_WORKERS = "several steps"
"""The case that `make test` also computes on two workers, which sum up with the local learner's own code."""


@pytest.fixture(params=["local", "fsdp"])
def opened(request, base):
    def open_learner(layout="lora", settings=FAST, loss=None):
        make = LocalLearner.open if request.param == "local" else request.getfixturevalue("two_ranks").learner
        return make(base, policies_for(layout, ("a", "b"), SMALL), settings, loss or LossSpec())

    return open_learner


def flat(rows, advantage=0.0):
    return [msgspec.structs.replace(row, advantage=advantage) for row in rows]


@pytest.mark.parametrize(
    ("opened", "case"),
    [
        pytest.param(kind, case, marks=pytest.mark.long if kind == "fsdp" and case != ON_WORKERS else ())
        for kind in ("local", "fsdp")
        for case in CASES
    ],
    indirect=["opened"],
)
def test_the_update_is_the_one_that_passes_them(opened, case):
    """Which the same rows are in with an advantage of 1e-20, which adds nothing to a gradient."""
    fields, loss = CASES[case]
    first = opened(loss=loss)
    some, others = on_policy(first, "a", make_rows(groups=2)), on_policy(first, "a", make_rows(groups=3, seed=7))
    some[1] = msgspec.structs.replace(some[1], logprobs=tuple(value - 0.02 for value in some[1].logprobs))
    start, found = snapshot(first, "a"), []
    for advantage in (1e-20, 0.0):
        learner = with_eps(opened(settings=change(AS_GRADIENTS, **fields), loss=loss), 1e3)
        figures = learner.update("a", [*some, *flat(others, advantage)])
        # Mini-batches without any advantage are not in the mean norm, but those with 1e-20 may be.
        norms = figures["grad_norm"] * (figures["steps"] - figures["idle_steps"])
        found.append(({**figures, "norms": norms}, snapshot(learner, "a")))
    (whole, expected), (metrics, weights) = found
    for name in ("loss", "norms", "masked_share", "steps"):
        assert metrics[name] == pytest.approx(whole[name], rel=1e-5, abs=1e-7), name  # a loss is a sum near zero
    moved = max(np.abs(expected[name] - start[name]).max() for name in start)
    assert moved > 0 and all(np.abs(weights[name] - expected[name]).max() < 1e-5 * moved for name in start)
    assert (metrics["rows"], whole["rows"]) == (8, 20)
    assert metrics["computed_tokens"] < 0.6 * whole["computed_tokens"]


def test_what_they_begin_with_is_not_computed(base):
    learner = LocalLearner.open(base, policies_for("lora", ("a",), SMALL), FAST, LossSpec())
    rows, others = make_rows(groups=1), flat(make_rows(groups=2, seed=3, prompt=(40, 40)))
    alone, both = learner.update("a", rows), learner.update("a", [*rows, *others])
    for name in ("computed_tokens", "total_tokens"):
        assert both[name] == alone[name] > 0
    assert learner.update("a", others)["computed_tokens"] == 0


def test_a_role_of_such_rows_alone_shows_the_entropy_of_what_it_sampled(opened):
    learner = opened("shared")
    silent = flat(make_rows(role="b", seed=5))  # each token with log-probability -3.9
    tokens = sum(len(row.response_ids) for row in silent)
    metrics = learner.update("shared", [*make_rows(role="a"), *silent])
    assert {name: metrics[name] for name in metrics if name.startswith("b/")} == {
        "b/entropy": pytest.approx(3.9), "b/tokens": 0.0, "b/masked_share": 0.0, "b/gradient_share": 0.0,
    }  # fmt: skip
    mean = metrics["a/entropy"] * metrics["a/tokens"] + 3.9 * tokens
    assert metrics["entropy"] == pytest.approx(mean / (metrics["a/tokens"] + tokens))
    assert metrics["a/sampler_gap_mean"] == metrics["sampler_gap_mean"]
    alone = learner.update("shared", silent)
    assert (alone["tokens"], alone["steps"], alone["idle_steps"]) == (0.0, 1.0, 1.0)
    assert alone["entropy"] == pytest.approx(3.9)
    assert not alone.keys() & {"sampler_gap_mean", "sampler_gap_max", "ratio_mean", "ratio_max", "clip_share"}
