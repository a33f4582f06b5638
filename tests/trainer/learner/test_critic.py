"""The critic: advantages of tokens by GAE, value heads that learn, and go through checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from cotune.algorithms.advantages import gae, whitened
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, RunError
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings
from tests.trainer.learner.fsdp_ranks import with_eps
from tests.trainer.learner.learner_rows import make_rows
from tests.trainer.tiny_app import application, converse

LOSS = msgspec.structs.replace(recipe("cory").loss, kl=0.0)
SETTINGS = ForcedSettings(lr=1e-3, device="cpu")


def test_gae_by_hand():
    # gamma 1, lambda 0.5, V = 0.5, 0.25, 0; reward 1 at the end.
    # deltas 0.25 - 0.5 = -0.25, 0 - 0.25 = -0.25, 1 - 0 = 1; A = 1, -0.25 + 0.5 = 0.25, -0.25 + 0.125 = -0.125
    assert gae(np.array([0.5, 0.25, 0.0]), 1.0, 1.0, 0.5).tolist() == [-0.125, 0.25, 1.0]
    # lambda 1: reward - V; gamma 0.5 and no values: 0.25, 0.5, 1
    assert gae(np.array([0.5, 0.25, 0.0]), 1.0, 1.0, 1.0).tolist() == [0.5, 0.75, 1.0]
    assert gae(np.zeros(3), 1.0, 0.5, 1.0).tolist() == [0.25, 0.5, 1.0]


def test_advantages_are_normalised_over_all_tokens():
    # 1, 1, 1, -1: mean 0.5, variance (3 x 0.25 + 2.25) / 4 = 0.75
    one, other = whitened([np.array([1.0, 1.0]), np.array([1.0, -1.0])])
    np.testing.assert_allclose([*one, *other], [0.57735, 0.57735, 0.57735, -1.73205], atol=1e-4)
    assert whitened([np.array([2.0, 2.0])])[0].tolist() == [0.0, 0.0]


def rows(rewards: list[float]) -> list[TrainRow]:
    return [
        TrainRow(
            id=f"c.{i}",
            role="a",
            prompt_ids=(2, 5 + i % 2, 1),
            response_ids=(4, 6, 1),
            logprobs=(-3.0, -3.0, -3.0),
            advantage=reward,
        )
        for i, reward in enumerate(rewards)
    ]


@pytest.fixture
def learner(base) -> LocalLearner:
    return LocalLearner.open(base, policies_for("lora", ["a"], LoraSpec(rank=4)), SETTINGS, LOSS)


def test_rewards_that_depend_on_the_prompt_are_foreseen(learner):
    """Prompts of two kinds, one worth 1 and the other 0: the values tell them apart, and leave no advantage."""
    figures = [learner.update("a", rows([0.0, 1.0] * 4)) for _ in range(25)]
    assert figures[0]["value_loss"] > 0.3
    assert figures[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert figures[-1]["value_loss"] < 0.05
    assert figures[-1]["explained_variance"] > 0.8


def test_the_policy_trains_on_its_tokens_advantages(base, learner):
    """As the learner alone does where it is given the advantages that follow from values of 0: with gamma 1 and lambda
    0.95 a reward of 1 is 0.9025, 0.95, 1 for three tokens."""
    alone = LocalLearner.open(base, policies_for("lora", ["a"], LoraSpec(rank=4)), SETTINGS, LOSS)
    raw = [reward * np.array([0.9025, 0.95, 1.0]) for reward in (0.0, 1.0)]
    pooled = np.concatenate(raw)
    given = [(own - pooled.mean()) / pooled.std() for own in raw]
    expected, found = alone._train("a", rows([0.0, 1.0]), 1.0, given), learner.update("a", rows([0.0, 1.0]))
    assert found["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    assert all(np.allclose(learner.weights("a")[name], array, atol=1e-6) for name, array in alone.weights("a").items())


def test_a_checkpoint_holds_the_value_heads_and_their_optimizers(base, learner, tmp_path):
    for _ in range(3):
        learner.update("a", rows([0.0, 1.0]))
    learner.save(tmp_path)
    again = LocalLearner.open(base, policies_for("lora", ["a"], LoraSpec(rank=4)), SETTINGS, LOSS)
    again.load(tmp_path)
    one, other = (it.update("a", rows([0.0, 1.0])) for it in (learner, again))
    assert one["value_loss"] == other["value_loss"]
    assert torch.equal(learner._critic._heads["a"].weight, again._critic._heads["a"].weight)
    (tmp_path / "0.critic.safetensors").unlink()
    with pytest.raises(RunError, match="Cannot restore the learner"):
        again.load(tmp_path)


def test_a_run_with_a_critic_goes_on_after_a_resume(trainer, monkeypatch):
    monkeypatch.setattr("cotune.records.policies.STEPS_BETWEEN_SWAPS", 1)
    settings = {"recipe": "cory", "policies": "lora", "routing": {"swap": ["first", "second"]}}
    app = application(both)
    trainer(app, steps=2, **settings)
    trainer.resume(app, steps=3)
    for line in trainer.metrics():
        assert {"value_loss", "explained_variance"} <= line["policies"]["first"].keys()
        assert line["policies"]["first"]["steps"] > 0


async def both(task):
    """Each role is paid for its own words; under cory both get the sum."""
    team = (await converse(task))["team"]
    return {"first": 1.0 - team, "second": team}


def test_what_the_critic_alone_sees_tells_episodes_apart(learner):
    """One prompt for all: what is worth 1 stands in the privileged text alone."""

    def told(privileged: bool) -> list[TrainRow]:
        made = rows([0.0, 1.0] * 4)
        ids = [(2, 5 + i % 2, 1) if privileged else () for i in range(len(made))]
        return [msgspec.structs.replace(r, prompt_ids=(2, 7, 1), privileged=p) for r, p in zip(made, ids, strict=True)]

    for _ in range(25):
        blind = learner.update("a", told(False))
    assert blind["explained_variance"] < 0.1
    for _ in range(40):
        seeing = learner.update("a", told(True))
    assert seeing["explained_variance"] > 0.8


SEES = """
import msgspec
from cotune.methods import MaPoRl


class Sees(MaPoRl):
    loss = msgspec.structs.replace(MaPoRl.loss, critic_sees="reference")
"""


def test_a_run_shows_the_critic_the_reference_of_each_task(trainer, monkeypatch, tmp_path):
    (tmp_path / "sees.py").write_text(SEES)
    own = f"{tmp_path / 'sees.py'}:Sees"
    seen: list[TrainRow] = []
    inner = LocalLearner.update

    def update(self, policy, rows, **more):
        seen.extend(row for row in rows if row.role == "first")
        return inner(self, policy, rows, **more)

    monkeypatch.setattr(LocalLearner, "update", update)
    tasks = [{"id": x, "letter": x, "reference": f"say {x}"} for x in "abc"]
    trainer(application(converse), tasks, recipe=own, steps=1, policies="lora")
    assert {row.privileged for row in seen} == {row.prompt_ids for row in seen}
    assert len(seen) == 12
    with pytest.raises(ConfigError, match="not text in every task; task a has None"):
        trainer(application(converse), recipe=own, to="other")


def test_a_critic_takes_the_reward_as_it_is():
    with pytest.raises(ConfigError, match=r"critic = True was removed .* Use recipe cory or maporl"):
        recipe("grpo", critic=True)
    for name in ("cory", "maporl"):
        assert recipe(name).loss.critic and not recipe(name).compares
        with pytest.raises(ConfigError, match="has a critic, which makes the advantages and learns from every reward"):
            recipe(name, zero_variance=True)
    with pytest.raises(ConfigError, match=r"gae_lambda = 2 must be between 0 and 1"):
        LossSpec(critic=True, gae_lambda=2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lora", pytest.param("full", marks=pytest.mark.long)])
def test_two_workers_judge_and_learn_as_one_and_go_on_from_each_other(base, two_ranks, tmp_path, kind):
    """With privileged text; 11 rows, then fewer rows than workers."""
    loss = msgspec.structs.replace(LOSS, kl=0.01, kl_in="reward")
    settings = ForcedSettings(lr=1e-3, device="cpu", mini_batch=4, micro_batch_tokens=30)
    policies = policies_for(kind, ["a", "b"], LoraSpec(rank=4))

    def shown(groups: int, k: int) -> list[TrainRow]:
        made = make_rows(groups=groups, k=k, response=(1, 6))[1 if k > 1 else 0 :]
        return [msgspec.structs.replace(row, privileged=(2, 5 + i % 2)) for i, row in enumerate(made)]

    local = with_eps(LocalLearner.open(base, policies, settings, loss))
    ranks = with_eps(two_ranks.learner(base, policies, settings, loss))
    batches = [shown(3, 4)] * 3 + [shown(1, 1)]

    def compare(policy: str, batch: list[TrainRow]) -> None:
        expected, found = (it.update(policy, batch) for it in (local, ranks))
        assert expected.keys() == found.keys()
        for name in ("value_loss", "explained_variance", "loss", "grad_norm", "kl", "steps"):
            assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
        one, other = local.weights(policy), ranks.weights(policy)
        assert max(np.abs(one[name] - other[name]).max() for name in one) < 1e-5

    def saved(learner: Any, name: str) -> Path:
        (tmp_path / name).mkdir()
        learner.save(tmp_path / name)
        return tmp_path / name

    for policy in ("a", "b"):
        for batch in batches:
            compare(policy, batch)
    folders = [saved(local, "local"), saved(ranks, "ranks")]
    for policy in ("0", "1"):
        heads = [load_file(folder / f"{policy}.critic.safetensors") for folder in folders]
        assert heads[0].keys() == heads[1].keys()
        assert len(heads[0]) == 8
        assert all(torch.allclose(heads[0][name], heads[1][name], rtol=0, atol=1e-5) for name in heads[0])
        assert heads[0]["weight"].abs().max() > 0
    local.load(folders[1])
    ranks.load(folders[0])
    compare("a", batches[0])
