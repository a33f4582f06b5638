"""Tokens per second of the in-process sampler against `model.generate()` on the same batch.

256 sequences: 32 prompts of 64 tokens, 8 candidates of 32 new tokens each, on a Qwen3 of about 0.8M parameters
with random weights (hidden 128, 2 layers), fp32, same number of threads. Both are warm; rounds alternate, and the
ratio is that of the median times. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import Completion, SamplingParams

POLICY = PolicyRef("base")


def build(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3ForCausalLM(config).eval()


def generate(model: Any, prompts: list[list[int]], k: int, new: int, greedy: bool) -> torch.Tensor:
    """New token ids, [prompts * k, new]."""
    ids = torch.tensor(prompts).repeat_interleave(k, 0)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **how)
    return out[:, ids.shape[1] :]


async def sample(
    sampler: TransformersSampler, prompts: list[list[int]], k: int, new: int, temperature: float
) -> list[list[Completion]]:
    params = SamplingParams(temperature=temperature, max_tokens=new)
    return await asyncio.gather(*(sampler.sample(p, k, params, POLICY) for p in prompts))


def logprob_gap(model: Any, prompts: list[list[int]], answers: list[list[Completion]]) -> float:
    """Largest difference to log_softmax of a plain forward pass over prompt and reply, in nats."""
    worst = 0.0
    for prompt, completions in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt + list(c.token_ids) for c in completions])
        with torch.inference_mode():
            logprobs = torch.log_softmax(model(ids).logits[:, len(prompt) - 1 : -1].float(), -1)
        expected = logprobs.gather(2, ids[:, len(prompt) :, None])[:, :, 0]
        got = torch.tensor([c.logprobs for c in completions])
        worst = max(worst, (expected - got).abs().max().item())
    return worst


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = build(args.vocabulary)
    rng = np.random.default_rng(0)
    prompts = rng.integers(1, args.vocabulary, (args.sequences // args.k, args.prompt)).tolist()
    sampler = await TransformersSampler.open(model, host="thread", threads=args.threads)
    tokens = args.sequences * args.new

    greedy = await sample(sampler, prompts, args.k, args.new, 0.0)
    expected = generate(model, prompts, args.k, args.new, greedy=True)
    got = [list(c.token_ids) for completions in greedy for c in completions]
    equal = int((torch.tensor(got) == expected).all(1).sum())
    answers = await sample(sampler, prompts, args.k, args.new, 1.0)
    gap = logprob_gap(model, prompts, answers)
    generate(model, prompts, args.k, args.new, greedy=False)

    seconds: dict[str, list[float]] = {"generate()": [], "sampler": []}
    for _ in range(args.rounds):
        start = time.perf_counter()
        generate(model, prompts, args.k, args.new, greedy=False)
        middle = time.perf_counter()
        await sample(sampler, prompts, args.k, args.new, 1.0)
        seconds["generate()"].append(middle - start)
        seconds["sampler"].append(time.perf_counter() - middle)
    await sampler.aclose()

    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {args.sequences} sequences, K = {args.k}, {args.prompt} + {args.new} tokens")
    print(f"{'':12} {'seconds (median)':>17} {'tokens/s':>9} {'best':>9}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(f"{name:12} {median:17.3f} {tokens / median:9.0f} {tokens / min(times):9.0f}")
    print(f"greedy sequences equal to generate(): {equal} of {args.sequences}")
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    result = {
        "ratio_vs_generate": round(medians["generate()"] / medians["sampler"], 2),
        "tokens_per_s": round(tokens / medians["sampler"]),
        "max_logprob_gap": gap,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    asyncio.run(main())
