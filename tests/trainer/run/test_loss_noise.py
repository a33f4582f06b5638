"""What rounding alone does to losses with narrow bounds is measured before the first step."""

from __future__ import annotations

import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.trainer.run import precision
from cotune.trainer.run.precision import narrow_bounds, noise_of_loss
from tests.trainer.conftest import Trainer
from tests.trainer.tiny_app import application, ask

TOKENS = 50


def rows_of(sampler: list[np.ndarray]) -> list[TrainRow]:
    return [
        TrainRow(
            id=str(i),
            role="a",
            prompt_ids=(1,),
            response_ids=(2,) * TOKENS,
            logprobs=tuple(own.tolist()),
            advantage=1.0,
        )
        for i, own in enumerate(sampler)
    ]


def logprobs(noise: float, seed: int) -> list[np.ndarray]:
    """Log-probabilities of 40 answers, each with an error of its own of this size."""
    errors = np.random.default_rng(seed).normal(0.0, noise, 40)
    return [np.full(TOKENS, -1.0 + error, np.float32) for error in errors]


@pytest.mark.parametrize("name", ["gspo", "m_grpo"])
def test_the_rounding_of_bfloat16_is_beyond_the_bounds_of_a_sequence_ratio(name: str) -> None:
    loss = recipe(name).loss
    assert narrow_bounds(loss)
    rounded = noise_of_loss(loss, rows_of(logprobs(0.0, 0)), logprobs(1e-3, 1), logprobs(1e-3, 2))
    assert "rounding alone clips" in rounded and f"clip_low = {loss.clip_low:g}" in rounded
    assert noise_of_loss(loss, rows_of(logprobs(0.0, 0)), logprobs(1e-6, 1), logprobs(1e-6, 2)) == ""


def test_a_mask_compares_with_the_sampler() -> None:
    loss = recipe("grpo", mask="geometric").loss
    exact = logprobs(0.0, 0)
    assert narrow_bounds(loss)
    masked = noise_of_loss(loss, rows_of(logprobs(2e-3, 1)), exact, exact)
    assert "masks" in masked and "mask_range" in masked and "0.999" in masked
    assert noise_of_loss(loss, rows_of(exact), exact, exact) == ""


def test_wide_bounds_are_not_measured() -> None:
    assert not any(narrow_bounds(recipe(name).loss) for name in ("grpo", "at_grpo", "dapo", "dr_mas", "spiral"))
    assert not narrow_bounds(recipe("grpo", mask="token").loss)
    assert narrow_bounds(recipe("grpo", clip_low=0.001).loss)


async def one_call(task: dict[str, str]) -> float:
    return (await ask("first", f"say {task['letter']}")).count(task["letter"]) / 4


def test_a_run_warns_once_of_bounds_that_rounding_reaches(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"recipe": "gspo", "plan": {"kind": "independent", "k": 4}, "steps": 1}
    trainer(application(one_call), to="exact", **settings)
    assert "rounding" not in trainer.said
    monkeypatch.setattr(precision, "noise_of_loss", lambda *rest: "rounding alone clips 29.5% of tokens: clip_low")
    trainer(application(one_call), to="rounded", **settings)
    said = " ".join(trainer.said.split())
    assert said.count("warning: rounding alone clips 29.5% of tokens: clip_low (policy") == 1
