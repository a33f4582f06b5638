"""FSDP with images: two workers, of which each makes other passes than the other, learn what one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.trainer.learner.local import LocalLearner
from tests.integrations.pictures import asks, picture
from tests.integrations.seeing_models import build_seeing
from tests.trainer.learner.fsdp_ranks import OpenRanks, with_eps
from tests.trainer.learner.learner_rows import change
from tests.trainer.learner.test_fsdp import AS_GRADIENT, BOTH, apart, gradients

pytestmark = pytest.mark.slow


def rows_of(chat: ChatTemplate) -> list[TrainRow]:
    """Texts, pictures of two sizes, and two in one prompt; an odd number of rows."""
    asked: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": "no image"}],
        [asks("what?", picture("red"))],
        [asks("what?", picture("blue", 50))],
        [asks("both?", picture("green"), picture("white"))],
    ]
    return [
        TrainRow(
            id=f"{number}.{member}",
            role="a",
            prompt_ids=tuple(chat.render(messages, None)),
            response_ids=(20 + number, *range(30, 31 + member)),
            logprobs=(-5.5,) * (2 + member),
            advantage=1.0 if member else -1.0,
            images=chat.images(messages) if number else (),
        )
        for number, messages in enumerate(asked)
        for member in range(3)
    ][:-1]


@pytest.mark.parametrize(("kind", "tokens"), [("llava", 64), pytest.param("idefics3", 4096, marks=pytest.mark.long)])
def test_two_workers_learn_from_images_what_one_process_does(
    kind: str, tokens: int, two_ranks: OpenRanks, tmp_path: Path
) -> None:
    build_seeing(tmp_path, kind)
    rows = rows_of(ChatTemplate.load(tmp_path))
    settings = change(AS_GRADIENT, micro_batch_tokens=tokens)
    local = with_eps(LocalLearner.open(str(tmp_path), BOTH, settings, LossSpec()), 1.0)
    fsdp = with_eps(two_ranks.learner(str(tmp_path), BOTH, settings, LossSpec()), 1.0)
    for policy in ("lora", "full"):
        expected, metrics = gradients(local, policy, rows)
        found, divided = gradients(fsdp, policy, rows)
        assert apart(expected, found) < 1e-5
        assert divided["unshared_rows"] == metrics["unshared_rows"] == len(rows)
        assert divided["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
        assert apart(local.weights(policy), fsdp.weights(policy)) < 1e-5
