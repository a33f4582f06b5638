"""vLLM and images: what it draws has the same log-probability in the learner, for its base, adapters and full weights.

The model is an Idefics3, whose code in vLLM needs no torchvision."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.cluster.sampler import RaySampler
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.served_versions import BASE
from cotune.records.policies import Policies, PolicySpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.integrations.conftest import vllm_actor
from tests.integrations.seeing_models import build_seeing
from tests.trainer.learner.test_images import LORA, SETTINGS, drawn_by, gap

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
TRAINED = PolicyRef("p", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("seeing")
    build_seeing(made, "idefics3")
    return made


@pytest.fixture(scope="module", params=["lora", pytest.param("full", marks=pytest.mark.long)])
def weights(request: pytest.FixtureRequest) -> Literal["lora", "full"]:
    return request.param


@pytest.fixture(scope="module")
def engine(ray_runtime: str, folder: Path, weights: str) -> Iterator[RaySampler]:
    """One whose weights change when it goes to sleep."""
    yield from vllm_actor(folder, "open_spoiled", weights=weights, policies=1, max_lora_rank=8, sleeps=True)


def test_what_vllm_draws_of_images_is_as_likely_in_the_learner(
    engine: RaySampler, folder: Path, weights: Literal["lora", "full"]
) -> None:
    chat = ChatTemplate.load(folder)
    policies = Policies(roles={"seer": "p"}, specs={"p": PolicySpec(name="p", kind=weights, lora=LORA)})
    learner = LocalLearner.open(str(folder), policies, SETTINGS, LossSpec())

    async def scenario() -> None:
        rows = await drawn_by(engine, chat, BASE)
        assert gap(learner, rows) < 2e-5
        red, blue, two = rows[0], rows[3], rows[6]
        assert red.prompt_ids == blue.prompt_ids
        assert gap(learner, [msgspec.structs.replace(red, images=blue.images)]) > 1e-2
        learner.update("p", rows)
        await engine.publish(TRAINED, learner.weights("p"), LORA if weights == "lora" else None)
        assert gap(learner, await drawn_by(engine, chat, TRAINED)) < 2e-5
        assert gap(learner, rows) > 1e-2
        await refused(red, (b"no image",), "cannot be read")
        await refused(red, red.images * 2, "which the prompt does not hold")
        await refused(two, two.images[:1], "image tokens; its images take")
        assert gap(learner, await drawn_by(engine, chat, TRAINED)) < 2e-5

    async def refused(row: TrainRow, images: tuple[bytes, ...], cause: str) -> None:
        with pytest.raises(RequestRefused, match=cause):
            await engine.sample(row.prompt_ids, 1, SamplingParams(max_tokens=2, images=images), TRAINED)

    asyncio.run(scenario())


def test_an_engine_that_wakes_with_other_weights_serves_nothing_more(engine: RaySampler) -> None:
    """The last test of each engine."""

    async def scenario() -> None:
        await engine.sleep()
        for ask in (engine.wake, engine.wake, engine.info):
            with pytest.raises(SamplerError, match="woke with other weights"):
                await ask()

    asyncio.run(scenario())
