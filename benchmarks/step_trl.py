"""The other side of `benchmarks.step`: TRL's GRPOTrainer in a process of its own."""

from __future__ import annotations

import argparse
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model_state_dict
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks.clock import Clock
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import LoraSpec

LR = 1e-4
LORA = LoraSpec(rank=16)


def reward(token_ids: Any) -> float:
    """Share of even token ids."""
    return float(np.mean(np.asarray(token_ids) % 2 == 0))


def rows_of(batch: dict[str, Any]) -> list[TrainRow]:
    """The rows that TRL has sampled."""
    names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
    rows = []
    for number, (prompt, prompt_mask, answer, answer_mask, advantage) in enumerate(
        zip(*(batch[n] for n in names), strict=True)
    ):
        response = tuple(answer[answer_mask.bool()].tolist())
        rows.append(
            TrainRow(
                id=str(number),
                role="agent",
                prompt_ids=tuple(prompt[prompt_mask.bool()].tolist()),
                response_ids=response,
                logprobs=(-1.0,) * len(response),  # of the sampler; left out of the loss below
                advantage=float(advantage),
            )
        )
    return rows


class InTurn(TrainerCallback):
    """Times TRL's steps: each begins when the other process asks for it and ends by telling it the rows and times."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.clock = pipe, Clock()
        self.rows: list[TrainRow] = []
        self.first: dict[str, float] = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.pipe.recv()
        self.began = self.clock.now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.clock.add("whole step", self.began)
        for times in (self.clock.seconds, self.clock.cpu):
            times["update"].append(times["whole step"][-1] - times["rollout"][-1])
        self.pipe.send(self.rows)

    def on_log(self, *args: Any, logs: dict[str, float], **kwargs: Any) -> None:
        self.first = self.first or dict(logs)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes how long it generates and scores, and the rows that come of it."""

    in_turn: InTurn

    def _generate_and_score_completions(self, *args: Any, **kwargs: Any) -> Any:
        began = self.in_turn.clock.now()
        batch = super()._generate_and_score_completions(*args, **kwargs)
        self.in_turn.clock.add("rollout", began)
        self.in_turn.rows = rows_of(batch)
        return batch


def run_trl(pipe: Connection, folder: Path, texts: list[str], args: argparse.Namespace) -> None:
    """TRL's process: sends the weights that it starts from, makes its steps, sends its times and first figures."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as out:
        trainer = trl_trainer(folder, Path(out), texts, args)
        trainer.in_turn = InTurn(pipe)
        trainer.add_callback(trainer.in_turn)
        trainer.remove_callback(PrinterCallback)
        model = trainer.model
        state = get_peft_model_state_dict(model) if args.model else dict(model.named_parameters())
        pipe.send({name: tensor.detach().numpy() for name, tensor in state.items()})
        torch.set_num_threads(args.threads)
        trainer.train()
        clock = trainer.in_turn.clock
        pipe.send((dict(clock.seconds), dict(clock.cpu), trainer.in_turn.first))


def trl_trainer(folder: Path, out: Path, texts: list[str], args: argparse.Namespace) -> TimedTrainer:
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
        bf16=args.dtype == "bfloat16",
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
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=adapter if args.model else None,
    )
