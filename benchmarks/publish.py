"""Seconds to publish one adapter to a vLLM engine in a Ray actor, proven each time.

A Qwen3 of about 0.8M parameters with random weights (hidden 128, 2 layers, vocabulary 2,048) in fp32, an adapter of
rank 16 on all linear modules. Each round changes the adapter, then `prove_publish` sends it to the engine as the next
version, compares the fingerprint of the loaded weights, samples a probe of 4 prompts x 16 tokens, compares its
log-probabilities with PEFT's, and retires the version before. `--load` requests sample from the base all the time.
`publish_s` is until the engine has sent the fingerprint of the weights and serves them; `proven_s` is all of that,
the probe and the retiring included; `adapters_left` counts the adapters in the engine at the end.

    python -m benchmarks.publish --rounds 30
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

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from benchmarks.small_model import small_qwen
from cotune.algorithms.samples import TrainRow
from cotune.integrations.cluster.runtime import open_ray
from cotune.integrations.cluster.sampler import RaySampler, start_sampler
from cotune.integrations.models.vllm.engine import VllmSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, SamplerInfo, SamplingParams, Weights
from cotune.trainer.publish import Probe, Proof, prove_publish

LORA = LoraSpec(rank=16, alpha=32.0)
PROBE = [[1, *range(start, start + 40)] for start in (100, 200, 300, 400)]


class CountingSampler(VllmSampler):
    """Tells how many adapters its engine holds."""

    async def _info(self) -> SamplerInfo:
        adapters = len(await self._llm.list_loras())
        return msgspec.structs.replace(await super()._info(), counters={"adapters": adapters})


async def open_engine(model: str) -> Sampler:
    return await CountingSampler.open(model, policies=1, staleness=1, engine_args={"max_num_seqs": 64})


class Timed:
    """Passes a sampler's methods on; `seconds` holds the times of its publishes."""

    def __init__(self, sampler: RaySampler) -> None:
        self.sampler = sampler
        self.seconds: list[float] = []
        self.sample, self.retire = sampler.sample, sampler.retire

    async def publish(self, policy: PolicyRef, weights: Weights, lora: LoraSpec | None = None) -> str:
        start = time.perf_counter()
        arrived = await self.sampler.publish(policy, weights, lora)
        self.seconds.append(time.perf_counter() - start)
        return arrived


def build(folder: Path) -> Any:
    """Save the base with a tokenizer; return it under a LoRA."""
    model = small_qwen(2048, eos_token_id=0, pad_token_id=1)
    model.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(2048)}, unk_token="w2"))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w1").save_pretrained(folder)
    spec = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets), init_lora_weights=False)
    return get_peft_model(model, spec).eval()


@torch.inference_mode()
def logprobs(model: Any, rows: Sequence[TrainRow]) -> list[npt.NDArray[Any]]:
    """Log-probabilities of each row's response under a plain forward pass."""
    out = []
    for row in rows:
        ids = torch.tensor([[*row.prompt_ids, *row.response_ids]])
        length = len(row.prompt_ids)
        log = torch.log_softmax(model(ids).logits[0, length - 1 : -1], -1)
        out.append(log.gather(1, ids[0, length:, None])[:, 0].numpy())
    return out


@torch.no_grad()
def change(model: Any) -> Weights:
    """Change the adapter as a step of training does; returns its weights."""
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.add_(1e-3 * torch.randn_like(parameter))
    return {name: tensor.numpy().copy() for name, tensor in get_peft_model_state_dict(model).items()}


async def measure(model: Any, folder: Path, rounds: int, requests: int) -> dict[str, Any]:
    engine = await start_sampler("benchmarks.publish:open_engine", {"model": str(folder)})
    timed, seconds, proof = Timed(engine), [], None
    load = [asyncio.create_task(sample_on(engine)) for _ in range(requests)]
    for version in range(1, rounds + 1):
        ref, weights = PolicyRef("actor", version), change(model)
        start = time.perf_counter()
        proof = await one(timed, ref, weights, proof, model)
        seconds.append(time.perf_counter() - start)
        print(f"{ref}: {seconds[-1]:.3f} s, gap {proof.probe_gap_mean:.1e} (at most {proof.probe_gap_max:.1e})")
    await engine.retire(PolicyRef("actor", rounds))
    for task in load:
        task.cancel()
    await asyncio.gather(*load, return_exceptions=True)
    left = (await engine.info()).counters["adapters"]
    await engine.aclose()
    return {
        "publish_s_median": round(statistics.median(timed.seconds), 4),
        "publish_s_max": round(max(timed.seconds), 4),
        "proven_s_median": round(statistics.median(seconds), 4),
        "proven_s_max": round(max(seconds), 4),
        "rounds": rounds,
        "load": requests,
        "adapters_left": left,
    }


async def one(sampler: Any, ref: PolicyRef, weights: Weights, before: Proof | None, model: Any) -> Proof:
    return await prove_publish(
        sampler,
        ref,
        weights,
        LORA,
        previous=before,
        probe=Probe(PROBE, lambda rows: logprobs(model, rows), 1e-4),
        retire=[before.policy] if before else [],
    )


async def sample_on(engine: RaySampler) -> None:
    """Sample from the base until cancelled."""
    while True:
        prompt = np.random.default_rng().integers(3, 2000, 60).tolist()
        await engine.sample(prompt, 4, SamplingParams(max_tokens=64), PolicyRef("base"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--load", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, open_ray("local", num_cpus=2):
        figures = asyncio.run(measure(build(Path(folder)), Path(folder), arguments.rounds, arguments.load))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
