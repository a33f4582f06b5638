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
    """Open the policies of a learner in one process, as `open_policy_models` does. Frozen layers then compute in one
    step with their adapters where that is possible.

    On a GPU it always is. On a CPU all policies must be adapters, and the processor must multiply in the precision of
    the settings.
    """
    only_adapters = all(spec.kind != "full" for spec in policies.specs.values() if spec.trained)
    device = usual_device() if settings.device == "auto" else settings.device
    on_cpu = device == "cpu"
    # A CPU with bfloat16 rounds only the factors of products, so weights and states are loaded in float32.
    loading_settings = settings
    if only_adapters and rounds_products(settings.precision, device):
        loading_settings = replace(settings, dtype="float32")
    models = open_policy_models(model, policies, loading_settings, reference=reference, seed=seed)
    if on_cpu and (not only_adapters or loading_settings.precision != "float32"):
        return models  # without bfloat16 in the processor, autocast emulates it

    # Policies that share a network are prepared once.
    for policy in {id(policy.network): policy for policy in models.values()}.values():
        if policy.adapter is None:
            continue
        compute_joined(policy.logprob_model, settings.precision)
        if on_cpu:
            policy.logprob_model.round_logit_products(settings.precision)
    return models


def compute_joined(model: LogprobModel, precision: str) -> AdapterCopies:
    """Let a model with adapters compute each frozen layer and its adapters in one step, in `precision`. `cotune doctor`
    does the same to a model without storage, to count the memory of a pass."""
    copies = join_layers(model.network, getattr(torch, precision))
    model.use_copies(copies)
    return copies


def join_layers(network: Any, dtype: torch.dtype) -> AdapterCopies:
    """Compute the frozen linear layers of a network, except its head, in `dtype`, together with their adapters. Their
    weights are converted to this dtype. Returns the copies of the adapters, to refresh before each pass."""
    rounded_inputs: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    head = network.get_output_embeddings()
    adapted = [layer for layer in network.modules() if _is_adapted(layer)]
    copies = AdapterCopies(adapted, dtype)

    # Each layer whose forward is replaced, and the linear layer that has its weight: a layer without adapters itself.
    layers: list[tuple[Any, nn.Linear]] = [(layer, layer.base_layer) for layer in adapted]
    parts_of_layers = {id(layer.base_layer) for layer in adapted} | _matrices_of_adapters(network)
    for layer in network.modules():
        if type(layer) is nn.Linear and id(layer) not in parts_of_layers:
            layers.append((layer, layer))
    for layer, base in layers:
        if base is not head and not base.weight.requires_grad:
            base.weight.data = base.weight.data.to(dtype)
            layer.forward = partial(_forward, layer, base, rounded_inputs, copies)
    return copies


def _is_adapted(layer: nn.Module) -> bool:
    """Whether the layer is PEFT's linear layer with plain LoRA adapters, without a variant of LoRA."""
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant and type(layer.base_layer) is nn.Linear


def _matrices_of_adapters(network: Any) -> set[int]:
    """Return the ids of the linear layers that are the matrices A and B of adapters. These look frozen while another
    adapter is active, but they are trained in float32."""
    from peft.tuners.lora import LoraLayer

    matrices: set[int] = set()
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            matrices.update(id(matrix) for matrix in [*layer.lora_A.values(), *layer.lora_B.values()])
    return matrices


def _forward(
    layer: Any, base: nn.Linear, rounded_inputs: WeakTensorKeyDictionary, copies: AdapterCopies, x: Tensor
) -> Tensor:
    """Compute the output of a layer for `x` [..., in], with its adapter if one is active. `rounded_inputs` keeps x in
    the precision of products, [tokens, in], for later layers with the same input."""
    if x.dtype == base.weight.dtype:
        rounded_x = x.detach().flatten(0, -2)
    else:
        if x not in rounded_inputs:
            rounded_inputs[x] = x.detach().flatten(0, -2).to(base.weight.dtype)
        rounded_x = rounded_inputs[x]

    adapter = None if layer is base else active_adapter(layer)
    down: Tensor | None = None
    up: Tensor | None = None
    rounded_adapter: tuple[Tensor, Tensor] | None = None
    scale = 1.0
    if adapter is not None:
        down = layer.lora_A[adapter].weight
        up = layer.lora_B[adapter].weight
        rounded_adapter = (copies.of(down), copies.of(up))
        scale = layer.scaling[adapter]
    y: Tensor = _Product.apply(x, rounded_x, base.weight, down, up, rounded_adapter, scale)
    return y if base.bias is None else y + base.bias.to(y.dtype)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + scale (x A^T) B^T, computed in the precision of W. A [rank, in] and B [out, rank] are float32.

    `rounded` is x [tokens, in], and `rounded_adapter` are A and B, all in the precision of W.
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
        """Multiply the rounded states by the weight, and add the adapter's product. Without `rounded_adapter` there is
        no adapter.

        `down` and `up` are A and B. They are arguments, besides their rounded copies, so that autograd asks for their
        gradients.
        """
        ctx.weight = weight
        ctx.scale = scale
        y = product(rounded, weight)
        if rounded_adapter is None:
            ctx.save_for_backward()
        else:
            rounded_down, rounded_up = rounded_adapter
            inner = linear(rounded, rounded_down)  # x A^T [tokens, rank]
            y.addmm_(inner, rounded_up.t(), alpha=scale)
            ctx.save_for_backward(rounded, inner, rounded_down, rounded_up)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x, A and B. The weight W is not trained."""
        need_x, _, _, need_down, need_up, _, _ = ctx.needs_input_grad
        grad_y = gradient.flatten(0, -2).to(ctx.weight.dtype)  # [tokens, out]
        grad_x = product(grad_y, ctx.weight.t()) if need_x else None
        grad_down: Tensor | None = None
        grad_up: Tensor | None = None
        saved = ctx.saved_tensors  # read only once: checkpointing computes the layer again for each reading
        if saved:  # there is an adapter
            rounded, inner, rounded_down, rounded_up = saved
            grad_inner = grad_y @ rounded_up
            if need_down:
                grad_down = _sum_of_products(grad_inner, rounded).mul_(ctx.scale)
            if need_up:
                grad_up = _sum_of_products(grad_y, inner).mul_(ctx.scale)
            if grad_x is not None:
                grad_x.addmm_(grad_inner, rounded_down, alpha=ctx.scale)
        if grad_x is not None:
            grad_x = grad_x.to(gradient.dtype).view(*gradient.shape[:-1], -1)
        # In the order of forward's arguments: x, rounded, weight, down, up, rounded_adapter, scale.
        return grad_x, None, None, grad_down, grad_up, None, None


def _sum_of_products(left: Tensor, right: Tensor) -> Tensor:
    """Multiply left [tokens, a] and right [tokens, b] and sum over tokens: [a, b] in float32."""
    if left.is_cuda and left.dtype != torch.float32 and torch.version.hip is None:
        summed: Tensor = torch.mm(left.t(), right, out_dtype=torch.float32)
        return summed
    return (left.t() @ right).float()
