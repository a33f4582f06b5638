"""Tokens per second of the in-process sampler against `model.generate()` on the same batch.

256 sequences: 32 prompts of 64 tokens, 8 candidates of 32 new tokens each, on a Qwen3 of about 0.8M parameters
with random weights (hidden 128, 2 layers), fp32, same number of threads. Both are warm; rounds alternate, and the
ratio is of the median times. The last line is the result as JSON.

    python -m benchmarks.rollout --model SmolLM2-135M-Instruct.Q4_1.gguf [--vllm] [--new 32] [--rounds 3]

is the same on a pretrained model, at 1, 8 and 64 sequences (up to 8 of a prompt) on each number of threads in
--thread-counts, and with --vllm beside vLLM in this machine too. A pass of `generate()` has no log-probabilities to
give; the two samplers do. The last line is tokens per second, and of CPU time, by engine, threads and sequences.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3ForCausalLM

from benchmarks.small_model import small_qwen
from cotune.integrations.models.bfloat16 import has_bfloat16
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams

POLICY = PolicyRef("base")


def build(vocabulary: int) -> Qwen3ForCausalLM:
    return small_qwen(vocabulary, eos_token_id=None, pad_token_id=0).eval()


def generate(model: Any, prompts: list[list[int]], k: int, new: int, greedy: bool) -> torch.Tensor:
    """New token ids, [prompts * k, new]."""
    ids = torch.tensor(prompts).repeat_interleave(k, 0)
    how = {"do_sample": False} if greedy else {"do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0}
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, **how)
    return out[:, ids.shape[1] :]


async def sample(
    sampler: Sampler, prompts: list[list[int]], k: int, new: int, temperature: float
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


def cpu_seconds() -> float:
    """Of this process and all below it, so far."""
    ticks, below, parents = 0, {os.getpid()}, []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        parents.append((int(path.parent.name), int(fields[1]), int(fields[11]) + int(fields[12])))
    for pid, parent, used in sorted(parents):
        if pid in below or parent in below:
            below.add(pid)
            ticks += used
    return ticks / os.sysconf("SC_CLK_TCK")


async def open_engine(name: str, folder: str, threads: int) -> Any:
    """A sampler, or the model itself for `generate()`."""
    if name.startswith("sampler"):
        options = {"dtype": "bfloat16" if "bfloat16" in name else "float32", "end_token_ids": (), "prefix_cache": 0}
        return await TransformersSampler.open(folder, device="cpu", threads=threads, **options)
    if name == "vLLM":
        from cotune.integrations.models.vllm.engine import VllmSampler

        os.environ["OMP_NUM_THREADS"] = str(threads)
        limits = {"max_model_len": 512, "max_num_seqs": 64, "enable_prefix_caching": False, "dtype": "float32"}
        return await VllmSampler.open(folder, policies=1, staleness=1, engine_args=limits)
    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


async def measure(engine: Any, counts: list[int], args: argparse.Namespace, vocabulary: int) -> dict[str, list[float]]:
    """By number of sequences, the best tokens per second and per CPU second."""
    found = {}
    for count in counts:
        k = min(count, args.k)
        prompts = np.random.default_rng(0).integers(16, vocabulary, (count // k, args.prompt)).tolist()
        rates = []
        for _ in range(args.rounds + 1):  # the first warms up
            began, used = time.perf_counter(), cpu_seconds()
            if isinstance(engine, torch.nn.Module):
                made = generate(engine, prompts, k, args.new, greedy=False).numel()
            else:
                made = sum(len(c.token_ids) for found in await sample(engine, prompts, k, args.new, 1.0) for c in found)
            rates.append((made / (time.perf_counter() - began), made / max(cpu_seconds() - used, 0.01)))
        found[str(count)] = [round(max(column), 1) for column in zip(*rates[1:], strict=True)]
    return found


async def compare(args: argparse.Namespace) -> None:
    """The engines on a pretrained model, one after the other."""
    folder = str(locate_model(args.model))
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    counts = [int(count) for count in args.sequence_counts.split(",")]
    result: dict[str, dict[str, list[float]]] = {}
    print(f"{'tokens/s (tokens per CPU second)':34}" + "".join(f"{f'{count} sequences':>22}" for count in counts))
    for threads in (int(number) for number in args.thread_counts.split(",")):
        samplers = ["sampler", *(["sampler in bfloat16"] if has_bfloat16() else [])]
        for name in (*samplers, *(["generate()"] if args.generate else []), *(["vLLM"] if args.vllm else [])):
            engine = await open_engine(name, folder, threads)
            rates = await measure(engine, counts, args, vocabulary)
            if name != "generate()":
                await engine.aclose()
            result[f"{name}, {threads}"] = rates
            cells = "".join(f"{f'{wall:.1f} ({cpu:.1f})':>22}" for wall, cpu in rates.values())
            print(f"{f'{name}, {threads} thread(s)':34}{cells}", flush=True)
    print(json.dumps(result))


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id of a model to compare the engines on")
    parser.add_argument("--vllm", action="store_true", help="with --model: vLLM too, which takes about 6 GB")
    parser.add_argument("--no-generate", dest="generate", action="store_false", help="with --model: the samplers alone")
    parser.add_argument("--sequence-counts", default="1,8,64", help="with --model (default: %(default)s)")
    parser.add_argument("--thread-counts", default="1,2", help="with --model (default: %(default)s)")
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.model:
        return await compare(args)
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
