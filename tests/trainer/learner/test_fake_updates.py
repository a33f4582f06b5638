"""Updates, checkpoints and published weights by torch's own rules for a GPU, on tensors without numbers."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ compiles what autograd asks of a GPU"),
]


# The ranks of FSDP hang in a backward pass on fake tensors, for a reason not known yet.
RANKS = [
    pytest.param([], id="one process"),
    pytest.param(["0"], id="rank 0", marks=pytest.mark.long),
    pytest.param(["1"], id="rank 1", marks=pytest.mark.long),
]


@pytest.mark.parametrize("rank", RANKS)
def test_a_learner_stays_on_the_gpu_and_waits_once_per_step(rank: list[str]) -> None:
    script = [sys.executable, "-W", "ignore", "-m", "tests.trainer.learner.fake_updates", *rank]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-4:] == ["bfloat16", "float32", "critic", "images"]
