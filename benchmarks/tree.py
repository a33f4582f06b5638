"""One update of an episode's rows as a tree of tokens, against one sequence per call.

    python -m benchmarks.tree [--model MODEL] [--turns 4] [--k 4] [--threads 1]

A role's prompt grows by its answer and an observation from turn to turn; each turn has K candidates, and one is
kept. Token ids are random. The updates alternate in one process, LoRA of rank 16, fp32, one optimizer step; figures are
medians. Peak memory is of an update in a separate process: the tree and padded rows, both in passes of at
most `--budget` tokens. The logits are of each response token in both, so that no tree saves any of their time; it is
measured by itself. The time can fall by at most the ratio of the operations in matrix products, counted by
`operations`.

Without `--model`: the shape of Qwen3-0.6B (width 1,024, 16 heads of 128, 8 for keys, inner width 3,072) with
`--layers` of its 28, and that share of its 151,936 words, so that the output embedding costs its part. The last line is
JSON, each ratio the other way over the tree.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, Qwen3Config, Qwen3ForCausalLM

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.batching import micro_batches, pass_tokens, tokens_of
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.logprobs import token_logprobs
from cotune.trainer.learner.token_tree import attention_blocks, token_tree
from tests.trainer.learner.forced import ForcedSettings

LAYERS, ALL_LAYERS, WORDS = 4, 28, 151_936


def build(folder: Path, layers: int = LAYERS) -> None:
    """Save the model that is measured without `--model`."""
    config = Qwen3Config(
        vocab_size=WORDS * layers // ALL_LAYERS,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def episode(args: argparse.Namespace, vocabulary: int) -> list[TrainRow]:
    """The rows of one role in one episode under a tree plan."""
    chance = np.random.default_rng(0)

    def ids(count: int) -> tuple[int, ...]:
        return tuple(chance.integers(3, vocabulary, count).tolist())

    rows: list[TrainRow] = []
    prompt = ids(args.prompt)
    for turn in range(args.turns):
        answers = [ids(args.answer) for _ in range(args.k)]
        for number, answer in enumerate(answers):
            row = TrainRow(
                id=f"{turn}.{number}",
                role="a",
                prompt_ids=prompt,
                response_ids=answer,
                logprobs=(-10.0,) * len(answer),
                advantage=1.0 if number % 2 else -1.0,
            )
            rows.append(row)
        prompt = (*prompt, *answers[0], *ids(args.observation))
    return rows


def open_learner(folder: str, tree: bool, budget: int, rows: int, threads: int) -> LocalLearner:
    settings = ForcedSettings(
        lr=1e-4,
        mini_batch=rows,
        device="cpu",
        dtype="float32",
        threads=threads,
        micro_batch_tokens=budget,
        shared_prompts=tree,
    )
    return LocalLearner.open(folder, policies_for("lora", ["a"], LoraSpec(rank=16)), settings, recipe("at_grpo").loss)


def operations(learner: LocalLearner, rows: list[TrainRow], budget: int | None) -> dict[str, float]:
    """Floating-point operations in the matrix products of an update, by part; `budget`: in passes over the tree of so
    many tokens, None for a sequence per call.

    Of a token: 2 a weight in the forward pass, 2 for the gradient of its input, and 2 for the weight's if it
    is trained. Of a pair of query and key: 4 a number of a head's, and 10 in the backward pass, which has the scores
    again. Of a response token: the logits, and their gradient.
    """
    network = learner.policies["a"].network
    model, head = network.config, network.get_output_embeddings().weight
    weights = [p for name, p in network.named_parameters() if p.dim() == 2 and "embed" not in name and p is not head]
    of_token = sum(p.numel() * (6 if p.requires_grad else 4) for p in weights)
    width = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    of_pair = 14 * model.num_hidden_layers * model.num_attention_heads * width
    if budget is None:
        lengths = [len(tokens_of(row)) for row in rows]
        tokens, pairs = sum(lengths), sum(length * (length + 1) / 2 for length in lengths)
    else:
        passes = micro_batches(rows, range(len(rows)), budget, shared=True)
        trees = [token_tree([tokens_of(rows[i]) for i in part]) for part in passes]
        tokens = sum(len(tree.tokens) for tree in trees)
        pairs = sum(
            len(block.queries) * block.queries.shape[1] * block.keys.shape[1] / (2 if block.spans is None else 1)
            for tree in trees
            for block in attention_blocks(tree)
        )
    logits = 4 * head.numel() * sum(len(row.response_ids) for row in rows)
    return {"layers": of_token * tokens, "attention": of_pair * pairs, "logits": logits}


def peak(folder: str, args: argparse.Namespace) -> float:
    """Bytes that an update adds to this process at its peak."""
    rows = episode(args, AutoConfig.from_pretrained(folder).vocab_size)
    learner = open_learner(folder, args.one == "tree", args.budget, len(rows), args.threads)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    learner.update("a", rows)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024


def seconds_of_logits(model: AutoConfig, rows: list[TrainRow]) -> float:
    """CPU seconds for the log-probabilities of all response tokens and their gradient, after the hidden states."""
    targets = torch.tensor([token for row in rows for token in row.response_ids])
    hidden = torch.randn(len(targets), model.hidden_size, requires_grad=True)
    weight, temperature = torch.randn(model.vocab_size, model.hidden_size), torch.ones(len(targets))
    busy = time.process_time()
    logprobs, _ = token_logprobs(hidden, weight, None, targets, temperature)
    logprobs.sum().backward()
    return time.process_time() - busy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a folder, an id, or a file in GGUF form")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model that is measured without --model")
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--k", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the first prompt")
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--observation", type=int, default=256, help="tokens that a turn adds to the answer")
    parser.add_argument("--budget", type=int, default=2560, help="tokens of a pass of the tree")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", choices=["tree", "rows"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        if args.model:
            folder = str(locate_model(args.model))
        else:
            folder = name
            build(Path(name), args.layers)
        if args.one:
            print(peak(folder, args))
            return
        report(folder, args)


def report(folder: str, args: argparse.Namespace) -> None:
    model = AutoConfig.from_pretrained(folder)
    rows = episode(args, model.vocab_size)
    alone, distinct = sum(len(tokens_of(row)) for row in rows), pass_tokens(rows, shared=True)
    print(f"{args.turns} turns, K = {args.k}: {alone:,} tokens one by one, {distinct:,} distinct", flush=True)
    memory = {
        one: float(
            subprocess.run(
                [sys.executable, "-m", "benchmarks.tree", *sys.argv[1:], "--model", folder, "--one", one],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.splitlines()[-1]
        )
        for one in ("rows", "tree")
    }
    # A budget of one token: each row goes alone.
    learners = {
        "rows": open_learner(folder, False, 1, len(rows), args.threads),
        "tree": open_learner(folder, True, args.budget, len(rows), args.threads),
    }
    wall: dict[str, list[float]] = {one: [] for one in learners}
    cpu: dict[str, list[float]] = {one: [] for one in learners}
    computed = {}
    for _ in range(args.rounds + 1):
        for one, learner in learners.items():
            began, busy = time.perf_counter(), time.process_time()
            computed[one] = learner.update("a", rows)["computed_tokens"]
            wall[one].append(time.perf_counter() - began)
            cpu[one].append(time.process_time() - busy)
    print(f"{'':6} {'tokens computed':>16} {'seconds':>8} {'CPU seconds':>12} {'peak, GB':>9}")
    for one in learners:
        seconds, busy = statistics.median(wall[one][1:]), statistics.median(cpu[one][1:])
        print(f"{one:6} {computed[one]:16,.0f} {seconds:8.2f} {busy:12.2f} {memory[one] / 1e9:9.2f}")
    print(f"{seconds_of_logits(model, rows):.2f} CPU seconds of either go to the logits.")
    made = {one: operations(learners[one], rows, args.budget if one == "tree" else None) for one in learners}
    for part in made["tree"]:
        print(f"{part:10} {made['rows'][part] / 1e9:8,.0f} and {made['tree'][part] / 1e9:8,.0f} billion operations")
    result = {
        "token_ratio": round(computed["rows"] / computed["tree"], 2),
        "operation_ratio": round(sum(made["rows"].values()) / sum(made["tree"].values()), 2),
        "time_ratio": round(statistics.median(wall["rows"][1:]) / statistics.median(wall["tree"][1:]), 2),
        "cpu_ratio": round(statistics.median(cpu["rows"][1:]) / statistics.median(cpu["tree"][1:]), 2),
        "memory_ratio": round(memory["rows"] / memory["tree"], 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
