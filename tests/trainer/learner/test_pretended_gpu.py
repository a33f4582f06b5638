"""The learner mixes no tensors of the GPU with those of the CPU: tried where there is none, on a pretended one."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_an_update_on_a_gpu_is_that_on_the_cpu() -> None:
    script = [sys.executable, "-W", "ignore", "-m", "tests.trainer.learner.pretended_learner"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    cases = ["lora", "bfloat16", "full", "rows"]  # not imported: that would change this process
    assert done.stdout.splitlines()[-4:] == [f"{case}: {{'cuda:0'}}" for case in cases]
