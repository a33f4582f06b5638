"""The products of a network whose base is frozen, on the CPU: those of a layer and its adapter in one step, in bfloat16
where the processor has it.

Tensors between layers, trained weights and their gradients are float32; only what is multiplied is rounded.
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

from cotune.integrations.models.bfloat16 import rounds_products
from cotune.integrations.models.devices import usual_device
from cotune.integrations.models.float32 import product
from cotune.records.policies import Policies
from cotune.trainer.config.learner import LearnerSettings
from cotune.trainer.learner.load import open_policy_models
from cotune.trainer.learner.policy_model import PolicyModel


def open_joined(
    model: str, policies: Policies, settings: LearnerSettings, reference: Container[str], seed: int = 0
) -> dict[str, PolicyModel]:
    """The policies of a learner of one process (`open_policy_models`). On the CPU each frozen layer and its adapters
    are one step."""
    frozen = all(spec.kind != "full" for spec in policies.specs.values() if spec.trained)
    device = usual_device() if settings.device == "auto" else settings.device
    loaded = replace(settings, dtype="float32") if frozen and rounds_products(settings.precision, device) else settings
    opened = open_policy_models(model, policies, loaded, reference=reference, seed=seed)
    if device == "cpu" and loaded.precision == "float32" and frozen:
        for policy in {id(policy.network): policy for policy in opened.values()}.values():
            join_layers(policy.network, getattr(torch, settings.precision))
            policy.logprob_model.take_products(settings.precision)
    return opened


def join_layers(network: Any, dtype: torch.dtype) -> None:
    """Compute the frozen linear layers of a network, but for its head, in `dtype`, in which their weights are held
    then, and with them the adapters that they have."""
    rounded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
    head = network.get_output_embeddings()
    adapted = [layer for layer in network.modules() if _is_adapted(layer)]
    bases = {id(layer.base_layer) for layer in adapted}
    bare = [layer for layer in network.modules() if type(layer) is nn.Linear and id(layer) not in bases]
    for layer, base in [*((one, one.base_layer) for one in adapted), *((one, one) for one in bare)]:
        if base is not head and not base.weight.requires_grad:
            base.weight.data = base.weight.data.to(dtype)
            layer.forward = partial(_forward, layer, base, rounded)


def _is_adapted(layer: nn.Module) -> bool:
    """Whether it is PEFT's linear layer with LoRA adapters and nothing else to them."""
    from peft.tuners.lora import Linear

    return type(layer) is Linear and not layer.lora_variant and type(layer.base_layer) is nn.Linear


def _forward(layer: Any, base: nn.Linear, rounded: WeakTensorKeyDictionary, x: Tensor) -> Tensor:
    """What a layer makes of `x` [..., in], with its adapter if one is on. Of `rounded` a later layer takes it too."""
    if x not in rounded:
        rounded[x] = x.detach().flatten(0, -2).to(base.weight.dtype)
    names = [] if layer is base or layer.disable_adapters else layer.active_adapters
    factors: list[tuple[Tensor, Tensor, float]] = [
        (layer.lora_A[name].weight, layer.lora_B[name].weight, layer.scaling[name])
        for name in names
        if name in layer.lora_A
    ]
    down, up, scale = factors[0] if factors else (None, None, 1.0)
    y: Tensor = _Product.apply(x, rounded[x], base.weight, down, up, scale)
    return y if base.bias is None else y + base.bias


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """x W^T + scale (x A^T) B^T. `rounded` is x [tokens, in] in the precision of W, A [rank, in] and B [out, rank] are
    float32."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, rounded: Tensor, weight: Tensor, down: Tensor | None, up: Tensor | None, scale: float
    ) -> Tensor:
        ctx.weight, ctx.scale = weight, scale
        y = product(rounded, weight)
        if down is None or up is None:
            ctx.save_for_backward()
        else:
            low, high = down.to(weight.dtype), up.to(weight.dtype)
            inner = linear(rounded, low)
            y.addmm_(inner, high.t(), alpha=scale)
            ctx.save_for_backward(rounded, inner, low, high)
        return y.to(x.dtype).view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        above = gradient.flatten(0, -2).to(ctx.weight.dtype)
        of_x = product(above, ctx.weight.t()) if ctx.needs_input_grad[0] else None
        of_down = of_up = None
        if saved := ctx.saved_tensors:
            rounded, inner, low, high = saved
            of_inner = (above @ high).mul_(ctx.scale)
            of_down = (of_inner.t() @ rounded).float() if ctx.needs_input_grad[3] else None
            of_up = (above.t() @ inner).float().mul_(ctx.scale) if ctx.needs_input_grad[4] else None
            if of_x is not None:
                of_x.addmm_(of_inner, low)
        if of_x is not None:
            of_x = of_x.to(gradient.dtype).view(*gradient.shape[:-1], -1)
        return of_x, None, None, of_down, of_up, None
