"""Run folders with a checkpoint, made without training: their weights are random, so all policies differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.records.policies import LoraSpec, Policies, policies_for
from cotune.storage.run_layout import read_run_json
from cotune.trainer.config.load import convert
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.run.checkpoint import Checkpoint, save_checkpoint
from cotune.trainer.run.run_folder import RunFolder

LORA = LoraSpec(rank=4, alpha=8.0)
ROLES = ("first", "second")


def make_run(
    folder: Path,
    model: Path,
    policies: Policies | None = None,
    *,
    seed: int = 0,
    steps: int = 1,
    tasks: str | None = None,
    **settings: Any,
) -> Path:
    """A run whose policies have moved away from `model`, each by random weights of its own."""
    policies = policies or policies_for("lora", ROLES, LORA)
    settings = {"model": str(model), "sampling": {"max_tokens": 4}, **settings}
    run = RunFolder.create(folder, convert(settings), workflow="app:solve", tasks=tasks)
    run.close()
    learner = LocalLearner.open(str(model), policies, LearnerSettings(), LossSpec())
    generator = np.random.default_rng(seed)
    for name in policies.trained:
        moved = {
            key: (array + generator.normal(0, 0.3, array.shape)).astype(np.float32)
            for key, array in learner.weights(name).items()
        }
        learner.adopt(name, moved)
    own, versions = read_run_json(folder)["id"], dict.fromkeys(policies.trained, steps)
    save_checkpoint(run.checkpoints, Checkpoint(steps=steps, versions=versions, policies=policies, run=own), learner)
    return folder
