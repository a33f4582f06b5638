"""Loading models that several ranks divide: one rank reads the weights, so that a host holds them once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cotune.errors import CotuneError
from cotune.trainer.learner.dist import copy_whole
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.policy_model import PolicyModel

Models = dict[str, PolicyModel]
Divide = Callable[[Iterable[PolicyModel]], None]


def open_divided(load: Callable[[bool], Models], divide: Divide, device: str) -> Models:
    """Open models on all ranks of the default process group, each with its part of the weights on `device`.

    `load` opens them on the CPU, or with True without weights. `divide` shards their modules. Rank 0 alone loads the
    weights, and sends them one tensor after the other. If `load` fails on any rank, all ranks raise its error.
    """
    is_source = dist.get_rank() == 0
    models = _on_all_ranks(lambda: load(not is_source))
    layouts: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, _state_layout(models))
    if any(layout != layouts[0] for layout in layouts):
        # Some models keep a few layers in another precision than asked for, which only shows when their weights are
        # read. Then the other ranks read them too.
        models = _on_all_ranks(lambda: models if is_source else load(False))

    # Shard models without weights: a rank then has memory for its part only.
    _share_attention(models)
    weights = _take_tensors(models)
    divide(models.values())
    for module in distinct_networks(models.values()):
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor.to(device))

    # Rank 0 sends each tensor whole, and each rank keeps its part.
    with torch.no_grad():
        for name, target in _named_tensors(models):
            if is_source:
                whole = weights.pop(name).to(device)
            else:
                whole = torch.empty(target.shape, dtype=target.dtype, device=device)
            dist.broadcast(whole, 0)
            copy_whole(target, whole)
    return models


def _on_all_ranks(work: Callable[[], Models]) -> Models:
    """Return the result of `work` on this rank. If it fails on any rank, all ranks raise its error, so that none waits
    forever."""
    models: Models = {}
    fault: CotuneError | None = None
    try:
        models = work()
    except CotuneError as error:
        fault = error
    faults: list[CotuneError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(faults, fault)
    for rank_fault in faults:
        if rank_fault is not None:
            raise rank_fault
    return models


def _share_attention(models: Models) -> None:
    """Let all ranks use the attention of rank 0. It has tried the attention over trees with the weights, which other
    ranks do not have yet."""
    modules = distinct_networks(models.values())
    choices: list[Any] = []  # for each network: `shares`, `_flex`, and the name of its attention in transformers
    for module in modules:
        choices.append((module.shares, module._flex, module.network.config._attn_implementation))
    dist.broadcast_object_list(choices, 0)  # the other ranks' choices are replaced
    for module, (shares, flex, attention) in zip(modules, choices, strict=True):
        module.shares = shares
        module._flex = flex
        if module.network.config._attn_implementation != attention:
            module.network.set_attn_implementation(attention)


def distinct_networks(policies: Iterable[PolicyModel]) -> list[LogprobModel]:
    """Return the networks of all policies. A network that several policies share is listed once."""
    modules: dict[int, LogprobModel] = {}
    for policy in policies:
        for module in (policy.logprob_model, policy.frozen_copy):
            if module is not None:
                modules[id(module)] = module
    return list(modules.values())


def _named_tensors(models: Mapping[str, PolicyModel]) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers with their names, in the same order on all ranks. A tensor that several modules
    share is yielded once."""
    for number, module in enumerate(distinct_networks(models.values())):
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            yield f"{number}.{name}", tensor


def _state_layout(models: Mapping[str, PolicyModel]) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the name, the shape and the dtype of each tensor. Ranks compare them."""
    return [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _named_tensors(models)]


def _take_tensors(models: Mapping[str, PolicyModel]) -> dict[str, Tensor]:
    """Return the parameters and buffers of the models by name, and replace them in the models by tensors on the meta
    device, which have no memory. Modules that shared a tensor share its replacement."""
    weights = {name: tensor.detach() for name, tensor in _named_tensors(models)}
    replacements: dict[int, Tensor] = {}

    def without_memory(tensor: Tensor) -> Tensor:
        if id(tensor) not in replacements:
            empty = torch.empty_like(tensor, device="meta")
            if isinstance(tensor, nn.Parameter):
                empty = nn.Parameter(empty, requires_grad=tensor.requires_grad)
            replacements[id(tensor)] = empty
        return replacements[id(tensor)]

    for network in distinct_networks(models.values()):
        for module in network.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        tensors[name] = without_memory(tensor)
    return weights
