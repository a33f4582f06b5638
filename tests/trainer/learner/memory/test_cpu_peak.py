"""On a CPU, passes over long rows that share nothing take the memory that they are planned for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.forecast import LiveBytes, shape
from cotune.algorithms.samples import TrainRow
from cotune.records.policies import LoraSpec
from cotune.trainer.before.doctor.memory import ALLOCATOR
from cotune.trainer.before.doctor.model_size import empty_policy, measure


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [LoraSpec(rank=16), None])
def test_eight_unshared_rows_hold_what_is_planned(lora: LoraSpec | None, checkpointed: bool) -> None:
    """The peak is counted on tensors without storage, in the learner's code for a CPU."""
    config, joined = shape("tiny"), lora is not None
    planned = measure(config, lora, "float32", joined=joined).pass_memory("cpu")
    empty = empty_policy(config, lora, "float32", joined=joined, device="cpu", whole=True)
    rows = [
        TrainRow(
            id=str(number),
            role="a",
            prompt_ids=(number,) * 2016,
            response_ids=(number,) * 33,
            logprobs=(),
            advantage=1.0,
        )
        for number in range(8)
    ]
    policy, live = empty.policy, LiveBytes()
    with empty.mode, live:
        for parameter in policy.network.parameters():
            live.add(parameter)
        for parameter in policy.parameters().values():
            parameter.grad = torch.zeros_like(parameter)
        policy.logprob_model.checkpointing.on = checkpointed
        live.restart()
        before = live.live
        logprobs, _ = policy.token_logprobs(rows)
        logprobs.sum().backward()
    assert planned.peak(8 * 2048, checkpointed=checkpointed) / (live.peak - before) == pytest.approx(1.0, abs=0.2)


@pytest.mark.long
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_process_that_keeps_pages_grows_by_no_more_than_is_forecast(tmp_path: Path, checkpointed: bool) -> None:
    module = "tests.trainer.learner.memory.resident_peak"
    command = [sys.executable, "-m", module, str(tmp_path), str(checkpointed), "True"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tokens"] == 8 * 2047  # the last token of a row predicts nothing
    assert found["planned"] < found["taken"] < ALLOCATOR * found["planned"] + found["gaps"]
