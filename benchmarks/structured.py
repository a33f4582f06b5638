"""Structured output: validity, sampler against learner, and speed, in-process and (--vllm) in vLLM's engine.

1,000 replies over 50 schemas (20 of each, at temperature 1) by a model of 6M parameters from scratch with a byte-level
tokenizer of 8,192 tokens: its output is noise, so nothing but the grammar makes it valid. Then the learner computes
the log-probabilities of all replies. Speed: tokens/s of replies of up to 64 tokens, K = 8, 32 prompts at once, under a
schema whose strings they fill, against the same without a form; rounds alternate. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import Policies, PolicySpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.integrations.schemas import SCHEMAS, form
from tests.integrations.tiny_models import build_bytes
from tests.trainer.learner.forced import ForcedSettings

POLICY = PolicyRef("base")
PER_SCHEMA = 20
TEXT = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "text": {"type": "string", "minLength": 400}},
    "required": ["title", "text"],
}


async def sampled(sampler: Sampler, chat: ChatTemplate) -> list[tuple[dict[str, Any], TrainRow, str]]:
    """All replies, with their schemas and texts."""

    async def one(number: int) -> list[tuple[dict[str, Any], TrainRow, str]]:
        prompt = chat.render([{"role": "user", "content": f"Fill in form {number}."}], None)
        grammar = chat.grammar(form(SCHEMAS[number]), None, prompt)
        params = SamplingParams(grammar=grammar, max_tokens=256, seed=number)
        drawn = await sampler.sample(prompt, PER_SCHEMA, params, POLICY)
        rows = [row(f"{number}.{i}", prompt, grammar, c) for i, c in enumerate(drawn)]
        return [(SCHEMAS[number], r, chat.parse(c.token_ids)[0]) for r, c in zip(rows, drawn, strict=True)]

    return [reply for replies in await asyncio.gather(*map(one, range(len(SCHEMAS)))) for reply in replies]


def row(name: str, prompt: Sequence[int], grammar: str, drawn: Completion) -> TrainRow:
    ids, logprobs = drawn.token_ids, drawn.logprobs
    return TrainRow(
        id=name, role="r", prompt_ids=tuple(prompt), response_ids=ids, logprobs=logprobs, advantage=0.0, grammar=grammar
    )


def valid(schema: Any, text: str) -> bool:
    try:
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def speed(sampler: Sampler, chat: ChatTemplate, grammar: str, seed: int) -> float:
    """Tokens a second of 32 prompts x 8 replies."""
    prompts = [chat.render([{"role": "user", "content": f"Write about number {i}."}], None) for i in range(32)]
    start = time.perf_counter()
    params = SamplingParams(grammar=grammar, max_tokens=64, seed=seed)
    drawn = await asyncio.gather(*(sampler.sample(prompt, 8, params, POLICY) for prompt in prompts))
    tokens = sum(len(c.token_ids) for candidates in drawn for c in candidates)
    return tokens / (time.perf_counter() - start)


async def measure(sampler: Sampler, chat: ChatTemplate, learner: LocalLearner, rounds: int) -> dict[str, float]:
    replies = await sampled(sampler, chat)
    rows = [r for _, r, _ in replies]
    gaps = [
        float(np.abs(mine - np.array(r.logprobs)).max())
        for mine, r in zip(learner.logprobs("base", rows), rows, strict=True)
    ]
    grammar = chat.grammar(form(TEXT), None, [1])
    for some in (grammar, ""):
        await speed(sampler, chat, some, 0)
    pairs = [(await speed(sampler, chat, grammar, i), await speed(sampler, chat, "", i)) for i in range(rounds)]
    return {
        "valid": sum(valid(schema, text) for schema, _, text in replies) / len(replies),
        "replies": len(replies),
        "tokens": sum(len(r.response_ids) for r in rows),
        "max_logprob_gap": max(gaps),
        "with_form": statistics.median(one for one, _ in pairs),
        "without": statistics.median(other for _, other in pairs),
        "speed_ratio": statistics.median(one / other for one, other in pairs),
    }


async def main(rounds: int, vllm: bool) -> None:
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        build_bytes(base, hidden=256)
        chat = ChatTemplate.load(base)
        policies = Policies({"base": PolicySpec(name="base")}, {"r": "base"})
        learner = LocalLearner.open(str(base), policies, ForcedSettings(device="cpu"), recipe("dr_mas").loss)
        engines: list[Any] = [TransformersSampler.open(base)]
        if vllm:
            from cotune.integrations.models.vllm.engine import VllmSampler

            engines.append(VllmSampler.open(base, policies=1, engine_args={"max_num_seqs": 256}))
        for opening in engines:
            sampler = await opening
            try:
                name = (await sampler.info()).name
                results[name] = await measure(sampler, chat, learner, rounds)
                print(name, json.dumps(results[name]))
            finally:
                await sampler.aclose()
    worst = {"valid": min, "max_logprob_gap": max, "speed_ratio": min}
    print(json.dumps({key: pick(figures[key] for figures in results.values()) for key, pick in worst.items()}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's engine too")
    options = parser.parse_args()
    asyncio.run(main(options.rounds, options.vllm))
