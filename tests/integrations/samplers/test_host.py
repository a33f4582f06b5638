"""The process that an in-process sampler's engine runs in."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from cotune.integrations.samplers.transformers.sampler import TransformersSampler
from cotune.runtime.openmp import SPINS
from tests.integrations import tiny_models


def test_it_leaves_the_cores_to_others_while_its_threads_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_models.build("qwen3", tmp_path)
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)

    async def environment() -> dict[str, str]:
        sampler = await TransformersSampler.open(tmp_path, host="process")
        try:
            return psutil.Process(sampler._host._process.pid).environ()
        finally:
            await sampler.aclose()

    assert asyncio.run(environment())["GOMP_SPINCOUNT"] == str(SPINS)
