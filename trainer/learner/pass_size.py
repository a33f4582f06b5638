"""How many tokens go through a model at once: as many as fit into the memory that a pass may take."""

from __future__ import annotations

import ctypes
import logging
import math
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from cotune.algorithms.samples import TrainRow
from cotune.errors import ConfigError, LearnerError
from cotune.runtime.memory import machine_memory, parse_size, process_memory
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.batching import pass_tokens
from cotune.trainer.learner.dist import ProcessGroup, local_shard
from cotune.trainer.learner.logprobs import chunk_tokens
from cotune.trainer.learner.policy_model import PolicyModel

log = logging.getLogger("cotune")
T = TypeVar("T")

MOST, LEAST = 8192, 16
"""Bounds of what "auto" chooses, in tokens."""
CPU_SHARE, GPU_SHARE = 1 / 16, 0.8
"""Of the machine's memory, and of what is free on a GPU, what the activations of a pass may take. On a CPU larger
passes are hardly faster, and the application and the sampler want room as well."""
MARGIN = 1.3
"""What a pass takes at its peak, as a multiple of what it keeps for the backward pass."""
CHECKPOINTED_MARGIN = 2.5
"""The same where the backward pass computes each layer again."""
OPTIMIZER_BYTES = 12
"""Per trained parameter: its gradient and AdamW's two moments, in fp32."""
_MMAP_THRESHOLD = (-3, 256 * 1024)
"""glibc's M_MMAP_THRESHOLD: larger tensors are given back to the system when they are freed. By itself it raises the
threshold with the sizes it sees, and the gaps between activations then take twice their memory. Only for models whose
matrix products take far longer than the system needs to hand out pages."""


class PassSize:
    """The tokens per pass of a learner, which become fewer where memory runs out."""

    def __init__(self, tokens: int, *, alone: bool) -> None:
        """`alone`: this process has the weights to itself, so that it may make passes that no other knows of."""
        self.tokens = tokens
        self.halved = 0
        self._alone = alone

    def fitting(self, compute: Callable[[], T], again: Callable[[], None]) -> T:
        """What `compute` returns, which makes passes of `tokens`. Where memory runs out `tokens` is halved, `again`
        called and all computed once more. Raises LearnerError where that is no use."""
        while True:
            try:
                return compute()
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                if self.tokens < 2 * LEAST or not self._alone:
                    cause = f"Memory ran out in a pass of {self.tokens} tokens."
                    remedy = "Set learner.micro_batch_tokens lower, or learner.activation_checkpointing = true."
                    raise LearnerError(cause, remedy) from error
                failed = self.tokens
            self.tokens = failed // 2
            self.halved += 1
            log.warning("Memory ran out in a pass of %d tokens: passes are of %d from now on", failed, self.tokens)
            again()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device or the machine had no memory for a tensor."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return "allocate memory" in str(error) or "not enough memory" in str(error)


def choose_pass_size(policies: Iterable[PolicyModel], settings: LearnerSettings, group: ProcessGroup) -> PassSize:
    """The pass size that the settings name or, for "auto", a power of two that fits the memory there is.

    Raises ConfigError for a `memory` in which not even a small pass fits.
    """
    models = list(policies)
    alone = group.size == 1
    if isinstance(settings.micro_batch_tokens, int):
        return PassSize(settings.micro_batch_tokens, alone=alone)
    networks = {id(model.network): model for model in models}
    if models[0].device.type == "cpu" and any(_is_large(model) for model in networks.values()):
        _give_memory_back()
    margin = CHECKPOINTED_MARGIN if settings.activation_checkpointing else MARGIN
    per_token = max(bytes_per_token(model) for model in networks.values()) * margin
    to_come = sum(p.numel() for model in models for p in model.parameters().values()) * OPTIMIZER_BYTES // group.size
    room = _room(models[0], settings, to_come) - max(_logit_bytes(model) for model in networks.values())
    tokens = 2 ** int(math.log2(max(LEAST, min(MOST, room / per_token))))
    if settings.memory and room < LEAST * per_token:
        least = parse_size(settings.memory) - room + LEAST * per_token
        allowed = f"at least {least / 2**30:.1f}GiB for this model in this process"
        raise ConfigError("learner.memory", settings.memory, allowed)
    tokens = -int(group.max(torch.tensor([-tokens], device=models[0].device)).item())
    return PassSize(tokens, alone=alone)


def bytes_per_token(model: PolicyModel) -> float:
    """What a pass keeps for the backward pass, for each of its tokens: the slope between two sizes."""
    (few, small), (many, large) = (_kept(model, count) for count in (1, 3))
    return (large - small) / (many - few)


def _kept(model: PolicyModel, groups: int) -> tuple[int, int]:
    """Tokens of a pass over so many groups of two rows, and the bytes of the tensors that its graph holds."""
    prompt, response = 24, 9
    rows = [
        TrainRow(
            id="",
            role="",
            prompt_ids=(at,) * (prompt - at),
            response_ids=(first,) * response,
            logprobs=(),
            advantage=0.0,
        )
        for at in range(groups)
        for first in (groups, groups + 1)
    ]
    parameters = {local_shard(p).untyped_storage().data_ptr() for p in model.network.parameters()}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> None:  # nothing: a graph that holds its own outputs would never be freed
        at = tensor.untyped_storage().data_ptr()
        if at not in parameters:
            kept[at] = tensor.detach()

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda none: none):
        model.token_logprobs(rows)
    model.logprob_model.release()
    return pass_tokens(rows, model.shares_prompts), sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _room(model: PolicyModel, settings: LearnerSettings, to_come: int) -> float:
    """Bytes that a pass may take."""
    cuda = model.device.type == "cuda"
    if settings.memory:
        used = int(torch.cuda.memory_allocated(model.device)) if cuda else process_memory()
        return parse_size(settings.memory) - used - to_come
    if not cuda:
        return machine_memory()[1] * CPU_SHARE
    free = int(torch.cuda.mem_get_info(model.device)[0])
    unused = int(torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device))
    return (free + unused - to_come) * GPU_SHARE


def _logit_bytes(model: PolicyModel) -> int:
    """Three buffers of a chunk of logits, in fp32."""
    vocabulary = int(model.network.get_output_embeddings().weight.shape[0])
    return 12 * vocabulary * chunk_tokens(vocabulary, model.device.type)


def _is_large(model: PolicyModel) -> bool:
    return sum(int(p.numel()) for p in model.network.parameters()) > 2**24


def _give_memory_back() -> None:
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(*_MMAP_THRESHOLD)
