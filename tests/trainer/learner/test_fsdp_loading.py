"""Two ranks open a model: rank 0 alone reads the weights, and both have their part of the same ones."""

from __future__ import annotations

import hashlib
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cotune.algorithms.recipes import LossSpec
from cotune.config.learner import LearnerSettings
from cotune.errors import ConfigError
from cotune.records.policies import LoraSpec, policies_for
from cotune.trainer.learner import load
from cotune.trainer.learner.dist import local_shard
from cotune.trainer.learner.fsdp.worker import FsdpWorker
from cotune.trainer.learner.local import LocalLearner
from tests.integrations import tiny_models
from tests.trainer.forked import FORKED
from tests.trainer.learner.learner_rows import make_rows

pytestmark = pytest.mark.slow
SETTINGS = LearnerSettings(dtype="float32")
RANKS = 2


def open_rank(rank: int, port: int, model: str, kind: Any, answers: Any) -> None:
    """The body of a rank: open the model, and answer with figures or the error."""
    read: list[str] = []
    original = load.count_parameters

    def count(folder: Path) -> int:  # is asked before weights are read
        read.append(str(folder))
        return original(folder)

    load.count_parameters = count
    worker = FsdpWorker(rank, RANKS)
    if rank == 0:
        worker._store = dist.TCPStore("127.0.0.1", port, RANKS, is_master=True, wait_for_workers=False)
    worker.join("127.0.0.1", port, "cpu", 120.0)
    try:
        worker.open(model, policies_for(kind, ["a", "b"], LoraSpec(rank=4)), SETTINGS, LossSpec())
    except ConfigError as error:
        answers.put((rank, str(error)))
        return
    learner = worker._learner
    rows = make_rows()
    logprobs = [part.tolist() for part in learner.logprobs("a", rows)]
    weights = learner.weights("a")
    digest = hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    parameters = learner._policies["a"].network.parameters()
    held = sum(local_shard(parameter).numel() for parameter in parameters)
    answers.put((rank, (logprobs, digest if rank == 0 else "", held, len(read))))
    dist.barrier()


def open_both(model: str, kind: str) -> list[Any]:
    answers = FORKED.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [FORKED.Process(target=open_rank, args=(rank, port, model, kind, answers)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    found = dict(answers.get(timeout=timedelta(minutes=5).total_seconds()) for _ in ranks)
    for process in ranks:
        process.join(60)
    return [found[rank] for rank in range(RANKS)]


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_ranks_divide_the_weights_that_one_of_them_reads(tmp_path: Path, kind: Any) -> None:
    tiny_models.build("qwen3", tmp_path)
    (first, digest, held, read), (second, _, held_too, read_too) = open_both(str(tmp_path), kind)
    torch.set_num_threads(1)
    local = LocalLearner.open(str(tmp_path), policies_for(kind, ["a", "b"], LoraSpec(rank=4)), SETTINGS, LossSpec())
    weights = local.weights("a")
    assert digest == hashlib.sha256(b"".join(weights[name].tobytes() for name in sorted(weights))).hexdigest()
    expected = [part.tolist() for part in local.logprobs("a", make_rows())]
    for found in (first, second):
        for part, whole in zip(found, expected, strict=True):
            assert part == pytest.approx(whole, abs=1e-4)
    assert read > 0 == read_too
    assert held + held_too == sum(parameter.numel() for parameter in local._policies["a"].network.parameters())


def test_an_error_of_the_rank_that_reads_is_raised_on_both(tmp_path: Path) -> None:
    tiny_models.build("qwen3", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"broken")
    first, second = open_both(str(tmp_path), "lora")
    assert "cannot be read as a model" in first
    assert first == second
