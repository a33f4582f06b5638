"""Run by `test_pretended_gpu`: the learner on a pretended GPU does what it does on the CPU. Prints each case with its
devices; all share one start."""

from __future__ import annotations

import copy
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.pretend_gpu import pretend, waits  # isort: skip - before what it changes is imported

import pytest
import torch

from cotune.algorithms.recipes import LossSpec
from cotune.integrations.models import bfloat16
from cotune.records.policies import policies_for
from cotune.trainer.learner import load, tree_attention
from cotune.trainer.learner.local import LocalLearner
from tests.trainer.learner.learner_rows import FAST, SMALL, build_learner_base, change, make_rows, on_policy, snapshot
from tests.trainer.learner.step_waits import check_waits

CASES: dict[str, tuple[str, dict[str, Any], LossSpec]] = {
    "lora": ("lora", {"mini_batch": 8}, LossSpec(kl=0.1, entropy=0.01, ratio="sequence")),
    "bfloat16": ("lora", {"dtype": "bfloat16", "micro_batch_tokens": 64}, LossSpec(entropy=0.01, critic=True)),
    "full": ("full", {"activation_checkpointing": True, "micro_batch_tokens": 64}, LossSpec(kl=0.1, mask="token")),
    "rows": ("shared", {"shared_prompts": False, "micro_batch_tokens": 64}, LossSpec()),
}


def trained(folder: str, case: str, device: str) -> tuple[LocalLearner, list[float]]:
    """A learner that has been updated, saved, restored and updated again, and its metrics."""
    layout, settings, loss = CASES[case]
    policies = policies_for(layout, ["a", "b"], SMALL)
    name = next(iter(policies.specs))
    chosen = change(FAST, device=device, tree_attention="blocks", **settings)
    learner = LocalLearner.open(folder, policies, chosen, loss)
    rows = [change(row, logit_bias=((3, 0.5),)) for row in make_rows()]
    rows = on_policy(learner, name, rows)
    found = [learner.update(name, rows)]
    with tempfile.TemporaryDirectory() as saved:
        learner.save(Path(saved))
        learner.load(Path(saved))
    learner.adopt(name, snapshot(learner, name))
    found.append(learner.update(name, rows))
    assert all(array.dtype == "float32" for array in learner.weights(name).values())
    keys = ["loss", "grad_norm", "weight_norm", "ratio_max", *(["value_loss"] if loss.critic else [])]
    return learner, [metrics[key] for metrics in found for key in keys]


def main() -> None:
    torch.set_num_threads(1)
    folder = build_learner_base(tempfile.mkdtemp(), layers=1)
    network = load._load(folder, "float32", torch.device("cpu"), FAST)
    load._load = lambda path, dtype, device, settings: copy.deepcopy(network).to(device, getattr(torch, dtype))
    bfloat16.has_bfloat16 = lambda: False  # a CPU that has it computes otherwise than a GPU
    pretend()
    for case in CASES:
        sys.stdout.write(f"{case}: {check(folder, case)}\n")


def check(folder: str, case: str) -> set[str]:
    """Compare one case with the CPU; the devices of its parameters."""
    given_back: list[bool] = []
    for_groups: list[bool] = []
    attention = tree_attention.scaled_dot_product_attention

    def watched(*states: Any, enable_gqa: bool = False, **more: Any) -> Any:
        for_groups.append(enable_gqa)
        return attention(*states, enable_gqa=enable_gqa, **more)

    torch.cuda.empty_cache = lambda: given_back.append(True)
    tree_attention.scaled_dot_product_attention = watched
    learner, found = trained(folder, case, "auto")  # first: autograd has no threads for devices that come later
    tree_attention.scaled_dot_product_attention = attention
    _, expected = trained(folder, case, "cpu")
    tolerance = 0.1 if case == "bfloat16" else 1e-3
    assert found == pytest.approx(expected, rel=tolerance), (found, expected)
    assert given_back == [True, True]  # once after each update
    if case != "rows":  # there transformers' own attention computes, and waits when it makes a mask for padded rows
        rows = [change(row, logit_bias=((3, 0.5),)) for row in make_rows()]
        check_waits(learner, next(iter(learner._policies)), rows, waits)
        assert for_groups
    if case != "bfloat16":  # a GPU has no kernel for groups in float32
        assert not any(for_groups)
    return {str(p.device) for policy in learner._policies.values() for p in policy.network.parameters()}


if __name__ == "__main__":
    main()
