"""The cost of log-probabilities, of an adapter and of the precision in two decoding engines: vLLM's offline engine with
its default settings, and the in-process sampler, which always gives log-probabilities.

    OMP_NUM_THREADS=2 python -m benchmarks.decode_controls [--sequences 8,64] [--k 8] [--dtypes float32,bfloat16]

SmolLM2-135M, random prompts of 64 tokens with K candidates each, a LoRA of rank 16 on all linear layers with random
weights. vLLM without LoRA support stands for merged weights. Each case runs once to warm up, then in rounds for
`--seconds`. The table is tokens per second, the median round and the best; the last line is the same as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig

from benchmarks.adapter_shapes import adapter_shapes
from cotune.integrations.models.folder.folder import locate_model, write_adapter
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import LoraSpec
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Sampler, SamplingParams
from examples.word_problems.demo import pretrained

PROMPT = 64
LORA = LoraSpec()
Prompts = Sequence[list[int]]
Decode = Callable[[Prompts, int, int], int]
"""Decode K candidates of so many tokens for each prompt; returns how many tokens there are. K is the second."""


def adapter(folder: str) -> dict[str, npt.NDArray[np.float32]]:
    """A LoRA with random weights."""
    chance = np.random.default_rng(0)
    shapes = adapter_shapes(folder, LORA)
    return {name: (0.02 * chance.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def vllm_cases(folder: str, dtype: str, weights: Mapping[str, Any]) -> Iterator[tuple[str, Decode]]:
    """An engine without LoRA support, and one with it; each without and with log-probabilities."""
    from vllm import LLM
    from vllm.lora.request import LoRARequest

    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    limits = {"max_model_len": 512, "max_num_seqs": 64, "enable_prefix_caching": False}
    for lora in (False, True):
        more = {"enable_lora": True, "max_lora_rank": LORA.rank} if lora else {}
        engine = LLM(folder, dtype=dtype, disable_log_stats=True, **limits, **more)
        with tempfile.TemporaryDirectory() as kept:
            write_adapter(Path(kept), weights, LORA, folder)
            request = LoRARequest("a", 1, kept) if lora else None
            for logprobs, said in ((None, "without"), (0, "with")):
                name = f"vLLM, {'an adapter' if lora else 'merged'}, {said} log-probabilities"
                yield name, partial(vllm_decodes, engine, request, logprobs)
        engine.llm_engine.engine_core.shutdown()


def vllm_decodes(engine: Any, lora: Any, logprobs: int | None, prompts: Prompts, k: int, new: int) -> int:
    from vllm import SamplingParams as Asked

    params = Asked(n=k, temperature=1.0, max_tokens=new, ignore_eos=True, logprobs=logprobs)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    answers = engine.generate(inputs, params, lora_request=lora, use_tqdm=False)
    return sum(len(output.token_ids) for answer in answers for output in answer.outputs)


def own_cases(folder: str, dtype: str, weights: Mapping[str, Any]) -> Iterator[tuple[str, Decode]]:
    """The base, and an adapter."""
    with asyncio.Runner() as runner:
        options = {"dtype": dtype, "end_token_ids": (), "prefix_cache": 0}
        threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or None
        sampler = runner.run(TransformersSampler.open(folder, device="cpu", threads=threads, **options))
        runner.run(sampler.publish(PolicyRef("a", 1), weights, LORA))
        for policy, weights_name in ((PolicyRef("base"), "merged"), (PolicyRef("a", 1), "an adapter")):
            name = f"in-process sampler, {weights_name}, with log-probabilities"
            yield name, lambda prompts, k, new, policy=policy: runner.run(sampled(sampler, policy, prompts, k, new))
        runner.run(sampler.aclose())


async def sampled(sampler: Sampler, policy: PolicyRef, prompts: Prompts, k: int, new: int) -> int:
    params = SamplingParams(temperature=1.0, max_tokens=new)
    answers = await asyncio.gather(*(sampler.sample(prompt, k, params, policy) for prompt in prompts))
    return sum(len(candidate.token_ids) for answer in answers for candidate in answer)


def rates_of(decode: Callable[[], int], seconds: float) -> list[float]:
    """Tokens per second of each round."""
    rates, end = list[float](), time.perf_counter() + seconds
    while not rates or time.perf_counter() < end:
        began = time.perf_counter()
        rates.append(decode() / (time.perf_counter() - began))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", default="8,64", help="multiples of K (default: %(default)s)")
    parser.add_argument("--k", type=int, default=8, help="candidates of a prompt (default: %(default)s)")
    parser.add_argument("--new", type=int, default=24, help="tokens of each (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5, help="of each case, at least (default: %(default)s)")
    parser.add_argument("--dtypes", default="float32,bfloat16", help="(default: %(default)s)")
    args = parser.parse_args()
    folder = str(locate_model(pretrained()))
    vocabulary, weights = AutoConfig.from_pretrained(folder).vocab_size, adapter(folder)
    counts = [int(count) for count in args.sequences.split(",")]
    result: dict[str, dict[str, list[float]]] = {}
    table = Table("", *(f"{count} sequences" for count in counts), title="tokens per second, median (best)")
    for dtype in args.dtypes.split(","):
        for cases in (own_cases, vllm_cases):
            for name, decode in cases(folder, dtype, weights):
                rates: dict[str, list[float]] = {}
                for count in counts:
                    drawn = np.random.default_rng(0).integers(16, vocabulary, (count // args.k, PROMPT))
                    decode(drawn.tolist(), args.k, 4)
                    rounds = rates_of(partial(decode, drawn.tolist(), args.k, args.new), args.seconds)
                    rates[str(count)] = [round(statistics.median(rounds), 1), round(max(rounds), 1)]
                result[f"{name}, {dtype}"] = rates
                table.add_row(f"{name}, {dtype}", *(f"{usual:g} ({best:g})" for usual, best in rates.values()))
                print(f"{name}, {dtype}: {rates}", flush=True)
    Console(width=120).print(table)
    print(json.dumps({"threads": torch.get_num_threads(), "tokens_per_second": result}))


if __name__ == "__main__":
    main()
