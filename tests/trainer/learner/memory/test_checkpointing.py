"""Activation checkpointing: the same gradients from a fraction of the memory, where rows ask for it."""

from __future__ import annotations

import logging

import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.errors import LearnerError
from cotune.records.policies import policies_for
from cotune.trainer.learner.batching import tokens_of
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory import pass_size
from cotune.trainer.learner.policy_model import PolicyModel
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows

LONG = make_rows(groups=2, prompt=(40, 60), response=(20, 40))

OPTIMIZER_BYTES = pass_size.GRADIENT_BYTES + pass_size.MOMENT_BYTES["adamw"]


def open_one(base: str, settings: LearnerSettings, layout: str = "lora") -> LocalLearner:
    return LocalLearner.open(base, policies_for(layout, ["a"], SMALL), settings, LossSpec())  # type: ignore[arg-type]


def gradients(model: PolicyModel, rows, *, checkpointed: bool) -> dict[str, torch.Tensor]:  # type: ignore[no-untyped-def]
    model.logprob_model.checkpointing.on = checkpointed
    for parameter in model.parameters().values():
        parameter.grad = None
    logprobs, entropy = model.token_logprobs(rows)
    (logprobs * torch.linspace(-1, 1, len(logprobs)) + 0.3 * entropy).sum().backward()
    return {name: p.grad.clone() for name, p in model.parameters().items() if p.grad is not None}


@pytest.mark.parametrize("layout", ["lora", "full"])
@pytest.mark.parametrize("shared", [True, False])
def test_gradients_are_those_without(base: str, layout: str, shared: bool) -> None:
    learner = open_one(base, change(FAST, shared_prompts=shared), layout)
    rows = make_rows(groups=4)
    learner.update("a", rows)  # so that no LoRA matrix is zero
    model = learner._policies["a"]
    assert model.logprob_model.shares is shared
    plain, again = (gradients(model, rows, checkpointed=on) for on in (False, True))
    assert plain.keys() == again.keys() == model.parameters().keys()
    for name, expected in plain.items():
        torch.testing.assert_close(again[name], expected, atol=1e-6 * expected.abs().max().item(), rtol=1e-5)


@pytest.mark.parametrize("shared", [True, False])
def test_layers_are_computed_again_and_keep_little(base: str, shared: bool) -> None:
    model = open_one(base, change(FAST, shared_prompts=shared))._policies["a"]
    calls = []
    model.network.model.layers[0].self_attn.register_forward_hook(lambda *_: calls.append(1))
    gradients(model, LONG, checkpointed=False)
    once = len(calls)
    gradients(model, LONG, checkpointed=True)
    assert (once, len(calls)) == (1, 3)
    sizes = [pass_size.kept_bytes(model, checkpointed=on).token for on in (True, False)]
    assert sizes[0] < 0.2 * sizes[1]


class Limits:
    """Settings under which a pass of one row has room for so many tokens."""

    def __init__(self, base: str, monkeypatch: pytest.MonkeyPatch) -> None:
        model = open_one(base, FAST)._policies["a"]
        self.memory = pass_size.pass_memory(model)
        self.plain, self.checkpointed = (self.memory.planned(checkpointed=on) for on in (False, True))
        trained = sum(p.numel() for p in model.parameters().values())
        self.used = 2**30 + int(self.memory.fixed + self.memory.logits) + OPTIMIZER_BYTES * trained
        monkeypatch.setattr(pass_size, "process_memory", lambda: 2**30)

    def plain_tokens(self, tokens: int, **changes: object) -> LearnerSettings:
        return change(FAST, memory=f"{int(self.used + (tokens + 0.5) * self.plain)}B", **changes)


def test_a_row_that_would_not_fit_turns_it_on(
    base: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = Limits(base, monkeypatch)
    longest = max(len(tokens_of(row)) for row in LONG)
    plain, limited = open_one(base, FAST), open_one(base, limits.plain_tokens(longest - 4))
    expected, found = plain.update("a", LONG), limited.update("a", LONG)
    assert (expected["checkpointed_steps"], found["checkpointed_steps"]) == (0, 1)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    for name, weights in plain.weights("a").items():
        assert limited.weights("a")[name] == pytest.approx(weights, abs=1e-5)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        f"A row of {longest} tokens takes activation checkpointing, as {longest - 4} fit without it"
    ]
    assert limited.update("a", make_rows())["checkpointed_steps"] == 0  # short rows need none


def test_a_prompt_that_small_passes_would_compute_again_and_again_turns_it_on(
    base: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 40 and eight answers of 20: passes of 64 tokens compute it eight times, 472 tokens in all."""
    limits = Limits(base, monkeypatch)
    # as in a model of many layers
    many = limits.memory._replace(checkpointed=limits.memory.plain / 9, layers=100)
    monkeypatch.setattr(pass_size, "pass_memory", lambda model: many)
    limits.plain = many.planned(checkpointed=False)
    rows = make_rows(groups=1, k=8, prompt=(40, 40), response=(20, 20))
    settings = limits.plain_tokens(66)
    found = open_one(base, settings).update("a", rows)
    assert (found["checkpointed_steps"], found["pass_tokens"]) == (1, 512)
    assert found["computed_tokens"] <= 40 + 8 * 19 < 0.75 * found["total_tokens"] == 0.75 * 8 * 59
    apart = open_one(base, change(settings, shared_prompts=False)).update("a", rows)
    assert (apart["checkpointed_steps"], apart["pass_tokens"]) == (0, 64)
    short = open_one(base, settings).update("a", make_rows(groups=8, k=2, prompt=(4, 4), response=(6, 6)))
    assert short["checkpointed_steps"] == 0  # little to save


@pytest.mark.parametrize("asked", [True, "auto"])
def test_a_row_that_does_not_fit_at_all_is_named_before_work_starts(
    base: str, monkeypatch: pytest.MonkeyPatch, asked: object
) -> None:
    limits = Limits(base, monkeypatch)
    learner = open_one(base, limits.plain_tokens(16, activation_checkpointing=asked))
    before = learner.weights("a")
    most = int(16.5 * limits.plain / limits.checkpointed)
    rows = make_rows(groups=1, k=1, prompt=(most, most), response=(8, 8))
    said = rf"Row 0\.0 of role 'a' has {most + 7} tokens; a pass of one row fits up to {most} into learner\.memory = "
    with pytest.raises(LearnerError, match=said + r"'\d+B'\. Set learner\.memory higher, or shorten prompts"):
        learner.update("a", rows)
    assert all((learner.weights("a")[name] == weights).all() for name, weights in before.items())


def test_it_can_be_forced_in_all_passes(base: str) -> None:
    learner = open_one(base, change(FAST, activation_checkpointing=True))
    assert learner.update("a", make_rows())["checkpointed_steps"] == 1


def test_a_model_that_does_not_name_its_layers(base: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cotune.trainer.learner.memory.checkpointing.GradientCheckpointingLayer", type(None))
    assert open_one(base, FAST).update("a", make_rows())["checkpointed_steps"] == 0
