"""What the in-process sampler does on a GPU, tried without one: see `pretend_gpu`."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from cotune.errors import ConfigError
from cotune.integrations.models.transformers import draw, engine
from cotune.integrations.models.transformers.batch import Batch
from cotune.integrations.models.transformers.cache import RowCache
from cotune.integrations.models.transformers.rows import Job
from cotune.integrations.models.transformers.wire import GPU_PART, ModelSource
from cotune.sampling.protocol import SamplingParams
from tests.integrations import tiny_models


@pytest.mark.slow
def test_an_engine_on_a_gpu_draws_what_one_on_the_cpu_draws() -> None:
    script = [sys.executable, "-W", "ignore", "-m", "tests.integrations.models.samplers.pretended_sampler"]
    done = subprocess.run(script, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip().splitlines()[-1] == "the same"


def test_a_sum_that_is_rounded_up_where_nothing_weighs_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU adds columns in another order: its sums go up by a unit in the last place between columns of weight 0, and
    down again."""
    sums = torch.tensor([[0.25, 0.25 + 2**-24, 0.25, 0.75, 1.0, 1.0 - 2**-23]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda weight, dim: sums.clone())
    weight = torch.tensor([[0.25, 0.0, 0.0, 0.5, 0.25, 0.0]])
    for threshold in (0.0, 0.2, 0.25, 0.25 + 2**-25, 0.5, 0.75, 0.9, 1.0):
        column, _ = draw._find_column(weight, torch.tensor([[threshold]], dtype=torch.float32))
        assert weight[0, column.item()] > 0, threshold


def test_masks_of_a_gpu_begin_where_its_kernels_can_read_them() -> None:
    """torch pads a mask whose strides are odd, but not one that begins at an odd address within a larger one."""
    cache = RowCache(1, torch.bfloat16, torch.device("meta"))
    nobody = np.empty(0, np.int64)
    cache.rearrange(nobody, nobody, 4, 0, 9, 20)
    cache.window.rows, cache.window.first = 4, 3
    mask = cache.mask()
    assert mask.shape == (4, 1, 1, cache.width + 1)
    assert (mask.storage_offset(), mask.is_contiguous()) == (0, True)
    cache.window.rows = 1  # contiguous as it is, and yet in the midst of the other
    assert cache.mask().storage_offset() == 0


def test_rows_are_admitted_as_the_memory_of_the_gpu_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = Batch(Qwen3ForCausalLM(tiny_models.config("qwen3", 512)).eval(), ())
    shape = batch.model.config
    token = 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_dim * 4
    assert batch.room() == float("inf")
    batch.device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 * token, 2000 * token))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 500 * token)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 300 * token)
    assert batch.room() == pytest.approx(GPU_PART * 1200)
    source = ModelSource(batch.model, None, None, 1, 1024, 1 << 22, None, ())
    made = engine.DecodingEngine(batch.model, None, (), source, lambda answers: None)
    admitted: list[int] = []
    monkeypatch.setattr(made._base, "admit", lambda jobs, most: admitted.extend(job.n for job in jobs) or [])
    made._base.device = torch.device("cuda", 0)
    for id in range(4):
        made._waiting[made._base].append(Job(id, (1, 2, 3), 2, SamplingParams(max_tokens=77), -1, 77, 0))
    made._admit(made._base)
    assert admitted == [2]  # a row of 80 tokens has 128 columns: 4 rows would take 512 of 480


def test_a_gpu_that_is_not_there_is_an_error_of_the_configuration() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ConfigError, match=r"device = 'cuda' is not a torch device of this machine"):
        engine._move_to_device(torch.nn.Linear(1, 1), "cuda")
