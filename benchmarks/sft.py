"""Supervised steps against TRL's SFTTrainer, and preference steps against its DPOTrainer: same model, same rows.

A Qwen3 of about 0.8M parameters with random weights (hidden 128, 2 layers, vocabulary 2,048), fp32, all weights trained
with one AdamW step of all rows, one thread. Rows are token ids: prompts of 32 to 128 tokens, answers of 8 to 64. Of
each trainer the loss and the gradient of the first step are compared (the gradient as the largest difference of an
entry, in parts of its norm), and the seconds of a step: cotune's is `Learner.update`, TRL's what its trainer does
between `on_step_begin` and `on_step_end`. Both are warm; steps alternate; figures are medians. For dpo both start from
weights that have moved away from the reference, so that the margins are not zero.

Needs the `bench` extra. The last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Qwen3ForCausalLM, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from benchmarks.step import build
from cotune.algorithms.from_records import FROM_RECORDS
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.records.objectives import Likelihood, Objective, PreferenceLearner
from tests.trainer.learner.forced import ForcedSettings

LR, BETA, END = 1e-4, 0.1, 0


def make_rows(count: int, *, pairs: bool) -> list[TrainRow]:
    """Rows with a prompt each, or two to a prompt; answers end with the end token, as TRL wants it.

    Ids are of words that do not begin like a special token (w0, w1, w2), which TRL's texts would be split at.
    """
    chance = np.random.default_rng(0)
    rows = []
    for number in range(count):
        if not pairs or number % 2 == 0:
            prompt = tuple(chance.integers(300, 1000, chance.integers(32, 129)).tolist())
        answer = (*chance.integers(300, 1000, chance.integers(7, 64)).tolist(), END)
        zeros = (0.0,) * len(answer)
        rows.append(TrainRow(id=str(number), role="agent", prompt_ids=prompt, response_ids=answer, logprobs=zeros,
                             advantage=1.0))  # fmt: skip
    return rows


class Ours:
    """cotune's learner; seconds and the loss of each step."""

    def __init__(self, folder: Path, rows: Sequence[TrainRow], recipe: str, start: Path, threads: int) -> None:
        settings = ForcedSettings(lr=LR, mini_batch=len(rows), device="cpu", threads=threads, grad_clip=0.0)
        policies = policies_for("full", ["agent"], LoraSpec())
        learner = LocalLearner.open(str(folder), policies, settings, FROM_RECORDS[recipe])
        self.learner: Objective = Likelihood(learner)
        if recipe == "dpo":
            self.learner = PreferenceLearner(learner, pairs=len(rows) // 2)
        self.learner.start(lambda: {"agent": rows}, folder / "start.json")
        moved = Qwen3ForCausalLM.from_pretrained(start)
        self.learner.adopt("agent", {name: p.detach().numpy() for name, p in moved.named_parameters()})
        self.rows = rows
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def __call__(self) -> None:
        started = time.perf_counter()
        figures = self.learner.update("agent", self.rows)
        self.seconds.append(time.perf_counter() - started)
        self.losses.append(figures["loss"])


class Alternate(TrainerCallback):
    """Times TRL's steps, runs one of ours after each, and keeps the loss that TRL logs."""

    def __init__(self, ours: Ours) -> None:
        self.ours = ours
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)
        self.ours()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **kwargs: Any) -> None:
        if "loss" in logs:
            self.losses.append(logs["loss"])


def trl_trainer(
    folder: Path, rows: Sequence[TrainRow], recipe: str, start: Path, args: argparse.Namespace, extra: dict[str, Any]
) -> Any:
    common = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": args.trl_batch,
        "gradient_accumulation_steps": len(rows) // (2 if recipe == "dpo" else 1) // args.trl_batch,
        "max_steps": args.warm + args.rounds,
        "learning_rate": LR,
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "max_grad_norm": 0.0,
        "use_cpu": True,
        "bf16": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "max_length": None,
    }
    model = Qwen3ForCausalLM.from_pretrained(start)
    if recipe == "sft":
        data = [
            {"input_ids": [*r.prompt_ids, *r.response_ids],
             "completion_mask": [0] * len(r.prompt_ids) + [1] * len(r.response_ids)}
            for r in rows
        ]  # fmt: skip
        config = SFTConfig(**common, completion_only_loss=True)
        return SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(data), **extra)
    texts = [
        {"prompt": _text(better.prompt_ids), "chosen": " " + _text(better.response_ids[:-1]),
         "rejected": " " + _text(worse.response_ids[:-1])}
        for better, worse in zip(rows[::2], rows[1::2], strict=True)
    ]  # fmt: skip
    config = DPOConfig(**common, beta=BETA, disable_dropout=False)
    reference = Qwen3ForCausalLM.from_pretrained(folder)
    return DPOTrainer(model=model, ref_model=reference, args=config, train_dataset=Dataset.from_list(texts), **extra)


def _text(ids: Sequence[int]) -> str:
    return " ".join(f"w{i}" for i in ids)


class Gradients:
    """The gradients of the first optimizer step of each learner, in one order: both start from the same weights."""

    def __init__(self) -> None:
        self.found: dict[int, torch.Tensor] = {}
        self._hook = register_optimizer_step_pre_hook(self._note)

    def _note(self, optimizer: Any, *_: Any) -> None:
        if id(optimizer) not in self.found:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            parameters.sort(key=lambda p: (p.numel(), float(p.detach().flatten()[0])))
            self.found[id(optimizer)] = torch.cat([p.grad.flatten() for p in parameters])

    def difference(self) -> float:
        """The largest difference of an entry, in parts of the gradient's norm."""
        self._hook.remove()
        first, other = self.found.values()
        return float((first - other).abs().max() / first.norm())


def compare(recipe: str, args: argparse.Namespace) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder, start = Path(name) / "base", Path(name) / "start"
        tokenizer = build(folder, 2048)
        model = Qwen3ForCausalLM.from_pretrained(folder)
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        model.save_pretrained(start)
        rows = make_rows(args.rows, pairs=recipe == "dpo")
        gradients = Gradients()
        ours = Ours(folder, rows, recipe, start, args.threads)
        callback = Alternate(ours)
        extra = {"processing_class": tokenizer, "callbacks": [callback]}
        trainer = trl_trainer(folder, rows, recipe, start, args, extra)
        torch.set_num_threads(args.threads)
        trainer.train()
    own_seconds, trl_seconds = (statistics.median(times[args.warm :]) for times in (ours.seconds, callback.seconds))
    return {
        "loss": ours.losses[0],
        "loss_trl": callback.losses[0],
        "gradient_difference": gradients.difference(),
        "seconds": round(own_seconds, 3),
        "seconds_trl": round(trl_seconds, 3),
        "ratio_vs_trl": round(trl_seconds / own_seconds, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows of a step; half as many pairs")
    parser.add_argument("--trl-batch", type=int, default=32, help="rows (pairs) per forward pass of TRL")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    result = {recipe: compare(recipe, args) for recipe in ("sft", "dpo")}
    print(f"{'':8} {'loss':>10} {'TRL':>10} {'gradient':>10} {'seconds':>8} {'TRL':>8} {'ratio':>6}")
    for recipe, figures in result.items():
        print(
            f"{recipe:8} {figures['loss']:10.6f} {figures['loss_trl']:10.6f} {figures['gradient_difference']:10.2e}"
            f" {figures['seconds']:8.3f} {figures['seconds_trl']:8.3f} {figures['ratio_vs_trl']:6.2f}"
        )
    print(json.dumps(result))


if __name__ == "__main__":
    main()
