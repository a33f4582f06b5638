"""One whole GRPO step, rollout and update, against TRL's GRPOTrainer: same model, prompts, K, lengths and threads.

    python -m benchmarks.step
    python -m benchmarks.step --model SmolLM2-135M-Instruct.Q4_1.gguf --prompts 2 --prompt 128 --rounds 1 --warm 0

A Qwen3 of about 0.8M parameters with random weights (hidden 128, 2 layers, vocabulary 2,048), fp32, all weights
trained with one AdamW step of all rows: 32 prompts of 64 tokens, K = 8 candidates of 32 new tokens, reward computed
from the token ids. With --model a pretrained one instead, with a LoRA of rank 16 on all linear layers in both. With
--dtype bfloat16 both multiply in it: TRL under autocast, as its `bf16` does.

With --turns a prompt is an episode: it grows by an answer and --observation words a turn, and K candidates answer each
turn.

cotune's step samples over the in-process sampler (a process of its own), updates with the local learner and publishes
the new weights to the sampler. TRL's step is its trainer's work between `on_step_begin` and `on_step_end`, in a
process of its own too, as what one side asks of the memory allocator holds for a whole process. Both start from the
same weights and update on the same rows, those that TRL has sampled: loss and norm of the first gradient are shown
side by side. Steps alternate; figures are medians. CPU seconds are of all processes of a side.

Needs the `bench` extra. The last line is the result as JSON; `seconds_update` includes publishing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from benchmarks.clock import Clock
from benchmarks.small_model import small_qwen
from benchmarks.step_trl import LORA, LR, run_trl
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder.folder import locate_model
from cotune.integrations.models.transformers.sampler import TransformersSampler
from cotune.records.policies import policies_for
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.forced import ForcedSettings

LOSS = msgspec.structs.replace(recipe("at_grpo").loss, tis_cap=None)
"""Without the correction for the sampler's log-probabilities, which TRL does not keep here."""


def build(folder: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Save the model and a tokenizer with one word per id."""
    small_qwen(vocabulary, eos_token_id=0, pad_token_id=1).save_pretrained(folder)
    marks = ["<end>", "<pad>", "<unknown>"]
    vocabulary_words = [*marks, *(f"w{i}" for i in range(len(marks), vocabulary))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(vocabulary_words)}, unk_token=marks[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=marks[0], pad_token=marks[1], unk_token=marks[2]
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


class OurStep:
    """Rollout, update and publish with cotune."""

    def __init__(self, folder: Path, args: argparse.Namespace, rows: int) -> None:
        self.k, self.new = args.k, args.new
        self.loop = asyncio.new_event_loop()
        opening = TransformersSampler.open(
            str(folder), device="cpu", dtype=args.dtype, threads=args.threads, end_token_ids=()
        )
        self.sampler = self.loop.run_until_complete(opening)
        assert self.sampler._host is not None
        self.clock = Clock(self.sampler._host._process.pid)
        self.lora = LORA if args.model else None
        policies = policies_for("lora" if args.model else "full", ["agent"], LORA)
        settings = ForcedSettings(lr=LR, mini_batch=rows, device="cpu", threads=args.threads, dtype=args.dtype)
        self.learner = LocalLearner.open(str(folder), policies, settings, LOSS)
        self.version = PolicyRef("agent", 0)
        self.first: dict[str, float] = {}

    def __call__(self, rows: list[TrainRow]) -> None:
        """A step: sample for the prompts of `rows`, and update on them."""
        prompts = list(dict.fromkeys(row.prompt_ids for row in rows))
        began = at = self.clock.now()
        self.loop.run_until_complete(self._rollout(prompts))
        at = self.clock.add("rollout", at)
        self.metrics = dict(self.learner.update("agent", rows))
        self.first = self.first or self.metrics
        at = self.clock.add("update", at)
        self.loop.run_until_complete(self._publish())
        self.clock.add("publish", at)
        self.clock.add("whole step", began)

    def close(self) -> None:
        self.loop.run_until_complete(self.sampler.aclose())
        self.loop.close()

    async def _rollout(self, prompts: list[tuple[int, ...]]) -> list[list[Any]]:
        params = SamplingParams(max_tokens=self.new)
        return await asyncio.gather(*(self.sampler.sample(prompt, self.k, params, self.version) for prompt in prompts))

    async def _publish(self) -> None:
        old, self.version = self.version, PolicyRef("agent", self.version.version + 1)
        await self.sampler.publish(self.version, self.learner.weights("agent"), self.lora)
        if old.version:
            await self.sampler.retire(old)


def make_texts(tokenizer: Any, args: argparse.Namespace) -> list[str]:
    """Prompts of words that are a token each; an episode's prompts begin with each other."""
    vocabulary = sorted(tokenizer.get_vocab())
    after_space = [token[1:] for token in vocabulary if token.startswith(("Ġ", "▁"))] or vocabulary
    known = [word for word in after_space if word.isascii() and word.isalnum()]
    lengths = [args.prompt + turn * (args.new + args.observation) for turn in range(args.turns)]
    episodes = np.random.default_rng(0).choice(known, (args.prompts, lengths[-1]))
    return [" ".join(words[:length]) for words in episodes for length in lengths]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id of a model to train a LoRA of (default: a small one)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (with --model: words)")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--observation", type=int, default=64, help="words between an answer and the next turn's")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of products")
    parser.add_argument("--trl-batch", type=int, default=64, help="rows per forward pass of TRL; divides all rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(str(locate_model(args.model))) if args.model else Path(name)
        tokenizer = AutoTokenizer.from_pretrained(folder) if args.model else build(folder, args.vocabulary)
        texts = make_texts(tokenizer, args)
        ours = OurStep(folder, args, len(texts) * args.k)
        processes = multiprocessing.get_context("spawn")
        pipe, theirs = processes.Pipe()
        trl = processes.Process(target=run_trl, args=(theirs, folder, texts, args), daemon=True)
        trl.start()
        theirs.close()
        ours.learner.adopt("agent", pipe.recv())
        for _ in range(args.warm + args.rounds):
            pipe.send("next")
            rows = pipe.recv()
            ours(rows)
        report(args, rows, ours, *pipe.recv())
        trl.join()
        ours.close()


def report(
    args: argparse.Namespace,
    rows: list[TrainRow],
    ours: OurStep,
    trl_seconds: Mapping[str, list[float]],
    trl_cpu: Mapping[str, list[float]],
    trl_first: Mapping[str, float],
) -> None:
    def median(times: list[float]) -> float:
        return statistics.median(times[args.warm :])

    lengths = sorted({len(row.prompt_ids) for row in rows})
    print(
        f"{args.prompts * args.turns} prompts of {lengths[0]} to {lengths[-1]} tokens, K = {args.k}, {args.new} new "
        f"tokens, {args.dtype}, {args.threads} thread(s), {args.rounds} steps each after {args.warm} warm ones"
    )
    print(f"tokens of an update: {ours.metrics['total_tokens']:.0f}, computed {ours.metrics['computed_tokens']:.0f}")
    for figure in ("loss", "grad_norm"):
        print(f"first {figure}: cotune {ours.first[figure]:.6g}, TRL {float(trl_first[figure]):.6g}")
    print(f"{'medians':12} {'cotune, s':>9} {'TRL, s':>9} {'ratio':>6} {'of CPU':>9} {'TRL':>9} {'ratio':>6}")
    ratios, seconds = {}, ours.clock.seconds
    for phase in ("rollout", "update", "publish", "whole step"):
        cells = []
        for name, mine, other in (
            ("seconds", seconds[phase], trl_seconds.get(phase)),
            ("cpu", ours.clock.cpu[phase], trl_cpu.get(phase)),
        ):
            ratios[f"{name} {phase}"] = round(median(other) / median(mine), 2) if other else None
            right = f"{median(other):9.3f} {median(other) / median(mine):6.2f}" if other else f"{'-':>9} {'-':>6}"
            cells.append(f"{median(mine):9.3f} {right}")
        print(f"{phase:12} {' '.join(cells)}")
    result = {
        "ratio_vs_trl": ratios["seconds whole step"],
        "ratio_update": ratios["seconds update"],
        "cpu_ratio_vs_trl": ratios["cpu whole step"],
        "cpu_ratio_update": ratios["cpu update"],
        "seconds_rollout": round(median(seconds["rollout"]), 3),
        "seconds_update": round(median(seconds["update"]) + median(seconds["publish"]), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
