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
RENAMES_ARGUMENTS = "transformers.utils.deprecation"
"""The module in transformers whose wrappers translate arguments that were renamed."""
SILU = ("SiLU", "SiLUActivation")
"""The names of this function in torch and transformers."""
NARROW = 256
MANY_ROWS = 2**15
"""Liger has another kernel for norms up to the width `NARROW` and from `MANY_ROWS` rows on: for queries and keys."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 5e-3}
"""The largest allowed difference of outputs and gradients from those of transformers, as a share of their norm."""


class KernelDiffers(Exception):
    """A fused kernel computes other values than the module that it would replace."""


def fuse_layers(network: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Let a network that is trained in `dtype` on a GPU compute by fused kernels.

    The kernels are first tried forward and backward on that GPU. If they are missing or fail the trial, the network
    stays as it is, and the log says why.
    """
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
    for module, fused_forward in replaced:
        module.forward = fused_forward


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
        rotary_forward = _rotary_forward(module)
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
        elif rotary_forward is not None:
            kind = (type(module), module.head_dim)
            if kind not in tried_kinds:
                _try_rotary(rotary_forward.__globals__[ROTARY], module, kernels, device, dtype)
            replacements.append((module, MethodType(_with_fused_rotary(rotary_forward, kernels), module)))
        else:
            continue  # no kernel for this module
        tried_kinds.add(kind)
    return replacements


def _is_norm(module: Any) -> bool:
    """Whether the module is an RMSNorm with the attributes that transformers gives it."""
    is_rms_norm = type(module).__name__.endswith("RMSNorm")
    return is_rms_norm and hasattr(module, "variance_epsilon") and hasattr(module, "weight")


def _is_gated(module: Any) -> bool:
    """Whether the module is a feed-forward layer of the form down(silu(gate(x)) * up(x))."""
    children = dict(module.named_children())
    if set(children) != {"gate_proj", "up_proj", "down_proj", "act_fn"}:
        return False
    return type(children["act_fn"]).__name__ in SILU


def _rotary_forward(module: Any) -> FunctionType | None:
    """Return the `forward` of an attention that rotates its queries and keys by `ROTARY`; None for other modules."""
    forward = type(module).forward
    # transformers 5.24 wraps `forward` in a function that only translates the older name of an argument.
    if getattr(forward, "__globals__", {}).get("__name__") == RENAMES_ARGUMENTS:
        forward = forward.__wrapped__
    if not isinstance(forward, FunctionType) or not hasattr(module, "head_dim"):
        return None
    calls_rotation = ROTARY in forward.__code__.co_names and ROTARY in forward.__globals__
    return forward if calls_rotation else None


def _fused_norm(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    return kernels.norm(x, module.weight, module.variance_epsilon)


def _fused_gated(kernels: Kernels, module: Any, x: Tensor) -> Tensor:
    output: Tensor = module.down_proj(kernels.silu_product(module.gate_proj(x), module.up_proj(x)))
    return output


def _with_fused_rotary(forward: FunctionType, kernels: Kernels) -> FunctionType:
    """Return a copy of an attention's `forward` that rotates by the fused kernel.

    The Python module that defines `forward` does not change, because samplers in this process use it.
    """
    original_rotation = forward.__globals__[ROTARY]

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *args: Any, **options: Any) -> Any:
        # The trial covers whole heads along the usual axes. Early versions of Liger rotate parts of heads wrongly.
        if args or options or cos.shape[-1] != query.shape[-1]:
            return original_rotation(query, key, cos, sin, *args, **options)
        return kernels.rotate(query, key, cos, sin)

    names = {**forward.__globals__, ROTARY: rotate}
    fused = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _try_norm(module: Any, kernels: Kernels, device: torch.device, dtype: torch.dtype) -> None:
    """Compare the fused norm with the module's own one on random states. Raises KernelDiffers if they differ."""
    # With a random weight: the module's may have no storage yet, and ones or zeros would hide differences.
    layer = copy.copy(module)
    layer._parameters = {"weight": _random_tensor(tuple(module.weight.shape), device, module.weight.dtype)}
    width = module.weight.shape[-1]
    row_counts = [24]
    if width <= NARROW:
        row_counts.append(MANY_ROWS)
    for rows in row_counts:
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
    query_heads = module.config.num_attention_heads
    key_heads = getattr(module.config, "num_key_value_heads", None) or query_heads
    query = _random_tensor((1, 24, query_heads, module.head_dim), device, dtype)
    key = _random_tensor((1, 24, key_heads, module.head_dim), device, dtype)
    # Both halves of a head are rotated by the same angles.
    angles = _random_tensor((1, 24, module.head_dim // 2), device, torch.float32).detach()
    angles = torch.cat([angles, angles], -1)
    cos = angles.cos().to(dtype)
    sin = angles.sin().to(dtype)

    def rotate_both(rotate: Callable[..., Any], query: Tensor, key: Tensor) -> Tensor:
        # Times 1 copies the input, because the kernel changes it in place.
        rotated_query, rotated_key = rotate((query * 1).transpose(1, 2), (key * 1).transpose(1, 2), cos, sin)
        return torch.cat([rotated_query.flatten(), rotated_key.flatten()])

    plain = partial(rotate_both, rotation)
    fused = partial(rotate_both, kernels.rotate)
    _check_equal(plain, fused, [query, key], [], "the rotary embedding")


def _random_tensor(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return the same normal random numbers in each call, with a gradient."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()


def _check_equal(
    plain: Callable[..., Tensor],
    fused: Callable[..., Tensor],
    inputs: list[Tensor],
    weights: list[Tensor],
    name: str,
) -> None:
    """Raise KernelDiffers if the two functions differ in their output for `inputs`, or in the gradients of `inputs` and
    `weights`. `name` is the name of the replaced module, for the error."""

    def output_and_gradients(function: Callable[..., Tensor]) -> list[Tensor]:
        output = function(*inputs)
        # Random factors: the gradients of a plain sum would hide differences.
        factors = _random_tensor(tuple(output.shape), output.device, output.dtype).detach()
        gradients = torch.autograd.grad((output * factors).sum(), [*inputs, *weights])
        return [output.detach().float(), *(gradient.float() for gradient in gradients)]

    tolerance = TOLERANCE.get(inputs[0].dtype, 2e-2)
    for expected, computed in zip(output_and_gradients(plain), output_and_gradients(fused), strict=True):
        # Written so that it also raises for NaN.
        if not (computed - expected).norm() <= tolerance * expected.norm():
            raise KernelDiffers(f"the kernel for {name} computes other values")
