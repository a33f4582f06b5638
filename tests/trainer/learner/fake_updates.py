"""Run by `test_fake_updates`: whole updates on a fake GPU, whose tensors have no numbers. See `fake_gpu`.

It goes by torch's own rules for devices, also for FSDP. There is one rank of a process group at a time: what the others
would send is made up. So it sees no numbers, no ranks that wait for each other, no kernels and no order of streams.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3ForCausalLM
from transformers.models.llava import modeling_llava

from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import TrainRow
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.policies import Policies, PolicySpec
from cotune.trainer.learner import load, tree_attention
from cotune.trainer.learner.dist import local_shard
from cotune.trainer.learner.fsdp.worker import FsdpWorker
from cotune.trainer.learner.local import LocalLearner
from cotune.trainer.learner.memory.pass_size import PassSizes
from tests.fake_gpu import HostWaits, allow_backward, fake_gpu
from tests.integrations.pictures import asks, picture
from tests.integrations.seeing_models import build_seeing
from tests.trainer.learner.learner_rows import FAST, SMALL, change, make_rows
from tests.trainer.learner.step_waits import check_waits
from tests.trainer.learner.test_fake_gpu import CONFIG

GPU = torch.device("cuda", 0)
RANKS = 2
LORA, OTHER = PolicySpec(name="lora", lora=SMALL), PolicySpec(name="other", lora=SMALL)
FULL = PolicySpec(name="full", kind="full")
ALL_TERMS = LossSpec(kl=0.1, entropy=0.01, ratio="sequence", mask="token", mask_range=(0.0, 100.0))
CASES: dict[str, tuple[list[PolicySpec], dict[str, Any], LossSpec]] = {
    "bfloat16": ([LORA, OTHER, FULL], {"dtype": "bfloat16"}, ALL_TERMS),
    "float32": ([LORA], {"dtype": "float32", "activation_checkpointing": True}, LossSpec()),
    "critic": ([FULL], {"dtype": "bfloat16", "shared_prompts": False}, LossSpec(critic=True)),
    "images": ([LORA, FULL], {"dtype": "bfloat16"}, LossSpec(kl=0.1)),
}


def open_learner(case: str, rank: int | None) -> LocalLearner:
    """A learner of one process, or the one of a rank."""
    specs, changed, loss = CASES[case]
    policies = Policies({spec.name: spec for spec in specs}, {spec.name: spec.name for spec in specs})
    settings = change(FAST, device="cuda", tree_attention="blocks", mini_batch=8, **changed)
    if rank is None:
        return LocalLearner.open("fake", policies, settings, loss)
    worker = FsdpWorker(rank, RANKS)
    worker._store = FakeStore()
    worker.join("host", 1, "cuda", 10.0)
    worker.open("fake", policies, settings, loss)
    return worker._learner


def check_learner(learner: LocalLearner, rows: list[TrainRow], waits: HostWaits, folder: Path) -> None:
    """Update, read, replace and save each policy. Tensors stay on the GPU, in their precision."""
    for name, policy in learner._policies.items():
        learner.update(name, rows)
        check_waits(learner, name, rows, waits.names)
        weights = learner.weights(name)
        assert bool(weights) == (learner._group.rank == 0)
        assert all(array.dtype == "float32" for array in weights.values())
        learner.adopt(name, {key: np.zeros(tensor.shape, np.float32) for key, tensor in policy.state().items()})
        assert [len(part) for part in learner.logprobs(name, rows)] == [len(row.response_ids) for row in rows]
    learner.save_policies(folder)
    check_tensors(learner)


def check_tensors(learner: LocalLearner) -> None:
    """All tensors are on the GPU; trained ones and their moments are float32."""
    for name, policy in learner._policies.items():
        tensors = [*policy.network.parameters(), *policy.network.buffers()]
        assert {local_shard(tensor).device for tensor in tensors} == {GPU}
        trained = [*policy.parameters().values()]
        for state in learner._optimizers[name].state.values():
            trained += state.values()
        assert {(local_shard(tensor).device, tensor.dtype) for tensor in trained} == {(GPU, torch.float32)}


def image_rows(folder: Path) -> list[TrainRow]:
    chat = ChatTemplate.load(folder)
    messages = [asks("what?", picture("red"))]
    ids, images = tuple(chat.render(messages, None)), chat.images(messages)
    return [change(row, prompt_ids=ids, images=images) for row in make_rows()[:8]] + make_rows()[8:]


def text_rows() -> list[TrainRow]:
    return [change(row, logit_bias=((3, 0.5),), temperature=0.7) for row in make_rows()]


def without_other_ranks(rank: int) -> None:
    """Make up what the other ranks send: objects like those of this rank, and anything as the numbers of tensors."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    dist.init_process_group = lambda *_, **__: None

    def gather(objects: list[Any], own: Any, group: Any = None) -> None:
        objects[:] = [own] * len(objects)

    dist.all_gather_object = gather
    dist.broadcast_object_list = lambda *_, **__: None
    dcp.save = partial(dcp.save, no_dist=True)


def maker(config: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    """In the place of `load._load`: models whose weights have no numbers."""

    def make(path: str, dtype: str, device: torch.device, settings: Any) -> Any:
        with device:
            return build(copy.deepcopy(config), dtype=getattr(torch, dtype)).eval()

    return make


def main(case: str, rank: int | None) -> None:
    root = Path(tempfile.mkdtemp())
    allow_backward(root)
    # Numbers decide these, and there are none. Each has tests of its own.
    load._check_head = lambda network: None
    tree_attention._computes_the_same = lambda network, flex: True
    modeling_llava.torch_compilable_check = lambda *values: None
    PassSizes._least_of_ranks = lambda self, tokens, model: int(tokens)

    texts = copy.deepcopy(CONFIG)
    texts.save_pretrained(root)
    texts._name_or_path = str(root)
    seeing = root / "llava"
    build_seeing(seeing, "llava")
    if rank is not None:
        without_other_ranks(rank)
    load._load = maker(texts, Qwen3ForCausalLM._from_config)
    rows = text_rows()
    if case == "images":
        load._load = maker(AutoConfig.from_pretrained(seeing), AutoModelForImageTextToText.from_config)
        rows = image_rows(seeing)
    whole, folder = root / f"{case}.whole", root / case
    whole.mkdir()
    folder.mkdir()
    with fake_gpu() as waits:
        learner = open_learner(case, rank)
        check_learner(learner, rows, waits, folder)
        if rank is not None:
            # A rank's own part is no checkpoint without the parts of the others.
            local = open_learner(case, None)
            for name in local._policies:
                local.update(name, rows)
            local.save_policies(whole)
            folder = whole
        learner.load_policies(folder)
        check_tensors(learner)
        learner.update(next(iter(learner._policies)), rows)
    sys.stdout.write(f"{case}\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if sys.argv[2:] else None)
