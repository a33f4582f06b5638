"""The matrix products of a network whose base is frozen. A layer and its adapter are computed in one step, with few
operators.

On a GPU in bfloat16 all tensors between layers are bfloat16, so autocast is not needed: PEFT's layers under autocast
need about twice as many kernels, half of them casts. On a CPU with bfloat16 only the factors of products are rounded;
tensors between layers stay float32. Trained weights and their gradients are float32 on both.
"""

from __future__ import annotations

from collections.abc import Container
from functools import partial
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear
from torch.utils.weak import WeakTensorKeyDictionary

from cotune.config.learner import LearnerSettings
from cotune.integrations.models.bfloat16 import rounds_products
from cotune.integrations.models.devices import usual_device
from cotune.integrations.models.float32 import product
from cotune.records.policies import Policies
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.logprob_model import LogprobModel
from cotune.trainer.learner.memory.adapter_copies import AdapterCopies, active_adapter
from cotune.trainer.learner.policy_model import PolicyModel


def open_joined(
    model: str, policies: Policies, settings: LearnerSettings, reference: Container[str], seed: int = 0
) -> dict[str, PolicyModel]:
    """Open the policies of a learner in one process (`open_policy_models`). Each frozen layer is computed in one step
    with its adapters."""
    frozen = all(spec.kind != "full" for spec in policies.specs.values() if spec.trained)
    device = usual_device() if settings.device == "auto" else settings.device
    loaded = replace(settings, dtype="float32") if frozen and rounds_products(settings.precision, device) else settings
    opened = open_policy_models(model, policies, loaded, reference=reference, seed=seed)
    if device == "cpu" and loaded.precision != "float32":
        return opened  # a processor without bfloat16: autocast emulates it
    for policy in {id(policy.network): policy for policy in opened.values()}.values():
        if policy.adapter is not None and (device != "cpu" or frozen):
            compute_joined(policy.logprob_model, settings.precision)
            if device == "cpu":
                policy.logprob_model.take_products(settings.precision)
    return opened


def compute_joined(model: LogprobModel, precision: str) -> AdapterCopies:
    """Let a model with adapters compute each frozen layer and its adapters in one step, in `precision`. `cotune doctor`
    does the same to a model without storage, to count the memory of a pass."""
    copies = join_layers(model.network, getattr(torch, precision))
    model.compute_by_itself(copies)
    return copies


def join_layers(network: Any, dtype: torch.dtype) -> AdapterCopies:
    """Compute the frozen linear layers of a network, except its head, in `dtype`, together with their adapters. Their
    weights are converted to this dtype."""
    rounded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    head = network.get_output_embeddings()
    adapted = [layer for layer in network.modules() if _is_adapted(layer)]
    copies = AdapterCopies(adapted, dtype)
    bases = {id(layer.base_layer) for layer in adapted}
    bare = [layer for layer in network.modules() if type(layer) is nn.Linear and id(layer) not in bases]
    layers = [(layer, layer.base_layer) for layer in adapted] + [(layer, layer) for layer in bare]
    for layer, base in layers:
        if base is not head and not base.weight.requires_grad:
            base.weight.data = base.weight.data.to(dtype)
            layer.forward = partial(_forward, layer, base, rounded, copies)
    return copies


def _is_adapted(layer: nn.Module) -> bool:
    """Whether it is PEFT's linear layer with LoRA adapters and nothing else to them."""
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant and type(layer.base_layer) is nn.Linear


def _forward(layer: Any, base: nn.Linear, rounded: WeakTensorKeyDictionary, copies: AdapterCopies, x: Tensor) -> Tensor:
    """The output of a layer for `x` [..., in], with its adapter if one is on. `rounded` keeps x in the precision of
    products for later layers with the same input."""
    if x.dtype == base.weight.dtype:
        low_x = x.detach().flatten(0, -2)
    else:
        if x not in rounded:
            rounded[x] = x.detach().flatten(0, -2).to(base.weight.dtype)
        low_x = rounded[x]
    name = None if layer is base else active_adapter(layer)
    if name is None:
        y: Tensor = _Product.apply(x, low_x, base.weight, None, None, None, 1.0)
    else:
        down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
        rounded_adapter = (copies.of(down), copies.of(up))
        y = _Product.apply(x, low_x, base.weight, down, up, rounded_adapter, layer.scaling[name])
    return y if base.bias is None else y + base.bias.to(y.dtype)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + scale (x A^T) B^T. A [rank, in] and B [out, rank] are float32.

    `rounded` is x [tokens, in] in the precision of W; `rounded_adapter` are A and B in it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        rounded: Tensor,
        weight: Tensor,
        down: Tensor | None,
        up: Tensor | None,
        rounded_adapter: tuple[Tensor, Tensor] | None,
        scale: float,
    ) -> Tensor:
        """Multiply the rounded states by the weight, and add the adapter's product unless it is off (no
        `rounded_adapter`).

        `down` and `up` are A and B of the class; they are arguments so that autograd asks for their gradients.
        """
        ctx.weight, ctx.scale = weight, scale
        y = product(rounded, weight)
        if rounded_adapter is None:
            ctx.save_for_backward()
        else:
            low, high = rounded_adapter
            inner = linear(rounded, low)
            y.addmm_(inner, high.t(), alpha=scale)
            ctx.save_for_backward(rounded, inner, low, high)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B. The weight W is not trained."""
        above = gradient.flatten(0, -2).to(ctx.weight.dtype)
        of_x = product(above, ctx.weight.t()) if ctx.needs_input_grad[0] else None
        of_down = of_up = None
        if saved := ctx.saved_tensors:
            rounded, inner, low, high = saved
            of_inner = above @ high
            if ctx.needs_input_grad[3]:
                of_down = _summed(of_inner, rounded).mul_(ctx.scale)
            if ctx.needs_input_grad[4]:
                of_up = _summed(above, inner).mul_(ctx.scale)
            if of_x is not None:
                of_x.addmm_(of_inner, low, alpha=ctx.scale)
        if of_x is not None:
            of_x = of_x.to(gradient.dtype).view(*gradient.shape[:-1], -1)
        # In the order of forward's arguments: x, rounded, weight, down, up, rounded_adapter, scale.
        return of_x, None, None, of_down, of_up, None, None


def _summed(left: Tensor, right: Tensor) -> Tensor:
    """left [tokens, a] and right [tokens, b] multiplied and summed over tokens: [a, b] in float32."""
    if left.is_cuda and left.dtype != torch.float32 and torch.version.hip is None:
        summed: Tensor = torch.mm(left.t(), right, out_dtype=torch.float32)
        return summed
    return (left.t() @ right).float()
