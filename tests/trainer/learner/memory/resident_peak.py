"""An update of long rows that share nothing, in a process of its own: memory that it took, and what was planned.

    python -m tests.trainer.learner.memory.resident_peak FOLDER CHECKPOINTED KEPT

Builds a small model in FOLDER. Eight rows of 2,048 tokens are two passes of 8,192. KEPT: the pages of tensors are kept
during the update, as for a large model. The last line is JSON, in bytes.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import Qwen3ForCausalLM

from benchmarks.cpu_peak import make_rows
from benchmarks.peak_memory import peak_memory
from benchmarks.qwen3 import Shape, qwen3_config
from cotune.algorithms.recipes import LossSpec
from cotune.integrations.models.memory import process_memory
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory import pass_size
from tests.trainer.learner.forced import ForcedSettings

ROWS, LENGTH, PASS = 8, 2048, 8192
VOCABULARY = 1024


def main(folder: str, *, checkpointed: bool, kept: bool) -> None:
    if kept:
        pass_size.LARGE = 0
    torch.manual_seed(0)
    shape = Shape(128, 512, 3, 4, 2, vocabulary=VOCABULARY, head_width=32)
    Qwen3ForCausalLM(qwen3_config(shape)).save_pretrained(folder)
    settings = ForcedSettings(
        device="cpu", dtype="float32", micro_batch_tokens=PASS, activation_checkpointing=checkpointed, threads=1
    )
    learner = LocalLearner.open(folder, policies_for("lora", ["a"], LoraSpec(rank=4)), settings, LossSpec())
    memory = pass_size.pass_memory(learner._policies["a"])
    planned, gaps = memory.peak(PASS, checkpointed=checkpointed), memory.gaps(PASS, checkpointed=checkpointed)
    rows = make_rows(ROWS, LENGTH, VOCABULARY)
    before = process_memory()
    figures = learner.update("a", rows)
    measured = {"planned": planned, "gaps": gaps, "taken": peak_memory() - before, "tokens": figures["computed_tokens"]}
    sys.stdout.write(json.dumps(measured) + "\n")


if __name__ == "__main__":
    main(sys.argv[1], checkpointed=sys.argv[2] == "True", kept=sys.argv[3] == "True")
