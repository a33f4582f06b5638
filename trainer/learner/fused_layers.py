"""Norms, rotary embeddings and SwiGLU of a network in one kernel each, instead of the 2 to 9 operators of transformers.

A pass of a small model on a fast GPU otherwise waits for the host to launch them. The kernels are Liger's. Layers are
recognised by their form, as Llama, Mistral, Qwen2 and Qwen3 have it, and each form is tried before it is replaced.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from cotune.errors import error_text
from cotune.integrations.models.liger.kernels import Kernels, load_kernels

log = logging.getLogger("cotune")

ROTARY = "apply_rotary_pos_emb"
"""The name in transformers of the function that rotates queries and keys."""
SILU = ("SiLU", "SiLUActivation")
"""The names of this function in torch and transformers."""
NARROW = 256
MANY_ROWS = 2**15
"""Liger has another kernel for norms up to this width and from this number of rows on: for queries and keys."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""Most difference between output and gradients and the ones of transformers, as a share of their norm."""


class KernelDiffers(Exception):
    """A fused kernel computes other values than the module that it would replace."""


def fuse_layers(network: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Let a network that is trained in `dtype` on a GPU compute by fused kernels. If they are missing or fail a trial,
    forward and backward, on that GPU, the network stays as it is, and the log says why."""
    if device.type != "cuda":
        return
    try:
        replaced = fused_forwards(network, load_kernels(), device, dtype)
    except ImportError as error:
        log.info("No fused kernels (%s): updates of small models launch more kernels than they need", error)
        return
    except Exception as error:  # noqa: BLE001 - compilers fail in ways of their own
        log.warning(
            "Fused kernels cannot be used here (%s): updates launch more kernels than they need", error_text(error)
        )
        return
    for module, forward in replaced:
        module.forward = forward


def fused_forwards(
    network: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> list[tuple[Any, Callable[..., Any]]]:
    """Return the modules of the network that a fused kernel can compute, each with its new `forward`.

    The kernel is tried on one module of each kind: layers of the same class and size compute the same. Raises
    KernelDiffers, and errors of the kernels' compiler.
    """
    replacements: list[tuple[Any, Callable[..., Any]]] = []
    tried_kinds: set[tuple[Any, ...]] = set()
    for module in network.modules():
        if _is_norm(module):
            kind: tuple[Any, ...] = (type(module), module.weight.shape, module.weight.dtype)
            if kind not in tried_kinds:
                _try_norm(module, kernels, device, dtype)
            replacements.append((module, partial(_fused_norm, kernels, module)))
        elif _is_gated(module):
            kind = (type(module), module.gate_proj.out_features)
            if kind not in tried_kinds:
                _try_gated(module, kernels, device, dtype)
            replacements.append((module, partial(_fused_gated, kernels, module)))
        elif (forward := _rotary_forward(module)) is not None:
            kind = (type(module), module.head_dim)
            if kind not in tried_kinds:
                _try_rotary(forward.__globals__[ROTARY], module, kernels, device, dtype)
            replacements.append((module, MethodType(_with_fused_rotary(forward, kernels), module)))
        else:
            continue
        tried_kinds.add(kind)
    return replacements


def _is_norm(module: Any) -> bool:
    return (
        type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon") and hasattr(module, "weight")
    )


def _is_gated(module: Any) -> bool:
    """Whether it is a feed-forward layer of the form down(silu(gate(x)) * up(x))."""
    parts = dict(module.named_children())
    return set(parts) == {"gate_proj", "up_proj", "down_proj", "act_fn"} and type(parts["act_fn"]).__name__ in SILU


def _rotary_forward(module: Any) -> FunctionType | None:
    """The `forward` of an attention that rotates its queries and keys by the usual function, else None."""
    forward = type(module).forward
    rotates = isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names
    return forward if rotates and ROTARY in forward.__globals__ and hasattr(module, "head_dim") else None


def _fused_norm(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.norm(x, module.weight, module.variance_epsilon)


def _fused_gated(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernels.silu_product(module.gate_proj(x), module.up_proj(x)))
    return output


def _with_fused_rotary(forward: FunctionType, kernels: Kernels) -> FunctionType:
    """Return a copy of the function with another rotation. Its module does not change, as samplers in this process use
    it."""
    plain = forward.__globals__[ROTARY]

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        # The trial has seen whole heads, along the usual axes. Early versions of Liger rotate parts of heads wrongly.
        if args or options or cos.shape[-1] != query.shape[-1]:
            return plain(query, key, cos, sin, *args, **options)
        return kernels.rotate(query, key, cos, sin)

    names = {**forward.__globals__, ROTARY: rotate}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _try_norm(module: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Compare the fused norm with the module's own one on random states. Raises KernelDiffers if they differ."""
    # With a random weight: the module's may have no storage yet, and ones or zeros would hide differences.
    layer = copy.copy(module)
    layer._parameters = {"weight": _random_tensor(tuple(module.weight.shape), device, module.weight.dtype)}
    width = module.weight.shape[-1]
    for rows in (24, MANY_ROWS) if width <= NARROW else (24,):
        x = _random_tensor((1, rows, width), device, dtype)
        _check_equal(layer, partial(_fused_norm, kernels, layer), [x], [layer.weight], type(module).__name__)


def _try_gated(module: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Compare the fused product silu(gate) * up with the module's own one. Raises KernelDiffers if they differ.

    The layers around the kernel have only 16 inputs and outputs, but the kernel has the width of the network.
    """
    width = module.gate_proj.out_features
    layer = copy.copy(module)
    layer._modules = {"act_fn": module.act_fn}
    for name, sizes in {"gate_proj": (16, width), "up_proj": (16, width), "down_proj": (width, 16)}.items():
        layer._modules[name] = nn.Linear(*sizes, bias=False, device=device, dtype=dtype)
    weights = [layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight]
    x = _random_tensor((1, 24, 16), device, dtype)
    _check_equal(
        partial(type(module).forward, layer), partial(_fused_gated, kernels, layer), [x], weights, type(module).__name__
    )


def _try_rotary(
    rotation: Callable[..., Any], module: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype
) -> None:
    """Compare the fused rotation of queries and keys with `rotation`, the model's function, at the sizes of this
    attention. Raises KernelDiffers if they differ."""
    config = module.config
    groups = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    states = []
    for heads in (config.num_attention_heads, groups):
        states.append(_random_tensor((1, 24, heads, module.head_dim), device, dtype))
    angles = _random_tensor((1, 24, module.head_dim // 2), device, torch.float32).detach()
    cos, sin = (torch.cat([part, part], -1).to(dtype) for part in (angles.cos(), angles.sin()))

    def rotate_both(rotate: Callable[..., Any], query: Tensor, key: Tensor) -> Tensor:
        # Times 1: the kernel changes its input in place.
        rotated = rotate((query * 1).transpose(1, 2), (key * 1).transpose(1, 2), cos, sin)
        return torch.cat([part.flatten() for part in rotated])

    _check_equal(
        partial(rotate_both, rotation), partial(rotate_both, kernels.rotate), states, [], "the rotary embedding"
    )


def _random_tensor(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def _check_equal(
    plain: Callable[..., Tensor],
    fused: Callable[..., Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
    name: str,
) -> None:
    """Raise KernelDiffers if outputs or gradients of the two functions differ."""
    results: list[list[Tensor]] = []
    for function in (plain, fused):
        output = function(*inputs)
        factors = _random_tensor(tuple(output.shape), output.device, output.dtype).detach()
        gradients = torch.autograd.grad((output * factors).sum(), [*inputs, *weights])
        results.append([output.detach().float(), *(gradient.float() for gradient in gradients)])
    tolerance = TOLERANCE.get(inputs[0].dtype, 2e-2)
    for expected, computed in zip(*results, strict=True):
        if not (computed - expected).norm() <= tolerance * expected.norm():
            raise KernelDiffers(f"the kernel for {name} computes other values")
