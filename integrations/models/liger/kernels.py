"""The kernels, as functions with gradients."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class Norm(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Divide x [..., width] by its root mean square and multiply by weight [width], rounded as in Llama."""


class Rotate(Protocol):
    def __call__(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Apply rotary embeddings to query and key [rows, heads, tokens, width]. Both may be changed in place.

        cos and sin are [rows, tokens, rotary width].
        """


class SiluProduct(Protocol):
    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Compute silu(gate) * up, both [..., width]. The backward pass overwrites gate and up with gradients."""


class Kernels(NamedTuple):
    norm: Norm
    rotate: Rotate
    silu_product: SiluProduct


def load_kernels() -> Kernels:
    """Load the kernels. Raises ImportError if Liger-Kernel or Triton is not installed."""
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

    def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        weight_offset = 0.0  # added to the weight; only Gemma has one
        rounding = "llama"
        in_place = False  # gradients are not written over tensors that other operations may use
        row_mode = None  # Liger chooses its kernel itself
        # Functions of autograd take no keywords.
        output: Tensor = LigerRMSNormFunction.apply(x, weight, eps, weight_offset, rounding, in_place, row_mode)
        return output

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        rotated: tuple[Tensor, Tensor] = LigerRopeFunction.apply(query, key, cos, sin)
        return rotated

    def silu_product(gate: Tensor, up: Tensor) -> Tensor:
        output: Tensor = LigerSiLUMulFunction.apply(gate, up)
        return output

    return Kernels(norm, rotate, silu_product)
