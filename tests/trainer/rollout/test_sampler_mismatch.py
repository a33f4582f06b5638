"""Runs whose sampler and learner disagree, as engines of other precisions do."""

import itertools

import pytest

from tests.trainer.tiny_app import application, ask, letters

LEARNER_ALONE = "cotune.integrations.models.bfloat16.has_bfloat16"
"""Where the processor has no bfloat16, the learner rounds to it and the sampler does not."""
MIXED = {"policies": "shared", "plan": {"kind": "independent", "k": 4}, "tasks_per_step": 3, "steps": 1}


@pytest.mark.parametrize(
    ("name", "learner"), [("gspo", {}), pytest.param("cispo", {"mini_batch": 8}, marks=pytest.mark.long)]
)
def test_a_learner_in_another_precision_clips_nothing_at_the_first_step(trainer, monkeypatch, name, learner):
    """The clip of GSPO, 3e-4 and 4e-4, is tighter than bfloat16 and float32 agree."""
    monkeypatch.setattr(LEARNER_ALONE, lambda: False)
    trainer(application(first=letters), recipe=name, **MIXED, learner={"dtype": "bfloat16", "lr": 1e-6, **learner})
    figures = trainer.metrics()[0]["policies"]["shared"]
    assert figures["sampler_gap_mean"] > 3e-4
    assert figures["clip_share"] == figures["tis_clipped_share"] == figures["masked_share"] == 0.0
    assert figures["ratio_mean"] == pytest.approx(1.0, abs=1e-4)


def test_tokens_beyond_the_bounds_are_masked_counted_and_shown_by_role(trainer, monkeypatch):
    monkeypatch.setattr(LEARNER_ALONE, lambda: False)
    loss = {"mask": "token", "mask_range": [0.9995, 1.0005], "entropy": 1e-6}  # which passes all rows
    trainer(application(), recipe="dr_mas", loss=loss, **MIXED, learner={"dtype": "bfloat16"})
    line = trainer.metrics()[0]
    figures = line["policies"]["shared"]
    assert 0.1 < figures["masked_share"] < 1.0
    kept = sum(role["samples"] * role["tokens_mean"] for role in line["roles"].values())
    assert figures["tokens"] == pytest.approx(kept * (1 - figures["masked_share"]))
    assert all(0.0 < role["masked_share"] < 1.0 for role in line["roles"].values())
    assert figures["sampler_gap_max"] <= 5.1e-4  # of the tokens that are left


def test_a_mask_that_rejects_everything_leaves_the_policy_as_it_is_and_the_run_goes_on(trainer):
    summary = trainer(application(), loss={"mask": "sequence", "mask_range": [50.0, 60.0]}, **MIXED)
    line = trainer.metrics()[0]
    assert summary.finished
    assert (line["policies"]["shared"]["masked_share"], line["policies"]["shared"]["steps"]) == (1.0, 0.0)
    assert (line["updated"], line["stayed"]) == (False, {"shared": "no gradient"})


def uneven():
    """A one-call success and a nine-call failure, in turns."""
    runs = itertools.count()

    async def run(task):
        success = next(runs) % 2
        for _ in range(1 if success else 9):
            await ask("solver", f"say {task['letter']}")
        return float(success)

    return run


@pytest.mark.parametrize(
    ("settings", "loss"),
    # `test_loss.py` works out both by hand.
    [({}, 0.0), pytest.param({"aggregation": "sequence_mean"}, 0.5657, marks=pytest.mark.long)],
)
def test_an_episode_weighs_the_same_whatever_its_number_of_calls(trainer, settings, loss):
    """The loss of the first step is minus the sum of weight x advantage: 0.707 and -0.707, as the ratio is 1."""
    small = {**MIXED, "plan": {"kind": "independent", "k": 2}, "tasks_per_step": 1, "concurrency": 1}
    trainer(application(uneven()), recipe="grpo", loss={**settings, "tis_cap": 1.0}, **small)
    line = trainer.metrics()[0]
    assert line["rows"] == 10
    assert line["policies"]["shared"]["loss"] == pytest.approx(loss, abs=2e-3)


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_the_penalty_for_leaving_the_untrained_policy_is_asked_for_by_name(trainer, tmp_path, kl_in):
    method = tmp_path / f"in_{kl_in}.py"
    method.write_text(
        "from cotune.algorithms.recipes import LossSpec\nfrom cotune.methods import AtGrpo\n\n\n"
        f"class Own(AtGrpo):\n    loss = LossSpec(kl_in={kl_in!r})\n"
    )
    trainer(application(first=letters), recipe=f"{method}:Own", loss={"kl": 0.1}, **{**MIXED, "plan": {}, "steps": 2})
    kl = [line["policies"]["shared"]["kl"] for line in trainer.metrics()]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    assert kl[1] > 1e-6
