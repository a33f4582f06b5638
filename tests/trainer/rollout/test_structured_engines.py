"""Fifty schemas in each engine: every reply of an untrained model is valid, and the learner sees its distribution."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import Policies, PolicySpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.integrations.schemas import SCHEMAS, form
from tests.integrations.tiny_models import build_bytes
from tests.trainer.learner.forced import ForcedSettings

PENALTIES = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3, "min_p": 0.02}


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes") / "model"
    build_bytes(folder, size=1024)
    return folder


async def opened(engine: str, model: Path) -> Sampler:
    if engine == "transformers":
        return await TransformersSampler.open(model, host="thread")
    from cotune.integrations.models.vllm.engine import VllmSampler

    return await VllmSampler.open(model, policies=1, engine_args={"max_num_seqs": 64})


@pytest.mark.parametrize("engine", ["transformers", pytest.param("vllm", marks=pytest.mark.long)])
def test_every_reply_is_valid_and_its_probabilities_are_the_learners(
    engine: str, spoken: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chat = ChatTemplate.load(spoken)
    bias = ((40, 2.0), (41, -100.0))

    async def scenario() -> list[Any]:
        sampler = await opened(engine, spoken)

        async def one(number: int) -> list[Any]:
            prompt = chat.render([{"role": "user", "content": f"form {number}"}], None)
            grammar = chat.grammar(form(SCHEMAS[number]), None, prompt)
            how = SamplingParams(grammar=grammar, max_tokens=256, seed=number, logit_bias=bias)
            return [(number, prompt, grammar, c) for c in await sampler.sample(prompt, 2, how, PolicyRef("p"))]

        try:
            shaped = SamplingParams(max_tokens=16, seed=1, **PENALTIES)
            assert len(await sampler.sample([5, 6], 2, shaped, PolicyRef("p"))) == 2
            return [reply for replies in await asyncio.gather(*map(one, range(len(SCHEMAS)))) for reply in replies]
        finally:
            await sampler.aclose()

    drawn = asyncio.run(scenario())
    assert "EngineDeadError" not in "".join(capfd.readouterr())  # as vLLM logs where it is closed
    for number, _, _, reply in drawn:
        assert reply.finish_reason == "stop"
        jsonschema.validate(json.loads(chat.parse(reply.token_ids)[0]), SCHEMAS[number])
    rows = [
        TrainRow(
            id=str(i), role="r", prompt_ids=tuple(prompt), response_ids=reply.token_ids, logprobs=reply.logprobs,
            advantage=0.0, grammar=grammar, logit_bias=bias,
        )
        for i, (_, prompt, grammar, reply) in enumerate(drawn)
    ]  # fmt: skip
    policies = Policies({"p": PolicySpec(name="p")}, {"r": "p"})
    learner = LocalLearner.open(str(spoken), policies, ForcedSettings(device="cpu"), recipe("dr_mas").loss)
    found = learner.logprobs("p", rows)
    gaps = [float(np.abs(mine - np.array(row.logprobs)).max()) for mine, row in zip(found, rows, strict=True)]
    assert max(gaps) < 1e-4
