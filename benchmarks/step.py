"""One whole GRPO step, rollout and update, against TRL's GRPOTrainer: same model, prompts, K, lengths and threads.

    python -m benchmarks.step
    python -m benchmarks.step --model SmolLM2-135M-Instruct.Q4_1.gguf --prompts 2 --prompt 128 --rounds 1 --warm 0

A Qwen3 of about 0.8M parameters with random weights (hidden 128, 2 layers, vocabulary 2,048), fp32, all weights
trained with one AdamW step of all rows: 32 prompts of 64 tokens, K = 8 candidates of 32 new tokens, reward computed
from the token ids. With --model a pretrained one instead, with a LoRA of rank 16 on all linear layers in both.

cotune's step samples over the in-process sampler (a process of its own), updates with the local learner and publishes
the new weights to the sampler. TRL's step is what its trainer does between `on_step_begin` and `on_step_end`. Both
start from the same weights and update on the same rows, those that TRL has sampled: loss and norm of the first gradient
are shown beside each other. Steps alternate; figures are medians. CPU seconds are of all processes.

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

import msgspec
import numpy as np
import psutil
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3Config,
    Qwen3ForCausalLM,
    TrainerCallback,
)
from trl import GRPOConfig, GRPOTrainer

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.folder import locate_model
from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.policies import LoraSpec, policies_for
from cotune.recording.records import PolicyRef
from cotune.sampling.protocol import SamplingParams
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.local import LocalLearner

LR = 1e-4
LORA = LoraSpec(rank=16)
LOSS = msgspec.structs.replace(recipe("at_grpo").loss, tis_cap=None)
"""Without the correction for the sampler's log-probabilities, which TRL does not keep here."""


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
    marks = ["<end>", "<pad>", "<unknown>"]
    known = [*marks, *(f"w{i}" for i in range(len(marks), vocabulary))]
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token=marks[2]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=marks[0], pad_token=marks[1], unk_token=marks[2]
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def reward(token_ids: Any) -> float:
    """Share of even token ids."""
    return float(np.mean(np.asarray(token_ids) % 2 == 0))


class Clock:
    """Seconds by phase, on the wall and of CPU in this process and in the one with the id `process`."""

    def __init__(self, process: int | None = None) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.cpu: dict[str, list[float]] = defaultdict(list)
        self._process = process

    def now(self) -> tuple[float, float]:
        used = time.process_time()
        if self._process is not None:
            other = psutil.Process(self._process).cpu_times()
            used += other.user + other.system
        return time.perf_counter(), used

    def add(self, phase: str, began: tuple[float, float]) -> tuple[float, float]:
        """Count the time since `began`; returns the present one."""
        now = self.now()
        self.seconds[phase].append(now[0] - began[0])
        self.cpu[phase].append(now[1] - began[1])
        return now


class OurStep:
    """Rollout, update and publish with cotune."""

    def __init__(self, folder: Path, k: int, new: int, threads: int, *, rows: int, lora: bool) -> None:
        self.k, self.new = k, new
        self.loop = asyncio.new_event_loop()
        opening = TransformersSampler.open(str(folder), device="cpu", threads=threads, end_token_ids=())
        self.sampler = self.loop.run_until_complete(opening)
        assert self.sampler._host is not None
        self.clock = Clock(self.sampler._host._process.pid)
        self.lora = LORA if lora else None
        policies = policies_for("lora" if lora else "full", ["agent"], LORA)
        settings = LearnerSettings(lr=LR, mini_batch=rows, device="cpu", threads=threads)
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


def rows_of(batch: dict[str, Any]) -> list[TrainRow]:
    """The rows that TRL has sampled."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    rows = []
    for number, (prompt, asked, answer, said, advantage) in enumerate(zip(*(batch[n] for n in names), strict=True)):
        response = tuple(answer[said.bool()].tolist())
        rows.append(
            TrainRow(
                id=str(number),
                role="agent",
                prompt_ids=tuple(prompt[asked.bool()].tolist()),
                response_ids=response,
                logprobs=(-1.0,) * len(response),  # of the sampler; left out of the loss below
                advantage=float(advantage),
            )
        )
    return rows


class Alternate(TrainerCallback):
    """Times TRL's steps and runs one of ours after each, on its rows."""

    def __init__(self, ours: OurStep, clock: Clock) -> None:
        self.ours, self.clock = ours, clock
        self.rows: list[TrainRow] = []
        self.first: dict[str, float] = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.began = self.clock.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.add("whole step", self.began)
        for times in (self.clock.seconds, self.clock.cpu):
            times["update"].append(times["whole step"][-1] - times["rollout"][-1])
        self.ours(self.rows)

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.first = self.first or dict(logs)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long it generates and scores, and the rows that come of it."""

    alternate: Alternate

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        began = self.alternate.clock.now()
        found = super()._generate_and_score_completions(*args, **kwargs)
        self.alternate.clock.add("rollout", began)
        self.alternate.rows = rows_of(found)
        return found


def trl_trainer(folder: Path, out: Path, texts: list[str], args: argparse.Namespace, tokenizer: Any) -> Any:
    rows = len(texts) * args.k
    config = GRPOConfig(
        output_dir=str(out),
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
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    adapter = LoraConfig(r=LORA.rank, lora_alpha=LORA.alpha, target_modules=list(LORA.targets), task_type="CAUSAL_LM")
    return TimedTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=lambda completion_ids, **_: [reward(ids) for ids in completion_ids],
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=tokenizer,
        peft_config=adapter if args.model else None,
    )


def same_start(trainer: Any, ours: OurStep) -> None:
    """Give our learner the weights that TRL starts from."""
    model = trainer.model
    state = get_peft_model_state_dict(model) if ours.lora else dict(model.named_parameters())
    ours.learner.adopt("agent", {name: tensor.detach().numpy() for name, tensor in state.items()})


def make_texts(tokenizer: Any, prompts: int, words: int) -> list[str]:
    """Prompts of so many words that are a token each."""
    vocabulary = sorted(tokenizer.get_vocab())
    after_space = [token[1:] for token in vocabulary if token.startswith(("Ġ", "▁"))] or vocabulary
    known = [word for word in after_space if word.isascii() and word.isalnum()]
    return [" ".join(row) for row in np.random.default_rng(0).choice(known, (prompts, words))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder, GGUF file or id of a model to train a LoRA of (default: a small one)")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt (with --model: words)")
    parser.add_argument("--k", type=int, default=8)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--trl-batch", type=int, default=64, help="rows per forward pass of TRL; divides all rows")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as name:
        out = Path(name)
        if args.model:
            folder = Path(str(locate_model(args.model)))
            tokenizer = AutoTokenizer.from_pretrained(folder)
        else:
            folder, tokenizer = out, build(out, args.vocabulary)
        texts = make_texts(tokenizer, args.prompts, args.prompt)
        rows = args.prompts * args.k
        ours = OurStep(folder, args.k, args.new, args.threads, rows=rows, lora=bool(args.model))
        trainer = trl_trainer(folder, out / "trl", texts, args, tokenizer)
        trainer.alternate = Alternate(ours, Clock())
        trainer.add_callback(trainer.alternate)
        trainer.remove_callback(PrinterCallback)
        same_start(trainer, ours)
        torch.set_num_threads(args.threads)
        trainer.train()
        ours.close()
        parameters = sum(p.numel() for p in trainer.model.parameters())
    report(args, parameters, ours, trainer.alternate)


def report(args: argparse.Namespace, parameters: int, ours: OurStep, theirs: Alternate) -> None:
    def median(times: list[float]) -> float:
        return statistics.median(times[args.warm :])

    lengths = sorted({len(row.prompt_ids) for row in theirs.rows})
    print(
        f"{parameters:,} parameters, {args.prompts} prompts of {lengths[0]} to {lengths[-1]} tokens, K = {args.k}, "
        f"{args.new} new tokens, {args.threads} thread(s), {args.rounds} steps each after {args.warm} warm ones"
    )
    print(f"tokens of an update: {ours.metrics['total_tokens']:.0f}, computed {ours.metrics['computed_tokens']:.0f}")
    for figure in ("loss", "grad_norm"):
        print(f"first {figure}: cotune {ours.first[figure]:.6g}, TRL {float(theirs.first[figure]):.6g}")
    print(f"{'medians':12} {'cotune, s':>9} {'TRL, s':>9} {'ratio':>6} {'of CPU':>9} {'TRL':>9} {'ratio':>6}")
    ratios = {}
    for phase in ("rollout", "update", "publish", "whole step"):
        cells = []
        for name in ("seconds", "cpu"):
            mine, other = (getattr(side.clock, name).get(phase) for side in (ours, theirs))
            ratios[f"{name} {phase}"] = round(median(other) / median(mine), 2) if other else None
            right = f"{median(other):9.3f} {median(other) / median(mine):6.2f}" if other else f"{'-':>9} {'-':>6}"
            cells.append(f"{median(mine):9.3f} {right}")
        print(f"{phase:12} {' '.join(cells)}")
    seconds = ours.clock.seconds
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
