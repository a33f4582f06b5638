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


@pytest.mark.parametrize("case", ["bfloat16", "float32", "critic", "images"])
@pytest.mark.parametrize("rank", [[], ["0"], ["1"]], ids=["one process", "rank 0", "rank 1"])
def test_a_learner_stays_on_the_gpu_and_waits_once_per_step(case: str, rank: list[str]) -> None:
    script = [sys.executable, "-W", "ignore", "-m", "tests.trainer.learner.fake_updates", case, *rank]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert done.stdout.splitlines()[-1:] == [case]
