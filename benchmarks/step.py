"""One whole GRPO step, rollout and update, against TRL's GRPOTrainer: same model, prompts, K, lengths and threads.

A Qwen3 of about 0.8M parameters with random weights (hidden 128, 2 layers, vocabulary 2,048), fp32, all weights
trained with one AdamW step of all rows: 32 prompts of 64 tokens, K = 8 candidates of 32 new tokens, reward computed
from the token ids. cotune's step samples over the in-process sampler (a process of its own), computes advantages,
updates with the local learner and publishes the new weights to the sampler. TRL's step is what its trainer does
between `on_step_begin` and `on_step_end`. Both are warm; steps alternate; figures are medians.

Needs the `bench` extra. The last line is the result as JSON; `seconds_update` includes publishing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.policies import LoraSpec, policies_for
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.local import LocalLearner

PROMPT, LR = 64, 1e-4


def build(folder: Path, vocabulary: int) -> PreTrainedTokenizerFast:
    """Save the model and a tokenizer with one word per id."""
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
        eos_token_id=0,
        pad_token_id=1,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocabulary)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0", pad_token="w1", unk_token="w2")
    tokenizer.save_pretrained(folder)
    return tokenizer


def reward(token_ids: Any) -> float:
    """Share of even token ids."""
    return float(np.mean(np.asarray(token_ids) % 2 == 0))


class OurStep:
    """Rollout, advantages, update and publish with cotune; seconds by phase."""

    def __init__(self, folder: Path, prompts: list[list[int]], k: int, new: int, threads: int) -> None:
        self.prompts, self.k, self.new = prompts, k, new
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.loop = asyncio.new_event_loop()
        opening = TransformersSampler.open(str(folder), device="cpu", threads=threads, end_token_ids=())
        self.sampler = self.loop.run_until_complete(opening)
        policies = policies_for("full", ["agent"], LoraSpec())
        settings = LearnerSettings(lr=LR, mini_batch=len(prompts) * k, device="cpu", threads=threads)
        self.learner = LocalLearner.open(str(folder), policies, settings, recipe("at_grpo").loss)
        self.version = PolicyRef("agent", 0)

    def __call__(self) -> None:
        started = time.perf_counter()
        groups = self.loop.run_until_complete(self._rollout())
        sampled = time.perf_counter()
        self.metrics = self.learner.update("agent", self._rows(groups))
        updated = time.perf_counter()
        self.loop.run_until_complete(self._publish())
        ended = time.perf_counter()
        for phase, seconds in (
            ("rollout", sampled - started),
            ("update", updated - sampled),
            ("publish", ended - updated),
            ("whole step", ended - started),
        ):
            self.seconds[phase].append(seconds)

    def close(self) -> None:
        self.loop.run_until_complete(self.sampler.aclose())
        self.loop.close()

    async def _rollout(self) -> list[list[Any]]:
        params = SamplingParams(max_tokens=self.new)
        return await asyncio.gather(
            *(self.sampler.sample(prompt, self.k, params, self.version) for prompt in self.prompts)
        )

    def _rows(self, groups: list[list[Any]]) -> list[TrainRow]:
        rows = []
        for number, (prompt, completions) in enumerate(zip(self.prompts, groups, strict=True)):
            rewards = np.array([reward(c.token_ids) for c in completions])
            advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
            for index, completion in enumerate(completions):
                rows.append(
                    TrainRow(
                        id=f"{number}.{index}",
                        role="agent",
                        prompt_ids=tuple(prompt),
                        response_ids=completion.token_ids,
                        logprobs=completion.logprobs,
                        advantage=float(advantages[index]),
                    )
                )
        return rows

    async def _publish(self) -> None:
        old, self.version = self.version, PolicyRef("agent", self.version.version + 1)
        await self.sampler.publish(self.version, self.learner.weights("agent"))
        if old.version:
            await self.sampler.retire(old)


class Alternate(TrainerCallback):
    """Times TRL's steps and runs one of ours after each."""

    def __init__(self, ours: OurStep, seconds: dict[str, list[float]]) -> None:
        self.ours, self.seconds = ours, seconds

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds["whole step"].append(time.perf_counter() - self.started)
        self.ours()


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long it generates and scores."""

    seconds: dict[str, list[float]]

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        found = super()._generate_and_score_completions(*args, **kwargs)
        self.seconds["rollout"].append(time.perf_counter() - started)
        self.completion_tokens = int(found["completion_mask"].sum())
        return found


def trl_trainer(folder: Path, texts: list[str], args: argparse.Namespace, tokenizer: Any, callback: Any) -> Any:
    rows = len(texts) * args.k
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=args.trl_batch,
        gradient_accumulation_steps=rows // args.trl_batch,
        num_generations=args.k,
        max_completion_length=args.new,
        generation_kwargs={"min_new_tokens": args.new},
        max_steps=args.warm + args.rounds,
        learning_rate=LR,
        gradient_checkpointing=False,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    return TimedTrainer(
        model=Qwen3ForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        callbacks=[callback],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-batch", type=int, default=64, help="rows per forward pass of TRL; divides all rows")
    args = parser.parse_args()
    prompts = np.random.default_rng(0).integers(3, args.vocabulary, (args.prompts, PROMPT)).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer = build(folder, args.vocabulary)
        ours = OurStep(folder, prompts, args.k, args.new, args.threads)
        theirs: dict[str, list[float]] = defaultdict(list)
        texts = [" ".join(f"w{i}" for i in prompt) for prompt in prompts]
        trainer = trl_trainer(folder, texts, args, tokenizer, Alternate(ours, theirs))
        trainer.seconds = theirs
        torch.set_num_threads(args.threads)
        trainer.train()
        ours.close()
        parameters = sum(p.numel() for p in trainer.model.parameters())
    report(args, parameters, ours, theirs, trainer.completion_tokens)


def report(
    args: argparse.Namespace, parameters: int, ours: OurStep, theirs: dict[str, list[float]], tokens: int
) -> None:
    def median(times: list[float]) -> float:
        return statistics.median(times[args.warm :])

    theirs["update"] = [whole - part for whole, part in zip(theirs["whole step"], theirs["rollout"], strict=True)]
    expected = args.prompts * args.k * args.new
    print(
        f"{parameters:,} parameters, vocabulary {args.vocabulary:,}, {args.prompts} prompts of {PROMPT} tokens,"
        f" K = {args.k}, {args.new} new tokens, {args.threads} thread(s), {args.rounds} steps each after {args.warm}"
        " warm ones"
    )
    print(f"sampled tokens per step: cotune {ours.metrics['tokens']:.0f}, TRL {tokens}, of {expected}")
    print(f"{'seconds (median)':18} {'cotune':>8} {'TRL':>8} {'ratio':>6}")
    for phase in ("rollout", "update", "publish", "whole step"):
        mine, other = median(ours.seconds[phase]), theirs.get(phase)
        right = f"{median(other):8.3f} {median(other) / mine:6.2f}" if other else f"{'-':>8} {'-':>6}"
        print(f"{phase:18} {mine:8.3f} {right}")
    result = {
        "ratio_vs_trl": round(median(theirs["whole step"]) / median(ours.seconds["whole step"]), 2),
        "seconds_rollout": round(median(ours.seconds["rollout"]), 3),
        "seconds_update": round(median(ours.seconds["update"]) + median(ours.seconds["publish"]), 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
